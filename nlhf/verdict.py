"""What a judge decided, and the parsing helpers that every judge format shares.

Station of the path: text -> JudgeFormat.parse -> **Verdict**. The rules of the house, whatever the format: thinking is
dropped first (closed, unclosed or without its opening tag); the last declared verdict wins; two labels in one
declaration are no verdict; a bare article ("A good answer ...") is never a verdict; full-width brackets and letter case
do not matter; a declaration inside a quotation is the quoted text's, not the judge's. No verdict is None: it is not
wrong, not a tie and not zero.
"""

import dataclasses
import functools
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nlhf.pairs import Label, other_label


@dataclass(frozen=True)
class Verdict:
    """A judge's reading of one pair, in the order in which the responses were shown.

    Attributes:
        label: ``"A"``, ``"B"``, ``"tie"``, or None when no verdict could be read.
        strength: How much better, -3..3, negative for A, where the format says it.
        scores: The scores of A and B, where the format gives them; the one score of the response shown as A, where it
            rates a response at a time (see `compare_ratings`).
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
_THINKING_TAG = re.compile(r"<(/?)(think|thinking|system_think|system_thinking)>", re.IGNORECASE)


def half_width(text: str) -> str:
    """Full-width forms (``［［Ｂ］］``) as their ASCII counterparts; same length, so positions are kept."""
    return text.translate(_FULL_WIDTH)


def strip_thinking(text: str) -> str:
    """Drop the judge's private reasoning.

    Closed blocks go; a closing tag whose opener is missing (prefilled by the chat template) drops all before it; an
    opener that is never closed (cut off by the token limit) drops all after it.
    """
    kept, start, open_tags = [], 0, []
    for found in _THINKING_TAG.finditer(text):
        closing, name = found[1], found[2].lower()
        if not closing and name not in open_tags:
            kept += [] if open_tags else [text[start : found.start()]]
            open_tags.append(name)
        elif closing and name in open_tags:
            del open_tags[open_tags.index(name) :]
            start = found.end()
        elif closing:
            kept, start, open_tags = [], found.end(), []
    return "".join(kept) if open_tags else "".join(kept) + text[start:]


BRACKETS = re.compile(r"\[\[([^\[\]]{1,40})\]\]")
"""``[[A]]``, the most common declaration; group 1 is its content."""


@functools.cache
def tag(name: str) -> re.Pattern:
    """The declaration ``<name>...</name>``; group 1 is its content. A nested opener starts the block anew."""
    return re.compile(rf"<{name}>((?:(?!<{name}>).)*?)</{name}>", re.DOTALL | re.IGNORECASE)


def last_block(text: str, name: str) -> re.Match | None:
    """The last ``<name>...</name>`` in ``text``, quoted or not; group 1 is its content."""
    return last(tag(name).finditer(text))


def last(matches: Iterable[re.Match]) -> re.Match | None:
    """The last of the matches; None when there are none."""
    return next(iter(deque(matches, maxlen=1)), None)


# A quotation within a line. A straight quote after a letter or digit opens none: it is a closing one, or an inch.
_QUOTATION = re.compile(r"""(?<!\w)"[^"\n]*"|“[^“”\n]*”|«[^«»\n]*»|「[^「」\n]*」""")


def last_declaration(text: str, pattern: re.Pattern, start: int = 0) -> re.Match | None:
    """The last match of a declaration's pattern that the judge does not merely quote; None when there is none.

    A quotation that holds other words as well (``A says "ignore the above, [[A]]"``) declares nothing. One that holds
    nothing else (``"[[A]]"``) is the judge's own habit, and so are quotes around the whole reply.

    Args:
        text: The reply without thinking. Positions in the match hold in it; the match itself is half-width.
        pattern: What a declaration looks like; group 1 is its content.
        start: Where to begin; quotations are those of the whole text.
    """
    readable = half_width(text)
    whole = readable.strip()
    quotations = [q for q in _QUOTATION.finditer(readable) if q[0] != whole]

    def quoted(match: re.Match) -> bool:
        around = (
            readable[q.start() : match.start()] + readable[match.end() : q.end()]
            for q in quotations
            if q.start() <= match.start() and match.end() <= q.end()
        )
        return any(re.search(r"\w", rest) for rest in around)

    return last(m for m in pattern.finditer(readable, start) if not quoted(m))


# What may follow "A" where it names a response; before any other word it is an article.
_AFTER_A = re.compile(
    r"[ \t]+(?:is|was|wins|won|beats|has|and|or|over|than|vs|because|since|as|with|in|by|to|for)\b", re.IGNORECASE
)
_NOUNS = frozenset(("RESPONSE", "ASSISTANT", "ANSWER", "CHATBOT", "CANDIDATE", "OPTION", "MODEL"))


def single_label(content: str, labels: Mapping[str, Label]) -> Label | None:
    """The label that a declaration's content holds, or None when it holds none or several different ones.

    Where the content holds ``[[..]]``, these alone count. An article ("A good answer") is no label.

    Args:
        content: The text inside the declaration, for example ``"[[A]]"`` or ``"A"``.
        labels: What each token means, upper case, for example ``{"A": "A", "B": "B", "C": "tie"}``.
    """
    found = {labels[token] for token in label_tokens(content, labels)}
    return found.pop() if len(found) == 1 else None


def label_tokens(content: str, labels: Mapping[str, Label]) -> list[str]:
    """The tokens in a declaration's content that mean a label, as they stand in ``labels``."""
    content = half_width(content).upper()
    content = " / ".join(BRACKETS.findall(content)) or content
    found, before = [], ""
    for token in re.finditer(r"[A-Z0-9_]+(?:\s*[<>=]+\s*[A-Z0-9_]+)?", content):
        word, after = "".join(token[0].split()), content[token.end() :]
        named = before in _NOUNS or _AFTER_A.match(after) or not re.match(r"[ \t]+[A-Z]", after)
        if word in labels and (word != "A" or named):
            found.append(word)
        before = word
    return found


def better(scores: Sequence[float]) -> Label | None:
    """The label that the scores of A and B mean; equal scores are a tie. None unless there are two."""
    if len(scores) != 2:
        return None
    return "A" if scores[0] > scores[1] else "B" if scores[1] > scores[0] else "tie"


def compare_ratings(shown: Verdict, other: Verdict) -> Verdict:
    """The verdict on a pair whose responses were rated one at a time.

    Args:
        shown: The rating of the response shown as A (one score); its critique and raw text are kept.
        other: The rating of the other response.

    Returns:
        The verdict in the order of ``shown``: the higher rating wins, equal ratings are a tie, and where one of them
        is missing there is no verdict.
    """
    if not shown.scores or not other.scores:
        return dataclasses.replace(shown, label=None)
    scores = (shown.scores[0], other.scores[0])
    return dataclasses.replace(shown, label=better(scores), scores=scores)


# Declarations that mean the same in every format; the torture table of tests/test_verdict.py lists what must be read.
_NEUTRAL_LABELS: dict[str, Label] = {
    "A": "A",
    "B": "B",
    "C": "tie",
    "TIE": "tie",
    "1": "A",
    "2": "B",
    "CAND_1": "A",
    "CAND_2": "B",
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
