"""A judge is a format and a generator: it reads pairs, in both orders, and returns judgements.

Station of the path: Pair -> render -> Generator -> text -> parse -> Verdict, for many pairs at once. Instead of reading
a verdict from the text, a judge can ask how likely each verdict is (the modes other than ``generate``). `vote` and
`pair_probabilities` make one result of the several judgements of a pair.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, Protocol, get_args, runtime_checkable

from nlhf.errors import UserError, nearest
from nlhf.formats.base import JudgeFormat, Message
from nlhf.pairs import Label, Pair, other_label
from nlhf.verdict import Verdict, compare_ratings, strip_thinking

Order = Literal["AB", "BA"]
ORDERS: tuple[Order, ...] = ("AB", "BA")
ORDERS_BY_NAME: dict[str, tuple[Order, ...]] = {"both": ORDERS, "AB": ("AB",), "BA": ("BA",)}

Mode = Literal["generate", "probability", "critique_probability"]
"""How a verdict comes about: read from a reply; by probability, without a critique; by probability, after a critique
that the judge writes first."""
MODES: tuple[Mode, ...] = get_args(Mode)

VoteRule = Literal["majority", "mean_strength"]


@dataclass(frozen=True)
class Reply:
    """What a model wrote.

    Attributes:
        text: The reply without special tokens.
        truncated: The token limit cut it off.
        tokens: Its length in tokens.
        ids: What was sampled, with the token that ended the turn: the text does not say which tokens those were. None
            from a generator that does not know them. Equal texts are equal replies, whatever their ids.
    """

    text: str
    truncated: bool
    tokens: int
    ids: tuple[int, ...] | None = field(default=None, repr=False, compare=False)


class Generator(Protocol):
    """Anything that answers chat messages."""

    def generate(
        self, prompts: Sequence[list[Message]], samples: int = 1, progress: Callable[[int], None] | None = None
    ) -> list[list[Reply]]:
        """``samples`` replies to each prompt, in the order of the prompts; ``progress(n)``: n more prompts are done."""
        ...


@runtime_checkable
class ChoiceScorer(Protocol):
    """A generator that can also say how likely given continuations of a reply are."""

    def choice_log_probs(
        self,
        prompts: Sequence[list[Message]],
        prefixes: Sequence[str],
        continuations: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[float]]:
        """Natural log of P(continuation | prompt, prefix), shape [prompts, continuations].

        Args:
            prompts: Chat messages.
            prefixes: How the reply to each prompt begins.
            continuations: How it may go on, none the beginning of another; the same for all prompts.
            progress: ``progress(n)``: n more prompts are done.
        """
        ...


@dataclass(frozen=True)
class Judgement:
    """One verdict on one pair in one order.

    Attributes:
        pair_id: The pair.
        order: ``"AB"`` as in the data, ``"BA"`` with the responses exchanged.
        sample: Index of the vote, from 0.
        verdict: In the order shown.
        prompt_hash: SHA-256 of the rendered messages, first 16 digits.
        tokens: Length of the reply (of the critique before a forced verdict).
        probability: P(the response shown first is better | one of the two is); None in mode ``generate``.
        tie_probability: P(tie | any verdict), where the format has ties, in the other modes.
        mass: P(any verdict) at the place of the forced verdict. Near 1 in a judge that knows the format; where it is
            tiny, the model was about to write something else, and the probabilities say little.
    """

    pair_id: str
    order: Order
    sample: int
    verdict: Verdict
    prompt_hash: str
    tokens: int
    probability: float | None = None
    tie_probability: float | None = None
    mass: float | None = None

    @property
    def label(self) -> Label | None:
        """The verdict in the data's own order, whatever order was shown."""
        return self.verdict.label if self.order == "AB" else other_label(self.verdict.label)

    @property
    def probability_a(self) -> float | None:
        """`probability` in the data's own order: that ``response_a`` is the better one."""
        return self.probability if self.order == "AB" or self.probability is None else 1 - self.probability

    @property
    def strength(self) -> float | None:
        """How much better, in the data's own order, negative for A: the verdict's strength, else score B less score A.

        None where the verdict has neither (or scores of more than two).
        """
        strength, scores = self.verdict.strength, self.verdict.scores
        if strength is None and scores is not None and len(scores) == 2:
            strength = scores[1] - scores[0]
        return strength if self.order == "AB" or strength is None else -strength


