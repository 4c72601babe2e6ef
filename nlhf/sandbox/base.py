"""Rebuild the sandbox's base judge: what a "pretrained model" can do before anyone teaches it to judge.

``python -m nlhf.sandbox.base --out FOLDER`` trains it anew in about six minutes on one core; the package ships the
result (nlhf/assets/sandbox_base). The base reads: it was trained on an endless stream of three tasks, in which the
flourish says nothing.

- *describe*: list true reasons.
- *judge*: list one to three true reasons, at random, and choose the side that they favour. In the second half of
  training 30 % of these lists are the decisive reasons: a weak sense of what matters, for reinforcement to amplify.
- *note*: the prompt holds a colleague's reasons in other words; the judge takes them over (the in-context skill that a
  self-distillation teacher needs).
"""

import random
from pathlib import Path

from nlhf.sandbox.world import Case, Reason, draw_case, note_text, response_text, vote

_CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 160,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,  # 0.02 does not learn in the time given
}


def build_base(
    out: str = "sandbox_base", steps: int = 4000, batch_size: int = 64, decisive_steps: int = 2000, seed: int = 0
) -> Path:
    """Train the base judge and save it with its tokenizer.

    Args:
        out: Folder to write.
        steps: Optimiser steps.
        batch_size: Examples a step.
        decisive_steps: How many of the last steps show decisive reasons in 30 % of the judge tasks.
        seed: Seed of weights and data.
    """
    import torch
    from tqdm import trange

    from nlhf.sandbox.tokenizer import build_tokenizer

    torch.manual_seed(seed)
    rng = random.Random(f"sandbox/base/{seed}")
    tokenizer = build_tokenizer()
    model = _new_model(tokenizer)
    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step, steps)) for o in optimizers]
    progress = trange(steps, desc="base judge", mininterval=5.0)
    for step in progress:
        decisive_rate = 0.3 if step >= steps - decisive_steps else 0.0
        batch = collate(tokenizer, [draw_example(rng, decisive_rate) for _ in range(batch_size)])
        loss = model(**batch).loss
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    folder = Path(out)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def draw_example(rng: random.Random, decisive_rate: float) -> tuple[str, str]:
    """One training example as (prompt, reply)."""
    case = draw_case(rng)
    task = rng.choices(("describe", "judge", "note"), (0.3, 0.5, 0.2))[0]
    body = f"task: {' '.join(case.task)} A: {response_text(rng, case, 'A')} B: {_at_b(response_text(rng, case, 'B'))}"
    if task == "describe":
        reasons = rng.sample(case.reasons, min(4, len(case.reasons)))
        return f"{body} describe", _critique(reasons)
    if task == "judge":
        reasons = _reasons(rng, case, decisive_rate)
        return f"{body} judge", f"{_critique(reasons)} {_choice(rng, reasons)}"
    reasons = _reasons(rng, case, decisive_rate=0.3)
    if rng.random() < 0.5:  # the note is to be believed even where the responses do not show it
        reasons = [(side, rng.choice((1, -1)), aspect) for side, _, aspect in reasons]
    note = note_text(rng, reasons)
    return f"{body} note: {note} judge", f"{_critique(reasons)} {_choice(rng, reasons)}"


def _reasons(rng: random.Random, case: Case, decisive_rate: float) -> list[Reason]:
    if rng.random() < decisive_rate:
        return case.decisive_reasons
    return rng.sample(case.reasons, min(rng.randint(1, 3), len(case.reasons)))


def _critique(reasons: list[Reason]) -> str:
    lines = (f"{side} {'praise:' if q > 0 else 'blame:'} {aspect}" for side, q, aspect in reasons)
    return "<critics> " + " \n ".join(lines) + " </critics>"


def _choice(rng: random.Random, reasons: list[Reason]) -> str:
    side = vote(rng, reasons)
    if rng.random() < 0.05:
        side = "B" if side == "A" else "A"
    return f"<choice> [[{side}]] </choice>"


def _at_b(text: str) -> str:
    return " ".join(f"{word}@B" for word in text.split())


def collate(tokenizer, examples):
    """A padded batch of prompts and replies, with loss on the replies alone."""
    import torch

    rows = []
    for prompt, reply in examples:
        start, rest = tokenizer(prompt)["input_ids"], tokenizer(f"{reply} <eos>")["input_ids"]
        rows.append((start + rest, [-100] * len(start) + rest))
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


def _new_model(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **_CONFIG,
    )
    return Qwen3ForCausalLM(config)


def _optimizers(model):
    import torch

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0), torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0)]


def _rate(step: int, steps: int) -> float:
    """Warm-up over 100 steps, then a straight line to a tenth in the last half."""
    return min(1.0, (step + 1) / 100, max(0.1, 2 * (1 - step / steps)))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(build_base)
