"""How far a judge is from its teacher, position by position, on rollouts of its own: the **trainer**'s look ahead.

One step of SDRM without the update: draw rollouts, let student and teacher read the same tokens, each after its own
prompt, and choose the positions to train on. `selfdistill.judged` keeps it, `selfdistill.profile` sums it up.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nlhf.errors import UserError
from nlhf.formats.base import JudgeFormat
from nlhf.generation import SamplingConfig, TransformersGenerator, inference
from nlhf.judge import Reply
from nlhf.pairs import Pair
from selfdistill.contexts import Context
from selfdistill.divergence import check_vocabularies, score
from selfdistill.head import Head
from selfdistill.judged import Judged
from selfdistill.selection import select
from selfdistill.settings import Objective, Selector, check_samples, masked_fraction
from selfdistill.teacher import Slot, TeacherPrompt, slot_of, teacher_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def measure(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    judge_format: JudgeFormat,
    pairs: Sequence[Pair],
    feedback: Context,
    *,
    teacher: "PreTrainedModel | None" = None,
    slot: Slot | None = None,
    samples: int = 4,
    sampling: SamplingConfig | None = None,
    max_teacher_prompt: int | None = None,
    objective: Objective | None = None,
    selector: Selector = "low_dh",
    rho: float = 0.7,
    seed: int = 0,
    counts: Counter | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Judged]:
    """Draw rollouts and measure them; nothing is trained.

    Args:
        model: The judge, the student; in evaluation mode while it is measured.
        tokenizer: Its tokenizer.
        judge_format: How a pair is put to it.
        pairs: As they are to be shown. One without feedback gives no loss and is left out.
        feedback: Makes z from a pair.
        teacher: None: the judge itself, as at the start of training.
        slot: The place of z in the prompt; None: that of the format.
        samples: Rollouts of each pair.
        sampling: How they are drawn; by default as in the paper, at temperature 1 and up to 8,192 tokens. Logits are
            divided by the temperature, as in training (those of greedy replies are not).
        max_teacher_prompt: Tokens of the teacher's prompt; z is shortened to fit. None: what the model's context
            leaves beside the reply.
        objective: The divergence; that of SDRM by default.
        selector: Which positions are kept.
        rho: The fraction of each rollout masked.
        seed: Of the selector ``random``.
        counts: Counts what was left out or shortened, as `fit_teacher_prompt` does.
        progress: Called with the number of pairs whose rollouts were drawn.

    Raises:
        UserError: no pair has feedback that fits, a setting is out of range, or a prompt is too long.
    """
    sampling = sampling or SamplingConfig(max_new_tokens=8192, temperature=1.0)
    check_samples(samples, sampling.temperature)
    masked_fraction(rho)
    slot = slot or slot_of(judge_format)
    limit = _room(model, sampling) if max_teacher_prompt is None else max_teacher_prompt
    teacher = model if teacher is None else teacher
    check_vocabularies(Head.of(model), Head.of(teacher))
    prompts = _teacher_prompts(tokenizer, judge_format, pairs, feedback, slot, limit, sampling, counts)
    generator = TransformersGenerator(model, tokenizer, sampling)
    replies = generator.generate([judge_format.render(pair) for pair, _ in prompts], samples, progress)
    student_prompts = generator.encode([judge_format.render(pair) for pair, _ in prompts])
    rows = [
        _Row(pair, k, prompt, own, reply)
        for (pair, prompt), own, group in zip(prompts, student_prompts, replies, strict=True)
        for k, reply in enumerate(group)
    ]
    # By length: neighbours need little padding.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].teacher.ids) - len(rows[i].reply.ids))
    judged: dict[int, Judged] = {}
    with inference(model), inference(teacher):
        for start in range(0, len(order), sampling.batch_size):
            batch = order[start : start + sampling.batch_size]
            found = _score(model, teacher, [rows[i] for i in batch], generator.pad_id, sampling, objective)
            for i, scores in zip(batch, found, strict=True):
                judged[i] = _judged(rows[i], scores, judge_format, tokenizer, selector, rho, seed)
    return [judged[i] for i in range(len(rows))]


# ------------------------------------------------------------------------------------------------------------ rollouts


@dataclass(frozen=True)
class _Row:
    """A rollout and the two prompts before which it is read."""

    pair: Pair
    sample: int
    teacher: TeacherPrompt
    student_ids: list[int]
    reply: Reply


def _room(model: "PreTrainedModel", sampling: SamplingConfig) -> int:
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if window is None else window - sampling.max_new_tokens


def _teacher_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    judge_format: JudgeFormat,
    pairs: Sequence[Pair],
    feedback: Context,
    slot: Slot,
    limit: int,
    sampling: SamplingConfig,
    counts: Counter | None,
) -> list[tuple[Pair, TeacherPrompt]]:
    """The pairs whose teacher knows more than the student, with its prompt."""
    counts = Counter() if counts is None else counts
    prompts = []
    for pair in pairs:
        variables = sampling.chat_template_kwargs
        prompt = teacher_prompt(tokenizer, judge_format, pair, feedback(pair), slot, limit, variables, counts)
        if prompt is not None and prompt.has_feedback:
            prompts.append((pair, prompt))
    if not prompts:
        reasons = "; ".join(f"{n} x {reason}" for reason, n in counts.items() if n) or "there are none"
        raise UserError(f"none of the {len(pairs)} pairs has feedback that fits the teacher's prompt ({reasons})")
    return prompts


# ------------------------------------------------------------------------------------------------------------- scoring


def _score(
    model: "PreTrainedModel",
    teacher: "PreTrainedModel",
    rows: Sequence[_Row],
    pad: int,
    sampling: SamplingConfig,
    objective: Objective | None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each row H_S, H_T and the divergence ``[N]``."""
    temperature = sampling.temperature or 1.0
    scores = score(
        _hidden(model, [(row.student_ids, row.reply.ids) for row in rows], pad),
        Head.of(model, temperature),
        _hidden(teacher, [(row.teacher.ids, row.reply.ids) for row in rows], pad),
        Head.of(teacher, temperature),
        objective=objective,
    )
    ends = list(itertools.accumulate(len(row.reply.ids) for row in rows))[:-1]
    values = (scores.student_entropy, scores.teacher_entropy, scores.divergence)
    return zip(*(np.split(v.double().cpu().numpy(), ends) for v in values), strict=True)


