"""A cache of keys and values with room to grow: inside the **Generator** station.

transformers' own copies everything that is in the cache for every token that is written, a quarter of the time of a
small model's step at a few hundred tokens, and more at more.
"""

import torch
from transformers import DynamicCache, DynamicLayer, PretrainedConfig

_ROOM = 64  # tokens that fit in before everything is copied again


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` whose keys and values are the filled part of a larger tensor.

    Whoever replaces ``keys`` and ``values`` (to select rows, for example) leaves that tensor to whoever had it.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, [rows, heads, new, width] each; all that are there now."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._filled = None
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self.keys is not self._filled or end > self._room[0].shape[-2]:
            self._room = tuple(
                self._larger(old, new, start, end)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., start:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        self._filled = self.keys
        return self.keys, self.values

    @staticmethod
    def _larger(old: torch.Tensor, new: torch.Tensor, start: int, end: int) -> torch.Tensor:
        room = new.new_empty(*new.shape[:-2], end + _ROOM, new.shape[-1])
        if start:
            room[..., :start, :] = old
        return room


def new_cache(config: PretrainedConfig) -> DynamicCache:
    """An empty cache for a model, roomy where a layer attends to all earlier tokens."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
