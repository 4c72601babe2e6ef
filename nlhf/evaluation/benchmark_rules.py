"""What judgements are worth under each benchmark's rule: pure functions, without intervals.

Station of the path: Verdict -> **metrics** -> report; `nlhf.evaluation.benchmarks` applies them. The first group
gives the credit of a *unit* (a pair, or a row of pairs) from all its judgements, from 0 to 1. The others are rules that
are no mean over units: RewardBench 2 by ratings of single answers, and PandaLM's three classes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from nlhf.evaluation.figures import flipped, with_twins
from nlhf.evaluation.records import Record


def mean_right(records: Sequence[Record]) -> float:
    """Share of right verdicts; a tie or no verdict is not right."""
    return float(np.mean([r.correct for r in records]))


def all_right(records: Sequence[Record]) -> float:
    """1 when every judgement is right, in both orders where both were judged, else 0."""
    return float(all(r.correct for r in records))


def half_for_none(records: Sequence[Record]) -> float:
    """Share of right verdicts, where a tie or no verdict is half right: the RewardBench package's rule."""
    return float(np.mean([float(r.correct) if r.winner in ("A", "B") else 0.5 for r in records]))


def vote_sum(records: Sequence[Record]) -> float:
    """1 when the right verdicts outnumber the opposite ones, else 0; ties and missing verdicts weigh nothing.

    JudgeBench's rule over two orders (``utils/metrics.py``): right + tie is right, right + wrong is not.
    """
    return float(sum((r.winner in ("A", "B")) * (1 if r.correct else -1) for r in records) > 0)


def tie_for_none(records: Sequence[Record]) -> float:
    """Share of right verdicts where a reply without a verdict counts as a tie: PandaLM's rule."""
    return float(np.mean([(r.winner or "tie") == r.label for r in records]))


def agreement(records: Sequence[Record]) -> float | None:
    """Share of verdicts that name the same response in both orders; two missing verdicts agree (LLMBar's rule)."""
    twins = [(r, twin) for r, twin in with_twins(records) if r.order == "AB" and twin]
    return float(np.mean([r.winner == twin.winner for r, twin in twins])) if twins else None


def flip_rate(records: Sequence[Record]) -> float | None:
    """Share of verdicts that change with the order, among those with a verdict in both orders."""
    twins = [(r, t) for r, t in with_twins(records) if r.order == "AB" and t and r.verdict and t.verdict]
    return float(np.mean([flipped(r, twin) for r, twin in twins])) if twins else None


def best_of(records: Sequence[Record]) -> float:
    """Share of the showings of a row (one order, one sample) in which every pair is right."""
    showings = defaultdict(list)
    for record in records:
        showings[record.order, record.sample].append(record.correct)
    return float(np.mean([all(right) for right in showings.values()]))


def top_score(records: Sequence[Record]) -> float:
    """`rating_credit` of a row, where an answer's rating is its mean score over all showings of its pairs."""
    chosen, rejected = [], {record.pair_id: [] for record in records}
    for record in records:
        right, wrong = answer_scores(record)
        chosen.append(right)
        rejected[record.pair_id].append(wrong)
    return rating_credit([mean_rating(scores) for scores in (chosen, *rejected.values())])


def answer_scores(record: Record) -> tuple[float | None, float | None]:
    """The scores of the better and of the worse response; None where the judge gave none or it cannot be read."""
    shown = (*(record.scores or ()), None, None)[:2]
    return shown if record.better_slot == "A" else shown[::-1]


def mean_rating(scores: Iterable[float | None]) -> float | None:
    """Mean of the scores that could be read; None where none could."""
    readable = [score for score in scores if score is not None]
    return fmean(readable) if readable else None


# --------------------------------------------------------------------------------- RewardBench 2 by ratings of answers


def rating_credit(ratings: Sequence[float | None], unreadable: float = 0.25) -> float:
    """What a row of RewardBench 2 is worth when every answer is rated on its own.

    Args:
        ratings: One for each answer, the correct answer first; None where no rating could be read.
        unreadable: The worth of a row without any readable rating: upstream 0.25, strictly 0.

    Returns:
        1/k when the correct answer is among the k with the top rating, else 0.
    """
    readable = [rating for rating in ratings if rating is not None]
    if not readable:
        return unreadable
    top = max(readable)
    return (ratings[0] == top) / readable.count(top)


