"""What is counted about a judge: every figure with its title, its meaning and its value for one judgement.

Station of the path: Verdict -> **metrics** -> report. `definitions` is the whole list; `metrics` sums it up.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlhf.evaluation.calibration import bin_index, confidence, squared_error
from nlhf.evaluation.decision import Decision
from nlhf.evaluation.records import Record
from nlhf.judge import VoteRule, vote
from nlhf.pairs import Label

WRONG_CRITIQUE_THRESHOLD = 0.5


@dataclass(frozen=True)
class Siblings:
    """The judgements beside one judgement, itself among them, for figures about more than one reply.

    Attributes:
        twin: The same pair and sample in the other order; None when it was not judged.
        votes: All samples of the same pair in the same order.
        pair: All judgements of the pair.
    """

    twin: Record | None
    votes: Sequence[Record]
    pair: Sequence[Record]


def _total(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return sums.sum(axis=-1), counts.sum(axis=-1)


def _sum_of_ratios(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For the mean over parts, each counting the same; nothing counts where there is but one part."""
    found = (counts > 0) & (counts.shape[-1] > 1)
    return np.where(found, sums / np.maximum(counts, 1), 0).sum(axis=-1), found.sum(axis=-1)


def _sum_of_gaps(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.abs(sums).sum(axis=-1), counts.sum(axis=-1)


@dataclass(frozen=True)
class Definition:
    """What a figure is: a title, one sentence, and the value of one judgement (None: it does not count).

    Attributes:
        title: In reports.
        meaning: What is counted among what.
        value: Of a judgement beside its siblings. A figure of the pair has it at one of the pair's judgements alone.
        better: +1 when more is better, -1 when less is, 0 when neither.
        rate: It is shown in per cent.
        part: Parts of the judgements that are summed apart; all together by default.
        combine: k and n from sums and counts by part, float [..., n_parts] each.
    """

    title: str
    meaning: str
    value: Callable[[Record, Siblings], float | None]
    better: int = 0
    rate: bool = True
    part: Callable[[Record, Siblings], Any] = lambda _, __: ""
    combine: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] = _total


