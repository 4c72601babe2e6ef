"""Reinforcement: train a judge by GRPO on its verdicts and, where humans wrote any, on its critiques.

Station of the path: Verdict -> rewards -> **trainer**. The algorithm is trl's GRPOTrainer; what is ours is the reward,
the order in which pairs are shown, validation, and exact resuming. Method: RM-NLHF (arXiv 2601.07349). Without
``process`` this is the outcome-only baseline: same data, same settings.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from nlhf.config import ClassSpec, Presentation
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.formats.base import JudgeFormat
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.rewards import JudgeReward, LearningReward, RewardConfig
from nlhf.runs import check_run
from nlhf.sampler import ShuffledSampler, group_size
from nlhf.sources import DataConfig
from nlhf.training import (
    RolloutSettings,
    ValidationConfig,
    announce_budget,
    begin_run,
    configured,
    loading_arguments,
    processes,
    run_trainer,
    trainer_arguments,
    training_pairs,
)

logger = logging.getLogger(__name__)

PROCESS_REWARD_FILE = "process_reward.pt"


@dataclass
class GRPOSettings(RolloutSettings):
    """Settings of GRPO; names are those of trl.GRPOConfig, values those of the paper's public 7B script."""

    section: ClassVar[str] = "grpo"
    fewest: ClassVar[int] = 2  # a group needs a baseline

    beta: float = 0.001
    """Weight of the KL term (k3 estimator) against the start model; 0 does without the start model."""

    epsilon: float = 0.2
    """Clipping of the probability ratio."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"] = "dapo"
    """Normalisation of the loss: dapo is the mean over all tokens of the step, as in the paper."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not at all."""

    def __post_init__(self):
        super().__post_init__()
        if self.beta < 0:
            raise UserError(f"grpo.beta must not be negative (0 does without the start model), got {self.beta}")

    def generated(self, processes: int) -> int:
        """Rollouts that are generated at once, over all processes."""
        steps = self.extra.get("steps_per_generation", self.gradient_accumulation_steps)
        return self.extra.get("generation_batch_size", self.per_device_train_batch_size * processes * steps)

    def check_learning(self, processes: int) -> None:
        """Make sure that a process reward that learns sees the rollouts of each optimiser step once, and alone.

        Raises:
            UserError: one generation serves several steps, or one step several generations.
        """
        accumulation = self.gradient_accumulation_steps
        iterations = self.extra.get("num_iterations", 1)
        unit = self.per_device_train_batch_size * processes
        generated = self.generated(processes)
        if iterations != 1 or generated != unit * accumulation:
            raise UserError(
                "process: this reward learns at every optimiser step, so each step needs rollouts of its own: "
                f"num_iterations must be 1 (it is {iterations}) and steps_per_generation equal to "
                f"gradient_accumulation_steps, {accumulation} (it is {generated / unit:g}). Leave num_iterations, "
                "steps_per_generation and generation_batch_size out of grpo.extra"
            )


@dataclass
class SamplesConfig:
    """Which rollouts are kept for reading, in ``samples.jsonl``."""

    every: int = 10
    """Steps between samples."""

    count: int = 8
    """Rollouts of such a step."""

    def __post_init__(self):
        if self.every < 1 or self.count < 0:
            raise UserError("samples.every must be at least 1 and samples.count must not be negative")


_REWARD = RewardConfig()
_SAMPLES = SamplesConfig()


