"""One-to-one matching of arguments, and precision, recall and F1 from it (spec of RM-NLHF, section on similarity)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nlhf.critique.arguments import Argument


@dataclass(frozen=True)
class CritiqueMatch:
    """How a generated critique agrees with a human one.

    Attributes:
        precision: Matched share of the generated arguments; 0 when there are none.
        recall: Matched share of the reference arguments.
        f1: Their harmonic mean.
        matched: Pairs of indices (generated, reference).
        generated: The generated arguments.
        reference: The reference arguments.
        repeated: A point was made twice, which makes the score 0.
        failure: Why the scorer could not say; the figures are then 0 and must not be read as a judgement.
    """

    precision: float
    recall: float
    f1: float
    matched: tuple[tuple[int, int], ...] = ()
    generated: tuple[Argument, ...] = ()
    reference: tuple[Argument, ...] = ()
    repeated: bool = False
    failure: str | None = None


def gate(generated: Sequence[Argument], reference: Sequence[Argument]) -> np.ndarray:
    """Which pairs may match at all, bool [n_generated, n_reference].

    Sides must agree and polarities must agree. A reference without a side (or polarity) accepts any; a generated
    argument without one is accepted only by a reference without one.
    """
    return np.array(
        [[r.side in (None, g.side) and r.polarity in (None, g.polarity) for r in reference] for g in generated],
        dtype=bool,
    ).reshape(len(generated), len(reference))


def match(
    generated: Sequence[Argument],
    reference: Sequence[Argument],
    similarity: np.ndarray,
    threshold: float,
    repeated: bool = False,
) -> CritiqueMatch:
    """Match arguments one to one so that the sum of similarities is largest, and count the matches.

    Args:
        generated: The judge's arguments.
        reference: One human's arguments.
        similarity: float [n_generated, n_reference], in [0, 1].
        threshold: Pairs below it do not match.
        repeated: The critique makes a point twice: everything is 0.

    Raises:
        ValueError: `similarity` has another shape or holds NaN.
    """
    similarity = np.asarray(similarity, dtype=float).reshape(len(generated), len(reference))
    if np.isnan(similarity).any():
        raise ValueError("similarity holds NaN")
    found: tuple[tuple[int, int], ...] = ()
    if not repeated and generated and reference:
        # The constant lets a match count even at similarity 0, where the threshold allows it.
        allowed = np.where(gate(generated, reference) & (similarity >= threshold), similarity + 1e-9, 0.0)
        from scipy.optimize import linear_sum_assignment

        rows, columns = linear_sum_assignment(allowed, maximize=True)
        found = tuple((int(i), int(j)) for i, j in zip(rows, columns, strict=True) if allowed[i, j] > 0)
    return counted(found, generated, reference, repeated)


def counted(
    matched: Iterable[tuple[int, int]],
    generated: Sequence[Argument],
    reference: Sequence[Argument],
    repeated: bool = False,
) -> CritiqueMatch:
    """Precision, recall and F1 of one-to-one matches, given as indices (generated, reference)."""
    found = () if repeated else tuple(sorted(matched))
    precision = len(found) / len(generated) if generated else 0.0
    recall = len(found) / len(reference) if reference else 0.0
    f1 = 2 * precision * recall / (precision + recall) if found else 0.0
    return CritiqueMatch(precision, recall, f1, found, tuple(generated), tuple(reference), repeated)
