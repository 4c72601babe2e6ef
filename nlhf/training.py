"""What cold start and reinforcement share: training pairs, settings, the budget, checkpoints and resuming.

Station of the path: Pair -> **trainer**. The trainers themselves are those of transformers and trl; everything here and
in `nlhf.callbacks` is preparation and watching.
"""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from nlhf.config import ClassSpec, OptimizationConfig, Presentation, check_optimizer
from nlhf.errors import UserError
from nlhf.files import read_jsonl, write_json, write_jsonl
from nlhf.formats.base import JudgeFormat
from nlhf.generation import SamplingConfig
from nlhf.manifest import build_manifest
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.runs import MAY_DIFFER, alone, open_run
from nlhf.sampler import group_size, put_in_order
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
    """Scores critiques against the humans' (exact, lexical, embedding, learned, llm, or your own)."""

    batch_size: int = 32
    """Prompts that are generated for at once."""

    def __post_init__(self):
        for name in ("every", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"validation.{name} must be at least 1, got {getattr(self, name)}")
        if self.metric == "critique_f1" and self.scorer is None:
            raise UserError("validation.metric is critique_f1 but validation.scorer is not set")


@dataclass
class RolloutSettings(OptimizationConfig):
    """Settings of trainers that draw rollouts; a class of its own for each method says how a group is used."""

    section: ClassVar[str]
    """Name of these settings in the YAML, for messages."""

    fewest: ClassVar[int] = 1
    """Least number of rollouts of a prompt."""

    num_generations: int = 8
    """Rollouts of each prompt: the group whose mean is the baseline."""

    temperature: float = 0.7
    """Sampling temperature of rollouts."""

    top_p: float = 1.0
    """Nucleus of the sampling."""

    max_prompt_length: int = 6144
    """Longest prompt in tokens; longer ones are left out and counted, never cut."""

    max_completion_length: int = 8192
    """Token limit of a rollout."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_generations < self.fewest:
            reason = " (a group needs a baseline)" if self.fewest == 2 else ""
            raise UserError(
                f"{self.section}.num_generations must be at least {self.fewest}{reason}, got {self.num_generations}"
            )
        for name in ("max_prompt_length", "max_completion_length"):
            if getattr(self, name) < 1:
                raise UserError(f"{self.section}.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{self.section}.top_p must lie in (0, 1], got {self.top_p}")
        variables = self.extra.get("chat_template_kwargs")
        if isinstance(variables, dict):  # else its type will be refused
            try:
                SamplingConfig(chat_template_kwargs=variables)
            except UserError as error:
                raise UserError(str(error).replace("sampling.", f"{self.section}.extra.")) from None
        if self.temperature <= 0:
            raise UserError(
                f"{self.section}.temperature must be positive (rollouts must differ), got {self.temperature}"
            )

    def check_batch(self, processes: int, order: Presentation, prompts: int) -> None:
        """Make sure that a step has whole groups, both orders of a pair if asked for, and enough prompts.

        Args:
            processes: How many train together.
            order: How pairs are shown.
            prompts: How many there are.

        Raises:
            UserError: it has not; valid values are suggested.
        """
        name, per_device, accumulation = (
            self.section,
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
        )
        rollouts = per_device * accumulation * processes
        shape = (
            f"{rollouts} rollouts a step ({name}.per_device_train_batch_size {per_device} x "
            f"{name}.gradient_accumulation_steps {accumulation} x {processes} processes)"
        )
        if rollouts % self.num_generations:
            groups = [n for n in range(self.fewest, rollouts + 1) if rollouts % n == 0]
            unit = self.num_generations // math.gcd(self.num_generations, per_device * processes)
            raise UserError(
                f"{shape} cannot be divided into groups of {name}.num_generations {self.num_generations}. Either set "
                f"num_generations to one of {groups}, or gradient_accumulation_steps to a multiple of {unit}"
            )
        needed = rollouts // self.num_generations
        if needed % group_size(order):
            raise UserError(
                f"{shape} are {needed} prompts, but order: both needs an even number so that both orders of a pair "
                "share a step; double gradient_accumulation_steps"
            )
        if prompts < needed:
            raise UserError(
                f"{shape} need {needed} prompts, but there are only {prompts}. Lower the batch, raise "
                "num_generations, or add data"
            )


@dataclass
class TrainingData:
    """Pairs ready to train on, with what was left out and why."""

    pairs: list[Pair]
    manifests: list[dict[str, Any]] = field(default_factory=list)


def training_pairs(
    sources: Sequence[DataConfig], judge_format: JudgeFormat, order: Presentation, seed: int
) -> TrainingData:
    """Load, check and order the pairs of a training run.

    Raises:
        UserError: the format gives no verdict, a pair has no label, two sources hold the same pair id, or nothing is
            left.
    """
    require_verdicts(judge_format, "format")
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
                f"{config.path or config.source}: pair {unlabelled.id!r} has no label; training needs one for each "
                "pair. Set field 'label', or leave such pairs out"
            )
        manifests.append(build_manifest(config, loaded, drops).to_dict())
        pairs += loaded
    if not pairs:
        raise UserError("data: no pair is left to train on; see the reasons by `nlhf data check`")
    repeated = [name for name, n in Counter(p.id for p in pairs).items() if n > 1]
    if repeated:
        raise UserError(f"data: pair id {repeated[0]!r} occurs in two sources; ids must be unique within a run")
    return TrainingData(put_in_order(pairs, order, seed), manifests)


def require_verdicts(judge_format: JudgeFormat, where: str) -> None:
    """Raise `UserError` for a format that rates one response at a time: no reply of its says which one is better."""
    if judge_format.pointwise:
        raise UserError(
            f"{where}: {judge_format.name!r} shows one response and rates it, so a reply has no verdict to learn from; "
            "choose a format that shows both"
        )


def announce_budget(
    model: ModelConfig,
    settings: OptimizationConfig,
    rows: int,
    prompt_tokens: int,
    completion_tokens: int,
    generates: bool,
    reference: bool,
    logit_positions: int | None = None,
) -> None:
    """Print what memory and tokens a run needs, from the model's configuration alone.

    Args:
        model: The model.
        settings: Batch sizes and steps.
        rows: Sequences in one pass over the data (rollouts, for reinforcement).
        prompt_tokens: Longest prompt.
        completion_tokens: Longest completion; its positions have logits.
        generates: The completions are sampled during training.
        reference: A copy of the model is kept.
        logit_positions: Positions whose logits are held at once; null for all of a batch.

    Raises:
        UserError: the completion alone fills the model's context.
    """
    from nlhf.models import load_config

    config = load_config(model.name, model.revision, model.trust_remote_code)
    window = getattr(config.get_text_config(), "max_position_embeddings", None)
    if window and completion_tokens >= window:
        raise UserError(
            f"a completion of {completion_tokens} tokens leaves no room for a prompt in the model's context of {window}"
        )
    if os.environ.get("RANK", "0") != "0":
        return
    import torch
    from rich.console import Console

    from nlhf.budget import Workload, estimate

    on_gpu = torch.cuda.is_available()
    weights, autocast = training_dtype(model)
    step = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * processes()
    steps = settings.max_steps if settings.max_steps > 0 else math.ceil(rows / step * settings.num_train_epochs)
    work = Workload(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        per_device_batch=settings.per_device_train_batch_size,
        gradient_accumulation=settings.gradient_accumulation_steps,
        steps=steps,
        processes=processes(),
        sharding=sharding(),
        weights_dtype=weights,
        compute_dtype="bfloat16" if autocast else weights,
        reference=reference,
        logit_positions=logit_positions,
        generates=generates,
        gradient_checkpointing=settings.gradient_checkpointing,
        device_memory=torch.cuda.get_device_properties(0).total_memory if on_gpu else None,
    )
    console = Console(stderr=True)
    scale = f"{steps} steps of {step} sequences on {processes()} process(es), weights in {weights}"
    console.print(f"{model.name}: {scale}", soft_wrap=True, markup=False, highlight=False)
    console.print(estimate(config, work).render())


def training_dtype(model: ModelConfig) -> tuple[str, bool]:
    """The number format of trained weights, and whether to compute in bfloat16.

    ``auto`` keeps weights in float32, also on a GPU, where the model computes in bfloat16: steps of a learning rate
    like 1e-6 are smaller than what a weight in bfloat16 can resolve, and would be lost.
    """
    import torch

    if model.dtype == "float16":
        raise UserError("model.dtype: float16 cannot be trained without loss scaling; use auto, float32 or bfloat16")
    weights = "float32" if model.dtype == "auto" else model.dtype
    return weights, torch.cuda.is_available() and model.dtype in ("auto", "bfloat16")


def trainer_arguments(folder: Path, seed: int, model: ModelConfig, settings: OptimizationConfig) -> dict[str, Any]:
    """Arguments of transformers.TrainingArguments that both kinds of training share; the settings win."""
    import torch

    on_cpu = not torch.cuda.is_available()
    return {
        "output_dir": str(folder),
        "seed": seed,
        "bf16": training_dtype(model)[1],
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "remove_unused_columns": False,  # ours are read by the reward or the loss
        "logging_nan_inf_filter": False,  # it would show the last good loss in place of NaN
        "report_to": "none",
        **settings.arguments(),
    }


def loading_arguments(model: ModelConfig) -> dict[str, Any]:
    """Arguments of trl's configurations by which its trainers load a model themselves."""
    init = {
        "dtype": training_dtype(model)[0],
        "attn_implementation": model.attn_implementation,
        "revision": model.revision,
    }
    return {
        "model_init_kwargs": {k: v for k, v in init.items() if v is not None},
        "trust_remote_code": model.trust_remote_code,
    }


