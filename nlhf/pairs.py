"""The one data schema: a conversation, two responses, which is better, and what humans said about them.

Station of the path: source -> **Pair** -> JudgeFormat.render. Everything the project reads becomes a `Pair` first, and
everything it trains on or evaluates is a `Pair`.
"""

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nlhf.errors import UserError, nearest

Side = Literal["A", "B"]
Label = Literal["A", "B", "tie"]
LABELS = ("A", "B", "tie")
_DEEPEST = 100  # levels of `Pair.meta`: Python refuses to copy a thousand
_OTHER = {"A": "B", "B": "A", "1": "2", "2": "1"}

# How people refer to a response: a noun, then its letter or number ("Response A", "@Response 2", "Assistant B's").
# A lower-case letter is never a reference: "the answer a user wants" must stay as it is. One noun may serve two names
# ("Responses 1 and 2").
REFERENCE = re.compile(
    r"\b(?P<noun>responses?|assistants?|answers?|chatbots?|candidates?|options?|statements?|sentences?|summary|model|cand)"
    r"(?P<gap>[ \t_#-]*)(?P<name>[AB12])\b(?!\.\d)"
    r"(?:(?P<joint>[ \t]*(?:,|/|&|\band\b|\bor\b|\bvs\b\.?|\bover\b)[ \t]*)(?P<second>[AB12])\b(?!\.\d))?",
    re.IGNORECASE,
)


def other_label(label: Label | None) -> Label | None:
    """The label after the responses trade places: A and B exchanged, ``"tie"`` and None unchanged."""
    return _OTHER.get(label, label)


def swap_references(text: str) -> str:
    """Exchange the references to the two responses in free text ("Response A", "Assistant 2's"); an involution."""

    def exchange(match: re.Match) -> str:
        name, second = match["name"], match["second"]
        if name in "ab":
            return match[0]
        first = match["noun"] + match["gap"] + _OTHER[name]
        if second is None:
            return first
        same_kind = second not in "ab" and second.isdigit() == name.isdigit()
        return first + match["joint"] + (_OTHER[second] if same_kind else second)

    return REFERENCE.sub(exchange, text)


@dataclass(frozen=True)
class Turn:
    """One message of the conversation being judged."""

    role: str
    content: str


@dataclass(frozen=True)
class HumanCritique:
    """What one human wrote about a pair: free text, or four fields that say which response and praise or blame.

    A field holds one argument a line. Free text has no known side or polarity (see `nlhf.critique.arguments`).
    """

    text: str = ""
    strengths_a: str = ""
    weaknesses_a: str = ""
    strengths_b: str = ""
    weaknesses_b: str = ""
    annotator: str | None = None

    def __post_init__(self):
        for name in ("text", "strengths_a", "weaknesses_a", "strengths_b", "weaknesses_b"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"critique field {name!r} must be a string, got {type(getattr(self, name)).__name__}")
        if not isinstance(self.annotator, str | int | None):
            raise UserError(f"critique field 'annotator' must be a name, got {type(self.annotator).__name__}")

    @property
    def empty(self) -> bool:
        """True when no field holds anything but white space."""
        fields = (self.text, self.strengths_a, self.weaknesses_a, self.strengths_b, self.weaknesses_b)
        return not any(f.strip() for f in fields)

    def swap(self) -> "HumanCritique":
        """The same critique after the responses trade places."""
        return HumanCritique(
            text=swap_references(self.text),
            strengths_a=swap_references(self.strengths_b),
            weaknesses_a=swap_references(self.weaknesses_b),
            strengths_b=swap_references(self.strengths_a),
            weaknesses_b=swap_references(self.weaknesses_a),
            annotator=self.annotator,
        )


