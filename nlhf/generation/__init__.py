"""Answer chat prompts with a model: the **Generator** station of the path.

A generator is any class with the method of `nlhf.judge.Generator`; this one runs a transformers model in this
process. A reply depends on its prompt, the sample's index and the seed, and on the batch that it was computed in only
as far as the device's arithmetic rounds differently there (hardly in float32, sometimes in bfloat16).
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nlhf.errors import UserError
from nlhf.formats.base import Message
from nlhf.generation.prefill import SharedBeginning, device, lay_out, read
from nlhf.generation.probability import Branches, branch_log_probs
from nlhf.judge import Mode, Reply
from nlhf.models import check_tokenizer, render_chat

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

MOST_SAMPLES = 10_000  # of one prompt
_FORCED_TOKENS = 32  # room for a verdict that is forced
_CHUNK = 16  # tokens between two looks at which replies have ended


# Arguments of the tokenizer beside its template's variables: some would cut a prompt, the others we set.
_NO_VARIABLES = (
    *("tokenizer", "messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)


@dataclass
class SamplingConfig:
    """How replies are drawn."""

    max_new_tokens: int = 1024
    """Longest reply in tokens; a reply that reaches it without ending is marked as truncated."""

    temperature: float = 0.0
    """0 takes the most likely token (greedy); 1 samples from the model as it is."""

    top_p: float = 1.0
    """Sample from the most likely tokens that together hold this probability; 1 is all of them."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 is all of them."""

    seed: int = 0
    """Seed of the samples."""

    batch_size: int = 16
    """Replies computed at once on a device; it changes speed and memory, and the replies only by rounding."""

    max_prompt_tokens: int | None = None
    """Refuse prompts longer than this; without it, the model's context window decides."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for example {enable_thinking: false}."""

    def __post_init__(self):
        problems = []
        for name in ("max_new_tokens", "batch_size", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"sampling.{name} must be at least 1, got {value}")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"sampling.temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            problems.append(f"sampling.top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            problems.append(f"sampling.top_k must not be negative (0 is all tokens), got {self.top_k}")
        for name in self.chat_template_kwargs:
            if not isinstance(name, str) or name in _NO_VARIABLES:
                problems.append(f"sampling.chat_template_kwargs: {name!r} is no variable of a chat template")
        if problems:
            raise UserError("; ".join(problems))

    def problems(self, samples: int) -> list[str]:
        """Why so many replies to each prompt make no sense with these settings; empty when they do."""
        if not 1 <= samples <= MOST_SAMPLES:
            return [f"samples must lie between 1 and {MOST_SAMPLES:,}, got {samples}"]
        if samples > 1 and not self.temperature:
            return [
                f"samples is {samples} but sampling.temperature is 0, which would repeat one reply; raise the "
                "temperature or ask for one sample"
            ]
        return []

    def drawn(self, samples: int) -> int:
        """How many replies to a prompt have to be computed for so many samples: greedy ones are all the same.

        Raises:
            UserError: less than one sample.
        """
        if samples < 1:
            raise UserError(f"samples must be at least 1, got {samples}")
        return samples if self.temperature > 0 else 1


def repeated(replies: Sequence[Reply], samples: int) -> list[Reply]:
    """The samples of one prompt from the replies that were computed, see `SamplingConfig.drawn`."""
    return [replies[k % len(replies)] for k in range(samples)]


