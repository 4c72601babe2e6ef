"""What cold start and reinforcement share: training pairs, validation with the best model kept, logs, resume.

Station of the path: Pair -> **trainer**. The trainers themselves are those of transformers and trl; everything here is
preparation and callbacks.
"""

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from nlhf.config import ClassSpec, OptimizationConfig, Order
from nlhf.errors import UserError
from nlhf.files import append_jsonl, read_jsonl, write_json, write_jsonl
from nlhf.formats.base import JudgeFormat
from nlhf.judge import Judge, shown_pairs
from nlhf.manifest import build_manifest
from nlhf.models import ModelConfig
from nlhf.pairs import Pair, swap_at_random
from nlhf.sources import DataConfig, load_pairs

logger = logging.getLogger(__name__)


@dataclass
class ValidationConfig:
    """Judging held-out pairs during training, to keep the best model."""

    data: DataConfig
    """The held-out pairs."""

    every: int = 20
    """Steps between validations; the first is before training, the last after it."""

    metric: Literal["accuracy", "critique_f1", "position_consistency"] = "accuracy"
    """What the best model is chosen by; the earlier of equals wins."""

    scorer: ClassSpec | None = None
    """Scores critiques against the humans' (exact, lexical, embedding, or your own)."""

    batch_size: int = 32
    """Prompts that are generated for at once."""

    def __post_init__(self):
        if self.every < 1:
            raise UserError(f"validation.every must be at least 1, got {self.every}")
        if self.metric == "critique_f1" and self.scorer is None:
            raise UserError("validation.metric is critique_f1 but validation.scorer is not set")


@dataclass
class TrainingData:
    """Pairs ready to train on, with what was left out and why."""

    pairs: list[Pair]
    manifests: list[dict[str, Any]] = field(default_factory=list)


def training_pairs(sources: Sequence[DataConfig], judge_format: JudgeFormat, order: Order, seed: int) -> TrainingData:
    """Load, check and order the pairs of a training run.

    Raises:
        UserError: a pair has no label, two sources hold the same pair id, or nothing is left.
    """
    if not sources:
        raise UserError("data: name at least one source to train on")
    pairs: list[Pair] = []
    manifests = []
    for config in sources:
        drops: Counter = Counter()
        loaded = load_pairs(config, drops, seed)
        if not judge_format.ties:
            ties = sum(p.label == "tie" for p in loaded)
            drops.update({f"tie (format {judge_format.name} has none)": ties} if ties else {})
            loaded = [p for p in loaded if p.label != "tie"]
        unlabelled = next((p for p in loaded if p.label is None), None)
        if unlabelled:
            raise UserError(
                f"source {config.source!r}: pair {unlabelled.id!r} has no label; training needs one for each pair. "
                "Set field 'label', or leave such pairs out"
            )
        manifests.append(build_manifest(config, loaded, drops).to_dict())
        pairs += loaded
    if not pairs:
        raise UserError("data: no pair is left to train on; see the reasons by `nlhf data check`")
    repeated = [name for name, n in Counter(p.id for p in pairs).items() if n > 1]
    if repeated:
        raise UserError(f"data: pair id {repeated[0]!r} occurs in two sources; ids must be unique within a run")
    return TrainingData(put_in_order(pairs, order, seed), manifests)


def announce_budget(
    model: ModelConfig,
    settings: OptimizationConfig,
    rows: int,
    prompt_tokens: int,
    completion_tokens: int,
    generates: bool,
    reference: bool,
) -> None:
    """Print what memory and tokens a run needs, from the model's configuration alone.

    Args:
        model: The model.
        settings: Batch sizes and steps.
        rows: Sequences in one pass over the data (rollouts, for reinforcement).
        prompt_tokens: Longest prompt.
        completion_tokens: Longest completion; its positions have logits.
        generates: The completions are sampled during training.
        reference: A frozen copy of the model is kept.
    """
    import torch
    from rich.console import Console

    from nlhf.budget import Workload, estimate
    from nlhf.models import load_config, pick_dtype

    on_gpu = torch.cuda.is_available()
    dtype = str(pick_dtype(model.dtype, "cuda" if on_gpu else "cpu")).removeprefix("torch.")
    step = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * processes()
    steps = settings.max_steps if settings.max_steps > 0 else math.ceil(rows / step * settings.num_train_epochs)
    work = Workload(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        per_device_batch=settings.per_device_train_batch_size,
        gradient_accumulation=settings.gradient_accumulation_steps,
        steps=steps,
        processes=processes(),
        sharding=_sharding(),
        weights_dtype=dtype,
        compute_dtype=dtype,
        reference=reference,
        generates=generates,
        gradient_checkpointing=settings.gradient_checkpointing,
        device_memory=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
    )
    console = Console(stderr=True)
    console.print(f"{model.name}: {steps} steps of {step} sequences on {processes()} process(es), {dtype}")
    console.print(estimate(load_config(model.name, model.revision, model.trust_remote_code), work).render())


