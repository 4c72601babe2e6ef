"""A user's own file as a **source**: JSON lines, JSON, CSV, TSV or parquet, in our schema or mapped onto it."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nlhf.errors import UserError, nearest
from nlhf.pairs import LABELS, HumanCritique, Pair
from nlhf.sources.rows import Row, local_file, read_rows

REQUIRED = ("context", "response_a", "response_b")
_PAIR_FIELDS = tuple(field.name for field in dataclasses.fields(Pair))
_CRITIQUE_FIELDS = tuple(field.name for field in dataclasses.fields(HumanCritique))


def load(
    path: str | None,
    split: str,
    drops: Counter,
    *,
    seed: int = 0,
    columns: dict[str, str] | None = None,
    label_map: dict[str, str | None] | None = None,
) -> Iterator[Pair]:
    """Read a local file.

    Args:
        path: The file, or a folder with a file named after the split.
        split: Only chooses the file in a folder.
        drops: Not used: a row that is not a pair is an error.
        seed: Not used: the order is the file's.
        columns: Which of your columns holds a field of ours: ``{"context": "prompt", "response_a": "chosen"}``. The
            fields of a critique (text, strengths_a, weaknesses_a, strengths_b, weaknesses_b, annotator) may be named
            too. Columns that are not named are passed over, except those that bear our names.
        label_map: What your labels mean: ``{"1": "A", "2": "B", "0": "tie"}``.

    Raises:
        UserError: the file is missing, empty or malformed, or a column or label is not known; names file, row
            and column.
    """
    if path is None:
        raise UserError("source 'jsonl' reads a local file: name it with --data.path FILE")
    # All rows first: whether a column is missing or only left out of some rows cannot be told from one row.
    yield from read_pairs(list(read_rows(local_file(path, split))), columns, label_map)


def read_pairs(
    rows: list[Row], columns: Mapping[str, str] | None = None, label_map: Mapping[str, str | None] | None = None
) -> Iterator[Pair]:
    """Rows of our schema, or mapped onto it, as pairs; a row without an id is called after its line.

    Args:
        rows: All rows, each with its place.
        columns: As of `load`.
        label_map: As of `load`.

    Raises:
        UserError: a column or label is not known, or a row is malformed; names file, row and column.
    """
    for name, value in (("columns", columns), ("label_map", label_map)):
        if value is not None and not isinstance(value, Mapping):
            raise UserError(f"option {name!r} must map names to names, as in {{a: b}}, got {value!r}")
    meaning = _checked_label_map(label_map)
    _check_columns(columns or {}, rows)
    for where, row in rows:
        try:
            yield _pair(row, where, columns or {}, meaning)
        except UserError as error:
            raise UserError(_with_column(str(error), columns or {})) from None


def _pair(
    row: Mapping[str, Any], where: str, columns: Mapping[str, str], meaning: Mapping[str, str | None] | None
) -> Pair:
    own = _mapped(row, columns) if columns else dict(row)
    if own.get("id") in (None, ""):
        own["id"] = f"row-{where.rsplit(':', 1)[1]}"
    elif isinstance(own["id"], int) and not isinstance(own["id"], bool):
        own["id"] = str(own["id"])
    own["label"] = _label(own.get("label"), meaning, where)
    own["strength"] = _strength(own.get("strength"))
    own.setdefault("source", "jsonl")
    if own.get("critiques") == "":
        own["critiques"] = None
    if own.get("meta"):  # a table may hold what JSON has no word for, such as a date
        own["meta"] = json.loads(json.dumps(own["meta"], default=str))
    return Pair.from_dict(own, where)


def _with_column(message: str, columns: Mapping[str, str]) -> str:
    """The message, with the user's own name of the first field that it blames."""
    blamed = re.search(r"field '(\w+)'", message)
    if blamed is None or blamed[1] not in columns:
        return message
    return f"{message[: blamed.end()]} (column {columns[blamed[1]]!r}){message[blamed.end() :]}"


def _check_columns(columns: Mapping[str, str], rows: list[Row]) -> None:
    known = (*_PAIR_FIELDS, *_CRITIQUE_FIELDS)
    found = list(dict.fromkeys(name for _, row in rows for name in row))
    for ours, theirs in columns.items():
        if ours not in known:
            raise UserError(f"option 'columns': no field {ours!r}; known: {list(known)}.{nearest(ours, known)}")
        if theirs not in found:
            raise UserError(
                f"{rows[0][0]}: missing column {theirs!r} (for field {ours!r}); found {found}.{nearest(theirs, found)}"
            )
    missing = [name for name in REQUIRED if name not in columns and name not in found]
    if missing:
        raise UserError(
            f"{rows[0][0]}: no column for field {missing[0]!r}; found {found}, required {list(REQUIRED)}."
            f"{nearest(missing[0], found)} {_way_out(found)}"
        )


def _way_out(found: list[str]) -> str:
    if len(found) == 1 and any(mark in found[0] for mark in ";\t|"):
        return "The header is one single column: separate columns by commas in a .csv, by tabs in a .tsv."
    return "Name the column in the option 'columns', as in {context: prompt}."


def _mapped(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    taken = set(columns.values())
    own = {name: row[name] for name in _PAIR_FIELDS if name in row and name not in taken}
    own |= {ours: row[theirs] for ours, theirs in columns.items() if ours in _PAIR_FIELDS and theirs in row}
    critique = {ours: _lines(row.get(columns[ours])) for ours in _CRITIQUE_FIELDS if ours in columns}
    if any(critique.values()):
        critiques = own.get("critiques") or []
        own["critiques"] = [*([critiques] if isinstance(critiques, str | Mapping) else critiques), critique]
    return own


def _lines(value: Any) -> Any:
    """A list of texts becomes one argument a line."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return value


def _strength(value: Any) -> Any:
    """A whole number where CSV has text and tables with gaps have fractions (-2.0); the schema refuses the rest."""
    if isinstance(value, str):
        whole = re.fullmatch(r"\s*([+-]?\d{1,9})(?:\.0*)?\s*", value)  # int() refuses thousands of digits
        return int(whole[1]) if whole else value.strip() or None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _label(value: Any, meaning: Mapping[str, str | None] | None, where: str) -> Any:
    if value is None or (value == "" and "" not in (meaning or {})):
        return None
    if meaning is None:
        if value not in LABELS:
            raise UserError(
                f"{where}: field 'label' must be 'A', 'B', 'tie' or null, got {value!r}; "
                "say what your labels mean with the option 'label_map', for example {'1': 'A', '2': 'B'}"
            )
        return value
    if _name(value) not in meaning:
        hint = nearest(_name(value), meaning)
        raise UserError(f"{where}: label {value!r} is not in 'label_map'; known: {list(meaning)}.{hint}")
    return meaning[_name(value)]


def _checked_label_map(label_map: Mapping[Any, str | None] | None) -> dict[str, str | None] | None:
    if label_map is None:
        return None
    for theirs, ours in label_map.items():
        if ours is not None and ours not in LABELS:
            raise UserError(f"option 'label_map': {theirs!r} must mean 'A', 'B', 'tie' or null, got {ours!r}")
    return {_name(theirs): ours for theirs, ours in label_map.items()}


def _name(value: Any) -> str:
    """One spelling for 1 and "1", true and "true": YAML, JSON and CSV type them differently."""
    return str(value).lower() if isinstance(value, bool) else str(value)
