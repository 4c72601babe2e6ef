"""Rollouts of a judge as `selfdistill.measure` found them, and the files that hold them: beside the **trainer**.

Reading them needs no model and no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlhf.errors import UserError
from nlhf.files import read_jsonl, write_jsonl
from nlhf.pairs import Pair
from nlhf.verdict import Verdict
from selfdistill.profile import Profile, profile_of

JUDGEMENTS_FILE, POSITIONS_FILE = "judgements.jsonl", "positions.jsonl"


@dataclass(frozen=True)
class Judged:
    """One rollout of a judge, with what student and teacher make of each of its N positions.

    Attributes:
        pair: The pair as it was shown.
        sample: Index among the pair's rollouts.
        feedback: z as the teacher read it.
        verdict: What the judge said.
        ids: The tokens sampled ``[N]``, with the one that ends the turn if there is one.
        tokens: The text that each of them adds.
        kl: Divergence of student and teacher ``[N]``, nats, of the objective.
        student_entropy: H_S ``[N]``, nats.
        teacher_entropy: H_T ``[N]``.
        kept: Whether the position would be trained on, bool ``[N]``.
    """

    pair: Pair
    sample: int
    feedback: str
    verdict: Verdict
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    kl: np.ndarray
    student_entropy: np.ndarray
    teacher_entropy: np.ndarray
    kept: np.ndarray

    @property
    def dh(self) -> np.ndarray:
        """The entropy gap H_S - H_T ``[N]``."""
        return self.student_entropy - self.teacher_entropy


def summarize(judged: Sequence[Judged]) -> Profile:
    """The profile of rollouts that were measured; see `selfdistill.profile.profile_of`.

    Raises:
        UserError: a value is not a number.
    """
    kl, dh, kept = (np.concatenate([getattr(j, name) for j in judged]) for name in ("kl", "dh", "kept"))
    return profile_of(kl, dh, kept=kept, lengths=[len(j.ids) for j in judged])


def write_judged(folder: Path, judged: Sequence[Judged]) -> None:
    """Write judgements.jsonl, a line for each rollout, and positions.jsonl, a line for each position."""
    write_jsonl(folder / JUDGEMENTS_FILE, (_judgement_row(i, j) for i, j in enumerate(judged)))
    write_jsonl(folder / POSITIONS_FILE, (row for i, j in enumerate(judged) for row in _position_rows(i, j)))


def _judgement_row(number: int, j: Judged) -> dict[str, Any]:
    return {
        "judgement": number,
        "pair_id": j.pair.id,
        "sample": j.sample,
        "label": j.pair.label,
        "verdict": j.verdict.label,
        "truncated": j.verdict.truncated,
        "positions": len(j.ids),
        "feedback": j.feedback,
        "critique": j.verdict.critique,
        "reply": j.verdict.raw,
        "pair": j.pair.to_dict(),
    }


def _position_rows(number: int, j: Judged) -> Iterable[dict[str, Any]]:
    for i, dh in enumerate(j.dh):
        yield {
            "judgement": number,
            "position": i,
            "id": j.ids[i],
            "token": j.tokens[i],
            "kl": float(j.kl[i]),
            "h_s": float(j.student_entropy[i]),
            "h_t": float(j.teacher_entropy[i]),
            "dh": float(dh),
            "kept": bool(j.kept[i]),
        }


def read_judged(folder: str | Path) -> list[Judged]:
    """What `write_judged` wrote.

    Raises:
        UserError: a file is missing or not whole.
    """
    folder = Path(folder)
    positions: dict[int, list[dict[str, Any]]] = {}
    for _, row in read_jsonl(folder / POSITIONS_FILE):
        positions.setdefault(row["judgement"], []).append(row)
    judged = []
    for number, row in read_jsonl(folder / JUDGEMENTS_FILE):
        where = f"{folder / JUDGEMENTS_FILE}:{number}"
        own = positions.get(row["judgement"], [])
        if len(own) != row["positions"]:
            raise UserError(f"{where}: {row['positions']} positions expected, {POSITIONS_FILE} has {len(own)}")
        verdict = Verdict(row["verdict"], critique=row["critique"], raw=row["reply"], truncated=row["truncated"])
        columns = {name: [p[name] for p in own] for name in ("id", "token", "kl", "h_s", "h_t", "kept")}
        judged.append(
            Judged(
                pair=Pair.from_dict(row["pair"], where),
                sample=row["sample"],
                feedback=row["feedback"],
                verdict=verdict,
                ids=tuple(columns["id"]),
                tokens=tuple(columns["token"]),
                **{
                    name: np.array(columns[column], dtype=float)
                    for name, column in (("kl", "kl"), ("student_entropy", "h_s"), ("teacher_entropy", "h_t"))
                },
                kept=np.array(columns["kept"], dtype=bool),
            )
        )
    return judged
