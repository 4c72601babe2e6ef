"""Ask servers that speak OpenAI's chat protocol: what the **Generator** station and the LLM scorer share.

Many questions are under way at once. Each is repeated until it has an answer that can be read, or is given up with a
reason: a failure is counted and named, and never an answer. Nothing here knows what the questions are about.

Needs the extra ``openai``: ``pip install 'nlhf[openai]'``.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

from nlhf.errors import UserError
from nlhf.generation.server_config import ServerConfig

T = TypeVar("T")
_sleep = asyncio.sleep  # by a name of ours, so that tests can watch the waits

_RETRIED_STATUS = (408, 409, 425, 429)  # and all from 500
_REFUSING_STATUS = (401, 402, 403, 404)  # the key, the account or the model: the next question fares no better
_LONGEST_BACKOFF = 60.0  # seconds
_LONGEST_WAIT = 300.0  # seconds; a server that asks for more is not waited for
_LOST_AFTER = 3  # questions given up in a row


@dataclass
class Usage:
    """What a server has been asked for, and what came of it."""

    requests: int = 0
    """HTTP requests sent, repetitions included."""

    cached: int = 0
    """Questions answered from a cache, without a request."""

    retries: int = 0
    """Requests repeated after an error or a malformed reply."""

    malformed: int = 0
    """Replies that were not what was asked for."""

    failures: int = 0
    """Questions given up."""

    uncounted: int = 0
    """Replies whose tokens the server did not count; they are missing in the next two figures."""

    prompt_tokens: int = 0
    """Tokens read by the server's model."""

    completion_tokens: int = 0
    """Tokens written by it."""

    def cost(self, price_per_million: tuple[float, float] | None) -> float | None:
        """What the tokens have cost, given the price of a million read and a million written; None without prices."""
        if price_per_million is None:
            return None
        read, written = price_per_million
        return (self.prompt_tokens * read + self.completion_tokens * written) / 1e6

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, f.name):,} {f.name.replace('_', ' ')}" for f in fields(self))


class MalformedReplyError(ValueError):
    """A reply is not what was asked for; asking again may help."""


@dataclass(frozen=True)
class Completion:
    """One answer of a server.

    Attributes:
        text: What the model wrote, without its thinking where the server sets that apart.
        reasoning: The thinking that the server set apart.
        finish_reason: Why the model stopped: ``stop``, or ``length`` when the token limit cut it off.
        tokens: Tokens written; None where the server does not say.
        body: The whole answer.
    """

    text: str
    reasoning: str
    finish_reason: str
    tokens: int | None
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Question(Generic[T]):
    """One request and how its answer is read.

    Attributes:
        body: Fields of the request.
        read: Makes a result of the answer; raises `MalformedReplyError` where it cannot.
    """

    body: Mapping[str, Any]
    read: Callable[[Completion], T]


@dataclass(frozen=True)
class Failure:
    """A question without an answer.

    Attributes:
        reason: The last error.
        refused: The server refuses to serve at all: the key, the account or the model is wrong.
        lost: Asking the same server something else is useless too.
    """

    reason: str
    refused: bool = False
    lost: bool = False


