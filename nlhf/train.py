"""Reinforcement: train a judge by GRPO on its verdicts and, where humans wrote any, on its critiques.

Station of the path: Verdict -> rewards -> **trainer**. The algorithm is trl's GRPOTrainer; what is ours is the reward,
the order in which pairs are shown, validation, and exact resuming. Method: RM-NLHF (arXiv 2601.07349). Without
``process`` this is the outcome-only baseline: same data, same settings.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nlhf.config import ClassSpec, OptimizationConfig, Order, check_arguments
from nlhf.errors import UserError
from nlhf.files import write_json
from nlhf.formats import get_format
from nlhf.formats.base import JudgeFormat
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.rewards import JudgeReward, RewardConfig
from nlhf.runs import open_run
from nlhf.sources import DataConfig
from nlhf.training import (
    MetricsLog,
    Validation,
    ValidationConfig,
    Watch,
    announce_budget,
    processes,
    run_trainer,
    sample_writer,
    setup_logging,
    training_pairs,
)

logger = logging.getLogger(__name__)


@dataclass
class GRPOSettings(OptimizationConfig):
    """Settings of GRPO; names are those of trl.GRPOConfig, values those of the paper's public 7B script."""

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

    beta: float = 0.001
    """Weight of the KL term (k3 estimator) against the start model; 0 does without the start model."""

    epsilon: float = 0.2
    """Clipping of the probability ratio."""

    loss_type: str = "dapo"
    """Normalisation of the loss: dapo is the mean over all tokens of the step, as in the paper."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_generations < 2:
            raise UserError(
                f"grpo.num_generations must be at least 2 (a group needs a baseline), got {self.num_generations}"
            )
        if self.temperature <= 0:
            raise UserError(f"grpo.temperature must be positive (rollouts must differ), got {self.temperature}")

    def check_batch(self, processes: int) -> None:
        """Make sure that whole groups fit into an optimiser step.

        Raises:
            UserError: they do not; valid values are suggested.
        """
        rollouts = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes
        if rollouts % self.num_generations == 0:
            return
        groups = [n for n in range(2, rollouts + 1) if rollouts % n == 0]
        per_device = self.per_device_train_batch_size
        accumulations = [
            n for n in range(1, 4 * self.num_generations) if per_device * processes * n % self.num_generations == 0
        ]
        raise UserError(
            f"{rollouts} rollouts a step (grpo.per_device_train_batch_size {per_device} x "
            f"grpo.gradient_accumulation_steps {self.gradient_accumulation_steps} x {processes} processes) cannot be "
            f"divided into groups of grpo.num_generations {self.num_generations}. Either set num_generations to one of "
            f"{groups}, or gradient_accumulation_steps to one of {accumulations[:4]}"
        )


@dataclass
class SamplesConfig:
    """Which rollouts are kept for reading, in ``samples.jsonl``."""

    every: int = 10
    """Steps between samples."""

    count: int = 8
    """Rollouts of such a step."""


def train(
    model: ModelConfig,
    data: list[DataConfig],
    out: str,
    grpo: GRPOSettings,
    reward: RewardConfig | None = None,
    process: ClassSpec | None = None,
    format: str = "rm_nlhf",
    prompt_file: str | None = None,
    order: Order = "random",
    validation: ValidationConfig | None = None,
    samples: SamplesConfig | None = None,
    seed: int = 0,
    resume: bool = False,
    dry_run: bool = False,
) -> Path:
    """Train a judge by GRPO; without ``process`` only verdict and format are rewarded (outcome-only).

    Args:
        model: The judge to start from, usually the result of a cold start.
        data: Data sets to train on; pairs without a human critique earn the outcome reward alone.
        out: Folder of the run.
        grpo: Settings of GRPO.
        reward: Weights and limits of the reward.
        process: The process reward, for example critique (agreement with the human critique) with a scorer.
        format: Judge format.
        prompt_file: Jinja template that replaces the format's own prompt.
        order: random exchanges A and B by a seeded coin; both trains on both orders.
        validation: Held-out pairs to choose the best model by.
        samples: Which rollouts to keep for reading.
        seed: Seed of the order, the shuffling and everything random in training.
        resume: Continue an interrupted run in ``out``.
        dry_run: Load and check everything but the weights, print the budget, and stop.
    """
    config = {k: v for k, v in locals().items() if k != "dry_run"}
    reward, samples = reward or RewardConfig(), samples or SamplesConfig()
    setup_logging()
    judge_format = get_format(format, prompt_file)
    prepared = training_pairs(data, judge_format, order, seed)
    held_out = training_pairs([validation.data], judge_format, "given", seed) if validation else None
    process_reward = process.build() if process else None
    if process_reward is not None and not any(p.has_critique for p in prepared.pairs):
        raise UserError(
            f"process: {process.class_path} is configured but none of the {len(prepared.pairs)} training pairs has a "
            "human critique, so it would never learn or reward anything. Check field 'critiques' of the data and "
            "data.labelled_fraction, or leave out process for the outcome-only baseline"
        )
    grpo.check_batch(processes())
    rollouts = len(prepared.pairs) * grpo.num_generations
    announce_budget(
        model,
        grpo,
        rollouts,
        grpo.max_prompt_length,
        grpo.max_completion_length,
        generates=True,
        reference=grpo.beta > 0,
    )
    if dry_run:
        return Path(out)

    from trl import GRPOConfig

    from nlhf.models import load_tokenizer, resolve

    check_arguments(grpo.extra, GRPOConfig, "grpo")
    tokenizer = load_tokenizer(model)
    pairs, too_long = _fitting(prepared.pairs, judge_format, tokenizer, grpo.max_prompt_length)
    folder = open_run(out, config, resume)
    write_json(folder / "manifest.json", {"data": prepared.manifests, "prompts": len(pairs), "too_long": too_long})
    judge_reward = JudgeReward(
        pairs, judge_format.parse, reward, process_reward, record=sample_writer(folder, samples.every, samples.count)
    )
    trainer = make_trainer(resolve(model.name), model, tokenizer, judge_format, pairs, judge_reward, grpo, folder, seed)
    log = MetricsLog(folder)
    trainer.add_callback(log)
    trainer.add_callback(Watch())
    if validation and held_out:
        watcher = Validation(
            validation, folder, judge_format, held_out.pairs, tokenizer, grpo.max_completion_length, log
        )
        watcher.trainer = trainer
        trainer.add_callback(watcher)
    run_trainer(trainer, folder, resume)
    return folder


def _fitting(pairs: Sequence[Pair], judge_format: JudgeFormat, tokenizer: Any, limit: int) -> tuple[list[Pair], int]:
    """The pairs whose prompts are short enough, and how many are not."""
    from nlhf.models import render_chat

    kept = [p for p in pairs if len(render_chat(tokenizer, judge_format.render(p))) <= limit]
    dropped = len(pairs) - len(kept)
    if not kept:
        raise UserError(f"no prompt fits into grpo.max_prompt_length = {limit} tokens; raise it")
    if dropped:
        logger.warning("left out %d of %d prompts longer than grpo.max_prompt_length = %d", dropped, len(pairs), limit)
    return kept, dropped


def make_trainer(
    model_path: str,
    model: ModelConfig,
    tokenizer: Any,
    judge_format: JudgeFormat,
    pairs: Sequence[Pair],
    judge_reward: JudgeReward,
    grpo: GRPOSettings,
    folder: Path,
    seed: int,
) -> Any:
    """Trl's GRPOTrainer on judge prompts, with a sampler that survives resuming.

    trl draws a new permutation from one running generator at the start of every epoch, so a run resumed after an epoch
    boundary would replay the first permutation. Ours depends on seed and epoch alone.
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import RepeatSampler

    from nlhf.models import safe_messages

    class EpochSampler(RepeatSampler):
        def set_epoch(self, epoch: int) -> None:
            self.generator.manual_seed(self.seed + epoch)

    class JudgeTrainer(GRPOTrainer):
        def _get_train_sampler(self, dataset=None):
            sampler = super()._get_train_sampler(dataset)
            sampler.__class__ = EpochSampler
            return sampler

    prompts = [safe_messages(tokenizer, judge_format.render(p)) for p in pairs]
    rows = Dataset.from_dict({"prompt": prompts, "pair_index": list(range(len(pairs)))})
    arguments = grpo.arguments()
    arguments.pop("max_prompt_length")
    on_cpu = not torch.cuda.is_available()
    dtype = {"auto": "float32" if on_cpu else "bfloat16"}.get(model.dtype, model.dtype)
    init = {"dtype": dtype, "attn_implementation": model.attn_implementation, "revision": model.revision}
    defaults = {
        "output_dir": str(folder),
        "seed": seed,
        "bf16": not on_cpu and dtype == "bfloat16",
        "report_to": "none",
        "remove_unused_columns": False,
        "model_init_kwargs": {k: v for k, v in init.items() if v is not None},
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        settings = GRPOConfig(**defaults | arguments)
    except (ValueError, TypeError) as error:
        raise UserError(f"grpo: {error}") from error
    return JudgeTrainer(
        model=model_path,
        reward_funcs=judge_reward,
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
    )
