"""A reply as it is written: the **Generator** station where a person is waiting.

One prompt at a time, from the same models and servers, with the same sampling and the same replies as
`nlhf.generation.backends.make_generator`.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nlhf.errors import UserError
from nlhf.formats.base import Message
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import BackendConfig, make_generator
from nlhf.generation.limits import PromptTooLong, excess, says_too_long
from nlhf.judge import Reply
from nlhf.models import ModelConfig

if TYPE_CHECKING:
    import torch

    from nlhf.generation import TransformersGenerator
    from nlhf.generation.server import ServerGenerator


class ReplyStream(Protocol):
    """Anything that answers a chat prompt piece by piece."""

    def stream(self, messages: Sequence[Message], on_text: Callable[[str], None], sample: int = 0) -> Reply:
        """Answer; ``on_text`` gets each piece of the text as it is written, and all of them joined are the reply's.

        Args:
            messages: The prompt.
            on_text: May raise, and so may Ctrl-C: writing ends there, and what was written has been handed over.
            sample: Replies of different samples are drawn independently.

        Raises:
            PromptTooLong: nothing was written.
            UserError: the reply did not come, or not to its end.
        """
        ...


def open_stream(model: ModelConfig, sampling: SamplingConfig, backend: BackendConfig) -> ReplyStream:
    """The stream that the configuration asks for.

    Raises:
        UserError: the model cannot be loaded, a server's key is missing, or the backend cannot stream.
    """
    if backend.kind == "vllm":
        raise UserError(
            "backend.kind vllm answers many prompts at once and does not stream; "
            "start `vllm serve` and use backend.kind openai with its address"
        )
    generator = make_generator(model, sampling, backend)
    return ServerStream(generator) if backend.kind == "openai" else LocalStream(generator)


class LocalStream:
    """Streams the replies of a model in this process; see `ReplyStream`.

    Args:
        generator: The model, and how to sample.

    Raises:
        UserError: no room is left for a prompt.
    """

    def __init__(self, generator: "TransformersGenerator"):
        self.generator, (self._limit, _) = generator, generator.longest_prompt()

    def stream(self, messages: Sequence[Message], on_text: Callable[[str], None], sample: int = 0) -> Reply:
        """See `ReplyStream`. Where the prompt opens the model's thinking, the reply begins with the opening tag."""
        import torch
        from transformers import GenerationConfig

        from nlhf.generation import inference
        from nlhf.generation.prefill import device

        generator, written = self.generator, []

        def write(text: str) -> None:
            written.append(text)
            on_text(text)

        [ids] = generator.render([list(messages)])
        if problem := excess(len(ids), self._limit):
            raise problem
        if opened := re.search(r"<\w*think(?:ing)?>(?=\s*$)", generator.tokenizer.decode(ids[-16:])):
            write(opened[0])
        prompt = torch.tensor([ids], device=device(generator.model))
        with inference(generator.model):
            out = generator.model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=GenerationConfig(
                    max_new_tokens=generator.config.max_new_tokens,
                    do_sample=False,  # sampling is the largest of logits plus noise, see GumbelNoise
                    eos_token_id=generator.stop_ids,
                    pad_token_id=generator.pad_id,
                    use_cache=True,
                    disable_compile=True,
                ),
                logits_processor=generator.processors([ids], [(0, sample)], len(ids)),
                streamer=_streamer(generator, write),
            )
        reply = generator.reply(out[0, len(ids) :].tolist())
        return Reply("".join(written), reply.truncated, reply.tokens, reply.ids)


def _streamer(generator: "TransformersGenerator", write: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        """Hands over text that further tokens do not change, without the token that ends the turn."""

        def put(self, value: "torch.Tensor") -> None:
            if self.next_tokens_are_prompt or value.item() not in generator.stop_ids:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                write(text)

    return Streamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class ServerStream:
    """Streams the replies of a model at a server; see `ReplyStream`.

    A request that gets no answer is repeated as ``backend.retries`` says; a reply that breaks off is not.

    Args:
        generator: How to ask.
    """

    def __init__(self, generator: "ServerGenerator"):
        self.generator = generator

    def stream(self, messages: Sequence[Message], on_text: Callable[[str], None], sample: int = 0) -> Reply:
        """See `ReplyStream`. Thinking that the server sets apart stands in ``<think>`` tags, as the model wrote it."""
        import openai

        server = self.generator.server
        body = self.generator.body(messages, sample)
        client = openai.OpenAI(
            api_key=server.key or "none",
            base_url=server.config.url,
            timeout=server.config.timeout,
            max_retries=server.config.retries,
        )
        with client:
            try:
                chunks = client.chat.completions.create(
                    model=body.pop("model"), messages=body.pop("messages"), stream=True, extra_body=body
                )
                with chunks:
                    return _read(chunks, on_text)
            except openai.APIStatusError as error:
                problem = str(server.status_error(error))
                raise (PromptTooLong if says_too_long(problem) else UserError)(problem) from None
            except openai.APITimeoutError:
                raise UserError(f"no answer within {server.config.timeout:g} s") from None
            except openai.APIConnectionError as error:
                cause = server.hide(str(error.__cause__ or error))
                raise UserError(f"cannot reach {server.config.url} ({cause})") from None
            except openai.APIError as error:  # told within the stream
                raise UserError(server.hide(f"{server.config.url} broke off: {error.message}")) from None


def _read(chunks: Any, on_text: Callable[[str], None]) -> Reply:
    """Hand over the text of a stream of chunks.

    Raises:
        UserError: it ends without saying why, or for another reason than an end of turn or the token limit.
    """
    written: list[str] = []
    thinking, finish, tokens = False, None, 0

    def write(text: str) -> None:
        written.append(text)
        on_text(text)

    for chunk in _whole(chunks):
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        if not chunk.choices:
            continue
        delta, finish = chunk.choices[0].delta, chunk.choices[0].finish_reason or finish
        reasoning = getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None)
        if reasoning:
            write(reasoning if thinking else f"<think>{reasoning}")
            thinking = True
        if delta.content:
            write(f"</think>{delta.content}" if thinking else delta.content)
            thinking = False
    if finish not in ("stop", "length"):
        raise UserError(f"the server ended the reply for the reason {finish!r}" if finish else "the reply broke off")
    return Reply("".join(written), truncated=finish == "length", tokens=tokens)


def _whole(chunks: Any) -> Any:
    """The chunks; a connection that is lost ends them with one error, whatever the transport calls it."""
    found = iter(chunks)
    while True:
        try:
            chunk = next(found)
        except StopIteration:
            return
        except Exception as error:  # the transport's exceptions differ between versions of the client
            import openai

            if isinstance(error, openai.OpenAIError):
                raise
            raise UserError(f"the reply broke off ({str(error) or type(error).__name__})") from None
        yield chunk