def processes() -> int:
    """How many processes train together, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _sharding() -> str:
    """How accelerate's launcher was told to split the model's state."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return "full"
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    return {"2": "zero2", "3": "full"}.get(stage, "none")


def put_in_order(pairs: Sequence[Pair], order: Order, seed: int) -> list[Pair]:
    """Pairs as a judge will see them: exchanged by a seeded coin, in both orders (side by side), or as given."""
    if order == "random":
        return swap_at_random(pairs, seed)
    if order == "both":
        return [shown for _, shown in shown_pairs(pairs)]
    return list(pairs)


class MetricsLog(TrainerCallback):
    """Writes every row of metrics to ``metrics.jsonl``, and nothing else writes there."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"
        self.started = time.perf_counter()

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Append a row."""
        append_jsonl(self.path, {"step": step, "seconds": round(time.perf_counter() - self.started, 2), **row})

    def on_log(self, args, state, control, logs=None, **_):
        """Called by the trainer with its metrics."""
        if state.is_world_process_zero and logs:
            self.write(state.global_step, logs)


class Watch(TrainerCallback):
    """Warns of what ruins a run silently, at most once in ``patience`` rows of metrics for each kind."""

    def __init__(self, patience: int = 25):
        self.patience = patience
        self._quiet_until: Counter = Counter()
        self._rows = 0
        self._best_format_rate = 0.0

    def on_log(self, args, state, control, logs=None, **_):
        """Look at the newest metrics."""
        logs = logs or {}
        self._rows += 1
        truncated = logs.get("completions/clipped_ratio")
        if truncated is not None and truncated > 0.2:
            self._warn(
                "truncation",
                f"{truncated:.0%} of the replies hit the token limit and most of them lose their verdict; raise "
                "grpo.max_completion_length",
            )
        idle = logs.get("frac_reward_zero_std")
        if idle is not None and idle > 0.8:
            self._warn(
                "zero variance",
                f"in {idle:.0%} of the groups all rewards are equal, so they teach nothing (a loss near 0 is then "
                "expected); use harder pairs, a higher temperature or more rollouts a prompt",
            )
        rate = logs.get("format_rate")
        if rate is not None:
            self._best_format_rate = max(self._best_format_rate, rate)
            if rate < 0.5 * self._best_format_rate:
                self._warn(
                    "format collapse",
                    f"only {rate:.0%} of the replies are well-formed, down from {self._best_format_rate:.0%}; lower "
                    "the learning rate or raise grpo.beta, and use the best model rather than the last",
                )
        for name in ("loss", "grad_norm"):
            value = logs.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                raise FloatingPointError(f"step {state.global_step}: {name} is {value}; lower the learning rate")

    def _warn(self, kind: str, message: str) -> None:
        if self._rows >= self._quiet_until[kind]:
            self._quiet_until[kind] = self._rows + self.patience
            logger.warning("%s: %s", kind, message)


