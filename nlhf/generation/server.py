"""Replies of a model behind a server: the **Generator** station without a model in this process.

The server speaks OpenAI's chat protocol (see `servers`). Every reply is a request with a seed of its own, because some
servers ignore the protocol's ``n``, and a single sample could not be asked again.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from nlhf.errors import UserError
from nlhf.formats.base import Message
from nlhf.generation import SamplingConfig, repeated
from nlhf.generation.backends import GenerationFailed
from nlhf.generation.server_config import ServerConfig
from nlhf.generation.servers import ChatServer, Completion, Failure, MalformedReplyError, Question, Usage, encodable
from nlhf.judge import Reply, prompt_hash

# What ends a turn in the templates of common models. The server's tokenizer is not known here, so all are broken up.
_CONTROL = re.compile(
    r"<[|｜][^<>\n]{1,40}[|｜]>|</?s>|</?(?:start|end)_of_turn>|<(?:bos|eos|pad)>|\[/?INST\]|<</?SYS>>"
)


class ServerGenerator:
    """Replies of a model at a server.

    Control tokens that stand in a prompt's text are broken up by a space, as `nlhf.models.safe_messages` does for
    models in this process: judged text may hold ``<|im_end|>`` and would otherwise end its turn there.

    Args:
        model: Name of the model at the server.
        config: How to sample. ``batch_size`` has no meaning here.
        server: How to reach it.
        extra_body: Further fields of each request. A field that is None is left out, also one of ours.

    Attributes:
        usage: Requests, repetitions, failures and tokens so far.

    Raises:
        UserError: the key is missing, the package openai is not installed, or ``config.max_prompt_tokens`` is set.
    """

    def __init__(
        self,
        model: str,
        config: SamplingConfig | None = None,
        server: ServerConfig | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ):
        self.model, self.config = model, config or SamplingConfig()
        if self.config.max_prompt_tokens is not None:
            raise UserError(
                "sampling.max_prompt_tokens needs the model's tokenizer, which a server keeps to itself; set the limit "
                "at the server"
            )
        self.server = ChatServer(server or ServerConfig(), "a server as backend")
        self._extra = dict(extra_body or {})

    @property
    def usage(self) -> Usage:
        """Requests, repetitions, failures and tokens so far."""
        return self.server.usage

    def generate(
        self,
        prompts: Sequence[list[Message]],
        samples: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Reply]]:
        """See `nlhf.judge.Generator`. ``Reply.tokens`` is what the server counts, 0 where it does not.

        Thinking that the server sets apart stands in ``<think>`` tags before the text, as the model wrote it.

        Raises:
            GenerationFailed: some replies did not come, after all repetitions; it holds those that did.
            UserError: ``samples`` is less than 1.
        """
        drawn = self.config.drawn(samples)
        questions = [Question(self.body(messages, k), _reply) for messages, k in product(prompts, range(drawn))]
        answers = self.server.ask(questions, _whole_groups(drawn, progress))
        groups = [repeated(group, samples) for group in _groups(answers, drawn)]
        self._raise_failures(groups)
        return groups

    def choice_log_probs(
        self,
        prompts: Sequence[list[Message]],
        prefixes: Sequence[str],
        continuations: Sequence[str],
        progress: Callable[[int], None] | None = None,
    ) -> list[list[float]]:
        """See `nlhf.judge.ChoiceScorer`: only vLLM's server can read a reply that it did not write.

        One request for each continuation, which the server scores as the end of a reply that is still open
        (``continue_final_message`` and ``prompt_logprobs``). Tokens that reach from the prefix into the continuation
        count in full.

        Raises:
            UserError: the server does not know these options.
            GenerationFailed: some requests failed for good; it holds no replies.
        """
        questions = [
            Question(
                self._forced_body(messages, prefix + text), lambda completion, text=text: _log_prob(completion, text)
            )
            for messages, prefix in zip(prompts, prefixes, strict=True)
            for text in continuations
        ]
        answers = self.server.ask(questions, _whole_groups(len(continuations), progress))
        groups = _groups(answers, len(continuations))
        if any(answer is None for answer in answers) or _all_refused(answers):
            said = f": {answers[0].reason}" if isinstance(answers[0], Failure) else ""
            raise UserError(
                f"{self.server.config.url} does not say how likely a given text is, as vLLM's server does "
                f"(continue_final_message, prompt_logprobs){said}; use mode 'generate', or another backend"
            )
        self._raise_failures(groups, replies=False)
        return groups

    def body(self, messages: Sequence[Message], sample: int) -> dict[str, Any]:
        """What is sent to ask for one reply."""
        config = self.config
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{**m, "content": plain_text(m["content"])} for m in messages],
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
        }
        if config.top_k:
            body["top_k"] = config.top_k
        if config.temperature > 0:
            body["seed"] = reply_seed(config.seed, messages, sample)
        if config.chat_template_kwargs:
            body["chat_template_kwargs"] = config.chat_template_kwargs
        return {name: value for name, value in (body | self._extra).items() if value is not None}

    def _forced_body(self, messages: Sequence[Message], reply: str) -> dict[str, Any]:
        body = self.body(messages, 0)
        return body | {
            "messages": [*body["messages"], {"role": "assistant", "content": encodable(reply)}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "prompt_logprobs": 0,
            "max_tokens": 1,
        }

    def _raise_failures(self, groups: Sequence[Sequence[Any]], replies: bool = True) -> None:
        """Raise if any answer is a failure, with the answers that came if they are replies."""
        failed = {i: next((a for a in group if isinstance(a, Failure)), None) for i, group in enumerate(groups)}
        failed = {i: failure for i, failure in failed.items() if failure}
        if not failed:
            return
        came = [[None if isinstance(a, Failure) else a for a in group] if replies else [] for group in groups]
        raise GenerationFailed(
            f"{self.server.config.url}, model {self.model!r}",
            came,
            {i: failure.reason for i, failure in failed.items()},
            lost=any(failure.lost for failure in failed.values()),
        )


def reply_seed(seed: int, messages: Sequence[Message], sample: int) -> int:
    """The seed of one reply, 31 bits, from the run's seed, the prompt and the sample's index."""
    digest = hashlib.sha256(f"{seed}/{sample}/{prompt_hash(messages)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def plain_text(text: str) -> str:
    """A text that cannot leave its turn at a server whose tokenizer is unknown."""
    return _CONTROL.sub(lambda match: f"{match[0][0]} {match[0][1:]}", encodable(text))


def _reply(completion: Completion) -> Reply:
    text, cut = completion.text, completion.finish_reason == "length"
    if not text.strip() and not cut:
        raise MalformedReplyError("it is empty")
    if completion.reasoning:
        text = f"<think>{completion.reasoning}" + (f"</think>{text}" if text or not cut else "")
    return Reply(text, truncated=cut, tokens=completion.tokens or 0)


def _log_prob(completion: Completion, text: str) -> float | None:
    """Log P of the tokens that make up the last ``text`` of the prompt; None if the server does not say."""
    rows = completion.body.get("prompt_logprobs")
    total, spelled = 0.0, ""
    for row in reversed(rows if isinstance(rows, list) else []):
        if not isinstance(row, dict) or len(row) != 1:
            break
        (token,) = row.values()
        total += token["logprob"]
        spelled = (token.get("decoded_token") or "") + spelled
        if spelled.endswith(text):
            return total if math.isfinite(total) else -math.inf
    return None


def _groups(answers: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(answers[start : start + size]) for start in range(0, len(answers), size)]


def _all_refused(answers: Sequence[Any]) -> bool:
    """Every request was refused for its form: HTTP 400 Bad Request or 422 Unprocessable."""
    refused = [isinstance(a, Failure) and a.reason.startswith(("HTTP 400", "HTTP 422")) for a in answers]
    return bool(refused) and all(refused)


def _whole_groups(size: int, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Reports a prompt when the last of its ``size`` questions is answered."""
    if progress is None:
        return None
    left: dict[int, int] = {}

    def done(position: int) -> None:
        group = position // size
        left[group] = left.get(group, size) - 1
        if not left[group]:
            progress(1)

    return done
