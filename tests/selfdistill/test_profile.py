import json

import numpy as np
import pytest

from nlhf.errors import UserError
from nlhf.files import to_json
from selfdistill.profile import profile_of

# KL by decile of dH, as a pilot saw it in the sandbox: everything at high dH.
ONE_SIDED = [0.17, 0.002, 0, 0, 0, 0.08, 1.9, 3.4, 3.4, 3.8]
# Both tails at about 24 times the middle, as the paper has it.
U = [0.9, 0.7, 0.5, 0.05, 0.02, 0.02, 0.03, 0.5, 0.7, 0.9]


def by_decile(means, each=7, rho=0.7):
    """A flat rollout with these means in its deciles and the lowest 1 - rho of dH kept."""
    n = each * len(means)
    return profile_of(np.repeat(means, each), np.linspace(-1, 1, n), kept=np.arange(n) < round((1 - rho) * n))


# --- a handful of numbers


def test_ten_positions_by_hand():
    """Two rollouts of 4 and 6 positions; the lowest dH of each is kept, with 3 + 5 of the KL of 20.

    By dH from -5 to 4 the KL is 5, 3, 1, 0, 0, 1, 0, 2, 4, 4. Lowest 30 %: 9 / 3 = 3; middle 40 %: 1 / 4; highest
    30 %: 10 / 3. Ratios 3 / 0.25 = 12 and 13.33.
    """
    dh = [-4, 0, 2, 4, -5, -3, -2, -1, 1, 3]
    kl = [3, 1, 2, 4, 5, 1, 0, 0, 0, 4]
    kept = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    p = profile_of(kl, dh, kept=kept, lengths=[4, 6])
    assert [b.low for b in p.deciles] == [b.high for b in p.deciles] == list(range(-5, 5))
    assert [b.mean_kl for b in p.deciles] == [5, 3, 1, 0, 0, 1, 0, 2, 4, 4]
    assert (p.rollouts, p.n, p.kept, p.kl, p.kept_share) == (2, 10, 2, 20, 0.2)
    assert p.kept_kl_share == 8 / 20
    assert (p.low_tail.mean_kl, p.middle.mean_kl, p.high_tail.mean_kl) == (3, 0.25, pytest.approx(10 / 3))
    assert p.times_middle(p.low_tail) == 12
    assert p.times_middle(p.high_tail) == pytest.approx(40 / 3)
    assert p.is_u_shaped
    assert p.warning() is None


def test_places_by_hand():
    """Of 4 tokens the centres lie at 12.5, 37.5, 62.5 and 87.5 %: tenths 1, 3, 6, 8; a single token in the middle."""
    p = profile_of([1, 2, 3, 4, 9], [0, 1, 2, 3, 4], kept=[1, 0, 0, 1, 1], lengths=[4, 1])
    assert [b.n for b in p.places] == [0, 1, 0, 1, 0, 1, 1, 0, 1, 0]
    assert [b.kl for b in p.places] == [0, 1, 0, 2, 0, 9, 3, 0, 4, 0]
    assert [b.kept for b in p.places] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert p.places[0].mean_kl is None
    assert p.places[1].kept_share == 1


def test_fewer_positions_than_deciles():
    p = profile_of([1.0, 2.0], [0.1, 0.2], kept=[True, False])
    assert sum(b.n for b in p.deciles) == 2
    assert p.kept_kl_share == pytest.approx(1 / 3)
    assert not p.is_u_shaped
    assert "-" in p.table()


# --- invariances


def random_batch(rng, rows=13, width=17):
    lengths = rng.integers(1, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    kl, dh = rng.exponential(size=mask.shape), rng.normal(size=mask.shape).round(1)  # rounded: many ties
    return kl, dh, mask, rng.random(mask.shape) < 0.3


def figures(p):
    return {k: pytest.approx(v, abs=1e-12) if isinstance(v, float) else v for k, v in flat(p.to_dict()).items()}


def flat(value, prefix=""):
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, item in items for k, v in flat(item, f"{prefix}.{name}").items()}
    return {prefix: value}


@pytest.mark.parametrize("seed", range(3))
def test_padding_and_order_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    kl, dh, mask, kept = random_batch(rng)
    expected = figures(profile_of(kl, dh, mask, kept))

    wide = [np.pad(a, ((0, 0), (5, 3)), constant_values=fill) for a, fill in ((kl, np.nan), (dh, np.inf), (kept, True))]
    assert flat(profile_of(wide[0], wide[1], np.pad(mask, ((0, 0), (5, 3))), wide[2]).to_dict()) == expected

    order = rng.permutation(len(mask))
    assert flat(profile_of(kl[order], dh[order], mask[order], kept[order]).to_dict()) == expected

    flattened = [a[mask] for a in (kl, dh, kept)]
    p = profile_of(flattened[0], flattened[1], kept=flattened[2], lengths=mask.sum(-1))
    assert flat(p.to_dict()) == expected