class ChatServer:
    """A server, and what has been asked of it so far.

    Args:
        config: How to reach it. Nothing is sent yet.
        who: On whose behalf, for error messages.

    Attributes:
        usage: Requests, repetitions, failures and tokens so far.

    Raises:
        UserError: the key is missing, or the package openai is not installed.
    """

    def __init__(self, config: ServerConfig, who: str):
        try:
            import openai  # noqa: F401
        except ModuleNotFoundError:
            raise UserError(f"{who} needs the package openai: pip install 'nlhf[openai]'") from None
        try:
            self.key = config.key()
        except UserError as error:
            raise UserError(f"{who}: {error}") from None
        self.config, self.usage = config, Usage()

    def ask(self, questions: Sequence[Question[T]], done: Callable[[int], None] | None = None) -> list["T | Failure"]:
        """Answers in the order of the questions.

        Args:
            questions: What to ask.
            done: Called with the position of each question as soon as it is answered.
        """
        return _run(self._ask(questions, done))

    async def _ask(self, questions: Sequence[Question[T]], done: Callable[[int], None] | None) -> list["T | Failure"]:
        import openai

        state = _State(asyncio.Semaphore(self.config.concurrency))
        client = openai.AsyncOpenAI(
            api_key=self.key or "none", base_url=self.config.url, timeout=self.config.timeout, max_retries=0
        )

        async def answer(position: int) -> T | Failure:
            async with state.slots:
                found = await self._answer(client, questions[position], state)
            if done and not isinstance(found, Failure):
                done(position)
            return found

        async with client:
            return await asyncio.gather(*(answer(i) for i in range(len(questions))))

    async def _answer(self, client: Any, question: Question[T], state: "_State") -> "T | Failure":
        failure = None
        for attempt in range(self.config.retries + 1):
            if attempt:
                await _sleep(_pause(self.config.backoff, attempt))
            await state.wait_until_open(self.config.backoff)
            if state.stopped:
                break
            self.usage.requests += 1
            self.usage.retries += attempt > 0
            try:
                answer = question.read(await self._send(client, question.body))
                state.given_up = 0
                return answer
            except MalformedReplyError as error:
                self.usage.malformed += 1
                state.given_up = 0  # the server is there, only it talks nonsense
                failure = Failure(f"malformed reply: {error}")
            except _PassingError as error:
                failure = Failure(str(error))
                state.close(error.wait)
            except _RefusedError as error:
                failure = Failure(str(error))
                break
            except _UselessError as error:
                state.stopped = Failure(str(error), refused=error.refused, lost=True)
                break
        else:
            state.give_up(failure)
        self.usage.failures += 1
        return state.stopped or failure

    async def _send(self, client: Any, body: Mapping[str, Any]) -> Completion:
        import openai

        fields = dict(body)
        try:
            async with asyncio.timeout(self.config.timeout):
                raw = await client.chat.completions.with_raw_response.create(
                    model=fields.pop("model"), messages=fields.pop("messages"), extra_body=fields
                )
                text = raw.text
        except openai.APIStatusError as error:
            raise self.status_error(error) from None
        except (openai.APITimeoutError, TimeoutError):
            raise _PassingError(f"no answer within {self.config.timeout:g} s") from None
        except openai.APIConnectionError as error:
            raise _PassingError(self.hide(f"cannot reach {self.config.url} ({error.__cause__ or error})")) from None
        return self._completion(text)

    def status_error(self, error: Any) -> Exception:
        """What a refusal by the server means: worth another attempt or not."""
        body = error.body if isinstance(error.body, dict) else {}
        said = body.get("message") or body.get("detail") or error.message
        status, message = error.status_code, self.hide(" ".join(str(said).split())[:300])
        problem = f"HTTP {status}: {message}"
        if status in _REFUSING_STATUS or body.get("code") == "insufficient_quota":
            return _UselessError(problem, refused=True)
        if status not in _RETRIED_STATUS and status < 500:
            return _RefusedError(problem)
        wait = retry_after(error.response.headers)
        if wait is not None and wait > _LONGEST_WAIT:
            return _UselessError(f"{problem}; it asks to come back in {wait:.0f} s")
        return _PassingError(problem, wait)

    def _completion(self, text: str) -> Completion:
        try:
            body = json.loads(text)
            choice = body["choices"][0]
            message, finish_reason = choice["message"], choice["finish_reason"]
            content = message.get("content") or ""
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._count(None)
            raise MalformedReplyError(f"not a chat completion: {self.hide(text[:80])!r}") from None
        tokens = self._count(body.get("usage"))
        if not isinstance(content, str) or not isinstance(reasoning, str):
            raise MalformedReplyError("its content is not a text")
        if finish_reason not in ("stop", "length"):  # filtered, a call of a tool, aborted: not a whole reply
            raise MalformedReplyError(f"the model stopped for the reason {finish_reason!r}")
        return Completion(content, reasoning, finish_reason, tokens, body)

    def _count(self, usage: Any) -> int | None:
        """Add up the tokens; those that were written, if the server says so."""
        counts = usage if isinstance(usage, dict) else {}
        read, written = (_whole(counts.get(name)) for name in ("prompt_tokens", "completion_tokens"))
        self.usage.uncounted += read is None or written is None
        self.usage.prompt_tokens += read or 0
        self.usage.completion_tokens += written or 0
        return written

    def hide(self, text: str) -> str:
        """A server's words without the key, which some repeat in their error messages."""
        return text.replace(self.key, "***") if self.key else text


@dataclass
class _State:
    """What the questions of one call share; all run in one thread.

    Attributes:
        slots: Limits the requests under way.
        open_at: Time before which nothing is sent, because the server asked for a pause.
        given_up: Questions given up in a row because the server failed.
        stopped: Why nothing is sent any more.
    """

    slots: asyncio.Semaphore
    open_at: float = 0.0
    given_up: int = 0
    stopped: Failure | None = None

    def close(self, seconds: float | None) -> None:
        if seconds is not None:
            self.open_at = max(self.open_at, time.monotonic() + seconds)

    async def wait_until_open(self, spread: float) -> None:
        """Wait for the end of the server's pause; those who waited do not all come back at once."""
        while not self.stopped and (left := self.open_at - time.monotonic()) > 0:
            await _sleep(left + random.uniform(0, min(spread, 1.0)))

    def give_up(self, failure: Failure) -> None:
        self.given_up += 1
        if self.given_up >= _LOST_AFTER and not self.stopped:
            reason = f"it failed on {_LOST_AFTER} questions in a row, so no more were asked; the last: {failure.reason}"
            self.stopped = Failure(reason, lost=True)


class _PassingError(Exception):
    """Asking again may help."""

    def __init__(self, message: str, wait: float | None = None):
        super().__init__(message)
        self.wait = wait


class _RefusedError(Exception):
    """The server takes other questions, but not this one."""


class _UselessError(Exception):
    """The server takes no question."""

    def __init__(self, message: str, refused: bool = False):
        super().__init__(message)
        self.refused = refused


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait: ``retry-after-ms``, or ``retry-after`` in seconds or as a date."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        return max(0.0, seconds) if seconds < float("inf") else None  # NaN is not smaller either
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def encodable(text: str) -> str:
    """Half of a surrogate pair, which no request can carry, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _pause(backoff: float, attempt: int) -> float:
    # Jitter keeps requests that failed together from returning together; it changes no result.
    return min(backoff * 2 ** (attempt - 1), _LONGEST_BACKOFF) * random.uniform(0.5, 1.0)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, also where an event loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = []

    async def noted() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, noted())
        try:
            return future.result()
        except KeyboardInterrupt:
            for loop, task in running:
                loop.call_soon_threadsafe(task.cancel)
            raise
