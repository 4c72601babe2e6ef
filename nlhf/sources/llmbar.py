"""LLMBar as a **source**: an instruction and two outputs of which one follows it, hard to tell for a judge of style.

Zeng et al., 2023, "Evaluating Large Language Models at Evaluating Instruction Following" (arXiv 2310.07641, MIT). 419
pairs: Natural, and four adversarial subsets whose worse output looks better.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sources.rows import check_split, next_existing, read_rows, require

_PUBLISHED = "https://github.com/princeton-nlp/LLMBar"
_FILES = {
    "Natural": "Natural/dataset.json",
    "Neighbor": "Adversarial/Neighbor/dataset.json",
    "GPTInst": "Adversarial/GPTInst/dataset.json",
    "GPTOut": "Adversarial/GPTOut/dataset.json",
    "Manual": "Adversarial/Manual/dataset.json",
}
_LABELS = {1: "A", 2: "B"}


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read all five subsets; A and B are ``output_1`` and ``output_2``, in the order of the files.

    Args:
        path: The folder "Dataset/LLMBar" of the published repository, or one above it.
        split: test.
        drops: Not used: every row makes a pair.
        seed: Not used: the order is the file's, in which either side wins about as often.

    Raises:
        UserError: a file is missing or malformed.
    """
    check_split(split, ("test",), "llmbar")
    folder = _folder(path)
    for subset, name in _FILES.items():
        file = next_existing(folder, (name,), f"subset {subset} of LLMBar ({_PUBLISHED})")
        for number, (where, row) in enumerate(read_rows(file), start=1):
            require(row, ("input", "output_1", "output_2", "label"), where)
            if row["label"] not in _LABELS or isinstance(row["label"], bool):
                raise UserError(f"{where}: field 'label' must be 1 or 2, got {row['label']!r}")
            pair = {
                "id": f"llmbar-{subset}-{number}",
                "context": row["input"],
                "response_a": row["output_1"],
                "response_b": row["output_2"],
                "label": _LABELS[row["label"]],
                "source": "llmbar",
                "subset": subset,
            }
            yield Pair.from_dict(pair, where)


def _folder(path: str | None) -> Path:
    if path is None or not Path(path).is_dir():
        missing = "no folder given" if path is None else f"{path}: no such folder"
        raise UserError(
            f"source 'llmbar': {missing}. Download the folder 'Dataset/LLMBar' of {_PUBLISHED} and name it with "
            f"--data.path; expected files: {', '.join(_FILES.values())}"
        )
    above = [Path(path), Path(path) / "LLMBar", Path(path) / "Dataset" / "LLMBar"]
    return next((folder for folder in above if (folder / "Natural").is_dir()), above[0])
