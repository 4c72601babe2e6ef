"""Cold start of MetaRM: the verb `metarm train`.

Station of the path: Verdict -> rewards -> **trainer**, for the model that rewards in place of a human critique. A judge
answers the labelled pairs several times, each rollout gets its exact reward (`metarm.rollouts`), and MetaRM learns to
predict it from pair and critique. Source: RM-NLHF (arXiv 2601.07349), section on MetaRM; the defaults are the paper's.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metarm.model import MAX_LENGTH, Layout, LoraSettings, MetaRM
from metarm.rollouts import PAIRS_FILE, Example, Rollouts, draw, require_labelled, tidy
from nlhf.config import ClassSpec, OptimizationConfig, Presentation
from nlhf.errors import UserError
from nlhf.files import write_json, write_jsonl
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import BackendConfig, make_generator
from nlhf.judge import Judge
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.rewards import CritiqueReward, RewardConfig
from nlhf.runs import check_run, open_run
from nlhf.sampler import ShuffledSampler, group_size, put_in_order
from nlhf.sources import DataConfig
from nlhf.training import (
    announce_budget,
    configured,
    require_verdicts,
    run_trainer,
    sharding,
    trainer_arguments,
    training_dtype,
    training_pairs,
)

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class MetaRMSettings(OptimizationConfig):
    """Optimisation of a MetaRM; the loss is the mean squared error."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""

    num_train_epochs: float = 3.0
    """Passes over the rollouts, when max_steps is not set."""

    gradient_accumulation_steps: int = 64
    """Batches in one optimiser step; with 8 rows each on one device, 512 rows as in the paper."""

    lr_scheduler_type: str = "cosine"
    """Schedule of the learning rate after the warm-up: constant, linear, cosine."""

    warmup_steps: float = 0.01
    """Steps in which the learning rate rises from 0; below 1, a share of all steps."""

    max_length: int = MAX_LENGTH
    """Most tokens of a text; the conversation is cut first, then the responses, never the critique."""

    validation_share: float = 0.05
    """Share of the pairs that is kept to choose the best model by."""

    lora: LoraSettings | None = None
    """Train adapters and the head in place of all weights."""

    def __post_init__(self):
        super().__post_init__()
        if self.max_length < 1:
            raise UserError(f"sft.max_length must be at least 1, got {self.max_length}")
        if not 0 < self.validation_share < 1:
            raise UserError(f"sft.validation_share must lie between 0 and 1, got {self.validation_share}")


