"""Which of two responses is better, asked many times: what rewards and selection put between themselves and a judge.

Station of the path: Verdict -> Decision -> **margin** -> rewards. A `Comparer` asks for many pairs in one batch and no
question twice, and makes one number of the verdicts of both orders.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from nlhf.errors import UserError
from nlhf.evaluation.decision import Decision
from nlhf.formats.base import JudgeFormat
from nlhf.generation import SamplingConfig, check_lengths
from nlhf.generation.backends import BackendConfig, GenerationFailed
from nlhf.judge import ORDERS, Mode, shown_pairs
from nlhf.judging import PairJudge, load_judge
from nlhf.models import ModelConfig
from nlhf.pairs import Pair, Turn
from nlhf.presets import apply_preset

_CACHED = 100_000  # comparisons, about 20 MB
_VALUE = {"A": 1.0, "tie": 0.0, "B": -1.0}


@dataclass
class JudgeConfig:
    """The judge that rewards a policy; it sees every pair in both orders."""

    model: ModelConfig | None = None
    """The judge's model; may be left out where a preset names one."""

    preset: str | None = None
    """A released judge of nlhf.presets.PRESETS: model, format and sampling where you do not set them."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    """What runs the model: transformers, vLLM, or a server."""

    format: str | None = None
    """Judge format; rm_nlhf, or the preset's, where it is left out."""

    prompt_file: str | None = None
    """Jinja template that replaces the format's own prompt."""

    mode: Mode = "generate"
    """generate reads the verdict from a reply; probability compares the probabilities of the verdicts."""

    sampling: SamplingConfig | None = None
    """How the judge's replies are drawn; greedy, or as the preset says, where it is left out."""

    samples: int = 1
    """Replies to each prompt; more than one needs a temperature above 0."""

    def load(self) -> PairJudge:
        """The judge.

        Raises:
            UserError: it cannot be loaded, or the settings do not fit each other.
        """
        return load_judge(
            self.model,
            self.preset,
            self.backend,
            self.format,
            self.prompt_file,
            mode=self.mode,
            sampling=self.sampling,
            samples=self.samples,
        )

    def identity(self) -> dict[str, Any]:
        """What a run's manifest says of the judge: whose verdicts they are."""
        model = self.model or ModelConfig(**apply_preset(self.preset, {})["model"])
        return {
            "model": model.name,
            "weights": self.backend.weights_hash(model),
            "backend": self.backend.identity(model),
        }


class Comparison(NamedTuple):
    """Two responses to a conversation, to be compared; None is one that is malformed and cannot be shown."""

    context: tuple[Turn, ...]
    first: str | None
    second: str | None


class _Answer(NamedTuple):
    """What is remembered of a comparison: the margin of the pair's response A, and whether the orders agree."""

    margin: float | None
    consistent: bool | None


