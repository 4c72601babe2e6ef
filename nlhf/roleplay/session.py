"""A conversation with a character: who has said what, what the model reads of it, and the record of it all.

Station of the path: scene -> **messages** -> Generator -> text -> turn. Nothing here knows a terminal; `chat` does.
"""

import functools
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError
from nlhf.files import append_jsonl, check_appendable
from nlhf.formats.base import Message
from nlhf.generation.limits import PromptTooLong
from nlhf.generation.streaming import ReplyStream
from nlhf.judge import Reply, prompt_hash
from nlhf.roleplay.live import LiveTurn
from nlhf.roleplay.prompts import template
from nlhf.roleplay.scenarios import NARRATOR, Character, Scenario
from nlhf.roleplay.turns import DualTurn, Segment, history_view, parse, reader_view
from nlhf.runs import now

Ending = Literal["stop", "length", "interrupted", "failed"]
"""Why a reply ended: by itself, at the token limit, by the user, or because the model or its server failed."""


def system_prompt(scenario: Scenario, character: Character, user: str) -> str:
    """What the model is told before the conversation: the scene, whom it plays, what it knows, how to write a turn.

    Args:
        scenario: The scene.
        character: Whom the model plays; of the other characters it is told the description, never the goal.
        user: The name of the user's character, one of the scene or another.
    """
    return template("chat.jinja").render(
        scenario=scenario,
        character=character,
        user=user,
        narrator=NARRATOR,
        others=[other for other in scenario.characters if other != character],
        stranger=user not in scenario.names,
    )


def check_new(path: str | Path) -> None:
    """Make sure, without writing, that a transcript can begin here.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    if Path(path).is_file():
        raise UserError(f"{path} exists already; name another file with --transcript")
    check_appendable(path)


class Transcript:
    """A chat's record: JSON lines, each written as soon as it is known.

    Args:
        path: The file, which must not exist.

    Raises:
        UserError: see `check_new`.
    """

    def __init__(self, path: str | Path):
        check_new(path)
        self.path = Path(path)

    def add(self, kind: str, **values: Any) -> None:
        """Append one line."""
        append_jsonl(self.path, {"kind": kind, "time": now(), **values})


@dataclass(frozen=True)
class Answer:
    """What came of asking the character to speak.

    Attributes:
        turn: What it said, thought and did, as far as it came.
        ended: See `Ending`.
        forgotten: Turns that the model no longer read because its context is full, those of earlier answers included.
        problem: Why it failed; None where it did not.
    """

    turn: DualTurn
    ended: Ending
    forgotten: int
    problem: str | None = None


class _Interruptions:
    """Within it, Ctrl-C raises KeyboardInterrupt, but never while a piece of text is being read and shown."""

    def __init__(self):
        self._busy = self._pressed = False

    def __enter__(self) -> "_Interruptions":
        self._main = threading.current_thread() is threading.main_thread()  # others get no signals
        self._before = signal.signal(signal.SIGINT, self._press) if self._main else None
        return self

    def __exit__(self, *_: Any) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: Any) -> None:
        if not self._busy:
            raise KeyboardInterrupt
        self._pressed = True

    def whole(self, work: Callable[[str], None], text: str) -> None:
        """Do the work to its end, then raise what was pressed meanwhile."""
        self._busy = True
        try:
            work(text)
        finally:
            self._busy = False
        if self._pressed:
            raise KeyboardInterrupt


class MessageTooLong(UserError):
    """A message does not fit into the model's context even alone; it has been taken back."""


