"""Which prompts fit: of a model in this process by their length, of a server by what it says."""

import pytest

from nlhf.errors import UserError
from nlhf.generation import SamplingConfig, TransformersGenerator
from nlhf.generation.limits import PromptTooLong, says_too_long, too_long
from nlhf.models import ModelConfig, load_model, load_tokenizer


@pytest.fixture(scope="module")
def local(tiny_model):
    config = ModelConfig(tiny_model)
    model, tokenizer = load_model(config), load_tokenizer(config)
    return lambda **sampling: TransformersGenerator(model, tokenizer, SamplingConfig(**sampling))


def asked(text):
    return [{"role": "user", "content": text}]


def test_what_does_not_fit_is_what_the_generator_refuses(local):
    generator = local(max_new_tokens=1, max_prompt_tokens=60)
    prompts = [asked("x" * n) for n in (0, 20, 40, 60, 200)]
    found = too_long(generator, prompts)
    assert set(found) == {i for i, ids in enumerate(generator.render(prompts)) if len(ids) > 60}
    assert 0 < len(found) < len(prompts)
    assert all(isinstance(problem, PromptTooLong) for problem in found.values())
    generator.encode([prompt for i, prompt in enumerate(prompts) if i not in found])
    for i in found:
        with pytest.raises(UserError, match="longer than 60 tokens"):
            generator.encode([prompts[i]])


def test_the_room_is_the_window_less_the_reply_or_the_limit_that_is_set(local):
    window = local().window()
    assert local(max_new_tokens=10).longest_prompt()[0] == window - 10
    assert local(max_new_tokens=10, max_prompt_tokens=7).longest_prompt()[0] == 7
    with pytest.raises(UserError, match=r"no room is left.*lower sampling\.max_new_tokens"):
        local(max_new_tokens=window).longest_prompt()


def test_another_generator_is_asked_first():
    assert too_long(object(), [asked("x" * 10**6)]) == {}


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("HTTP 400: This model's maximum context length is 10 tokens", True),
        ("HTTP 400: the request exceeds the available context size (4096 tokens)", True),
        ("HTTP 400: longer than the model's\nContext_Window", True),
        ("HTTP 400: temperature must be positive", False),
        ("HTTP 500: context length", False),
        ("no answer within 3 s: HTTP 400: context length", False),
    ],
)
def test_what_a_server_says(problem, said):
    assert says_too_long(problem) is said
