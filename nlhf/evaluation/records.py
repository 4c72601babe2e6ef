"""One judgement with all that the figures and the report need: one line of ``judgements.jsonl``.

Station of the path: Verdict -> **Record** -> metrics -> report. All figures are derived from these lines, and each
keeps the whole reply, with a hash of what was asked and one of what was answered.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from nlhf.critique.arguments import Argument
from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.files import check_fields
from nlhf.judge import Judgement, Order
from nlhf.pairs import Label, Pair, other_label
from nlhf.verdict import Verdict

_DERIVED = ("winner", "reply_hash")  # written for whoever reads the file


@dataclass(frozen=True)
class Record:
    """One judgement beside what humans said of its pair.

    Attributes:
        pair_id: The pair.
        cluster: What resampling keeps together, `Pair.cluster`.
        subset: Part of the data set.
        order: ``"AB"`` as in the data, ``"BA"`` with the responses exchanged.
        sample: Index of the vote, from 0.
        label: The humans' label in the data's order; None when nobody said.
        verdict: The judge's label in the order shown; None when none could be read.
        critique: What the judge wrote as its reasons.
        match: Its agreement with the human critique, in the order shown; None when it was not scored.
        reply: The whole reply.
        tokens: Its length in tokens.
        truncated: The token limit cut it off.
        prompt_hash: SHA-256 of the rendered messages, first 16 digits.
        length_a: Characters of response A in the data's order.
        length_b: Characters of response B in the data's order.
        strength: How much better, in the order shown, negative for the first; None where the format does not say.
        scores: The scores of the responses in the order shown, where the format gives them.
        probability: That the response shown first is better; this and the next two as of `nlhf.judge.Judgement`.
        tie_probability: That it is a tie.
        mass: Of all verdicts, at the place of the forced one.
    """

    pair_id: str
    cluster: str
    subset: str
    order: Order
    sample: int
    label: Label | None
    verdict: Label | None
    critique: str | None = None
    match: CritiqueMatch | None = None
    reply: str = ""
    tokens: int = 0
    truncated: bool = False
    prompt_hash: str = ""
    length_a: int = 0
    length_b: int = 0
    strength: float | None = None
    scores: tuple[float, ...] | None = None
    probability: float | None = None
    tie_probability: float | None = None
    mass: float | None = None

    @classmethod
    def of(cls, judgement: Judgement, pair: Pair, match: CritiqueMatch | None = None) -> "Record":
        """The record of a judgement on ``pair`` (in the data's order)."""
        verdict = judgement.verdict
        return cls(
            pair_id=pair.id,
            cluster=pair.cluster,
            subset=pair.subset,
            order=judgement.order,
            sample=judgement.sample,
            label=pair.label,
            verdict=verdict.label,
            critique=verdict.critique,
            match=match,
            reply=verdict.raw,
            tokens=judgement.tokens,
            truncated=verdict.truncated,
            prompt_hash=judgement.prompt_hash,
            length_a=len(pair.response_a),
            length_b=len(pair.response_b),
            strength=verdict.strength,
            scores=verdict.scores,
            probability=judgement.probability,
            tie_probability=judgement.tie_probability,
            mass=judgement.mass,
        )

    @property
    def judgement(self) -> Judgement:
        """The judgement that this is the record of."""
        verdict = Verdict(self.verdict, self.strength, self.scores, self.critique, self.reply, self.truncated)
        probabilities = self.probability, self.tie_probability, self.mass
        return Judgement(self.pair_id, self.order, self.sample, verdict, self.prompt_hash, self.tokens, *probabilities)

    @property
    def key(self) -> tuple[str, Order, int]:
        """What makes a judgement one of its kind: pair, order and sample."""
        return self.pair_id, self.order, self.sample

    @property
    def winner(self) -> Label | None:
        """The verdict in the data's order."""
        return self.verdict if self.order == "AB" else other_label(self.verdict)

    @property
    def better_slot(self) -> Label | None:
        """Where the better response stood when the judge read the pair."""
        return self.label if self.order == "AB" else other_label(self.label)

    @property
    def correct(self) -> bool:
        """The verdict is the humans' label."""
        return self.verdict is not None and self.winner == self.label

    @property
    def scored(self) -> CritiqueMatch | None:
        """The score of the critique where it counts: a verdict was read and the scorer did not fail."""
        return self.match if self.verdict is not None and self.match and not self.match.failure else None

    @property
    def reply_hash(self) -> str:
        """SHA-256 of the reply, first 16 digits."""
        return reply_hash(self.reply)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, with the winner in the data's order and the hash of the reply."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        row["match"] = None if self.match is None else dataclasses.asdict(self.match)
        return row | {name: getattr(self, name) for name in _DERIVED}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any], where: str = "record") -> "Record":
        """Read what `to_dict` wrote.

        Raises:
            UserError: fields are missing or unknown, or the reply was changed since; the message begins with ``where``.
        """
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: not a judgement but a {type(row).__name__}")
        values = {k: v for k, v in row.items() if k not in _DERIVED}
        try:
            values["match"] = _read_match(values.get("match"), where)
            values["scores"] = None if values.get("scores") is None else tuple(values["scores"])
            record = cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"{where}: not a judgement written by this version ({error})") from None
        check_fields(values, _TYPES, where)
        if row.get("reply_hash", record.reply_hash) != record.reply_hash:
            raise UserError(
                f"{where}: the reply does not fit its reply_hash, so the line was changed after it was written; "
                "remove the line and evaluate once more with --resume true"
            )
        return record


_TYPES = get_type_hints(Record)


def reply_hash(text: str) -> str:
    """SHA-256 of a reply, first 16 digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _read_match(row: Mapping[str, Any] | None, where: str) -> CritiqueMatch | None:
    if row is None:
        return None
    check_fields(row, {"precision": float, "recall": float, "f1": float, "failure": str | None}, f"{where}: match")
    values = dict(row)
    values["matched"] = tuple((i, j) for i, j in row["matched"])
    for name in ("generated", "reference"):
        values[name] = tuple(Argument(**argument) for argument in row[name])
    return CritiqueMatch(**values)
