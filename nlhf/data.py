"""The verbs ``nlhf data show``, ``check`` and ``export``: look at a data set before anything is trained on it.

Station of the path: source -> **Pair**, for the eyes of a person. Each function's signature is its command line.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nlhf.errors import UserError
from nlhf.files import write_jsonl
from nlhf.manifest import Manifest, Overlap, build_manifest, duplicates, overlap
from nlhf.pairs import HumanCritique, Pair
from nlhf.sources import DataConfig, load_pairs
from nlhf.terminal import shown

# A file that is not named: what `check` takes for "not given". An option that may be a data set or null would show
# neither its fields in the help nor a plain message for a mistake in one of them.
NO_FILE = DataConfig(source="jsonl")
_EXAMPLES = 3
_CRITIQUE_FIELDS = {
    "text": "critique",
    "strengths_a": "praise of A",
    "weaknesses_a": "blame of A",
    "strengths_b": "praise of B",
    "weaknesses_b": "blame of B",
}


def show(data: DataConfig = NO_FILE, n: int = 3, path: str | None = None) -> None:
    """Print the first pairs of a data set.

    Args:
        data: The data set, when it needs more than a path.
        n: How many pairs.
        path: A file of pairs (the same as ``--data.source jsonl --data.path FILE``).

    Raises:
        UserError: the data set cannot be loaded, neither or both of ``path`` and ``data`` are given, or ``n`` is not
            positive.
    """
    if n < 1:
        raise UserError(f"--n must be at least 1, got {n}")
    data = _named(data, path, "show")
    if data.limit is None or data.limit > n:
        data = dataclasses.replace(data, limit=n)
    console = Console(highlight=False)
    for pair in load_pairs(data):
        _print_pair(console, pair)


def check(path: str | None = None, data: DataConfig = NO_FILE, against: DataConfig = NO_FILE) -> Manifest:
    """Validate a file or a data set and print what it holds: counts, drops, duplicates, lengths, overlap.

    Args:
        path: A file of pairs (the same as ``--data.source jsonl --data.path FILE``).
        data: The data set, when it needs more than a path.
        against: Another data set, to count the pairs that occur in both: a train split, say.

    Returns:
        The figures printed.

    Raises:
        UserError: the data set is malformed, or neither or both of ``path`` and ``data`` are given.
    """
    data = _named(data, path, "check")
    drops: Counter = Counter()
    pairs = load_pairs(data, drops)
    manifest = build_manifest(data, pairs, drops)
    console = Console(highlight=False)
    console.print(_manifest_table(manifest))
    _print_duplicates(console, pairs)
    if against != NO_FILE:
        _print_overlap(console, overlap(pairs, load_pairs(against)), len(pairs), against)
    return manifest


def export(data: DataConfig, out: str, overwrite: bool = False) -> None:
    """Write a data set as JSON lines of our own schema.

    Args:
        data: The data set.
        out: The file to write.
        overwrite: Replace the file if it exists.

    Raises:
        UserError: the data set cannot be loaded, or the file exists and may not be replaced.
    """
    if Path(out).suffix != ".jsonl":
        raise UserError(f"{out}: the file is JSON lines; name it .jsonl, so that it is read as such")
    if Path(out).exists() and not overwrite:
        raise UserError(f"{out} exists; choose another name or replace it with --overwrite true")
    pairs = load_pairs(data)
    write_jsonl(out, (pair.to_dict() for pair in pairs))
    Console(highlight=False).print(Text(f"{len(pairs)} pairs written to {out}"), soft_wrap=True)


def _named(data: DataConfig, path: str | None, verb: str) -> DataConfig:
    """The data set that is named by a bare path or by its configuration."""
    ways = f"a file to {verb} (nlhf data {verb} FILE) or a data set (--data.source NAME)"
    if path is not None and (data.source != "jsonl" or data.path is not None):
        raise UserError(f"give either {ways}, not both")
    if path is None and data == NO_FILE:
        raise UserError(f"give {ways}")
    return data if path is None else dataclasses.replace(data, path=path)


def _print_pair(console: Console, pair: Pair) -> None:
    facts = [f"label {pair.label or 'none'}"]
    facts += [f"strength {pair.strength}"] if pair.strength is not None else []
    facts += [f"{name} {value}" for name in ("source", "subset") if (value := getattr(pair, name))]
    console.rule(shown(f"{pair.id}  ({', '.join(facts)})"))
    for turn in pair.context:
        console.print(Panel(shown(turn.content), title=shown(turn.role), title_align="left"))
    for side, text in (("A", pair.response_a), ("B", pair.response_b)):
        better = pair.label == side
        title = shown(f"response {side}{' (better)' if better else ''}")
        console.print(Panel(shown(text), title=title, title_align="left", border_style="green" if better else "none"))
    for critique in pair.critiques:
        _print_critique(console, critique)


def _print_critique(console: Console, critique: HumanCritique) -> None:
    for name, meaning in _CRITIQUE_FIELDS.items():
        if text := getattr(critique, name).strip():
            console.print(shown(f"{meaning}: {text}"))


def _manifest_table(manifest: Manifest) -> Table:
    table = Table(title=shown(f"{manifest.source} / {manifest.split}"), show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    total = manifest.pairs

    def row(name: str, value: object) -> None:
        table.add_row(shown(name), shown(str(value)))

    if manifest.path is not None:
        row("path", manifest.path)
    row("pairs", total)
    row("with a human critique", _share(manifest.labelled, total))
    row("A better", _share(manifest.labels["A"], total))
    row("B better", _share(manifest.labels["B"], total))
    row("ties", _share(manifest.labels["tie"], total))
    row("no label", _share(manifest.labels["none"], total))
    row("groups", manifest.groups)
    row("duplicates", f"{_share(manifest.duplicates, total)}, {manifest.contradictions} with another winner")
    row("empty responses", manifest.empty_responses)
    row("longer response wins", "-" if manifest.longer_wins is None else f"{manifest.longer_wins:.1%}")
    for name, lengths in manifest.lengths.items():
        if lengths is not None:
            figures = f"{lengths.minimum} / {lengths.median:g} / {lengths.p95:g} / {lengths.maximum}"
            row(f"{name} length", f"{figures} characters (min / median / 95 % / max)")
    row("SHA-256", manifest.data_hash)
    for name, count in manifest.subsets.items() if set(manifest.subsets) != {""} else ():
        row(f"subset {name or '(none)'}", _share(count, total))
    for reason, count in manifest.rewritten.items():
        row(f"rewritten: {reason}", count)
    for reason, count in (
        {"equal responses": 0} | manifest.drops
    ).items():  # every source leaves these out: say none too
        row(f"left out: {reason}", count)
    return table


def _print_duplicates(console: Console, pairs: Sequence[Pair]) -> None:
    repeated = duplicates(pairs)
    for first, later in repeated[:_EXAMPLES]:
        console.print(shown(f"duplicate: {later.id} repeats {first.id}"))
    if len(repeated) > _EXAMPLES:
        console.print(shown(f"... and {len(repeated) - _EXAMPLES} more duplicates"))


def _print_overlap(console: Console, shared: Overlap, total: int, against: DataConfig) -> None:
    other = f"{against.source} / {against.split}" + (f" ({against.path})" if against.path else "")
    console.print(shown(f"overlap with {other}:"), soft_wrap=True)
    for name in ("pairs", "contexts", "groups"):
        console.print(shown(f"  {name} that occur there: {_share(getattr(shared, name), total)}"))


def _share(count: int, total: int) -> str:
    return f"{count} ({count / total:.1%})"
