"""Writing files so that nothing is ever half-written; reading JSON lines so that errors name file and row."""

import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError


def to_json(value: Any, **options: Any) -> str:
    """JSON text: other scripts stay readable, and NaN and infinity become null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8", "surrogatepass"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write beside the target and rename, so that readers see the old file or the new one, never a part."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk, or a folder where the file should be
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write one JSON document, indented."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON document.

    Raises:
        UserError: it cannot be read.
    """
    try:
        value = json.loads(Path(path).read_bytes().decode("utf-8", "surrogatepass"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object with named fields, got {type(value).__name__}")
    return value


def check_fields(row: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    """Make sure that a file of ours still has what we wrote: a field edited by hand would else fail far from here.

    Args:
        row: Named fields.
        fields: What a field (dotted for nested ones) must be: a class, a Literal or a union of them; lists and tuples
            are one.
        where: File and row.

    Raises:
        UserError: a field is missing where null is not allowed, or is of another type.
    """
    for name, kind in fields.items():
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if not _fits(value, kind):
            wanted = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
            raise UserError(f"{where}: field {name!r} must be {wanted}, got {value!r}; was the file edited?")


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(_fits(item, parts[0]) for item in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def write_jsonl(path: str | Path, rows: Iterable[Any]) -> None:
    """Write one JSON document a line."""
    write_text(path, "".join(to_json(row) + "\n" for row in rows))


def append_jsonl(path: str | Path, row: Any) -> None:
    """Append one JSON document as a line; a torn last line (a killed writer) is closed first.

    The line is one write to a file opened for appending, so that several processes may share the file.
    """
    path = Path(path)
    line = (to_json(row) + "\n").encode("utf-8", "surrogatepass")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(handle, line) != len(line):
                raise UserError(f"cannot write {path}: the disk is full (the last line is torn)")
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def check_appendable(path: str | Path) -> None:
    """Make sure, without writing, that `append_jsonl` will be able to write here.

    Raises:
        UserError: the path is a folder, lies under a file, or may not be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        if existing != path and not existing.is_dir():
            raise UserError(f"cannot write {path}: {existing} is a file")
        if not os.access(existing, os.W_OK):
            raise UserError(f"cannot write {path}: no permission to write {existing}")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def read_jsonl(path: str | Path, skip_torn: bool = False) -> Iterator[tuple[int, Any]]:
    """The documents of a JSON-lines file with their line numbers, from 1; blank lines are passed over.

    Args:
        path: The file.
        skip_torn: Pass over lines that are not JSON (for logs whose writer may have been killed).

    Raises:
        UserError: the file cannot be read, or a line is not JSON.
    """
    try:
        with Path(path).open("rb") as file:  # decoded line by line: a torn line may end within a character
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, json.loads(line.decode("utf-8-sig", "surrogatepass"))
                except json.JSONDecodeError as error:
                    if not skip_torn:
                        where = f"{error.msg} at column {error.colno}"
                        raise UserError(f"{path}:{number}: not valid JSON ({where})") from None
                except UnicodeDecodeError as error:
                    if not skip_torn:
                        where = f"{error.reason} at byte {error.start}"
                        raise UserError(f"{path}:{number}: not UTF-8 text ({where}); convert it") from None
                except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in brackets
                    if not skip_torn:
                        raise UserError(f"{path}:{number}: JSON that cannot be read ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
