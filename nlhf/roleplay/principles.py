"""The principles that responses in a role-play are judged by: a library of our own, versioned and checked on loading.

Station of the path: Pair -> **JudgeFormat.render**, for a teacher that labels pairs; a judge learns to name principles
itself. HER (arXiv 2601.21459) names twelve dimensions and has not released its principles; the principles here, in
``nlhf/assets/roleplay/principles.yaml``, are ours and in our own words.
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nlhf.errors import UserError, nearest

DIMENSIONS = (
    "Character Development",
    "Relationship Development",
    "Emotional Expression",
    "Action Description",
    "Atmosphere & Environment",
    "Dialogue & Interaction",
    "Narrative & Plot",
    "Conflict & Tension",
    "Details & Description",
    "Overall Quality",
    "Safety & Boundaries",
    "Worldview Consistency",
)
"""The dimensions that HER's release names."""

Polarity = Literal["negative", "positive"]
"""A candidate that violates a negative principle alone loses outright; a positive one counts where it separates."""
Level = Literal["sentence", "session"]
"""Judged by the response itself, or by the whole dialogue."""

BUILT_IN = Path(__file__).parents[1] / "assets" / "roleplay" / "principles.yaml"


@dataclass(frozen=True)
class Principle:
    """One rule of judgement.

    Attributes:
        id: Lower-case words joined by ``_``; its words are the name that judges write.
        dimension: One of `DIMENSIONS`.
        polarity: See `Polarity`.
        level: See `Level`.
        definition: The rule, one or two sentences.
    """

    id: str
    dimension: str
    polarity: Polarity
    level: Level
    definition: str

    def __post_init__(self):
        for name, known in (
            ("dimension", DIMENSIONS),
            ("polarity", get_args(Polarity)),
            ("level", get_args(Level)),
        ):
            value = getattr(self, name)
            if value not in known:
                raise UserError(
                    f"field {name!r} must be one of {', '.join(known)}, got {value!r}.{nearest(value, known)}"
                )
        if not isinstance(self.id, str) or not re.fullmatch(r"[a-z]+(_[a-z]+)*", self.id):
            raise UserError(f"field 'id' must be lower-case words joined by _, got {self.id!r}")
        if not isinstance(self.definition, str) or not 20 <= len(self.definition) <= 300 or "\n" in self.definition:
            raise UserError("field 'definition' must be one line of 20 to 300 characters")

    @property
    def name(self) -> str:
        """What a judge calls it: ``out_of_character`` is ``Out of character``."""
        return self.id.replace("_", " ").capitalize()


@dataclass(frozen=True)
class Library:
    """A version of the principles.

    Attributes:
        version: Changes whenever a principle does.
        principles: In the order of `DIMENSIONS`.
    """

    version: str
    principles: tuple[Principle, ...]

    @property
    def text(self) -> str:
        """The principles as a teacher reads them, a line each."""
        return "\n".join(
            f"- {p.dimension} / {p.name} ({p.polarity}, {p.level}): {p.definition}" for p in self.principles
        )

    def find(self, name: object) -> Principle | None:
        """The principle that a judge calls ``name``, whatever the case and the marks between words."""
        return self._by_name.get(_key(str(name)))

    @functools.cached_property
    def _by_name(self) -> dict[str, Principle]:
        return {_key(p.id): p for p in self.principles}


def _key(name: str) -> str:
    return " ".join(re.findall(r"\w+", name.replace("_", " ").casefold()))


def load_principles(path: str | Path = BUILT_IN) -> Library:
    """Read and check a library.

    Raises:
        UserError: the file or a principle is malformed, two principles share an id, or a dimension lacks a negative or
            a positive principle; names the file and the principle.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping) or set(found) != {"version", "principles"}:
        raise UserError(f"{path}: expected the fields version and principles")
    if not isinstance(found["version"], str) or not isinstance(found["principles"], list):
        raise UserError(f"{path}: version must be a text in quotes, and principles a list")
    principles = [_read(row, f"{path}, principle {i}") for i, row in enumerate(found["principles"], start=1)]
    repeated = [name for name, count in Counter(p.id for p in principles).items() if count > 1]
    if repeated:
        raise UserError(f"{path}: two principles have the id {repeated[0]!r}")
    present = {(p.dimension, p.polarity) for p in principles}
    missing = [f"{d} has no {p} principle" for d in DIMENSIONS for p in get_args(Polarity) if (d, p) not in present]
    if missing:
        raise UserError(f"{path}: {missing[0]}")
    return Library(found["version"], tuple(sorted(principles, key=lambda p: DIMENSIONS.index(p.dimension))))


def _read(row: Any, where: str) -> Principle:
    names = [field.name for field in fields(Principle)]
    if not isinstance(row, Mapping) or set(row) != set(names):
        has = list(row) if isinstance(row, Mapping) else type(row).__name__
        raise UserError(f"{where}: expected the fields {', '.join(names)}, got {has}")
    try:
        return Principle(**row)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


@functools.cache
def library() -> Library:
    """The built-in principles."""
    return load_principles()
