"""Writing files so that nothing is ever half-written; reading JSON and YAML so that errors name file and row."""

import json
import math
import os
import tempfile
import types
import typing
from codecs import BOM_UTF8
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
    """Write beside the target and rename, so that readers see the old file or the new one, never a part.

    What is no file, such as a pipe or /dev/null, is written to as it is: a rename would put a file in its place.
    """
    path = Path(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(data)
            return
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


def from_json(text: str) -> Any:
    """The inverse of `to_json`.

    Raises:
        RepeatedFieldError: an object has a field twice.
        ValueError: it is not JSON, or not to be read by Python.
        RecursionError: brackets within brackets.
    """
    return _decode(text)


def _once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose fields each come once: of two values one would be dropped, and no one would know which."""
    found = dict(fields)
    if len(found) < len(fields):
        names = [name for name, _ in fields]
        raise RepeatedFieldError(f"field {next(n for n in names if names.count(n) > 1)!r} comes twice; leave one out")
    return found


class RepeatedFieldError(ValueError):
    """An object has two fields of one name."""


_decode = json.JSONDecoder(object_pairs_hook=_once).decode


def write_json(path: str | Path, value: Any) -> None:
    """Write one JSON document, indented."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON document.

    Raises:
        UserError: it cannot be read.
    """
    try:
        value = from_json(Path(path).read_bytes().decode("utf-8", "surrogatepass"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object with named fields, got {type(value).__name__}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of named values as a dict; an empty file has none.

    Raises:
        UserError: it cannot be read, is no YAML of named values, or names one twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        check_yaml(text)
        values = yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"{path}: a value within itself, or far too many brackets within brackets") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, yaml.YAMLError) as error:  # a number of thousands of digits, the 40th of May
        reason = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise UserError(f"{path}: {reason}") from None
    if not isinstance(values, dict | None):
        raise UserError(f"{path}: a configuration holds options with values, got a {type(values).__name__}")
    return values or {}


def check_yaml(text: str) -> None:
    """Make sure that no mapping of a YAML document has a key twice: PyYAML would take the last, and say nothing.

    Raises:
        yaml.YAMLError: one has; or the text is no YAML.
    """
    import yaml

    seen: set[int] = set()
    left = [yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
    while left:
        node = left.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if not isinstance(node, yaml.MappingNode):
            left += node.value
            continue
        keys = set()
        for key, value in node.value:
            left.append(value)
            # A merge (<<) may come twice, and what it brings may be set again.
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in keys:
                    problem = f"{key.value!r} comes twice; leave one out"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add((key.tag, key.value))


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
        if not fits(value, kind):
            raise UserError(f"{where}: field {name!r} must be {in_words(kind)}, got {value!r}; was the file edited?")


def in_words(kind: Any) -> str:
    """A type as an error message shows it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value read from a file is of a type: a class, a Literal, a list or dict, or a union of them."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin in (tuple, list):
        return isinstance(value, list | tuple) and all(fits(item, parts[0]) for item in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else origin or kind)


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
        UserError: the path is a folder, a link within itself, lies under a file, or may not be written.
    """
    try:
        target = Path(os.path.realpath(path))  # a link is written through
        if target.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        if os.path.lexists(target):  # permissions do not tell all: a link within itself, a file of the kernel's
            os.close(os.open(target, os.O_RDWR | os.O_APPEND))
            return
        existing = next(p for p in target.parents if os.path.lexists(p))
        if not existing.is_dir():
            raise UserError(f"cannot write {path}: {existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"cannot write {path}: no permission to write in {existing}")
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
                    text = line.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass")
                    yield number, from_json(text.rstrip())  # else what is missing is missed behind the line's end
                except RepeatedFieldError as error:
                    raise UserError(f"{path}:{number}: {error}") from None
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
