"""Figures about a MetaRM: errors, ranks, calibration, with clustered bootstrap intervals.

Station of the path: Verdict -> **metrics**. Pure functions on scores and targets. Rollouts of one pair (and pairs of
one group) are not independent, so intervals resample clusters, as `nlhf.evaluation.metrics` does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000
BINS = 10


@dataclass(frozen=True)
class Data:
    """What figures are computed from, one entry a rollout.

    Attributes:
        scores: Predicted rewards, float [n].
        targets: Rewards, float [n].
        right: The label is right, bool [n].
        sound: The process reward is 1, bool [n].
    """

    scores: np.ndarray
    targets: np.ndarray
    right: np.ndarray
    sound: np.ndarray

    def take(self, rows: np.ndarray) -> "Data":
        """The same rows, by index or mask."""
        return Data(self.scores[rows], self.targets[rows], self.right[rows], self.sound[rows])


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        value: None when it is not defined (one class only, a constant score).
        n: How many rollouts count.
        low: Lower end of the 95 % percentile bootstrap interval over clusters; None with fewer than two.
        high: Upper end.
    """

    value: float | None
    n: int
    low: float | None = None
    high: float | None = None


def auc(scores: Sequence[float] | np.ndarray, positive: Sequence[bool] | np.ndarray) -> float | None:
    """Probability that a positive scores above a negative, ties counting half; None without both classes."""
    from scipy.stats import rankdata

    positive = np.asarray(positive, dtype=bool)
    n1, n0 = int(positive.sum()), int((~positive).sum())
    if not n1 or not n0:
        return None
    ranks = rankdata(np.asarray(scores, dtype=float))
    return float((ranks[positive].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))


def mse(data: Data) -> float | None:
    """Mean squared error of the scores."""
    return float(np.mean((data.scores - data.targets) ** 2)) if len(data.scores) else None


def spearman(data: Data) -> float | None:
    """Rank correlation of scores and targets; None where either is constant."""
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in (data.scores, data.targets)]
    if any(len(r) < 2 or r.std() == 0 for r in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


FIGURES: dict[str, tuple[str, Callable[[Data], float | None]]] = {
    "mse": ("mean squared error", mse),
    "spearman": ("Spearman correlation with the reward", spearman),
    "auc_right": (
        "AUC for 'process reward = 1' among right labels",
        lambda d: auc(d.scores[d.right], d.sound[d.right]),
    ),
    "auc": ("AUC for 'process reward = 1' among all", lambda d: auc(d.scores, d.sound)),
}


def figures(
    predictors: Mapping[str, Data], clusters: Sequence[str], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Figure]]:
    """Every figure of every predictor, by predictor and name; all are resampled with the same clusters.

    Args:
        predictors: Scores of each predictor with the same targets.
        clusters: What is resampled together, one entry a rollout.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        seed: Of the bootstrap.
    """
    drawn = list(_resampled(clusters, resamples, seed))
    found: dict[str, dict[str, Figure]] = {}
    for name, data in predictors.items():
        values = [[f(data.take(rows)) for _, f in FIGURES.values()] for rows in drawn]
        found[name] = {}
        for column, (key, (_, function)) in enumerate(FIGURES.items()):
            known = [row[column] for row in values if row[column] is not None]
            low, high = np.percentile(known, [2.5, 97.5]).tolist() if known else (None, None)
            n = int(data.right.sum()) if key == "auc_right" else len(data.scores)
            found[name][key] = Figure(function(data), n, low, high)
    return found


def _resampled(clusters: Sequence[str], resamples: int, seed: int):
    """Row indices of each resample."""
    names = sorted(set(clusters))
    if len(names) < 2:
        return
    index = {name: i for i, name in enumerate(names)}
    members: list[list[int]] = [[] for _ in names]
    for row, cluster in enumerate(clusters):
        members[index[cluster]].append(row)
    arrays = [np.array(m) for m in members]
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        yield np.concatenate([arrays[i] for i in rng.integers(len(names), size=len(names))])


@dataclass(frozen=True)
class Bin:
    """One point of a calibration curve: mean score, mean target and number of the rollouts in it."""

    score: float
    target: float
    n: int


def calibration(data: Data, bins: int = BINS) -> list[Bin]:
    """Rollouts in ``bins`` equal parts by score: is the mean target what the mean score says? Lowest first."""
    order = np.argsort(data.scores, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return [Bin(float(data.scores[p].mean()), float(data.targets[p].mean()), len(p)) for p in parts]


def best_line(feature: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The feature as a prediction: its least-squares line through these very targets, float [n]."""
    feature = np.asarray(feature, dtype=float)
    centred = feature - feature.mean()
    variance = float(centred @ centred)
    slope = float(centred @ (targets - targets.mean())) / variance if variance > 0 else 0.0
    return targets.mean() + slope * centred
