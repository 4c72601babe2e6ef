"""The sandbox's writer: a policy for `nlhf train-policy` that answers a task with the words of a response.

``python -m nlhf.sandbox.policy --out FOLDER`` teaches the base judge to write, in about half a minute on one core. It
learns the form alone: its responses are those of the world, good or bad on each aspect by chance, the flourish in half
of them. What is good for a task is left to reinforcement by a judge.
"""

import random
from pathlib import Path

from nlhf.sandbox.base import collate
from nlhf.sandbox.world import draw_case, response_text


def build_policy(out: str = "sandbox_policy", steps: int = 300, batch_size: int = 64, seed: int = 0) -> Path:
    """Train the writer and save it with its tokenizer.

    Args:
        out: Folder to write.
        steps: Optimiser steps.
        batch_size: Examples a step.
        seed: Seed of the data.
    """
    import torch
    from tqdm import trange

    from nlhf.models import ModelConfig, load_model, load_tokenizer

    torch.manual_seed(seed)
    rng = random.Random(f"sandbox/policy/{seed}")
    config = ModelConfig("package:nlhf")
    model, tokenizer = load_model(config, device="cpu").train(), load_tokenizer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in (progress := trange(steps, desc="writer", mininterval=5.0)):
        loss = model(**collate(tokenizer, [draw_example(rng) for _ in range(batch_size)])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    folder = Path(out)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def draw_example(rng: random.Random) -> tuple[str, str]:
    """One training example as (prompt, response): a task, and either side's response to it."""
    case = draw_case(rng)
    return " ".join(case.task), response_text(rng, case, rng.choice(("A", "B")))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(build_policy)
