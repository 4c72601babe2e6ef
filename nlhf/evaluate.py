"""Judge a data set and say how good the judge is; `evaluate` and `report` are the verbs.

Station of the path: Pair -> ... -> Verdict -> **metrics -> report**. `evaluate_judge` is the core, for Python and for
training; `evaluate` wraps it in a run folder. Every figure is derived from ``judgements.jsonl``: `load_run` reads it
back.
"""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nlhf.config import ClassSpec
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer
from nlhf.errors import UserError
from nlhf.files import append_jsonl, read_jsonl, write_json, write_jsonl, write_text
from nlhf.formats import JudgeFormat, get_format
from nlhf.generation import SamplingConfig
from nlhf.judge import ORDERS, Generator, Judge, Judgement, Order
from nlhf.metrics import (
    RESAMPLES,
    WRONG_CRITIQUE_THRESHOLD,
    Metric,
    Record,
    compute,
    compute_by_subset,
)
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.runs import holds_run, open_run, read_config
from nlhf.sources import DataConfig, load_pairs

logger = logging.getLogger(__name__)

TRUNCATION_WARNING = 0.2
_DEFAULT_SAMPLING = SamplingConfig()
_ORDERS: dict[str, tuple[Order, ...]] = {"both": ORDERS, "AB": ("AB",), "BA": ("BA",)}


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
        """Derive all figures from the records."""
        options = {"threshold": threshold, "resamples": resamples, "seed": seed}
        return cls(list(records), compute(records, **options), compute_by_subset(records, **options))


