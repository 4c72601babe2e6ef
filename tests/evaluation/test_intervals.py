"""Tests of difference: McNemar by hand. Bootstrap and Student's t are tested with the figures in test_metrics.py."""

from math import comb

import pytest

from nlhf.evaluation.intervals import McNemar, mcnemar


def test_mcnemar_by_hand():
    """10 pairs only the second is right on, 2 only the first: 2 (C(12, 0) + C(12, 1) + C(12, 2)) / 2¹²."""
    first = [True] * 2 + [False] * 10 + [True] * 5 + [False] * 3
    second = [False] * 2 + [True] * 10 + [True] * 5 + [False] * 3
    test = mcnemar(first, second)
    assert test == McNemar(both=5, first=2, second=10, neither=3, p=pytest.approx(158 / 4096))
    assert 2 * sum(comb(12, i) for i in range(3)) == 158


@pytest.mark.parametrize(("only_first", "only_second", "p"), [(0, 0, 1), (4, 4, 1), (0, 1, 1), (0, 6, 2 / 64)])
def test_mcnemar_at_its_ends(only_first, only_second, p):
    first = [True] * only_first + [False] * only_second
    second = [False] * only_first + [True] * only_second
    assert mcnemar(first, second).p == pytest.approx(p)
    assert mcnemar(second, first).p == pytest.approx(p)


def test_pairs_that_both_judge_alike_do_not_count():
    assert (
        mcnemar([True, False], [False, True]).p == mcnemar([True, False] + [True] * 99, [False, True] + [True] * 99).p
    )


def test_runs_of_different_length_are_a_bug():
    with pytest.raises(ValueError, match="zip"):
        mcnemar([True], [True, False])
