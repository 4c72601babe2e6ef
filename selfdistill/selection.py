"""Which positions of a rollout the loss is taken at, and what each counts: between the two passes of the **trainer**.

mask70 of arXiv 2609.38792 drops, within each rollout, the 70 % of positions where the student is most uncertain beyond
its teacher, and learns from the rest: those where the feedback makes the teacher less certain than the student.

The choice for a rollout depends on that rollout alone, never on padding or on its neighbours in the batch.
"""

import zlib
from fractions import Fraction

import torch
from torch import Tensor

from nlhf.errors import UserError, nearest
from selfdistill.settings import NORMALIZERS, SELECTORS, Normalizer, Selector, masked_fraction


def kept_count(length: int | Tensor, rho: float | str | Fraction) -> int | Tensor:
    """N - floor(rho N) in integers: how many of N positions are kept; a number, or an integer tensor of any shape.

    (In floating point, ``int(0.7 * 90)`` is 62.) At least one of N >= 1 positions is kept.
    """
    exact = masked_fraction(rho)
    return length - length * exact.numerator // exact.denominator


def keep_lowest(scores: Tensor, mask: Tensor, rho: float | str | Fraction) -> Tensor:
    """Keep the N - floor(rho N) positions with the lowest scores in each row; of equal ones the earlier.

    Args:
        scores: ``[B, T]``; anything, NaN included, where the mask is false.
        mask: bool ``[B, T]``, true at the N positions of the response.
        rho: The fraction masked.

    Returns:
        bool ``[B, T]``, true at the positions kept, never at padding.
    """
    mask = mask.bool()
    # By score, then by padding, which a stable sort leaves in the order of the scores: no score, be it infinite or NaN,
    # puts padding before a position of the response.
    order = scores.argsort(dim=-1, stable=True)
    padding = (~mask).gather(-1, order)
    order = order.gather(-1, padding.int().argsort(dim=-1, stable=True))
    ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    chosen = ranks < kept_count(mask.sum(-1, keepdim=True), rho)
    return torch.zeros_like(mask).scatter(-1, order, chosen)


