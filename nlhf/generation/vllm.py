"""Replies of a model in this process, computed by vLLM: the **Generator** station on GPUs, for many prompts at once.

Prompts become ids as everywhere (`nlhf.models.render_chat`), so that a model reads the same whatever runs it, and
judged text cannot end its turn. Written for vLLM 0.31 (``LLM.generate``, ``SamplingParams``); the extra ``vllm`` says
in pyproject.toml why it needs an environment of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nlhf.errors import UserError
from nlhf.formats.base import Message
from nlhf.generation import SamplingConfig, TransformersGenerator, repeated
from nlhf.generation.probability import Branches
from nlhf.generation.server import reply_seed
from nlhf.judge import Reply
from nlhf.model_names import resolve
from nlhf.models import ModelConfig, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class VLLMGenerator(TransformersGenerator):
    """Replies of a vLLM engine; prompts are made, and too long ones refused, as by its parent.

    A reply depends on its prompt, the sample's index and the seed. The draws are vLLM's own, so they are not those of
    the transformers backend, and greedy replies agree with it only as far as the kernels round alike.

    Args:
        llm: A ``vllm.LLM``.
        tokenizer: The model's, with a chat template.
        config: How to sample; ``batch_size`` has no meaning to vLLM, which makes its own batches.
    """

    def __init__(self, llm: Any, tokenizer: "PreTrainedTokenizerBase", config: SamplingConfig | None = None):
        self.llm, self.tokenizer, self.config = llm, tokenizer, config or SamplingConfig()

    @classmethod
    def load(cls, model: ModelConfig, config: SamplingConfig, engine: Mapping[str, Any]) -> "VLLMGenerator":
        """Start vLLM's engine on a model.

        Args:
            model: Which; ``attn_implementation`` is transformers' and has no meaning here.
            config: How to sample.
            engine: Further arguments of ``vllm.LLM``.

        Raises:
            UserError: vLLM is not installed, refuses the arguments, or an argument has a place of its own.
        """
        try:
            import vllm
        except ModuleNotFoundError:
            raise UserError(
                "backend.kind vllm needs the package vllm, which needs a GPU and an environment of its own; start its "
                "server there and use backend.kind openai, see docs/backends.md"
            ) from None
        options = {
            "model": resolve(model.name),
            "tokenizer": resolve(model.tokenizer or model.name),
            "revision": model.revision,
            "trust_remote_code": model.trust_remote_code,
            "dtype": model.dtype,
            "seed": config.seed,
        }
        if taken := sorted(set(options) & set(engine)):
            raise UserError(f"backend.engine: {taken[0]!r} has a place of its own in model or sampling")
        tokenizer = load_tokenizer(model)
        try:
            return cls(vllm.LLM(**options, **engine), tokenizer, config)
        except (TypeError, ValueError) as error:  # an unknown argument; a context window that does not fit into memory
            raise UserError(f"backend.engine: vLLM does not start: {' '.join(str(error).split())[:300]}") from error

    def generate(
        self,
        prompts: Sequence[list[Message]],
        samples: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Reply]]:
        """See `nlhf.judge.Generator`; one request for all samples of a prompt, which is read once."""
        from vllm import SamplingParams

        drawn = self.config.drawn(samples)
        parameters = [
            SamplingParams(
                n=drawn,  # vLLM gives sample k the seed plus k
                temperature=self.config.temperature,
                top_p=self.config.top_p,
                top_k=self.config.top_k,
                max_tokens=self.config.max_new_tokens,
                seed=reply_seed(self.config.seed, messages, 0),
            )
            for messages in prompts
        ]
        outputs = self._run(self.encode(prompts), parameters)
        if progress and prompts:
            progress(len(prompts))
        groups = [[self._reply(completion) for completion in output.outputs] for output in outputs]
        return [repeated(group, samples) for group in groups]

    def choice_log_probs(
        self,
        prompts: Sequence[list[Message]],
        prefixes: Sequence[str],
        continuations: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[float]]:
        """See `nlhf.judge.ChoiceScorer`: vLLM's log-probabilities of the prompt, for each continuation a prompt."""
        from vllm import SamplingParams

        items = [
            Branches.of(self.tokenizer, ids, self._out_of_thinking(ids, prefix) + prefix, continuations)
            for ids, prefix in zip(self.encode(prompts), prefixes, strict=True)
        ]
        rows = [(item.trunk + branch, item.scored + len(branch)) for item in items for branch in item.branches]
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._run([ids for ids, _ in rows], [parameters] * len(rows))
        scores = [
            sum(known[token].logprob for token, known in zip(ids[-n:], output.prompt_logprobs[-n:], strict=True))
            for (ids, n), output in zip(rows, outputs, strict=True)
        ]
        if progress and prompts:
            progress(len(prompts))
        width = len(continuations)
        return [scores[start : start + width] for start in range(0, len(scores), width)]

    def _run(self, prompt_ids: Sequence[list[int]], parameters: list[Any]) -> list[Any]:
        if not prompt_ids:
            return []
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        return self.llm.generate(prompts, sampling_params=parameters, use_tqdm=False)

    def window(self) -> int | None:
        """The longest text that the engine reads, in tokens."""
        return self.llm.llm_engine.model_config.max_model_len

    def _reply(self, completion: Any) -> Reply:
        ended = completion.finish_reason == "stop"
        if not ended and completion.finish_reason != "length":
            raise RuntimeError(f"vLLM ended a reply for the reason {completion.finish_reason!r}")
        ids = list(completion.token_ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Reply(text, truncated=not ended, tokens=len(ids) - ended, ids=tuple(ids))  # the last one ended the turn
