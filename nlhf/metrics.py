"""Figures about a judge, each a ratio with its counts and a clustered bootstrap interval.

Station of the path: Verdict -> **metrics** -> report. Pure functions over a flat list of `Record`, one per
judgement; `definitions` is the whole list of figures. A reply without a verdict is its own outcome: it is not
correct, but it is never counted as a tie or as the other response, and ``parse_rate`` stands beside every
accuracy.

The two orders of a pair (and its samples, and the pairs of one group) are not independent, so intervals
resample clusters (`Pair.cluster`), not judgements.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlhf.critique.arguments import Argument
from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.judge import Judgement, Order
from nlhf.pairs import Label, Pair, other_label

RESAMPLES = 2000
WRONG_CRITIQUE_THRESHOLD = 0.5
TRUNCATION_LIMIT = 0.2  # above it, accuracy says more about the token limit than about the judge
_CHUNK = 2_000_000  # resampling weights held at once


@dataclass(frozen=True)
class Record:
    """One judgement with all that the figures and the report need: one line of ``judgements.jsonl``.

    Attributes:
        pair_id: The pair.
        cluster: What resampling keeps together, `Pair.cluster`.
        subset: Part of the data set.
        order: ``"AB"`` as in the data, ``"BA"`` with the responses exchanged.
        sample: Index of the vote, from 0.
        label: The humans' label in the data's order; None when nobody said.
        verdict: The judge's label in the order shown; None when none could be read.
        critique: What the judge wrote as its reasons.
        match: Its agreement with the human critique, in the order shown; None when it was not scored.
        reply: The whole reply.
        tokens: Its length in tokens.
        truncated: The token limit cut it off.
        prompt_hash: SHA-256 of the rendered messages, first 16 digits.
        length_a: Characters of response A in the data's order.
        length_b: Characters of response B in the data's order.
    """

    pair_id: str
    cluster: str
    subset: str
    order: Order
    sample: int
    label: Label | None
    verdict: Label | None
    critique: str | None = None
    match: CritiqueMatch | None = None
    reply: str = ""
    tokens: int = 0
    truncated: bool = False
    prompt_hash: str = ""
    length_a: int = 0
    length_b: int = 0

    @classmethod
    def of(cls, judgement: Judgement, pair: Pair, match: CritiqueMatch | None = None) -> "Record":
        """The record of a judgement on ``pair`` (in the data's order)."""
        return cls(
            pair_id=pair.id,
            cluster=pair.cluster,
            subset=pair.subset,
            order=judgement.order,
            sample=judgement.sample,
            label=pair.label,
            verdict=judgement.verdict.label,
            critique=judgement.verdict.critique,
            match=match,
            reply=judgement.verdict.raw,
            tokens=judgement.tokens,
            truncated=judgement.verdict.truncated,
            prompt_hash=judgement.prompt_hash,
            length_a=len(pair.response_a),
            length_b=len(pair.response_b),
        )

    @property
    def key(self) -> tuple[str, Order, int]:
        """What makes a judgement one of its kind: pair, order and sample."""
        return self.pair_id, self.order, self.sample

    @property
    def winner(self) -> Label | None:
        """The verdict in the data's order."""
        return self.verdict if self.order == "AB" else other_label(self.verdict)

    @property
    def better_slot(self) -> Label | None:
        """Where the better response stood when the judge read the pair."""
        return self.label if self.order == "AB" else other_label(self.label)

    @property
    def correct(self) -> bool:
        """The verdict is the humans' label."""
        return self.verdict is not None and self.winner == self.label

    @property
    def scored(self) -> CritiqueMatch | None:
        """The score of the critique where it counts: a verdict was read and the scorer did not fail."""
        return self.match if self.verdict is not None and self.match and not self.match.failure else None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, with the winner in the data's order for whoever reads the file."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        row["match"] = None if self.match is None else dataclasses.asdict(self.match)
        row["winner"] = self.winner
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], where: str = "record") -> "Record":
        """Read what `to_dict` wrote.

        Raises:
            UserError: fields are missing or unknown; the message begins with ``where``.
        """
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: not a judgement but a {type(row).__name__}")
        values = {k: v for k, v in row.items() if k != "winner"}
        try:
            values["match"] = _read_match(values.get("match"))
            return cls(**values)
        except (TypeError, KeyError) as error:
            raise UserError(f"{where}: not a judgement written by this version ({error})") from None


def _read_match(row: Mapping[str, Any] | None) -> CritiqueMatch | None:
    if row is None:
        return None
    values = dict(row)
    values["matched"] = tuple((i, j) for i, j in row["matched"])
    for name in ("generated", "reference"):
        values[name] = tuple(Argument(**argument) for argument in row[name])
    return CritiqueMatch(**values)


