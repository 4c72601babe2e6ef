"""HelpSteer3 preference as a **source**: conversations with two responses, judged and explained by several humans.

Wang et al., 2025 (nvidia/HelpSteer3 on the hub, CC BY 4.0), cleaned as arXiv 2609.38792 cleans it.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import Row, check_split, local_or_hub_rows, require

REPOSITORY = "nvidia/HelpSteer3"
_FIELDS = ("domain", "context", "response1", "response2", "overall_preference", "individual_preference")
_CRITIQUES = ("reasoning", "feedback")


def load(
    path: str | None,
    split: str,
    drops: Counter,
    *,
    seed: int = 0,
    critique: Literal["reasoning", "feedback"] = "reasoning",
    train_path: str | None = None,
) -> Iterator[Pair]:
    """Read one split; A is always ``response1`` (negative preference: A is better).

    Left out, in this order and each under its own reason: multilingual rows, rows with preference 0, repetitions within
    the split (equal context and responses; the first is kept), validation rows that occur in the cleaned train split.

    Args:
        path: A local file, or a folder with train and validation files; None fetches the hub's data set.
        split: train or validation.
        drops: Counts the rows left out.
        seed: Not used: placement of A and B is for the trainer and the evaluation to exchange.
        critique: The annotator's comparison (``reasoning``) or the comments on each response (``feedback``).
        train_path: The train file, when the split is validation and ``path`` is a single file.

    Raises:
        UserError: the hub cannot be reached, the train file is not known, or a row is malformed.
    """
    check_split(split, ("train", "validation"), "helpsteer3")
    if critique not in _CRITIQUES:
        raise UserError(f"source 'helpsteer3': option 'critique' must be {' or '.join(_CRITIQUES)}, got {critique!r}")
    in_train = _train_keys(path, train_path) if split == "validation" else set()
    for pair in _cleaned(local_or_hub_rows(path, split, REPOSITORY, "preference"), split, critique, drops):
        if pair.key in in_train:
            drops["occurs in train"] += 1
        else:
            yield pair


def _train_keys(path: str | None, train_path: str | None) -> set[str]:
    if path is not None and train_path is None and not Path(path).is_dir():
        raise UserError(
            "source 'helpsteer3': validation rows that occur in train are left out, so the train file must be known; "
            "give --data.options.train_path FILE, or a --data.path folder with a train and a validation file"
        )
    rows = local_or_hub_rows(train_path or path, "train", REPOSITORY, "preference")
    return {pair.key for pair in _cleaned(rows, "train", "reasoning", Counter())}


def _cleaned(rows: Iterator[Row], split: str, critique: str, drops: Counter) -> Iterator[Pair]:
    seen: set[str] = set()
    for number, (where, row) in enumerate(rows, start=1):
        require(row, _FIELDS, where)
        if row["domain"] == "multilingual":
            drops["multilingual domain"] += 1
            continue
        if row["overall_preference"] == 0:
            drops["preference 0"] += 1
            continue
        pair = Pair.from_dict(_own_schema(row, f"helpsteer3-{split}-{number}", critique, where), where)
        if pair.key in seen:
            drops["repeated within the split"] += 1
            continue
        seen.add(pair.key)
        yield pair


def _own_schema(row: dict[str, Any], name: str, critique: str, where: str) -> dict[str, Any]:
    preference = row["overall_preference"]
    if isinstance(preference, bool) or preference not in range(-3, 4):
        raise UserError(f"{where}: field 'overall_preference' must be a whole number from -3 to 3, got {preference!r}")
    return {
        "id": name,
        "context": row["context"],
        "response_a": row["response1"],
        "response_b": row["response2"],
        "label": "A" if preference < 0 else "B",
        "strength": int(preference),
        "critiques": _chosen_critique(row["individual_preference"], preference, critique, where),
        "source": "helpsteer3",
        "subset": str(row["domain"] or ""),
        "meta": {"language": row.get("language")},
    }


def _chosen_critique(annotators: Any, preference: int, kind: str, where: str) -> list[dict[str, str]]:
    """What one annotator wrote: whose score is the overall preference, else has its sign, else the first.

    An annotator who wrote nothing is passed over. Returns an empty list when nobody wrote anything.
    """
    annotators = annotators or []
    if not isinstance(annotators, list) or not all(isinstance(a, dict) for a in annotators):
        raise UserError(f"{where}: field 'individual_preference' must be a list of objects")
    written = [(a.get("score"), text) for a in annotators if (text := _text(a, kind))]
    # min keeps the first of equals, which is the order of the file.
    chosen = min(written, key=lambda item: _disagreement(item[0], preference), default=None)
    return [{"text": chosen[1]}] if chosen else []


def _disagreement(score: int | None, preference: int) -> int:
    """0 for the overall preference itself, 1 for its sign, 2 for anything else."""
    if score == preference:
        return 0
    return 1 if score is not None and score * preference > 0 else 2


def _text(annotator: dict[str, Any], kind: str) -> str:
    if kind == "reasoning":
        return (annotator.get("reasoning") or "").strip()
    comments = (("Response A: ", annotator.get("feedback1")), ("Response B: ", annotator.get("feedback2")))
    return "\n".join(prefix + text.strip() for prefix, text in comments if text and text.strip())