class Validation(TrainerCallback):
    """Judges held-out pairs greedily in both orders now and then, and keeps the best model in ``best/``.

    Chance is not touched, so a run trains the same with and without it.
    """

    def __init__(
        self,
        config: ValidationConfig,
        folder: Path,
        judge_format: JudgeFormat,
        pairs: Sequence[Pair],
        tokenizer: Any,
        max_new_tokens: int,
        log: MetricsLog,
    ):
        from nlhf.generation import SamplingConfig

        self.config, self.folder, self.format, self.pairs = config, folder, judge_format, list(pairs)
        self.tokenizer, self.log = tokenizer, log
        self.sampling = SamplingConfig(max_new_tokens=max_new_tokens, batch_size=config.batch_size)
        self.scorer = config.scorer.build() if config.scorer else None
        self.trainer: Any = None  # set once the trainer exists

    def on_train_begin(self, args, state, control, **_):
        """The judge before training, unless it was judged before an interruption."""
        if state.global_step == 0:
            self._validate(0)

    def on_step_end(self, args, state, control, **_):
        """Validate every so many steps and after the last."""
        if state.global_step % self.config.every == 0 or state.global_step == state.max_steps:
            self._validate(state.global_step)

    def _validate(self, step: int) -> None:
        from nlhf.metrics import compute

        records = self._records()
        metrics = {name: metric.value for name, metric in compute(records, resamples=0).items()}
        accelerator = self.trainer.accelerator
        value = metrics[self.config.metric]
        best = self._best()
        improved = value is not None and (best is None or value > best)
        if accelerator.is_main_process:
            self.log.write(step, {f"validation/{k}": v for k, v in metrics.items() if v is not None})
            logger.info("step %d: validation %s", step, _brief(metrics))
        if improved:
            self.trainer.save_model(str(self.folder / "best"))
            if accelerator.is_main_process:
                write_json(self.folder / "best" / "validation.json", {"step": step, **metrics})
        accelerator.wait_for_everyone()

    def _best(self) -> float | None:
        path = self.folder / "best" / "validation.json"
        return json.loads(path.read_text())[self.config.metric] if path.is_file() else None

    def _records(self) -> list:
        """Records of all pairs; each process judges its share."""
        from accelerate.utils import gather_object
        from trl.models import unwrap_model_for_generation

        from nlhf.generation import TransformersGenerator
        from nlhf.metrics import Record

        accelerator = self.trainer.accelerator
        share = self.pairs[accelerator.process_index :: accelerator.num_processes]
        with unwrap_model_for_generation(self.trainer.model_wrapped, accelerator) as model:
            judge = Judge(self.format, TransformersGenerator(model, self.tokenizer, self.sampling))
            judgements = judge.judge(share)
        shown = [pair for _, pair in shown_pairs(share)]
        matches = (
            self.scorer.score([j.verdict.critique for j in judgements], shown) if self.scorer else [None] * len(shown)
        )
        by_id = {pair.id: pair for pair in share}
        records = [Record.of(j, by_id[j.pair_id], m) for j, m in zip(judgements, matches, strict=True)]
        return gather_object(records)


def _brief(metrics: dict[str, float | None]) -> str:
    names = ("accuracy", "parse_rate", "position_consistency", "critique_f1", "wrong_critique_rate")
    return ", ".join(f"{n} {metrics[n]:.3f}" for n in names if metrics.get(n) is not None)


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a run, or None.

    A checkpoint that a kill left half-written has no ``trainer_state.json`` (it is written last) and is passed over.
    """
    found = [p for p in folder.glob("checkpoint-*") if (p / "trainer_state.json").is_file()]
    return str(max(found, key=lambda p: int(p.name.rsplit("-", 1)[1]))) if found else None


def forget_after(folder: Path, step: int) -> None:
    """Cut logs back to what was known at ``step``: a resumed run repeats what an interrupted one did after it."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = folder / name
        if path.is_file():
            write_jsonl(path, [row for _, row in read_jsonl(path, skip_torn=True) if row.get("step", 0) <= step])


def run_trainer(trainer: Any, folder: Path, resume: bool) -> None:
    """Train to the end, from the last checkpoint if there is one to resume, and save the model in ``final/``."""
    checkpoint = last_checkpoint(folder) if resume else None
    if trainer.accelerator.is_main_process:
        forget_after(folder, int(checkpoint.rsplit("-", 1)[1]) if checkpoint else -1)
        if checkpoint:
            logger.info("resuming from %s", checkpoint)
    trainer.accelerator.wait_for_everyone()
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "final"))


def sample_writer(folder: Path, every: int, groups: int) -> Callable[[int, list[dict[str, Any]]], None]:
    """A function that writes the first replies of every so many steps to ``samples.jsonl``."""

    def record(step: int, rows: list[dict[str, Any]]) -> None:
        if step % every == 0:
            for row in rows[:groups]:
                append_jsonl(folder / "samples.jsonl", {"step": step, **row})

    return record


def setup_logging() -> None:
    """Progress and warnings on standard error, in one line each."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    for noisy in ("httpx", "filelock", "urllib3", "datasets", "matplotlib", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
