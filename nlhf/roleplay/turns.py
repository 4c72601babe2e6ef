"""Dual-layer turns of role-play (HER, arXiv 2601.21459): read, checked, written, and shown to whom they may be shown.

Station of the path: source -> **Pair**: what a policy wrote, before a judge or another character reads it. A turn is
``<system_thinking>`` (the model's plan, third person, once, first), then ``Name: `` followed by any order of
``<role_thinking>`` (first person, unseen by the other characters), ``<role_action>`` and plain speech.

Reading never fails and fails closed: what may be private is private. An opening tag that is never closed hides all
behind it, a closing tag that was never opened all before it; a tag within a more private block changes nothing.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple

from nlhf.errors import UserError
from nlhf.pairs import Turn
from nlhf.verdict import half_width

Layer = Literal["system_thinking", "role_thinking", "role_action", "role_speech"]
Notation = Literal["auto", "tags", "coser"]
"""``coser``: ``[thought]`` and ``(action)`` as in CoSER; ``auto``: that, where a turn has none of the tags."""

PLAN: frozenset[Layer] = frozenset({"system_thinking"})
"""What the history, every judge and every other character lose."""
PRIVATE: frozenset[Layer] = PLAN | {"role_thinking"}
"""What the other characters, and CoSER's judge, lose."""

_LAYERS: dict[str, Layer] = {
    **dict.fromkeys(("system_thinking", "system_think", "think"), "system_thinking"),
    **dict.fromkeys(("role_thinking", "role_think", "long_role_thinking"), "role_thinking"),
    "role_action": "role_action",
    "role_speech": "role_speech",
}
LEGACY = MappingProxyType(
    {name: layer for name, layer in _LAYERS.items() if name != layer or name == "role_speech"}
    | {"thought": "system_thinking before the character's name, role_thinking behind it"}
)
"""Older tags that are read, and what they mean; none is written, but ``role_speech`` where speech looks like markup."""

_PRIVACY = {"role_speech": 0, "role_action": 0, "role_thinking": 1, "system_thinking": 2}
# ASCII: otherwise letters such as U+017F count as an s and name no layer.
_TAG = re.compile(rf"<(/?)({'|'.join((*_LAYERS, 'thought'))})>", re.IGNORECASE | re.ASCII)
_BRACKET = re.compile(r"[\[\]()]")
_NAME = r"[^\n\r:：<>\[\]()]{1,60}?"
_PREFIX = re.compile(rf"\s*({_NAME})\s*(?:：|:(?=\s|[\"“(\[]|\Z))")


@dataclass(frozen=True)
class Segment:
    """A part of a turn behind the character's name.

    Attributes:
        layer: ``role_thinking``, ``role_action`` or ``role_speech``.
        text: Without blanks around it and without tags.
    """

    layer: Layer
    text: str

    def __post_init__(self):
        if self.layer not in _PRIVACY or self.layer == "system_thinking":
            raise UserError(f"a segment's layer must be role_thinking, role_action or role_speech, got {self.layer!r}")
        object.__setattr__(self, "text", _checked(self.text, self.layer))


@dataclass(frozen=True)
class DualTurn:
    """One turn of a role-play.

    Attributes:
        character: Who speaks; None where the turn does not say.
        segments: Thoughts, actions and speech in their order; neighbouring speech is one segment.
        plan: The system thinking; None without one.
    """

    character: str | None
    segments: tuple[Segment, ...] = ()
    plan: str | None = None

    def __post_init__(self):
        if self.character is not None and not re.fullmatch(_NAME, self.character.strip()):
            raise UserError(
                f"character {self.character!r}: a name has 1 to 60 letters and no line end, colon, bracket or tag"
            )
        object.__setattr__(self, "character", self.character and self.character.strip())
        object.__setattr__(self, "segments", tuple(_joined(self.segments)))
        object.__setattr__(self, "plan", None if self.plan is None else _checked(self.plan, "system_thinking"))

    @property
    def visible(self) -> bool:
        """Something is said or done that the other characters can see."""
        return any(segment.layer not in PRIVATE for segment in self.segments)


