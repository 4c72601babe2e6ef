"""An evaluation and the folder that keeps it: everything is read back from ``judgements.jsonl``.

Station of the path: Verdict -> metrics -> **results** -> report. For notebooks, comparisons and the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlhf.errors import UserError
from nlhf.files import read_json, read_jsonl
from nlhf.metrics import (
    RESAMPLES,
    WRONG_CRITIQUE_THRESHOLD,
    Difference,
    Metric,
    Record,
    compare,
    compute,
    compute_by_subset,
)
from nlhf.pairs import Pair
from nlhf.runs import read_config


@dataclass(frozen=True)
class Evaluation:
    """What was found out about a judge.

    Attributes:
        records: One for each judgement, by pair, then order, then sample.
        metrics: See `nlhf.metrics.compute`.
        subsets: The same for each subset; empty when there is only one.
    """

    records: list[Record]
    metrics: dict[str, Metric]
    subsets: dict[str, dict[str, Metric]]

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        threshold: float = WRONG_CRITIQUE_THRESHOLD,
        resamples: int = RESAMPLES,
        seed: int = 0,
    ) -> "Evaluation":
        """Derive all figures from the records; arguments as of `nlhf.metrics.compute`."""
        options = {"threshold": threshold, "resamples": resamples, "seed": seed}
        return cls(list(records), compute(records, **options), compute_by_subset(records, **options))


@dataclass(frozen=True)
class Run:
    """An evaluated run, read back from its folder.

    Attributes:
        folder: Where it is.
        name: What it is called.
        config: The resolved configuration.
        environment: Versions and commit.
        manifest: What was judged and by whom.
        pairs: The pairs, by id.
        evaluation: Records and the figures derived from them.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    manifest: dict[str, Any]
    pairs: dict[str, Pair]
    evaluation: Evaluation

    @property
    def records(self) -> list[Record]:
        """One for each judgement."""
        return self.evaluation.records

    @property
    def metrics(self) -> dict[str, Metric]:
        """Figures over all records."""
        return self.evaluation.metrics


def load_run(folder: str | Path, resamples: int | None = None) -> Run:
    """Read an evaluated run; the figures are derived anew from ``judgements.jsonl``.

    Args:
        folder: The run's folder.
        resamples: Bootstrap resamples; the run's own number by default.

    Raises:
        UserError: the folder holds no finished evaluation, or one that has lost judgements since.
    """
    folder = Path(folder)
    config = read_config(folder)
    if "wrong_critique_threshold" not in config:
        raise UserError(f"{folder} holds another kind of run than an evaluation")
    if not (folder / "metrics.json").is_file():
        raise UserError(f"{folder} holds an evaluation that did not finish; continue it with --resume true")
    resamples = config["resamples"] if resamples is None else resamples
    pairs = {pair.id: pair for pair in _read_pairs(folder / "pairs.jsonl")}
    records = read_records(folder / "judgements.jsonl")
    _require_complete(folder, config, pairs, records)
    return Run(
        folder=folder,
        name=config["run_name"],
        config=config,
        environment=read_json(folder / "environment.json"),
        manifest=read_json(folder / "manifest.json"),
        pairs=pairs,
        evaluation=Evaluation.of(records, config["wrong_critique_threshold"], resamples, config["seed"]),
    )


def _require_complete(folder: Path, config: Mapping[str, Any], pairs: Mapping[str, Pair], records: Sequence[Record]):
    """A file that was cut off or edited must not pass for a smaller evaluation."""
    orders = ("AB", "BA") if config["orders"] == "both" else (config["orders"],)
    expected = {(pair, order, sample) for pair in pairs for order in orders for sample in range(config["samples"])}
    found = {record.key for record in records}
    if found != expected or len(records) != len(expected):
        raise UserError(
            f"{folder}: judgements.jsonl does not hold one judgement for each pair, order and sample "
            f"({len(records)} lines, {len(expected - found)} missing, {len(found - expected)} foreign); "
            "evaluate once more with --resume true, which judges what is missing"
        )


def compare_runs(first: Run, second: Run) -> dict[str, Difference]:
    """Paired differences, second minus first, with the first run's resampling; see `nlhf.metrics.compare`.

    Raises:
        UserError: the runs were not measured on the same pairs, or differ in what counts as a wrong critique.
    """
    threshold, other = (run.config["wrong_critique_threshold"] for run in (first, second))
    if threshold != other:
        raise UserError(
            f"the runs differ in wrong_critique_threshold ({threshold} and {other}); evaluate them with the same"
        )
    return compare(first.records, second.records, threshold, first.config["resamples"], first.config["seed"])


def read_records(path: str | Path) -> list[Record]:
    """The judgements of a run, also of an interrupted one: a torn line is passed over.

    Raises:
        UserError: the file cannot be read, or a line is no judgement of this version.
    """
    return [Record.from_dict(row, f"{path}:{number}") for number, row in read_jsonl(path, skip_torn=True)]


def _read_pairs(path: Path) -> list[Pair]:
    return [Pair.from_dict(row, f"{path}:{number}") for number, row in read_jsonl(path)]
