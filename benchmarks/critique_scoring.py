"""How fast critiques are scored, beside plain loops over the same encoder and bert-score, in one run.

The work is that of a training step: items of ComVE, each with a group of 8 critiques of two arguments, each compared
with the item's human reasons. A pair is one critique against one human's. Critiques are drawn by seed from the item's
three right and two confusing reasons, as rollouts of one prompt repeat one another. The floor is what the
encoder alone needs to read every distinct text once.

    python benchmarks/critique_scoring.py --data ../shared/data --items 40

Times are processor seconds: set OMP_NUM_THREADS=1 to compare work, not threads. bert-score is measured if it is
installed (``pip install bert-score``); it, too, encodes equal texts of one call once.
"""

import argparse
import importlib.util
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nlhf.critique.arguments import generated_arguments, reference_sets
from nlhf.critique.benchmarks import load_reasons
from nlhf.critique.learned import ENCODER, LearnedScorer
from nlhf.critique.scorers import EmbeddingScorer
from nlhf.files import write_json
from nlhf.model_names import resolve
from nlhf.pairs import HumanCritique, Pair, Turn

GROUP = 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", default="../shared/data", help="folder that holds comve")
    parser.add_argument("--items", type=int, default=40, help="groups of 8 critiques")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file for the figures")
    arguments = parser.parse_args()
    critiques, pairs = workload(Path(arguments.data) / "comve", arguments.items, arguments.seed)
    couples = [
        ([a.text for a in generated_arguments(c)], [a.text for a in humans])
        for c, p in zip(critiques, pairs, strict=True)
        for humans in reference_sets(p)
    ]
    distinct = sorted({text for sides in couples for side in sides for text in side})
    total = sum(len(side) for sides in couples for side in sides)
    print(f"{len(couples)} pairs, {total} texts, {len(distinct)} of them distinct")
    embedding, learned = EmbeddingScorer(ENCODER), LearnedScorer(ENCODER)
    encoder = embedding.encoder
    contenders: dict[str, Callable[[], object]] = {
        "one pair at a time": lambda: [similarity(encoder, *couple) for couple in couples],
        "64 pairs at a time": lambda: batched(encoder, couples, 64),
        "embedding scorer": lambda: fresh(embedding).score(critiques, pairs),
        "learned scorer": lambda: fresh(learned).score(critiques, pairs),
        "floor: encoder alone, distinct texts": lambda: encode(encoder, distinct),
    }
    if importlib.util.find_spec("bert_score"):
        contenders["bert-score"] = bert_score(couples)
    encode(encoder, distinct[:64])  # warm up
    seconds = measure(contenders, arguments.repeats)
    base = seconds["one pair at a time"]
    print(f"{'':40} {'cpu s':>8} {'pairs/s':>9} {'x loop':>8} {'x 64':>8}")
    for name, taken in seconds.items():
        rate = len(couples) / taken
        print(f"{name:40} {taken:8.2f} {rate:9.1f} {base / taken:8.2f} {seconds['64 pairs at a time'] / taken:8.2f}")
    if arguments.out:
        write_json(
            arguments.out, {"pairs": len(couples), "texts": total, "distinct": len(distinct), "seconds": seconds}
        )


def workload(folder: Path, items: int, seed: int) -> tuple[list[str], list[Pair]]:
    """Critiques and their pairs, 8 of each an item."""
    rng = random.Random(seed)
    critiques, pairs = [], []
    for item in load_reasons(folder, "validation")[:items]:
        humans = [HumanCritique(weaknesses_a=reason) for reason in item.right]
        pair = Pair(item.item, [Turn("user", "Which?")], "a", "b", "B", critiques=humans)
        for _ in range(GROUP):
            reasons = rng.sample([*item.right, *item.confusing], 2)
            critiques.append("\n".join(f"A blame: {reason}" for reason in reasons))
            pairs.append(pair)
    return critiques, pairs


def measure(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor seconds of the fastest run of each; on a busy machine they say more than the clock."""
    seconds: dict[str, float] = {}
    for _ in range(repeats):
        for name, work in contenders.items():
            start = time.process_time()
            work()
            taken = time.process_time() - start
            seconds[name] = min(taken, seconds.get(name, taken))
    return seconds


def encode(encoder, texts: list[str]) -> np.ndarray:
    """Unit embeddings as anyone would get them."""
    return encoder.encode(texts, batch_size=64, normalize_embeddings=True, show_progress_bar=False)


def similarity(encoder, left: list[str], right: list[str]) -> np.ndarray:
    """The plain way: encode both sides of one pair."""
    return encode(encoder, left) @ encode(encoder, right).T


def batched(encoder, couples: list, size: int) -> list[np.ndarray]:
    """The less plain way: encode all texts of so many pairs in one call."""
    results = []
    for start in range(0, len(couples), size):
        chunk = couples[start : start + size]
        vectors = encode(encoder, [text for left, right in chunk for text in (*left, *right)])
        at = 0
        for left, right in chunk:
            middle, end = at + len(left), at + len(left) + len(right)
            results.append(vectors[at:middle] @ vectors[middle:end].T)
            at = end
    return results


def fresh(scorer: EmbeddingScorer) -> EmbeddingScorer:
    """The scorer without what it remembers from the run before."""
    scorer._cache.clear()
    return scorer


def bert_score(couples: list) -> Callable[[], object]:
    """bert-score of every argument against every reference, with the same encoder's six layers."""
    from bert_score import BERTScorer

    scorer = BERTScorer(model_type=resolve(ENCODER), num_layers=6, batch_size=64, device="cpu")
    candidates = [text for left, right in couples for text in left for _ in right]
    references = [text for left, right in couples for _ in left for text in right]
    return lambda: scorer.score(candidates, references)


if __name__ == "__main__":
    main()
