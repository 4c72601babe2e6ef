"""RewardBench as a **source**: a chosen and a rejected answer, in 23 subsets of four sections.

Lambert et al., 2024, "RewardBench: Evaluating Reward Models for Language Modeling" (arXiv 2403.13787; the data set
allenai/reward-bench, split "filtered", ODC-BY).
"""

from collections import Counter
from collections.abc import Iterator

from nlhf.errors import UserError, nearest
from nlhf.pairs import Pair
from nlhf.sources.rows import Row, check_split, local_or_hub_rows, placed, require

REPOSITORY = "allenai/reward-bench"
# How much each subset weighs in its section: its number of rows, but for math-prm, whose 447 rows weigh as much as all
# code together.
SECTIONS = {
    "Chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984,
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
_SUBSETS = tuple(name for subsets in SECTIONS.values() for name in subsets)


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read all subsets; the chosen answer is placed as A or B by seed.

    Args:
        path: A file, or a folder with a file ``filtered``; None fetches the hub's data set.
        split: test, which upstream calls "filtered".
        drops: Not used: every row makes a pair.
        seed: Seed of the placement.

    Raises:
        UserError: the hub cannot be reached, or a row is malformed.
    """
    check_split(split, ("test",), "rewardbench")
    yield from placed(map(_pair, local_or_hub_rows(path, "filtered", REPOSITORY)), seed)


def _pair(place: Row) -> Pair:
    where, row = place
    require(row, ("prompt", "chosen", "rejected", "subset", "id"), where)
    subset = row["subset"]
    if subset not in _SUBSETS:
        raise UserError(
            f"{where}: field 'subset' {subset!r} is in no section of RewardBench.{nearest(subset, _SUBSETS)}"
        )
    pair = {
        "id": f"rewardbench-{subset}-{row['id']}",
        "context": row["prompt"],
        "response_a": row["chosen"],
        "response_b": row["rejected"],
        "label": "A",
        "source": "rewardbench",
        "subset": subset,
        "meta": {name: row.get(name) for name in ("chosen_model", "rejected_model")},
    }
    return Pair.from_dict(pair, where)
