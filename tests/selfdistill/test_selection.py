from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nlhf.errors import UserError
from selfdistill.selection import (
    SELECTORS,
    importance_ratio,
    keep_lowest,
    kept_count,
    loss_total,
    loss_weights,
    random_scores,
    select,
    to_grid,
)


def batch(lengths, seed=0, left=0, right=0):
    """Random statistics of rollouts, with padding on either side: the keyword arguments of `select`, and the mask."""
    width = left + max(lengths) + right
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    names = ("student_entropy", "teacher_entropy", "divergence")
    values = {name: torch.full(mask.shape, -99.0) for name in names}
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    for row, n in enumerate(lengths):
        here = slice(left, left + n)
        mask[row, here] = True
        for name in names:
            values[name][row, here] = torch.rand(n, generator=generator)
        tokens[row, here] = torch.randint(1, 99, (n,), generator=generator)
    return mask, values | {"tokens": tokens}


@pytest.mark.parametrize(
    ("length", "rho", "kept"),
    [
        (90, 0.7, 27),  # int(0.7 * 90) is 62, which would keep 28
        (90, "0.7", 27),
        (90, Fraction(7, 10), 27),
        (90, 1 - 0.3, 27),
        (90, 0.1 * 7, 27),  # 0.7000000000000001
        (10, 0.3, 7),
        (3, 1 / 3, 2),
        (8192, 0.7, 2458),
        (1, 0.7, 1),
        (1, 0.99, 1),
        (0, 0.7, 0),
        (5, 0, 5),
    ],
)
def test_kept_count_is_exact(length, rho, kept):
    assert kept_count(length, rho) == kept
    assert kept_count(torch.tensor([length]), rho).tolist() == [kept]


def test_the_trap_that_the_exact_count_avoids():
    assert int(0.7 * 90) == 62


@pytest.mark.parametrize("rho", [1, 1.0, -0.1, "x", None, float("nan"), float("inf")])
def test_rho_out_of_range(rho):
    with pytest.raises(UserError, match="fraction of positions masked"):
        kept_count(10, rho)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.sampled_from([0, 0.3, 0.5, 0.7, 0.95]))
def test_exactly_n_minus_floor_rho_n_are_kept(lengths, rho):
    mask, values = batch([*lengths, 1])
    for selector in SELECTORS:
        keep = select(selector, rho, mask, **values)
        assert keep.sum(-1).tolist() == [kept_count(n, rho) for n in [*lengths, 1]]
        assert not (keep & ~mask).any()


@pytest.mark.parametrize("selector", SELECTORS)
def test_rho_zero_keeps_every_position(selector):
    mask, values = batch([7, 1, 0, 12], left=2, right=3)
    assert torch.equal(select(selector, 0, mask, **values), mask)


def test_each_selector_keeps_what_it_says():
    h_s = torch.tensor([[3.0, 0.0, 1.0, 2.0]])
    h_t = torch.tensor([[1.0, 4.0, 0.5, 2.1]])  # dH = 2, -4, 0.5, -0.1
    kl = torch.tensor([[0.1, 0.2, 0.9, 0.3]])
    kept = {
        name: select(name, 0.75, torch.ones(1, 4), student_entropy=h_s, teacher_entropy=h_t, divergence=kl)
        .flatten()
        .nonzero()
        .item()
        for name in SELECTORS
        if name != "random"
    }
    assert kept == {"low_dh": 1, "high_dh": 0, "abs_dh": 1, "student_entropy": 0, "teacher_entropy": 1, "kl": 2}


@pytest.mark.parametrize("selector", SELECTORS)
def test_padding_and_micro_batches_change_nothing(selector):
    lengths = [9, 4, 1, 17]
    alone, values = batch(lengths)
    expected = select(selector, 0.7, alone, **values)[alone]
    for left, right in ((3, 0), (0, 5), (2, 2)):
        mask, padded = batch(lengths, left=left, right=right)
        assert torch.equal(select(selector, 0.7, mask, **padded)[mask], expected)
    rows = [select(selector, 0.7, alone[i : i + 1], **{k: v[i : i + 1] for k, v in values.items()}) for i in range(4)]
    assert torch.equal(torch.cat(rows)[alone], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1e30, 0.0])
