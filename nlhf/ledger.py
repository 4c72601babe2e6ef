"""The ledger: one line for every evaluation that was ever made, so that no figure is without its origin.

Station of the path: metrics -> **ledger**. A JSON-lines file that is only ever appended to; rows of other
runs are never changed, and a repeated evaluation is a further row.
"""

import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nlhf
from nlhf.errors import UserError, nearest
from nlhf.evaluation.figures import definitions
from nlhf.evaluation.metrics import Metric
from nlhf.files import append_jsonl, read_jsonl
from nlhf.runs import git_state, now

TABLE_METRICS = ("accuracy", "parse_rate", "position_consistency", "critique_f1", "wrong_critique_rate")


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """One evaluation.

    Attributes:
        run_id: Unique to the row.
        time: UTC, ISO 8601.
        commit: Of the checkout; None when run from an installed copy.
        dirty: Tracked files differed from the commit.
        version: Of this package.
        run_name: What the user calls the run.
        out: The run's folder.
        source: Data source.
        split: Part of it.
        data_n: Pairs judged.
        data_hash: Of the pairs, see `nlhf.manifest`.
        model: Name or path as configured.
        model_hash: Of the weights, where known.
        format: Judge format.
        prompt_hash: Of its prompt template.
        seed: Of the run: its data and, in a suite, its training (the seed of the replies is part of `sampling`).
        orders: Orders in which each pair was shown.
        samples: Replies to each prompt.
        sampling: Sampling settings.
        scorer: Critique scorer with its settings; None when critiques were not scored.
        n: Judgements.
        metrics: By name: value, k, n, low, high.
    """

    run_name: str
    out: str
    source: str
    split: str
    data_n: int
    data_hash: str
    model: str
    model_hash: str | None
    format: str
    prompt_hash: str
    seed: int
    orders: Sequence[str]
    samples: int
    sampling: Mapping[str, Any]
    scorer: Any
    n: int
    metrics: Mapping[str, Metric]
    run_id: str = dataclasses.field(default_factory=lambda: secrets.token_hex(6))
    time: str = dataclasses.field(default_factory=now)
    version: str = nlhf.__version__
    commit: str | None = None
    dirty: bool | None = None


def append(path: str | Path, row: LedgerRow) -> dict[str, Any]:
    """Append one evaluation and return the line as written; other processes may append at the same time.

    Raises:
        UserError: the file cannot be written.
    """
    line = dataclasses.asdict(dataclasses.replace(row, **git_state()))
    append_jsonl(path, line)
    return line


def read_ledger(path: str | Path, **equal: Any) -> list[dict[str, Any]]:
    """The rows whose fields equal the given ones, oldest first; a line torn by a killed writer is skipped.

    Args:
        path: The ledger.
        **equal: Field values of `LedgerRow`, such as ``model="m"``; a tuple, list or set offers alternatives
            (a list field such as ``orders`` is compared whole).

    Raises:
        UserError: the file cannot be read, or a field does not exist (the nearest name is offered).
    """
    fields = [field.name for field in dataclasses.fields(LedgerRow)]
    for name in equal:
        if name not in fields:
            raise UserError(f"the ledger has no field {name!r}; known: {', '.join(fields)}.{nearest(name, fields)}")
    rows = (row for _, row in read_jsonl(path, skip_torn=True) if isinstance(row, dict) and "run_id" in row)
    return [row for row in rows if all(_matches(row.get(k), wanted) for k, wanted in equal.items())]


def table(
    rows: Iterable[Mapping[str, Any]],
    metrics: Sequence[str] = TABLE_METRICS,
    fields: Sequence[str] = ("time", "run_name", "model", "source", "split", "format"),
) -> str:
    """Rows of the ledger as a markdown table: the given fields, then each figure as value [low, high] (k/n)."""
    head = [*fields, *metrics]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        cells = [_text(row.get(f)) for f in fields]
        lines.append(_line([*cells, *(_figure(m, row["metrics"].get(m)) for m in metrics)]))
    return "\n".join(lines) + "\n"


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple | set) and not isinstance(value, list):
        return value in wanted
    return value == (list(wanted) if isinstance(wanted, tuple) else wanted)


def _figure(name: str, metric: Mapping[str, Any] | None) -> str:
    known = definitions().get(name)  # a figure of a judge; any other, such as CoSER's points, is no share
    return "–" if metric is None else format_metric(Metric(**metric), rate=known is not None and known.rate)


def format_metric(metric: Metric, rate: bool = True) -> str:
    """A figure as text, ``71.2 % [68.0, 74.1] (356/500)``; a dash where nothing counts."""
    if metric.value is None:
        return "–"
    scale, unit = (100, " %") if rate else (1, "")
    digits = 1 if rate or abs(metric.value) >= 10 else 3  # a Brier score lives between 0 and 1
    text = f"{scale * metric.value:.{digits}f}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" [{scale * metric.low:.{digits}f}, {scale * metric.high:.{digits}f}]"
    k = f"{metric.k:.1f}" if isinstance(metric.k, float) else f"{metric.k}"
    return f"{text} ({k}/{metric.n})"


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _line(cells: Iterable[str]) -> str:
    # A bar or a line break within a cell would end it.
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
