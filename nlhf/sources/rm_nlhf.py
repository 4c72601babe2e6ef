"""RM-NLHF's own data as a **source**: preferences of which some carry a human critique in four fields.

arXiv 2601.07349 (Tongyi-ConvAI/RM-NLHF on the hub). Whether a pair is labelled is a property of its row: a pair has a
critique or it has none, whatever ``dataset_type`` says.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from nlhf.errors import UserError, nearest
from nlhf.pairs import LABELS, Pair
from nlhf.sources.rows import local_or_hub_rows, require

REPOSITORY = "Tongyi-ConvAI/RM-NLHF"
_FIELDS = ("context", "response_A", "response_B", "winner")
_CRITIQUE_FIELDS = {
    "strengths_A": "strengths_a",
    "weaknesses_A": "weaknesses_a",
    "strengths_B": "strengths_b",
    "weaknesses_B": "weaknesses_b",
}


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read one split; A and B are in the order of the file.

    Args:
        path: A local file, or a folder with a file named after the split; None fetches the hub's data set.
        split: Name of the split.
        drops: Counts rows without a winner and rows whose critique cannot be read.
        seed: Not used: placement of A and B is for the trainer and the evaluation to exchange.

    Raises:
        UserError: the hub cannot be reached, or a row is malformed.
    """
    for number, (where, row) in enumerate(local_or_hub_rows(path, split, REPOSITORY), start=1):
        info = _decoded(row.get("extra_info", row), f"{where}: field 'extra_info'")
        require(info, _FIELDS, f"{where}: field 'extra_info'")
        if info["winner"] is None:
            drops["no winner"] += 1
            continue
        if info["winner"] not in LABELS:
            raise UserError(f"{where}: field 'winner' must be 'A', 'B' or 'tie', got {info['winner']!r}")
        try:
            critiques = _critiques(info.get("processed_critique"), where)
        except _Unreadable:
            drops["unreadable critique"] += 1
            continue
        own = {
            "id": f"rm_nlhf-{split}-{number}",
            "context": _context(info["context"]),
            "response_a": info["response_A"],
            "response_b": info["response_B"],
            "label": info["winner"],
            "critiques": critiques,
            "source": "rm_nlhf",
            "subset": info.get("dataset_type"),
        }
        yield Pair.from_dict(own, where)


class _Unreadable(Exception):
    """A critique that is neither an object of texts nor JSON of one."""


def _decoded(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is text but not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} must be an object or JSON of one, got {type(value).__name__}")
    return value


def _context(value: Any) -> Any:
    """The turns; they may be JSON inside JSON. Other text is a prompt."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _critiques(value: Any, where: str) -> list[dict[str, str]]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise _Unreadable from None
    if not value:
        return []
    if not isinstance(value, dict):
        raise _Unreadable
    if not set(value) & set(_CRITIQUE_FIELDS):
        found, expected = list(value), list(_CRITIQUE_FIELDS)
        raise UserError(
            f"{where}: field 'processed_critique' has none of {expected}; found {found}.{nearest(expected[0], found)}"
        )
    critique = {ours: _lines(value.get(theirs)) for theirs, ours in _CRITIQUE_FIELDS.items()}
    return [critique] if any(critique.values()) else []


def _lines(value: Any) -> str:
    """One argument a line, from a text or a list of texts."""
    items = value if isinstance(value, list) else [value or ""]
    if not all(isinstance(item, str) for item in items):
        raise _Unreadable
    return "\n".join(item.strip() for item in items if item.strip())
