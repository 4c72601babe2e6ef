"""Judge a data set and say how good the judge is: the verb `evaluate`.

Station of the path: Pair -> ... -> Verdict -> **metrics -> report**. `evaluate_judge` is the core, for use from Python;
`evaluate` wraps it in a run folder.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from nlhf.config import ClassSpec
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer
from nlhf.errors import UserError
from nlhf.files import append_jsonl, check_appendable, read_json, write_json, write_jsonl
from nlhf.formats import JudgeFormat, get_format
from nlhf.generation import SamplingConfig, TransformersGenerator
from nlhf.judge import ORDERS, Generator, Judge, Judgement, Order, as_shown, shown_pairs
from nlhf.ledger import LedgerRow, append, format_metric
from nlhf.logs import setup_logging
from nlhf.metrics import RESAMPLES, TRUNCATION_LIMIT, WRONG_CRITIQUE_THRESHOLD, Metric, Record, definitions
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.report import write_report
from nlhf.results import Evaluation, load_run, read_records
from nlhf.runs import check_run, open_run, plain
from nlhf.sources import DataConfig, load_pairs

logger = logging.getLogger(__name__)

_DEFAULT_SAMPLING = SamplingConfig()
_MAY_DIFFER = ("out", "resume", "ledger", "sampling.batch_size")  # none of them changes a figure
_ORDERS: dict[str, tuple[Order, ...]] = {"both": ORDERS, "AB": ("AB",), "BA": ("BA",)}


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
        for record in judge_and_score(judge, chunk, chunk_orders, samples, scorer, progress):
            if record.key not in records:
                records[record.key] = record
                if keep:
                    keep(record)
    complete = [records[p.id, order, k] for p in pairs for order in orders for k in range(samples)]
    complete = _score_again(scorer, complete, by_id)
    return Evaluation.of(complete, wrong_critique_threshold, resamples, seed)


def judge_and_score(
    judge: Judge,
    pairs: Sequence[Pair],
    orders: Sequence[Order] = ORDERS,
    samples: int = 1,
    scorer: CritiqueScorer | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Record]:
    """One record for each judgement, by pair, then order, then sample; arguments as of `evaluate_judge`."""
    by_id = {pair.id: pair for pair in pairs}
    judgements = judge.judge(pairs, orders, samples, progress)
    matches = _score(scorer, judgements, by_id)
    return [Record.of(j, by_id[j.pair_id], match) for j, match in zip(judgements, matches, strict=True)]


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
    return scorer.score(critiques, [as_shown(by_id[j.pair_id], j.order) for j in judgements])


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
        scorer: Compares critiques with the humans' (exact, lexical, embedding, learned, llm, or your
            own class_path).
        wrong_critique_threshold: A right verdict whose critique has a lower F1 counts as right by luck.
        resamples: Bootstrap resamples of the intervals.
        seed: Seed of the bootstrap and, unless data.seed is set, of everything random in loading the data.
        ledger: JSON-lines file that receives a row of figures; null for none.
        run_name: Name in reports and in the ledger; the folder's name by default.
        resume: Continue an interrupted run in out; its configuration must be equal.

    Raises:
        UserError: bad configuration or data, or a folder in use.
    """
    config = {**locals(), "run_name": run_name or Path(out).name}
    setup_logging()
    _check(samples, wrong_critique_threshold, resamples, sampling)
    # What can fail fails before there is a folder, which would be in the way of the next try.
    check_run(out, config, resume, _MAY_DIFFER)
    if ledger:
        check_appendable(ledger)
    judge_format = get_format(format, prompt_file, compat)
    drops: Counter = Counter()
    pairs = load_pairs(data, drops, seed)
    manifest = _manifest(data, pairs, drops, model, judge_format)
    critique_scorer = scorer.build() if scorer else None
    if scorer and not hasattr(critique_scorer, "score"):
        raise UserError(f"scorer: {scorer.class_path} has no method score, see nlhf.critique.scorers.CritiqueScorer")
    generator = make_generator(model, sampling)
    judge = Judge(judge_format, generator)
    shown = _ORDERS[orders]
    prompts = [judge_format.render(pair) for _, pair in shown_pairs(pairs, shown)]
    if isinstance(generator, TransformersGenerator):
        generator.encode(prompts)  # one that is too long would else end the run hours later

    folder = open_run(out, config, resume, _MAY_DIFFER)
    finished = (folder / "metrics.json").is_file()
    _keep_inputs(folder, manifest, pairs)
    judgements = folder / "judgements.jsonl"
    done = read_records(judgements) if judgements.is_file() else []
    owed = len(pairs) * len(shown) - len({(r.pair_id, r.order) for r in done})
    with tqdm(total=owed, desc="judging", unit="prompt", disable=None) as bar:  # None: silent without a terminal
        evaluation = evaluate_judge(
            judge,
            pairs,
            shown,
            samples,
            critique_scorer,
            wrong_critique_threshold,
            resamples,
            seed,
            done=done,
            keep=lambda record: append_jsonl(judgements, record.to_dict()),
            chunk_size=4 * sampling.batch_size,
            progress=bar.update,
        )
    # Written anew: in the order of the pairs, without a torn line, with failed scores made good.
    write_jsonl(judgements, (r.to_dict() for r in evaluation.records))
    if ledger and not finished:
        append(ledger, _ledger_row(plain(config), manifest, evaluation, len(pairs)))
    _write_results(folder, evaluation)
    warn(evaluation.metrics)
    _print_figures(evaluation.metrics, folder)
    return evaluation


