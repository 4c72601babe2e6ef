"""How far the student is from its teacher at every position: the loss of SDRM, at the station **trainer** of the path.

All functions take final hidden states and the head that projects them to the vocabulary, position by position
(``[N, H]``: rollouts without their padding, one after the other), because the logits are what a step cannot hold: one
rollout of 8,192 tokens has 5 GB of them in fp32, per model. A step goes over the positions twice (arXiv 2609.38792):

1. `score`, without gradient, over all positions: both entropies, the divergence, the teacher's top-k tokens.
2. `weighted_divergence`, with gradient, over the positions that `selfdistill.selection` kept.

Both hold the logits of ``chunk`` positions at a time. On a CPU, the element-wise work on a chunk is done for a few
rows at a time, which stay in the cache from one operation to the next; on rows that have to come from memory anew for
each operation it takes five to ten times as long, about half the time of a step.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nlhf.errors import UserError
from selfdistill.head import Head, for_products, matmul, project, slices, work_dtype
from selfdistill.settings import Kind, Objective

CHUNK = 256
"""Positions whose logits are held at once: the matrix products hardly gain from more."""

TAIL_FLOOR = -math.expm1(-1e-7)
"""The least probability of the tail bucket: log P_tail = log(-expm1(min(logsumexp(ls[K]), -1e-7)))."""

# Numbers in the rows that are worked on together on a CPU: 2 MB of fp32 and as much again for the scratch.
_CACHED = 2**19
# Columns of a row that are folded onto each other before the search for the k largest; see `_top_k`.
_FOLD = 32


@dataclass(frozen=True)
class TopK:
    """The teacher's k likeliest tokens at each position; indexing takes positions.

    Attributes:
        ids: int64 ``[N, k]``, the likeliest first.
        log_probs: ``[N, k]``.
        log_tail: ``[N]``: log of the probability of all other tokens, at least `TAIL_FLOOR`.
    """

    ids: Tensor
    log_probs: Tensor
    log_tail: Tensor

    def __getitem__(self, positions: Any) -> "TopK":
        return TopK(self.ids[positions], self.log_probs[positions], self.log_tail[positions])

    @property
    def categories(self) -> Tensor:
        """Log-probabilities of the k tokens and the tail, ``[N, k + 1]``."""
        return torch.cat([self.log_probs, self.log_tail.unsqueeze(-1)], dim=-1)


@dataclass(frozen=True)
class FullTeacher:
    """A teacher that keeps every token: its hidden states ``[N, H]`` and head; indexing takes positions."""

    hidden: Tensor
    head: Head

    def __getitem__(self, positions: Any) -> "FullTeacher":
        return FullTeacher(self.hidden[positions], self.head)


@dataclass(frozen=True)
class Scores:
    """What the first pass knows of every position; nothing carries a gradient.

    Attributes:
        student_entropy: H_S ``[N]``, nats, over the vocabulary.
        teacher_entropy: H_T ``[N]``.
        divergence: ``[N]``, of the objective.
        token_log_probs: ``[N]``, the student's for the tokens sampled; None when no tokens were given.
        teacher: What the second pass compares with, for all N positions.
    """

    student_entropy: Tensor
    teacher_entropy: Tensor
    divergence: Tensor
    token_log_probs: Tensor | None
    teacher: TopK | FullTeacher

    @property
    def entropy_gap(self) -> Tensor:
        """The entropy gap dH = H_S - H_T ``[N]``: below zero where feedback makes the teacher less certain."""
        return self.student_entropy - self.teacher_entropy


def divergence(log_p: Tensor, log_q: Tensor, kind: Kind = "reverse", beta: float = 0.5) -> Tensor:
    """The divergence of two sets of distributions, see `Objective`; ``[..., C], [..., C] -> [...]``.

    Args:
        log_p: The student's log-probabilities over the C categories.
        log_q: The teacher's.
        kind: Of the divergence.
        beta: The teacher's share of the mixture; jsd only.
    """
    if kind == "reverse":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "forward":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    r = log_p - log_q
    # log(m / q), in a form that neither overflows nor loses the small differences that logarithms of p and q have.
    above = r > 0
    s = torch.where(above, r, 0.0)
    s = s + torch.log1p(torch.where(above, beta, 1 - beta) * torch.expm1(torch.where(above, -r, r)))
    return ((1 - beta) * log_p.exp() * (r - s) - beta * log_q.exp() * s).sum(-1)


def check_vocabularies(student: Head, teacher: Head) -> None:
    """Raise `UserError` unless both heads are over equally many tokens."""
    own, other = len(student.weight), len(teacher.weight)
    if own != other:
        raise UserError(f"student and teacher must share a vocabulary: {own} and {other} tokens")


@torch.no_grad()
def score(
    student_hidden: Tensor,
    student: Head,
    teacher_hidden: Tensor,
    teacher: Head,
    tokens: Tensor | None = None,
    objective: Objective | None = None,
    chunk: int = CHUNK,
) -> Scores:
    """The first pass: entropies, divergence and the teacher's top-k tokens of every position, without gradient.

    Equal hidden states and heads (a teacher without feedback) give a divergence and an entropy gap of exactly zero.

    Args:
        student_hidden: ``[N, H]``.
        student: The student's head.
        teacher_hidden: ``[N, H']``, at the same sampled tokens after the teacher's prompt.
        teacher: The teacher's head, over the same vocabulary.
        tokens: The tokens sampled, int64 ``[N]``, when their log-probabilities are wanted.
        objective: The divergence; that of SDRM by default.
        chunk: Positions whose logits are held at once: of one model, for ``support="full"`` of both.

    Raises:
        UserError: the vocabularies differ.
    """
    objective = objective or Objective()
    check_vocabularies(student, teacher)
    vocab = student.weight.shape[0]
    student, teacher = for_products(student), for_products(teacher)
    full = objective.support == "full"
    n, k = len(student_hidden), min(objective.top_k, vocab)
    new = {"dtype": work_dtype(student_hidden), "device": student_hidden.device}
    h_s, h_t, d, log_tail = (torch.empty(n, **new) for _ in range(4))
    token_log_probs = None if tokens is None else torch.empty(n, **new)
    top = TopK(torch.empty(n, k, dtype=torch.long, device=new["device"]), torch.empty(n, k, **new), log_tail)

    scratch, buffer = _scratch(student_hidden, student, chunk), _buffer(student_hidden, student, chunk)
    teacher_buffer = torch.empty_like(buffer) if full else buffer
    for part in slices(n, chunk):
        here = top[part]  # views: what is written into them is kept
        # The teacher first, for the student is asked about the teacher's tokens. With the top-k support the teacher's
        # logits are done with by then, and the student's take their place.
        z_t = project(teacher_hidden[part], teacher, teacher_buffer)
        totals = []
        for group in slices(len(z_t), len(scratch)):
            teacher.finish_(z_t[group])
            theirs = _summarise(z_t[group], _top_k(z_t[group], k), scratch)
            h_t[part][group] = theirs.entropy
            here.ids[group], here.log_probs[group] = theirs.top.ids, theirs.top.log_probs
            here.log_tail[group] = theirs.top.log_tail
            totals.append(theirs.log_total)
        z_s = project(student_hidden[part], student, buffer)
        for group, total in zip(slices(len(z_s), len(scratch)), totals, strict=True):
            student.finish_(z_s[group])
            own = _summarise(z_s[group], here.ids[group], scratch)
            h_s[part][group] = own.entropy
            if token_log_probs is not None:
                shifted = z_s[group].gather(-1, tokens[part][group].unsqueeze(-1)).squeeze(-1)
                token_log_probs[part][group] = shifted - own.log_total
            if full:  # shifted logits are one subtraction away from log-probabilities
                log_p = z_s[group].sub_(own.log_total.unsqueeze(-1))
                log_q = z_t[group].sub_(total.unsqueeze(-1))
            else:
                log_p, log_q = own.top.categories, here[group].categories
            d[part][group] = divergence(log_p, log_q, objective.kind, objective.beta)
    comparison = FullTeacher(teacher_hidden, teacher) if full else top
    return Scores(h_s, h_t, d, token_log_probs, comparison)


def weighted_divergence(
    hidden: Tensor,
    head: Head,
    teacher: TopK | FullTeacher,
    weights: Tensor,
    objective: Objective | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The second pass: sum_n weights_n D_n with its gradient, at the positions given and no others.

    The gradient with respect to hidden states, weight and bias is computed together with the value and only scaled in
    the backward pass: nothing is projected twice and no logits wait for the backward pass. This is why the weights
    (normaliser included, see `selfdistill.selection.loss_weights`) come in here. The head's gradient is the one tensor
    of its size. Without positions the loss is a zero that is attached to the graph.

    Args:
        hidden: The student's ``[N, H]``, of the positions kept.
        head: The student's head.
        teacher: `Scores.teacher` at the same positions; it gets no gradient.
        weights: ``[N]``; get no gradient.
        objective: As in `score`.
        chunk: Positions whose logits are held at once: of one model, for a `FullTeacher` of both.

    Returns:
        The scalar, and D ``[N]`` without gradient.
    """
    objective = objective or Objective()
    if isinstance(teacher, FullTeacher) != (objective.support == "full"):
        raise TypeError(f"support {objective.support!r} cannot be compared with a {type(teacher).__name__}")
    inputs = (hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():  # a Function cannot tell, and would compute gradients that nobody asked for
        inputs = tuple(None if t is None else t.detach() for t in inputs)
    return _WeightedDivergence.apply(*inputs, head, teacher, weights.detach(), objective, chunk)


class _WeightedDivergence(torch.autograd.Function):
    """See `weighted_divergence`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, teacher, weights, objective, chunk):
        head = for_products(head)
        n, work = len(hidden), work_dtype(hidden)
        values, weights = hidden.new_empty(n, dtype=work), weights.to(work)
        wanted = ctx.needs_input_grad[:3]
        # With positions, the first product overwrites what is there: no pass over [V, H] is spent on zeros.
        allocate = torch.empty_like if n else torch.zeros_like
        grads = [allocate(t, dtype=work) if w else None for t, w in zip((hidden, weight, bias), wanted, strict=True)]
        grad_hidden, grad_weight, grad_bias = grads
        scratch, buffer = _scratch(hidden, head, chunk), _buffer(hidden, head, chunk)
        full = isinstance(teacher, FullTeacher)
        teacher_head = for_products(teacher.head) if full else None
        teacher_buffer = torch.empty_like(buffer) if full else None
        for part in slices(n, chunk):
            z = project(hidden[part], head, buffer)
            compared = teacher[part]
            if full:
                compared = project(compared.hidden, teacher_head, teacher_buffer)
                teacher_head.finish_(compared)
            for group in slices(len(z), len(scratch)):
                arguments = z[group], compared[group], weights[part][group], head
                if objective.kind == "reverse" and not full:
                    values[part][group] = _reverse_top_k_(*arguments, scratch)
                else:
                    values[part][group] = _by_autograd_(*arguments, objective)
            # z is now the gradient with respect to h W^T + b.
            slope = z.to(head.weight.dtype) if z.is_cuda else z
            if grad_hidden is not None:
                matmul(slope, head.weight, grad_hidden[part])
            if grad_weight is not None:
                matmul(slope.t(), hidden[part], grad_weight, accumulate=part.start > 0)
            if grad_bias is not None:
                torch.add(grad_bias if part.start else 0, z.sum(0), out=grad_bias)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        return (weights * values).sum(), values

    @staticmethod
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * 8
        grads = ctx.saved_tensors
        # In place: [V, H] is not held twice. (A second backward through the same graph is refused by autograd, which
        # sees that a saved tensor has changed.) The comparison spares a CPU the pass, a GPU would wait for its result.
        if grad_loss.device.type != "cpu" or grad_loss != 1:
            grads = [None if g is None else g.mul_(grad_loss) for g in grads]
        return (*(None if g is None else g.to(t) for g, t in zip(grads, ctx.dtypes, strict=True)), *(None,) * 5)


def _reverse_top_k_(z: Tensor, teacher: TopK, weights: Tensor, head: Head, scratch: Tensor) -> Tensor:
    """Reverse KL over the teacher's top-k and the tail, ``[g]``; z ``[g, V]`` becomes its gradient times the weights.

    For token j in category b(j): dD/dz_j = p_j (r_b(j) - sum_b P_b r_b), where r_b = log(P_b / Q_b), so that the sum is
    D. A tail at its floor is a constant of D; r = -1 there makes the formula that of the k other categories alone.
    """
    head.finish_(z)
    slope = None
    if head.softcap:  # tanh' = 1 - tanh^2, while z still holds the capped logits
        slope = torch.mul(z, head.temperature / head.softcap, out=scratch[: len(z)]).square_().neg_().add_(1)
    ids = teacher.ids
    z.sub_(z.amax(-1, keepdim=True))
    top = z.gather(-1, ids)
    z.exp_()
    top_mass = z.gather(-1, ids)
    # The tail is summed, not one minus the rest: nothing cancels when it is small.
    tail_mass = z.scatter_(-1, ids, 0.0).sum(-1, keepdim=True)
    total = tail_mass + top_mass.sum(-1, keepdim=True)
    p, p_tail = top_mass / total, tail_mass / total
    r = top - total.log() - teacher.log_probs
    r_tail = p_tail.clamp(min=TAIL_FLOOR).log() - teacher.log_tail.unsqueeze(-1)
    d = (p * r).sum(-1, keepdim=True) + p_tail.clamp(min=TAIL_FLOOR) * r_tail
    r_tail = torch.where(p_tail > TAIL_FLOOR, r_tail, -1.0)
    mean = (p * r).sum(-1, keepdim=True) + p_tail * r_tail
    factor = weights.unsqueeze(-1) * (head.scale / head.temperature)
    z.mul_(factor * (r_tail - mean) / total)
    z.scatter_(-1, ids, factor * p * (r - mean))
    if slope is not None:
        z.mul_(slope)
    return d.squeeze(-1)


def _by_autograd_(z: Tensor, teacher: TopK | Tensor, weights: Tensor, head: Head, objective: Objective) -> Tensor:
    """Any divergence, ``[g]``, against top-k tokens or logits ``[g, V]``; z becomes its gradient times the weights."""
    with torch.enable_grad():
        raw = z.detach().requires_grad_()
        log_p = head.finish(raw).log_softmax(-1)
        if isinstance(teacher, TopK):
            log_p, log_q = _categories(log_p, teacher.ids), teacher.categories
        else:
            log_q = teacher.log_softmax(-1)
        d = divergence(log_p, log_q, objective.kind, objective.beta)
        (grad,) = torch.autograd.grad(d, raw, weights)
    z.copy_(grad)
    return d.detach()


def _categories(log_p: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens named and of all others together; ``[g, V], [g, k] -> [g, k + 1]``."""
    tail = log_p.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp(min=TAIL_FLOOR).log()
    return torch.cat([log_p.gather(-1, ids), tail], dim=-1)


@dataclass(frozen=True)
class _Summary:
    """Of g rows of logits: log of the sum of exponentials ``[g]`` (of shifted logits), entropy ``[g]``, and top-k."""

    log_total: Tensor
    entropy: Tensor
    top: TopK


def _summarise(z: Tensor, ids: Tensor, scratch: Tensor) -> _Summary:
    """Entropy, and the log-probabilities of the tokens named and of the tail; z is shifted to a maximum of zero.

    Four passes over the vocabulary: maximum, shift, exponential, and one product for sum_j z_j exp(z_j); the sum of
    exponentials is that of the tail, which the top-k support needs anyway, and the tokens named.
    """
    z.sub_(z.amax(-1, keepdim=True))
    top = z.gather(-1, ids)
    e = torch.exp(z, out=scratch[: len(z)])
    weighted = torch.linalg.vecdot(e, z)
    top_mass = e.gather(-1, ids).sum(-1)
    tail_mass = e.scatter_(-1, ids, 0.0).sum(-1)
    total = tail_mass + top_mass
    log_total = total.log()
    log_tail = (tail_mass / total).clamp(min=TAIL_FLOOR).log()
    return _Summary(log_total, log_total - weighted / total, TopK(ids, top - log_total.unsqueeze(-1), log_tail))


def _top_k(z: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row, largest first; ``[g, V] -> [g, k]``.

    Columns that lie V / 32 apart are folded onto each other by their maximum, which is one fast pass. Each of the k
    largest lies in one of the k folds with the largest maxima, so that only these are searched: an eighth of the time
    of a search through the row.
    """
    width = z.shape[-1] // _FOLD
    if width < 4 * k:
        return z.topk(k).indices
    maxima = z[:, : width * _FOLD].unflatten(-1, (_FOLD, width)).amax(1)
    folds = maxima.topk(k, sorted=False).indices
    starts = torch.arange(_FOLD, device=z.device).unsqueeze(-1) * width
    candidates = (folds.unsqueeze(1) + starts).flatten(1)
    rest = torch.arange(width * _FOLD, z.shape[-1], device=z.device).expand(len(z), -1)
    candidates = torch.cat([candidates, rest], dim=-1)
    return candidates.gather(-1, z.gather(-1, candidates).topk(k).indices)


def _buffer(hidden: Tensor, head: Head, chunk: int) -> Tensor:
    """Room for the logits of a chunk, ``[chunk, V]``: allocated once and used for chunk after chunk."""
    shape = (min(chunk, len(hidden)), head.weight.shape[0])
    return torch.empty(shape, dtype=work_dtype(hidden), device=hidden.device)


def _scratch(hidden: Tensor, head: Head, chunk: int) -> Tensor:
    """Room for the rows that are worked on together, ``[g, V]``: as many as a CPU caches, on other devices all."""
    vocab = head.weight.shape[0]
    rows = max(1, min(chunk, len(hidden)))
    if hidden.device.type == "cpu":
        rows = min(rows, max(1, _CACHED // vocab))
    return torch.empty((rows, vocab), dtype=work_dtype(hidden), device=hidden.device)