@dataclass(frozen=True)
class Pair:
    """A conversation, two responses and the humans' verdict on them.

    Attributes:
        id: Unique within its source and split.
        context: The conversation, oldest turn first; at least one turn.
        response_a: The response shown in slot A.
        response_b: The response shown in slot B.
        label: The better response, ``"tie"``, or None when nobody said.
        strength: How much better, -3..3; negative means A is better, 0 a tie.
        critiques: What humans wrote; an empty list makes the pair *unlabelled* for a process reward.
        source: Name of the data set.
        subset: Part of the data set that is reported on its own.
        group: Pairs that share a group are never split and are resampled together (default: the pair alone).
        meta: Anything else; never shown to a judge.
    """

    id: str
    context: list[Turn]
    response_a: str
    response_b: str
    label: Label | None = None
    strength: int | None = None
    critiques: list[HumanCritique] = field(default_factory=list)
    source: str = ""
    subset: str = ""
    group: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.id, str) or not self.id:
            raise UserError(f"field 'id' must be a non-empty string, got {self.id!r}")
        for name in ("response_a", "response_b"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"field {name!r} must be a string, got {type(getattr(self, name)).__name__}")
        if not self.context:
            raise UserError("field 'context' must hold at least one turn")
        if self.label is not None and self.label not in LABELS:
            raise UserError(f"field 'label' must be 'A', 'B', 'tie' or null, got {self.label!r}")
        if self.strength is not None:
            if isinstance(self.strength, bool) or self.strength not in range(-3, 4):
                raise UserError(f"field 'strength' must be a whole number from -3 to 3, got {self.strength!r}")
            implied = "A" if self.strength < 0 else "B" if self.strength > 0 else "tie"
            if self.label is not None and self.label != implied:
                raise UserError(
                    f"field 'strength' {self.strength} says {implied!r} but 'label' says {self.label!r} "
                    "(negative means A)"
                )

    @property
    def has_critique(self) -> bool:
        """True when at least one human critique is not empty: what makes a pair *labelled* for a process reward."""
        return any(not c.empty for c in self.critiques)

    @property
    def cluster(self) -> str:
        """What resampling keeps together: the group if there is one, else the pair."""
        return self.group or self.id

    @property
    def key(self) -> str:
        """SHA-1 of what is judged (context and both responses, in this order): equal keys are duplicates."""
        parts = [[t.role, t.content] for t in self.context], self.response_a, self.response_b
        return hashlib.sha1(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()

    def swap(self) -> "Pair":
        """The same pair with the responses in each other's place; label, strength and critiques follow."""
        return dataclasses.replace(
            self,
            response_a=self.response_b,
            response_b=self.response_a,
            label=other_label(self.label),
            strength=None if self.strength is None else -self.strength,
            critiques=[c.swap() for c in self.critiques],
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` reads back to an equal pair."""
        row = dataclasses.asdict(self)
        row["critiques"] = [{k: v for k, v in c.items() if v not in ("", None)} for c in row["critiques"]]
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], where: str = "pair") -> "Pair":
        """Read one row of our own schema; ``where`` (file and row) begins every error message.

        ``context`` may be a plain string (one user turn); a critique may be a plain string (free text).

        Raises:
            UserError: a field is missing, unknown (the nearest name is offered) or malformed.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: a pair must be an object with named fields, got {type(row).__name__}")
        required = ("id", "context", "response_a", "response_b")
        unknown = [k for k in row if k not in fields]
        missing = [k for k in required if k not in row]
        if missing:
            hints = "".join(nearest(name, unknown) for name in missing)
            raise UserError(
                f"{where}: missing field {missing[0]!r}; found {sorted(row)}, required {list(required)}.{hints}"
            )
        if unknown:
            raise UserError(
                f"{where}: unknown field {unknown[0]!r}.{nearest(unknown[0], fields)} Put extra data under 'meta'."
            )
        try:
            values = dict(row)
            values["context"] = _read_context(row["context"])
            values["critiques"] = _read_critiques(row.get("critiques"))
            for name in ("source", "subset", "group"):
                if isinstance(row.get(name), Mapping | list):
                    raise UserError(f"field {name!r} must be a name, got {type(row[name]).__name__}")
                values[name] = "" if row.get(name) is None else str(row[name])
            if not isinstance(row.get("meta") or {}, Mapping):
                raise UserError(f"field 'meta' must be an object, got {type(row['meta']).__name__}")
            values["meta"] = dict(row.get("meta") or {})
            if _deep(values["meta"]):
                raise UserError(f"field 'meta' has brackets within brackets, more than {_DEEPEST} levels")
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _deep(value: Any, levels: int = _DEEPEST) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels == 0 or any(_deep(item, levels - 1) for item in items)


def _read_context(value: Any) -> list[Turn]:
    if isinstance(value, str):
        return [Turn("user", value)]
    if not isinstance(value, Sequence):
        raise UserError(f"field 'context' must be a list of {{role, content}} or a string, got {type(value).__name__}")
    turns = []
    for i, turn in enumerate(value):
        if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
            raise UserError(f"field 'context[{i}]' must be an object with 'role' and 'content'")
        if not isinstance(turn["role"], str) or not isinstance(turn["content"], str):
            raise UserError(f"field 'context[{i}]': 'role' and 'content' must be strings")
        turns.append(Turn(turn["role"], turn["content"]))
    return turns


def _read_critiques(value: Any) -> list[HumanCritique]:
    if value is None:
        return []
    if isinstance(value, str | Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise UserError(f"field 'critiques' must be a list, an object or a string, got {type(value).__name__}")
    names = [f.name for f in dataclasses.fields(HumanCritique)]
    critiques = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            critiques.append(HumanCritique(text=item))
            continue
        if not isinstance(item, Mapping):
            raise UserError(f"field 'critiques[{i}]' must be a string or an object, got {type(item).__name__}")
        unknown = [k for k in item if k not in names]
        if unknown:
            raise UserError(f"field 'critiques[{i}]': unknown field {unknown[0]!r}.{nearest(unknown[0], names)}")
        critiques.append(HumanCritique(**{k: v for k, v in item.items() if v is not None}))
    return critiques


def hide_critiques(pairs: Sequence[Pair], labelled_fraction: float, seed: int) -> list[Pair]:
    """Keep the human critiques of a seeded share of the pairs that have one; the others keep only their label.

    The share is exact (rounded to the nearest pair) and nested: with one seed, the pairs kept at 25 % are among those
    kept at 50 %.
    """
    if not 0.0 <= labelled_fraction <= 1.0:
        raise UserError(f"labelled_fraction must lie between 0 and 1, got {labelled_fraction}")
    labelled = [i for i, p in enumerate(pairs) if p.has_critique]
    random.Random(seed).shuffle(labelled)
    kept = set(labelled[: round(labelled_fraction * len(labelled))])
    return [p if i in kept else dataclasses.replace(p, critiques=[]) for i, p in enumerate(pairs)]


def swap_at_random(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """Exchange A and B of each pair with probability one half, by seed, so that no slot is the winner's."""
    rng = random.Random(seed)
    return [p.swap() if rng.random() < 0.5 else p for p in pairs]
