"""How likely a model finds given continuations of a reply: inside the **Generator** station, for forced verdicts.

One forward pass reads each prompt with the beginning that is forced on the reply. Continuations of one token are read
off its last position; longer ones are further rows on the same cache.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nlhf.errors import UserError
from nlhf.generation.prefill import SharedBeginning, by_length, common_length, device, lay_out, read, select

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Branches:
    """A text that goes on in several ways, as token ids.

    Attributes:
        trunk: What all of them share; not empty.
        scored: How many of the trunk's last tokens belong to the continuations; 0 in most cases.
        branches: What follows the trunk in each continuation.
    """

    trunk: list[int]
    scored: int
    branches: list[list[int]]

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], prefix: str, continuations: Sequence[str]
    ) -> "Branches":
        """The branches of a reply to ``prompt`` that begins with ``prefix``.

        Each continuation is tokenised together with the prefix, as the model would write it, because the last
        characters of the prefix may merge with the first of a continuation. It is scored from the first token in which
        the prefix alone, or another continuation, differs.
        """

        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        joined = [ids(prefix + continuation) for continuation in continuations]
        trunk = common_length(joined)
        branches = [sequence[trunk:] for sequence in joined]
        if len(joined) > 1 and not all(branches):
            raise ValueError(f"one continuation is the beginning of another: {list(continuations)}")
        return cls([*prompt, *joined[0][:trunk]], trunk - common_length([ids(prefix), *joined]), branches)


def branch_log_probs(
    model: "PreTrainedModel",
    items: Sequence[Branches],
    pad_id: int,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """Natural log of P(continuation | what stands before it), summed over its tokens, [items, branches].

    Args:
        model: A causal language model in evaluation mode, without gradients.
        items: What to score.
        pad_id: Any token; it is masked.
        batch_size: Rows computed at once.
        progress: Called with the number of further items done.

    Raises:
        UserError: the model computes NaN.
    """
    shared = SharedBeginning(model, [item.trunk[: len(item.trunk) - item.scored] for item in items])
    scores = [[0.0] * len(item.branches) for item in items]
    for batch in by_length([len(item.trunk) - shared.length for item in items], batch_size):
        for i, c, value in _token_log_probs(model, {i: items[i] for i in batch}, shared, pad_id, batch_size):
            scores[i][c] += value
        if progress:
            progress(len(batch))
    if any(math.isnan(value) for row in scores for value in row):
        raise UserError("the model computes NaN for a verdict's probability; load it with model.dtype float32")
    return scores


def _token_log_probs(
    model: "PreTrainedModel", items: dict[int, Branches], shared: SharedBeginning, pad_id: int, batch_size: int
) -> Iterator[tuple[int, int, float]]:
    """(item, branch, log-probability) of every scored token of a batch."""
    import torch

    ids, mask = lay_out([item.trunk for item in items.values()], shared.length, pad_id, device(model))
    cache, keep = shared.cache(len(items)), 1 + max(item.scored for item in items.values())
    logits = read(model, ids[:, shared.length :], mask, cache, keep)
    yield from _picked(
        logits,
        [
            (i, c, row, keep - 1 - item.scored + n, token)
            for row, (i, item) in enumerate(items.items())
            for c, branch in enumerate(item.branches)
            for n, token in enumerate([*item.trunk[len(item.trunk) - item.scored :], *branch[:1]])
        ],
    )
    longer = [
        (i, c, row, branch)
        for row, (i, item) in enumerate(items.items())
        for c, branch in enumerate(item.branches)
        if len(branch) > 1
    ]
    for start in range(0, len(longer), batch_size):
        part = longer[start : start + batch_size]
        rows = torch.tensor([row for _, _, row, _ in part], device=mask.device)
        # Padded on the right: no token looks at what comes after it.
        width = max(len(branch) for *_, branch in part) - 1
        ids = torch.tensor([[*b[:-1], *[pad_id] * (width + 1 - len(b))] for *_, b in part], device=mask.device)
        seen = torch.cat([mask[rows], torch.ones_like(ids)], dim=1)
        logits = read(model, ids, seen, select(cache, rows), keep=width)
        yield from _picked(
            logits,
            [(i, c, row, n, t) for row, (i, c, _, branch) in enumerate(part) for n, t in enumerate(branch[1:])],
        )


def _picked(
    logits: "torch.Tensor", places: Sequence[tuple[int, int, int, int, int]]
) -> Iterator[tuple[int, int, float]]:
    """(item, branch, log-probability) at each place (item, branch, row, column, token)."""
    import torch

    items, branches, *where = zip(*places, strict=True) if places else ((),) * 5
    rows, columns, tokens = (torch.tensor(axis, dtype=torch.long, device=logits.device) for axis in where)
    logits = logits.float()
    values = logits[rows, columns, tokens] - logits.logsumexp(-1)[rows, columns]
    return zip(items, branches, values.tolist(), strict=True)