@dataclass
class JudgeSettings:
    """The judge whose critiques MetaRM learns to reward, and how its rollouts are drawn."""

    model: ModelConfig
    """The judge, as it is before reinforcement."""

    format: str = "rm_nlhf"
    """Judge format."""

    prompt_file: str | None = None
    """Jinja template that replaces the format's own prompt."""

    samples: int = 4
    """Rollouts of each pair."""

    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_new_tokens=8192, temperature=0.7))
    """How they are drawn."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    """What runs the judge: transformers, vLLM, or a server."""

    def __post_init__(self):
        require_verdicts(get_format(self.format, self.prompt_file), "judge.format")
        if problems := self.sampling.problems(self.samples):
            raise UserError("; ".join(f"judge.{problem}" for problem in problems))

    def load(self) -> Judge:
        """The judge, ready to answer."""
        return Judge(get_format(self.format, self.prompt_file), make_generator(self.model, self.sampling, self.backend))


_REWARD = RewardConfig()


def train(
    model: ModelConfig,
    out: str,
    sft: MetaRMSettings,
    data: list[DataConfig] | None = None,
    judge: JudgeSettings | None = None,
    scorer: ClassSpec | None = None,
    rollouts: str | None = None,
    layout: Layout | None = None,
    reward: RewardConfig = _REWARD,
    order: Presentation = "random",
    seed: int = 0,
    resume: bool = False,
    dry_run: bool = False,
) -> Path:
    """Teach a MetaRM the rewards of a judge's rollouts on labelled pairs (cold start).

    Writes to ``out``, beside what every run writes: pairs.jsonl and rollouts.jsonl (which a later run may reuse by
    ``rollouts``), checkpoints, best/ (lowest validation error) and final/.

    Args:
        model: The backbone: any encoder or decoder that AutoModelForSequenceClassification loads.
        out: Folder of the run.
        sft: Optimisation settings.
        data: Labelled pairs; those without a human critique are passed over.
        judge: Who answers them.
        scorer: Compares critiques with the humans' (exact, lexical, embedding, learned, llm, or your own);
            null is learned.
        rollouts: Folder of an earlier run whose rollouts are to be used, in place of data, judge and scorer.
        layout: How pair and critique become one text; null takes what was saved with the model, else the default.
        reward: The format rule; the targets are the paper's, whatever the weights.
        order: random exchanges A and B by a seeded coin; both shows each pair in both orders.
        seed: Seed of the order, the split, the shuffling and the new head.
        resume: Continue an interrupted run in ``out``.
        dry_run: Load and check everything but the weights, print the budget, and stop.
    """
    config = {k: v for k, v in locals().items() if k != "dry_run"}
    setup_logging()
    check_run(out, config, resume)
    _check_source(rollouts, {"data": data, "judge": judge, "scorer": scorer})
    if rollouts is not None:
        known = Rollouts.read(rollouts)
        split(known, sft.validation_share, seed)  # says so if there is too little to learn from
        expected = len(known.usable)
    else:
        prepared = training_pairs(data, get_format(judge.format, judge.prompt_file), "given", seed)
        pairs = require_labelled(prepared.pairs, "data")
        critique_reward = CritiqueReward(scorer.build() if scorer else None)
        expected = len(pairs) * group_size(order) * judge.samples

    import torch
    from transformers import TrainingArguments

    sft.check_extra(TrainingArguments, "sft")
    if sharding() != "none":
        raise UserError(
            "metarm train keeps all of MetaRM in every process, and this launcher splits models over processes; launch "
            "it with experiments/accelerate/ddp.yaml. If memory is short, set sft.lora or take a smaller backbone"
        )
    announce_budget(model, sft, expected, sft.max_length - 1, 1, generates=False, reference=False)
    if dry_run:
        return Path(out)

    arguments = training_arguments(sft, Path(out), seed, model)  # it sets up the device, which a dry run may lack
    torch.manual_seed(seed)
    dtype = training_dtype(model)[0]
    metarm = MetaRM.load(model, layout, sft.max_length, new_head=True, dtype=dtype, lora=sft.lora, device="cpu")
    if rollouts is None:
        _warn_of_length(metarm, judge.sampling.max_new_tokens)
        answering = judge.load()
        folder = _open(out, config, resume)
        known = draw_in_folder(folder, answering, pairs, critique_reward, judge.samples, reward, order, seed)
        del answering  # its memory is needed
    training, held_out = split(known, sft.validation_share, seed)
    trainer = make_trainer(metarm, encode(metarm, known, training), arguments)
    texts = encode(metarm, known, held_out)
    if rollouts is not None:  # all that can be wrong with them has been found
        folder = _open(out, config, resume)
    _train(trainer, metarm, known.counts(), (training, held_out, texts), folder, resume)
    return folder


def training_arguments(sft: MetaRMSettings, folder: Path, seed: int, model: ModelConfig) -> "TrainingArguments":
    """The arguments of transformers' Trainer; `UserError` for what it does not take."""
    from transformers import TrainingArguments

    ours = ("max_length", "validation_share", "lora")
    arguments = {k: v for k, v in trainer_arguments(folder, seed, model, sft).items() if k not in ours}
    return configured(TrainingArguments, arguments, "sft")


def _warn_of_length(metarm: MetaRM, tokens: int) -> None:
    if tokens > metarm.max_length:
        logger.warning(
            "judge.sampling.max_new_tokens is %d, but MetaRM reads %d tokens and no critique is ever cut: one that "
            "does not fit will stop the run after its rollouts were drawn (a later one may reuse them: rollouts)",
            *(tokens, metarm.max_length),
        )


def _check_source(rollouts: str | None, given: dict[str, Any]) -> None:
    """Rollouts are either drawn or read."""
    if rollouts is None and (lacking := [name for name in ("data", "judge") if not given[name]]):
        raise UserError(f"set {', '.join(lacking)}, or rollouts: the folder of a run that has drawn them")
    if rollouts is not None and (useless := [name for name, value in given.items() if value]):
        raise UserError(f"rollouts are read from {rollouts}; leave out {', '.join(useless)}")


def _train(
    trainer: Any,
    metarm: MetaRM,
    counts: dict[str, Any],
    parts: tuple[list[Example], list[Example], list[dict[str, Any]]],
    folder: Path,
    resume: bool,
) -> None:
    from accelerate import PartialState

    from metarm.validation import Best
    from nlhf.callbacks import MetricsLog, attach

    training, held_out, texts = parts
    if PartialState().is_main_process:
        write_json(folder / "manifest.json", {**counts, "training": len(training), "validation": len(held_out)})
        logger.info("rollouts: %s", counts)
    log = MetricsLog(folder)
    attach(trainer, log, Best(trainer, metarm, texts, held_out, folder, log))
    run_trainer(trainer, folder, resume)