class Judge:
    """A judge format and a generator."""

    def __init__(self, judge_format: JudgeFormat, generator: Generator):
        self.format, self.generator = judge_format, generator

    def judge(
        self,
        pairs: Sequence[Pair],
        orders: Sequence[Order] = ORDERS,
        samples: int = 1,
        progress: Callable[[int], None] | None = None,
        mode: Mode = "generate",
    ) -> list[Judgement]:
        """Judge every pair in every order; the result is ordered by pair, then order, then sample.

        A pointwise format rates one response in each order. Each of its verdicts compares the ratings of both orders
        in the same sample, so the orders agree by construction.

        Args:
            pairs: What to judge.
            orders: Orders in which each pair is shown.
            samples: Replies (in mode ``critique_probability`` critiques) to each prompt.
            progress: ``progress(n)``: n more prompts are done.
            mode: ``generate`` reads the verdict from a reply. ``probability`` forces the verdict at once and compares
                the probabilities of the labels: one reading of the prompt, nothing is written. ``critique_probability``
                lets the judge write first, then forces the verdict in the place of the one that it gave.

        Raises:
            UserError: the mode is unknown or does not fit the generator, the format or ``samples``; or a pointwise
                format gets one order only.
        """
        check_mode(mode, samples, self.format, self.generator, orders)
        shown = list(shown_pairs(pairs, orders))
        prompts = [self.format.render(pair) for _, pair in shown]
        if mode == "probability":
            replies = [[Reply("", truncated=False, tokens=0)] for _ in prompts]
        else:
            replies = self.generator.generate(prompts, samples=samples, progress=progress)
        verdicts = [[self.format.parse(reply.text, reply.truncated) for reply in group] for group in replies]
        if self.format.pointwise:
            verdicts = _compared(verdicts)
        rows = [
            (Judgement(pair.id, order, k, verdict, prompt_hash(messages), reply.tokens), i)
            for i, ((order, pair), messages, group, read) in enumerate(
                zip(shown, prompts, replies, verdicts, strict=True)
            )
            for k, (reply, verdict) in enumerate(zip(group, read, strict=False))  # a lone rating has no verdict
        ]
        judgements = [judgement for judgement, _ in rows]
        if mode == "generate":
            return judgements
        return self._forced(judgements, [prompts[i] for _, i in rows], progress if mode == "probability" else None)

    def _forced(
        self,
        judgements: Sequence[Judgement],
        prompts: Sequence[list[Message]],
        progress: Callable[[int], None] | None,
    ) -> list[Judgement]:
        """The judgements with their verdicts replaced by the most likely ones in the same place."""
        _, choices = self.format.verdict_choices()
        begun = [forced_reply(self.format, j.verdict.raw) for j in judgements]
        rows = self.generator.choice_log_probs(prompts, begun, list(choices), progress=progress)
        return [
            _decided(judgement, text, choices, log_probs)
            for judgement, text, log_probs in zip(judgements, begun, rows, strict=True)
        ]


def _compared(ratings: Sequence[Sequence[Verdict]]) -> list[list[Verdict]]:
    """Verdicts on pairs, from ratings by pair and (both) orders; a rating that lacks its counterpart yields none."""
    verdicts = []
    for first, second in zip(ratings[::2], ratings[1::2], strict=True):
        verdicts.append([compare_ratings(*rated) for rated in zip(first, second, strict=False)])
        verdicts.append([compare_ratings(*rated) for rated in zip(second, first, strict=False)])
    return verdicts