@dataclass(frozen=True)
class Metric:
    """One figure.

    Attributes:
        value: k / n; None when nothing counts (n = 0).
        k: Sum over what counts: a count for rates, a sum of scores for means.
        n: How many judgements (or pairs of judgements) count.
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


@dataclass(frozen=True)
class Definition:
    """What a figure is: a title, one sentence, and the value of one judgement (None: it does not count).

    ``value(record, twin)``: the twin is the same pair and sample in the other order, None when it was not
    judged. ``better`` is +1 when more is better, -1 when less is, 0 when neither.
    """

    title: str
    meaning: str
    value: Callable[[Record, Record | None], float | None]
    better: int = 0
    rate: bool = True


def definitions(threshold: float = WRONG_CRITIQUE_THRESHOLD) -> dict[str, Definition]:
    """Every figure by name, in the order of a report.

    Args:
        threshold: A critique with a lower F1 is a wrong one.
    """
    return {
        "accuracy": Definition(
            "Accuracy", "right verdicts among all labelled judgements; no verdict is not right", _correct, +1
        ),
        "accuracy_parsed": Definition(
            "Accuracy, parsed",
            "right verdicts among the labelled judgements that have a verdict",
            lambda r, _: _correct(r, None) if r.verdict else None,
            +1,
        ),
        "length_baseline": Definition(
            "Length baseline", "accuracy of 'the longer response wins', on the same judgements", _longer_wins
        ),
        "parse_rate": Definition(
            "Parse rate", "judgements with a verdict", lambda r, _: float(r.verdict is not None), +1
        ),
        "position_consistency": Definition(
            "Position consistency",
            "pairs with a verdict in both orders whose two verdicts name the same response",
            lambda r, twin: float(not flipped(r, twin)) if _both_parsed(r, twin) else None,
            +1,
        ),
        "position_excluded": Definition(
            "Excluded from consistency",
            "pairs judged in both orders that miss a verdict in one or both",
            lambda r, twin: float(not _both_parsed(r, twin)) if r.order == "AB" and twin else None,
            -1,
        ),
        "accuracy_slot_a": Definition(
            "Accuracy, better in slot A",
            "accuracy where the better response was shown first",
            lambda r, _: _correct(r, None) if r.better_slot == "A" else None,
            +1,
        ),
        "accuracy_slot_b": Definition(
            "Accuracy, better in slot B",
            "accuracy where the better response was shown second",
            lambda r, _: _correct(r, None) if r.better_slot == "B" else None,
            +1,
        ),
        "slot_a_rate": Definition(
            "Slot A rate", "verdicts that name the response shown first", lambda r, _: _share(r, "A")
        ),
        "tie_rate": Definition("Tie rate", "verdicts that are a tie", lambda r, _: _share(r, "tie")),
        "tie_labels": Definition(
            "Labelled a tie",
            "labelled judgements whose label is a tie: only the verdict 'tie' is right",
            lambda r, _: float(r.label == "tie") if r.label else None,
        ),
        "truncation_rate": Definition(
            "Truncation rate", "replies cut off by the token limit", lambda r, _: float(r.truncated), -1
        ),
        "critique_f1": Definition(
            "Critique F1",
            "agreement with the human critique, mean over judgements with a verdict and a score",
            lambda r, _: r.scored.f1 if r.scored else None,
            +1,
        ),
        "critique_precision": Definition(
            "Critique precision",
            "share of the judge's arguments that the human makes too, mean",
            lambda r, _: r.scored.precision if r.scored else None,
            +1,
        ),
        "critique_recall": Definition(
            "Critique recall",
            "share of the human's arguments that the judge makes too, mean",
            lambda r, _: r.scored.recall if r.scored else None,
            +1,
        ),
        "wrong_critique_rate": Definition(
            "Right label, wrong critique",
            f"among right verdicts with a scored critique, those with F1 below {threshold:g}",
            lambda r, _: float(lucky(r, threshold)) if r.scored and r.correct else None,
            -1,
        ),
        "scorer_failures": Definition(
            "Scorer failures",
            "critiques that the scorer could not score; they count nowhere else",
            lambda r, _: float(bool(r.match.failure)) if r.match else None,
            -1,
        ),
        "reply_tokens": Definition(
            "Reply tokens", "mean length of a reply in tokens", lambda r, _: float(r.tokens), rate=False
        ),
    }


def with_twins(records: Sequence[Record]) -> list[tuple[Record, Record | None]]:
    """Each record with that of the same pair and sample in the other order; None where it was not judged."""
    by_key = {r.key: r for r in records}
    return [(r, by_key.get((r.pair_id, "BA" if r.order == "AB" else "AB", r.sample))) for r in records]


def flipped(record: Record, twin: Record | None) -> bool:
    """Both orders have a verdict, and they name different responses."""
    return twin is not None and None not in (record.verdict, twin.verdict) and record.winner != twin.winner


def lucky(record: Record, threshold: float) -> bool:
    """Right label, wrong critique: right by a reason that does not hold."""
    return record.correct and record.scored is not None and record.scored.f1 < threshold


def _correct(record: Record, _: Record | None) -> float | None:
    return None if record.label is None else float(record.correct)


def _longer_wins(record: Record, _: Record | None) -> float | None:
    if record.label is None:
        return None
    a, b = record.length_a, record.length_b
    return float(record.label == ("A" if a > b else "B" if b > a else "tie"))


def _both_parsed(record: Record, twin: Record | None) -> bool:
    # Counted once, at the record in the data's order.
    return record.order == "AB" and twin is not None and record.verdict is not None and twin.verdict is not None


def _share(record: Record, label: Label) -> float | None:
    return None if record.verdict is None else float(record.verdict == label)


def compute(
    records: Sequence[Record],
    threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Metric]:
    """Every figure of `definitions`, with counts and a clustered 95 % percentile bootstrap interval.

    Args:
        records: Judgements; no two with the same pair, order and sample.
        threshold: See `definitions`.
        resamples: Bootstrap resamples; 0 leaves the intervals out.
        seed: Of the resampling.
    """
    sums, counts = _cluster_sums(records, threshold, _clusters(records))
    low, high = _interval(_ratios(sums, counts, resamples, seed), len(sums))
    return {
        name: Metric(
            value=_number(total / n) if n else None,
            k=_whole(total),
            n=int(n),
            low=_number(low[i]) if n else None,
            high=_number(high[i]) if n else None,
        )
        for i, (name, total, n) in enumerate(
            zip(definitions(threshold), sums.sum(axis=0), counts.sum(axis=0), strict=True)
        )
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
) -> dict[str, Difference]:
    """Paired difference b - a of every figure, with an interval from resampling the same clusters for both.

    Raises:
        UserError: the two were not measured on the same pairs, labels and orders.
    """
    _require_same_pairs(records_a, records_b)
    clusters = _clusters(records_a)
    of_a, of_b = (_cluster_sums(r, threshold, clusters) for r in (records_a, records_b))
    drawn = zip(_ratios(*of_a, resamples, seed), _ratios(*of_b, resamples, seed), strict=True)
    low, high = _interval((b - a for a, b in drawn), len(clusters))
    differences = {}
    for i, name in enumerate(definitions(threshold)):
        first, second = (_number(s[:, i].sum() / c[:, i].sum()) if c[:, i].any() else None for s, c in (of_a, of_b))
        missing = first is None or second is None
        differences[name] = Difference(
            value=None if missing else second - first,
            low=None if missing else _number(low[i]),
            high=None if missing else _number(high[i]),
            first=first,
            second=second,
        )
    return differences


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


def _clusters(records: Sequence[Record]) -> list[str]:
    # Sorted, so that the resampling does not depend on the order of the records.
    return sorted({r.cluster for r in records})


def _cluster_sums(
    records: Sequence[Record], threshold: float, clusters: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Sum and count of every figure in every cluster, each float [n_clusters, n_figures]."""
    index = {cluster: i for i, cluster in enumerate(clusters)}
    if len({r.key for r in records}) < len(records):
        raise ValueError("two records have the same pair, order and sample")
    figures = list(definitions(threshold).values())
    sums = np.zeros((len(clusters), len(figures)))
    counts = np.zeros_like(sums)
    for record, twin in with_twins(records):
        row = index[record.cluster]
        for column, figure in enumerate(figures):
            value = figure.value(record, twin)
            if value is not None:
                sums[row, column] += value
                counts[row, column] += 1
    return sums, counts


