"""DeFacto as a **source**: a one-sentence summary with factual errors against its human correction.

Liu et al., 2023, "On Improving Summarization Factual Consistency from Natural Language Feedback" (MIT; the articles are
news text). The corrected summary wins; the critique is the human's explanation and instruction, blame of the candidate.
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import check_split, next_existing, placed, read_rows, require

_PUBLISHED = "https://github.com/microsoft/DeFacto"
_FILES = {
    "train": ("train.jsonl",),
    "validation": ("val.jsonl", "validation.jsonl"),
    "test": ("test.jsonl",),
}
_FIELDS = ("article", "candidate", "doc_id", "has_error", "feedback")


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read one split of DeFacto; candidate and correction are placed as A or B by seed.

    Args:
        path: The folder with train.jsonl, val.jsonl and test.jsonl (folder data of the published repository).
        split: train, validation or test.
        drops: Counts rows without an error and rows whose correction says the same.
        seed: Seed of the placement.

    Raises:
        UserError: a file is missing or malformed.
    """
    check_split(split, list(_FILES), "defacto")
    if path is None or not Path(path).is_dir():
        missing = "no folder given" if path is None else f"{path}: no such folder"
        raise UserError(
            f"source 'defacto': {missing}. Download the folder 'data' of {_PUBLISHED} and name it with --data.path; "
            "expected files: train.jsonl, val.jsonl, test.jsonl"
        )
    file = next_existing(Path(path), _FILES[split], f"split {split!r} of DeFacto ({_PUBLISHED})")
    pairs = (_pair(row, where, split, drops) for where, row in read_rows(file))
    yield from placed((pair for pair in pairs if pair is not None), seed)


def _pair(row: dict[str, Any], where: str, split: str, drops: Counter) -> Pair | None:
    """The pair with the faulty candidate as A, or None (counted) when there is nothing to prefer."""
    require(row, _FIELDS, where)
    if not row["has_error"]:
        drops["no error in the candidate summary"] += 1
        return None
    feedback = row["feedback"]
    if not isinstance(feedback, dict):
        raise UserError(f"{where}: field 'feedback' must be an object, got {type(feedback).__name__}")
    require(feedback, ("summary", "explanation", "instruction"), f"{where}: field 'feedback'")
    corrected = feedback["summary"] or ""
    if not corrected.strip():
        drops["no corrected summary"] += 1
        return None
    if corrected.strip() == str(row["candidate"]).strip():
        drops["correction equals the candidate"] += 1
        return None
    blame = [text.strip() for text in (feedback["explanation"], feedback["instruction"]) if text and text.strip()]
    pair = {
        "id": f"defacto-{split}-{row['doc_id']}",
        "context": f"Summarise this article in one sentence.\n\n{row['article']}",
        "response_a": row["candidate"],
        "response_b": corrected,
        "label": "B",
        "critiques": [{"weaknesses_a": "\n".join(blame)}],
        "source": "defacto",
        "subset": "+".join(kind for kind in ("intrinsic", "extrinsic") if row.get(f"{kind}_error")) or "unspecified",
        # The text and not the id: one article stands in two of the published splits.
        "group": sha1(str(row["article"]).encode("utf-8", "surrogatepass")).hexdigest(),
        "meta": {"evidence": feedback.get("evidence") or ""},
    }
    return Pair.from_dict(pair, where)
