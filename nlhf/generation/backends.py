"""Which program answers the prompts: the choice at the **Generator** station.

``transformers`` runs the model in this process, ``vllm`` in this process with vLLM's engine, ``openai`` asks a server
that speaks OpenAI's chat protocol. `docs/backends.md` says when to take which.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from nlhf.errors import UserError, nearest
from nlhf.files import append_jsonl
from nlhf.generation import SamplingConfig
from nlhf.generation.server_config import ServerConfig
from nlhf.judge import Generator, Judge, Judgement, Mode, Order, Reply, shown_pairs
from nlhf.models import ModelConfig
from nlhf.pairs import Pair

logger = logging.getLogger(__name__)

Kind = Literal["transformers", "vllm", "openai"]

# Fields of a request that have a place of their own; null in extra_body leaves those of the second kind out.
_OURS = {"model": "backend.model", "messages": "format", "n": "samples", "stream": "nothing"}
_SAMPLING = {
    "max_tokens": "sampling.max_new_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "seed": "sampling.seed",
    "chat_template_kwargs": "sampling.chat_template_kwargs",
}
PATIENCE = tuple(
    f"backend.{name}" for name in ("api_key_env", "concurrency", "timeout", "retries", "backoff", "price_per_million")
)
"""Settings that a resumed run may change: how a server is asked, not what."""

_SHOWN = 3  # failures that a message spells out


@dataclass
class BackendConfig(ServerConfig):
    """What runs the model; the fields on servers and retries are for kind openai alone."""

    kind: Kind = "transformers"
    """transformers or vllm in this process, or openai: any server that speaks OpenAI's chat protocol."""

    model: str | None = None
    """Name of the model at the server, where it is not model.name."""

    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, for example {reasoning_effort: low}; null leaves out a field that we send,
    such as temperature for models that accept none."""

    price_per_million: tuple[float, float] | None = None
    """Price of a million tokens read and of a million written, to have the cost in the log and in usage.jsonl."""

    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vllm.LLM for kind vllm, for example {gpu_memory_utilization: 0.8}."""

    where: ClassVar[str] = "backend."

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise UserError(
                f"backend.kind must be one of {known}, got {self.kind!r}.{nearest(self.kind, get_args(Kind))}"
            )
        super().__post_init__()
        problems = [
            f"set {_OURS[name]} instead of {name!r} in backend.extra_body" for name in _OURS if name in self.extra_body
        ]
        problems += [
            f"set {place} instead of {name!r} in backend.extra_body (null leaves it out)"
            for name, place in _SAMPLING.items()
            if self.extra_body.get(name) is not None
        ]
        own = {"openai": ("base_url", "api_key_env", "model", "extra_body", "price_per_million"), "vllm": ("engine",)}
        for kind, names in own.items():
            if kind != self.kind and (useless := [name for name in names if getattr(self, name)]):
                problems.append(f"backend.{useless[0]} is for backend.kind {kind}, but the kind is {self.kind}")
        if self.price_per_million and not all(0 <= price < float("inf") for price in self.price_per_million):
            problems.append("backend.price_per_million must not be negative")
        try:
            json.dumps(self.extra_body, allow_nan=False, default=str)
        except ValueError as error:
            problems.append(f"backend.extra_body cannot be sent as JSON ({error})")
        if problems:
            raise UserError("; ".join(problems))

    def chunk_size(self, sampling: SamplingConfig) -> int:
        """Prompts that are judged before they are kept: what a kill costs, against batches of unlike length."""
        return 4 * max(sampling.batch_size, self.concurrency if self.kind == "openai" else 0)

    def weights_hash(self, model: ModelConfig) -> str | None:
        """What identifies the weights, see `nlhf.models.model_hash`; None for those that a server keeps to itself."""
        from nlhf.models import model_hash

        return None if self.kind == "openai" else model_hash(model.name, model.revision, model.trust_remote_code)

    def identity(self, model: ModelConfig) -> dict[str, Any]:
        """What a run's manifest says of the backend: whose replies they are, no secrets."""
        if self.kind != "openai":
            return {"kind": self.kind}
        return {"kind": self.kind, "base_url": self.url, "model": self.model or model.name}


_DEFAULT = BackendConfig()


