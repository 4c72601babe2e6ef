"""Scenes to act: a given circumstance, its characters, and how the original went on, in the schema of CoSER's test set.

Station of the path: **source** -> ... -> metrics, for the evaluation of role-play (`nlhf.roleplay.coser`). The public
set is Wang et al., 2025, "CoSER: Coordinating LLM-Based Persona Simulation of Established Roles" (arXiv 2502.09082),
200 conversations from novels. The scenes on board are ours.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError
from nlhf.files import check_fields
from nlhf.roleplay.turns import DualTurn, parse
from nlhf.sources.rows import read_rows, require

BUILT_IN = Path(__file__).parents[1] / "assets" / "roleplay" / "coser_scenes.json"
ENVIRONMENT = "Environment"
"""Who tells what happens around the characters; it has a turn like they do."""

Tag = Literal["id", "ood"]
SUBSETS: dict[Tag, str] = {"id": "in-domain", "ood": "out-of-domain"}
"""Of books that CoSER's training set has, and of others."""

_FIELDS = {
    "book": str,
    "i_p": int,
    "i_c": int,
    "scenario": str,
    "plot": dict,
    "plot.summary": str,
    "plot.key_characters": list[dict],
    "key_characters": list[dict],
    "major_characters": list[str],
    "speaking_characters_w_env": list[str],
    "character_profiles": dict,
    "dialogues": list[dict],
    "tag": Tag,
}


@dataclass(frozen=True)
class Scene:
    """A circumstance to be acted.

    Attributes:
        id: Book, plot and conversation, as upstream names its cases.
        tag: ``id``: of a book that CoSER's training set has; ``ood``: of another.
        book: Title of the work.
        plot: What happens in this part of it.
        scenario: Where the conversation begins.
        speakers: Who speaks in it, the first to speak first; `ENVIRONMENT` may be among them.
        major: The main characters among them.
        profiles: Who the characters are, by name.
        motives: What a character has in mind, by name; its own secret.
        dialogue: The original conversation.
    """

    id: str
    tag: Tag
    book: str
    plot: str
    scenario: str
    speakers: tuple[str, ...]
    major: tuple[str, ...]
    profiles: Mapping[str, str]
    motives: Mapping[str, str]
    dialogue: tuple[DualTurn, ...]

    @property
    def characters(self) -> tuple[str, ...]:
        """Who is acted: the speakers without the environment."""
        return tuple(name for name in self.speakers if name != ENVIRONMENT)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; what the hash of the data is of."""
        return asdict(self)


def load_scenes(path: str | Path | None = None, tag: Tag | None = None, limit: int | None = None) -> list[Scene]:
    """Read scenes.

    Args:
        path: A file in the schema of CoSER's test set, ``data/test/test_set.json`` of its repository; None for the
            scenes on board.
        tag: Only those in-domain, or only those out of it.
        limit: The first so many of them.

    Raises:
        UserError: the file or a row is malformed, two rows have one id, or no scene is left; names file, row and field.
    """
    path = BUILT_IN if path is None else path
    scenes = [_scene(row, where) for where, row in read_rows(path)]
    counts = Counter(scene.id for scene in scenes)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise UserError(f"{path}: two conversations have the book, i_p and i_c of {repeated[0]!r}")
    kept = [scene for scene in scenes if tag in (None, scene.tag)][:limit]
    if not kept:
        raise UserError(f"{path}: no scene is left of {len(scenes)}; see options tag and limit")
    return kept


def _scene(row: Mapping[str, Any], where: str) -> Scene:
    require(row, [name for name in _FIELDS if "." not in name], where)
    check_fields(row, _FIELDS, where)
    written = list(dict.fromkeys(row["speaking_characters_w_env"]))
    speakers = tuple(dict.fromkeys(_name(name, where) for name in written))
    if len(speakers) < len(written):
        raise UserError(f"{where}: two of {written} have one name of up to 60 letters without colons and brackets")
    if not row["dialogues"] or set(speakers) <= {ENVIRONMENT}:
        raise UserError(f"{where}: a scene needs a character in 'speaking_characters_w_env' and turns in 'dialogues'")
    major = tuple(name for name in (_name(name, where) for name in row["major_characters"]) if name in speakers)
    return Scene(
        id=f"{row['book']}-{row['i_p']}-{row['i_c']}",
        tag=row["tag"],
        book=row["book"],
        plot=row["plot"]["summary"].strip(),
        scenario=row["scenario"].strip(),
        speakers=speakers,
        major=tuple(name for name in major if name != ENVIRONMENT),
        profiles=_profiles(row, speakers, where),
        motives=_motives(row, where),
        dialogue=tuple(
            _turn(turn, f"{where}: dialogues, turn {i}") for i, turn in enumerate(row["dialogues"], start=1)
        ),
    )


def _name(name: str, where: str) -> str:
    """A name as it can stand before the colon of a turn."""
    cleaned = re.sub(r"[\s:：<>\[\]()]+", " ", name)[:60].strip()
    if not cleaned:
        raise UserError(f"{where}: {name!r} is no name")
    return cleaned


def _profiles(row: Mapping[str, Any], speakers: tuple[str, ...], where: str) -> dict[str, str]:
    """What the plot says of each speaker, then its profile, as upstream joins them."""
    texts: dict[str, list[str]] = {name: [] for name in speakers if name != ENVIRONMENT}
    told = [(c["name"], c["description"]) for c in row["plot"]["key_characters"] if {"name", "description"} <= set(c)]
    for name, text in [*told, *row["character_profiles"].items()]:
        check_fields({"name": name, "profile": text}, {"name": str, "profile": str}, f"{where}: of {name!r}")
        if text.strip() and _name(name, where) in texts:
            texts[_name(name, where)].append(text.strip())
    return {name: "\n\n".join(parts) for name, parts in texts.items() if parts}


def _motives(row: Mapping[str, Any], where: str) -> dict[str, str]:
    motives = {}
    for i, character in enumerate(row["key_characters"], start=1):
        place = f"{where}: key_characters, entry {i}"
        require(character, ["name"], place)
        # The published files say thought, upstream's code reads motivation.
        motive = character.get("thought", character.get("motivation", ""))
        check_fields({"name": character["name"], "thought": motive}, {"name": str, "thought": str}, place)
        motives[_name(character["name"], place)] = motive.strip()
    return motives


def _turn(turn: Mapping[str, Any], where: str) -> DualTurn:
    require(turn, ["character", "message"], where)
    check_fields(turn, {"character": str, "message": str}, where)
    name = _name(turn["character"], where)
    return replace(parse(turn["message"], characters=[name]), character=name)
