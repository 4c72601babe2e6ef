"""Every figure is compared with one taken from full logits in float64, written as the formulas of the paper are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nlhf.errors import UserError
from selfdistill.divergence import (
    TAIL_FLOOR,
    FullTeacher,
    Objective,
    divergence,
    score,
    weighted_divergence,
)
from selfdistill.head import Head
from selfdistill.selection import loss_total, loss_weights, select, to_grid

OBJECTIVES = [
    Objective(kind, support, top_k=12, beta=0.3)
    for kind in ("reverse", "forward", "jsd")
    for support in ("teacher_topk", "full")
]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.kind}-{o.support}")


def make_head(vocab, width, dtype=torch.float64, softcap=None, bias=True, scale=1.3, temperature=0.8):
    weight = torch.randn(vocab, width, dtype=dtype).requires_grad_()
    return Head(weight, torch.randn(vocab, dtype=dtype).requires_grad_() if bias else None, scale, softcap, temperature)


def case(n=40, vocab=1500, width=6, seed=0, dtype=torch.float64, **head_options):
    """Hidden states of a student and of a teacher that is near it, and their heads, all different."""
    torch.manual_seed(seed)
    student, teacher = make_head(vocab, width, dtype, **head_options), make_head(vocab, width, dtype, **head_options)
    with torch.no_grad():
        teacher.weight.copy_(student.weight + 0.1 * torch.randn_like(student.weight))
    hidden = torch.randn(n, width, dtype=dtype).requires_grad_()
    return hidden, student, hidden.detach() + 0.2 * torch.randn_like(hidden), teacher


def inputs_of(hidden, head):
    return [t for t in (hidden, head.weight, head.bias) if t is not None]


def full_logits(hidden, head):
    z = hidden @ head.weight.t() + (0 if head.bias is None else head.bias)
    z = z * head.scale
    return (head.softcap * torch.tanh(z / head.softcap) if head.softcap else z) / head.temperature


def with_tail(log_probs):
    """Log-probabilities of k tokens -> of k tokens and the rest, by the formula of the paper."""
    inside = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(inside))], -1)


def reference(hidden, student, teacher_hidden, teacher, objective):
    """D ``[N]``, attached, and both entropies, from full logits."""
    ls = full_logits(hidden, student).log_softmax(-1)
    lt = full_logits(teacher_hidden, teacher).detach().log_softmax(-1)
    h_s, h_t = -(ls.exp() * ls).sum(-1), -(lt.exp() * lt).sum(-1)
    if objective.support == "teacher_topk":
        ids = lt.topk(min(objective.top_k, lt.shape[-1])).indices
        ls, lt = with_tail(ls.gather(-1, ids)), with_tail(lt.gather(-1, ids))
    p, q = ls.exp(), lt.exp()
    if objective.kind == "reverse":
        d = (p * (ls - lt)).sum(-1)
    elif objective.kind == "forward":
        d = (q * (lt - ls)).sum(-1)
    else:
        m = objective.beta * q + (1 - objective.beta) * p
        d = objective.beta * (q * (lt - m.log())).sum(-1) + (1 - objective.beta) * (p * (ls - m.log())).sum(-1)
    return d, h_s.detach(), h_t


def double(hidden, head):
    """The same numbers in float64, as new leaves."""
    weight, bias = (None if t is None else t.detach().double().requires_grad_() for t in (head.weight, head.bias))
    return hidden.detach().double().requires_grad_(), Head(weight, bias, head.scale, head.softcap, head.temperature)


def relative(value, expected):
    return ((value - expected).norm() / expected.norm()).item()


@every_objective
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 8.0}, {"bias": False, "scale": 1.0, "temperature": 1.0}],
    ids=["scale_bias_temperature", "softcap", "plain"],
)
def test_loss_and_gradients_equal_full_logits(objective, dtype, options):
    hidden, student, teacher_hidden, teacher = case(dtype=dtype, **options)
    weights = torch.rand(len(hidden), dtype=dtype)
    scores = score(hidden, student, teacher_hidden, teacher, objective=objective, chunk=16)
    loss, d = weighted_divergence(hidden, student, scores.teacher, weights, objective, chunk=16)
    grads = torch.autograd.grad(loss, inputs_of(hidden, student))

    exact_hidden, exact_student = double(hidden, student)
    expected, h_s, h_t = reference(exact_hidden, exact_student, *double(teacher_hidden, teacher), objective)
    expected_loss = (weights.double() * expected).sum()
    expected_grads = torch.autograd.grad(expected_loss, inputs_of(exact_hidden, exact_student))

    # In fp32 the logits themselves, up to 30 here, are rounded by a millionth before anything is computed from them.
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert relative(loss, expected_loss) < tolerance
    for value, exact in ((d, expected), (scores.divergence, expected), (scores.student_entropy, h_s)):
        assert relative(value, exact) < tolerance
    assert relative(scores.teacher_entropy, h_t) < tolerance
    for value, exact in zip(grads, expected_grads, strict=True):
        assert relative(value, exact) < tolerance


@every_objective
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_masked_rollouts_of_any_length_equal_full_logits(objective, data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    rho, seed, chunk = (
        data.draw(st.sampled_from([0, 0.3, 0.7])),
        data.draw(st.integers(0, 99)),
        data.draw(st.integers(1, 9)),
    )
    normalizer = data.draw(st.sampled_from(["kept_tokens", "per_rollout"]))
    width = max(lengths, default=0) + 2
    mask = torch.arange(width).expand(len(lengths), -1) < torch.tensor(lengths)[:, None]
    feedback = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    hidden, student, teacher_hidden, teacher = case(n=len(lengths) * width, vocab=60, seed=seed)
    grid = mask.flatten()

    scores = score(hidden[grid], student, teacher_hidden[grid], teacher, objective=objective, chunk=chunk)
    h_s, h_t = to_grid(scores.student_entropy, mask), to_grid(scores.teacher_entropy, mask)
    keep = select("low_dh", rho, mask, student_entropy=h_s, teacher_entropy=h_t)
    weights = loss_weights(keep, feedback, loss_total(mask.sum(-1), feedback, rho, normalizer), normalizer)
    loss, _ = weighted_divergence(
        hidden[keep.flatten()], student, scores.teacher[keep[mask]], weights[keep], objective, chunk=chunk
    )
    grads = torch.autograd.grad(loss, inputs_of(hidden, student))

    d, _, _ = reference(hidden, student, teacher_hidden, teacher, objective)
    rows = [
        row[k].mean() if normalizer == "per_rollout" else row[k]
        for row, k, f in zip(d.view(mask.shape), keep, feedback, strict=True)
        if f and k.any()
    ]
    expected = torch.cat([r.flatten() for r in rows]).mean() if rows else d.sum() * 0
    expected_grads = torch.autograd.grad(expected, inputs_of(hidden, student))
    for value, exact in zip((loss, *grads), (expected, *expected_grads), strict=True):
        assert (value - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("softcap", [None, 8.0], ids=["plain", "softcap"])
def test_closed_form_gradient_passes_finite_differences(softcap):
    hidden, student, teacher_hidden, teacher = case(n=3, vocab=25, width=3, softcap=softcap)
    objective = Objective(top_k=5)
    top = score(hidden, student, teacher_hidden, teacher, objective=objective).teacher

    def loss(hidden, weight, bias):
        head = Head(weight, bias, student.scale, student.softcap, student.temperature)
        return weighted_divergence(hidden, head, top, torch.tensor([0.5, 2.0, 0.0]), objective, chunk=2)[0]

    assert torch.autograd.gradcheck(loss, inputs_of(hidden, student), eps=1e-6, atol=1e-8, rtol=1e-5)


@pytest.mark.parametrize("vocab", [30, 1600], ids=["small_vocabulary", "folded_search"])
def test_hand_computed_divergence(vocab):
    """Two tokens of three: p = (1/2, 1/4 | 1/4), q = (1/4, 1/2 | 1/4).

    D = 1/2 ln 2 + 1/4 ln(1/2) + 0 = ln(2)/4; the gradient is p_j (r_b - D) with r = (ln 2, -ln 2, 0).
    """
    others = vocab - 2
    p = torch.tensor([1 / 2, 1 / 4] + [1 / 4 / others] * others, dtype=torch.float64)
    q = torch.tensor([1 / 4, 1 / 2] + [1 / 4 / others] * others, dtype=torch.float64)
    student, teacher = Head(p.log()[:, None].clone().requires_grad_()), Head(q.log()[:, None].clone())
    one = torch.ones(1, 1, dtype=torch.float64)
    objective = Objective(top_k=2)
    scores = score(one, student, one, teacher, torch.tensor([1]), objective)
    assert scores.teacher.ids.tolist() == [[1, 0]]
    assert scores.divergence.item() == pytest.approx(math.log(2) / 4)
    assert scores.token_log_probs.item() == pytest.approx(math.log(1 / 4))
    assert scores.student_entropy.item() == pytest.approx(math.log(2) / 2 + math.log(4) / 4 + math.log(4 * others) / 4)
    loss, _ = weighted_divergence(one, student, scores.teacher, torch.ones(1), objective)
    loss.backward()
    d = math.log(2) / 4
    expected = p * torch.tensor([math.log(2) - d, -math.log(2) - d] + [-d] * others, dtype=torch.float64)
    torch.testing.assert_close(student.weight.grad[:, 0], expected)


def test_teacher_without_feedback_is_the_student_exactly():
    hidden, student, _, _ = case(dtype=torch.float32)
    for objective in OBJECTIVES:
        scores = score(hidden, student, hidden.detach().clone(), student, objective=objective, chunk=7)
        assert scores.divergence.tolist() == [0.0] * len(hidden)
        assert scores.entropy_gap.tolist() == [0.0] * len(hidden)


def test_top_k_and_tail_never_exceeds_the_vocabulary_and_tends_to_it():
    hidden, student, teacher_hidden, teacher = case(vocab=400)
    full = score(hidden, student, teacher_hidden, teacher, objective=Objective(support="full")).divergence
    last = torch.zeros_like(full)
    for k in (1, 5, 50, 200, 399, 400, 1000):
        d = score(hidden, student, teacher_hidden, teacher, objective=Objective(top_k=k)).divergence
        assert (d >= -1e-12).all()
        assert (d <= full + 1e-6).all()
        assert (d >= last - 1e-6).all()
        last = d
    torch.testing.assert_close(last, full, rtol=1e-5, atol=1e-6)


def test_truncation_without_the_tail_can_be_negative():
    """What the tail is for: over the top token alone, p = 0.1 against q = 0.9 gives 0.1 ln(1/9) < 0."""
    p, q = torch.tensor([0.1, 0.9]).log(), torch.tensor([0.9, 0.1]).log()
    assert divergence(p[:1], q[:1]) < 0
    assert divergence(p, q) > 0


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_certain_models_stay_finite(kind):
    """Tails below the floor, on the student's side, the teacher's, or both."""
    vocab = 50
    weight = torch.zeros(vocab, 3)
    weight[0, 0], weight[1, 1], weight[2, 0] = 60.0, 60.0, 60.0
    student = Head(weight.requires_grad_())
    objective = Objective(kind, top_k=2)
    states = torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1, 2]].requires_grad_()
    others = torch.eye(3)[[0, 0, 0, 1, 1, 1, 2, 2, 2]]
    scores = score(states, student, others, student, objective=objective)
    loss, d = weighted_divergence(states, student, scores.teacher, torch.ones(9), objective)
    loss.backward()
    assert d.isfinite().all()
    assert (d > -1e-6).all()
    assert states.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    expected, _, _ = reference(*double(states, student), *double(others, student), objective)
    torch.testing.assert_close(d.double(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_tail_is_summed_and_not_one_minus_the_rest():
    """In fp32, 1 - (1 - 3e-7) is 2.98e-7 or 3.58e-7; the sum is right to the last digits."""
    tail = 3e-7
    p = torch.tensor([1 - tail, tail / 2, tail / 2], dtype=torch.float64)
    head = Head(p.log().float()[:, None])
    top = score(torch.ones(1, 1), head, torch.ones(1, 1), head, objective=Objective(top_k=1)).teacher
    assert top.log_tail.item() == pytest.approx(math.log(tail), rel=1e-6)
    assert math.log(TAIL_FLOOR) == pytest.approx(math.log(1e-7))


def test_no_position_gives_a_zero_attached_to_the_graph():
    hidden, student, teacher_hidden, teacher = case(n=5)
    for objective in OBJECTIVES:
        scores = score(hidden, student, teacher_hidden, teacher, objective=objective)
        for rows in (slice(0, 0), slice(0, 5)):  # nothing kept; everything kept, of rollouts without feedback
            weights = torch.zeros(rows.stop, dtype=torch.float64)
            loss, _ = weighted_divergence(hidden[rows], student, scores.teacher[rows], weights, objective)
            grads = torch.autograd.grad(loss, inputs_of(hidden, student))
            assert loss.item() == 0
            assert all((g == 0).all() for g in grads)
        nothing = score(hidden[:0], student, teacher_hidden[:0], teacher, objective=objective)
        assert nothing.entropy_gap.shape == nothing.divergence.shape == (0,)


@every_objective
def test_gradient_reaches_the_student_alone(objective):
    hidden, student, teacher_hidden, teacher = case()
    teacher_hidden.requires_grad_()
    scores = score(hidden, student, teacher_hidden, teacher, torch.zeros(40, dtype=torch.long), objective)
    assert not any(t.requires_grad for t in (scores.divergence, scores.entropy_gap, scores.token_log_probs))
    weights = torch.rand(40, dtype=torch.float64).requires_grad_()
    weighted_divergence(hidden, student, scores.teacher, weights, objective)[0].backward()
    assert all(t.grad is not None for t in inputs_of(hidden, student))
    assert all(t.grad is None for t in (teacher_hidden, teacher.weight, teacher.bias, weights))


def test_a_frozen_head_gets_no_gradient_and_hidden_states_the_same():
    hidden, student, teacher_hidden, teacher = case()
    top = score(hidden, student, teacher_hidden, teacher).teacher
    weights = torch.rand(40, dtype=torch.float64)
    (expected,) = torch.autograd.grad(weighted_divergence(hidden, student, top, weights)[0], hidden)
    frozen = Head(student.weight.detach(), student.bias.detach(), student.scale, None, student.temperature)
    (grad,) = torch.autograd.grad(weighted_divergence(hidden, frozen, top, weights)[0], hidden)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)
    with torch.no_grad():
        assert not weighted_divergence(hidden, student, top, weights)[0].requires_grad


@pytest.mark.parametrize("chunk", [1, 3, 40, 1000])
def test_chunks_change_nothing(chunk):
    hidden, student, teacher_hidden, teacher = case(vocab=2000)
    tokens = torch.randint(2000, (40,))
    for objective in OBJECTIVES:
        outcome = []
        for size in (17, chunk):
            scores = score(hidden, student, teacher_hidden, teacher, tokens, objective, size)
            loss, _ = weighted_divergence(hidden, student, scores.teacher, torch.ones(40), objective, size)
            grads = torch.autograd.grad(loss, inputs_of(hidden, student))
            outcome.append((scores.entropy_gap, scores.divergence, scores.token_log_probs, loss, *grads))
        torch.testing.assert_close(*outcome)


def test_gradient_scales_and_accumulates_and_a_second_backward_is_refused():
    hidden, student, teacher_hidden, teacher = case()
    top = score(hidden, student, teacher_hidden, teacher).teacher
    weights = torch.ones(40, dtype=torch.float64)
    weighted_divergence(hidden, student, top, weights)[0].backward()
    once = student.weight.grad.clone()
    (weighted_divergence(hidden, student, top, weights)[0] / 4).backward()
    torch.testing.assert_close(student.weight.grad, once * 1.25)
    loss = weighted_divergence(hidden, student, top, weights)[0] * 3
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_tied_weights_get_both_gradients():
    _, student, _, _ = case()
    weight = student.weight
    top = score(weight.detach()[:5] + 0.1, student, weight.detach()[:5], student).teacher
    states = weight[:5] * 1.1  # hidden states that come from the embedding itself
    loss, _ = weighted_divergence(states, student, top, torch.ones(5, dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss, weight)
    lt = full_logits(weight.detach()[:5], student).detach().log_softmax(-1)
    ls = full_logits(weight[:5] * 1.1, student).log_softmax(-1)
    ls, lt = (with_tail(t.gather(-1, top.ids)) for t in (ls, lt))
    (expected,) = torch.autograd.grad((ls.exp() * (ls - lt)).sum(), weight)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("objective", [OBJECTIVES[0], OBJECTIVES[1]], ids=["closed_form", "autograd"])
def test_half_precision_weights_are_projected_in_fp32(objective):
    hidden, student, teacher_hidden, teacher = case(dtype=torch.bfloat16)
    scores = score(hidden, student, teacher_hidden, teacher, objective=objective)
    loss, d = weighted_divergence(hidden, student, scores.teacher, torch.ones(40), objective)
    grads = torch.autograd.grad(loss, inputs_of(hidden, student))
    exact = double(hidden, student)
    expected, h_s, _ = reference(*exact, *double(teacher_hidden, teacher), objective)
    expected_grads = torch.autograd.grad(expected.sum(), inputs_of(*exact))
    assert d.dtype == torch.float32
    assert relative(d, expected) < 1e-5
    assert relative(scores.student_entropy, h_s) < 1e-5
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3
    assert all(relative(g, e) < 5e-3 for g, e in zip(grads, expected_grads, strict=True))


def test_autocast_takes_the_products_in_its_type_and_returns_gradients_in_the_weights_own():
    hidden, student, teacher_hidden, teacher = case(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        top = score(hidden, student, teacher_hidden, teacher).teacher
        loss, _ = weighted_divergence(hidden, student, top, torch.ones(40))
    grads = torch.autograd.grad(loss, inputs_of(hidden, student))
    assert loss.dtype == torch.float32
    assert [g.dtype for g in grads] == [torch.float32] * 3


def test_no_tensor_of_all_logits_is_ever_made():
    """Largest allocation while 512 positions are scored and trained on in chunks of 16: the head's gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, tuple | list) else [result]:
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.untyped_storage().nbytes())
            return result

    hidden, student, teacher_hidden, teacher = case(n=512, vocab=4000, width=8, dtype=torch.float32)
    for objective in OBJECTIVES:
        with Largest() as largest:
            scores = score(hidden, student, teacher_hidden, teacher, objective=objective, chunk=16)
            weighted_divergence(hidden, student, scores.teacher, torch.ones(512), objective, chunk=16)[0].backward()
        assert largest.size <= 16 * 4000 * 4


