"""Rewards of RM-NLHF as plain callables: format, outcome, process, and their sum.

Station of the path: Verdict -> **rewards** -> trainer. Source: arXiv 2601.07349 and its public code. For a rollout of a
pair whose better response is known:

1. format: critique or choice missing, or a critique of more than 4 lines or 1,500 characters: R = -1, whatever else.
2. outcome: a wrong label is R = 0 and its critique earns nothing.
3. process: a right label is R = 1 + 0.5 * bonus, where the bonus in [0, 1] comes from a `ProcessReward`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from nlhf.config import ClassSpec
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer
from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.verdict import Verdict

DEFAULT_SCORER = "learned"
"""What compares critiques where nothing else is asked for: it agrees best with people (docs/critique_scorers.md)."""


@dataclass
class RewardConfig:
    """Weights and limits of the reward."""

    process_weight: float = 0.5
    """What a full process bonus adds to a right label."""

    format_penalty: float = -1.0
    """Reward of a reply without a critique, without a verdict, or over the limits."""

    combine: Literal["add", "multiply"] = "add"
    """add: 1 + process_weight * bonus (the paper); multiply: a right label is worth exactly its bonus."""

    max_lines: int = 4
    """More critique lines than this are a format failure: listing everything must not pay."""

    max_characters: int = 1500
    """A longer critique is a format failure."""

    def __post_init__(self):
        if self.process_weight < 0:
            raise UserError(f"reward.process_weight must not be negative, got {self.process_weight}")
        if self.max_lines < 1 or self.max_characters < 1:
            raise UserError("reward.max_lines and reward.max_characters must be at least 1")


@dataclass(frozen=True)
class Rollout:
    """One reply of the judge during training: what it read, what it wrote, what that means."""

    pair: Pair
    verdict: Verdict
    text: str
    well_formed: bool

    @property
    def correct(self) -> bool:
        """The verdict names the better response (a reply without a verdict does not)."""
        return self.verdict.label is not None and self.verdict.label == self.pair.label


class ProcessReward(Protocol):
    """A bonus in [0, 1] for the critique of each rollout; None where it has nothing to say.

    It sees every rollout of the step, also wrong and ill-formed ones (a learning reward needs them as examples), but
    its bonus counts only where the label is right and the reply well-formed. ``log_metric(name, value)`` records a
    figure.

    An attribute ``gated = False`` takes the label's gate away: what is returned is then the row's reward itself, not a
    bonus in [0, 1], and stands whatever the label (only a format failure still costs its penalty).
    """

    def __call__(self, rollouts: Sequence[Rollout], log_metric: Callable[[str, float], None]) -> list[float | None]:
        """One bonus a rollout."""
        ...


@runtime_checkable
class LearningReward(ProcessReward, Protocol):
    """A process reward that learns from the rollouts that it sees.

    It is called once for each optimiser step of the judge, in all processes at once, which must all end with the same
    state. Its state is saved with every checkpoint and restored on resuming.

    Attributes:
        training: False while the trainer evaluates; it must not learn then. The trainer sets it.
    """

    training: bool

    def prepare(self) -> None:
        """Load what is heavy; called once, when the processes know of each other but no folder is made yet."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that changes by learning, as `torch.save` can write it and `torch.load` can safely read it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, exactly."""
        ...


class CritiqueReward:
    """Agreement of the critique with the human's, for pairs that have a human critique; None for the others.

    ``hard``: 1 if F1 >= threshold else 0 (the paper); ``soft``: F1 itself. A failure of the scorer is a bonus of 0 that
    is counted in ``process/scorer_failures``. Without a scorer it is `DEFAULT_SCORER`.
    """

    def __init__(
        self, scorer: CritiqueScorer | None = None, form: Literal["hard", "soft"] = "hard", threshold: float = 0.5
    ):
        if scorer is None:
            scorer = ClassSpec(DEFAULT_SCORER).build()
        if not 0 < threshold <= 1:
            raise UserError(f"process reward: threshold must lie in (0, 1], got {threshold}")
        if not hasattr(scorer, "score"):
            raise UserError(
                f"process reward: scorer must be a critique scorer, got {scorer!r}; write {{class_path: exact}}, say"
            )
        self.scorer, self.form, self.threshold = scorer, form, threshold

    def __call__(self, rollouts: Sequence[Rollout], log_metric: Callable[[str, float], None]) -> list[float | None]:
        """See `ProcessReward`. Only well-formed rollouts with the right label are scored."""
        matches = self.compare(rollouts)
        self.log(matches, log_metric)
        return [self.bonus(rollout, match) for rollout, match in zip(rollouts, matches, strict=True)]

    def compare(self, rollouts: Sequence[Rollout]) -> list[CritiqueMatch | None]:
        """Agreement of each critique with the human's; None where it earns nothing, whatever it says."""
        scored = [i for i, r in enumerate(rollouts) if r.pair.has_critique and r.well_formed and r.correct]
        found = self.scorer.score([rollouts[i].verdict.critique for i in scored], [rollouts[i].pair for i in scored])
        matches: list[CritiqueMatch | None] = [None] * len(rollouts)
        for i, match in zip(scored, found, strict=True):
            matches[i] = match or CritiqueMatch(0.0, 0.0, 0.0, failure="the human critique holds no argument")
        return matches

    def bonus(self, rollout: Rollout, match: CritiqueMatch | None) -> float | None:
        """The bonus of one rollout from what `compare` found; None for a pair without a human critique."""
        if not rollout.pair.has_critique:
            return None
        if match is None or match.failure:
            return 0.0
        return match.f1 if self.form == "soft" else float(match.f1 >= self.threshold)

    def log(self, matches: Sequence[CritiqueMatch | None], log_metric: Callable[[str, float], None]) -> None:
        """Record failures, mean F1 and the share that repeats itself, among the critiques that were scored."""
        found = [match for match in matches if match is not None]
        scored = [match for match in found if not match.failure]
        log_metric("process/scorer_failures", len(found) - len(scored))
        if scored:
            log_metric("process/f1", sum(m.f1 for m in scored) / len(scored))
            log_metric("process/repeated", sum(m.repeated for m in found) / len(found))