def evaluate_judge(
    judge: Judge,
    pairs: Sequence[Pair],
    orders: Sequence[Order] = ORDERS,
    samples: int = 1,
    scorer: CritiqueScorer | None = None,
    wrong_critique_threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    done: Iterable[Record] = (),
    keep: Callable[[Record], None] | None = None,
    chunk_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Judge pairs, score the critiques, and derive every figure.

    Args:
        judge: The judge.
        pairs: What to judge.
        orders: Orders in which each pair is shown.
        samples: Replies to each prompt.
        scorer: Compares critiques with the humans'; None leaves the critique figures out.
        wrong_critique_threshold: A critique with a lower F1 is a wrong one.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        seed: Of the bootstrap.
        done: Judgements from an interrupted run, which are not made again (failed scores are).
        keep: Called with each new record as soon as its chunk is done.
        chunk_size: Prompts that are judged before their records are kept.
        progress: Called with the number of further prompts done.
    """
    records = {r.key: r for r in done}
    by_id = {pair.id: pair for pair in pairs}
    for chunk, chunk_orders in _owed(pairs, orders, samples, set(records), chunk_size):
        judgements = judge.judge(chunk, chunk_orders, samples, progress)
        matches = _score(scorer, judgements, by_id)
        for judgement, match in zip(judgements, matches, strict=True):
            record = Record.of(judgement, by_id[judgement.pair_id], match)
            if record.key not in records:
                records[record.key] = record
                if keep:
                    keep(record)
    complete = [records[p.id, order, k] for p in pairs for order in orders for k in range(samples)]
    complete = _score_again(scorer, complete, by_id)
    return Evaluation.of(complete, wrong_critique_threshold, resamples, seed)


def _owed(
    pairs: Sequence[Pair], orders: Sequence[Order], samples: int, done: set, chunk_size: int
) -> Iterator[tuple[list[Pair], tuple[Order, ...]]]:
    """What is still to be judged, in chunks of pairs that miss the same orders."""

    def missing(pair: Pair) -> tuple[Order, ...]:
        return tuple(o for o in orders if any((pair.id, o, k) not in done for k in range(samples)))

    for owed, group in itertools.groupby(pairs, key=missing):
        if owed:
            size = max(1, chunk_size // len(owed))
            group = list(group)
            for start in range(0, len(group), size):
                yield group[start : start + size], owed


def _score(
    scorer: CritiqueScorer | None, judgements: Sequence[Judgement | Record], by_id: dict[str, Pair]
) -> list[CritiqueMatch | None]:
    if scorer is None:
        return [None] * len(judgements)
    critiques = [j.critique if isinstance(j, Record) else j.verdict.critique for j in judgements]
    shown = [by_id[j.pair_id] if j.order == "AB" else by_id[j.pair_id].swap() for j in judgements]
    return scorer.score(critiques, shown)


def _score_again(scorer: CritiqueScorer | None, records: list[Record], by_id: dict[str, Pair]) -> list[Record]:
    """Give every failed score one more chance: a busy server is no property of the judge."""
    failed = [i for i, r in enumerate(records) if r.match is not None and r.match.failure]
    if scorer is None or not failed:
        return records
    for i, match in zip(failed, _score(scorer, [records[i] for i in failed], by_id), strict=True):
        records[i] = replace(records[i], match=match)
    return records


def evaluate(
    model: ModelConfig,
    data: DataConfig,
    out: str,
    format: str = "rm_nlhf",
    prompt_file: str | None = None,
    compat: bool = False,
    sampling: SamplingConfig = _DEFAULT_SAMPLING,
    orders: Literal["both", "AB", "BA"] = "both",
    samples: int = 1,
    scorer: ClassSpec | None = None,
    wrong_critique_threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    ledger: str | None = "runs/ledger.jsonl",
    run_name: str | None = None,
    resume: bool = False,
) -> Evaluation:
    """Judge a data set, in both orders, and report with intervals.

    Writes to ``out``: config.yaml, environment.json, manifest.json (data and model), pairs.jsonl, judgements.jsonl (one
    line a judgement; all figures derive from it), metrics.json, report.md and report.html.

    Args:
        model: The judge's model.
        data: The pairs to judge.
        out: Folder of the run; it must not hold a run yet, unless resume is set.
        format: Judge format: how pairs are put to the model and replies read.
        prompt_file: Jinja template that replaces the format's own prompt.
        compat: Read replies as the format's upstream parser does, quirks included.
        sampling: How replies are drawn.
        orders: Orders in which each pair is shown: both, AB (as in the data) or BA (exchanged).
        samples: Replies to each prompt; more than one needs a temperature above 0.
        scorer: Compares critiques with the humans' (exact, lexical, embedding, or your own class_path).
        wrong_critique_threshold: A right verdict whose critique has a lower F1 counts as right by luck.
        resamples: Bootstrap resamples of the intervals.
        seed: Seed of the bootstrap.
        ledger: JSON-lines file that receives a row of figures; null for none.
        run_name: Name in reports and in the ledger; the folder's name by default.
        resume: Continue an interrupted run in out; its configuration must be equal.

    Raises:
        UserError: bad configuration or data, or a folder in use.
    """
    config = dict(locals())
    _check(samples, wrong_critique_threshold, resamples, sampling)
    judge_format = get_format(format, prompt_file, compat)
    drops: Counter = Counter()
    pairs = load_pairs(data, drops)
    resumed = holds_run(out)
    folder = open_run(out, {**config, "run_name": run_name or Path(out).name}, resume)
    manifest = _manifest(data, pairs, drops, model, judge_format)
    _keep_inputs(folder, manifest, pairs)
    done = _read_records(folder) if resumed else []
    judge = Judge(judge_format, make_generator(model, sampling))
    shown = _ORDERS[orders]
    with _progress(len(pairs) * len(shown) - len({(r.pair_id, r.order) for r in done})) as progress:
        evaluation = evaluate_judge(
            judge,
            pairs,
            shown,
            samples,
            scorer.build() if scorer else None,
            wrong_critique_threshold,
            resamples,
            seed,
            done=done,
            keep=lambda record: append_jsonl(folder / "judgements.jsonl", record.to_dict()),
            chunk_size=4 * sampling.batch_size,
            progress=progress,
        )
    # Written anew: in the order of the pairs, without a torn line, with failed scores made good.
    write_jsonl(folder / "judgements.jsonl", (r.to_dict() for r in evaluation.records))
    _write_results(folder, evaluation)
    if ledger:
        _append_to_ledger(ledger, folder, evaluation)
    warn(evaluation.metrics)
    return evaluation


def report(runs: list[str], out: str, baseline: str | None = None, resamples: int = RESAMPLES) -> None:
    """Compare evaluated runs in one table and page: figures, and paired differences from a baseline.

    Args:
        runs: Folders of evaluated runs on the same pairs.
        out: Folder that receives report.md and report.html.
        baseline: Folder of the run to compare with; the first of runs by default.
        resamples: Bootstrap resamples of the intervals.

    Raises:
        UserError: a folder holds no finished evaluation, or the runs were not measured on the same pairs.
    """
    if not runs:
        raise UserError("report: name at least one run folder in runs")
    folders = list(dict.fromkeys(str(Path(r)) for r in ([baseline] if baseline else []) + list(runs)))
    _write_report([load_run(folder, resamples) for folder in folders], Path(out))


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
        UserError: the folder holds no finished evaluation.
    """
    folder = Path(folder)
    config = read_config(folder)
    if not (folder / "metrics.json").is_file():
        raise UserError(f"{folder} holds no finished evaluation (metrics.json is missing); run `nlhf evaluate` on it")
    records = _read_records(folder)
    threshold = config["wrong_critique_threshold"]
    resamples = config["resamples"] if resamples is None else resamples
    return Run(
        folder=folder,
        name=config["run_name"],
        config=config,
        environment=_read_json(folder / "environment.json"),
        manifest=_read_json(folder / "manifest.json"),
        pairs={p.id: p for p in _read_pairs(folder)},
        evaluation=Evaluation.of(records, threshold, resamples, config["seed"]),
    )


def make_generator(model: ModelConfig, sampling: SamplingConfig) -> Generator:
    """The generator that a model's configuration asks for."""
    from nlhf.formats import JudgeFormat, get_format
from nlhf.generation import TransformersGenerator
    from nlhf.models import load_model, load_tokenizer

    return TransformersGenerator(load_model(model), load_tokenizer(model), sampling)


def warn(metrics: dict[str, Metric]) -> None:
    """Log what makes an accuracy misleading: replies cut off, verdicts missing, scores that failed."""
    truncation = metrics["truncation_rate"]
    if truncation.n and truncation.value > TRUNCATION_WARNING:
        logger.warning(
            "%.0f %% of the replies (%d/%d) were cut off by the token limit, and a reply that is cut off has no "
            "verdict; raise sampling.max_new_tokens",
            100 * truncation.value,
            truncation.k,
            truncation.n,
        )
    parsed = metrics["parse_rate"]
    if parsed.n and parsed.value < 1:
        logger.warning(
            "%d of %d replies have no verdict: they count as not right in accuracy and not at all in accuracy_parsed",
            parsed.n - parsed.k,
            parsed.n,
        )
    failures = metrics["scorer_failures"]
    if failures.k:
        logger.warning("%d of %d critiques could not be scored and are left out", failures.k, failures.n)


def _check(samples: int, threshold: float, resamples: int, sampling: SamplingConfig) -> None:
    problems = []
    if samples < 1:
        problems.append(f"samples must be at least 1, got {samples}")
    if samples > 1 and not sampling.temperature:
        problems.append(
            f"samples is {samples} but sampling.temperature is 0, which would repeat one reply; raise the "
            "temperature or ask for one sample"
        )
    if not 0 < threshold <= 1:
        problems.append(f"wrong_critique_threshold must lie in (0, 1], got {threshold}")
    if resamples < 0:
        problems.append(f"resamples must not be negative, got {resamples}")
    if problems:
        raise UserError("; ".join(problems))


def _manifest(
    data: DataConfig, pairs: Sequence[Pair], drops: Counter, model: ModelConfig, judge_format: JudgeFormat
) -> dict[str, Any]:
    from nlhf.manifest import build_manifest, data_hash
    from nlhf.models import model_hash

    return {
        "data": build_manifest(data, pairs, drops).to_dict(),
        "data_hash": data_hash(pairs),
        "model_hash": model_hash(model.name),
        "judge": {
            "format": judge_format.name,
            "prompt_hash": judge_format.prompt_hash,
            "ties": judge_format.ties,
            "compat": judge_format.compat,
        },
    }


def _keep_inputs(folder: Path, manifest: dict[str, Any], pairs: Sequence[Pair]) -> None:
    """Write what is judged and by what; on resuming, make sure that it is still the same."""
    path = folder / "manifest.json"
    if path.is_file():
        old = _read_json(path)
        what = {"data_hash": "the data", "model_hash": "the model", "judge": "the judge's prompt or format"}
        changed = [text for key, text in what.items() if old.get(key) != manifest[key]]
        if changed:
            raise UserError(
                f"{folder} cannot be resumed: {' and '.join(changed)} changed since it began; choose another folder"
            )
    write_jsonl(folder / "pairs.jsonl", (p.to_dict() for p in pairs))
    write_json(path, manifest)


def _read_records(folder: Path) -> list[Record]:
    path = folder / "judgements.jsonl"
    if not path.is_file():
        return []
    return [Record.from_dict(row, f"{path}:{number}") for number, row in read_jsonl(path, skip_torn=True)]


def _read_pairs(folder: Path) -> list[Pair]:
    path = folder / "pairs.jsonl"
    return [Pair.from_dict(row, f"{path}:{number}") for number, row in read_jsonl(path)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _write_results(folder: Path, evaluation: Evaluation) -> None:
    write_json(
        folder / "metrics.json",
        {
            "metrics": {name: vars(m) for name, m in evaluation.metrics.items()},
            "subsets": {s: {name: vars(m) for name, m in found.items()} for s, found in evaluation.subsets.items()},
        },
    )
    _write_report([load_run(folder)], folder)


def _write_report(runs: Sequence[Run], out: Path) -> None:
    from nlhf.report import build_report

    page = build_report(runs)
    write_text(out / "report.md", page.markdown)
    write_text(out / "report.html", page.html)


def _append_to_ledger(path: str, folder: Path, evaluation: Evaluation) -> None:
    from nlhf.ledger import LedgerRow, append

    run = load_run(folder, resamples=0)
    config, manifest = run.config, run.manifest
    append(
        path,
        LedgerRow(
            run_name=run.name,
            out=str(folder),
            source=config["data"]["source"],
            split=config["data"]["split"],
            data_n=len(run.pairs),
            data_hash=manifest["data_hash"],
            model=str(config["model"].get("name") or config["model"]),
            model_hash=manifest["model_hash"],
            format=config["format"],
            prompt_hash=manifest["judge"]["prompt_hash"],
            seed=config["sampling"].get("seed", config["seed"]),
            orders=list(_ORDERS[config["orders"]]),
            samples=config["samples"],
            sampling=config["sampling"],
            scorer=config["scorer"],
            n=len(evaluation.records),
            metrics=evaluation.metrics,
        ),
    )


class _progress:
    """A bar on standard error that counts prompts; silent where standard error is not a terminal."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc="judging", unit="prompt", disable=None)

    def __enter__(self) -> Callable[[int], None]:
        return self.bar.update

    def __exit__(self, *_: Any) -> None:
        self.bar.close()