@pytest.mark.gpu
@every_objective
def test_on_a_gpu_in_bf16(objective):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    weight = torch.randn(3000, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = Head(weight, scale=0.2)
    hidden = torch.randn(70, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    other = (hidden + 0.1 * torch.randn_like(hidden)).detach()
    scores = score(hidden, head, other, head, objective=objective, chunk=32)
    loss, d = weighted_divergence(hidden, head, scores.teacher, torch.ones(70, device="cuda"), objective, chunk=32)
    grads = torch.autograd.grad(loss, (hidden, weight))
    exact = double(hidden, head)
    expected, _, _ = reference(*exact, *double(other, head), objective)
    expected_grads = torch.autograd.grad(expected.sum(), inputs_of(*exact))
    assert relative(d, expected) < 1e-4
    assert all(relative(g, e) < 1e-2 for g, e in zip(grads, expected_grads, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "backward"}, "reverse, forward or jsd"),
        ({"support": "student_topk"}, "teacher_topk or full"),
        ({"top_k": 0}, "at least 1"),
        ({"kind": "jsd", "beta": 1.0}, "its ends are"),
    ],
    ids=["kind", "support", "top_k", "beta"],
)
def test_objective_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        Objective(**options)


def test_mismatches_are_named():
    hidden, student, teacher_hidden, teacher = case(vocab=50)
    other = make_head(51, 6)
    with pytest.raises(UserError, match="50 and 51"):
        score(hidden, student, teacher_hidden, other)
    with pytest.raises(TypeError, match="FullTeacher"):
        weighted_divergence(hidden, student, FullTeacher(teacher_hidden, teacher), torch.ones(40))
