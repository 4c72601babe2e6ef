"""Figures about a judge, each a ratio with its counts and a clustered bootstrap interval.

Station of the path: Verdict -> **metrics** -> report. Pure functions over a flat list of `Record`, one per
judgement; `figures.definitions` is the whole list of figures. A reply without a verdict is its own outcome: it is not
correct, but it is never counted as a tie or as the other response, and ``parse_rate`` stands beside every accuracy.

The two orders of a pair (and its samples, and the pairs of one group) are not independent, so intervals
resample clusters (`Pair.cluster`), not judgements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlhf.errors import UserError
from nlhf.evaluation.figures import (
    WRONG_CRITIQUE_THRESHOLD,
    Definition,
    by_pair,
    decided_rightly,
    definitions,
    with_siblings,
)
from nlhf.evaluation.intervals import RESAMPLES, McNemar, Statistic, mcnemar, percentile_interval, resample
from nlhf.evaluation.records import Record
from nlhf.judge import VoteRule

TRUNCATION_LIMIT = 0.2  # above it, accuracy says more about the token limit than about the judge


@dataclass(frozen=True)
class Metric:
    """One figure.

    Attributes:
        value: k / n; None when nothing counts (n = 0).
        k: Sum over what counts: a count for rates, a sum of scores for means.
        n: How many judgements (or pairs, or subsets) count.
        low: Lower end of the 95 % percentile bootstrap interval; None with fewer than two clusters.
        high: Upper end.
    """

    value: float | None
    k: float
    n: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """A paired difference, second minus first.

    Attributes:
        value: The difference of the two values; None when either is missing.
        low: Lower end of the 95 % interval from resampling the same clusters for both.
        high: Upper end.
        first: The first value.
        second: The second value.
    """

    value: float | None
    low: float | None
    high: float | None
    first: float | None
    second: float | None


def compute(
    records: Sequence[Record],
    threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    rule: VoteRule = "majority",
    figures: dict[str, Definition] | None = None,
) -> dict[str, Metric]:
    """Every figure of `definitions`, with counts and a clustered 95 % percentile bootstrap interval.

    Args:
        records: Judgements; no two with the same pair, order and sample.
        threshold: See `definitions`.
        resamples: Bootstrap resamples; 0 leaves the intervals out.
        seed: Of the resampling.
        rule: See `definitions`.
        figures: Other figures in the place of those, such as what one format alone can be asked.
    """
    figures = definitions(threshold, rule) if figures is None else figures
    columns, sums, counts = _cluster_sums(records, figures, _clusters(records))
    totals, n = _combined(figures, columns, sums.sum(axis=0), counts.sum(axis=0))
    drawn = resample(_statistic(figures, columns), sums, counts, resamples, seed)
    low, high = percentile_interval(drawn, len(sums), len(figures))
    return {
        name: Metric(
            value=_number(totals[i] / n[i]) if n[i] else None,
            k=_whole(totals[i]),
            n=int(n[i]),
            low=_number(low[i]) if n[i] else None,
            high=_number(high[i]) if n[i] else None,
        )
        for i, name in enumerate(figures)
    }


def compute_by_subset(records: Sequence[Record], **options: Any) -> dict[str, dict[str, Metric]]:
    """`compute` for each subset, by name; empty when there is only one."""
    subsets = sorted({r.subset for r in records})
    if len(subsets) < 2:
        return {}
    return {s: compute([r for r in records if r.subset == s], **options) for s in subsets}


def compare(
    records_a: Sequence[Record],
    records_b: Sequence[Record],
    threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    rule: VoteRule = "majority",
) -> dict[str, Difference]:
    """Paired difference b - a of every figure, with an interval from resampling the same clusters for both.

    Raises:
        UserError: the two were not measured on the same pairs, labels and orders.
    """
    require_same_pairs(records_a, records_b)
    figures, clusters = definitions(threshold, rule), _clusters(records_a)
    values, resampled = [], []
    for records in (records_a, records_b):
        columns, sums, counts = _cluster_sums(records, figures, clusters)
        statistic = _statistic(figures, columns)
        values.append([_number(v) for v in statistic(sums.sum(axis=0), counts.sum(axis=0))])
        resampled.append(resample(statistic, sums, counts, resamples, seed))
    drawn = (b - a for a, b in zip(*resampled, strict=True))
    low, high = percentile_interval(drawn, len(clusters), len(figures))
    differences = {}
    for i, (name, first, second) in enumerate(zip(figures, *values, strict=True)):
        missing = first is None or second is None
        differences[name] = Difference(
            value=None if missing else second - first,
            low=None if missing else _number(low[i]),
            high=None if missing else _number(high[i]),
            first=first,
            second=second,
        )
    return differences


def compare_decisions(records_a: Sequence[Record], records_b: Sequence[Record], rule: VoteRule = "majority") -> McNemar:
    """McNemar's exact test of two judges, on the labelled pairs that each decides rightly (figure ``accuracy_pair``).

    Raises:
        UserError: the two were not measured on the same pairs, labels and orders.
    """
    require_same_pairs(records_a, records_b)
    of_a, of_b = by_pair(records_a), by_pair(records_b)
    labelled = [pair for pair, records in of_a.items() if records[0].label is not None]
    first, second = ([decided_rightly(of[pair], rule) for pair in labelled] for of in (of_a, of_b))
    return mcnemar(first, second)


def _clusters(records: Sequence[Record]) -> list[str]:
    # Sorted, so that the resampling does not depend on the order of the records.
    return sorted({r.cluster for r in records})


Column = tuple[str, Any]  # a figure and a part of it


def _cluster_sums(
    records: Sequence[Record], figures: dict[str, Definition], clusters: Sequence[str]
) -> tuple[list[Column], np.ndarray, np.ndarray]:
    """Sum and count of every part of every figure in every cluster, each float [n_clusters, n_columns]."""
    if len({r.key for r in records}) < len(records):
        raise ValueError("two records have the same pair, order and sample")
    rows = {cluster: i for i, cluster in enumerate(clusters)}
    cells: dict[Column, list[tuple[int, float]]] = {}
    for record, near in with_siblings(records):
        for name, figure in figures.items():
            value = figure.value(record, near)
            if value is not None:
                cells.setdefault((name, figure.part(record, near)), []).append((rows[record.cluster], value))
    columns = sorted(cells)
    sums = np.zeros((len(clusters), len(columns)))
    counts = np.zeros_like(sums)
    for i, column in enumerate(columns):
        where, values = zip(*cells[column], strict=True)
        np.add.at(sums[:, i], list(where), values)
        np.add.at(counts[:, i], list(where), 1)
    return columns, sums, counts


def _combined(
    figures: dict[str, Definition], columns: Sequence[Column], sums: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What is counted and among how many, float [..., n_figures], from sums and counts, float [..., n_columns]."""
    parts = []
    for name, figure in figures.items():
        own = [i for i, (of, _) in enumerate(columns) if of == name]
        parts.append(figure.combine(sums[..., own], counts[..., own]))
    return np.stack([k for k, _ in parts], axis=-1), np.stack([n for _, n in parts], axis=-1)


def _statistic(figures: dict[str, Definition], columns: Sequence[Column]) -> Statistic:
    def values(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
        k, n = _combined(figures, columns, sums, counts)
        return np.where(n > 0, k / np.maximum(n, 1), np.nan)

    return values


def require_same_pairs(records_a: Sequence[Record], records_b: Sequence[Record]) -> None:
    """Raise `UserError` unless both were measured on the same pairs, labels and orders."""
    # Lengths, because ids such as row-1 and their labels may well be the same in two files.
    a, b = ({r.pair_id: (r.label, r.cluster, r.length_a, r.length_b) for r in rs} for rs in (records_a, records_b))
    differing = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
    if differing:
        raise UserError(
            f"the runs were not measured on the same pairs: {len(differing)} differ, for example "
            f"{' and '.join(map(repr, differing[:2]))}; evaluate both on the same source, split and limit"
        )
    orders_a, orders_b = (sorted({r.order for r in records}) for records in (records_a, records_b))
    if orders_a != orders_b:
        raise UserError(f"the runs judged different orders ({orders_a} and {orders_b}); evaluate both with the same")


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)
