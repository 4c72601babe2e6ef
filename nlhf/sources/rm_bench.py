"""RM-Bench as a **source**: each row has three good and three bad answers, in three styles, which make nine pairs.

Liu et al., 2024, "RM-Bench: Benchmarking Reward Models of Language Models with Subtlety and Style" (arXiv 2410.16184).
Styles are concise, detailed, and detailed with markdown. A pair is *hard* when the good answer is the plainer one.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nlhf.errors import UserError, nearest
from nlhf.pairs import Pair
from nlhf.sources.rows import Row, check_split, local_or_hub_rows, placed, read_rows, require

REPOSITORY = "THU-KEG/RM-Bench"
STYLES = ("concise", "detailed", "markdown")
DIFFICULTIES = ("hard", "normal", "easy")
DOMAINS = ("chat", "code", "math", "safety")
_PUBLISHED_DOMAINS = ("chat", "code", "math", "safety-refuse", "safety-response")
_ALL = "total_dataset.json"


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0) -> Iterator[Pair]:
    """Read all domains; the good answer is placed as A or B by seed, for each of the nine pairs.

    The nine pairs of a row are one group. A pair's subset is ``domain/difficulty`` (the two kinds of safety in one);
    ``meta`` holds both styles.

    Args:
        path: A JSON file, or the folder "data" of the published repository (``total_dataset.json``, or the files
            ``*_filtered.json`` that are there); None fetches the hub's data set.
        split: test.
        drops: Not used: every row makes nine pairs.
        seed: Seed of the placement.

    Raises:
        UserError: the hub cannot be reached, or a file is missing or malformed.
    """
    check_split(split, ("test",), "rm_bench")
    yield from placed((pair for where, row in _rows(path) for pair in _pairs(row, where)), seed)


def difficulty(chosen_style: int, rejected_style: int) -> str:
    """Hard when the chosen answer is plainer than the rejected one, easy when it is fancier, normal when alike."""
    return DIFFICULTIES[(chosen_style >= rejected_style) + (chosen_style > rejected_style)]


def _rows(path: str | None) -> Iterator[Row]:
    if path is None:
        yield from local_or_hub_rows(None, "train", REPOSITORY)
        return
    files = [Path(path)]
    if files[0].is_dir():
        files = [files[0] / _ALL] if (files[0] / _ALL).exists() else sorted(files[0].glob("*_filtered.json"))
    if not files or not files[0].exists():
        raise UserError(
            f"{path}: no file {_ALL} and none named DOMAIN_filtered.json; they are in the folder 'data' of "
            f"https://github.com/{REPOSITORY}"
        )
    for file in files:
        domain = file.name.removesuffix("_filtered.json")  # files of one domain do not say it in their rows
        for where, row in read_rows(file):
            yield where, {"domain": domain} | row


def _pairs(row: dict[str, Any], where: str) -> Iterator[Pair]:
    require(row, ("id", "prompt", "chosen", "rejected", "domain"), where)
    domain = row["domain"]
    if domain not in _PUBLISHED_DOMAINS:
        hint = nearest(domain, _PUBLISHED_DOMAINS)
        raise UserError(
            f"{where}: field 'domain' must be one of {', '.join(_PUBLISHED_DOMAINS)}, got {domain!r}.{hint}"
        )
    for name in ("chosen", "rejected"):
        texts = row[name]
        if not isinstance(texts, list) or len(texts) != len(STYLES):
            got = f"{len(texts)} texts" if isinstance(texts, list) else type(texts).__name__
            raise UserError(f"{where}: field {name!r} must hold {len(STYLES)} texts, one a style, got {got}")
    for i, chosen in enumerate(row["chosen"]):
        for j, rejected in enumerate(row["rejected"]):
            pair = {
                "id": f"rm_bench-{domain}-{row['id']}-{STYLES[i]}-{STYLES[j]}",
                "context": row["prompt"],
                "response_a": chosen,
                "response_b": rejected,
                "label": "A",
                "source": "rm_bench",
                "subset": f"{domain.split('-')[0]}/{difficulty(i, j)}",
                "group": f"rm_bench-{domain}-{row['id']}",
                "meta": {"chosen_style": STYLES[i], "rejected_style": STYLES[j]},
            }
            yield Pair.from_dict(pair, where)
