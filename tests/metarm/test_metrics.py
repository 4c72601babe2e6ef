"""Figures about a MetaRM, against small sums done by hand."""

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from metarm.metrics import Data, auc, best_line, calibration, figures, mse, spearman


def data(scores, targets):
    targets = np.array(targets, dtype=float)
    return Data(np.array(scores, dtype=float), targets, targets >= 1, targets > 1)


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [
        ([3, 2, 1], [True, False, False], 1.0),
        ([1, 2, 3], [True, False, False], 0.0),
        ([1, 1, 1], [True, False, False], 0.5),
        ([2, 2, 1, 3], [True, False, False, True], 0.875),  # of 4 couples: 1/2, 1, 1, 1
        ([1, 2], [True, True], None),
        ([1, 2], [False, False], None),
        ([], [], None),
    ],
    ids=["perfect", "reversed", "constant", "one tie", "no negative", "no positive", "empty"],
)
def test_auc(scores, positive, expected):
    assert auc(scores, positive) == expected


def test_auc_and_spearman_agree_with_the_libraries():
    rng = np.random.default_rng(0)
    scores, targets = rng.integers(0, 9, 60), rng.choice([0.0, 1.0, 1.5], 60)
    found = data(scores, targets)
    assert auc(scores, found.sound) == pytest.approx(roc_auc_score(found.sound, scores))
    assert spearman(found) == pytest.approx(stats.spearmanr(scores, targets).statistic)


def test_mse_is_the_mean_of_squares():
    """(0.5^2 + 0 + 1^2) / 3 = 1.25 / 3."""
    assert mse(data([0.5, 1.0, 0.5], [0, 1, 1.5])) == pytest.approx(1.25 / 3)


def test_a_constant_has_no_rank_correlation():
    assert spearman(data([1, 1, 1], [0, 1, 1.5])) is None


def test_the_best_line_beats_every_other_and_a_constant_feature_gives_the_mean():
    """Through (0, 0), (1, 1), (2, 1.5): slope 0.75, mean 5/6."""
    targets = np.array([0, 1, 1.5])
    line = best_line(np.array([0.0, 1.0, 2.0]), targets)
    assert line == pytest.approx([5 / 6 - 0.75, 5 / 6, 5 / 6 + 0.75])
    assert best_line(np.ones(3), targets) == pytest.approx([5 / 6] * 3)
    assert best_line(np.array([2.0, 1.0, 0.0]), targets) == pytest.approx(line)  # less is better: turned round


def test_calibration_has_equal_parts_from_low_to_high():
    bins = calibration(data([0.1, 1.4, 0.2, 1.2], [0, 1.5, 1, 1]), bins=2)
    assert [(b.score, b.target, b.n) for b in bins] == [
        (pytest.approx(0.15), 0.5, 2),
        (pytest.approx(1.3), 1.25, 2),
    ]


def test_calibration_of_fewer_rollouts_than_bins():
    assert [b.n for b in calibration(data([1, 2], [0, 1]), bins=10)] == [1, 1]


def test_intervals_resample_pairs_not_rollouts():
    """Twenty copies of each rollout are no more evidence than one."""
    rng = np.random.default_rng(1)
    scores, targets = rng.normal(size=30), rng.choice([0.0, 1.0, 1.5], 30)
    names = [f"p{i}" for i in range(30)]
    once = figures({"m": data(scores, targets)}, names, resamples=200)["m"]
    copied = data(np.repeat(scores, 20), np.repeat(targets, 20))
    often = figures({"m": copied}, list(np.repeat(names, 20)), resamples=200)["m"]
    for name in once:
        assert often[name].value == pytest.approx(once[name].value)
        assert (often[name].low, often[name].high) == pytest.approx((once[name].low, once[name].high))
        assert once[name].low <= once[name].value <= once[name].high
    assert often["auc"].n == 600
    assert once["auc_right"].n == int((targets >= 1).sum())


def test_one_pair_has_no_interval():
    found = figures({"m": data([0, 1], [0, 1.5])}, ["p", "p"])["m"]["mse"]
    assert (found.value, found.low, found.high) == (0.125, None, None)
