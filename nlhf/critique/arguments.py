"""Critiques as lists of arguments: which response, praise or blame, and what about it.

A judge is asked for one reason a line that starts with the response and says praise or blame ("A blame: the dose is
wrong"). Human critiques get side and polarity from the field they stand in; free text has neither.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nlhf.pairs import HumanCritique, Pair, Side
from nlhf.verdict import half_width

Polarity = Literal[1, -1]


@dataclass(frozen=True)
class Argument:
    """One reason.

    Attributes:
        side: The response it is about; None when unknown.
        polarity: +1 praise, -1 blame; None when unknown.
        text: What is said.
    """

    side: Side | None
    polarity: Polarity | None
    text: str

    def __str__(self) -> str:
        prefix = f"{self.side} {'praise' if self.polarity > 0 else 'blame'}: " if self.side and self.polarity else ""
        return prefix + self.text


_BULLET = re.compile(r"^\s*(?:[-*•·–]|\(?\d{1,2}[.)])\s+")
# A sentence ends at Latin or CJK punctuation; Latin punctuation must be followed by a blank ("3.5" is no end).
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*")
_PREFIX = re.compile(
    r"^(?:(?i:response|assistant|chatbot|answer|candidate)\s+)?(?P<side>A|B)(?:['’]s\s+(?i:response))?\s*[:,\-]?\s*"
    r"(?P<polarity>(?i:praise|blame))\s*:?\s*(?P<text>.*)$",
    re.DOTALL,
)
_FIELDS: tuple[tuple[str, Side, Polarity], ...] = (
    ("strengths_a", "A", 1),
    ("weaknesses_a", "A", -1),
    ("strengths_b", "B", 1),
    ("weaknesses_b", "B", -1),
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, line by line, without bullets and numbers."""
    lines = (_BULLET.sub("", line).strip() for line in text.splitlines())
    return [s.strip() for line in lines if line for s in _SENTENCE_END.split(line) if s.strip()]


def generated_arguments(critique: str | None) -> list[Argument]:
    """The arguments of a judge's critique.

    A line with a readable prefix is one argument. Other lines count sentence by sentence, with side and polarity None:
    they weigh on precision and match only a reference that has none either, so that vagueness earns nothing.
    """
    arguments = []
    for line in (critique or "").splitlines():
        line = _BULLET.sub("", line).strip()
        match = _PREFIX.match(half_width(line))
        if match and match["text"].strip():
            polarity = 1 if match["polarity"].lower() == "praise" else -1
            arguments.append(Argument(match["side"], polarity, line[match.start("text") :].strip()))
        else:
            arguments.extend(Argument(None, None, sentence) for sentence in split_sentences(line))
    return arguments


def human_arguments(critique: HumanCritique) -> list[Argument]:
    """The arguments of one human critique: fields give side and polarity, free text neither."""
    arguments = [
        Argument(side, polarity, sentence)
        for name, side, polarity in _FIELDS
        for sentence in split_sentences(getattr(critique, name))
    ]
    return arguments + [Argument(None, None, sentence) for sentence in split_sentences(critique.text)]


# "fatal error: ..." and "Fatal: ..." mark an error as fatal; "a fatal dose" and "no fatal errors" do not.
_FATAL = re.compile(
    r"^fatal(?:ly)?\s*:|^致命|(?<!non-)\bfatal(?:ly)?\s+(?:error|flaw|mistake|fault|bug|problem|issue|wrong|flawed)\b"
    r"|致命(?:的)?(?:错误|缺陷|問題|问题)",
    re.IGNORECASE,
)
_NEGATED_FATAL = re.compile(
    r"(?:\b(?:no|not|nor|never|without|neither)\b|n['’]t\b)(?:\s+\w+){0,3}\s+fatal|(?:没有|沒有|并非|無|无)致命",
    re.IGNORECASE,
)


def is_fatal(argument: Argument) -> bool:
    """The argument names a fatal error, in these words, and does not deny it; praise never does."""
    return (
        argument.polarity != 1
        and _FATAL.search(argument.text) is not None
        and _NEGATED_FATAL.search(argument.text) is None
    )


def key_arguments(arguments: Sequence[Argument]) -> list[Argument]:
    """What counts of a human's arguments: the first fatal error alone if one is named (N_ref = 1), else all."""
    fatal = next((argument for argument in arguments if is_fatal(argument)), None)
    return list(arguments) if fatal is None else [fatal]


def reference_sets(pair: Pair) -> list[list[Argument]]:
    """What counts of each human's critique of the pair; humans are alternatives, not a sum."""
    return [key_arguments(arguments) for c in pair.critiques if (arguments := human_arguments(c))]


def critique_lines(critique: HumanCritique) -> list[str]:
    """A human critique in the form that our prompts ask for, one argument a line."""
    return [str(argument) for argument in human_arguments(critique)]