def train(
    model: ModelConfig,
    data: list[DataConfig],
    out: str,
    grpo: GRPOSettings,
    reward: RewardConfig = _REWARD,
    process: ClassSpec | None = None,
    format: str = "rm_nlhf",
    prompt_file: str | None = None,
    order: Presentation = "random",
    validation: ValidationConfig | None = None,
    samples: SamplesConfig = _SAMPLES,
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
    setup_logging()
    check_run(out, config, resume)
    judge_format = get_format(format, prompt_file)
    prepared = training_pairs(data, judge_format, order, seed)
    held_out = training_pairs([validation.data], judge_format, "given", seed) if validation else None
    process_reward = process.build() if process else None
    if process and not callable(process_reward):
        raise UserError(
            f"process: {process.class_path} is no process reward; a scorer belongs inside one: "
            f"{{class_path: critique, init_args: {{scorer: {{class_path: {process.class_path}}}}}}}"
        )
    if process and not any(p.has_critique for p in prepared.pairs):
        raise UserError(
            f"process: {process.class_path} is configured but none of the {len(prepared.pairs)} training pairs has a "
            "human critique, so it would never learn or reward anything. Check field 'critiques' of the data and "
            "data.labelled_fraction, or leave out process for the outcome-only baseline"
        )
    grpo.check_batch(processes(), order, len(prepared.pairs))
    if isinstance(process_reward, LearningReward):
        grpo.check_learning(processes())

    from nlhf.callbacks import MetricsLog, Validation, attach, sample_writer

    tokenizer, pairs, too_long = ready(model, grpo, judge_format, prepared.pairs, order)
    if dry_run:
        return Path(out)

    judge_reward = JudgeReward(pairs, judge_format.parse, reward, process_reward)
    trainer = make_trainer(model, tokenizer, judge_format, pairs, judge_reward, grpo, Path(out), seed, order)
    if isinstance(process_reward, LearningReward):
        process_reward.prepare()
    manifest = {"data": prepared.manifests, "prompts": len(pairs), "too_long": too_long}
    folder = begin_run(trainer, out, config, resume, manifest)
    judge_reward.record = sample_writer(trainer, folder, samples.every, samples.count)
    log = MetricsLog(folder)
    keeps_best = None
    if validation and held_out:
        limit = grpo.max_completion_length
        keeps_best = Validation(validation, trainer, folder, judge_format, held_out.pairs, tokenizer, limit, log)
    attach(trainer, log, keeps_best)
    run_trainer(trainer, folder, resume)
    return folder


def ready(
    model: ModelConfig, grpo: GRPOSettings, judge_format: JudgeFormat, pairs: Sequence[Pair], order: Presentation
) -> tuple[Any, list[Pair], int]:
    """The tokenizer, the pairs whose prompts are short enough, and how many are not; prints the budget.

    Raises:
        UserError: a setting of trl does not exist, or too few prompts are left for a step.
    """
    from trl import GRPOConfig

    from nlhf.models import load_tokenizer

    grpo.check_extra(GRPOConfig, "grpo")
    tokenizer = load_tokenizer(model)
    kept, too_long = fitting_prompts(pairs, judge_format, tokenizer, grpo.max_prompt_length, group_size(order))
    grpo.check_batch(processes(), order, len(kept))
    announce_budget(
        model,
        grpo,
        len(kept) * grpo.num_generations,
        grpo.max_prompt_length,
        grpo.max_completion_length,
        generates=True,
        reference=grpo.beta > 0,
    )
    return tokenizer, kept, too_long


def fitting_prompts(
    pairs: Sequence[Pair], judge_format: JudgeFormat, tokenizer: Any, limit: int, group: int
) -> tuple[list[Pair], int]:
    """The pairs whose prompts are short enough, and how many are not; groups of neighbours stay or go together."""
    from nlhf.models import render_chat

    kept: list[Pair] = []
    for start in range(0, len(pairs), group):
        together = pairs[start : start + group]
        if all(len(render_chat(tokenizer, judge_format.render(p))) <= limit for p in together):
            kept += together
    dropped = len(pairs) - len(kept)
    if not kept:
        raise UserError(f"no prompt fits into grpo.max_prompt_length = {limit} tokens; raise it")
    if dropped:
        logger.warning("left out %d of %d prompts longer than grpo.max_prompt_length = %d", dropped, len(pairs), limit)
    return kept, dropped


def make_trainer(
    model: ModelConfig,
    tokenizer: Any,
    judge_format: JudgeFormat,
    pairs: Sequence[Pair],
    judge_reward: JudgeReward,
    grpo: GRPOSettings,
    folder: Path,
    seed: int,
    order: Presentation = "random",
) -> Any:
    """Trl's GRPOTrainer on judge prompts, with a sampler that survives resuming (`nlhf.sampler`).

    Args:
        model: The model to train; it is loaded by name, as is the copy for the KL term.
        tokenizer: Its tokenizer.
        judge_format: Renders the prompts.
        pairs: Pairs in the order in which they are shown.
        judge_reward: The reward; its ``pair_index`` points into ``pairs``.
        grpo: Settings.
        folder: Where checkpoints go.
        seed: Seed of the shuffling and of the rollouts.
        order: Whether neighbours belong together.
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from nlhf.models import resolve, safe_messages

    learning = judge_reward.process if isinstance(judge_reward.process, LearningReward) else None

    class JudgeTrainer(GRPOTrainer):
        def create_model_card(self, *arguments, **keywords):
            """The run folder says how it was made; trl's card would name a base model that it does not know."""

        def _get_train_sampler(self, dataset=None):
            sampler = super()._get_train_sampler(dataset)
            if not sampler.shuffle:
                return sampler
            sampler.shuffle = False
            return ShuffledSampler(sampler, sampler.num_samples, self, seed, group_size(order))

        def _calculate_rewards(self, *arguments, **keywords):
            if learning:  # trl calls rewards in evaluation too, and does not tell them
                learning.training = self.model.training
            return super()._calculate_rewards(*arguments, **keywords)

        # What a process reward has learned is kept with the state of the optimiser: before trainer_state.json, which
        # makes a checkpoint whole. It is the same in all processes, so one writes it and all read it.
        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            if learning and self.accelerator.is_main_process:
                torch.save(learning.state_dict(), Path(output_dir) / PROCESS_REWARD_FILE)

        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if learning and checkpoint:
                state = torch.load(Path(checkpoint) / PROCESS_REWARD_FILE, map_location="cpu", weights_only=True)
                learning.load_state_dict(state)

    prompts = [safe_messages(tokenizer, judge_format.render(p)) for p in pairs]
    rows = Dataset.from_dict({"prompt": prompts, "pair_index": list(range(len(pairs)))})
    arguments = {**loading_arguments(model), **trainer_arguments(folder, seed, model, grpo)}
    del arguments["max_prompt_length"]
    return JudgeTrainer(
        model=resolve(model.name),
        reward_funcs=judge_reward,
        args=configured(GRPOConfig, arguments, "grpo"),
        train_dataset=rows,
        processing_class=tokenizer,
    )
