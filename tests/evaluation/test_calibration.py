"""Calibration: hand-computed cases, and what must not change a figure."""

import dataclasses

import pytest

from nlhf.evaluation.calibration import BINS, bin_index, confidence, reliability, squared_error
from nlhf.evaluation.figures import by_pair
from nlhf.evaluation.metrics import compute
from nlhf.evaluation.records import Record
from nlhf.pairs import other_label


def judged(pair_id: str, label: str | None, ab: float | None, ba: float | None) -> list[Record]:
    """Both orders of a pair: P(the first shown is better) in each."""
    return [
        Record(pair_id, pair_id, "", order, 0, label, "A" if p is not None and p > 0.5 else "B", probability=p)
        for order, p in (("AB", ab), ("BA", ba))
    ]


@pytest.mark.parametrize(
    ("label", "ab", "ba", "expected"),
    [
        ("A", 0.9, 0.3, (0.8, 1)),  # P(A) = (0.9 + 0.7) / 2
        ("B", 0.9, 0.3, (0.8, 0)),
        ("B", 0.2, 0.8, (0.8, 1)),
        ("A", 0.9, 0.9, (0.5, 0.5)),  # a taste for the first slot and nothing else
        ("tie", 0.9, 0.3, None),
        (None, 0.9, 0.3, None),
        ("A", None, None, None),
    ],
    ids=["right", "wrong", "right for B", "torn", "label tie", "no label", "no probability"],
)
def test_confidence_is_of_both_orders_together(label, ab, ba, expected):
    found = confidence(judged("p", label, ab, ba))
    assert found == (None if expected is None else pytest.approx(expected))


def test_brier_by_hand():
    """(0.8 - 1)² = 0.04, (0.8 - 0)² = 0.64, and 0.25 where nothing is known."""
    assert squared_error(judged("p", "A", 0.9, 0.3)) == pytest.approx(0.04)
    assert squared_error(judged("p", "B", 0.9, 0.3)) == pytest.approx(0.64)
    assert squared_error(judged("p", "B", 0.9, 0.9)) == 0.25


@pytest.mark.parametrize(("sure", "index"), [(0.5, 0), (0.549, 0), (0.551, 1), (0.99, 9), (1.0, 9)])
def test_bins(sure, index):
    assert bin_index(sure) == index
    assert BINS == 10


RECORDS = [
    *judged("1", "A", 0.9, 0.1),  # sure 0.9, right
    *judged("2", "B", 0.92, 0.1),  # sure 0.91, wrong
    *judged("3", "B", 0.4, 0.6),  # sure 0.6, right
    *judged("4", "tie", 0.4, 0.6),
]


def test_the_curve_and_its_error_by_hand():
    """The bin from 0.9: confidence (0.9 + 0.91) / 2, accuracy 1/2; from 0.6: 0.6 and 1.

    The error is |1.81 - 1| + |0.6 - 1| = 0.81 + 0.4, over 3 pairs.
    """
    low, high = reliability(by_pair(RECORDS).values())
    assert (low.low, low.n, low.confidence, low.accuracy) == (pytest.approx(0.6), 1, pytest.approx(0.6), 1)
    assert (high.low, high.n, high.confidence, high.accuracy) == (pytest.approx(0.9), 2, pytest.approx(0.905), 0.5)
    metric = compute(RECORDS, resamples=200)["calibration_error"]
    assert (metric.k, metric.n, metric.value) == (pytest.approx(1.21), 3, pytest.approx(1.21 / 3))
    assert metric.low is not None


def test_errors_within_a_bin_cancel_and_between_bins_do_not():
    fair = [*judged("1", "A", 0.5001, 0.4999), *judged("2", "B", 0.5001, 0.4999)]
    assert compute(fair, resamples=0)["calibration_error"].value == pytest.approx(0, abs=1e-3)
    assert compute(RECORDS[2:], resamples=0)["calibration_error"].value > 0.5


def test_which_response_is_called_a_does_not_matter():
    """The judge saw and said the same; the data's names of the responses are exchanged."""
    other = {"AB": "BA", "BA": "AB"}
    exchanged = [dataclasses.replace(r, order=other[r.order], label=other_label(r.label)) for r in RECORDS]
    before, after = (compute(records, resamples=0) for records in (RECORDS, exchanged))
    for name in ("brier", "calibration_error"):
        assert after[name].value == pytest.approx(before[name].value)


def test_without_probabilities_there_is_no_calibration():
    records = judged("1", "A", None, None)
    assert reliability([records]) == []
    assert compute(records, resamples=0)["brier"].n == 0
