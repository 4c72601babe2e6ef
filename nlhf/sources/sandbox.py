"""Source `sandbox`: pairs drawn from the built-in world of `nlhf.sandbox.world`; nothing is downloaded."""

from collections import Counter
from collections.abc import Iterator

from nlhf.errors import UserError
from nlhf.pairs import Pair
from nlhf.sandbox.world import draw_pairs


def load(
    path: str | None,
    split: str,
    drops: Counter,
    *,
    seed: int = 0,
    n: int | None = None,
    cue_rate: float | None = None,
    swayed: float = 0.35,
    habit: float = 0.0,
    vague: float = 0.0,
) -> Iterator[Pair]:
    """Draw pairs.

    Args:
        path: Must be None: there is nothing to read.
        split: train, cold_start, validation, id, ood, reversed or contrary (see `draw_pairs`).
        drops: Nothing is ever dropped.
        seed: Seed of the world.
        n: Number of pairs.
        cue_rate: How often the flourish sits on the winner's side; None for the split's usual rate.
        swayed: Share of the cold start's demonstrations that look for reasons to favour the flourished side.
        habit: Share of the cold start's demonstrations that judge a task by one and the same wrong aspect.
        vague: Share of critiques that name the decisive aspect and praise both sides for it.

    Raises:
        UserError: a path is given, or an option is out of its range.
    """
    if path is not None:
        raise UserError(
            "source 'sandbox' draws its pairs and reads no file; leave out data.path, or name another source"
        )
    if n is not None and (not isinstance(n, int) or n < 1):
        raise UserError(f"source 'sandbox': option n must be a whole number, at least 1, got {n!r}")
    for name, value in (("cue_rate", cue_rate), ("swayed", swayed), ("habit", habit), ("vague", vague)):
        if value is not None and not (isinstance(value, int | float) and 0 <= value <= 1):
            raise UserError(f"source 'sandbox': option {name} must lie between 0 and 1, got {value}")
    yield from draw_pairs(split, n, seed, cue_rate, swayed, habit, vague)
