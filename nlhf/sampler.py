"""The order in which a trainer that draws rollouts goes through its prompts: at the **trainer**, before generation."""

from collections.abc import Iterator
from typing import Any

from trl.trainer.utils import RepeatSampler

from nlhf.training import shuffled


class ShuffledRepeatSampler(RepeatSampler):
    """trl's repetitions of prompts, over a permutation of our own.

    trl draws a new permutation from one running generator at the start of every epoch, so a run resumed after an epoch
    boundary would replay the first permutation. Ours depends on seed and epoch alone, and keeps groups of neighbours
    (both orders of a pair, where both are shown) in one step.

    Args:
        data_source: The prompts.
        mini_repeat_count: Rollouts of a prompt.
        batch_size: Prompts of a step.
        repeat_count: How often the prompts of a step are asked for.
        trainer: Knows the epoch.
        seed: Of the permutations.
        group: Neighbours that stay together.
    """

    def __init__(
        self,
        data_source: Any,
        mini_repeat_count: int,
        batch_size: int,
        repeat_count: int,
        trainer: Any,
        seed: int,
        group: int = 1,
    ):
        super().__init__(data_source, mini_repeat_count, batch_size, repeat_count, shuffle=False)
        self.trainer, self.seed, self.group = trainer, seed, group

    @classmethod
    def like(cls, parent: RepeatSampler, trainer: Any, seed: int, group: int = 1) -> "ShuffledRepeatSampler":
        """With the repetitions of trl's own sampler."""
        counts = parent.mini_repeat_count, parent.batch_size, parent.repeat_count
        return cls(parent.data_source, *counts, trainer, seed, group)

    def __iter__(self) -> Iterator[int]:
        permutation = shuffled(self.num_samples, self.group, self.seed + epoch_of(self.trainer))
        return (permutation[i] for i in super().__iter__())


def epoch_of(trainer: Any) -> int:
    """The epoch, from 0, that the next step belongs to."""
    return int(trainer.state.epoch or 0)