@dataclass(frozen=True)
class TiesPrompt:
    """One prompt of the Ties subset, rated: ``id`` is ``"ref:N"`` or ``"tied:N"``, the correct answers come first.

    A rating is None where it could not be read. The margin of such a prompt is minus infinity, which is the least that
    a prompt can be worth: a judge must not gain by what it does not say.
    """

    id: str
    ratings: Sequence[float | None]
    num_correct: int

    @property
    def readable(self) -> bool:
        """Every answer has a rating."""
        return None not in self.ratings

    @property
    def spread(self) -> float:
        """Best minus worst correct answer; 0 where a rating is missing."""
        correct = self.ratings[: self.num_correct]
        return max(correct) - min(correct) if self.readable else 0.0

    @property
    def margin(self) -> float:
        """Worst correct minus best incorrect answer; the prompt is accurate when it is positive."""
        if not self.readable:
            return -math.inf
        return min(self.ratings[: self.num_correct]) - max(self.ratings[self.num_correct :])


TIES_WEIGHTS = {
    "tied accuracy": 0.30,
    "ref accuracy": 0.30,
    "margin over spread": 0.20,
    "lesser margin over spread": 0.20,
    "tanh": 0.01,
}
"""The parts of RewardBench 2's score on Ties; it is the sum of their means with these weights, at most 1.01."""


def ties_score(prompts: Sequence[TiesPrompt]) -> dict[str, float]:
    """RewardBench 2's Ties subset.

    With s the spread among a tied prompt's correct answers, m its margin and m' the smaller of m and the margin of its
    ref prompt: 0.30 tied accuracy + 0.30 ref accuracy + 0.20 share(m > s) + 0.20 share(m' > s) + 0.01 mean
    tanh(m' / s - 1), where 0 / 0 counts 0. The shares are over the numbers N that have both prompts.

    Returns:
        The five parts and ``"overall"``.

    Raises:
        ValueError: a prompt is malformed, or no number N has both prompts.
    """
    worth = ties_parts(prompts)
    if {part for part, _, _ in worth} < set(TIES_WEIGHTS):
        raise ValueError("the Ties subset needs a ref and a tied prompt of one number")
    means = {name: fmean(value for part, _, value in worth if part == name) for name in TIES_WEIGHTS}
    return means | {"overall": math.fsum(weight * means[name] for name, weight in TIES_WEIGHTS.items())}


def ties_parts(prompts: Sequence[TiesPrompt]) -> list[tuple[str, str, float]]:
    """What is averaged in `ties_score`: (name of the part, number N, worth), a row for each prompt or pair of prompts.

    Raises:
        ValueError: a prompt is malformed.
    """
    by_kind: dict[str, dict[str, TiesPrompt]] = {"ref": {}, "tied": {}}
    for prompt in prompts:
        kind, _, number = prompt.id.partition(":")
        if kind not in by_kind or not 1 + (kind == "tied") <= prompt.num_correct < len(prompt.ratings):
            raise ValueError(f"{prompt.id!r}: not a rated prompt of the Ties subset")
        by_kind[kind][number] = prompt
    worth = [
        (f"{kind} accuracy", number, float(prompt.margin > 0))
        for kind, of_kind in by_kind.items()
        for number, prompt in of_kind.items()
    ]
    for number in by_kind["tied"].keys() & by_kind["ref"].keys():
        tied, ref = by_kind["tied"][number], by_kind["ref"][number]
        lesser = min(tied.margin, ref.margin)
        worth.append(("margin over spread", number, float(tied.margin > tied.spread)))
        worth.append(("lesser margin over spread", number, float(lesser > tied.spread)))
        worth.append(("tanh", number, _tanh(lesser, tied.spread)))
    return worth


def _tanh(margin: float, spread: float) -> float:
    """Tanh(margin / spread - 1), in the limit where the spread is 0."""
    if spread == 0:
        return float(np.sign(margin))
    return math.tanh(margin / spread - 1)


# ---------------------------------------------------------------------------------------------- PandaLM's three classes


def macro_figures(counts: np.ndarray) -> np.ndarray:
    """Macro precision, recall and F1; a class without a denominator counts 0.

    Args:
        counts: How often each label met each verdict, float [..., 9], by label and then verdict, both in the order of
            `nlhf.pairs.LABELS`.

    Returns:
        Float [..., 3].
    """
    confusion = counts.reshape(*counts.shape[:-1], 3, 3)
    hits = np.diagonal(confusion, axis1=-2, axis2=-1)
    said, true = confusion.sum(axis=-2), confusion.sum(axis=-1)
    parts = (hits / np.maximum(said, 1), hits / np.maximum(true, 1), 2 * hits / np.maximum(said + true, 1))
    return np.stack([part.mean(axis=-1) for part in parts], axis=-1)
