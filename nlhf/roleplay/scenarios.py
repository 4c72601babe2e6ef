"""Scenes for a role-play: who is in them, where they stand and what each wants, read from YAML and checked.

Station of the path: source -> **Pair**: the scene that a conversation is written in. The scenes on board
(``nlhf/assets/roleplay/scenarios.yaml``) are of our own writing, set in works in the public domain.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from nlhf.errors import UserError, nearest
from nlhf.files import read_yaml
from nlhf.roleplay.turns import DualTurn, parse, problems

BUILT_IN = Path(__file__).parents[1] / "assets" / "roleplay" / "scenarios.yaml"

NARRATOR = "Narrator"
"""Who tells what is not said or done by a character; no character has this name."""


@dataclass(frozen=True)
class Character:
    """Somebody in a scene.

    Attributes:
        name: As it stands before the colon of a turn.
        description: Who it is, as the others in the scene know it.
        goal: What it wants in this scene; its own secret.
    """

    name: str
    description: str
    goal: str

    def __post_init__(self):
        _check_texts(self)
        if parse(f"{self.name}: Yes.").character != self.name:
            raise UserError(
                f"field 'name': {self.name!r} cannot stand before the colon of a turn; a name has 1 to 60 letters and "
                "no line end, colon, bracket or tag"
            )
        if self.name.casefold() == NARRATOR.casefold():
            raise UserError(f"field 'name': {self.name!r} is the name of who tells the scene; choose another")


@dataclass(frozen=True)
class Scenario:
    """A scene to play.

    Attributes:
        id: Lower-case words joined by ``_``.
        title: What it is called in a list.
        setting: Place, time and surroundings.
        opening: What has happened when the first turn is spoken.
        characters: Two or more, with different names.
        first_message: A turn of one of them that opens the conversation, in the tags of `nlhf.roleplay.turns`, without
            system thinking.
        work, author, year: Where the characters come from, and its year of publication; None for a scene of one's own.
    """

    id: str
    title: str
    setting: str
    opening: str
    characters: tuple[Character, ...]
    first_message: str | None = None
    work: str | None = None
    author: str | None = None
    year: int | None = None

    def __post_init__(self):
        _check_texts(self)
        if not all(word.isascii() and word.isalnum() and word == word.lower() for word in self.id.split("_")):
            raise UserError(f"field 'id' must be lower-case words joined by _, got {self.id!r}")
        if self.id.isdigit():
            raise UserError(f"field 'id' must have a letter: {self.id} would be taken for a place in the list")
        if self.year is not None and (isinstance(self.year, bool) or not isinstance(self.year, int)):
            raise UserError(f"field 'year' must be a whole number, got {self.year!r}")
        if len(self.characters) < 2:
            raise UserError(f"field 'characters' must hold two or more, got {len(self.characters)}")
        counts = Counter(name.casefold() for name in self.names)
        if repeated := [name for name in self.names if counts[name.casefold()] > 1]:
            raise UserError(f"field 'characters': two have the name {repeated[0]!r}")
        if self.first_message is not None:
            self._check_first_message()

    def _check_first_message(self) -> None:
        turn = parse(self.first_message, "tags")
        wrong = problems(self.first_message, needs_plan=False)
        wrong += ["it has system thinking"] if turn.plan else []
        if not wrong and turn.character not in self.names:
            wrong = [f"{turn.character!r} is nobody in this scene.{nearest(turn.character, self.names)}"]
        if wrong:
            raise UserError(f"field 'first_message': {'; '.join(wrong)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The characters' names, in their order."""
        return tuple(character.name for character in self.characters)

    @property
    def opening_turn(self) -> DualTurn | None:
        """The first message, read."""
        return None if self.first_message is None else parse(self.first_message, "tags")

    def character(self, choice: str) -> Character:
        """The character at a place in the list, counted from 1, or of a name.

        Raises:
            UserError: there is none.
        """
        return _choose(self.characters, choice, self.names, "character", f" in {self.id!r}")


def find_scenario(scenarios: Sequence[Scenario], choice: str) -> Scenario:
    """The scene at a place in the list, counted from 1, or of an id.

    Raises:
        UserError: there is none.
    """
    return _choose(scenarios, choice, [s.id for s in scenarios], "scenario")


_Item = TypeVar("_Item", Character, Scenario)


def _choose(items: Sequence[_Item], choice: str, names: Sequence[str], what: str, where: str = "") -> _Item:
    choice = str(choice).strip()
    for place, (item, name) in enumerate(zip(items, names, strict=True), start=1):
        if choice.casefold() in (name.casefold(), str(place)):
            return item
    known = f"there are 1 to {len(items)}: {', '.join(names)}"
    raise UserError(f"no {what} {choice!r}{where}; {known}.{nearest(choice, names)}")


def load_scenarios(path: str | Path | None = None) -> list[Scenario]:
    """Read and check scenes.

    Args:
        path: A YAML file with the field ``scenarios``, a list; None for the scenes on board.

    Raises:
        UserError: the file or a scene is malformed, or two scenes share an id; names the file, the scene and the field.
    """
    path = BUILT_IN if path is None else path
    found = read_yaml(path)
    if set(found) != {"scenarios"}:
        raise UserError(f"{path}: expected the field scenarios, a list")
    if not isinstance(found["scenarios"], list) or not found["scenarios"]:
        raise UserError(f"{path}: scenarios must be a list of one or more")
    scenarios = [_scenario(row, f"{path}, scenario {i}") for i, row in enumerate(found["scenarios"], start=1)]
    repeated = [name for name, count in Counter(s.id for s in scenarios).items() if count > 1]
    if repeated:
        raise UserError(f"{path}: two scenarios have the id {repeated[0]!r}")
    return scenarios


def _scenario(row: Any, where: str) -> Scenario:
    values = _fields(Scenario, row, where)
    if not isinstance(values["characters"], list):
        raise UserError(f"{where}: field 'characters' must be a list, got {values['characters']!r}")
    characters = tuple(
        _made(Character, _fields(Character, row, place), place)
        for i, row in enumerate(values["characters"], start=1)
        for place in [f"{where}, character {i}"]
    )
    return _made(Scenario, values | {"characters": characters}, where)


def _fields(kind: type, row: Any, where: str) -> dict[str, Any]:
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected the fields {', '.join(known)}, got {type(row).__name__}")
    if unknown := [str(name) for name in row if name not in known]:
        raise UserError(
            f"{where}: unknown field {unknown[0]!r}; known: {', '.join(known)}.{nearest(unknown[0], known)}"
        )
    if missing := [name for name, needed in known.items() if needed and name not in row]:
        raise UserError(f"{where}: field {missing[0]!r} is missing")
    return dict(row)


def _made(kind: type, values: dict[str, Any], where: str) -> Any:
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_texts(item: Any) -> None:
    """Fields of text hold one line that is not empty; None only where it is the default."""
    for field in fields(item):
        value = getattr(item, field.name)
        if field.type not in (str, str | None) or (value is None and field.default is None):
            continue
        if not isinstance(value, str) or not value.strip() or len(value.splitlines()) > 1 or len(value) > 4000:
            raise UserError(
                f"field {field.name!r} must be one line of text of up to 4,000 characters, got {value!r:.80}"
            )
        if value != value.strip():
            object.__setattr__(item, field.name, value.strip())
