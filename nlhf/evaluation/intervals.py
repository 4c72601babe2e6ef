"""How sure a figure is: bootstrap over clusters, Student's t over seeds, and McNemar's exact test.

Station of the path: Verdict -> **metrics** -> report. Pure functions on numbers; `metrics` says what they count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nlhf.errors import UserError

RESAMPLES = 2000
MOST_RESAMPLES = 100_000  # the ends of an interval no longer move, and everything drawn is held in memory
_CHUNK = 2_000_000  # resampling weights held at once

Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Values of figures from sums and counts, float [..., n_columns] each, as float [..., n_figures]; NaN for 0 / 0."""


def check_resamples(resamples: int, least: int = 0) -> None:
    """Refuse a number of resamples that gives no interval, or never ends.

    Raises:
        UserError: it does not lie between ``least`` and `MOST_RESAMPLES`.
    """
    if not least <= resamples <= MOST_RESAMPLES:
        raise UserError(f"resamples must lie between {least} and {MOST_RESAMPLES:,}, got {resamples}")


def resample(
    statistic: Statistic, sums: np.ndarray, counts: np.ndarray, resamples: int, seed: int
) -> Iterator[np.ndarray]:
    """The statistic in resamples of the clusters, in chunks of float [chunk, n_figures].

    The same seed and number of clusters draw the same clusters: that is what pairs a comparison.

    Args:
        statistic: See `Statistic`.
        sums: Of every column in every cluster, float [n_clusters, n_columns].
        counts: What counts there, of the same shape.
        resamples: How many.
        seed: Of the drawing.
    """
    n = len(sums)
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // max(n, 1))
    for start in range(0, resamples if n else 0, chunk):
        size = min(chunk, resamples - start)
        drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)
        yield statistic(weights @ sums, weights @ counts)


def percentile_interval(chunks: Iterator[np.ndarray], n_clusters: int, n_figures: int) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % percentile interval, each float [n_figures]; NaN with fewer than two clusters."""
    drawn = list(chunks)
    if not drawn or n_clusters < 2:
        missing = np.full(n_figures, np.nan)
        return missing, missing
    values = np.concatenate(drawn)
    known = ~np.isnan(values).all(axis=0)
    bounds = np.full((2, n_figures), np.nan)
    bounds[:, known] = np.nanpercentile(values[:, known], [2.5, 97.5], axis=0)
    return bounds[0], bounds[1]


@dataclass(frozen=True)
class SeedInterval:
    """Mean of a figure over independent runs.

    Attributes:
        mean: The mean; None without a run.
        low: Lower end of the 95 % interval of Student's t; None with fewer than two runs.
        high: Upper end.
        n: How many runs.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int


def seed_interval(differences: Sequence[float]) -> SeedInterval:
    """Mean and t-based 95 % interval of one figure (or paired difference) across runs with different seeds.

    Where the clustered bootstrap says how sure a figure is for these weights, this says how sure it is for
    this way of training. With few runs the normal approximation would be far too narrow, hence t with n - 1
    degrees of freedom.

    Raises:
        ValueError: a difference is NaN or infinite.
    """
    values = np.asarray(differences, dtype=float)
    if not np.isfinite(values).all():
        raise ValueError("seed_interval: a difference is not finite")
    n = len(values)
    mean = float(values.mean()) if n else None
    if n < 2:
        return SeedInterval(mean, None, None, n)
    from scipy.stats import t

    half = float(t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return SeedInterval(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class McNemar:
    """Two judges on the same pairs: who is right where the other is not.

    Attributes:
        both: Pairs that both decide rightly.
        first: Pairs that only the first does.
        second: Pairs that only the second does.
        neither: Pairs that neither does.
        p: Two-sided probability of a split as uneven as ``first`` to ``second``, or more so, if the judges were equally
            good.
    """

    both: int
    first: int
    second: int
    neither: int
    p: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """McNemar's exact test: the binomial test of the pairs on which the two differ (McNemar 1947).

    Args:
        first: Whether the first judge is right, pair by pair. Pairs are taken for independent; where they come in
            groups, the bootstrap over clusters is the one to trust.
        second: The same for the second judge.
    """
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for a, b in zip(first, second, strict=True):
        counts[bool(a), bool(b)] += 1
    only_first, only_second = counts[True, False], counts[False, True]
    p = 1.0
    if only_first + only_second:
        from scipy.stats import binomtest

        p = float(binomtest(only_first, only_first + only_second).pvalue)
    return McNemar(counts[True, True], only_first, only_second, counts[False, False], p)
