"""Conversations of dual-layer turns that a policy learns from or is asked to continue: read, checked and split.

Station of the path: source -> **Pair**, where what is trained is no judge but the policy that a judge compares. The
last turn is the lesson of `nlhf.cold_start`; without it the conversation is a prompt of `nlhf.train_policy`. Who sees
which layer is said in `nlhf.roleplay.turns`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nlhf.errors import UserError, nearest
from nlhf.formats.base import Message
from nlhf.pairs import Pair, Turn
from nlhf.roleplay.turns import DualTurn, check, history_view, judge_view, parse, training_view
from nlhf.sources.rows import read_rows

Split = Literal["train", "held_out", "all"]


@dataclass(frozen=True)
class Conversation:
    """A conversation whose last turn is to be learned, or to be written anew.

    Attributes:
        id: Unique within its file.
        characters: Names that may stand before a turn's colon.
        turns: The turns as they are written; the last one is a whole dual-layer turn, with system thinking.
        group: Conversations that share a group are on one side of every split (default: the conversation alone).
        system: What the speaker of the last turn is told: scenario, profile, secrets.
        scene: What a judge is told in its place.
    """

    id: str
    characters: tuple[str, ...]
    turns: tuple[str, ...]
    group: str = ""
    system: str | None = None
    scene: str | None = None

    def __post_init__(self):
        for name in ("characters", "turns"):
            found = getattr(self, name)
            if isinstance(found, str) or not found or not all(isinstance(item, str) and item.strip() for item in found):
                raise UserError(f"field {name!r} must be a list of one text or more, got {str(found)[:80]!r}")
            object.__setattr__(self, name, tuple(found))
        for name in ("id", "group", "system", "scene"):
            found = getattr(self, name)
            if not isinstance(found, str) and (found is not None or name in ("id", "group")):
                raise UserError(f"field {name!r} must be a text, got {type(found).__name__}")
        if not self.id:
            raise UserError("field 'id' must not be empty")
        last = check(self.turns[-1], f"field 'turns[{len(self.turns) - 1}]'")
        if last.character not in self.characters:
            raise UserError(
                f"field 'turns[{len(self.turns) - 1}]': {last.character!r} is not among the characters "
                f"{list(self.characters)}.{nearest(last.character, self.characters)}"
            )

    @property
    def read(self) -> list[DualTurn]:
        """The turns, read; only a name among the characters is taken for one."""
        return [parse(turn, characters=self.characters) for turn in self.turns]

    @property
    def speaker(self) -> str:
        """Who speaks the last turn."""
        return parse(self.turns[-1], "tags", self.characters).character

    @property
    def cluster(self) -> str:
        """What a split and an interval keep together."""
        return self.group or self.id

    @property
    def key(self) -> str:
        """SHA-1 of the turns: equal keys are duplicates."""
        return hashlib.sha1(json.dumps(self.turns, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()

    def lesson(self) -> list[Message]:
        """The chat messages of a cold start; the last one alone is learned, and alone has system thinking."""
        return training_view(self.read, self.system)

    def prompt(self) -> "ScenePrompt":
        """The conversation without its last turn, which another may write.

        Raises:
            UserError: nothing is left for a policy to answer.
        """
        *before, last = self.read
        messages = history_view(before, last.character, self.system)
        if not messages or messages[-1]["role"] != "user":
            raise UserError(f"conversation {self.id!r}: before its last turn nobody else has spoken; nothing to answer")
        return ScenePrompt(
            self.id,
            [Turn(message["role"], message["content"]) for message in messages],
            "",
            "",
            group=self.group,
            scene=tuple(judge_view(before, last.character, self.scene)),
            character=last.character,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` reads back to an equal conversation."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], where: str) -> "Conversation":
        """Read a row; ``where`` (file and row) begins every error message.

        Raises:
            UserError: a field is missing, unknown or malformed.
        """
        known = [item.name for item in fields(cls)]
        if missing := [name for name in known[:3] if name not in row]:
            raise UserError(
                f"{where}: missing field {missing[0]!r}; found {sorted(row)}, expected {known}."
                f"{nearest(missing[0], row)}"
            )
        if unknown := [name for name in row if name not in known]:
            raise UserError(f"{where}: unknown field {unknown[0]!r}; known: {known}.{nearest(unknown[0], known)}")
        try:
            return cls(**row)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


@dataclass(frozen=True)
class ScenePrompt(Pair):
    """A prompt whose conversation (``context``) the policy reads in one view and the judge in another.

    Attributes:
        scene: The conversation as the judge reads it.
        character: Who is to speak.
    """

    scene: tuple[Turn, ...] = ()
    character: str = ""


@dataclass
class ConversationConfig:
    """Which conversations to learn from, or to continue."""

    path: str | None = None
    """JSON-lines file of conversations; left out: those of the built-in world (nlhf.roleplay.world)."""

    split: Split = "train"
    """train or held_out (no group is in both), or all."""

    held_out: float = 0.4
    """Share of the groups that is held out, whatever the seed; group is a field of the rows, or else their id."""

    limit: int | None = None
    """Keep the first N conversations."""

    n: int = 600
    """Conversations that are drawn from the built-in world, both splits together; not used with a path."""

    def __post_init__(self):
        if self.split not in get_args(Split):
            raise UserError(f"conversations.split must be train, held_out or all, got {self.split!r}")
        if not 0 <= self.held_out < 1:
            raise UserError(f"conversations.held_out must be at least 0 and less than 1, got {self.held_out}")
        for name, value in (("limit", self.limit), ("n", self.n)):
            if value is not None and value < 1:
                raise UserError(f"conversations.{name} must be at least 1, got {value}")

    def load(self, seed: int = 0) -> list[Conversation]:
        """The conversations of the split; ``seed`` is that of the built-in world.

        Raises:
            UserError: a row is malformed or repeated, or nothing is left.
        """
        if self.path is not None:
            found = read_conversations(self.path)
        else:
            from nlhf.roleplay.world import conversations

            found = conversations(self.n, seed)
        kept = split(found, self.split, self.held_out)[: self.limit]
        if not kept:
            raise UserError(
                f"{self.path or 'conversations'}: none of {len(found)} conversations is in split {self.split!r}; "
                "change held_out, or give them more groups"
            )
        return kept


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read and check a JSON-lines file (or any other kind of `nlhf.sources.rows`) of conversations.

    Raises:
        UserError: a row is malformed, or repeats another's id or turns; names file, row and field.
    """
    found, ids, keys = [], {}, {}
    for where, row in read_rows(path):
        item = Conversation.from_dict(row, where)
        for kind, seen, value in (("id", ids, item.id), ("turns", keys, item.key)):
            if value in seen:
                raise UserError(f"{where}: field {kind!r} is that of {seen[value]}; each conversation must occur once")
            seen[value] = where
        found.append(item)
    return found


def described(found: Sequence[Conversation]) -> dict[str, Any]:
    """What a run's manifest says of its conversations: how many, which groups, and a hash of their turns."""
    digest = hashlib.sha256("".join(item.key for item in found).encode()).hexdigest()[:12]
    return {"conversations": len(found), "groups": sorted({item.cluster for item in found}), "hash": digest}


def split(found: Sequence[Conversation], name: Split, held_out: float) -> list[Conversation]:
    """The conversations on one side of a split by group."""
    if name == "all":
        return list(found)
    out = held_out_groups({item.cluster for item in found}, held_out)
    return [item for item in found if (item.cluster in out) == (name == "held_out")]


def held_out_groups(groups: Iterable[str], share: float) -> frozenset[str]:
    """Which groups are held out: a share of them (rounded), by the hash of their names alone."""
    ordered = sorted(set(groups), key=lambda group: hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest())
    return frozenset(ordered[: round(share * len(ordered))])
