"""Talk with a character at a terminal: the verb `chat`, after the demo of HER (spoken lines, actions, hidden thoughts).

Station of the path: scene -> messages -> Generator -> turn -> **the eyes of a person**. `session` holds the
conversation; what is here is choosing, typing and showing.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from nlhf.errors import UserError, nearest
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import BackendConfig
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.roleplay.live import LiveTurn
from nlhf.roleplay.scenarios import Character, Scenario, find_scenario, load_scenarios
from nlhf.roleplay.session import ChatSession, MessageTooLong, Transcript, check_new
from nlhf.roleplay.turns import DualTurn, reader_view
from nlhf.runs import now, plain
from nlhf.terminal import shown

_DEFAULT_BACKEND = BackendConfig()
_DEFAULT_SAMPLING = SamplingConfig(max_new_tokens=512, temperature=0.7, top_p=0.9)

_HELP = """\
quit, exit, q   end the chat; Ctrl-D does the same
clear           begin the conversation anew
retry           take the last reply back and draw another
history         the conversation so far
prompt          what the model is told about the scene
help            this list
Ctrl-C          stops a reply that is being written; at the prompt it ends the chat
All else is what your character says; (this) is what it does, [this] what it thinks, which nobody learns.
A command may begin with a slash: /quit. To say such a word, put a mark behind it: Help!"""


def chat(
    model_path: str | None = None,
    *,
    model: ModelConfig | None = None,
    backend: BackendConfig = _DEFAULT_BACKEND,
    sampling: SamplingConfig = _DEFAULT_SAMPLING,
    scenarios: str | None = None,
    scenario: int | str | None = None,
    character: int | str | None = None,
    user: int | str | None = None,
    show_think: bool = False,
    show_rolethink: bool = False,
    transcript: str | None = None,
) -> None:
    """Talk with a character of a scene, played by a model.

    Args:
        model_path: The model, short for model.name.
        model: The model that plays the character.
        backend: What runs the model: transformers in this process, or a server (openai).
        sampling: How replies are drawn.
        scenarios: YAML file of scenes of your own; the scenes on board by default.
        scenario: The scene: its place in the list, from 1, or its id; asked for by default.
        character: Whom the model plays: place among the scene's characters, or name; asked for by default.
        user: Whom you play: place, name, or a name of your own; asked for by default.
        show_think: Show the model's plan for each turn (system thinking).
        show_rolethink: Show what the character thinks (role thinking).
        transcript: File that receives the conversation as JSON lines; runs/chat/TIME-SCENE.jsonl by default.

    Raises:
        UserError: bad configuration, a choice that does not exist, a transcript that does, or a model that fails.
    """
    setup_logging()
    model = _model(model_path, model)
    terminal = Terminal()
    scene, played, name = _choose(terminal, load_scenarios(scenarios), scenario, character, user)
    time = re.sub(r"\D", "", now()[:19])
    file = transcript or f"runs/chat/{time}-{scene.id}.jsonl"
    check_new(file)

    from nlhf.generation.streaming import open_stream
    from nlhf.runs import environment

    stream = open_stream(model, sampling, backend)
    origin = {
        "model": plain(model),
        "model_hash": backend.weights_hash(model),
        "backend": backend.identity(model),
        "sampling": plain(sampling),
        "environment": environment(),
    }
    session = ChatSession(scene, played, name, stream, Transcript(file), **origin)
    try:
        Chat(session, terminal, show_think, show_rolethink).run()
    finally:
        terminal.note(f"Transcript: {file}")


def _model(path: str | None, model: ModelConfig | None) -> ModelConfig:
    if path is not None and model is not None:
        raise UserError(f"--model-path {path} and --model.name {model.name} both name a model; leave one out")
    if path is None and model is None:
        raise UserError("missing: model.name (or --model-path), the model that plays the character")
    return model or ModelConfig(path)


class Terminal:
    """Standard input and output: colours and prompts for a person, plain lines for a pipe.

    Raises:
        UserError: standard input or output is closed.
    """

    def __init__(self):
        if sys.stdin is None or sys.stdout is None:
            raise UserError("a chat needs standard input and standard output")
        self.interactive = sys.stdin.isatty()
        sys.stdin.reconfigure(errors="replace")
        self.console = Console(highlight=False, soft_wrap=True)
        if self.interactive:
            with contextlib.suppress(ImportError):  # not on every system
                import readline  # noqa: F401 - gives input() its editing keys

    def ask(self, prompt: str) -> str:
        """The next line that is typed.

        Raises:
            EOFError: there is none.
        """
        if self.interactive:
            return input(prompt).strip()
        if not (line := sys.stdin.readline()):
            raise EOFError
        self.write(f"{prompt}{line.rstrip()}\n")  # so that the output of a script reads as a conversation
        return line.strip()

    def write(self, text: str, style: str = "") -> None:
        """Text as it is: control characters in it become visible."""
        written = shown(text)
        written.stylize(style)
        self.console.print(written, end="")

    def note(self, text: str) -> None:
        """A line that is no part of the conversation."""
        self.write(f"{text}\n", "dim")


def _choose(
    terminal: Terminal,
    scenarios: Sequence[Scenario],
    scenario: int | str | None,
    character: int | str | None,
    user: int | str | None,
) -> tuple[Scenario, Character, str]:
    """Scene, the model's character and the user's name, as given or asked for."""

    def find(choice: str) -> Scenario:
        return find_scenario(scenarios, choice)

    rows = [(s.title, ", ".join(str(part) for part in (s.work, s.author, s.year) if part)) for s in scenarios]
    # What is given is checked before anything is asked.
    scene = None if scenario is None else find(str(scenario))
    scene = scene or _asked(terminal, "scenario", "Which scene?", rows, find)
    cast = [(c.name, c.description) for c in scene.characters]
    played = None if character is None else scene.character(str(character))
    played = played or _asked(terminal, "character", "Who is played by the model?", cast, scene.character)

    def own(choice: str) -> str:
        return _own_name(scene, played, choice)

    question = "Who are you? A name of your own will do."
    rows = [(c.name, "played by the model" if c == played else "") for c in scene.characters]
    name = None if user is None else own(str(user))
    return scene, played, name or _asked(terminal, "user", question, rows, own)


def _own_name(scene: Scenario, played: Character, choice: str) -> str:
    known = choice.isdecimal() or choice.casefold() in (name.casefold() for name in scene.names)
    found = scene.character(choice) if known else _somebody_new(choice)
    if found == played:
        raise UserError(f"the model plays {played.name}; choose somebody else for yourself")
    return found.name


def _somebody_new(name: str) -> Character:
    try:
        return Character(name, "the user", "the user's")
    except UserError as error:
        raise UserError(f"user {name!r:.80}: {error}") from None


T = TypeVar("T")


def _asked(
    terminal: Terminal, option: str, question: str, rows: Sequence[tuple[str, str]], find: Callable[[str], T]
) -> T:
    """What the user chooses from a list; a person is asked again after a mistake."""
    terminal.write(f"{question}\n", "bold")
    for place, (name, about) in enumerate(rows, start=1):
        terminal.write(f"{place:>3}  {name}" + (f" - {about}" if about else "") + "\n")
    while True:
        try:
            choice = terminal.ask("Number or name> ")
        except EOFError:
            raise UserError(f"no {option} was chosen; --{option} chooses one") from None
        try:
            return find(choice)
        except UserError as error:
            if not terminal.interactive:
                raise
            terminal.note(str(error))


class Chat:
    """A session at a terminal.

    Args:
        session: The conversation.
        terminal: Where it is typed and shown.
        show_plan: Show the model's plan for each turn.
        show_thinking: Show what its character thinks.
    """

    def __init__(self, session: ChatSession, terminal: Terminal, show_plan: bool = False, show_thinking: bool = False):
        self.session, self.terminal = session, terminal
        self.show_plan, self.show_thinking = show_plan, show_thinking
        self._forgetting_told = False
        self._commands: dict[str, Callable[[], Any]] = {
            "clear": self._clear,
            "retry": self._retry,
            "history": self._history,
            "prompt": self._prompt,
            "help": lambda: terminal.note(_HELP),
        }

    def run(self) -> None:
        """Talk until the user has had enough; the transcript's last line says how it ended.

        Raises:
            UserError: the model failed, and nobody is there to try again.
        """
        reason = "failed"
        try:
            self._begin()
            while (text := self._typed()) is not None:
                self._take(text)
            reason = "quit"
        except EOFError:
            self.terminal.write("\n" if self.terminal.interactive else "")
            reason = "end of input"
        except KeyboardInterrupt:
            self.terminal.write("\n")
            reason = "interrupted"
        finally:
            self.session.end(reason)

    def _typed(self) -> str | None:
        """What the user types, None for the end."""
        text = self.terminal.ask(f"{shown(self.session.user).plain}> ")
        return None if text.removeprefix("/").casefold() in ("quit", "exit", "q") else text

    def _take(self, text: str) -> None:
        """Obey a command, or say the text and have it answered."""
        command = text.removeprefix("/").casefold()
        if command in self._commands:
            self._commands[command]()
        elif text.startswith("/"):
            self.terminal.note(f"no command {text}; help lists them.{nearest(command, [*self._commands, 'quit'])}")
        elif text:
            try:
                self.session.say(text)
            except UserError as error:
                self.terminal.note(str(error))
            else:
                self._answer()

    def _answer(self) -> None:
        session, terminal = self.session, self.terminal
        live = LiveTurn(session.character.name, self.show_plan, self.show_thinking)
        waiting = terminal.console.status(Text(f"{shown(session.character.name).plain} ...", "dim"))

        def show(text: str) -> None:
            if text:
                waiting.stop()
                self._show(text)

        if terminal.console.is_terminal:
            waiting.start()
        try:
            answer = session.answer(live, show)
        except MessageTooLong as error:
            waiting.stop()
            terminal.note(f"{error}. It has been taken back; say it in fewer words.")
            return
        finally:
            waiting.stop()
        terminal.write("\n")
        if answer.forgotten and not self._forgetting_told:
            self._forgetting_told = True
            terminal.note("The conversation has outgrown the model's context: its oldest turns are no longer read.")
        if note := _NOTES.get(answer.ended):
            terminal.note(note)
        elif answer.problem:
            if not terminal.interactive:
                raise UserError(f"the model gave no reply: {answer.problem}")
            terminal.note(f"No reply: {answer.problem}. retry asks again.")
        elif not answer.turn.visible:
            terminal.note(f"{session.character.name} says and does nothing. retry asks again.")

    def _show(self, text: str) -> None:
        written = shown(text)
        written.highlight_regex(r"\([^()]*\)", "italic")
        written.highlight_regex(r"\[[^\[\]]*\]", "dim")
        self.terminal.console.print(written, end="")

    def _turn(self, turn: DualTurn) -> str:
        return reader_view(turn, self.show_plan, self.show_thinking)

    def _begin(self) -> None:
        self._show(f"{self.session.scenario.setting}\n{self._turn(self.session.opening)}\n")
        for turn in self.session.turns:
            self._show(f"{self._turn(turn)}\n")

    def _clear(self) -> None:
        self.session.clear()
        self.terminal.note("The conversation begins anew.")
        self._begin()

    def _retry(self) -> None:
        if self.session.retract():
            self._answer()
        else:
            self.terminal.note("There is no reply to draw again.")

    def _history(self) -> None:
        for number, turn in enumerate(self.session.turns):
            if number == self.session.forgotten and number:
                self.terminal.note("(what stands above is no longer read by the model)")
            self._show(f"{self._turn(turn)}\n")
        if not self.session.turns:
            self.terminal.note("Nothing has been said yet.")

    def _prompt(self) -> None:
        self.terminal.write(f"{self.session.system}\n")


_NOTES = {
    "interrupted": "(stopped; retry draws another reply, or go on)",
    "length": "(cut off at sampling.max_new_tokens)",
}
