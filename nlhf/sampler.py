"""The order in which a trainer goes through its rows: at the **trainer**, before the first batch.

Orders depend on the seed and the epoch alone, so a resumed run goes on in the order of an uninterrupted one.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from nlhf.config import Presentation
from nlhf.judge import shown_pairs
from nlhf.pairs import Pair, swap_at_random


def put_in_order(pairs: Sequence[Pair], order: Presentation, seed: int) -> list[Pair]:
    """Pairs as a judge will see them: exchanged by a seeded coin, in both orders (side by side), or as given."""
    if order == "random":
        return swap_at_random(pairs, seed)
    if order == "both":
        return [shown for _, shown in shown_pairs(pairs)]
    return list(pairs)


def group_size(order: Presentation) -> int:
    """How many neighbouring rows stay together when rows are shuffled: both orders of a pair share a batch."""
    return 2 if order == "both" else 1


def shuffled(rows: int, group: int, seed: int) -> list[int]:
    """A permutation of ``range(rows)`` that keeps groups of neighbours together; it depends on the seed alone.

    Seeds of the form run's seed + epoch make a resumed run see the order that an uninterrupted one would have seen.
    """
    import torch

    starts = torch.randperm(rows // group, generator=torch.Generator().manual_seed(seed)) * group
    return [start + i for start in starts.tolist() for i in range(group)]


def epoch_of(trainer: Any) -> int:
    """The epoch, from 0, that the next step belongs to."""
    return int(trainer.state.epoch or 0)


class ShuffledSampler:
    """Goes through rows in a permutation that every epoch draws anew.

    The samplers of transformers and trl draw from one running generator at the start of every epoch, so a run resumed
    after an epoch boundary would replay the first permutation.

    Args:
        places: Places 0 to rows - 1 in the order to go through, ``range(rows)`` or one with repetitions, as trl's
            RepeatSampler without shuffling gives them.
        rows: How many rows there are.
        trainer: Knows the epoch.
        seed: Of the permutations.
        group: Neighbours that stay together (both orders of a pair, where both are shown).
    """

    def __init__(self, places: Collection[int], rows: int, trainer: Any, seed: int, group: int = 1):
        self.places, self.rows, self.trainer, self.seed, self.group = places, rows, trainer, seed, group

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        permutation = shuffled(self.rows, self.group, self.seed + epoch_of(self.trainer))
        return (permutation[place] for place in self.places)
