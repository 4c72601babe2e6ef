"""A dual-layer turn shown while it is being written, without a word that may be private.

Station of the path: Generator -> **text** -> the eyes of a person. What is on the screen cannot be taken back, so text
is shown when it can no longer turn out to be private, block by block:

- Nothing before the plan is over: the turn began with system thinking, which was closed, and the character's name or a
  tag of the character's own followed. A turn without a plan is shown when it is whole, because a closing tag might
  still declare all before it private (the opening one may have been in the prompt).
- Speech with the next opening tag, a block with its own closing tag.
- Behind the plan, a private closing tag that was never opened hides all that is not on the screen yet. `parse` would
  hide what is on the screen as well; that is the one difference, and only in turns that are malformed in this way.
"""

import re
from dataclasses import replace

from nlhf.roleplay.turns import PRIVATE, DualTurn, Piece, parse, pieces, reader_view


class LiveTurn:
    """Reads a turn piece by piece. All that `feed` and `finish` return, joined, is the reader's view of `turn`.

    Args:
        character: Who speaks, whether the text says so or not; a name of somebody else is taken for speech.
        show_plan: Show the system thinking.
        show_thinking: Show what the character thinks.

    Attributes:
        raw: What was fed.
    """

    def __init__(self, character: str, show_plan: bool = False, show_thinking: bool = False):
        self.character, self.show_plan, self.show_thinking = character, show_plan, show_thinking
        self.raw = ""
        self._text = ""  # raw, with an opening tag for each closing tag that lost its own behind the plan
        self._settled = 0  # up to here the reading of the text does not change any more
        self._plan: str | None = None
        self._line = ""

    @property
    def turn(self) -> DualTurn:
        """What was fed so far, read as if nothing followed."""
        return self._read(self._text)

    def feed(self, text: str) -> str:
        """Read on; returns what can be shown now."""
        self.raw += text
        shown = ""
        for part in re.split("(?<=>)", text):  # at every end of a tag, so that it does not matter how a text is cut
            self._text += part
            if part.endswith(">") and self._settle():
                shown += self._news(self._read(self._text[: self._settled]))
        return shown

    def finish(self) -> str:
        """The turn has ended; returns what was held back and is not private."""
        turn = self.turn
        if not self._settled:
            return reader_view(turn, self.show_plan, self.show_thinking)
        shown = self._news(turn)
        late = (turn.plan or "")[len(self._plan or "") :].strip()
        return shown + (f"\n[plan: {late}]" if late and self.show_plan else "")

    def _read(self, text: str) -> DualTurn:
        return replace(parse(text, characters={self.character}), character=self.character)

    def _settle(self) -> bool:
        """Move `_settled` after a tag; whether it moved."""
        last = pieces(self._text, "tags")[-1]
        if last.kind == "text":  # the end of no tag
            return False
        # More than once where </thought>, which ends any private block, takes the new opening tag for its own.
        while self._settled and last.kind == "stray" and last.layer in PRIVATE:
            at = self._settled
            self._text = f"{self._text[:at]}<{last.layer}>{self._text[at:]}"
            last = pieces(self._text, "tags")[-1]
        end = len(self._text)
        if not _ends_bare(self._text):
            end -= len(last.text)
            if last.kind != "open" or not _ends_bare(self._text[:end]):
                return False
        if not self._settled and not self._is_spoken(pieces(self._text[:end], "tags")):
            return False
        self._settled = end
        return True

    def _is_spoken(self, found: list[Piece]) -> bool:
        """The plan is over and the character's own part has begun."""
        inked = [p for p in found if p.text.strip()]
        own = [p for p in inked if p.layer != "system_thinking"]
        if not own or inked[0].layer != "system_thinking":
            return False
        return own[0].kind == "open" or parse("".join(p.text for p in own), "tags").character == self.character

    def _news(self, turn: DualTurn) -> str:
        """What of the turn is not on the screen yet."""
        shown = ""
        if self._plan is None:
            self._plan = turn.plan or ""
            shown = f"[plan: {self._plan}]\n" if self.show_plan else ""
        line = reader_view(turn, show_thinking=self.show_thinking)
        shown, self._line = shown + line[len(self._line) :], line
        return shown


def _ends_bare(text: str) -> bool:
    """What follows the text would stand in no block."""
    return pieces(f"{text}.", "tags")[-1].bare