def configured(config_class: type, arguments: Mapping[str, Any], section: str) -> Any:
    """A trainer's own configuration; what it has against the values is a `UserError` that names the section."""
    try:
        settings = config_class(**arguments)
        check_optimizer(settings)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"{section}: {error}") from error
    return settings


def processes() -> int:
    """How many processes train together, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharding() -> Literal["none", "zero2", "full"]:
    """How accelerate's launcher was told to split the model's state."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return "full"
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    return {"2": "zero2", "3": "full"}.get(stage, "none")


def for_training(model: ModelConfig) -> ModelConfig:
    """The configuration to load a model with when it is to be trained."""
    return replace(model, dtype=training_dtype(model)[0])


def begin_run(
    trainer: Any,
    out: str,
    config: Mapping[str, Any],
    resume: bool,
    manifest: Mapping[str, Any],
    may_differ: Sequence[str] = MAY_DIFFER,
) -> Path:
    """Open the folder of a run and write its manifest, in the first process.

    Everything that can fail for a reason of the user's comes before it: a folder that is begun would be in the way of
    the next try.
    """
    if trainer.accelerator.is_main_process:
        folder = open_run(out, config, resume, may_differ)
        write_json(folder / "manifest.json", manifest)
    trainer.accelerator.wait_for_everyone()
    return Path(out)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None.

    A checkpoint that a kill left half-written has no readable ``trainer_state.json`` (it is written last) and is passed
    over.
    """
    return max((p for p in folder.glob("checkpoint-*") if _complete(p)), key=_step, default=None)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])


def _complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # Of several processes each writes the state of its own random numbers, some perhaps after the first is done.
    return processes() == 1 or all((checkpoint / f"rng_state_{rank}.pth").is_file() for rank in range(processes()))


def forget_after(folder: Path, step: int) -> None:
    """Cut logs back to what was known after ``step`` steps: a resumed run repeats what an interrupted one did then.

    A row of metrics (and a held-out response) comes after its step, a sample (numbered from 0) is drawn before the step
    is taken.
    """
    for name, end in (("metrics.jsonl", step + 1), ("held_out.jsonl", step + 1), ("samples.jsonl", step)):
        path = folder / name
        if path.is_file():
            write_jsonl(path, [row for _, row in read_jsonl(path, skip_torn=True) if row.get("step", 0) < end])


def run_trainer(trainer: Any, folder: Path, resume: bool) -> None:
    """Train to the end, from the last checkpoint if there is one to resume, and save the model in ``final/``."""
    from nlhf.callbacks import save_whole

    if resume and (folder / "final").is_dir():
        logger.info("%s is finished; nothing is left to do", folder)
        return
    with alone(folder) if trainer.accelerator.is_main_process else nullcontext():
        checkpoint = last_checkpoint(folder) if resume else None
        if trainer.accelerator.is_main_process:
            forget_after(folder, _step(checkpoint) if checkpoint else -1)
            if checkpoint:
                logger.info("resuming from %s", checkpoint)
        trainer.accelerator.wait_for_everyone()
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        save_whole(trainer, folder / "final")
