"""Which prompts fit into a model's context: beside the **Generator** station, for those who can do without one.

A generator in this process refuses a whole call for one prompt that is too long, and a server refuses that prompt.
"""

import re
from collections.abc import Sequence

from nlhf.errors import UserError
from nlhf.formats.base import Message
from nlhf.generation import TransformersGenerator
from nlhf.judge import Generator


class PromptTooLong(UserError):
    """The prompt does not fit into the model's context; a shorter one may."""


# How OpenAI, vLLM, SGLang and llama.cpp say it.
_SAID = re.compile(r"HTTP 400: .*context[ _](?:length|window|size)", re.IGNORECASE | re.DOTALL)


def says_too_long(problem: str) -> bool:
    """Whether a server's refusal, as `nlhf.generation.servers` tells it, is of the prompt's length."""
    return bool(_SAID.match(problem))


def excess(tokens: int, limit: int | None) -> PromptTooLong | None:
    """What is wrong with a prompt of so many tokens where that is the limit; None where it fits."""
    fits = limit is None or tokens <= limit
    return None if fits else PromptTooLong(f"{tokens} tokens, where {limit} is the most")


def too_long(generator: Generator, prompts: Sequence[list[Message]]) -> dict[int, PromptTooLong]:
    """The prompts that do not fit, by their position; of a server none, which says so when it is asked.

    Raises:
        UserError: no room is left for a prompt.
    """
    if not isinstance(generator, TransformersGenerator):
        return {}
    limit, _ = generator.longest_prompt()
    problems = [excess(len(ids), limit) for ids in generator.render(prompts)]
    return {i: problem for i, problem in enumerate(problems) if problem}
