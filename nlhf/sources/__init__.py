"""Data sources: each turns one data set into pairs; the table of names is `SOURCES`.

Station of the path: **source** -> Pair. To add one, write a module beside this file with a function
``load(path, split, drops, *, seed=0) -> Iterator[Pair]``, whose further keywords are its options, and add a line to
`SOURCES`. A row that cannot be used is counted in ``drops`` under a reason a reader understands; a malformed file
raises `UserError` naming file, row, field.
"""

import itertools
import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from nlhf.errors import UserError, nearest
from nlhf.pairs import Pair, hide_critiques

SOURCES = {
    "comve": "nlhf.sources.comve",
    "defacto": "nlhf.sources.defacto",
    "helpsteer3": "nlhf.sources.helpsteer3",
    "jsonl": "nlhf.sources.jsonl",
    "judgebench": "nlhf.sources.judgebench",
    "llmbar": "nlhf.sources.llmbar",
    "pandalm": "nlhf.sources.pandalm",
    "rewardbench": "nlhf.sources.rewardbench",
    "rewardbench2": "nlhf.sources.rewardbench2",
    "rm_bench": "nlhf.sources.rm_bench",
    "rm_nlhf": "nlhf.sources.rm_nlhf",
    "roleplay": "nlhf.sources.roleplay",
    "sandbox": "nlhf.sources.sandbox",
    "tulu3_pref": "nlhf.sources.tulu3_pref",
}


@dataclass
class DataConfig:
    """One data set to load."""

    source: str
    """Name of the data set: comve, defacto, helpsteer3, jsonl (your own file, CSV and parquet too), rm_nlhf, roleplay,
    sandbox or tulu3_pref; or a benchmark: judgebench, llmbar, pandalm, rewardbench, rewardbench2 or rm_bench."""

    split: str = "train"
    """Part of the data set."""

    path: str | None = None
    """File or folder to read; sources that live on a hub are fetched when it is left out."""

    limit: int | None = None
    """Keep the first N pairs."""

    skip: int = 0
    """Pass over the first N pairs."""

    labelled_fraction: float = 1.0
    """Share of the critiques that stays visible; the other pairs keep only their label."""

    seed: int | None = None
    """Seed of everything random in loading: which critiques are hidden, placement of A and B, generated worlds; null
    takes the seed of the run."""

    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the source, by name."""

    def __post_init__(self):
        if self.source not in SOURCES:
            raise UserError(
                f"unknown data source {self.source!r}; known: {', '.join(SOURCES)}.{nearest(self.source, SOURCES)}"
            )
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data.limit must be at least 1, got {self.limit}")
        if self.skip < 0:
            raise UserError(f"data.skip must not be negative, got {self.skip}")
        if not 0.0 <= self.labelled_fraction <= 1.0:
            raise UserError(f"data.labelled_fraction must lie between 0 and 1, got {self.labelled_fraction}")


def load_pairs(config: DataConfig, drops: Counter | None = None, seed: int = 0) -> list[Pair]:
    """Load a data set: the source's pairs less those with equal responses, then limit, then hidden critiques.

    Args:
        config: What to load.
        drops: Receives how many rows were left out, by reason.
        seed: The run's seed, where the configuration has none of its own.

    Raises:
        UserError: nothing is left, two pairs share an id, or the source says what is wrong with its input.
    """
    drops = Counter() if drops is None else drops
    seed = seed if config.seed is None else config.seed
    load = import_module(SOURCES[config.source]).load
    known = [name for name in load.__kwdefaults__ if name != "seed"]
    for name in config.options:
        if name not in known:
            raise UserError(f"source {config.source!r}: unknown option {name!r}; known: {known}.{nearest(name, known)}")
    stream = load(config.path, config.split, drops, seed=seed, **config.options)
    where = config.path or config.source
    start = min(config.skip, sys.maxsize)  # islice takes no larger number
    end = None if config.limit is None else min(config.skip + config.limit, sys.maxsize)
    pairs = list(itertools.islice(_usable(stream, drops, where), start, end))
    if not pairs:
        nothing = f"data.skip = {config.skip} passes over all" if config.skip else "the source is empty"
        reasons = "; ".join(f"{n} x {reason}" for reason, n in drops.items()) or nothing
        raise UserError(f"{where}: no pairs left in split {config.split!r} ({reasons})")
    return hide_critiques(pairs, config.labelled_fraction, seed)


def _usable(stream, drops: Counter, where: str):
    seen: set[str] = set()
    for pair in stream:
        if pair.response_a == pair.response_b:
            drops["equal responses"] += 1
            continue
        if pair.id in seen:
            raise UserError(f"{where}: two pairs have the id {pair.id!r}; ids must be unique")
        seen.add(pair.id)
        yield pair