def _checked(text: str, layer: Layer) -> str:
    text = text.strip()
    if not text:
        raise UserError(f"{layer}: the text is empty; leave it out")
    if found := _TAG.search(text):
        raise UserError(f"{layer}: the text holds the tag {found[0]}; read text with tags by `parse`")
    return text


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    for segment in segments:
        if joined and joined[-1].layer == segment.layer == "role_speech":
            joined[-1] = Segment("role_speech", f"{joined[-1].text} {segment.text}")
        else:
            joined.append(segment)
    return joined


# ------------------------------------------------------------------------------------------------------------ reading


class Piece(NamedTuple):
    """A part of a text; the pieces of a text joined are the text.

    ``kind`` is ``text`` for what is written; ``open`` and ``close`` for tags that begin and end a block; ``stray`` for
    a closing tag without an opening one; ``inner`` for a tag without effect. ``bare``: it stands in no block.
    """

    layer: Layer
    text: str
    kind: Literal["text", "open", "close", "stray", "inner"]
    bare: bool


def pieces(text: str, notation: Notation = "auto") -> list[Piece]:
    """Cut a text where its layer changes."""
    tagged = notation == "tags" or (notation == "auto" and _TAG.search(text))
    return _tagged_pieces(text) if tagged else _bracketed_pieces(text)


def _tagged_pieces(text: str) -> list[Piece]:
    found: list[Piece] = []
    stack: list[Layer] = []
    at = 0

    def add(part: str, kind: str, layer: Layer) -> None:
        if part:
            found.append(Piece(layer, part, kind, not stack))

    for tag in _TAG.finditer(text):
        inside: Layer = stack[-1] if stack else "role_speech"
        add(text[at : tag.start()], "text", inside)
        layer = _layer(tag[2].lower(), bool(tag[1]), stack, found)
        if _PRIVACY[layer] < _PRIVACY[inside]:
            add(tag[0], "inner", inside)
        elif not tag[1]:
            stack.append(layer)
            add(tag[0], "open", layer)
        elif layer in stack:
            add(tag[0], "close", layer)
            del stack[len(stack) - 1 - stack[::-1].index(layer) :]
        else:
            add(tag[0], "stray", layer)
            if layer in PRIVATE:  # its opening tag was in the prompt, or is lost: all before it may be private
                found = [p._replace(layer=max(p.layer, layer, key=_PRIVACY.get)) for p in found]
        at = tag.end()
    add(text[at:], "text", stack[-1] if stack else "role_speech")
    return found


def _layer(name: str, closing: bool, stack: Sequence[Layer], before: Sequence[Piece]) -> Layer:
    if name != "thought":
        return _LAYERS[name]
    if closing:
        return next((layer for layer in reversed(stack) if layer in PRIVATE), "system_thinking")
    spoken = any(p.layer != "system_thinking" and p.text.strip() for p in before)
    return "role_thinking" if spoken else "system_thinking"


def _bracketed_pieces(text: str) -> list[Piece]:
    found: list[Piece] = []
    readable = half_width(text)
    stack: list[str] = []
    at = 0

    def add(part: str, kind: str) -> None:
        layer = "role_thinking" if "[" in stack else "role_action" if stack else "role_speech"
        if part:
            found.append(Piece(layer, part, kind, not stack))

    for bracket in _BRACKET.finditer(readable):
        start, end = bracket.span()
        opening, partner = bracket[0] in "[(", {"]": "[", ")": "("}.get(bracket[0], bracket[0])
        if partner == "(" and "[" in stack:
            continue  # within a thought
        nested = partner in stack
        if opening and (partner == "[" or ")" in readable[end:]):  # a thought that is cut off is a thought
            if not nested:
                add(text[at:start], "text")
            stack.append(partner)
            if not nested:
                add(text[start:end], "open")
                at = end
        elif not opening and nested:
            if stack.count(partner) == 1:
                add(text[at:start], "text")
                add(text[start:end], "close")
                at = end
            stack.pop()
    add(text[at:], "text")
    return found


