"""Rollouts of a judge on labelled pairs, each with the reward that MetaRM is to predict.

Station of the path: Verdict -> **rewards**. The target is the exact reward of RM-NLHF on a pair with a human critique:
0 for a wrong label, 1 for a right one whose critique agrees with the human's by F1 < 0.5, 1.5 for F1 >= 0.5. Format
failures, and critiques that the scorer could not score, have no target: they are kept in the file, counted, and not
learned from.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.files import append_jsonl, check_fields, read_jsonl, write_jsonl
from nlhf.judge import Judge, Order
from nlhf.pairs import Label, Pair
from nlhf.rewards import CritiqueReward, RewardConfig, Rollout, total_reward, well_formed

PAIRS_FILE, ROLLOUTS_FILE = "pairs.jsonl", "rollouts.jsonl"
TARGETS = RewardConfig()
"""The weights of the targets, the paper's whatever weights a run gives to its rewards."""


@dataclass(frozen=True)
class Example:
    """One rollout of a judge with what MetaRM is to predict: one line of ``rollouts.jsonl``.

    Attributes:
        pair_id: The pair.
        order: ``"AB"`` as in the data, ``"BA"`` with the responses exchanged.
        sample: Index among the pair's rollouts.
        reply: The whole reply.
        critique: What the judge wrote as its reasons.
        verdict: The judge's label in the order shown.
        correct: The label is right.
        f1: Agreement with the human critique; None where the label is wrong.
        target: The reward, 0, 1 or 1.5; None when there is none.
        dropped: Why there is no target.
    """

    pair_id: str
    order: Order
    sample: int
    reply: str
    critique: str | None
    verdict: Label | None
    correct: bool
    f1: float | None = None
    target: float | None = None
    dropped: str | None = None

    @property
    def sound(self) -> bool:
        """The process reward is 1: the label is right and the critique agrees with the human's."""
        return self.target is not None and self.target > 1.0


@dataclass
class Rollouts:
    """Rollouts and the pairs that they are about.

    Attributes:
        pairs: The pairs by id, in the data's order of responses.
        examples: All rollouts, by pair and sample; also those without a target.
    """

    pairs: dict[str, Pair]
    examples: list[Example]

    @property
    def usable(self) -> list[Example]:
        """The rollouts that have a target."""
        return [e for e in self.examples if e.target is not None]

    def counts(self) -> dict[str, Any]:
        """How many rollouts there are, how they are rewarded, and how many were dropped and why."""
        return {
            "pairs": len(self.pairs),
            "rollouts": len(self.examples),
            "targets": {f"{t:g}": n for t, n in sorted(Counter(e.target for e in self.usable).items())},
            "dropped": dict(Counter(e.dropped for e in self.examples if e.dropped)),
        }

    def shown(self, example: Example) -> Pair:
        """The pair of a rollout as the judge saw it."""
        pair = self.pairs[example.pair_id]
        return pair if example.order == "AB" else pair.swap()

    @classmethod
    def read(cls, folder: str | Path) -> "Rollouts":
        """Read what `draw` left in a folder.

        Raises:
            UserError: the folder has no rollouts, or they are not whole.
        """
        folder = Path(folder)
        pairs = {}
        for number, row in read_jsonl(folder / PAIRS_FILE):
            pair = Pair.from_dict(row, f"{folder / PAIRS_FILE}:{number}")
            pairs[pair.id] = pair
        examples = _read_examples(folder / ROLLOUTS_FILE)
        if stranger := next((e for e in examples if e.pair_id not in pairs), None):
            raise UserError(f"{folder / ROLLOUTS_FILE}: pair {stranger.pair_id!r} is not in {PAIRS_FILE}")
        missing = sorted(pairs.keys() - {e.pair_id for e in examples})
        if missing:
            raise UserError(
                f"{folder}: {len(missing)} of {len(pairs)} pairs have no rollout (an interrupted run?), for example "
                f"{missing[0]!r}; finish that run with --resume true"
            )
        return cls(pairs, examples)


def require_labelled(pairs: Sequence[Pair], what: str) -> list[Pair]:
    """The pairs that have both a label and a human critique.

    Raises:
        UserError: there is none.
    """
    labelled = [p for p in pairs if p.has_critique and p.label is not None]
    if not labelled:
        raise UserError(
            f"{what}: none of the {len(pairs)} pairs has a label and a human critique, so there is no reward to learn. "
            "Check field 'critiques' of the data and data.labelled_fraction"
        )
    return labelled