def definitions(threshold: float = WRONG_CRITIQUE_THRESHOLD, rule: VoteRule = "majority") -> dict[str, Definition]:
    """Every figure by name, in the order of a report.

    Args:
        threshold: A critique with a lower F1 is a wrong one.
        rule: How several verdicts become one, see `nlhf.judge.vote`.
    """
    return {
        "accuracy": Definition(
            "Accuracy", "right verdicts among all labelled judgements; no verdict is not right", _correct, +1
        ),
        "accuracy_parsed": Definition(
            "Accuracy, parsed",
            "right verdicts among the labelled judgements that have a verdict",
            lambda r, near: _correct(r, near) if r.verdict else None,
            +1,
        ),
        "length_baseline": Definition(
            "Length baseline", "accuracy of 'the longer response wins', on the same judgements", _longer_wins
        ),
        "accuracy_macro": Definition(
            "Accuracy, macro",
            "mean of the subsets' accuracies, each counting the same",
            _correct,
            +1,
            part=_subset,
            combine=_sum_of_ratios,
        ),
        "length_baseline_macro": Definition(
            "Length baseline, macro",
            "mean of the subsets' length baselines",
            _longer_wins,
            part=_subset,
            combine=_sum_of_ratios,
        ),
        "accuracy_strict": Definition(
            "Accuracy, both orders",
            "labelled pairs judged in both orders whose two verdicts are right",
            _right_in_both,
            +1,
        ),
        "accuracy_majority": Definition(
            "Accuracy, majority@k",
            "right verdicts of the k samples of a prompt together, among all labelled prompts",
            lambda r, near: _majority_right(r, near, rule),
            +1,
        ),
        "accuracy_pair": Definition(
            "Accuracy, one decision a pair",
            "labelled pairs decided rightly by all their judgements together; a tie by contradiction is not right",
            lambda r, near: _pair_right(r, near, rule),
            +1,
        ),
        "decided_rate": Definition(
            "Decided",
            "pairs whose judgements together name one of the responses: no tie, no contradiction",
            lambda r, near: float(_decide(near.pair, rule) in ("A", "B")) if _first(r, near.pair) else None,
        ),
        "parse_rate": Definition(
            "Parse rate", "judgements with a verdict", lambda r, _: float(r.verdict is not None), +1
        ),
        "position_consistency": Definition(
            "Position consistency",
            "pairs with a verdict in both orders whose two verdicts name the same response",
            lambda r, near: float(not flipped(r, near.twin)) if _both_parsed(r, near) else None,
            +1,
        ),
        "flip_rate": Definition(
            "Flip rate",
            "pairs with a verdict in both orders, one for each response: turned round by the order alone",
            lambda r, near: float({r.winner, near.twin.winner} == {"A", "B"}) if _both_parsed(r, near) else None,
            -1,
        ),
        "position_excluded": Definition(
            "Excluded from consistency",
            "pairs judged in both orders that miss a verdict in one or both",
            lambda r, near: float(not _both_parsed(r, near)) if r.order == "AB" and near.twin else None,
            -1,
        ),
        "accuracy_slot_a": Definition(
            "Accuracy, better in slot A",
            "accuracy where the better response was shown first",
            lambda r, near: _correct(r, near) if r.better_slot == "A" else None,
            +1,
        ),
        "accuracy_slot_b": Definition(
            "Accuracy, better in slot B",
            "accuracy where the better response was shown second",
            lambda r, near: _correct(r, near) if r.better_slot == "B" else None,
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
        "tie_precision": Definition(
            "Tie precision",
            "verdicts 'tie' on pairs labelled a tie, among the verdicts 'tie' on labelled pairs",
            lambda r, _: float(r.label == "tie") if r.label and r.verdict == "tie" else None,
            +1,
        ),
        "tie_recall": Definition(
            "Tie recall",
            "verdicts 'tie' among the judgements of pairs labelled a tie; no verdict is not one",
            lambda r, _: float(r.verdict == "tie") if r.label == "tie" else None,
            +1,
        ),
        "truncation_rate": Definition(
            "Truncation rate", "replies cut off by the token limit", lambda r, _: float(r.truncated), -1
        ),
        "brier": Definition(
            "Brier score",
            "mean squared error of the probability of A, over pairs labelled A or B; always 50 % sure gives 0.25",
            lambda r, near: squared_error(near.pair) if _first(r, near.pair) else None,
            -1,
            rate=False,
        ),
        "calibration_error": Definition(
            "Calibration error (ECE)",
            "mean gap between confidence and accuracy, over ten bins of confidence weighted by their pairs",
            _gap,
            -1,
            part=lambda r, near: bin_index(confidence(near.pair)[0]),
            combine=_sum_of_gaps,
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


def by_pair(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The judgements of each pair, by its id."""
    pairs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        pairs[record.pair_id].append(record)
    return dict(pairs)


def with_siblings(records: Sequence[Record]) -> Iterator[tuple[Record, Siblings]]:
    """Each record with what stands beside it."""
    pairs = by_pair(records)
    votes: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        votes[record.pair_id, record.order].append(record)
    for record, twin in with_twins(records):
        yield record, Siblings(twin, votes[record.pair_id, record.order], pairs[record.pair_id])


def _first(record: Record, group: Sequence[Record]) -> bool:
    """Where the group's value is counted: once."""
    return record is group[0]


def _subset(record: Record, _: Siblings) -> str:
    return record.subset


def _correct(record: Record, _: Siblings) -> float | None:
    return None if record.label is None else float(record.correct)


def _longer_wins(record: Record, _: Siblings) -> float | None:
    if record.label is None:
        return None
    a, b = record.length_a, record.length_b
    return float(record.label == ("A" if a > b else "B" if b > a else "tie"))


def _both_parsed(record: Record, near: Siblings) -> bool:
    # Counted once, at the record in the data's order.
    twin = near.twin
    return record.order == "AB" and twin is not None and record.verdict is not None and twin.verdict is not None


def _right_in_both(record: Record, near: Siblings) -> float | None:
    if record.label is None or record.order != "AB" or near.twin is None:
        return None
    return float(record.correct and near.twin.correct)


def _majority_right(record: Record, near: Siblings, rule: VoteRule) -> float | None:
    if record.label is None or len(near.votes) < 2 or not _first(record, near.votes):
        return None
    return float(_right(vote([r.judgement for r in near.votes], rule), near.votes))


def _pair_right(record: Record, near: Siblings, rule: VoteRule) -> float | None:
    if record.label is None or not _first(record, near.pair):
        return None
    return float(decided_rightly(near.pair, rule))


def decided_rightly(records: Sequence[Record], rule: VoteRule) -> bool:
    """Whether all judgements of a pair together come to the humans' label."""
    return _right(_decide(records, rule), records)


def _decide(records: Sequence[Record], rule: VoteRule) -> Label | None:
    return Decision.of([r.judgement for r in records], rule).label


def _right(label: Label | None, records: Sequence[Record]) -> bool:
    """Whether what the records come to is the humans' label; to contradict oneself is not to find a tie."""
    if label == "tie":
        votes = Counter(r.winner for r in records if r.verdict is not None)
        if any(count >= votes["tie"] for other, count in votes.items() if other != "tie"):
            return False
    return label is not None and label == records[0].label


def _gap(record: Record, near: Siblings) -> float | None:
    found = confidence(near.pair) if _first(record, near.pair) else None
    return None if found is None else found[0] - found[1]


def _share(record: Record, label: Label) -> float | None:
    return None if record.verdict is None else float(record.verdict == label)