def parse(text: str, notation: Notation = "auto", characters: Collection[str] | None = None) -> DualTurn:
    """Read a turn, whatever it looks like; `problems` says what is wrong with it.

    Args:
        text: The turn, in our tags, in older ones (`LEGACY`) or in CoSER's notation.
        notation: How it is written.
        characters: Names that may stand before the colon; None takes what looks like one.
    """
    return _assembled(pieces(text, notation), characters)


def _assembled(found: Sequence[Piece], characters: Collection[str] | None) -> DualTurn:
    found = list(found)
    character = None
    first = next((i for i, p in enumerate(found) if p.layer != "system_thinking" and p.text.strip()), None)
    if first is not None and found[first].bare and found[first].kind == "text":
        prefix = _PREFIX.match(found[first].text)
        if prefix and prefix[1].strip() and (characters is None or prefix[1].strip() in characters):
            character = prefix[1].strip()
            found[first] = found[first]._replace(text=found[first].text[prefix.end() :])
    blocks: list[tuple[Layer, str]] = []
    for (layer, text_like), run in groupby(found, key=lambda p: (p.layer, p.kind in ("text", "inner"))):
        if text_like and (text := "".join(p.text for p in run if p.kind == "text").strip()):
            blocks.append((layer, text))
    plan = "\n\n".join(text for layer, text in blocks if layer == "system_thinking")
    segments = tuple(Segment(layer, text) for layer, text in blocks if layer != "system_thinking")
    return DualTurn(character, segments, plan or None)


def scrub(text: str, hidden: Collection[Layer] = PRIVATE, notation: Notation = "auto") -> str:
    """The text without the blocks of some layers and the blanks behind them; all else stays byte for byte."""
    while True:
        kept, gap = [], False
        for piece in pieces(text, notation):
            if piece.layer in hidden:
                gap = True
            else:
                kept.append(piece.text.lstrip() if gap else piece.text)
                gap = gap and not kept[-1]
        shorter = "".join(kept)
        if shorter == text:
            return text
        text = shorter  # what stood around a block may be a tag now


# ------------------------------------------------------------------------------------------------------------ writing


def render(turn: DualTurn) -> str:
    """The turn in our tags; `parse` reads an equal turn back.

    Speech stands without a tag, unless it would be misread: ``(he laughs)`` in a turn of speech alone, for example.
    """
    plain = _written(turn, "{}")
    return plain if parse(plain) == turn else _written(turn, "<role_speech>{}</role_speech>")


def _written(turn: DualTurn, speech: str) -> str:
    plan = f"<system_thinking>{turn.plan}</system_thinking>\n\n" if turn.plan else ""
    marks = {layer: f"<{layer}>{{}}</{layer}>" for layer in _PRIVACY} | {"role_speech": speech}
    parts = [f"{turn.character}:"] if turn.character else []
    return plan + " ".join(parts + [marks[s.layer].replace("{}", s.text) for s in turn.segments])


def problems(text: str, character: str | None = None, needs_plan: bool = True) -> list[str]:
    """What keeps a text from being a turn in our format; empty when it is one.

    Args:
        text: The turn.
        character: Who must be speaking; None for anyone.
        needs_plan: Whether the turn must begin with system thinking.
    """
    found = _tagged_pieces(text)
    turn = _assembled(found, None)
    opened = [p.layer for p in found if p.kind == "open"]
    closed = [p.layer for p in found if p.kind == "close"]
    legacy = sorted({tag[0] for tag in _TAG.finditer(text) if tag[2] not in ("system_thinking", *_PRIVACY)})
    shown = [p.layer for p in found if p.text.strip()]
    plans = opened.count("system_thinking")
    checks = [
        (any(p.kind == "stray" for p in found), "a closing tag has no opening tag"),
        (len(opened) > len(closed), "a tag is never closed"),
        (_nested(found), "a block stands within another"),
        (bool(legacy), f"tags of another format: {', '.join(legacy)}"),
        (needs_plan and not plans, "no <system_thinking>"),
        (plans > 1, "more than one <system_thinking>"),
        (plans > 0 and shown[0] != "system_thinking", "<system_thinking> is not first"),
        (turn.character is None, "no character's name with a colon"),
        (character is not None and turn.character not in (None, character), f"{turn.character} speaks"),
        (not turn.visible, "nothing is said or done"),
    ]
    return [message for wrong, message in checks if wrong]


