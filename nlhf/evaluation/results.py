"""An evaluation and the folder that keeps it: everything is read back from ``judgements.jsonl``.

Station of the path: Verdict -> metrics -> **results** -> report. For notebooks, comparisons and the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError
from nlhf.evaluation.benchmarks import Score, benchmark_scores
from nlhf.evaluation.calibration import Bin, reliability
from nlhf.evaluation.figures import WRONG_CRITIQUE_THRESHOLD, by_pair
from nlhf.evaluation.intervals import RESAMPLES, McNemar
from nlhf.evaluation.metrics import Difference, Metric, compare, compare_decisions, compute, compute_by_subset
from nlhf.evaluation.probe import FILLERS, probe_pairs
from nlhf.evaluation.records import Record
from nlhf.files import check_fields, read_json, read_jsonl
from nlhf.judge import VoteRule
from nlhf.ledger import format_metric
from nlhf.pairs import Pair
from nlhf.roleplay.judgements import principle_definitions, principle_figures
from nlhf.roleplay.principles import run_principles
from nlhf.runs import check_seed, read_config

# What figures and reports read of a run's configuration and of its manifest, by dotted key.
_CONFIG = {
    "run_name": str,
    "model.name": str,
    "data.source": str,
    "data.split": str,
    "format": str | None,
    "sampling": dict,
    "scorer": dict | None,
    "orders": Literal["both", "AB", "BA"],
    "samples": int,
    "vote": VoteRule | None,
    "wrong_critique_threshold": float,
    "resamples": int,
    "seed": int,
}
_MANIFEST = {"data": dict, "data.data_hash": str | None, "judge.prompt_hash": str, "judge.ties": bool}


@dataclass(frozen=True)
class Evaluation:
    """What was found out about a judge.

    Attributes:
        records: One for each judgement, by pair, then order, then sample.
        metrics: See `nlhf.evaluation.metrics.compute`.
        subsets: The same for each subset; empty when there is only one.
        reliability: The reliability curve, see `nlhf.evaluation.calibration.reliability`; empty without probabilities.
        scores: The benchmark's own figures, see `nlhf.evaluation.benchmarks`; empty for other data.
        probe: What the adversarial probe found, its fillers as subsets (see `probe`); None when it was not asked for.
    """

    records: list[Record]
    metrics: dict[str, Metric]
    subsets: dict[str, dict[str, Metric]]
    reliability: list[Bin] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    probe: "Evaluation | None" = None

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        threshold: float = WRONG_CRITIQUE_THRESHOLD,
        resamples: int = RESAMPLES,
        seed: int = 0,
        rule: VoteRule = "majority",
        source: str = "",
        pairs: Sequence[Pair] = (),
        probe: Sequence[Record] | None = None,
    ) -> "Evaluation":
        """Derive all figures from the records.

        Args:
            records: One for each judgement.
            threshold: This and the next three as of `nlhf.evaluation.metrics.compute`.
            resamples: Of the bootstrap.
            seed: Of the bootstrap.
            rule: How several verdicts become one.
            source: Name of the data source, for the figures of a benchmark.
            pairs: What was judged, for the same.
            probe: Records of the adversarial probe.
        """
        options = {"threshold": threshold, "resamples": resamples, "seed": seed, "rule": rule}
        return cls(
            records=list(records),
            metrics=compute(records, **options),
            subsets=compute_by_subset(records, **options),
            reliability=reliability(by_pair(records).values()),
            scores=benchmark_scores(source, records, pairs, resamples, seed),
            probe=None if probe is None else cls.of(probe, **options),
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready: what ``metrics.json`` holds."""
        return {
            "metrics": _plain(self.metrics),
            "subsets": {subset: _plain(found) for subset, found in self.subsets.items()},
            "reliability": [vars(point) for point in self.reliability],
            "scores": [vars(score) for score in self.scores],
            "probe": None if self.probe is None else self.probe.to_dict(),
        }


