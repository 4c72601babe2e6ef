"""JudgeBench as a **source**: two answers of one model to a hard question, of which one is correct.

Tan et al., 2024, "JudgeBench: A Benchmark for Evaluating LLM-based Judges" (arXiv 2410.12784). The label is a ground
truth, not a preference; both answers come from one model, so style says little.
"""

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


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read one split; A and B are in the order of the file.

    Args:
        path: A JSON-lines file, or the folder "data" of the published repository; None fetches the hub's data set.
        split: Whose answers: gpt (350 pairs of GPT-4o) or claude (270 pairs of Claude 3.5 Sonnet).
        drops: Not used: every row makes a pair.
        seed: Not used: the order is the file's.

    Raises:
        UserError: the hub cannot be reached, or a file is missing or malformed.
    """
    check_split(split, ("gpt", "claude"), "judgebench")
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
