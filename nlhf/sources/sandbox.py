"""Source `sandbox`: pairs drawn from the built-in world of `nlhf.sandbox.world`; nothing is downloaded."""

from collections import Counter
from collections.abc import Iterator

from nlhf.pairs import Pair
from nlhf.sandbox.world import draw_pairs


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0, n: int | None = None) -> Iterator[Pair]:
    """Draw ``n`` pairs of ``split`` (train, cold_start, validation, id, ood or reversed); ``path`` is not used."""
    yield from draw_pairs(split, n=n, seed=seed)
