"""Self-distillation of a judge from language feedback: the verb `selfdistill train`.

Station of the path: Pair -> JudgeFormat.render (twice, for student and teacher) -> **trainer**. Method: SDRM (arXiv
2609.38792). The human's reasons go into the teacher's prompt and nowhere else; labels are only counted, never learned.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nlhf.errors import UserError
from nlhf.files import write_json
from nlhf.formats import get_format
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.runs import check_run
from nlhf.sources import DataConfig
from nlhf.train import SamplesConfig
from nlhf.training import (
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
from selfdistill.contexts import get_context, shuffle_critiques
from selfdistill.prompts import Prompts
from selfdistill.settings import SDRMSettings
from selfdistill.teacher import slot_of

if TYPE_CHECKING:
    from selfdistill.trainer import SDRMTrainer

logger = logging.getLogger(__name__)

PROFILE_FILE = "profile.json"
_AT_ONCE = 8  # rollouts that are drawn at once for the profile, where a step draws fewer
_SAMPLES = SamplesConfig()


def train(
    model: ModelConfig,
    data: list[DataConfig],
    out: str,
    sdrm: SDRMSettings,
    format: str = "sdrm",
    prompt_file: str | None = None,
    context: str = "rationale",
    shuffled: bool = False,
    feedback_after: str | None = None,
    feedback_before: str | None = None,
    order: Literal["random", "given"] = "random",
    validation: ValidationConfig | None = None,
    samples: SamplesConfig = _SAMPLES,
    seed: int = 0,
    resume: bool = False,
    dry_run: bool = False,
) -> Path:
    """Train a judge from language feedback by self-distillation (SDRM); no reward enters the loss.

    Args:
        model: The judge to start from, and its teacher.
        data: Data sets to train on; pairs without feedback give no loss.
        out: Folder of the run.
        sdrm: Settings of SDRM.
        format: Judge format.
        prompt_file: Jinja template that replaces the format's own prompt.
        context: What the teacher is told: rationale, per_response_feedback, rubric, gold_verdict or sandbox_note.
        shuffled: Give each pair the critiques of another one: the control.
        feedback_after: Text of the prompt that the feedback follows, for a prompt of your own or a format without a
            place for it. The feedback calls the responses as the format's own prompt does; beside a prompt_file
            "Assistant A's response" and "Assistant B's response".
        feedback_before: Text of the prompt that it precedes; only one of both.
        order: random exchanges A and B by a seeded coin before training begins; sdrm.exchange does in odd epochs.
        validation: Held-out pairs to choose the best model by.
        samples: Which rollouts to keep for reading.
        seed: Seed of the order, the shuffling and everything random in training.
        resume: Continue an interrupted run in ``out``.
        dry_run: Load and check everything but the weights, print the budget, and stop.
    """
    config = {k: v for k, v in locals().items() if k != "dry_run"}
    setup_logging()
    check_run(out, config, resume)
    judge_format, feedback = get_format(format, prompt_file), get_context(context, shuffled)
    slot = slot_of(judge_format, feedback_after, feedback_before)
    if os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3":
        raise UserError(
            "the teacher of SDRM does not follow weights in pieces of DeepSpeed ZeRO-3; launch with "
            "experiments/accelerate/fsdp2.yaml"
        )
    prepared = training_pairs(data, judge_format, order, seed)
    held_out = training_pairs([validation.data], judge_format, "given", seed) if validation else None
    pairs = shuffle_critiques(prepared.pairs, seed) if shuffled else prepared.pairs
    sdrm.check_batch(processes(), order, len(pairs))

    from trl import DistillationConfig

    from nlhf.callbacks import MetricsLog, Validation, attach, sample_writer
    from nlhf.models import load_tokenizer
    from selfdistill.divergence import CHUNK
    from selfdistill.watch import CollapseWatch

    sdrm.check_extra(DistillationConfig, "sdrm")
    tokenizer = load_tokenizer(model)
    prompts = Prompts(pairs, judge_format, feedback, slot, sdrm, tokenizer)
    sdrm.check_batch(processes(), order, len(prompts))
    announce_budget(
        model,
        sdrm,
        len(prompts) * sdrm.num_generations,
        sdrm.max_teacher_prompt_length,
        sdrm.max_completion_length,
        generates=True,
        reference=sdrm.teacher != "live",
        logit_positions=CHUNK,
    )
    if dry_run:
        return Path(out)

    trainer = make_trainer(model, tokenizer, prompts, sdrm, Path(out), seed)
    manifest = {
        "data": prepared.manifests,
        "prompts": len(prompts),
        "too_long": prompts.counts["prompt too long"],
        "feedback": {name: n for name, n in prompts.counts.items() if name != "prompt too long"},
    }
    folder = begin_run(trainer, out, config, resume, manifest)
    trainer.record = sample_writer(trainer, folder, samples.every, samples.count)
    trainer.add_callback(_first_look(trainer, folder))
    log = MetricsLog(folder)
    keeps_best = None
    if validation and held_out:
        limit = sdrm.max_completion_length
        keeps_best = Validation(validation, trainer, folder, judge_format, held_out.pairs, tokenizer, limit, log)
    attach(trainer, log, keeps_best, CollapseWatch())
    run_trainer(trainer, folder, resume)
    return folder


def make_trainer(
    model: ModelConfig, tokenizer: Any, prompts: Prompts, sdrm: SDRMSettings, folder: Path, seed: int
) -> "SDRMTrainer":
    """The trainer of a run.

    Args:
        model: The model to train.
        tokenizer: Its tokenizer.
        prompts: What student and teacher read.
        sdrm: Settings.
        folder: Where checkpoints go.
        seed: Seed of the shuffling and of the rollouts.
    """
    from trl import DistillationConfig

    from nlhf.models import resolve
    from selfdistill.trainer import SDRMTrainer

    arguments = {
        **loading_arguments(model),
        "disable_dropout": True,  # noise that the teacher does not have is nothing to learn from
        **sdrm.trl_arguments(trainer_arguments(folder, seed, model, sdrm)),
    }
    settings = configured(DistillationConfig, arguments, "sdrm")
    return SDRMTrainer(resolve(model.name), prompts, sdrm, settings, tokenizer)


def _first_look(trainer: "SDRMTrainer", folder: Path) -> Any:
    """A callback that shows, before the first step, where the divergence lies and what the kept positions have of it.

    Chance is not touched, so a run trains the same with and without it.
    """
    from transformers import TrainerCallback

    from selfdistill.profiling import report

    class FirstLook(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            if state.global_step > 0:
                return
            found = _profile(trainer)
            if not trainer.accelerator.is_main_process:
                return
            write_json(folder / PROFILE_FILE, found.to_dict())
            report(found, lambda table: logger.info("before training:\n%s", table))

    return FirstLook()


def _profile(trainer: "SDRMTrainer") -> Any:
    """The profile of a few rollouts of the judge as it starts; each process draws its share."""
    from accelerate.utils import DistributedType, gather_object
    from trl.models import unwrap_model_for_generation

    from nlhf.generation import SamplingConfig
    from selfdistill.judged import summarize
    from selfdistill.measure import measure

    accelerator, prompts, sdrm = trainer.accelerator, trainer.prompts, trainer.settings
    pairs = prompts.with_feedback(sdrm.profile_prompts)
    # Weights in pieces come together layer by layer: then all processes take the same steps.
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if not sharded and len(pairs) >= accelerator.num_processes:
        pairs = pairs[accelerator.process_index :: accelerator.num_processes]
    sampling = SamplingConfig(
        max_new_tokens=sdrm.max_completion_length,
        temperature=sdrm.temperature,
        top_p=sdrm.top_p,
        seed=trainer.args.seed,
        batch_size=max(_AT_ONCE, sdrm.per_device_train_batch_size),
        chat_template_kwargs=prompts.variables,
    )
    with unwrap_model_for_generation(trainer.model_wrapped, accelerator) as model, accelerator.autocast():
        judged = measure(
            model,
            prompts.tokenizer,
            prompts.format,
            pairs,
            prompts.context,
            slot=prompts.slot,
            samples=sdrm.num_generations,
            sampling=sampling,
            max_teacher_prompt=sdrm.max_teacher_prompt_length,
            objective=sdrm.objective,
            selector=sdrm.selector,
            rho=sdrm.rho,
            seed=trainer.args.seed,
        )
    return summarize(judged if sharded else gather_object(judged))