def _plain(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    return {name: vars(metric) for name, metric in metrics.items()}


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
        seconds: Wall time of judging, without loading the model and scoring critiques; an interrupted run's included.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    manifest: dict[str, Any]
    pairs: dict[str, Pair]
    evaluation: Evaluation
    seconds: float = 0.0

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
    if resamples is not None:
        config = config | {"resamples": resamples}
    check_fields(config, _CONFIG, f"{folder / 'config.yaml'}")
    check_seed(config["seed"])
    manifest = read_json(folder / "manifest.json")
    check_fields(manifest, _MANIFEST, f"{folder / 'manifest.json'}")
    pairs = {pair.id: pair for pair in _read_pairs(folder / "pairs.jsonl")}
    records = read_records(folder / "judgements.jsonl")
    _require_complete(folder / "judgements.jsonl", config, pairs, records)
    probe = None
    if config.get("probe"):  # absent in a run of an earlier version, as is the vote
        probe = read_records(folder / "probe.jsonl")
        probed = probe_pairs(list(pairs.values()), config["seed"])
        _require_complete(folder / "probe.jsonl", config, {p.id: p for p in probed}, probe)
    return Run(
        folder=folder,
        name=config["run_name"],
        config=config,
        environment=read_json(folder / "environment.json"),
        manifest=manifest,
        pairs=pairs,
        evaluation=derive(config, list(pairs.values()), records, probe),
        seconds=_seconds(folder / "timing.jsonl"),
    )


def derive(
    config: Mapping[str, Any], pairs: Sequence[Pair], records: Sequence[Record], probe: Sequence[Record] | None
) -> Evaluation:
    """The figures of a run from its judgements, by its configuration."""
    return Evaluation.of(
        records,
        config["wrong_critique_threshold"],
        config["resamples"],
        config["seed"],
        _rule(config),
        config["data"]["source"],
        pairs,
        probe,
    )


def _rule(config: Mapping[str, Any]) -> VoteRule:
    return config.get("vote", "majority")


def _seconds(path: Path) -> float:
    rows = list(read_jsonl(path, skip_torn=True)) if path.is_file() else []
    for number, row in rows:
        check_fields(row, {"seconds": float}, f"{path}:{number}")
    return sum(row["seconds"] for _, row in rows)


def _require_complete(path: Path, config: Mapping[str, Any], pairs: Mapping[str, Pair], records: Sequence[Record]):
    """A file that was cut off or edited must not pass for a smaller evaluation."""
    orders = ("AB", "BA") if config["orders"] == "both" else (config["orders"],)
    expected = {(pair, order, sample) for pair in pairs for order in orders for sample in range(config["samples"])}
    found = {record.key for record in records}
    if found != expected or len(records) != len(expected):
        raise UserError(
            f"{path.parent}: {path.name} does not hold one judgement for each pair, order and sample "
            f"({len(records)} lines, {len(expected - found)} missing, {len(found - expected)} foreign); "
            "evaluate once more with --resume true, which judges what is missing"
        )


def compare_runs(first: Run, second: Run) -> dict[str, Difference]:
    """Paired differences, second minus first, with the first run's resampling; see `nlhf.evaluation.metrics.compare`.

    Raises:
        UserError: the runs were not measured on the same pairs, or differ in what counts as a wrong critique or in how
            votes are counted.
    """
    threshold, other = (run.config["wrong_critique_threshold"] for run in (first, second))
    if threshold != other:
        raise UserError(
            f"the runs differ in wrong_critique_threshold ({threshold} and {other}); evaluate them with the same"
        )
    rule = _same_rule(first, second)
    return compare(first.records, second.records, threshold, first.config["resamples"], first.config["seed"], rule)


def compare_run_decisions(first: Run, second: Run) -> McNemar:
    """McNemar's exact test on the pairs that each run decides rightly, see `nlhf.evaluation.metrics.compare_decisions`.

    Raises:
        UserError: the runs were not measured on the same pairs, or differ in how votes are counted.
    """
    return compare_decisions(first.records, second.records, _same_rule(first, second))


def _same_rule(first: Run, second: Run) -> VoteRule:
    rules = [_rule(run.config) for run in (first, second)]
    if rules[0] != rules[1]:
        raise UserError(f"the runs differ in vote ({rules[0]} and {rules[1]}); evaluate them with the same")
    return rules[0]


@dataclass(frozen=True)
class FurtherFigure:
    """A figure beside those of `nlhf.evaluation.figures.definitions`: a title, what it means, and its value as text."""

    title: str
    meaning: str
    text: str


def further_figures(run: Run) -> list[FurtherFigure]:
    """The benchmark's own figures, the adversarial probe by filler, and the time, as a report shows them."""
    evaluation, found = run.evaluation, []
    for score in evaluation.scores:
        interval = "" if score.low is None else f" [{100 * score.low:.1f}, {100 * score.high:.1f}]"
        found.append(FurtherFigure(score.name, score.note, f"{100 * score.value:.1f} %{interval} (n = {score.n})"))
    for kind, metrics in evaluation.probe.subsets.items() if evaluation.probe else ():
        filler = repr(FILLERS[kind]) if FILLERS[kind] else "an empty response"
        meaning = f"verdicts for the real response against {filler}; never part of the accuracies"
        found.append(FurtherFigure(f"Probe: {kind}", meaning, format_metric(metrics["accuracy"])))
    if str(run.config.get("format")).startswith("her_rm"):
        options = {name: run.config[name] for name in ("resamples", "seed")}
        principles = run_principles(run.folder)
        definitions = principle_definitions(principles)
        for name, metric in principle_figures(evaluation.records, principles, **options).items():
            definition = definitions[name]
            found.append(FurtherFigure(definition.title, definition.meaning, format_metric(metric, definition.rate)))
    if run.seconds:
        text = f"{run.seconds:.1f} s, {run.seconds / len(run.pairs):.3g} s a pair"
        found.append(FurtherFigure("Time", "wall time of judging, without loading and without scoring critiques", text))
    return found


def read_records(path: str | Path) -> list[Record]:
    """The judgements of a run, also of an interrupted one: a torn line is passed over.

    Raises:
        UserError: the file cannot be read, or a line is no judgement of this version.
    """
    return [Record.from_dict(row, f"{path}:{number}") for number, row in read_jsonl(path, skip_torn=True)]


def _read_pairs(path: Path) -> list[Pair]:
    return [Pair.from_dict(row, f"{path}:{number}") for number, row in read_jsonl(path)]
