"""Read prompts into a model's cache, what they share only once: inside the **Generator** station.

Prompts of one judge begin alike (the same instruction), and several replies need one reading of their prompt. A batch
is laid out as shared beginning, padding, rest: every row's keys and values of the beginning are then in the same
columns and can be copied.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel


class SharedBeginning:
    """The longest beginning that all sequences share, read once.

    Every sequence keeps at least one token of its own. Models with layers that do not attend to all earlier tokens
    (sliding windows, linear attention) share nothing, because the padding would take part in their windows.

    Args:
        model: A causal language model.
        sequences: Token ids, none empty.

    Attributes:
        length: Tokens that are shared; may be 0.
    """

    def __init__(self, model: "PreTrainedModel", sequences: Sequence[Sequence[int]]):
        import torch

        from nlhf.generation.kv_cache import RoomyLayer, new_cache

        self._cache = new_cache(model.config)
        plain = all(isinstance(layer, RoomyLayer) for layer in self._cache.layers)
        self.length = min(common_length(sequences), *(len(s) - 1 for s in sequences)) if plain and sequences else 0
        if self.length:
            ids = torch.tensor([sequences[0][: self.length]], device=device(model))
            read(model, ids, torch.ones_like(ids), self._cache)

    def cache(self, rows: int) -> "DynamicCache":
        """A cache of its own with the beginning in each of ``rows`` rows."""
        import torch

        return select(self._cache, torch.zeros(rows, dtype=torch.long))


def common_length(sequences: Sequence[Sequence[int]]) -> int:
    """How many first elements all sequences have in common."""
    low, high = min(sequences), max(sequences)  # in lexicographic order, the extremes differ first
    return next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices in batches of at most ``size``, so that padding is little.

    Longest first: a batch that does not fit into memory fails at once. A batch holds no sequence that is shorter than
    three quarters of its longest.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if len(batch) == size or (batch and 4 * lengths[i] < 3 * lengths[batch[0]]):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def lay_out(
    sequences: Sequence[Sequence[int]], shared: int, pad_id: int, device: "torch.device"
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Token ids and mask, both [rows, width], padded between the shared beginning and the rest."""
    import torch

    width = max(map(len, sequences))
    ids = [[*s[:shared], *[pad_id] * (width - len(s)), *s[shared:]] for s in sequences]
    mask = [[1] * shared + [0] * (width - len(s)) + [1] * (len(s) - shared) for s in sequences]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def read(
    model: "PreTrainedModel", ids: "torch.Tensor", mask: "torch.Tensor", cache: "DynamicCache", keep: int = 1
) -> "torch.Tensor":
    """Extend the cache by tokens; the logits of the last ``keep`` of them, [rows, keep, vocabulary].

    Args:
        model: A causal language model.
        ids: The new tokens, [rows, new].
        mask: 1 for tokens and 0 for padding, those in the cache included, [rows, cached + new].
        cache: Keys and values of the tokens before.
        keep: Positions to project to the vocabulary.
    """
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    return output.logits[:, -keep:]


def select(cache: "DynamicCache", rows: "torch.Tensor") -> "DynamicCache":
    """A cache with these rows of another, which stays as it is."""
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        if layer.is_initialized:
            layer.batch_select_indices(rows.to(layer.device))
    return chosen


def device(model: "PreTrainedModel") -> "torch.device":
    """Where the model's inputs belong."""
    return model.get_input_embeddings().weight.device