def _open(out: str, config: dict[str, Any], resume: bool) -> Path:
    """Open the folder of the run, in the first process."""
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    if state.is_main_process:
        open_run(out, config, resume)
    state.wait_for_everyone()
    return Path(out)


def draw_in_folder(
    folder: Path,
    judge: Judge,
    pairs: Sequence[Pair],
    critique_reward: CritiqueReward,
    samples: int,
    limits: RewardConfig,
    order: Presentation,
    seed: int,
) -> Rollouts:
    """Rollouts of all pairs, each process drawing its share into the same file."""
    from accelerate import PartialState
    from tqdm import tqdm

    state = PartialState()
    if state.is_main_process:
        write_jsonl(folder / PAIRS_FILE, (pair.to_dict() for pair in pairs))
    shown = put_in_order(pairs, order, seed)[state.process_index :: state.num_processes]
    originals = {pair.id: pair for pair in pairs}
    chunk = max(1, 4 * judge.generator.config.batch_size // samples)
    with tqdm(total=len(shown), desc="rollouts", unit="prompt", disable=None) as bar:
        draw(judge, shown, originals, critique_reward, samples, folder, limits, chunk, bar.update)
    state.wait_for_everyone()
    if state.is_main_process:
        tidy(folder, pairs)
    state.wait_for_everyone()
    return Rollouts.read(folder)


def split(rollouts: Rollouts, share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Rollouts to learn from and to choose by; pairs of one group, and so all rollouts of a pair, stay together.

    Raises:
        UserError: there are fewer than two groups with usable rollouts.
    """
    usable = rollouts.usable
    clusters = sorted({rollouts.pairs[e.pair_id].cluster for e in usable})
    if len(clusters) < 2:
        raise UserError(
            f"only {len(usable)} of {len(rollouts.examples)} rollouts, on {len(clusters)} pairs, have a reward to "
            f"learn ({rollouts.counts()['dropped']}); a judge must know its format first: nlhf cold-start"
        )
    random.Random(f"metarm/split/{seed}").shuffle(clusters)
    kept = set(clusters[: min(len(clusters) - 1, max(1, round(share * len(clusters))))])
    held = [rollouts.pairs[e.pair_id].cluster in kept for e in usable]
    return [e for e, h in zip(usable, held, strict=True) if not h], [e for e, h in zip(usable, held, strict=True) if h]


def encode(metarm: MetaRM, rollouts: Rollouts, examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Rows of ids and target."""
    ids = metarm.encode([rollouts.shown(e) for e in examples], [e.critique for e in examples])
    return [{"ids": row, "target": example.target} for row, example in zip(ids, examples, strict=True)]


def make_trainer(metarm: MetaRM, rows: list[dict[str, Any]], arguments: "TrainingArguments") -> Any:
    """A transformers Trainer whose loss is the mean squared error over all rows of the optimiser step.

    Args:
        metarm: What to train.
        rows: From `encode`.
        arguments: From `training_arguments`; their seed is that of the shuffling.
    """
    import torch
    from transformers import Trainer

    class MetaRMTrainer(Trainer):
        loss_is_scaled_for_ga = True

        def _get_train_sampler(self, train_dataset=None):
            return ShuffledSampler(range(len(rows)), len(rows), self, arguments.seed)

        def _get_num_items_in_batch(self, batch_samples, device):
            total = torch.tensor(sum(len(batch["targets"]) for batch in batch_samples), device=device)
            return self.accelerator.gather(total).sum()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            targets = inputs.pop("targets")
            outputs = model(**inputs)
            errors = (outputs.logits[:, 0].float() - targets) ** 2
            total = len(targets) if num_items_in_batch is None else num_items_in_batch
            # Data parallelism averages gradients over processes; the divisor is the number of rows of all of them.
            loss = errors.sum() / total * (self.accelerator.num_processes if num_items_in_batch is not None else 1)
            return (loss, outputs) if return_outputs else loss

        def save_model(self, output_dir=None, _internal_call=False):
            if _internal_call:  # a checkpoint to resume from: adapters stay adapters
                super().save_model(output_dir, _internal_call)
            elif self.accelerator.is_main_process:
                metarm.save(output_dir)

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {
            **metarm.collate([row["ids"] for row in batch], device="cpu"),
            "targets": torch.tensor([row["target"] for row in batch]),
        }

    return MetaRMTrainer(
        model=metarm.model,
        args=arguments,
        train_dataset=rows,
        data_collator=collate,
        processing_class=metarm.tokenizer,
    )
