"""Judge a data set and say how good the judge is: the verb `evaluate`.

Station of the path: Pair -> ... -> Verdict -> **metrics -> report**. `evaluate_judge` is the core, for use from Python;
`evaluate` wraps it in a run folder.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from nlhf.config import ClassSpec
from nlhf.critique.scorers import CritiqueScorer
from nlhf.errors import UserError
from nlhf.evaluation.figures import WRONG_CRITIQUE_THRESHOLD, definitions
from nlhf.evaluation.intervals import RESAMPLES, check_resamples
from nlhf.evaluation.measure import judge_and_score
from nlhf.evaluation.metrics import TRUNCATION_LIMIT, Metric
from nlhf.evaluation.probe import probe_pairs
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import Evaluation, Run, derive, further_figures, load_run, read_records
from nlhf.files import append_jsonl, check_appendable, write_json, write_jsonl, write_text
from nlhf.formats import FORMATS, JudgeFormat, get_format
from nlhf.generation import SamplingConfig, check_lengths
from nlhf.generation.backends import (
    PATIENCE,
    BackendConfig,
    make_generator,
    report_usage,
)
from nlhf.judge import ORDERS_BY_NAME, Judge, Mode, Order, VoteRule, check_mode, shown_pairs
from nlhf.ledger import LedgerRow, append, format_metric
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.presets import with_preset
from nlhf.report import write_report
from nlhf.roleplay.principles import PRINCIPLES_FILE
from nlhf.runs import alone, check_run, keep_manifest, open_run, plain
from nlhf.sources import DataConfig, load_pairs
from nlhf.sources.rewardbench2 import RATED

logger = logging.getLogger(__name__)

_DEFAULT_SAMPLING = SamplingConfig()
_DEFAULT_BACKEND = BackendConfig()
_SAME = {"data": "the data", "model_hash": "the model", "judge": "the judge's prompt or format"}
_MAY_DIFFER = ("out", "resume", "ledger", "sampling.batch_size", *PATIENCE)  # none of them changes a figure


def evaluate(
    model: ModelConfig,
    data: DataConfig,
    out: str,
    preset: str | None = None,
    format: str | None = None,
    prompt_file: str | None = None,
    compat: bool = False,
    principles: str | None = None,
    mode: Mode = "generate",
    sampling: SamplingConfig = _DEFAULT_SAMPLING,
    backend: BackendConfig = _DEFAULT_BACKEND,
    orders: Literal["both", "AB", "BA"] = "both",
    samples: int = 1,
    vote: VoteRule = "majority",
    scorer: ClassSpec | None = None,
    wrong_critique_threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    probe: bool = False,
    ledger: str | None = "runs/ledger.jsonl",
    run_name: str | None = None,
    resume: bool = False,
) -> Evaluation:
    """Judge a data set, in both orders, and report with intervals.

    Writes to ``out``: config.yaml, environment.json, manifest.json (data and model), pairs.jsonl, judgements.jsonl (one
    line a judgement; all figures derive from it), timing.jsonl, metrics.json, report.md and report.html; with a probe
    also probe.jsonl, with a server usage.jsonl (requests, failures, tokens and cost), in a format of HER-RM
    principles.yaml.

    Args:
        model: The judge's model.
        data: The pairs to judge.
        out: Folder of the run; it must not hold a run yet, unless resume is set.
        preset: A released judge: her-rm-32b, outcome-baseline-qwen-7b, rm-nlhf-qwen-7b, rm-nlhf-qwen-32b or
            sdrm-qwen3-4b-mask70. It fills in format and sampling where you do not set them, and on the command line
            and in a YAML the model too.
        format: Judge format: how pairs are put to the model and replies read; rm_nlhf, or the preset's, by default. An
            unknown name is answered with the list of all.
        prompt_file: Jinja template that replaces the format's own prompt.
        compat: Read replies as the format's upstream parser does, quirks included.
        principles: YAML file of principles in the place of the built-in ones; for formats her_rm and her_rm_teacher.
        mode: generate reads the verdict from a reply; probability compares the probabilities of the verdicts, without a
            critique; critique_probability does so after a critique that the judge writes first.
        sampling: How replies are drawn.
        backend: What runs the model: transformers, vLLM, or a server.
        orders: Orders in which each pair is shown: both, AB (as in the data) or BA (exchanged).
        samples: Replies to each prompt; more than one needs a temperature above 0.
        vote: How several verdicts on a pair become one: majority, or the sign of the mean strength.
        scorer: Compares critiques with the humans' (exact, lexical, embedding, learned, llm, or your
            own class_path).
        wrong_critique_threshold: A right verdict whose critique has a lower F1 counts as right by luck.
        resamples: Bootstrap resamples of the intervals.
        seed: Seed of the bootstrap and, unless data.seed is set, of everything random in loading the data.
        probe: Show some pairs also with one response empty, ":" or "Solution", and report apart whether it wins.
        ledger: JSON-lines file that receives a row of figures; null for none.
        run_name: Name in reports and in the ledger; the folder's name by default.
        resume: Continue an interrupted run in out; its configuration must be equal.

    Raises:
        UserError: bad configuration or data, or a folder in use.
        GenerationFailed: a server left prompts without a reply; all others are kept, and resume continues.
    """
    format, sampling = with_preset(preset, format, None if sampling is _DEFAULT_SAMPLING else sampling)
    config = {**locals(), "run_name": run_name or Path(out).name}
    setup_logging()
    _check(samples, wrong_critique_threshold, resamples, sampling)
    # What can fail fails before there is a folder, which would be in the way of the next try.
    check_run(out, config, resume, _MAY_DIFFER)
    if ledger:
        check_appendable(ledger)
    judge_format = get_format(format, prompt_file, compat, principles)
    shown = ORDERS_BY_NAME[orders]
    check_mode(mode, samples, judge_format, orders=shown)
    drops: Counter = Counter()
    pairs = load_pairs(data, drops, seed)
    _check_rated(pairs, judge_format)
    probed = probe_pairs(pairs, seed) if probe else []
    manifest = _manifest(data, pairs, drops, model, judge_format, backend)
    critique_scorer = scorer.build() if scorer else None
    if scorer and not hasattr(critique_scorer, "score"):
        raise UserError(f"scorer: {scorer.class_path} has no method score, see nlhf.critique.scorers.CritiqueScorer")
    generator = make_generator(model, sampling, backend)
    judge = Judge(judge_format, generator)
    check_mode(mode, samples, judge_format, generator)
    check_lengths(generator, mode, [judge_format.render(pair) for _, pair in shown_pairs([*pairs, *probed], shown)])

    folder = open_run(out, config, resume, _MAY_DIFFER)
    with alone(folder):
        finished = (folder / "metrics.json").is_file()
        keep_manifest(folder, manifest, _SAME)
        write_jsonl(folder / "pairs.jsonl", (p.to_dict() for p in pairs))
        if judge_format.principles:
            write_text(folder / PRINCIPLES_FILE, judge_format.principles.yaml)
        size = backend.chunk_size(sampling)
        try:
            path = folder / "judgements.jsonl"
            records = _judge_into(path, judge, pairs, shown, samples, critique_scorer, mode, size)
            probe_records = None
            if probe:
                probe_records = _judge_into(folder / "probe.jsonl", judge, probed, shown, samples, None, mode, size)
        finally:
            report_usage(generator, backend, folder)
        plain_config = plain(config)
        evaluation = derive(plain_config, pairs, records, probe_records)
        if ledger and not finished:
            append(ledger, _ledger_row(plain_config, manifest, evaluation, len(pairs)))
        write_json(folder / "metrics.json", evaluation.to_dict())
        run = load_run(folder)
        write_report([run], folder)
    warn(evaluation.metrics)
    _print_figures(run)
    return evaluation


def _judge_into(
    path: Path,
    judge: Judge,
    pairs: Sequence[Pair],
    orders: Sequence[Order],
    samples: int,
    scorer: CritiqueScorer | None,
    mode: Mode,
    size: int,
) -> list[Record]:
    """`judge_and_score`, where every judgement is in the file as soon as it is made, and those there are not remade."""
    done = read_records(path) if path.is_file() else []
    owed = len(pairs) * len(orders) - len({(r.pair_id, r.order) for r in done})

    def keep(records: list[Record], seconds: float) -> None:
        for record in records:
            append_jsonl(path, record.to_dict())
        append_jsonl(path.with_name("timing.jsonl"), {"judgements": len(records), "seconds": round(seconds, 3)})

    with tqdm(total=owed, desc="judging", unit="prompt", disable=None) as bar:  # None: silent without a terminal
        records = judge_and_score(judge, pairs, orders, samples, scorer, mode, done, keep, size, bar.update)
    # Written anew: in the order of the pairs, without a torn line, with failed scores made good.
    write_jsonl(path, (r.to_dict() for r in records))
    return records


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
    problems = sampling.problems(samples)
    if not 0 < threshold <= 1:
        problems.append(f"wrong_critique_threshold must lie in (0, 1], got {threshold}")
    if problems:
        raise UserError("; ".join(problems))
    check_resamples(resamples)


def _check_rated(pairs: Sequence[Pair], judge_format: JudgeFormat) -> None:
    if not judge_format.pointwise and any(RATED in pair.meta for pair in pairs):
        known = ", ".join(name for name in FORMATS if get_format(name).pointwise)
        raise UserError(
            "data.options.ties: the Ties subset of RewardBench 2 needs ratings of single answers, and format "
            f"{judge_format.name!r} compares two; leave the option out, or choose one of {known}"
        )


def _manifest(
    data: DataConfig,
    pairs: Sequence[Pair],
    drops: Counter,
    model: ModelConfig,
    judge_format: JudgeFormat,
    backend: BackendConfig,
) -> dict[str, Any]:
    from nlhf.manifest import build_manifest

    principles = judge_format.principles
    return {
        "data": build_manifest(data, pairs, drops).to_dict(),
        "model_hash": backend.weights_hash(model),
        "backend": backend.identity(model),
        "judge": {
            "format": judge_format.name,
            "prompt_hash": judge_format.prompt_hash,
            "ties": judge_format.ties,
            "compat": judge_format.compat,
            **({"principles": {"version": principles.version, "hash": principles.hash}} if principles else {}),
        },
    }


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
        orders=list(ORDERS_BY_NAME[config["orders"]]),
        samples=config["samples"],
        sampling=config["sampling"],
        scorer=config["scorer"],
        n=len(evaluation.records),
        metrics=evaluation.metrics,
    )


def _print_figures(run: Run) -> None:
    for name, definition in definitions().items():
        if run.metrics[name].n:
            print(f"{definition.title:<30} {format_metric(run.metrics[name], definition.rate)}")
    for row in further_figures(run):
        print(f"{row.title:<30} {row.text}")
    print(f"report: {run.folder / 'report.html'}")