def select(
    selector: Selector,
    rho: float | str | Fraction,
    mask: Tensor,
    *,
    student_entropy: Tensor | None = None,
    teacher_entropy: Tensor | None = None,
    divergence: Tensor | None = None,
    tokens: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """The positions to train on, bool ``[B, T]``.

    - ``low_dh`` keeps the lowest H_S - H_T, ``high_dh`` the highest, ``abs_dh`` the largest absolute value.
    - ``student_entropy`` and ``teacher_entropy`` keep the highest entropy, ``kl`` the largest divergence.
    - ``random`` draws by the seed and the tokens of the rollout.

    Args:
        selector: See above.
        rho: The fraction of each rollout masked; 0 keeps all.
        mask: bool ``[B, T]``, true at the positions of the response.
        student_entropy: H_S ``[B, T]``.
        teacher_entropy: H_T ``[B, T]``.
        divergence: ``[B, T]``.
        tokens: The tokens sampled, int ``[B, T]``; random only.
        seed: Of random; to draw anew at each step, put the step into it.

    Raises:
        UserError: the selector is not known, or rho is out of range.
        TypeError: a tensor that the selector reads was not given.
    """
    if selector not in SELECTORS:
        raise UserError(f"unknown selector {selector!r}; known: {', '.join(SELECTORS)}.{nearest(selector, SELECTORS)}")
    if selector == "random":
        scores = random_scores(_given("tokens", tokens, selector), mask, seed)
    elif selector == "kl":
        scores = -_given("divergence", divergence, selector)
    elif selector == "student_entropy":
        scores = -_given("student_entropy", student_entropy, selector)
    elif selector == "teacher_entropy":
        scores = -_given("teacher_entropy", teacher_entropy, selector)
    else:
        h_s = _given("student_entropy", student_entropy, selector)
        gap = h_s - _given("teacher_entropy", teacher_entropy, selector)
        scores = {"low_dh": gap, "high_dh": -gap, "abs_dh": -gap.abs()}[selector]
    return keep_lowest(scores, mask, rho)


def _given(name: str, value: Tensor | None, selector: str) -> Tensor:
    if value is None:
        raise TypeError(f"selector {selector!r} needs {name}")
    return value


def random_scores(tokens: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Uniform numbers ``[B, T]`` that hang on the seed and the tokens of the row alone, wherever the padding is."""
    scores = torch.zeros(mask.shape)
    mask = mask.bool().cpu()
    for row, (ids, valid) in enumerate(zip(tokens.cpu(), mask, strict=True)):
        ids = ids[valid]
        key = zlib.crc32(ids.long().numpy().tobytes(), zlib.crc32(str(seed).encode()))
        scores[row, valid] = torch.rand(len(ids), generator=torch.Generator().manual_seed(key))
    return scores.to(tokens.device)


def to_grid(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Values of the positions, ``[N]``, back in their rows, ``[B, T]``; the inverse of ``grid[mask]``."""
    grid = torch.full(mask.shape, fill, dtype=values.dtype, device=values.device)
    return grid.masked_scatter(mask.bool(), values)


def importance_ratio(log_probs: Tensor, old_log_probs: Tensor, clip: float = 2.0) -> Tensor:
    """min(pi / pi_old, clip), without gradient: exactly 1 on the present policy's own rollouts, or where it is NaN.

    (An engine gives NaN for a token whose probability it does not know.)
    """
    return (log_probs - old_log_probs).detach().nan_to_num(nan=0.0).clamp(-20.0, 20.0).exp().clamp(max=clip)


def loss_total(
    lengths: Tensor, feedback: Tensor, rho: float | str | Fraction, normalizer: Normalizer = "kept_tokens"
) -> Tensor:
    """What the summed loss is divided by, known from the lengths before any position is chosen.

    Sum it over micro-batches and processes, then hand it to `loss_weights`: the loss of a batch then does not depend on
    how the batch was cut up.

    Args:
        lengths: N of each rollout, int ``[B]``.
        feedback: Truth per rollout whether it has feedback, ``[B]``; one without gives no loss.
        rho: The fraction masked.
        normalizer: ``kept_tokens`` counts positions kept, ``per_rollout`` rollouts with any (Eq. 4 of the paper).

    Raises:
        UserError: the normaliser is not known.
    """
    kept = kept_count(lengths, rho) * feedback.bool()
    if normalizer == "kept_tokens":
        return kept.sum()
    if normalizer == "per_rollout":
        return (kept > 0).sum()
    raise UserError(f"unknown normalizer {normalizer!r}; known: {', '.join(NORMALIZERS)}")


def loss_weights(
    keep: Tensor,
    feedback: Tensor,
    total: int | Tensor,
    normalizer: Normalizer = "kept_tokens",
    ratio: Tensor | None = None,
) -> Tensor:
    """What each position counts in the loss, ``[B, T]``: zero where it is not kept or its rollout has no feedback.

    Args:
        keep: bool ``[B, T]``, of `select`.
        feedback: Truth per rollout whether it has feedback, ``[B]``.
        total: The sum of `loss_total` over the whole batch; 0 gives weights of zero.
        normalizer: ``kept_tokens``: every kept position counts the same; ``per_rollout``: every rollout does.
        ratio: `importance_ratio` ``[B, T]``, or None for 1.
    """
    if normalizer not in NORMALIZERS:
        raise UserError(f"unknown normalizer {normalizer!r}; known: {', '.join(NORMALIZERS)}")
    counted = keep & feedback.bool().unsqueeze(-1)
    weights = counted.float() / torch.as_tensor(total, device=keep.device).clamp(min=1)
    if normalizer == "per_rollout":
        weights = weights / keep.sum(-1, keepdim=True).clamp(min=1)
    return weights if ratio is None else torch.where(counted, weights * ratio, 0.0)