class TransformersGenerator:
    """Replies of a transformers causal language model on its own device.

    Args:
        model: The model; its training mode and generation defaults are restored after every call.
        tokenizer: Its tokenizer, with a chat template.
        config: How to sample.

    Raises:
        UserError: the tokenizer does not fit the model or has no token that ends a turn.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        config: SamplingConfig | None = None,
    ):
        self.model, self.tokenizer, self.config = model, tokenizer, config or SamplingConfig()
        check_tokenizer(tokenizer, model.get_input_embeddings().num_embeddings)
        declared = model.generation_config.eos_token_id
        declared = declared if isinstance(declared, list) else [declared]
        self.stop_ids = sorted({i for i in (tokenizer.eos_token_id, *declared) if i is not None})
        if not self.stop_ids:
            raise UserError(f"tokenizer {tokenizer.name_or_path!r} has no token that ends a turn (eos_token)")
        self.pad_id = self.stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def generate(
        self,
        prompts: Sequence[list[Message]],
        samples: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Reply]]:
        """See `nlhf.judge.Generator`. ``Reply.tokens`` leaves out the token that ends the turn.

        Raises:
            UserError: prompts that are too long are counted and refused; they are never cut.
        """
        drawn = self.config.drawn(samples)
        prompt_ids = self.encode(prompts)
        # Longest first: neighbours need little padding, and a batch that does not fit into memory fails at once.
        rows = sorted(
            ((i, k) for i in range(len(prompts)) for k in range(drawn)),
            key=lambda row: (-len(prompt_ids[row[0]]), row),
        )
        replies: list[dict[int, Reply]] = [{} for _ in prompts]
        with inference(self.model):
            shared = SharedBeginning(self.model, prompt_ids)
            for start in range(0, len(rows), self.config.batch_size):
                batch = rows[start : start + self.config.batch_size]
                for (i, k), reply in self._generate_batch(prompt_ids, batch, shared):
                    replies[i][k] = reply
                done = sum(k == drawn - 1 for _, k in batch)  # a prompt's last sample is computed last
                if progress and done:
                    progress(done)
        return [repeated([group[k] for k in range(drawn)], samples) for group in replies]

    def encode(self, prompts: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each prompt.

        Raises:
            UserError: prompts that are too long are counted and refused; they are never cut.
        """
        prompt_ids = self.render(prompts)
        lengths = [len(ids) for ids in prompt_ids]
        limit, reason = self.longest_prompt()
        if limit is not None:
            _check_lengths(lengths, limit, reason)
        return prompt_ids

    def longest_prompt(self) -> tuple[int | None, str]:
        """The most tokens that a prompt may have (None: nothing limits them), and what says so.

        Raises:
            UserError: no room is left for a prompt.
        """
        window, new, limits = self.window(), self.config.max_new_tokens, []
        if self.config.max_prompt_tokens is not None:
            limits.append((self.config.max_prompt_tokens, "sampling.max_prompt_tokens"))
        if window is not None:
            reason = f"the model's context of {window} less sampling.max_new_tokens, {new}"
            if window <= new:
                raise UserError(f"no room is left for a prompt: {reason}; lower sampling.max_new_tokens")
            limits.append((window - new, reason))
        return min(limits, default=(None, ""))

    def choice_log_probs(
        self,
        prompts: Sequence[list[Message]],
        prefixes: Sequence[str],
        continuations: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[float]]:
        """See `nlhf.judge.ChoiceScorer` and `nlhf.generation.probability`; temperature, top_p and top_k play no part.

        Where a chat template opens the model's thinking, it is closed before the prefix, unless the prefix does.

        Raises:
            UserError: a prompt with its prefix is too long, or the model computes NaN.
        """
        items = [
            Branches.of(self.tokenizer, ids, self._out_of_thinking(ids, prefix) + prefix, continuations)
            for ids, prefix in zip(self.render(prompts), prefixes, strict=True)
        ]
        lengths = [len(item.trunk) + max(map(len, item.branches)) for item in items]
        if self.config.max_prompt_tokens is not None:
            _check_lengths(lengths, self.config.max_prompt_tokens, "sampling.max_prompt_tokens")
        if (window := self.window()) is not None:
            _check_lengths(lengths, window, "the model's context")
        with inference(self.model):
            return branch_log_probs(self.model, items, self.pad_id, self.config.batch_size, progress)

    def render(self, prompts: Sequence[list[Message]]) -> list[list[int]]:
        """The ids of each prompt, however long."""
        return [render_chat(self.tokenizer, m, **self.config.chat_template_kwargs) for m in prompts]

    def window(self) -> int | None:
        """The longest text that the model reads, in tokens, where its configuration says it."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _out_of_thinking(self, prompt_ids: list[int], prefix: str) -> str:
        """What ends the thinking that a prompt leaves open."""
        opened = re.search(r"<(\w*think(?:ing)?)>\s*$", self.tokenizer.decode(prompt_ids[-16:]))
        return f"\n</{opened[1]}>\n\n" if opened and f"</{opened[1]}>" not in prefix else ""

    def _generate_batch(
        self, prompt_ids: list[list[int]], rows: Sequence[tuple[int, int]], shared: SharedBeginning
    ) -> Iterator[tuple[tuple[int, int], Reply]]:
        """One reply to each row (a prompt's index and a sample's index), in the order in which they end.

        Rows that have ended leave the batch every `_CHUNK` tokens, so that the last ones run in a small one.
        """
        import torch
        from transformers import GenerationConfig

        ids, mask, cache = self._read_prompts(prompt_ids, rows, shared)
        width, rows = ids.shape[1], list(rows)
        for start in range(0, self.config.max_new_tokens, _CHUNK):
            steps = min(_CHUNK, self.config.max_new_tokens - start)
            ids = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                generation_config=GenerationConfig(
                    max_new_tokens=steps,
                    do_sample=False,  # sampling is the largest of logits plus noise, see GumbelNoise
                    eos_token_id=self.stop_ids,
                    pad_token_id=self.pad_id,
                    use_cache=True,
                    disable_compile=True,
                ),
                logits_processor=self.processors(prompt_ids, rows, width),
            )
            replies = [self.reply(tokens) for tokens in ids[:, width:].tolist()]
            last = start + steps == self.config.max_new_tokens
            yield from ((row, reply) for row, reply in zip(rows, replies, strict=True) if last or not reply.truncated)
            going = [n for n, reply in enumerate(replies) if reply.truncated]
            if last or not going:
                return
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            if len(going) < len(rows):
                kept = torch.tensor(going, device=ids.device)
                ids, mask, rows = ids[kept], mask[kept], [rows[n] for n in going]
                cache.batch_select_indices(kept)

    def _read_prompts(
        self, prompt_ids: list[list[int]], rows: Sequence[tuple[int, int]], shared: SharedBeginning
    ) -> "tuple[torch.Tensor, torch.Tensor, DynamicCache]":
        """Ids and mask of each row's prompt, and the cache of all of it but the last token at least.

        Several samples of one prompt need one reading of it; without them, `generate` reads what the prompts do not
        share.
        """
        import torch

        unique = list(dict.fromkeys(i for i, _ in rows))
        ids, mask = lay_out([prompt_ids[i] for i in unique], shared.length, self.pad_id, device(self.model))
        cache = shared.cache(len(unique))
        if len(unique) < len(rows):
            if shared.length < ids.shape[1] - 1:
                read(self.model, ids[:, shared.length : -1], mask[:, :-1], cache)
            repeats = torch.tensor([unique.index(i) for i, _ in rows], device=ids.device)
            ids, mask = ids[repeats], mask[repeats]
            cache.batch_select_indices(repeats)
        return ids, mask, cache

    def processors(
        self, prompt_ids: list[list[int]], rows: Sequence[tuple[int, int]], width: int
    ) -> "LogitsProcessorList":
        """What draws the next tokens of these rows (prompt, sample), whose prompts end at column ``width``."""
        from transformers import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        config, processors = self.config, LogitsProcessorList()
        if config.temperature == 0:
            return processors
        processors.append(TemperatureLogitsWarper(float(config.temperature)))
        if config.top_k:
            processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            processors.append(TopPLogitsWarper(config.top_p))
        processors.append(GumbelNoise([_stream(config.seed, prompt_ids[i], k) for i, k in rows], width))
        return processors

    def reply(self, tokens: list[int]) -> Reply:
        """The reply that these new tokens are, up to the one that ends the turn."""
        end = next((n for n, token in enumerate(tokens) if token in self.stop_ids), None)
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if end is None:
            return Reply(text, truncated=True, tokens=len(tokens), ids=tuple(tokens))
        return Reply(text, truncated=False, tokens=end, ids=tuple(tokens[: end + 1]))


def check_lengths(generator: Any, mode: Mode, prompts: Sequence[Sequence[Message]]) -> None:
    """Find a prompt that is too long now; it would else end the run hours later."""
    if not isinstance(generator, TransformersGenerator):
        return
    if mode == "probability":  # nothing is written but a forced verdict
        config = replace(generator.config, max_new_tokens=min(generator.config.max_new_tokens, _FORCED_TOKENS))
        generator = TransformersGenerator(generator.model, generator.tokenizer, config)
    generator.encode(prompts)


def _check_lengths(lengths: Sequence[int], limit: int, reason: str) -> None:
    if too_long := [n for n in lengths if n > limit]:
        raise UserError(
            f"{len(too_long)} of {len(lengths)} prompts are longer than {limit} tokens ({reason}); "
            f"the longest has {max(too_long)}; change the setting or leave these pairs out"
        )


@contextmanager
def inference(model: "PreTrainedModel") -> Iterator[None]:
    """Evaluation mode without gradients, and without the sampling defaults that came with the checkpoint."""
    import torch
    from transformers import GenerationConfig

    # An adapter's generate() writes its own defaults into the model that it wraps.
    parts = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    training, defaults = model.training, [part.generation_config for part in parts]
    model.eval()
    for part in parts:
        part.generation_config = GenerationConfig()
    try:
        with torch.no_grad():  # not inference_mode: what is cached here must remain usable in training
            yield
    finally:
        for part, own in zip(parts, defaults, strict=True):
            part.generation_config = own
        model.train(training)


def _stream(seed: int, prompt_ids: Sequence[int], sample: int) -> int:
    """The 64-bit key of one reply's noise."""
    digest = hashlib.sha256(json.dumps([seed, sample, list(prompt_ids)]).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class GumbelNoise:
    """Add standard Gumbel noise, so that the largest score is a sample from the softmax (the Gumbel-max trick).

    The noise is a function of the row's key, the position and the token alone, without a generator's state: the
    outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) at index ``position * vocabulary + token``.

    Args:
        streams: A 64-bit key for each row.
        width: Length of the padded prompts; position 0 is the first new token.
    """

    _GAMMA = 0x9E3779B97F4A7C15 - 2**64

    def __init__(self, streams: Sequence[int], width: int):
        import torch

        self.streams, self.width = torch.tensor(streams), width

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
        """Scores [rows, vocabulary] with noise; a score of minus infinity stays out of reach."""
        import torch

        vocabulary = scores.shape[1]
        first = (input_ids.shape[1] - self.width) * vocabulary + 1
        index = torch.arange(first, first + vocabulary, device=scores.device)
        bits = _mix(self.streams.to(scores.device)[:, None] + index * self._GAMMA)
        # u from 63 bits as a float keeps its precision near 0, where the largest noise, which decides, comes from.
        u = (_shift(bits, 1).float() + 0.5) * 2.0**-63
        return scores.float() - torch.log(-torch.log1p(-u))


def _mix(z: "torch.Tensor") -> "torch.Tensor":
    """The finaliser of SplitMix64 on int64, whose products wrap as the unsigned ones do."""
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Logical right shift of int64 (torch's own copies the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