def _ratios(sums: np.ndarray, counts: np.ndarray, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Ratios of sums in resamples of the clusters, in chunks of float [chunk, n_figures]; NaN for 0 / 0.

    The same seed and number of clusters draw the same clusters: that is what pairs a comparison.
    """
    n = len(sums)
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // max(n, 1))
    for start in range(0, resamples if n else 0, chunk):
        size = min(chunk, resamples - start)
        drawn = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)
        denominators = weights @ counts
        with np.errstate(invalid="ignore"):
            yield np.where(denominators > 0, (weights @ sums) / np.maximum(denominators, 1), np.nan)


def _interval(chunks: Iterator[np.ndarray], n_clusters: int) -> tuple[np.ndarray, np.ndarray]:
    drawn = list(chunks)
    if not drawn or n_clusters < 2:
        missing = np.full(len(definitions()), np.nan)
        return missing, missing
    ratios = np.concatenate(drawn)
    known = ~np.isnan(ratios).all(axis=0)
    bounds = np.full((2, ratios.shape[1]), np.nan)
    bounds[:, known] = np.nanpercentile(ratios[:, known], [2.5, 97.5], axis=0)
    return bounds[0], bounds[1]


def _require_same_pairs(records_a: Sequence[Record], records_b: Sequence[Record]) -> None:
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