def judge_pairs(
    judge: Judge,
    shown: Sequence[Pair],
    originals: dict[str, Pair],
    reward: CritiqueReward,
    samples: int,
    limits: RewardConfig = TARGETS,
) -> list[Example]:
    """Rollouts on pairs as they are shown, with their targets.

    Args:
        judge: The judge.
        shown: Labelled pairs, some perhaps with their responses exchanged.
        originals: The same pairs in the data's order, by id.
        reward: Compares critiques with the humans'.
        samples: Rollouts of each pair.
        limits: The format rule.
    """
    judgements = judge.judge(shown, orders=("AB",), samples=samples)
    pairs = [pair for pair in shown for _ in range(samples)]
    rollouts = [
        Rollout(pair, j.verdict, j.verdict.raw, well_formed(j.verdict, limits))
        for pair, j in zip(pairs, judgements, strict=True)
    ]
    matches = reward.compare(rollouts)
    return [
        _example(rollout, match, reward, j.sample, "AB" if rollout.pair == originals[j.pair_id] else "BA")
        for rollout, match, j in zip(rollouts, matches, judgements, strict=True)
    ]


def _example(
    rollout: Rollout, match: CritiqueMatch | None, reward: CritiqueReward, sample: int, order: Order
) -> Example:
    target = target_of(rollout, match, reward)
    dropped = None if target is not None else "scorer failure" if rollout.well_formed else "format failure"
    return Example(
        pair_id=rollout.pair.id,
        order=order,
        sample=sample,
        reply=rollout.text,
        critique=rollout.verdict.critique,
        verdict=rollout.verdict.label,
        correct=rollout.correct,
        f1=match.f1 if match and not match.failure else None,
        target=target,
        dropped=dropped,
    )


def target_of(rollout: Rollout, match: CritiqueMatch | None, reward: CritiqueReward) -> float | None:
    """What MetaRM is to predict for a rollout of a labelled pair; None where there is nothing to learn.

    Args:
        rollout: The rollout.
        match: Agreement of its critique with the human's; None where it was not scored.
        reward: Turns agreement into a bonus.
    """
    if not rollout.well_formed or not rollout.pair.has_critique or (match and match.failure):
        return None
    return total_reward(rollout, reward.bonus(rollout, match), TARGETS)


def draw(
    judge: Judge,
    shown: Sequence[Pair],
    originals: dict[str, Pair],
    reward: CritiqueReward,
    samples: int,
    folder: Path,
    limits: RewardConfig = TARGETS,
    chunk: int = 64,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Append the rollouts of pairs that have none yet to ``rollouts.jsonl``; arguments as of `judge_pairs`."""
    path = folder / ROLLOUTS_FILE
    had = Counter((e.pair_id, e.order) for e in (_read_examples(path, skip_torn=True) if path.is_file() else []))
    orders = [("AB" if pair == originals[pair.id] else "BA") for pair in shown]
    owed = [pair for pair, order in zip(shown, orders, strict=True) if had[pair.id, order] < samples]
    if progress:
        progress(len(shown) - len(owed))
    for start in range(0, len(owed), chunk):
        part = owed[start : start + chunk]
        for example in judge_pairs(judge, part, originals, reward, samples, limits):
            append_jsonl(path, asdict(example))
        if progress:
            progress(len(part))


def tidy(folder: Path, pairs: Sequence[Pair]) -> None:
    """Put ``rollouts.jsonl`` in the order of the pairs, without torn or double lines, whoever wrote it and when."""
    position = {pair.id: i for i, pair in enumerate(pairs)}
    examples = _read_examples(folder / ROLLOUTS_FILE, skip_torn=True)
    unique = {(position[e.pair_id], e.order, e.sample): e for e in examples}
    write_jsonl(folder / ROLLOUTS_FILE, [asdict(unique[key]) for key in sorted(unique)])


def _read_examples(path: Path, skip_torn: bool = False) -> list[Example]:
    examples = []
    for number, row in read_jsonl(path, skip_torn=skip_torn):
        where = f"{path}:{number}"
        try:
            example = Example(**row)
        except TypeError as error:
            raise UserError(f"{where}: not a rollout written by this version ({error})") from None
        check_fields(row, get_type_hints(Example), where)
        if example.target is not None and not (example.critique and math.isfinite(example.target)):
            raise UserError(f"{where}: a target of {example.target} needs a critique and must be a finite number")
        examples.append(example)
    return examples