def well_formed(verdict: Verdict, config: RewardConfig) -> bool:
    """The format rule: a critique and a verdict, and the critique within the limits."""
    critique = verdict.critique
    if verdict.label is None or not critique:
        return False
    lines = [line for line in critique.splitlines() if line.strip()]
    return len(lines) <= config.max_lines and len(critique) <= config.max_characters


def total_reward(rollout: Rollout, bonus: float | None, config: RewardConfig, gated: bool = True) -> float:
    """The reward of one rollout from its process bonus (None: outcome and format alone).

    Args:
        rollout: The rollout.
        bonus: What the process reward returned for it.
        config: Weights and limits.
        gated: The bonus counts only where the label is right; otherwise it is the reward itself (see `ProcessReward`).

    Raises:
        ValueError: the bonus is NaN, or is gated and outside [0, 1]; the message names the pair.
    """
    if bonus is not None and not (0.0 <= bonus <= 1.0 if gated else math.isfinite(bonus)):  # also catches NaN
        allowed = "lies outside [0, 1]" if gated else "is not finite"
        raise ValueError(f"pair {rollout.pair.id!r}: process bonus {bonus} {allowed}")
    if not rollout.well_formed:
        return config.format_penalty
    if bonus is not None and not gated:
        return bonus
    if not rollout.correct:
        return 0.0
    if bonus is None:
        return 1.0
    return bonus if config.combine == "multiply" else 1.0 + config.process_weight * bonus


class JudgeReward:
    """The one reward function that the trainer calls: reads replies, adds up the parts, logs each of them.

    trl passes the completions with the data set's columns; column ``pair_index`` points into ``pairs``.
    """

    __name__ = "judge_reward"  # trl names its metrics after it

    def __init__(
        self,
        pairs: Sequence[Pair],
        parse: Callable[[str], Verdict],
        config: RewardConfig,
        process: ProcessReward | None = None,
        record: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ):
        """Set up the reward.

        Args:
            pairs: The training pairs, in the order in which they are shown.
            parse: Reads a reply.
            config: Weights and limits.
            process: Gives the bonus for the critique; None is the outcome-only baseline.
            record: Is handed (step, rows) to keep rollouts for reading.
        """
        self.pairs, self.parse, self.config, self.process, self.record = pairs, parse, config, process, record

    def __call__(
        self,
        completions: Sequence[Any],
        pair_index: Sequence[int],
        log_metric: Callable[[str, float], None],
        trainer_state: Any = None,
        **_: Any,
    ) -> list[float]:
        """Rewards of a batch of completions, float [n]."""
        rollouts = [self._rollout(text, i) for text, i in zip(map(_text, completions), pair_index, strict=True)]
        bonuses = self.process(rollouts, log_metric) if self.process else [None] * len(rollouts)
        gated = getattr(self.process, "gated", True)
        rewards = [total_reward(r, b, self.config, gated) for r, b in zip(rollouts, bonuses, strict=True)]
        self._log(rollouts, bonuses, log_metric)
        if self.record:
            step = trainer_state.global_step if trainer_state else 0
            self.record(step, [_sample(*parts) for parts in zip(rollouts, bonuses, rewards, strict=True)])
        return rewards

    def _rollout(self, text: str, index: int) -> Rollout:
        verdict = self.parse(text)
        return Rollout(self.pairs[index], verdict, text, well_formed(verdict, self.config))

    def _log(self, rollouts: Sequence[Rollout], bonuses: Sequence[float | None], log_metric: Callable) -> None:
        n = len(rollouts)
        log_metric("format_rate", sum(r.well_formed for r in rollouts) / n)
        log_metric("verdict_rate", sum(r.verdict.label is not None for r in rollouts) / n)
        log_metric("outcome", sum(r.correct and r.well_formed for r in rollouts) / n)
        log_metric("labelled_rate", sum(r.pair.has_critique for r in rollouts) / n)
        log_metric("process/unscored_wrong_label", sum(r.well_formed and not r.correct for r in rollouts) / n)
        counted = [b for r, b in zip(rollouts, bonuses, strict=True) if b is not None and r.well_formed and r.correct]
        if counted:
            log_metric("process/bonus", sum(counted) / len(counted))


def _text(completion: Any) -> str:
    """Trl gives a plain completion as a string, a conversational one as a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def _sample(rollout: Rollout, bonus: float | None, reward: float) -> dict[str, Any]:
    pair, verdict = rollout.pair, rollout.verdict
    return {
        "pair_id": pair.id,
        "context": [turn.content for turn in pair.context],
        "response_a": pair.response_a,
        "response_b": pair.response_b,
        "label": pair.label,
        "reply": rollout.text,
        "verdict": verdict.label,
        "critique": verdict.critique,
        "well_formed": rollout.well_formed,
        "bonus": bonus,
        "reward": reward,
    }