class ChatSession:
    """A conversation between the user's character and the model's.

    Args:
        scenario: The scene.
        character: Whom the model plays.
        user: The name of the user's character.
        stream: The model.
        transcript: Receives every turn.
        origin: Fields of the transcript's first line: model, sampling, versions.

    Attributes:
        turns: The conversation, the oldest first.
        forgotten: How many of them the model no longer reads.
        system: The system prompt.
    """

    def __init__(
        self,
        scenario: Scenario,
        character: Character,
        user: str,
        stream: ReplyStream,
        transcript: Transcript,
        **origin: Any,
    ):
        self.scenario, self.character, self.user = scenario, character, user
        self.system = system_prompt(scenario, character, user)
        self._stream, self._transcript = stream, transcript
        self._transcript.add(
            "header",
            scenario=asdict(scenario),
            character=character.name,
            user=user,
            system=self.system,
            prompt_hash=prompt_hash([{"role": "system", "content": self.system}]),
            **origin,
        )
        self._begin()

    def _begin(self) -> None:
        self.turns: list[DualTurn] = []
        self.forgotten = 0
        self._sample = 0
        self._answered = False  # the last turn was written by the model
        opening = self.scenario.opening_turn
        if opening and opening.character != self.user:
            self.turns.append(opening)
            self._transcript.add("turn", speaker=opening.character, author="scenario", text=self.scenario.first_message)

    @property
    def opening(self) -> DualTurn:
        """What the narrator tells first; the model reads it however long the conversation gets."""
        return DualTurn(NARRATOR, (Segment("role_speech", self.scenario.opening),))

    def messages(self) -> list[Message]:
        """What the model reads before it speaks: no plan of its own, and nothing that others think."""
        return history_view([self.opening, *self.turns[self.forgotten :]], self.character.name, self.system)

    def say(self, text: str) -> None:
        """Add the user's turn: speech, ``(actions)`` and ``[thoughts]``, or our tags.

        Raises:
            UserError: nothing in it can be seen or heard.
        """
        turn = replace(parse(text, characters={self.user}), character=self.user)
        if not turn.visible:
            raise UserError(f"{self.character.name} can neither see nor hear that; say or do something")
        self._transcript.add("turn", speaker=self.user, author="user", text=text)
        self.turns.append(turn)
        self._sample, self._answered = 0, False

    def answer(self, live: LiveTurn, show: Callable[[str], None]) -> Answer:
        """Have the model's character speak, and add its turn.

        Args:
            live: Reads the reply as it is written.
            show: Receives what `live` lets through.

        Raises:
            MessageTooLong: the last turn alone is too long.
        """
        started = time.monotonic()
        reply, ended, problem = self._heard(lambda text: show(live.feed(text)))
        if live.raw:
            show(live.finish())
        if live.turn.segments or ended != "failed":
            self.turns.append(live.turn)
            self._answered = True
        self._transcript.add(
            "turn",
            speaker=self.character.name,
            author="model",
            text=live.raw,
            view=reader_view(live.turn),
            ended=ended,
            problem=problem,
            forgotten=self.forgotten,
            sample=self._sample,
            tokens=reply and reply.tokens,
            seconds=round(time.monotonic() - started, 2),
        )
        return Answer(live.turn, ended, self.forgotten, problem)

    def _heard(self, on_text: Callable[[str], None]) -> tuple[Reply | None, Ending, str | None]:
        """The reply as far as it came, why it ended, and what went wrong."""
        forgotten = self.forgotten
        try:
            with _Interruptions() as interruptions:
                reply = self._ask(functools.partial(interruptions.whole, on_text))
        except KeyboardInterrupt:
            return None, "interrupted", None
        except PromptTooLong as error:
            self.forgotten = forgotten
            self.turns.pop()
            self._transcript.add("refused", speaker=self.user, reason=str(error))
            raise MessageTooLong(f"too long for the model: {error}") from None
        except UserError as error:
            return None, "failed", str(error)
        return reply, "length" if reply.truncated else "stop", None

    def _ask(self, on_text: Callable[[str], None]) -> Reply:
        """Ask the model, leaving out as many of the oldest turns as must be; the last one is always read."""
        while True:
            try:
                return self._stream.stream(self.messages(), on_text, self._sample)
            except PromptTooLong:
                if self.forgotten >= len(self.turns) - 1:
                    raise
                self.forgotten += 1

    def retract(self) -> bool:
        """Take the model's last turn back, so that `answer` draws another one; False where there is none."""
        if not self.turns or (self.turns[-1].character != self.user and not self._answered):
            return False
        if self._answered:
            self.turns.pop()
            self._sample += 1
            self._answered = False
        self._transcript.add("retry", sample=self._sample)
        return True

    def clear(self) -> None:
        """Begin the conversation anew; the transcript goes on."""
        self._transcript.add("clear")
        self._begin()

    def end(self, reason: str) -> None:
        """Write the transcript's last line."""
        self._transcript.add("end", reason=reason, turns=len(self.turns), forgotten=self.forgotten)
