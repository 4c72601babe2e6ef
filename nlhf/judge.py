"""A judge is a format and a generator: it reads pairs, in both orders, and returns judgements.

Station of the path: Pair -> render -> Generator -> text -> parse -> Verdict, for many pairs at once.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nlhf.formats.base import JudgeFormat, Message
from nlhf.pairs import Label, Pair, other_label
from nlhf.verdict import Verdict

Order = Literal["AB", "BA"]
ORDERS: tuple[Order, ...] = ("AB", "BA")


@dataclass(frozen=True)
class Reply:
    """What a model wrote.

    Attributes:
        text: The reply without special tokens.
        truncated: The token limit cut it off.
        tokens: Its length in tokens.
    """

    text: str
    truncated: bool
    tokens: int


class Generator(Protocol):
    """Anything that answers chat messages."""

    def generate(
        self, prompts: Sequence[list[Message]], samples: int = 1, progress: Callable[[int], None] | None = None
    ) -> list[list[Reply]]:
        """``samples`` replies to each prompt, in the order of the prompts; ``progress(n)``: n more prompts are done."""
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
        tokens: Length of the reply.
    """

    pair_id: str
    order: Order
    sample: int
    verdict: Verdict
    prompt_hash: str
    tokens: int

    @property
    def label(self) -> Label | None:
        """The verdict in the data's own order, whatever order was shown."""
        return self.verdict.label if self.order == "AB" else other_label(self.verdict.label)


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
    ) -> list[Judgement]:
        """Judge every pair in every order; the result is ordered by pair, then order, then sample."""
        shown = list(shown_pairs(pairs, orders))
        prompts = [self.format.render(pair) for _, pair in shown]
        replies = self.generator.generate(prompts, samples=samples, progress=progress)
        return [
            Judgement(pair.id, order, k, self.format.parse(r.text, r.truncated), prompt_hash(messages), r.tokens)
            for (order, pair), messages, group in zip(shown, prompts, replies, strict=True)
            for k, r in enumerate(group)
        ]


def shown_pairs(pairs: Sequence[Pair], orders: Sequence[Order] = ORDERS) -> Iterator[tuple[Order, Pair]]:
    """Every pair as it is shown in each order."""
    return ((order, as_shown(pair, order)) for pair in pairs for order in orders)


def as_shown(pair: Pair, order: Order) -> Pair:
    """The pair as a judge reads it in this order."""
    return pair if order == "AB" else pair.swap()


def prompt_hash(messages: Sequence[Message]) -> str:
    """SHA-256 of rendered chat messages, first 16 digits."""
    return hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:16]
