"""RewardBench 2 as a **source**: one correct answer against each of the others, three pairs a row.

Malik et al., 2025, "RewardBench 2: Advancing Reward Model Evaluation" (allenai/reward-bench-2 on the hub, ODC-BY). The
Ties subset has several correct answers and asks for ratings of single answers, so it is read only on demand, as pairs
for a judge that rates one response at a time; see `nlhf.evaluation.benchmark_rules.ties_score`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import check_split, local_or_hub_rows, placed, require

REPOSITORY = "allenai/reward-bench-2"
RATED = "rated"
"""Key of a pair's ``meta`` where only ratings of its single answers mean anything: the row's id, the places of the
pair's correct and incorrect answer, and how many of both the row has."""


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0, ties: bool = False) -> Iterator[Pair]:
    """Read all subsets but Ties; the correct answer is placed as A or B by seed, for each pair.

    The pairs of a row are one group; ``meta["pairs_in_row"]`` says how many there are.

    Args:
        path: A file, or a folder with a file ``test``; None fetches the hub's data set.
        split: test.
        drops: Counts the rows of the Ties subset, unless they are read.
        seed: Seed of the placement.
        ties: Read the Ties subset too. Every answer of a row is in one pair or more, a correct one against an
            incorrect one, and ``meta`` says under `RATED` which.

    Raises:
        UserError: the hub cannot be reached, or a row is malformed.
    """
    check_split(split, ("test",), "rewardbench2")
    yield from placed(_chosen_first(path, split, drops, ties), seed)


def _chosen_first(path: str | None, split: str, drops: Counter, ties: bool) -> Iterator[Pair]:
    for where, row in local_or_hub_rows(path, split, REPOSITORY):
        require(row, ("id", "prompt", "chosen", "rejected", "subset"), where)
        for name in ("chosen", "rejected"):
            if not isinstance(row[name], list) or not row[name]:
                raise UserError(f"{where}: field {name!r} must be a list of answers, got {row[name]!r:.60}")
        if row["subset"] != "Ties":
            yield from _pairs(row, where)
        elif ties:
            yield from _rated_pairs(row, where)
        else:
            drops["Ties subset: needs ratings, has no pairs"] += 1


def _pairs(row: dict[str, Any], where: str) -> Iterator[Pair]:
    if len(row["chosen"]) != 1:
        raise UserError(
            f"{where}: field 'chosen' must hold one answer outside the Ties subset, got {len(row['chosen'])}"
        )
    group = f"rewardbench2-{row['subset']}-{row['id']}"
    for number, rejected in enumerate(row["rejected"], start=1):
        pair = {
            "id": f"{group}-{number}",
            "context": row["prompt"],
            "response_a": row["chosen"][0],
            "response_b": rejected,
            "label": "A",
            "source": "rewardbench2",
            "subset": row["subset"],
            "group": group,
            "meta": {"pairs_in_row": len(row["rejected"])},
        }
        yield Pair.from_dict(pair, where)


def _rated_pairs(row: dict[str, Any], where: str) -> Iterator[Pair]:
    """Pairs that hold every answer; of correct and incorrect answers, the fewer are repeated."""
    kind, _, number = str(row["id"]).partition(":")
    counts = len(row["chosen"]), len(row["rejected"])
    if kind not in ("ref", "tied") or not number or counts[0] < 1 + (kind == "tied"):
        raise UserError(
            f"{where}: a row of the Ties subset has the id 'ref:N', or 'tied:N' and several correct answers; got "
            f"{row['id']!r} with {counts[0]}"
        )
    for i in range(max(counts)):
        places = i % counts[0], i % counts[1]
        pair = {
            "id": f"rewardbench2-Ties-{row['id']}-{i + 1}",
            "context": row["prompt"],
            "response_a": row["chosen"][places[0]],
            "response_b": row["rejected"][places[1]],
            "label": "A",
            "source": "rewardbench2",
            "subset": "Ties",
            "group": f"rewardbench2-Ties-{number}",  # a ref and a tied prompt are scored together
            "meta": {RATED: {"prompt": row["id"], "answers": places, "counts": counts}},
        }
        yield Pair.from_dict(pair, where)
