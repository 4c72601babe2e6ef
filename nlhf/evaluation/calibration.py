"""Does a judge that says 80 % hold in four cases of five? Reliability of the probabilities that a judge gives.

Station of the path: Verdict -> **metrics** -> report. One probability a pair: the mean over its orders and samples, so
that a taste for one slot cancels. What is binned is the *confidence*, the probability of the response that is preferred
(in [0.5, 1]): unlike the probability of "A" it does not depend on which response the data happens to call A.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nlhf.evaluation.records import Record
from nlhf.judge import pair_probabilities

BINS = 10  # of equal width on [0.5, 1]


@dataclass(frozen=True)
class Bin:
    """One point of the reliability curve.

    Attributes:
        low: Lower end of the bin; the confidence of its pairs is at least this.
        high: Upper end, which belongs to the next bin, but for the last.
        n: Pairs in it; bins without one are left out of a curve.
        confidence: Their mean confidence.
        accuracy: The share of them whose preferred response is the better one.
    """

    low: float
    high: float
    n: int
    confidence: float
    accuracy: float


def confidence(records: Sequence[Record]) -> tuple[float, float] | None:
    """The confidence in one pair and whether it was right: (in [0.5, 1], 0 or 1, or 0.5 at exactly one half).

    None where the judge gives no probability, or the label is a tie or missing: a probability speaks of A or B only.
    """
    p = next(iter(pair_probabilities([r.judgement for r in records]).values()), None)
    if p is None or records[0].label not in ("A", "B"):
        return None
    right = 0.5 if p == 0.5 else float((p > 0.5) == (records[0].label == "A"))
    return max(p, 1 - p), right


def squared_error(records: Sequence[Record]) -> float | None:
    """(P(A) - [A is better])² of one pair, whose mean is the score of Brier (1950); None as of `confidence`."""
    found = confidence(records)
    if found is None:
        return None
    sure, right = found
    return (sure - right) ** 2 if right != 0.5 else 0.25


def bin_index(sure: float) -> int:
    """The bin of a confidence, from 0."""
    return min(int((sure - 0.5) * 2 * BINS + 1e-9), BINS - 1)  # 0.6 - 0.5 is a little less than 0.1


def reliability(pairs: Iterable[Sequence[Record]]) -> list[Bin]:
    """The reliability curve: mean confidence and accuracy by bin of confidence (Guo et al., arXiv 1706.04599, fig. 1).

    Args:
        pairs: The judgements of each pair.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for found in filter(None, map(confidence, pairs)):
        bins.setdefault(bin_index(found[0]), []).append(found)
    width = 0.5 / BINS
    return [
        Bin(
            low=0.5 + i * width,
            high=0.5 + (i + 1) * width,
            n=len(points),
            confidence=sum(sure for sure, _ in points) / len(points),
            accuracy=sum(right for _, right in points) / len(points),
        )
        for i, points in sorted(bins.items())
    ]