def _nested(found: Sequence[Piece]) -> bool:
    depth, deepest = 0, 0
    for piece in found:
        depth += {"open": 1, "close": -1}.get(piece.kind, 0)
        deepest = max(deepest, depth)
    return deepest > 1 or any(p.kind == "inner" for p in found)


def check(text: str, where: str, character: str | None = None, needs_plan: bool = True) -> DualTurn:
    """Read a turn that must be well-formed; arguments as of `problems`.

    Raises:
        UserError: it is not; says where and why.
    """
    if wrong := problems(text, character, needs_plan):
        raise UserError(f"{where}: not a dual-layer turn: {'; '.join(wrong)}")
    return parse(text, "tags")


# -------------------------------------------------------------------------------------------------------------- views


def hide(turn: DualTurn, hidden: Collection[Layer] = PRIVATE) -> DualTurn:
    """The turn without some of its layers."""
    segments = tuple(s for s in turn.segments if s.layer not in hidden)
    return replace(turn, segments=segments, plan=None if "system_thinking" in hidden else turn.plan)


def history_view(turns: Sequence[DualTurn], character: str, system: str | None = None) -> list[dict[str, str]]:
    """What the policy behind ``character`` reads before it speaks, as chat messages.

    Its own turns are the assistant's, without system thinking. All other turns are the user's, without system and role
    thinking; a turn in which nothing is left is left out, and user messages in a row are one.

    Args:
        turns: The conversation so far.
        character: Who speaks next.
        system: The system message: scenario, profiles and instructions.
    """
    messages = [{"role": "system", "content": system}] if system is not None else []
    for turn in turns:
        own = turn.character == character
        shown = hide(turn, PLAN if own else PRIVATE)
        if not shown.segments:
            continue
        content = render(shown)
        if not own and messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": "assistant" if own else "user", "content": content})
    return messages


def training_view(turns: Sequence[DualTurn], system: str | None = None) -> list[dict[str, str]]:
    """A conversation to learn its last turn from: the history as its speaker reads it, then the turn with all layers.

    The last message alone is to be learned.

    Raises:
        UserError: there is no turn, or nobody speaks the last one.
    """
    if not turns or turns[-1].character is None or not turns[-1].segments:
        raise UserError("a conversation to learn from ends with the turn of a character")
    *before, last = turns
    history = history_view(before, last.character, system)
    return [*history, {"role": "assistant", "content": render(last)}]


def judge_view(
    turns: Sequence[DualTurn],
    character: str,
    system: str | None = None,
    hidden: Collection[Layer] = PLAN,
) -> list[Turn]:
    """The conversation as a judge of ``character`` reads it: the context of a `Pair`.

    Args:
        turns: The conversation before the two responses.
        character: Whose responses are compared: the assistant, in the words of HER-RM's prompt.
        system: Scenario and profiles.
        hidden: `PLAN` for HER-RM, which sees what characters think; `PRIVATE` for CoSER's judge, which does not.
    """
    context = [Turn("system", system)] if system is not None else []
    for turn in turns:
        name = turn.character or "user"
        role = f"{name}(assistant)" if turn.character == character else f"{name}(user)"
        shown = hide(replace(turn, character=None), hidden)
        if shown.segments:
            context.append(Turn(role if turn.character else name, render(shown)))
    return context


def reader_view(turn: DualTurn, show_plan: bool = False, show_thinking: bool = False) -> str:
    """A turn for the eyes of a person: actions in ``(...)``, role thinking in ``[...]``; thinking only if asked for."""
    shown = hide(turn, [*([] if show_plan else PLAN), *([] if show_thinking else ["role_thinking"])])
    marks = {"role_thinking": "[{}]", "role_action": "({})", "role_speech": "{}"}
    parts = [f"{shown.character}:"] if shown.character else []
    line = " ".join(parts + [marks[s.layer].replace("{}", s.text) for s in shown.segments])
    return f"[plan: {shown.plan}]\n{line}" if shown.plan else line