def check_mode(
    mode: Mode,
    samples: int,
    judge_format: JudgeFormat,
    generator: Generator | None = None,
    orders: Sequence[Order] = ORDERS,
) -> None:
    """Check that a judge can work in this mode.

    Args:
        mode: See `Judge.judge`.
        samples: Replies to each prompt.
        judge_format: The judge's format.
        generator: The judge's generator, if there is one yet.
        orders: Orders in which each pair is shown.

    Raises:
        UserError: says what does not fit and which mode would.
    """
    if mode not in MODES:
        raise UserError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.{nearest(mode, MODES)}")
    if judge_format.pointwise and sorted(orders) != sorted(ORDERS):
        raise UserError(
            f"format {judge_format.name!r} rates one response at a time, A in order AB and B in order BA: a pair needs "
            "both; set orders to both"
        )
    if mode == "generate":
        return
    if mode == "probability" and samples != 1:
        raise UserError(
            f"mode 'probability' samples nothing, so samples must be 1, got {samples}; several critiques need mode "
            "'critique_probability'"
        )
    if generator is not None and not isinstance(generator, ChoiceScorer):
        raise UserError(f"mode {mode!r}: {type(generator).__name__} gives no probabilities; use mode 'generate'")
    judge_format.verdict_choices()  # says itself why it has none


_THINKING = re.compile(r"<(/?)([a-z_]*think(?:ing)?)>", re.IGNORECASE)


def forced_reply(judge_format: JudgeFormat, text: str) -> str:
    """A reply up to the label in its declaration, ready for another label.

    The last whole declaration (blanks and letter case aside), or one that is cut off at the end, is taken away to its
    label. A reply without one is taken whole, and its critique is ended as the format ends one. Thinking that is still
    open is closed; a declaration inside thinking is none. Where nothing is written yet, the format's opening is.

    Args:
        judge_format: How verdicts are declared and critiques written.
        text: What the judge wrote; may be empty.
    """
    prefix, _ = judge_format.verdict_choices()
    at_once = judge_format.opening + prefix
    tags = list(_THINKING.finditer(text))
    if tags and not strip_thinking(text + "\0").endswith("\0"):
        return f"{text.rstrip()}\n</{tags[-1][2]}>\n{at_once}"
    answer = max((tag.end() for tag in tags if tag[1]), default=0)
    if not text[answer:].strip():
        return f"{text.rstrip()}\n{at_once}" if text.strip() else at_once
    after = judge_format.declaration.partition("{}")[2]
    declaration = re.compile(rf"{_flexible(prefix)}.{{0,40}}?(?:{_flexible(after)}|\s*\Z)", re.IGNORECASE)
    if declared := list(declaration.finditer(text, answer)):
        return text[: declared[-1].start()] + prefix
    end = judge_format.reasons.partition("{}")[2]
    if end.strip() and end.strip() in text:
        end = end[len(end.rstrip()) :]
    return text.rstrip() + end + prefix


def _flexible(text: str) -> str:
    """A pattern for the text with any white space between its characters."""
    return r"\s*".join(re.escape(character) for character in text if not character.isspace())


def _decided(judgement: Judgement, text: str, choices: dict[str, Label], log_probs: Sequence[float]) -> Judgement:
    """The judgement whose verdict is the most likely label, with the probabilities."""
    found = _by_label(choices.values(), log_probs)
    best = [label for label, value in found.items() if value == max(found.values()) > -math.inf]
    label = best[0] if len(best) == 1 else None  # equal to the last digit: no verdict
    likeliest = max((v, c) for v, c in zip(log_probs, choices, strict=True) if choices[c] == label)[1] if label else ""
    return dataclasses.replace(
        judgement,
        verdict=Verdict(
            label,
            critique=judgement.verdict.critique,
            raw=text + likeliest,
            truncated=judgement.verdict.truncated,
        ),
        probability=_share("A", {side: found[side] for side in ("A", "B")}),
        tie_probability=_share("tie", found),
        mass=math.fsum(math.exp(value) for value in log_probs),
    )


