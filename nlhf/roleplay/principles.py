"""The principles that responses in a role-play are judged by: a library of our own, versioned and checked on loading.

Station of the path: Pair -> **JudgeFormat.render**, for a teacher that labels pairs; a judge learns to name principles
itself. HER (arXiv 2601.21459) names twelve dimensions and has not released its principles; the principles here, in
``nlhf/assets/roleplay/principles.yaml``, are ours and in our own words. A file of the user's own takes their place.
"""

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nlhf.errors import UserError, nearest
from nlhf.files import read_yaml

if TYPE_CHECKING:
    from rich.table import Table

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

PRINCIPLES_FILE = "principles.yaml"
"""In the folder of an evaluation: the principles that its replies are held against."""


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
        text = self.definition
        if not isinstance(text, str) or not 20 <= len(text) <= 300 or len(text.splitlines()) > 1:
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

    @property
    def hash(self) -> str:
        """SHA-256 of `text`, first 12 digits: what a run's manifest records."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def yaml(self) -> str:
        """The file that `load_principles` reads back equal."""
        import yaml

        rows = [asdict(p) for p in self.principles]
        return yaml.safe_dump({"version": self.version, "principles": rows}, sort_keys=False, allow_unicode=True)

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
        UserError: the file or a principle is malformed, or two principles share an id; names the file and the
            principle.
    """
    found = read_yaml(path)
    if set(found) != {"version", "principles"}:
        raise UserError(f"{path}: expected the fields version and principles")
    version, rows = found["version"], found["principles"]
    if not isinstance(version, str) or not version.strip() or not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: version must be a text in quotes, and principles a list of at least one")
    principles = [_read(row, f"{path}, principle {i}") for i, row in enumerate(rows, start=1)]
    repeated = [name for name, count in Counter(p.id for p in principles).items() if count > 1]
    if repeated:
        raise UserError(f"{path}: two principles have the id {repeated[0]!r}")
    return Library(version, tuple(sorted(principles, key=lambda p: DIMENSIONS.index(p.dimension))))


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


def run_principles(folder: str | Path) -> Library:
    """The principles that an evaluation kept in its folder; the built-in ones where it kept none."""
    path = Path(folder) / PRINCIPLES_FILE
    return load_principles(path) if path.is_file() else library()


def show(principles: str | None = None) -> None:
    """Check a file of principles and print it, with counts; without one, the built-in principles.

    Args:
        principles: YAML file with version and principles, each with id, dimension, polarity, level and definition.

    Raises:
        UserError: the file or a principle is malformed; names the file and the principle.
    """
    from rich.console import Console

    from nlhf.terminal import shown

    found = load_principles(principles) if principles else library()
    console = Console(highlight=False)
    console.print(_listed(found.principles))
    console.print(_counted(found.principles))
    count = f"{len(found.principles)} principle{'s' * (len(found.principles) != 1)}"
    text = f"{principles or 'built in'}: version {found.version}, hash {found.hash}, {count}"
    console.print(shown(text), soft_wrap=True)


def _listed(principles: Sequence[Principle]) -> "Table":
    from rich.table import Table

    from nlhf.terminal import shown

    table = Table("Dimension", "Principle", "Polarity", "Level", "Definition", box=None, pad_edge=False)
    dimension = None
    for p in principles:
        heading = "" if p.dimension == dimension else p.dimension
        table.add_row(*map(shown, (heading, p.id, p.polarity, p.level, p.definition)))
        dimension = p.dimension
    return table


def _counted(principles: Sequence[Principle]) -> "Table":
    from rich.table import Table

    kinds = [*get_args(Polarity), *get_args(Level)]
    table = Table("Dimension", *kinds, "all", box=None, pad_edge=False, title="Counts")
    for name in (*DIMENSIONS, "all"):
        chosen = [p for p in principles if name in (p.dimension, "all")]
        counts = Counter(kind for p in chosen for kind in (p.polarity, p.level))
        table.add_row(name, *(str(counts[kind]) for kind in kinds), str(len(chosen)))
    return table
