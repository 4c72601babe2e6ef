"""Tulu 3 persona preferences as a **source**: instruction-following pairs with labels and no human critique.

Lambert et al., 2024 (allenai/tulu-3-pref-personas-instruction-following on the hub). In RM-NLHF these are the pairs
whose reward MetaRM predicts.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import local_or_hub_rows, placed, require

REPOSITORY = "allenai/tulu-3-pref-personas-instruction-following"


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read one split; chosen and rejected are placed as A or B by seed.

    Args:
        path: A local file, or a folder with a file named after the split; None fetches the hub's data set.
        split: Name of the split; the hub has train alone.
        drops: Counts rows whose two conversations are not answers to one prompt.
        seed: Seed of the placement.

    Raises:
        UserError: the hub cannot be reached, or a row is malformed.
    """
    yield from placed(_chosen_first(path, split, drops), seed)


def _chosen_first(path: str | None, split: str, drops: Counter) -> Iterator[Pair]:
    for number, (where, row) in enumerate(local_or_hub_rows(path, split, REPOSITORY), start=1):
        require(row, ("chosen", "rejected"), where)
        context, chosen = _conversation(row["chosen"], f"{where}: field 'chosen'")
        other_context, rejected = _conversation(row["rejected"], f"{where}: field 'rejected'")
        if context != other_context:
            drops["chosen and rejected answer different prompts"] += 1
            continue
        own = {
            "id": f"tulu3_pref-{split}-{number}",
            "context": context,
            "response_a": chosen,
            "response_b": rejected,
            "label": "A",
            "source": "tulu3_pref",
        }
        yield Pair.from_dict(own, where)


def _conversation(turns: Any, where: str) -> tuple[list[dict[str, str]], str]:
    """The turns before the last, and the text of the last, which must be the assistant's."""
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where} must be a list of at least two {{role, content}} turns")
    if turns[-1].get("role") != "assistant":
        raise UserError(f"{where} must end with an assistant turn, ends with {turns[-1].get('role')!r}")
    return turns[:-1], turns[-1].get("content")