def make_generator(model: ModelConfig, sampling: SamplingConfig, backend: BackendConfig = _DEFAULT) -> Generator:
    """The generator that the configuration asks for.

    Raises:
        UserError: the model cannot be loaded, a package is missing, or the key of a server is.
    """
    if backend.kind == "openai":
        from nlhf.generation.server import ServerGenerator

        return ServerGenerator(backend.model or model.name, sampling, backend, backend.extra_body)
    if backend.kind == "vllm":
        from nlhf.generation.vllm import VLLMGenerator

        return VLLMGenerator.load(model, sampling, backend.engine)
    from nlhf.generation import TransformersGenerator
    from nlhf.models import load_model, load_tokenizer

    return TransformersGenerator(load_model(model), load_tokenizer(model), sampling)


class GenerationFailed(UserError):
    """Some prompts got no reply; what came is kept here.

    Attributes:
        source: Who did not reply.
        replies: [prompts][samples], None where no reply came.
        reasons: Why, by the prompt's position, or by what names it.
        lost: The source is gone or refuses all; asking it for more is useless.
    """

    def __init__(
        self,
        source: str,
        replies: Sequence[Sequence[Reply | None]],
        reasons: Mapping[Any, str],
        lost: bool = False,
        hint: str = "",
    ):
        self.source, self.replies, self.reasons, self.lost = source, replies, reasons, lost
        shown = [
            f"{prompt if isinstance(prompt, str) else f'prompt {prompt}'}: {reason}"
            for prompt, reason in list(reasons.items())[:_SHOWN]
        ]
        more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
        super().__init__(f"{len(reasons)} prompts got no reply from {source}: {'; '.join(shown + more)}{hint}")

    @classmethod
    def of(cls, failures: Iterable["GenerationFailed"]) -> "GenerationFailed":
        """One exception for several calls whose replies have been kept."""
        failures = list(failures)
        reasons = {prompt: reason for failure in failures for prompt, reason in failure.reasons.items()}
        hint = ". What was answered is kept: mend the cause, or wait, and continue with --resume true"
        return cls(failures[0].source, [], reasons, any(f.lost for f in failures), hint)


def judge_answered(
    judge: Judge,
    pairs: Sequence[Pair],
    orders: Sequence[Order],
    samples: int = 1,
    progress: Callable[[int], None] | None = None,
    mode: Mode = "generate",
) -> tuple[list[Judgement], GenerationFailed | None]:
    """What `nlhf.judge.Judge.judge` gives, or where some prompts have no reply, the judgements of the others.

    A prompt without a reply has no judgement at all, so that a resumed run asks it again. A prompt with some of its
    samples keeps those before the first that is missing.

    Returns:
        The judgements, and the failure, whose reasons are by pair and order; None where all went well.
    """
    try:
        return judge.judge(pairs, orders, samples, progress, mode), None
    except GenerationFailed as error:
        failed = error
    shown = [f"pair {pair.id!r} in order {order}" for order, pair in shown_pairs(pairs, orders)]
    per_prompt = max(1, len(failed.replies) // len(shown))  # each critique is asked for its probabilities
    reasons = {shown[i // per_prompt]: reason for i, reason in failed.reasons.items()}
    failure = GenerationFailed(failed.source, failed.replies, reasons, failed.lost)
    if not any(group and group[0] for group in failed.replies):
        return [], failure
    answered = Judge(judge.format, _Answered(judge.generator, failed.replies))
    try:
        return answered.judge(pairs, orders, samples, mode=mode), failure
    except GenerationFailed:  # a server that died before it could be asked for probabilities
        return [], failure


class _Answered:
    """A generator that repeats the replies that came."""

    def __init__(self, generator: Any, replies: Sequence[Sequence[Reply | None]]):
        self.replies = [list(group[: group.index(None)] if None in group else group) for group in replies]
        self.choice_log_probs = getattr(generator, "choice_log_probs", None)

    def generate(
        self, prompts: Sequence[Any], samples: int = 1, progress: Callable[[int], None] | None = None
    ) -> list[list[Reply]]:
        """The replies that came; fewer than ``samples`` where some did not."""
        return self.replies


def report_usage(generator: Generator, backend: BackendConfig, folder: Path | None = None) -> None:
    """Log what a server was asked for and what it cost, and append it to ``usage.jsonl`` of the run's folder.

    Nothing happens for a model in this process, or where nothing was asked.
    """
    usage = getattr(generator, "usage", None)
    if usage is None or not usage.requests:
        return
    cost = usage.cost(backend.price_per_million)
    logger.info("%s: %s%s", backend.url, usage, "" if cost is None else f", cost {cost:.4f}")
    if folder is not None:
        append_jsonl(folder / "usage.jsonl", {**asdict(usage), "cost": cost})