class Comparer:
    """Asks a judge which of two responses is better, all at once, and no question twice.

    A pair is put to the judge in one arrangement, whichever response is named first, and then in both orders: so the
    margin of (b, a) is that of (a, b) with the other sign, exactly, also for a judge that samples.

    Attributes:
        counts: Since the last reset: ``comparisons`` (different ones in each call), ``cached`` among them, ``calls``
            (prompts that the judge was given, times samples), ``invalid`` (no verdict in one of the orders),
            ``both`` (a verdict in both orders) and ``agreed`` among them.
    """

    def __init__(self, judge: PairJudge, cached: int = _CACHED):
        """Set up.

        Args:
            judge: The judge.
            cached: Comparisons that are remembered; the oldest are forgotten.

        Raises:
            UserError: the judge sees one order only, or rates single responses.
        """
        if set(judge.orders) != set(ORDERS):
            raise UserError("a judge that compares for a reward must see both orders; set orders to both")
        if judge.judge.format.pointwise:
            raise UserError(
                f"format {judge.judge.format.name!r} rates one response at a time; a reward by comparison needs a "
                "format that shows two"
            )
        self.judge, self.cached, self.counts = judge, cached, Counter()
        self._answers: dict[str, _Answer] = {}

    @property
    def format(self) -> JudgeFormat:
        """The judge's format."""
        return self.judge.judge.format

    def margins(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        """How much better the first response of each comparison is, [n] in [-1, 1], see `margin_of`.

        Without asking, two equal responses are 0, and a malformed one loses to any other: as with HER-RM's negative
        principles, a violation loses outright, and two make a tie.

        Raises:
            UserError: the judge gave no reply, or cannot read a prompt; the message names it. What was answered is
                remembered, so that the call can be repeated.
        """
        whole = {i: c for i, c in enumerate(comparisons) if c.first is not None and c.second is not None}
        judged = dict(zip(whole, self._judged(list(whole.values())), strict=True))
        return [
            judged[i] if i in judged else float((c.first is not None) - (c.second is not None))
            for i, c in enumerate(comparisons)
        ]

    def _judged(self, comparisons: Sequence[Comparison]) -> list[float | None]:
        asked = [_arranged(comparison) for comparison in comparisons]
        pairs = {pair.key: pair for pair, _ in asked if pair is not None}
        owed = [pair for key, pair in pairs.items() if key not in self._answers]
        if owed:
            self._ask(owed)
        answers = {key: self._answers[key] for key in pairs}
        self._count(answers.values(), len(owed))
        for key in list(self._answers)[: max(0, len(self._answers) - self.cached)]:
            del self._answers[key]
        found = [(None, 0.0) if pair is None else (answers[pair.key].margin, sign) for pair, sign in asked]
        return [
            0.0 if pair is None else None if margin is None else sign * margin
            for (pair, _), (margin, sign) in zip(asked, found, strict=True)
        ]

    def _ask(self, pairs: Sequence[Pair]) -> None:
        try:
            decisions, failed = self.judge.decide_answered(pairs)
        except GenerationFailed:
            raise
        except UserError as error:
            raise self._culprit(pairs, error) from error
        by_id = {pair.id: pair for pair in pairs}
        self._answers |= {
            by_id[name].key: _Answer(margin_of(decision), decision.consistent) for name, decision in decisions.items()
        }
        self.counts["calls"] += len(decisions) * len(self.judge.orders) * self.judge.samples
        if failed:
            raise failed

    def _culprit(self, pairs: Sequence[Pair], error: UserError) -> UserError:
        """The error of the first pair that the judge cannot read on its own, with its prompt's name."""
        for pair in pairs:
            prompts = [self.format.render(shown) for _, shown in shown_pairs([pair])]
            try:
                check_lengths(self.judge.judge.generator, self.judge.mode, prompts)
            except UserError as own:
                return UserError(f"the judge cannot compare two responses to prompt {pair.id!r}: {own}")
        return UserError(f"the judge failed, first asked about prompt {pairs[0].id!r}: {error}")

    def _count(self, answers: Collection[_Answer], asked: int) -> None:
        self.counts["comparisons"] += len(answers)
        self.counts["cached"] += len(answers) - asked
        self.counts["invalid"] += sum(answer.margin is None for answer in answers)
        self.counts["both"] += sum(answer.consistent is not None for answer in answers)
        self.counts["agreed"] += sum(answer.consistent is True for answer in answers)


def _arranged(comparison: Comparison) -> tuple[Pair | None, float]:
    """The pair to judge, the lesser text as A, and the sign of its margin; None where both responses are equal."""
    context, first, second = comparison
    if first == second:
        return None, 0.0
    a, b = sorted((first, second))
    pair = Pair("unnamed", list(context), a, b)
    words = " ".join(context[-1].content.split())
    name = f"{words[:60]}{'...' if len(words) > 60 else ''} [{pair.key[:12]}]"
    return Pair(name, list(context), a, b), 1.0 if first == a else -1.0


def margin_of(decision: Decision) -> float | None:
    """How much better response A is by a decision: 1 it wins, 0 tie, -1 it loses, the mean over both orders.

    Several samples of an order are averaged first. Where the judge gives probabilities, their mean over the orders
    decides, and the margin is 1, 0 or -1. None where one of the orders has no verdict.
    """
    by_order: dict[str, list[float]] = {order: [] for order in ORDERS}
    for judgement in decision.judgements:
        if judgement.label is not None:
            by_order[judgement.order].append(_VALUE[judgement.label])
    if not all(by_order.values()):
        return None
    if decision.probability is not None:
        return _VALUE[decision.label]
    return fmean(map(fmean, by_order.values()))
