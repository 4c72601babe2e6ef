"""RewardBench 2 as a **source**: one correct answer against each of the others, three pairs a row.

Malik et al., 2025, "RewardBench 2: Advancing Reward Model Evaluation" (allenai/reward-bench-2 on the hub, ODC-BY). The
Ties subset asks for ratings of single answers and has no pairs; see `nlhf.benchmark_rules.ties_score`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import check_split, local_or_hub_rows, placed, require

REPOSITORY = "allenai/reward-bench-2"


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read all subsets but Ties; the correct answer is placed as A or B by seed, for each pair.

    The pairs of a row are one group; ``meta["pairs_in_row"]`` says how many there are.

    Args:
        path: A file, or a folder with a file ``test``; None fetches the hub's data set.
        split: test.
        drops: Counts the rows of the Ties subset.
        seed: Seed of the placement.

    Raises:
        UserError: the hub cannot be reached, or a row is malformed.
    """
    check_split(split, ("test",), "rewardbench2")
    yield from placed(_chosen_first(path, split, drops), seed)


def _chosen_first(path: str | None, split: str, drops: Counter) -> Iterator[Pair]:
    for where, row in local_or_hub_rows(path, split, REPOSITORY):
        require(row, ("id", "prompt", "chosen", "rejected", "subset"), where)
        if row["subset"] == "Ties":
            drops["Ties subset: needs ratings, has no pairs"] += 1
            continue
        yield from _pairs(row, where)


def _pairs(row: dict[str, Any], where: str) -> Iterator[Pair]:
    for name in ("chosen", "rejected"):
        if not isinstance(row[name], list) or not row[name]:
            raise UserError(f"{where}: field {name!r} must be a list of answers, got {row[name]!r:.60}")
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