def make_generator(model: ModelConfig, sampling: SamplingConfig) -> Generator:
    """The generator that a model's configuration asks for."""
    from nlhf.models import load_model, load_tokenizer

    return TransformersGenerator(load_model(model), load_tokenizer(model), sampling)


def warn(metrics: dict[str, Metric]) -> None:
    """Log what makes an accuracy misleading: replies cut off, verdicts missing, scores that failed."""
    truncation = metrics["truncation_rate"]
    if truncation.n and truncation.value > TRUNCATION_LIMIT:
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
    from nlhf.manifest import build_manifest
    from nlhf.models import model_hash

    return {
        "data": build_manifest(data, pairs, drops).to_dict(),
        "model_hash": model_hash(model.name, model.revision, model.trust_remote_code),
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
        old = read_json(path)
        what = {"data": "the data", "model_hash": "the model", "judge": "the judge's prompt or format"}
        changed = [text for key, text in what.items() if old.get(key) != manifest[key]]
        if changed:
            raise UserError(
                f"{folder} cannot be resumed: {' and '.join(changed)} changed since it began; choose another folder"
            )
    write_jsonl(folder / "pairs.jsonl", (p.to_dict() for p in pairs))
    write_json(path, manifest)


def _write_results(folder: Path, evaluation: Evaluation) -> None:
    write_json(
        folder / "metrics.json",
        {
            "metrics": {name: vars(m) for name, m in evaluation.metrics.items()},
            "subsets": {s: {name: vars(m) for name, m in found.items()} for s, found in evaluation.subsets.items()},
        },
    )
    write_report([load_run(folder)], folder)


def _ledger_row(config: dict[str, Any], manifest: dict[str, Any], evaluation: Evaluation, n_pairs: int) -> LedgerRow:
    return LedgerRow(
        run_name=config["run_name"],
        out=config["out"],
        source=config["data"]["source"],
        split=config["data"]["split"],
        data_n=n_pairs,
        data_hash=manifest["data"]["data_hash"],
        model=config["model"]["name"],
        model_hash=manifest["model_hash"],
        format=config["format"],
        prompt_hash=manifest["judge"]["prompt_hash"],
        seed=config["seed"],
        orders=list(_ORDERS[config["orders"]]),
        samples=config["samples"],
        sampling=config["sampling"],
        scorer=config["scorer"],
        n=len(evaluation.records),
        metrics=evaluation.metrics,
    )


def _print_figures(metrics: dict[str, Metric], folder: Path) -> None:
    for name, definition in definitions().items():
        if metrics[name].n:
            print(f"{definition.title:<28} {format_metric(metrics[name], definition.rate)}")
    print(f"report: {folder / 'report.html'}")
