"""JudgeBench as a **source**: two answers of one model to a hard question, of which one is correct.

Tan et al., 2024, "JudgeBench: A Benchmark for Evaluating LLM-based Judges" (arXiv 2410.12784). The label is a ground
truth, not a preference; both answers come from one model, so style says little.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import Row, check_split, local_or_hub_rows, read_rows, require

REPOSITORY = "ScalerLab/JudgeBench"
_FIELDS = ("pair_id", "source", "question", "response_A", "response_B", "label")
_LABELS = {"A>B": "A", "B>A": "B"}
# What the paper calls the parts that ``source`` names.
_CATEGORIES = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0, sample: int | None = None) -> Iterator[Pair]:
    """Read one split; A and B are in the order of the file.

    Args:
        path: A JSON-lines file, or the folder "data" of the published repository; None fetches the hub's data set.
        split: Whose answers: gpt (350 pairs of GPT-4o) or claude (270 pairs of Claude 3.5 Sonnet).
        drops: Not used: every row makes a pair.
        seed: Seed of the sample; the order is the file's.
        sample: Draw so many pairs from all, where ``data.limit`` would take the first, which are of one category.

    Raises:
        UserError: the hub cannot be reached, a file is missing or malformed, or it has fewer pairs than the sample.
    """
    check_split(split, ("gpt", "claude"), "judgebench")
    pairs = _pairs(path, split)
    if sample is None:
        yield from pairs
        return
    every = list(pairs)
    if not isinstance(sample, int) or not 1 <= sample <= len(every):
        raise UserError(f"data.options.sample must be a whole number from 1 to {len(every)}, got {sample!r}")
    for i in sorted(random.Random(seed).sample(range(len(every)), sample)):
        yield every[i]


def _pairs(path: str | None, split: str) -> Iterator[Pair]:
    for where, row in _rows(path, split):
        require(row, _FIELDS, where)
        if row["label"] not in _LABELS:
            raise UserError(f"{where}: field 'label' must be 'A>B' or 'B>A', got {row['label']!r}")
        kind = str(row["source"])
        pair = {
            "id": f"judgebench-{row['pair_id']}",
            "context": row["question"],
            "response_a": row["response_A"],
            "response_b": row["response_B"],
            "label": _LABELS[row["label"]],
            "source": "judgebench",
            "subset": next((name for prefix, name in _CATEGORIES.items() if kind.startswith(prefix)), kind),
            "meta": {"source": kind},
        }
        yield Pair.from_dict(pair, where)


def _rows(path: str | None, split: str) -> Iterator[Row]:
    if path is None or not Path(path).is_dir():
        return local_or_hub_rows(path, split, REPOSITORY)
    found = sorted(Path(path).glob(f"*response_model={split}*.jsonl"))
    if len(found) != 1:
        raise UserError(
            f"{path}: expected one file named 'dataset=judgebench,response_model={split}...jsonl', found {len(found)}; "
            f"it is in the folder 'data' of https://github.com/{REPOSITORY}"
        )
    return read_rows(found[0])
