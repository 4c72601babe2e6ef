"""A public benchmark's own figures: counted as upstream counts them, and strictly.

Station of the path: Verdict -> **metrics** -> report, for data sources that are benchmarks; the table of names is
`BENCHMARKS`. A figure is a tree of weighted means: its leaves are *cells* (a subset, or two styles of RM-Bench), and a
cell is the mean credit of its units. A unit is a pair, or a row whose pairs are only worth something together. What a
unit's judgements are worth is its *reading*: upstream's rule, or the strict one. Intervals resample clusters of pairs.

RewardBench 2's subset Ties is scored from ratings of single answers, see `ties_scores`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nlhf.evaluation.benchmark_rules import (
    TIES_WEIGHTS,
    TiesPrompt,
    agreement,
    all_right,
    answer_scores,
    best_of,
    flip_rate,
    half_for_none,
    macro_figures,
    mean_rating,
    mean_right,
    tie_for_none,
    ties_parts,
    top_score,
    vote_sum,
)
from nlhf.evaluation.intervals import RESAMPLES, Statistic, percentile_interval, resample
from nlhf.evaluation.records import Record
from nlhf.pairs import LABELS, Pair
from nlhf.sources.rewardbench import SECTIONS
from nlhf.sources.rewardbench2 import RATED
from nlhf.sources.rm_bench import DIFFICULTIES, DOMAINS, STYLES, difficulty

Credit = Callable[[Sequence[Record]], float | None]
Node = str | tuple[tuple[float, "Node"], ...]
"""A cell by name, or the weighted mean of other nodes."""


@dataclass(frozen=True)
class Score:
    """One figure of a benchmark.

    Attributes:
        name: What it is and how it is read, for example ``"overall"`` (upstream's rule) or ``"overall (strict)"``.
        value: The figure, a share from 0 to 1.
        n: How many units count: pairs, or rows.
        note: How it is counted, and what is missing for the benchmark's full figure.
        low: Lower end of the 95 % percentile bootstrap interval over clusters; None with fewer than two, or where the
            figure is no mean.
        high: Upper end.
    """

    name: str
    value: float
    n: int
    note: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Reading:
    """What the judgements of one unit are worth, from 0 to 1; None when they do not count.

    ``by_scores``: only for judges whose verdicts come with scores.
    """

    suffix: str
    note: str
    credit: Credit
    by_scores: bool = False


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark is scored.

    Attributes:
        figures: The published figures by name, as trees of means over cells.
        cells: The cells to which a pair (or the row of the pair) belongs.
        readings: Upstream's rule first.
        rows: Units are rows (the pairs of one group) and not pairs; a row that lacks a pair is left out and counted.
        macro: Macro precision, recall and F1 over A, B and tie are published too.
    """

    figures: Mapping[str, Node]
    cells: Callable[[Pair], tuple[str, ...]]
    readings: tuple[Reading, ...]
    rows: bool = False
    macro: bool = False


def benchmark_scores(
    source: str, records: Sequence[Record], pairs: Sequence[Pair], resamples: int = RESAMPLES, seed: int = 0
) -> list[Score]:
    """The figures that a benchmark is known by.

    Args:
        source: Name of the data source, a key of `nlhf.sources.SOURCES`.
        records: All judgements of an evaluation.
        pairs: The pairs that were judged.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        seed: Of the bootstrap.

    Returns:
        Scores in the order of a report: upstream's reading, then the others; empty for a source without scoring of its
        own. Figures for which nothing was judged are left out.
    """
    if source not in BENCHMARKS:
        return []
    benchmark = BENCHMARKS[source]
    rated = {pair.id: pair for pair in pairs if RATED in pair.meta}
    ties = ties_scores([record for record in records if record.pair_id in rated], rated, resamples, seed)
    records = [record for record in records if record.pair_id not in rated]
    scores = []
    for reading in benchmark.readings:
        if not reading.by_scores or any(record.scores for record in records):
            scores += _read(benchmark, reading, records, pairs, resamples, seed)
    if benchmark.macro:
        scores += macro_scores(records, resamples, seed)
    return [*scores, *ties]


# ------------------------------------------------------------------------------------------------------ the benchmarks


def _mean_of(*nodes: Node) -> Node:
    return tuple((1.0, node) for node in nodes)


def _rm_bench_figures() -> dict[str, Node]:
    styles = list(enumerate(STYLES))

    def cells(domain: str, kind: str | None = None) -> Node:
        return _mean_of(
            *(f"{domain}/{good}-{bad}" for i, good in styles for j, bad in styles if kind in (None, difficulty(i, j)))
        )

    figures: dict[str, Node] = {"overall": _mean_of(*map(cells, DOMAINS))}
    figures |= {kind: _mean_of(*(cells(domain, kind) for domain in DOMAINS)) for kind in DIFFICULTIES}
    for domain in DOMAINS:
        figures |= {domain: cells(domain)} | {f"{domain}/{kind}": cells(domain, kind) for kind in DIFFICULTIES}
    return figures


def _rm_bench_cells(pair: Pair) -> tuple[str, ...]:
    domain = pair.subset.split("/")[0]
    return (f"{domain}/{pair.meta['chosen_style']}-{pair.meta['rejected_style']}",)


def _rewardbench_figures() -> dict[str, Node]:
    sections = {name: tuple((count, subset) for subset, count in subsets.items()) for name, subsets in SECTIONS.items()}
    return {"overall": _mean_of(*sections.values()), **sections}


_LLMBAR_ADVERSARIAL = ("Neighbor", "GPTInst", "GPTOut", "Manual")
_LLMBAR = {
    "average": _mean_of("Natural", *_LLMBAR_ADVERSARIAL),
    "Natural": "Natural",
    "Adversarial": _mean_of(*_LLMBAR_ADVERSARIAL),
    **{name: name for name in _LLMBAR_ADVERSARIAL},
}
_JUDGEBENCH = ("overall", "knowledge", "reasoning", "math", "coding")
_REWARDBENCH2 = ("Factuality", "Focus", "Math", "Precise IF", "Safety")

_STRICT = Reading("strict", "every judgement of the pair is right, in both orders where both were judged", all_right)


BENCHMARKS: dict[str, Benchmark] = {
    "judgebench": Benchmark(
        {name: name for name in _JUDGEBENCH},
        lambda pair: ("overall", pair.subset),
        (
            Reading("", "right when the summed votes of both orders favour the label; ties weigh nothing", vote_sum),
            _STRICT,
            Reading("flip rate", "verdict changes with the order, of pairs with a verdict in both", flip_rate),
        ),
    ),
    "llmbar": Benchmark(
        _LLMBAR,
        lambda pair: (pair.subset,),
        (
            Reading("", "right verdicts, mean over both orders; no verdict is not right", mean_right),
            _STRICT,
            Reading("agreement", "the same response is named in both orders; two missing verdicts agree", agreement),
        ),
    ),
    "pandalm": Benchmark(
        {"accuracy": "all"},
        lambda pair: ("all",),
        (Reading("", "right verdicts, three classes; no verdict counts as a tie", tie_for_none), _STRICT),
        macro=True,
    ),
    "rewardbench": Benchmark(
        _rewardbench_figures(),
        lambda pair: (pair.subset,),
        (
            Reading("", "right verdicts; a tie or no verdict counts as half right", half_for_none),
            Reading("no verdict is wrong", "right verdicts; a tie or no verdict is not right", mean_right),
            _STRICT,
        ),
    ),
    "rewardbench2": Benchmark(
        {"overall": _mean_of(*_REWARDBENCH2), **{name: name for name in _REWARDBENCH2}},
        lambda pair: (pair.subset,),
        (
            Reading("", "rows whose best answer beats every other one, mean over the orders; no Ties subset", best_of),
            Reading("strict", "rows whose best answer beats every other one in every order that was judged", all_right),
            Reading(
                "by scores", "the best answer has the top mean score; 1/k when k share it", top_score, by_scores=True
            ),
        ),
        rows=True,
    ),
    "rm_bench": Benchmark(
        _rm_bench_figures(),
        _rm_bench_cells,
        (Reading("", "right verdicts; a tie or no verdict is wrong; mean over the orders", mean_right), _STRICT),
    ),
}


# -------------------------------------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class _Unit:
    cells: tuple[str, ...]
    cluster: str
    credit: float


def _read(
    benchmark: Benchmark,
    reading: Reading,
    records: Sequence[Record],
    pairs: Sequence[Pair],
    resamples: int,
    seed: int,
) -> list[Score]:
    """Every figure of one reading."""
    units, incomplete = _units(benchmark, reading.credit, records, pairs)
    cells = sorted({cell for unit in units for cell in unit.cells})
    figures = {name: node for name, node in benchmark.figures.items() if _leaves(node) & set(cells)}
    if not figures:
        return []
    sums, counts = _table(units, cells)

    def statistic(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            means = dict(zip(cells, np.moveaxis(sums / counts, -1, 0), strict=True))
            return np.stack([weighted_mean(node, means) for node in figures.values()], axis=-1)

    values, low, high = _with_interval(statistic, sums, counts, resamples, seed)
    scores = []
    for i, (name, node) in enumerate(figures.items()):
        n = sum(not _leaves(node).isdisjoint(unit.cells) for unit in units)
        missing = _missing(_leaves(node), cells)
        note = reading.note
        note += f"; nothing was judged of {', '.join(missing)}" if missing else ""
        note += f"; {incomplete} incomplete rows left out" if incomplete else ""
        full_name = f"{name} ({reading.suffix})" if reading.suffix else name
        scores.append(Score(full_name, float(values[i]), n, note, low[i], high[i]))
    return scores


def _with_interval(
    statistic: Statistic, sums: np.ndarray, counts: np.ndarray, resamples: int, seed: int
) -> tuple[np.ndarray, list[float | None], list[float | None]]:
    """Values of a statistic and both ends of their intervals, None where there is none."""
    values = statistic(sums.sum(axis=0), counts.sum(axis=0))
    drawn = resample(statistic, sums, counts, resamples, seed)
    ends = percentile_interval(drawn, len(sums), len(values))
    low, high = ([None if np.isnan(end) else float(end) for end in side] for side in ends)
    return values, low, high


def _table(units: Sequence[_Unit], cells: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the credits and number of units of every cell in every cluster, each float [n_clusters, n_cells]."""
    rows = {name: i for i, name in enumerate(sorted({unit.cluster for unit in units}))}
    columns = {name: i for i, name in enumerate(cells)}
    sums = np.zeros((len(rows), len(columns)))
    counts = np.zeros_like(sums)
    for unit in units:
        for cell in unit.cells:
            sums[rows[unit.cluster], columns[cell]] += unit.credit
            counts[rows[unit.cluster], columns[cell]] += 1
    return sums, counts


def _units(
    benchmark: Benchmark, credit: Credit, records: Sequence[Record], pairs: Sequence[Pair]
) -> tuple[list[_Unit], int]:
    """What counts under a reading, and how many rows lack a pair."""
    by_id = {pair.id: pair for pair in pairs}
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        pair = by_id[record.pair_id]
        grouped[pair.group if benchmark.rows else pair.id].append(record)
    units, incomplete = [], 0
    for group in grouped.values():
        first = by_id[group[0].pair_id]
        if benchmark.rows and len({r.pair_id for r in group}) != first.meta["pairs_in_row"]:
            incomplete += 1
        elif (value := credit(group)) is not None:
            units.append(_Unit(benchmark.cells(first), first.cluster, value))
    return units, incomplete


def weighted_mean(node: Node, means: Mapping[str, np.ndarray]) -> np.ndarray:
    """A tree of weighted means, from the means of its cells.

    Args:
        node: A cell's name, or (weight, node) pairs.
        means: Mean credit of each cell, float [...]; a cell that is absent or NaN is left out of its parent's mean.
    """
    if isinstance(node, str):
        return np.asarray(means.get(node, np.nan))
    values = np.stack(np.broadcast_arrays(*(weighted_mean(child, means) for _, child in node)), axis=-1)
    weights = ~np.isnan(values) * np.array([weight for weight, _ in node])
    with np.errstate(invalid="ignore"):
        return (np.nan_to_num(values) * weights).sum(axis=-1) / weights.sum(axis=-1)


def _missing(leaves: set[str], cells: Sequence[str]) -> list[str]:
    """The cells of a figure that nothing was judged of; a domain without any of its cells by its own name."""
    judged = {cell.split("/")[0] for cell in cells}
    parts = (cell if cell.split("/")[0] in judged else cell.split("/")[0] for cell in sorted(leaves - set(cells)))
    return list(dict.fromkeys(parts))


def _leaves(node: Node) -> set[str]:
    return {node} if isinstance(node, str) else set().union(*(_leaves(child) for _, child in node))


# ---------------------------------------------------------------------------------------------- PandaLM's three classes


def macro_scores(records: Sequence[Record], resamples: int = RESAMPLES, seed: int = 0) -> list[Score]:
    """Macro precision, recall and F1 over the classes A, B and tie, as means over all judgements.

    A reply without a verdict counts as a tie. Source: PandaLM, ``data/compute_metrics.py``.
    """
    cells = [f"{label}{verdict}" for label in LABELS for verdict in LABELS]
    units = [_Unit((f"{r.label}{r.winner or 'tie'}",), r.cluster, 1.0) for r in records if r.label]
    if not units:
        return []
    sums, _ = _table(units, cells)
    values, low, high = _with_interval(lambda counts, _: macro_figures(counts), sums, sums, resamples, seed)
    note = "unweighted mean over the classes A, B and tie; no verdict counts as a tie; n counts judgements"
    names = ("macro precision", "macro recall", "macro F1")
    return [Score(name, float(values[i]), len(units), note, low[i], high[i]) for i, name in enumerate(names)]


# -------------------------------------------------------------------------------------- RewardBench 2's subset Ties


def ties_scores(
    records: Sequence[Record], pairs: Mapping[str, Pair], resamples: int = RESAMPLES, seed: int = 0
) -> list[Score]:
    """RewardBench 2's Ties subset and its five parts, see `benchmark_rules.ties_score`; empty without records.

    Args:
        records: Judgements by a judge that rates one response at a time.
        pairs: What they judged, by id, with `nlhf.sources.rewardbench2.RATED` in their ``meta``.
        resamples: Of the bootstrap, over the numbers N of the prompts.
        seed: Of the bootstrap.
    """
    prompts = ties_prompts(records, pairs)
    incomplete = len({pairs[record.pair_id].meta[RATED]["prompt"] for record in records}) - len(prompts)
    units = [_Unit((part,), number, worth) for part, number, worth in ties_parts(prompts)]
    counted = {part: sum(unit.cells == (part,) for unit in units) for part in TIES_WEIGHTS}
    if not all(counted.values()):  # no number has both of its prompts
        return []
    weights = np.array(list(TIES_WEIGHTS.values()))
    sums, counts = _table(units, list(TIES_WEIGHTS))

    def statistic(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            means = sums / counts
        return np.concatenate([(means * weights).sum(axis=-1, keepdims=True), means], axis=-1)

    values, low, high = _with_interval(statistic, sums, counts, resamples, seed)
    unread = sum(not prompt.readable for prompt in prompts)
    note = "by ratings of single answers; n counts prompts, and for the last three parts numbers with both prompts"
    note += f"; {unread} prompts with a rating that could not be read are worth the least" if unread else ""
    note += f"; {incomplete} incomplete rows left out" if incomplete else ""
    names = {"Ties": len(prompts)} | {f"Ties/{part}": n for part, n in counted.items()}
    return [Score(name, float(values[i]), n, note, low[i], high[i]) for i, (name, n) in enumerate(names.items())]


def ties_prompts(records: Sequence[Record], pairs: Mapping[str, Pair]) -> list[TiesPrompt]:
    """The prompts with each answer's mean rating over all its showings, of whose answers every one was shown.

    Args:
        records: As for `ties_scores`.
        pairs: As for `ties_scores`.
    """
    rows: dict[str, tuple[list[list[float | None]], ...]] = {}
    for record in records:
        rated = pairs[record.pair_id].meta[RATED]
        row = rows.setdefault(rated["prompt"], tuple([[] for _ in range(count)] for count in rated["counts"]))
        for answers, place, score in zip(row, rated["answers"], answer_scores(record), strict=True):
            answers[place].append(score)
    return [
        TiesPrompt(name, [mean_rating(scores) for scores in (*correct, *incorrect)], len(correct))
        for name, (correct, incorrect) in rows.items()
        if all(correct) and all(incorrect)
    ]
