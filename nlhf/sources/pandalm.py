"""PandaLM's test set as a **source**: answers of two instruction-tuned models, judged by three humans, with ties.

Wang et al., 2023, "PandaLM: An Automatic Evaluation Benchmark for LLM Instruction Tuning Optimization" (arXiv
2306.05087, Apache-2.0).
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import REWRITTEN, check_split, next_existing, read_rows, require

_PUBLISHED = "https://github.com/WeOpenML/PandaLM"
_FILE = "testset-v1.json"
_ANNOTATORS = ("annotator1", "annotator2", "annotator3")
_FIELDS = ("idx", "instruction", "input", "response1", "response2", *_ANNOTATORS)
_LABELS = {0: "tie", 1: "A", 2: "B"}


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read the human-labelled test set; A and B are ``response1`` and ``response2``; the majority's label counts.

    A few responses are JSON booleans (a model said "True"); they are cast to text, which ``meta`` and the manifest say.
    Pairs of one instruction and input are one group.

    Args:
        path: The file testset-v1.json, or the folder that holds it.
        split: test.
        drops: Counts rows on which all three annotators differ.
        seed: Not used: the order is the file's.

    Raises:
        UserError: the file is missing or malformed.
    """
    check_split(split, ("test",), "pandalm")
    for where, row in read_rows(_file(path)):
        require(row, _FIELDS, where)
        label = _majority(row, where)
        if label is None:
            drops["no majority among the annotators"] += 1
            continue
        task = row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")
        cast = [name for name in ("response1", "response2") if isinstance(row[name], bool)]
        pair = {
            "id": f"pandalm-{row['idx']}",
            "context": task,
            "response_a": _text(row["response1"]),
            "response_b": _text(row["response2"]),
            "label": label,
            "source": "pandalm",
            "subset": "",
            "group": sha1(task.encode("utf-8", "surrogatepass")).hexdigest(),
            "meta": {"models": row.get("cmp_key")} | ({REWRITTEN: "JSON boolean cast to text"} if cast else {}),
        }
        yield Pair.from_dict(pair, where)


def _file(path: str | None) -> Path:
    if path is None or not Path(path).exists():
        missing = "no file given" if path is None else f"{path}: no such file or folder"
        raise UserError(
            f"source 'pandalm': {missing}. Download 'data/{_FILE}' of {_PUBLISHED} and name it with --data.path"
        )
    file = Path(path)
    return next_existing(file, (_FILE,), f"PandaLM's test set ({_PUBLISHED})") if file.is_dir() else file


def _majority(row: dict[str, Any], where: str) -> str | None:
    """What at least two of the three annotators say; None when all differ."""
    for name in _ANNOTATORS:
        if row[name] not in _LABELS or isinstance(row[name], bool):
            raise UserError(f"{where}: field {name!r} must be 0 (tie), 1 or 2, got {row[name]!r}")
    [(label, votes), *_] = Counter(row[name] for name in _ANNOTATORS).most_common()
    return _LABELS[label] if votes > 1 else None


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, bool) else value