def test_equal_gaps_share_their_divergence():
    """All dH equal: which decile a position lies in is chance, so every decile has the mean."""
    kl = np.arange(20.0)
    for values in (kl, kl[::-1]):
        assert [b.mean_kl for b in profile_of(values, np.zeros(20)).deciles] == [pytest.approx(9.5)] * 10


def test_a_torch_tensor_will_do():
    import torch

    p = profile_of(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([[True, False]]))
    assert (p.n, p.kl, p.kept_kl_share) == (1, 1, 1)


# --- shapes and warnings


def test_a_u_is_found():
    p = by_decile(U)
    assert p.is_u_shaped
    assert 20 < p.times_middle(p.low_tail) < 28
    assert p.kept_kl_share == pytest.approx(2.1 / 4.32)
    assert p.warning() is None


def test_the_sandbox_is_one_sided_and_mask70_is_warned_of():
    p = by_decile(ONE_SIDED)
    assert not p.is_u_shaped
    assert p.shape == "not U-shaped: one-sided, at high dH"
    assert p.kept_kl_share == pytest.approx(0.0135, abs=1e-3)
    assert "1.3 %" in p.warning()
    assert "rho to 0" in p.warning()
    assert "selector to high_dh" in p.warning()


@pytest.mark.parametrize(
    ("means", "shape"),
    [
        (U[:3] + [0.02] * 7, "not U-shaped: one-sided, at low dH"),
        ([1.0] * 10, "not U-shaped: spread over dH"),
        ([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], "not U-shaped: spread over dH"),
        # The low tail has infinitely many times the divergence of an empty middle, and next to nothing of it all.
        ([0.01, 0, 0, 0, 0, 0, 0, 3, 3, 3], "not U-shaped: one-sided, at high dH"),
        # Both tails above the middle, the low one by too little.
        ([0.2] * 3 + [0.1] * 4 + [0.2, 0.5, 0.9], "not U-shaped: one-sided, at high dH"),
        ([1e-9] * 10, "no divergence at all"),
    ],
    ids=["low_side", "flat", "hump", "empty_middle", "shallow", "rounding"],
)
def test_what_is_no_u(means, shape):
    assert by_decile(means).shape == shape
    assert not by_decile(means).is_u_shaped


def test_the_whole_divergence_is_never_warned_of():
    assert by_decile(ONE_SIDED, rho=0).warning() is None


def test_a_random_choice_is_not_warned_of():
    rng = np.random.default_rng(0)
    kl = np.repeat(ONE_SIDED, 50)
    assert profile_of(kl, np.arange(500), kept=rng.random(500) < 0.3).warning() is None


def test_a_little_more_than_five_percent_is_not_enough_for_thirty():
    """30 % of the positions with 6 % of the divergence: a fifth of what a random choice would hold."""
    p = by_decile([0.2] * 3 + [1.3] * 3 + [1.375] * 4)
    assert 0.06 < p.kept_kl_share < 0.075
    assert p.warning()
    assert by_decile([0.3] * 3 + [1.3] * 3 + [1.375] * 4).warning() is None


def test_the_remedy_follows_the_divergence():
    low = by_decile(ONE_SIDED[::-1])
    assert low.warning() is None  # low_dh keeps what there is
    n = 70
    high_kept = profile_of(np.repeat(ONE_SIDED[::-1], 7), np.arange(n), kept=np.arange(n) >= 49)
    assert "selector to low_dh" in high_kept.warning()
    hump = profile_of(np.repeat([0, 0, 0, 1, 1, 1, 1, 0, 0, 0], 7), np.arange(n), kept=np.arange(n) < 21)
    assert "selector to kl" in hump.warning()


def test_no_divergence_asks_for_the_feedback():
    assert "feedback reach" in by_decile([0] * 10).warning()


def test_the_table_says_it_all():
    table = by_decile(ONE_SIDED).table()
    lines = table.splitlines()
    assert len([line for line in lines if line[:2].strip().isdigit()]) >= 10
    assert "with 1.3 % of the KL" in lines[-1]
    assert "Shape: not U-shaped: one-sided, at high dH" in table
    assert max(map(len, lines)) < 100
    assert table.isascii()


def test_the_profile_is_json():
    p = by_decile([1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
    assert p.to_dict()["low_tail_ratio"] == np.inf
    read = json.loads(to_json(p.to_dict()))
    assert read["low_tail_ratio"] is None
    assert read["is_u_shaped"] is True
    assert len(read["deciles"]) == len(read["places"]) == 10


# --- refusals


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", [0, 1], ids=["kl", "dh"])
def test_broken_values_are_an_error(bad, which):
    values = [np.ones(5), np.ones(5)]
    values[which][2] = bad
    with pytest.raises(UserError, match="at 1 of 5 positions"):
        profile_of(*values)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kl": [1, 2], "dh": [1]},
        {"kl": [1, 2], "dh": [1, 2], "lengths": [1]},
        {"kl": [[1, 2]], "dh": [[1, 2]], "mask": [[0, 0]]},
    ],
    ids=["shapes", "lengths", "empty"],
)
def test_what_does_not_fit_together_is_refused(arguments):
    with pytest.raises(ValueError, match=r"shapes differ|rollouts of"):
        profile_of(**arguments)
