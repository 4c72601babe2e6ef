"""What a judge decided, and the parsing helpers that every judge format shares.

Station of the path: text -> JudgeFormat.parse -> **Verdict**. The rules of the house, whatever the format: thinking is
dropped first (closed, unclosed or without its opening tag); the last declared verdict wins; two labels in one
declaration are no verdict; a bare article ("A good answer ...") is never a verdict; full-width brackets and letter case
do not matter. No verdict is None: it is not wrong, not a tie and not zero.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from nlhf.pairs import Label, other_label


@dataclass(frozen=True)
class Verdict:
    """A judge's reading of one pair, in the order in which the responses were shown.

    Attributes:
        label: ``"A"``, ``"B"``, ``"tie"``, or None when no verdict could be read.
        strength: How much better, -3..3, negative for A, where the format says it.
        scores: The scores of A and B, where the format gives them.
        critique: The reasons given, without thinking and without the declaration; None when missing.
        raw: The whole reply.
        truncated: The reply was cut off by the token limit.
    """

    label: Label | None
    strength: float | None = None
    scores: tuple[float, ...] | None = None
    critique: str | None = None
    raw: str = field(default="", repr=False)
    truncated: bool = False

    def swap(self) -> "Verdict":
        """The verdict in terms of the pair with its responses exchanged (critique and raw text are left as written)."""
        return Verdict(
            label=other_label(self.label),
            strength=None if self.strength is None else -self.strength,
            scores=None if self.scores is None else self.scores[::-1],
            critique=self.critique,
            raw=self.raw,
            truncated=self.truncated,
        )


_FULL_WIDTH = {ord(c): ord(c) - 0xFEE0 for c in map(chr, range(0xFF01, 0xFF5F))} | {
    0x3000: 0x20,
    0x3010: 0x5B,
    0x3011: 0x5D,
}
_THINK = r"(?:think|thinking|system_think|system_thinking)"
_CLOSED_THINKING = re.compile(rf"<({_THINK})>.*?</\1>", re.DOTALL | re.IGNORECASE)
_CLOSING_TAG = re.compile(rf"</{_THINK}>", re.IGNORECASE)
_OPENING_TAG = re.compile(rf"<{_THINK}>", re.IGNORECASE)


def half_width(text: str) -> str:
    """Full-width forms (``［［Ｂ］］``) as their ASCII counterparts; same length, so positions are kept."""
    return text.translate(_FULL_WIDTH)


def strip_thinking(text: str) -> str:
    """Drop the judge's private reasoning.

    Closed blocks go; a closing tag whose opener is missing (prefilled by the chat template) drops all before it; an
    opener that is never closed (cut off by the token limit) drops all after it.
    """
    text = _CLOSED_THINKING.sub("", text)
    closing = list(_CLOSING_TAG.finditer(text))
    if closing:
        text = text[closing[-1].end() :]
    opening = _OPENING_TAG.search(text)
    return text[: opening.start()] if opening else text


def last_block(text: str, tag: str) -> re.Match | None:
    """The last ``<tag>...</tag>`` in ``text``; group 1 is its content. A nested opener starts the block anew."""
    pattern = re.compile(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", re.DOTALL | re.IGNORECASE)
    found = None
    for found in pattern.finditer(text):  # noqa: B007 - we want the last match
        pass
    return found


def single_label(content: str, labels: Mapping[str, Label]) -> Label | None:
    """The label that a declaration's content holds, or None when it holds none or several different ones.

    Args:
        content: The text inside the declaration, for example ``"[[A]]"`` or ``"A"``.
        labels: What each token means, upper case, for example ``{"A": "A", "B": "B", "C": "tie"}``.
    """
    tokens = re.findall(r"[A-Z0-9]+(?:[<>=]+[A-Z0-9]+)?", half_width(content).upper())
    found = {labels[t] for t in tokens if t in labels}
    return found.pop() if len(found) == 1 else None


# Declarations that mean the same in every format; the torture table of tests/test_verdict.py lists what must be read.
_NEUTRAL_LABELS: dict[str, Label] = {
    "A": "A",
    "B": "B",
    "C": "tie",
    "TIE": "tie",
    "1": "A",
    "2": "B",
}
_COMPARISONS: dict[str, Label] = {">>": "A", ">": "A", "=": "tie", "<": "B", "<<": "B"}
_NEUTRAL = re.compile(
    r"""\[\[(?P<brackets>[^\[\]]{1,20})\]\]
    | <(?P<tag>answer|choice|verdict)>(?P<block>.{0,40}?)</(?P=tag)>
    | \bfinal\s+(?:verdict|decision|answer)\s*(?:is)?\s*[:\-]?\s*\**\s*
      (?:(?:response|assistant|answer)\s+)?(?P<final>[AB12]|tie)\b(?!['’])
    | \[result\]\s*(?P<result>[AB])\b
    | "better_response"\s*:\s*"(?P<json>cand_[12]|tie)"
    | \\boxed\{\s*(?:assistant|response)?\s*(?P<boxed>[^{}]{1,40})\}""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)


def read_label(text: str) -> Label | None:
    r"""Read a verdict without knowing the format: the last declaration of any common kind decides.

    Understands ``[[A]]``, ``[[A>>B]]``, ``<answer>``/``<choice>``/``<verdict>`` blocks, ``Final Verdict: B``,
    ``[RESULT] B``, HER's JSON and ``\boxed{..}`` (a winner or two scores from 1 to 10).
    """
    label = None
    for match in _NEUTRAL.finditer(half_width(strip_thinking(text))):
        kind = match.lastgroup if match.lastgroup != "tag" else "block"
        label = _declared(kind, match[kind].strip())
    return label


def _declared(kind: str, content: str) -> Label | None:
    comparison = re.fullmatch(r"\[*\s*([AB])\s*(>>|>|=|<<|<)\s*([AB])\s*\]*", content, re.IGNORECASE)
    if comparison:
        left, sign, right = comparison[1].upper(), comparison[2], comparison[3].upper()
        if left == right:
            return None
        return _COMPARISONS[sign] if left == "A" else other_label(_COMPARISONS[sign])
    if kind == "boxed" and re.fullmatch(r"-?[\d.]+(?:\s*,\s*-?[\d.]+)*", content) and "," in content:
        scores = [float(s) for s in content.split(",")]
        if len(scores) != 2 or not all(1 <= s <= 10 for s in scores):
            return None
        return "A" if scores[0] > scores[1] else "B" if scores[1] > scores[0] else "tie"
    if len(content.split()) > 6:  # a sentence is not a declaration
        return None
    return single_label(content, _NEUTRAL_LABELS)
