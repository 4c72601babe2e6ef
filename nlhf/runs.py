"""Run folders: every training and every evaluation writes to a folder of its own that says how it was made.

Beside the path of a pair: `open_run` starts (or resumes) the folder that a verb fills. It holds
``config.yaml``, the resolved configuration, and ``environment.json``, the versions and the commit; the verb
adds what it makes.
"""

import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import nlhf
from nlhf.errors import UserError
from nlhf.files import check_fields, read_json, read_yaml, write_json, write_text

_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "peft",
    "vllm",
    "sentence-transformers",
    "scikit-learn",
    "numpy",
    "scipy",
    "jsonargparse",
)
MAY_DIFFER = ("out", "resume")
"""Settings that say where and whether to continue, not what to compute."""
_ABSENT = "(absent)"


def open_run(
    out: str | Path, config: Mapping[str, Any], resume: bool = False, may_differ: Sequence[str] = MAY_DIFFER
) -> Path:
    """Create the folder of a run, or take up one that was interrupted.

    A new run needs a folder that is empty or does not exist. With ``resume`` the folder of a run is taken up
    when its configuration is equal; without a run in it a new run begins, so that a job script can always say
    ``--resume true``.

    Args:
        out: The folder.
        config: The resolved configuration; dataclasses, paths and tuples are written as plain YAML.
        resume: Continue the run in ``out``.
        may_differ: Keys (dotted for nested ones) that need not be equal on resuming.

    Returns:
        The folder.

    Raises:
        UserError: the folder is in use or cannot be written, or the configurations differ (the keys are
            named, with the old and the new values).
    """
    check_run(out, config, resume, may_differ)
    folder = Path(out)
    if holds_run(folder):
        environments = read_json(folder / "environment.json")
        check_fields(environments, {"resumed": list[dict] | None}, f"{folder / 'environment.json'}")
        environments["resumed"] = [*(environments.get("resumed") or []), environment()]
        write_json(folder / "environment.json", environments)
        return folder
    # config.yaml marks the folder as a run, so it comes last.
    write_json(folder / "environment.json", environment())
    write_text(folder / "config.yaml", yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))
    return folder


def check_run(
    out: str | Path, config: Mapping[str, Any], resume: bool = False, may_differ: Sequence[str] = MAY_DIFFER
) -> None:
    """Raise what `open_run` would raise, without writing: to be called before the slow part of a start."""
    if config.get("seed") is not None:
        check_seed(config["seed"])
    folder = Path(out)
    if not holds_run(folder):
        _require_empty(folder)
    elif not resume:
        raise UserError(f"{folder} already holds a run; choose another or continue it with --resume true")
    else:
        _require_equal(read_config(folder), plain(config), folder, may_differ)


def check_seed(seed: int) -> None:
    """Raise `UserError` unless NumPy takes the seed, as the trainers and the bootstrap do."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed must lie between 0 and {2**32 - 1}, got {seed}")


def holds_run(folder: str | Path) -> bool:
    """True when a run was begun in the folder."""
    return (Path(folder) / "config.yaml").is_file()


@contextmanager
def alone(folder: str | Path) -> Iterator[None]:
    """Nobody else works on the run in ``folder``: two processes that continue it would both append to its files.

    Raises:
        UserError: somebody does.
    """
    from filelock import FileLock, Timeout

    path = Path(folder) / ".lock"
    try:
        with FileLock(path, timeout=0):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # nobody waits for it
    except Timeout:
        raise UserError(f"{folder}: another process is at work on this run; wait until it has ended") from None


def keep_manifest(folder: str | Path, manifest: Mapping[str, Any], same: Mapping[str, str]) -> None:
    """Write a run's manifest; on resuming, make sure first that it still says the same.

    Args:
        folder: Of the run.
        manifest: Goes to ``manifest.json``.
        same: Its fields that must not change, with what each is called in a message.

    Raises:
        UserError: one has changed since the run began.
    """
    path = Path(folder) / "manifest.json"
    if path.is_file():
        old = read_json(path)
        if changed := [called for name, called in same.items() if old.get(name) != manifest[name]]:
            raise UserError(
                f"{folder} cannot be resumed: {' and '.join(changed)} changed since it began; choose another folder"
            )
    write_json(path, manifest)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of the run in ``folder``.

    Raises:
        UserError: the folder holds no run, or its configuration cannot be read.
    """
    if not holds_run(folder):
        raise UserError(f"{folder} holds no run (it has no file config.yaml)")
    return read_yaml(Path(folder) / "config.yaml")


def plain(value: Any) -> Any:
    """A configuration as YAML can say it: dataclasses and mappings as dicts, other objects as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value, key=str) if isinstance(value, set | frozenset) else value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if hasattr(value, "value") else value
    return str(value)


def environment() -> dict[str, Any]:
    """What a result depends on beside its configuration: versions, commit, devices, command."""
    return {
        "time": now(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "nlhf": nlhf.__version__,
        **git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def git_state() -> dict[str, Any]:
    """Commit of the checkout that this package is run from, and whether tracked files were changed since.

    Both None when it runs from an installed copy.
    """
    try:
        # An installed copy may lie inside somebody else's repository: only a tracked package counts.
        _git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(nlhf.__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # importing it only for this would cost seconds
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _require_empty(folder: Path) -> None:
    try:
        if not folder.exists():
            existing = next(p for p in folder.absolute().parents if p.exists())
            if not existing.is_dir():
                raise UserError(f"cannot write {folder}: {existing} is a file")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {folder}: no permission to write in {existing}")
            return
        if not folder.is_dir():
            raise UserError(f"{folder} is a file; choose a folder for the run")
        # A dot file or an environment.json without config.yaml is what a start that was killed leaves behind.
        names = sorted(p.name for p in folder.iterdir())
        others = [name for name in names if not name.startswith(".") and name != "environment.json"]
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror or error}") from None
    if others:
        raise UserError(f"{folder} is not empty and holds no run (it has {others[0]!r}); choose another")


def _require_equal(old: Mapping, new: Mapping, folder: Path, may_differ: Sequence[str]) -> None:
    before, after = ({k: v for k, v in _flatten(c).items() if not _within(k, may_differ)} for c in (old, new))
    differing = [k for k in {**before, **after} if before.get(k, _ABSENT) != after.get(k, _ABSENT)]
    if differing:
        changes = "; ".join(
            f"{k}: {_shown(before.get(k, _ABSENT))} -> {_shown(after.get(k, _ABSENT))}" for k in differing
        )
        raise UserError(
            f"{folder} cannot be resumed: its configuration differs in {changes}. "
            "Give the old values, or choose another folder"
        )


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _shown(value: Any) -> str:
    return value if value is _ABSENT else repr(value)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