def test_whatever_stands_in_the_padding_is_never_kept(value):
    mask = torch.tensor([[False, True, True, True, True, False]])
    scores = torch.tensor([[value, 3.0, 1.0, 2.0, 4.0, value]])
    assert keep_lowest(scores, mask, 0.5).tolist() == [[False, False, True, True, False, False]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_positions_without_a_finite_score_come_last_but_before_padding(value):
    mask = torch.tensor([[False, True, True, False]])
    assert keep_lowest(torch.tensor([[0.0, value, value, 0.0]]), mask, 0.5).tolist() == [[False, True, False, False]]


def test_ties_go_to_the_earlier_position():
    """With every score equal, as with empty feedback, a threshold would keep all or none."""
    mask = torch.ones(1, 1000, dtype=torch.bool)
    assert keep_lowest(torch.zeros(1, 1000), mask, 0.7)[0].nonzero().flatten().tolist() == list(range(300))


def test_random_is_drawn_by_seed_and_rollout():
    mask, values = batch([200, 200])
    values["tokens"][1] = values["tokens"][0]
    first = select("random", 0.7, mask, tokens=values["tokens"], seed=1)
    assert torch.equal(first[0], first[1])
    assert torch.equal(first, select("random", 0.7, mask, tokens=values["tokens"], seed=1))
    assert not torch.equal(first, select("random", 0.7, mask, tokens=values["tokens"], seed=2))
    values["tokens"][1, 0] += 1
    assert not torch.equal(*select("random", 0.7, mask, tokens=values["tokens"], seed=1))
    assert random_scores(values["tokens"], mask, 0).mean().item() == pytest.approx(0.5, abs=0.1)


def test_an_unknown_selector_and_a_missing_tensor_are_named():
    with pytest.raises(UserError, match="Did you mean 'low_dh'"):
        select("low_dH", 0.7, torch.ones(1, 2))
    with pytest.raises(TypeError, match="teacher_entropy"):
        select("low_dh", 0.7, torch.ones(1, 2), student_entropy=torch.ones(1, 2))


def test_to_grid_is_the_inverse_of_masking():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert to_grid(torch.tensor([1.0, 2.0, 3.0]), mask, fill=-1).tolist() == [[1, -1, 2], [-1, 3, -1]]


def test_importance_ratio_is_clipped_detached_and_one_on_policy():
    new = torch.tensor([-1.0, -1.0, -1.0, 0.0, -1.0], requires_grad=True)
    ratio = importance_ratio(new, torch.tensor([-1.0, -2.0, 0.0, -9e9, float("nan")]))
    assert ratio.tolist() == pytest.approx([1.0, 2.0, 0.36787945, 2.0, 1.0])
    assert not ratio.requires_grad


@pytest.mark.parametrize("normalizer", ["kept_tokens", "per_rollout"])
@pytest.mark.parametrize("cut", [[4], [1, 3], [2, 2], [1, 1, 1, 1]], ids=str)
def test_the_normalizer_does_not_depend_on_how_the_batch_is_cut(normalizer, cut):
    """Averaging the means of the parts would weigh a short part like a long one."""
    lengths, feedback, rho = [10, 3, 20, 1], torch.tensor([True, True, False, True]), 0.5
    mask, values = batch(lengths)
    total = sum(
        loss_total(m.sum(-1), f, rho, normalizer) for m, f in zip(mask.split(cut), feedback.split(cut), strict=True)
    )
    keep = select("kl", rho, mask, **values)
    kl = values["divergence"]
    parts = zip(keep.split(cut), feedback.split(cut), kl.split(cut), strict=True)
    loss = sum((loss_weights(k, f, total, normalizer) * d).sum() for k, f, d in parts)
    rows = [kl[i][keep[i]] for i in range(4) if feedback[i]]
    expected = torch.cat(rows).mean() if normalizer == "kept_tokens" else torch.stack([r.mean() for r in rows]).mean()
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("normalizer", ["kept_tokens", "per_rollout"])
def test_a_batch_without_feedback_weighs_nothing(normalizer):
    mask, _ = batch([4, 0])
    feedback = torch.tensor([False, True])
    total = loss_total(mask.sum(-1), feedback, 0.7, normalizer)
    assert total == 0
    for ratio in (None, torch.full(mask.shape, float("nan"))):
        assert (loss_weights(mask, feedback, total, normalizer, ratio) == 0).all()


def test_unknown_normalizer():
    with pytest.raises(UserError, match="per_rollout"):
        loss_total(torch.tensor([1]), torch.tensor([True]), 0.7, "mean")
    with pytest.raises(UserError, match="per_rollout"):
        loss_weights(torch.ones(1, 1), torch.tensor([True]), 1, "mean")
