"""Cold start: teach a model the judge format by supervised fine-tuning on human verdicts and critiques.

Station of the path: Pair -> JudgeFormat.target -> **SFT**. The loss falls on the reply only; the verdict's tokens can
weigh more than the critique's, because one token in thirty decides whether the judge is right. Small models learn the
verdict better alone first, with both orders of a pair in one batch (``target: verdict``, ``order: both``), and the
critique afterwards: two runs, the second starting from the first.

A role-play policy is started in the same way from ``conversations``: the last turn of each is the reply.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nlhf.config import OptimizationConfig, Presentation
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.formats.base import JudgeFormat
from nlhf.logs import setup_logging
from nlhf.models import ModelConfig
from nlhf.pairs import Pair
from nlhf.roleplay.conversations import Conversation, ConversationConfig, described
from nlhf.runs import check_run
from nlhf.sampler import ShuffledSampler, group_size
from nlhf.sources import DataConfig
from nlhf.training import (
    TrainingData,
    ValidationConfig,
    announce_budget,
    begin_run,
    configured,
    for_training,
    run_trainer,
    trainer_arguments,
    training_pairs,
)

logger = logging.getLogger(__name__)

_SIDE = re.compile(r"(?:^|<critics>)\s*([AB]) (?:praise|blame):", re.MULTILINE)


@dataclass
class ColdStartConfig(OptimizationConfig):
    """Optimisation of a cold start, and what the model learns to write."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""

    target: Literal["critique_and_verdict", "verdict"] = "critique_and_verdict"
    """The reply to learn."""

    verdict_weight: float = 1.0
    """Weight of each verdict token in the loss; critique tokens weigh 1."""

    side_weight: float = 1.0
    """Weight of the side that begins a critique line ("A blame: ..."): it is read before the verdict and decides it."""

    max_length: int = 4096
    """Longest prompt with reply, in tokens; longer rows are left out and counted."""

    max_completion_length: int = 512
    """Token limit of replies during validation."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("verdict_weight", "side_weight"):
            if getattr(self, name) <= 0:
                raise UserError(f"sft.{name} must be positive, got {getattr(self, name)}")


_NO_DATA: list[DataConfig] = []


def cold_start(
    model: ModelConfig,
    out: str,
    sft: ColdStartConfig,
    data: list[DataConfig] = _NO_DATA,
    conversations: ConversationConfig | None = None,
    format: str = "rm_nlhf",
    prompt_file: str | None = None,
    order: Presentation = "random",
    validation: ValidationConfig | None = None,
    seed: int = 0,
    resume: bool = False,
    dry_run: bool = False,
) -> Path:
    """Teach a model the judge format by supervised fine-tuning; the loss falls on the reply only.

    Args:
        model: The model to start from.
        out: Folder of the run.
        sft: Optimisation settings.
        data: Data sets to learn from.
        conversations: What a role-play policy learns from, in the place of data: the last turn of each.
        format: Judge format.
        prompt_file: Jinja template that replaces the format's own prompt.
        order: random exchanges A and B by a seeded coin; both shows each pair in both orders, side by side in a batch.
        validation: Held-out pairs to choose the best model by.
        seed: Seed of the order, the shuffling and everything random in training.
        resume: Continue an interrupted run in ``out``.
        dry_run: Load and check everything but the weights, print the budget, and stop.
    """
    config = {k: v for k, v in locals().items() if k != "dry_run"}
    setup_logging()
    check_run(out, config, resume)
    _check_sources(data, conversations, validation)
    judge_format = get_format(format, prompt_file)
    found = conversations.load(seed) if conversations else []
    prepared = TrainingData([]) if conversations else training_pairs(data, judge_format, order, seed)
    pairs = [] if conversations else _with_target(prepared.pairs, sft, judge_format.has_reasons)
    held_out = training_pairs([validation.data], judge_format, "given", seed) if validation else None
    group = 1 if conversations else group_size(order)
    if sft.per_device_train_batch_size % group:
        raise UserError(
            f"sft.per_device_train_batch_size is {sft.per_device_train_batch_size}, but order: both needs an even "
            "number so that both orders of a pair share a batch"
        )

    import torch
    from transformers import TrainingArguments

    from nlhf.callbacks import MetricsLog, Validation, attach
    from nlhf.models import load_model, load_tokenizer

    sft.check_extra(TrainingArguments, "sft")
    tokenizer = load_tokenizer(model)
    if conversations:
        rows, too_long = _fitting([lesson_row(tokenizer, one) for one in found], sft, group)
    else:
        rows, too_long = tokenize(tokenizer, judge_format, pairs, sft, group)
    longest = max(len(row["input_ids"]) for row in rows)
    reply = max(sum(weight > 0 for weight in row["weights"]) for row in rows)
    announce_budget(model, sft, len(rows), longest - reply, reply, generates=False, reference=False)
    if dry_run:
        return Path(out)

    torch.manual_seed(seed)
    policy = load_model(for_training(model), device="cpu")
    trainer = make_trainer(policy, tokenizer, rows, sft, Path(out), seed, group, model)
    manifest = {
        "data": prepared.manifests,
        **({"conversations": described(found)} if conversations else {}),
        "rows": len(rows),
        "without_critique": len(prepared.pairs) - len(pairs),
        "too_long": too_long,
    }
    folder = begin_run(trainer, out, config, resume, manifest)
    log = MetricsLog(folder)
    keeps_best = None
    if validation and held_out:
        limit = sft.max_completion_length
        keeps_best = Validation(validation, trainer, folder, judge_format, held_out.pairs, tokenizer, limit, log)
    attach(trainer, log, keeps_best)
    run_trainer(trainer, folder, resume)
    return folder


def _check_sources(
    data: Sequence[DataConfig], conversations: ConversationConfig | None, validation: ValidationConfig | None
) -> None:
    if bool(data) == (conversations is not None):
        raise UserError("set either data (pairs, for a judge) or conversations (for a role-play policy)")
    if conversations and validation:
        raise UserError("validation judges pairs, which a policy does not; leave it out beside conversations")


def _with_target(
    pairs: Sequence[Pair],
    sft: ColdStartConfig,
    has_reasons: Callable[[Pair], bool] = lambda pair: pair.has_critique,
) -> list[Pair]:
    """The pairs that have what is to be learned: an empty critique must not be a lesson."""
    if sft.target == "verdict":
        return list(pairs)
    kept = [pair for pair in pairs if has_reasons(pair)]
    if not kept:
        raise UserError(
            f"none of the {len(pairs)} pairs has a human critique to learn from; use sft.target: verdict, or data with "
            "critiques (see data.labelled_fraction)"
        )
    if len(kept) < len(pairs):
        logger.warning("left out %d of %d rows without a human critique", len(pairs) - len(kept), len(pairs))
    return kept


def tokenize(
    tokenizer: Any, judge_format: JudgeFormat, pairs: Sequence[Pair], sft: ColdStartConfig, group: int = 1
) -> tuple[list[dict[str, list]], int]:
    """Rows of input_ids and weights (0 for the prompt), and how many pairs were too long.

    Args:
        tokenizer: The model's.
        judge_format: Renders prompts and replies.
        pairs: Pairs in the order in which they are shown.
        sft: Limits, target and weights.
        group: Neighbours that belong together; if one is too long, all of its group are left out.

    Raises:
        UserError: no row is short enough.
    """
    return _fitting([_row(tokenizer, judge_format, pair, sft) for pair in pairs], sft, group)


def _fitting(rows: Sequence[dict[str, list]], sft: ColdStartConfig, group: int) -> tuple[list[dict[str, list]], int]:
    """The rows that are short enough, groups of neighbours together or not at all, and how many are not."""
    kept: list[dict[str, list]] = []
    for start in range(0, len(rows), group):
        together = rows[start : start + group]
        if all(len(row["input_ids"]) <= sft.max_length for row in together):
            kept += together
    dropped = len(rows) - len(kept)
    if not kept:
        raise UserError(f"no row fits into sft.max_length = {sft.max_length} tokens; raise it")
    if dropped:
        logger.warning(
            "left out %d of %d rows longer than sft.max_length = %d tokens", dropped, len(rows), sft.max_length
        )
    return kept, dropped


def lesson_row(tokenizer: Any, conversation: Conversation) -> dict[str, list]:
    """A row whose last turn alone, with its system thinking, has weight in the loss (HER, arXiv 2601.21459)."""
    from nlhf.models import render_chat, safe_messages

    *before, last = safe_messages(tokenizer, conversation.lesson())
    prompt = render_chat(tokenizer, before)
    reply = [*tokenizer(last["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": prompt + reply, "weights": [0.0] * len(prompt) + [1.0] * len(reply)}


def _row(tokenizer: Any, judge_format: JudgeFormat, pair: Pair, sft: ColdStartConfig) -> dict[str, list]:
    from nlhf.models import render_chat

    prompt = render_chat(tokenizer, judge_format.render(pair))
    critique = next((c for c in pair.critiques if not c.empty), None)
    parts = judge_format.target(pair, critique, verdict_only=sft.target == "verdict")
    reasons, reason_weights = _weighted_reasons(tokenizer, parts[0], sft.side_weight)
    verdict = [*tokenizer(parts[1], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    weights = [0.0] * len(prompt) + reason_weights + [sft.verdict_weight] * len(verdict)
    return {"input_ids": prompt + reasons + verdict, "weights": weights}


def _weighted_reasons(tokenizer: Any, reasons: str, side_weight: float) -> tuple[list[int], list[float]]:
    """Token ids of the critique part and their weights: ``side_weight`` for the side that begins a line, else 1."""
    if not reasons:
        return [], []
    encoded = tokenizer(reasons, add_special_tokens=False, return_offsets_mapping=side_weight != 1)
    ids = list(encoded["input_ids"])
    if side_weight == 1:  # no need of offsets, which slow tokenizers lack
        return ids, [1.0] * len(ids)
    sides = [match.start(1) for match in _SIDE.finditer(reasons)]
    at_side = [any(start <= side < end for side in sides) for start, end in encoded["offset_mapping"]]
    return ids, [side_weight if at else 1.0 for at in at_side]


def make_trainer(
    policy: Any,
    tokenizer: Any,
    rows: list[dict[str, list]],
    sft: ColdStartConfig,
    folder: Path,
    seed: int,
    group: int,
    model: ModelConfig,
) -> Any:
    """A transformers Trainer whose loss is the weighted mean over the reply's tokens of the whole optimiser step.

    Args:
        policy: The model to train.
        tokenizer: Saved beside each checkpoint; its pad token fills up batches.
        rows: From `tokenize`.
        sft: Settings.
        folder: Where checkpoints go.
        seed: Seed of the shuffling.
        group: Rows that stay together when shuffling (2: both orders of a pair).
        model: Says in which number format to compute.
    """
    import torch
    from torch.nn import functional as F
    from transformers import Trainer, TrainingArguments

    class ColdStartTrainer(Trainer):
        loss_is_scaled_for_ga = True

        def _get_train_sampler(self, train_dataset=None):
            return ShuffledSampler(range(len(rows)), len(rows), self, seed, group)

        def _get_num_items_in_batch(self, batch_samples, device):
            total = sum(batch["weights"][:, 1:].sum() for batch in batch_samples)
            return self.accelerator.gather(torch.as_tensor(total, device=device)).sum()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            weights = inputs.pop("weights")[:, 1:]
            total = weights.sum() if num_items_in_batch is None else num_items_in_batch
            # Most of a row is prompt: only positions that some row learns from are projected to the vocabulary.
            learned = weights.any(dim=0).nonzero().squeeze(1)
            outputs = model(**inputs, logits_to_keep=learned)
            targets, weights = inputs["input_ids"][:, learned + 1], weights[:, learned]
            losses = F.cross_entropy(outputs.logits.float().transpose(1, 2), targets, reduction="none")
            # Data parallelism averages gradients over processes; the divisor is the sum over all of them.
            loss = (losses * weights).sum() / total * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

    def collate(batch: list[dict[str, list]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in batch)
        pad = tokenizer.pad_token_id
        return {
            "input_ids": torch.tensor([r["input_ids"] + [pad] * (width - len(r["input_ids"])) for r in batch]),
            "attention_mask": torch.tensor(
                [[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in batch]
            ),
            "weights": torch.tensor([r["weights"] + [0.0] * (width - len(r["weights"])) for r in batch]),
        }

    ours = ("target", "verdict_weight", "side_weight", "max_length", "max_completion_length")
    arguments = {k: v for k, v in trainer_arguments(folder, seed, model, sft).items() if k not in ours}
    return ColdStartTrainer(
        model=policy,
        args=configured(TrainingArguments, arguments, "sft"),
        train_dataset=rows,
        data_collator=collate,
        processing_class=tokenizer,
    )
