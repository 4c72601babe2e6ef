"""One decision on a pair from all its judgements: every order, every sample.

Station of the path: Verdict -> **Decision**, for who asks which response is better rather than how good the judge is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nlhf.evaluation.records import reply_hash
from nlhf.judge import Judgement, Order, VoteRule, pair_probabilities, vote
from nlhf.pairs import Label


@dataclass(frozen=True)
class Decision:
    """Which response is better by all judgements of one pair, in the order in which the responses were given.

    Attributes:
        label: ``"A"``, ``"B"``, ``"tie"`` (also where the judge contradicts itself), or None without any verdict.
        probability: That A is better, the mean over orders and samples; None where the judge gives none.
        strength: How much better, mean over the judgements that say it, negative for A; None where none does.
        consistent: Both orders name the same response; None where one of them was not judged or has no verdict.
        judgements: What it rests on.
    """

    label: Label | None
    probability: float | None
    strength: float | None
    consistent: bool | None
    judgements: tuple[Judgement, ...]

    @classmethod
    def of(cls, judgements: Sequence[Judgement], rule: VoteRule = "majority") -> "Decision":
        """Decide a pair.

        Args:
            judgements: All judgements of one pair.
            rule: How verdicts become one, see `nlhf.judge.vote`. Where the judge gives probabilities these decide: a
                judge that is 90 % sure in one order and 60 % sure of the other response in the other has not
                contradicted itself beyond repair.
        """
        probability = next(iter(pair_probabilities(judgements).values()), None)
        strengths = [j.strength for j in judgements if j.strength is not None]
        return cls(
            label=_label(judgements, probability, rule),
            probability=probability,
            strength=fmean(strengths) if strengths else None,
            consistent=_consistent(judgements),
            judgements=tuple(judgements),
        )

    def __str__(self) -> str:
        """``A is better (probability 0.93, both orders agree)``, then the critique of each judgement."""
        facts = []
        if self.probability is not None:
            facts.append(f"probability of A {self.probability:.2f}")
        if self.strength is not None:
            facts.append(f"strength {self.strength:+.1f}")
        if self.consistent is not None:
            facts.append("both orders agree" if self.consistent else "the orders disagree")
        heading = {None: "no verdict", "tie": "undecided"}.get(self.label, f"{self.label} is better")
        lines = [f"{heading} ({', '.join(facts)})" if facts else heading]
        lines += [f"\n{title(j)}\n{j.verdict.critique or '(no critique)'}" for j in self.judgements]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; labels in the order given, critiques and replies as written in the order shown."""
        return {
            "label": self.label,
            "probability": self.probability,
            "strength": self.strength,
            "consistent": self.consistent,
            "judgements": [_row(j) for j in self.judgements],
        }


def title(judgement: Judgement) -> str:
    """Which judgement it is and what it says: ``Order BA, sample 1: B (in this order the critique's A is B)``."""
    said = judgement.label or "no verdict"
    cut = ", cut off by the token limit" if judgement.verdict.truncated else ""
    sample = f", sample {judgement.sample + 1}" if judgement.sample else ""
    exchanged = judgement.order == "BA" and judgement.verdict.critique
    shown = " (its critique calls B the first response, A)" if exchanged else ""
    return f"Order {judgement.order}{sample}: {said}{cut}{shown}"


def _row(judgement: Judgement) -> dict[str, Any]:
    verdict = judgement.verdict
    return {
        "order": judgement.order,
        "sample": judgement.sample,
        "label": judgement.label,
        "probability": judgement.probability_a,
        "strength": judgement.strength,
        "critique": verdict.critique,
        "truncated": verdict.truncated,
        "tokens": judgement.tokens,
        "prompt_hash": judgement.prompt_hash,
        "reply_hash": reply_hash(verdict.raw),
        "reply": verdict.raw,
    }


def _label(judgements: Sequence[Judgement], probability: float | None, rule: VoteRule) -> Label | None:
    said = {j.label for j in judgements}
    if probability is None or said <= {"tie", None}:
        return vote(judgements, rule)
    return "A" if probability > 0.5 else "B" if probability < 0.5 else "tie"


def _consistent(judgements: Sequence[Judgement]) -> bool | None:
    by_order: dict[Order, list[Judgement]] = {}
    for judgement in judgements:
        by_order.setdefault(judgement.order, []).append(judgement)
    labels = [vote(found) for found in by_order.values()]
    return None if len(labels) < 2 or None in labels else labels[0] == labels[1]
