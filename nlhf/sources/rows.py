"""What the **sources** read: rows of a local file or of a data set on the hub, each with its place for error messages.

A row is a dict; its place is ``file:row`` (for JSON lines and CSV the line on which the row begins).
"""

import csv
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nlhf.errors import UserError, nearest
from nlhf.files import from_json, read_jsonl
from nlhf.pairs import Pair

Row = tuple[str, dict[str, Any]]
REWRITTEN = "rewritten"
"""Key of a pair's ``meta`` that says what of its row was changed; the manifest counts these like rows left out."""


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a JSON, JSON-lines, CSV, TSV or parquet file, each with its place.

    Raises:
        UserError: the file is missing, empty, of another kind or malformed.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _READERS:
        advice = " Unpack it first." if kind in (".gz", ".zip", ".xz", ".zst") else ""
        raise UserError(f"{path}: cannot tell the kind of file from its name; known: {', '.join(_READERS)}.{advice}")
    count = 0
    for count, (number, row) in enumerate(_READERS[kind](path), start=1):  # noqa: B007 - used after the loop
        if not isinstance(row, Mapping):
            raise UserError(f"{path}:{number}: a row must be an object with named fields, got {type(row).__name__}")
        yield f"{path}:{number}", dict(row)
    if count == 0:
        raise UserError(f"{path}: the file holds no rows")


def local_file(path: str | Path, split: str) -> Path:
    """The file itself, or in a folder the file named after the split (``train.jsonl``, ``validation.parquet``)."""
    path = Path(path)
    if path.is_dir():
        names = [f"{split}{suffix}" for suffix in _READERS]
        return next_existing(path, names, f"split {split!r}")
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    return path


def next_existing(folder: Path, names: Sequence[str], what: str) -> Path:
    """The first of ``names`` that exists in ``folder``."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise UserError(f"{folder}: no file or folder for {what}; expected {' or '.join(names)}")


def local_or_hub_rows(path: str | None, split: str, repository: str, configuration: str | None = None) -> Iterator[Row]:
    """Rows of a local copy when there is a path, else of the hub's data set ``repository``."""
    if path is not None:
        return read_rows(local_file(path, split))
    return _hub_rows(repository, split, configuration)


def require(row: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise `UserError` with what was found and the nearest name unless ``row`` has every field in ``names``."""
    missing = [name for name in names if name not in row]
    if missing:
        hints = "".join(nearest(name, row) for name in missing[:1])
        raise UserError(f"{where}: missing field {missing[0]!r}; found {list(row)}, expected {list(names)}.{hints}")


def check_split(split: str, known: Sequence[str], source: str) -> None:
    """Raise `UserError` unless the source has this split."""
    if split not in known:
        raise UserError(f"source {source!r} has no split {split!r}; known: {', '.join(known)}.{nearest(split, known)}")


def placed(pairs: Iterable[Pair], seed: int) -> Iterator[Pair]:
    """Exchange A and B by a coin of each pair's own, for data sets that always name the better response first.

    The coin hangs on the seed and the pair's id, and on nothing that `nlhf.pairs.swap_at_random` draws: training
    exchanges once more, often with the same seed, and two equal rows of coins would undo each other.
    """
    for pair in pairs:
        yield pair.swap() if random.Random(f"placement {seed} {pair.id}").random() < 0.5 else pair


def csv_records(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """The records of a CSV or TSV file with the line on which each begins; blank lines are passed over.

    Raises:
        UserError: the file cannot be read, or a quote is opened and never closed.
    """
    csv.field_size_limit(2**31 - 1)  # the library's own limit of 131,072 characters is below a long response
    delimiter = "\t" if Path(path).suffix.lower() == ".tsv" else ","
    first = 1
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            for record in reader:
                if record:
                    yield first, record
                first = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{first}: not valid CSV ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8") from None


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    records = csv_records(path)
    _, header = next(records, (0, []))
    _check_repeated(header, f"{path}:1")
    for number, record in records:
        if len(record) != len(header):
            raise UserError(f"{path}:{number}: expected {len(header)} columns {header}, got {len(record)}")
        yield number, dict(zip(header, record, strict=True))


def _check_repeated(columns: Sequence[str], where: str) -> None:
    repeated = [name for name in columns if columns.count(name) > 1]
    if repeated:
        raise UserError(f"{where}: column {repeated[0]!r} occurs more than once")


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """A JSON list of rows; data sets also name JSON-lines files ``.json``."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8") from None
    if not text.lstrip().startswith("["):
        if re.match(r"\s*\{\s*\n", text):
            raise UserError(
                f"{path}: one JSON object over several lines; expected a list of rows, [{{...}}, {{...}}], or a row on "
                "each line"
            )
        yield from read_jsonl(path)
        return
    try:
        yield from enumerate(from_json(text), start=1)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        raise UserError(f"{path}: JSON that cannot be read ({error})") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_repeated(file.schema_arrow.names, str(path))
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}") from None


_READERS = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


def _hub_rows(repository: str, split: str, configuration: str | None) -> Iterator[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(repository, configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"cannot fetch split {split!r} of {repository} from the hub ({reason}); "
            f"read a local copy instead: --data.path FILE_OR_FOLDER"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{repository} [{split}]:{number}", row