def _hidden(model: "PreTrainedModel", rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int) -> Tensor:
    """The last hidden states from which the tokens of each reply are predicted, one row after the other ``[N, H]``."""
    device = model.get_input_embeddings().weight.device
    width = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, (prompt, reply) in enumerate(rows):  # padded on the left, so that the replies end in one column
        start = width - len(prompt) - len(reply)
        ids[i, start:], mask[i, start:] = torch.tensor([*prompt, *reply]), 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    # The backbone, without the head: the logits of whole rollouts would not fit. Adapters sit inside of it.
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = causal.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    return torch.cat([hidden[i, width - len(reply) - 1 : width - 1] for i, (_, reply) in enumerate(rows)])


def _judged(
    row: _Row,
    scores: tuple[np.ndarray, np.ndarray, np.ndarray],
    judge_format: JudgeFormat,
    tokenizer: "PreTrainedTokenizerBase",
    selector: Selector,
    rho: float,
    seed: int,
) -> Judged:
    h_s, h_t, kl = scores
    h_s_row, h_t_row, kl_row, ids = (torch.as_tensor(v).unsqueeze(0) for v in (h_s, h_t, kl, row.reply.ids))
    kept = select(
        selector,
        rho,
        torch.ones_like(ids, dtype=torch.bool),
        student_entropy=h_s_row,
        teacher_entropy=h_t_row,
        divergence=kl_row,
        tokens=ids,
        seed=seed,
    )
    return Judged(
        pair=row.pair,
        sample=row.sample,
        feedback=row.teacher.feedback,
        verdict=judge_format.parse(row.reply.text, row.reply.truncated),
        ids=row.reply.ids,
        tokens=tuple(token_texts(tokenizer, row.reply.ids)),
        kl=kl,
        student_entropy=h_s,
        teacher_entropy=h_t,
        kept=kept[0].numpy(),
    )


def token_texts(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it; together they are the decoded reply, special tokens included.

    A character whose bytes are spread over several tokens stands at the last of them.
    """

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts: list[str] = []
    # ids[start:done] is shown already and stays in front, for a blank before a token shows only beside another one.
    start = done = 0
    for i in range(1, len(ids) + 1):
        before, now = decode(start, done), decode(start, i)
        if now.endswith("\ufffd") and i < len(ids):  # an unfinished character
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, done = done, i
    return texts