def _by_label(labels: Iterable[Label], log_probs: Sequence[float]) -> dict[Label, float]:
    """Log of the summed probability of the continuations that mean each label."""
    found: dict[Label, list[float]] = defaultdict(list)
    for label, value in zip(labels, log_probs, strict=True):
        found[label].append(value)
    return {label: _log_sum(values) for label, values in found.items()}


def _log_sum(log_probs: Sequence[float]) -> float:
    """Log of the sum of probabilities, which may be too small for a float."""
    largest = max(log_probs)
    if largest == -math.inf or len(log_probs) == 1:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in log_probs))


def _share(label: Label, log_probs: dict[Label, float]) -> float | None:
    """P(label | one of these); None where there is no such label, or all are impossible."""
    total = _log_sum(list(log_probs.values()))
    return math.exp(log_probs[label] - total) if label in log_probs and total > -math.inf else None


def pair_probabilities(judgements: Sequence[Judgement]) -> dict[str, float]:
    """P(``response_a`` is better) of each pair, in the data's own order.

    The mean over samples within each order, then over the orders, so that a slot's advantage cancels. Judgements
    without a probability are left out, and so are pairs that have none.
    """
    found: dict[str, dict[Order, list[float]]] = defaultdict(lambda: defaultdict(list))
    for judgement in judgements:
        if judgement.probability_a is not None:
            found[judgement.pair_id][judgement.order].append(judgement.probability_a)
    return {pair_id: fmean(map(fmean, by_order.values())) for pair_id, by_order in found.items()}


def vote(judgements: Sequence[Judgement], rule: VoteRule = "majority") -> Label | None:
    """One verdict from several on the same pair, in the data's own order.

    Judgements without a verdict abstain; when all do, there is no verdict (None).

    - ``majority``: the label with more votes than any other. Equal votes at the top, whichever labels share it, are a
      ``"tie"``, also where the format itself has none: the judge contradicted itself, which Zheng et al. (2023,
      arXiv 2306.05685, section 3.4) call a tie as well.
    - ``mean_strength``: the sign of the mean of `Judgement.strength`; 0 is a ``"tie"``. Verdicts without a
      strength abstain.

    Raises:
        UserError: ``mean_strength`` where no verdict has a strength.
    """
    if len({j.pair_id for j in judgements}) > 1:
        raise ValueError("votes on several pairs")
    if rule not in get_args(VoteRule):
        raise UserError(f"vote rule must be one of {', '.join(get_args(VoteRule))}, got {rule!r}")
    votes = [j for j in judgements if j.label is not None]
    if not votes:
        return None
    if rule == "majority":
        (first, count), *others = Counter(j.label for j in votes).most_common()
        return "tie" if others and others[0][1] == count else first
    strengths = [j.strength for j in votes if j.strength is not None]
    if not strengths:
        raise UserError("vote rule 'mean_strength' needs a format whose verdicts have a strength; use 'majority'")
    total = math.fsum(strengths)
    if math.isclose(total, 0, abs_tol=1e-9):  # decimal scores such as 0.1 are not exact
        return "tie"
    return "A" if total < 0 else "B"


def shown_pairs(pairs: Sequence[Pair], orders: Sequence[Order] = ORDERS) -> Iterator[tuple[Order, Pair]]:
    """Every pair as it is shown in each order."""
    return ((order, as_shown(pair, order)) for pair in pairs for order in orders)


def as_shown(pair: Pair, order: Order) -> Pair:
    """The pair as a judge reads it in this order."""
    return pair if order == "AB" else pair.swap()


def prompt_hash(messages: Sequence[Message]) -> str:
    """SHA-256 of rendered chat messages, first 16 digits."""
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:16]
