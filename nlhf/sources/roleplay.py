"""Source `roleplay`: pairs of role-play turns drawn from `nlhf.roleplay.world`; nothing is downloaded."""

from collections import Counter
from collections.abc import Iterator

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.roleplay.world import pairs
from nlhf.sources.rows import check_split


def load(path: str | None, split: str, drops: Counter, *, seed: int = 0, n: int = 600) -> Iterator[Pair]:
    """Draw pairs.

    Args:
        path: Must be None: there is nothing to read.
        split: train or held_out, by scenario.
        drops: Nothing is ever dropped.
        seed: Seed of the world.
        n: Number of pairs.

    Raises:
        UserError: a path is given, the split is unknown, or ``n`` is not positive.
    """
    if path is not None:
        raise UserError(f"source 'roleplay' draws its pairs and reads nothing; leave out path {path!r}")
    check_split(split, ("train", "held_out"), "roleplay")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"source 'roleplay': option 'n' must be a whole number from 1 on, got {n!r}")
    yield from pairs(n, split, seed)
