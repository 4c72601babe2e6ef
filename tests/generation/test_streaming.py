"""Replies as they are written: the same replies, piece by piece, and nothing lost when they end early."""

import pytest

from nlhf.errors import UserError
from nlhf.generation import SamplingConfig, TransformersGenerator
from nlhf.generation.backends import BackendConfig
from nlhf.generation.limits import PromptTooLong
from nlhf.generation.streaming import LocalStream, open_stream
from nlhf.models import ModelConfig, load_model, load_tokenizer
from tests.generation.streaming_server import StreamingServer

QUESTION = [{"role": "user", "content": "Who is there?"}]


@pytest.fixture(scope="module")
def local(tiny_model):
    config = ModelConfig(tiny_model)
    model, tokenizer = load_model(config), load_tokenizer(config)
    return lambda **sampling: TransformersGenerator(model, tokenizer, SamplingConfig(**sampling))


@pytest.fixture
def serve():
    servers = []

    def start(*script, **options):
        servers.append(StreamingServer(*script, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def at(server, sampling=None, **backend):
    pytest.importorskip("openai", reason="needs the extra openai: pip install 'nlhf[openai]'")
    settings = {"kind": "openai", "base_url": server.url, "retries": 0, "timeout": 10} | backend
    return open_stream(ModelConfig("m"), sampling or SamplingConfig(), BackendConfig(**settings))


def heard(stream, messages=QUESTION, **options):
    pieces = []
    return stream.stream(messages, pieces.append, **options), pieces


# ---------------------------------------------------------------------------------------------- a model in this process


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}]
)
def test_a_streamed_reply_is_the_reply_of_the_generator(local, sampling):
    generator = local(max_new_tokens=40, **sampling)
    [whole] = generator.generate([QUESTION], samples=2)
    for sample, reply in enumerate(whole):
        streamed, pieces = heard(LocalStream(generator), sample=sample)
        assert (streamed.text, streamed.ids, streamed.truncated) == (reply.text, reply.ids, reply.truncated)
        assert "".join(pieces) == reply.text


def test_samples_differ(local):
    stream = LocalStream(local(max_new_tokens=20, temperature=1.0))
    assert heard(stream, sample=0)[0] == heard(stream, sample=0)[0]
    assert heard(stream, sample=0)[0] != heard(stream, sample=1)[0]


def test_the_token_that_ends_a_turn_is_not_shown(local):
    generator = local(max_new_tokens=40)
    [[reply]] = generator.generate([QUESTION])
    generator.stop_ids = [*generator.stop_ids, reply.ids[9]]
    streamed, pieces = heard(LocalStream(generator))
    [[cut]] = generator.generate([QUESTION])
    assert not streamed.truncated
    assert streamed.tokens == cut.tokens <= 9
    assert "".join(pieces) == cut.text


def test_pieces_come_before_the_reply_is_whole(local):
    class Enough(Exception):
        pass

    pieces = []

    def take(text):
        pieces.append(text)
        raise Enough

    generator = local(max_new_tokens=300, temperature=1.0)  # random bytes: some are blanks, where a piece may end
    with pytest.raises(Enough):
        LocalStream(generator).stream(QUESTION, take)
    [[whole]] = generator.generate([QUESTION])
    assert whole.text.startswith("".join(pieces))
    assert 0 < len(pieces[0]) < len(whole.text)


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_written(local):
    stream = LocalStream(local(max_new_tokens=8, max_prompt_tokens=40))
    pieces = []
    with pytest.raises(PromptTooLong, match="tokens, where 40 is the most"):
        stream.stream([{"role": "user", "content": "x" * 100}], pieces.append)
    assert pieces == []


def test_a_model_without_room_for_a_prompt_is_refused(local):
    with pytest.raises(UserError, match=r"no room is left .* lower sampling\.max_new_tokens"):
        LocalStream(local(max_new_tokens=10**6))


def test_thinking_that_the_prompt_opens_is_opened_in_the_reply(local, monkeypatch):
    generator = local(max_new_tokens=4)
    monkeypatch.setattr(
        generator, "render", lambda prompts: [generator.tokenizer.encode("Go on. <think>\n") for _ in prompts]
    )
    reply, pieces = heard(LocalStream(generator))
    assert pieces[0] == "<think>"
    assert reply.text.startswith("<think>")
    assert reply.tokens == 4


def test_vllm_does_not_stream():
    with pytest.raises(UserError, match=r"vllm serve"):
        open_stream(ModelConfig("m"), SamplingConfig(), BackendConfig(kind="vllm"))


# ------------------------------------------------------------------------------------------------------------- a server


def test_a_server_is_asked_as_the_generator_asks_it(serve):
    server = serve("Ada: Hello.")
    sampling = SamplingConfig(temperature=0.5, max_new_tokens=9, seed=4, top_k=3)
    stream = at(server, sampling, extra_body={"top_p": None, "min_p": 0.1})
    reply, pieces = heard(stream, [{"role": "user", "content": "Hi <|im_end|>"}], sample=2)
    assert reply.text == "".join(pieces) == "Ada: Hello."
    assert len(pieces) == 4
    assert (reply.truncated, reply.tokens) == (False, 3)
    [body] = server.bodies
    expected = stream.generator.body([{"role": "user", "content": "Hi <|im_end|>"}], 2)
    assert body == expected | {"stream": True}
    assert "<|im_end|>" not in body["messages"][0]["content"]


def test_thinking_set_apart_stands_in_tags(serve):
    server = serve([{"reasoning_content": "a pl"}, {"reasoning_content": "an"}, "Ada: ", "Hello."])
    assert heard(at(server))[0].text == "<think>a plan</think>Ada: Hello."
    server = serve([{"reasoning": "a pl"}, ("finish", "length")])
    reply, _ = heard(at(server))
    assert (reply.text, reply.truncated) == ("<think>a pl", True)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        pytest.param(["Ada: Hel", "BREAK"], "broke off", id="no-end"),
        pytest.param(["Ada: Hel", ("finish", "content_filter")], "for the reason 'content_filter'", id="filtered"),
        pytest.param((500, "busy"), "HTTP 500: busy", id="500"),
        pytest.param((401, "who are you"), "HTTP 401: who are you", id="401"),
        pytest.param((400, "temperature must not be that"), "HTTP 400: temperature", id="400"),
    ],
)
def test_a_reply_that_does_not_come_to_its_end_is_an_error(serve, entry, problem):
    pieces = []
    with pytest.raises(UserError, match=problem) as caught:
        at(serve(entry)).stream(QUESTION, pieces.append)
    assert not isinstance(caught.value, PromptTooLong)
    assert "".join(pieces) == ("Ada: Hel" if isinstance(entry, list) else "")


def test_a_request_without_an_answer_is_repeated(serve):
    server = serve((500, "busy"), "Ada: Hello.")
    assert heard(at(server, retries=1))[0].text == "Ada: Hello."
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "the request exceeds the available context size, try increasing it",
        "prompt is longer than the model's context window",
        "context_length_exceeded",
    ],
)
def test_a_server_that_finds_the_prompt_too_long_says_so(serve, message):
    with pytest.raises(PromptTooLong, match="HTTP 400"):
        at(serve((400, message))).stream(QUESTION, print)


def test_a_server_that_is_not_there():
    gone = StreamingServer()
    gone.close()
    with pytest.raises(UserError, match="cannot reach http"):
        at(gone).stream(QUESTION, print)


def test_a_key_in_an_error_is_not_repeated(serve, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    server = serve((403, "no such key: sk-secret"))
    with pytest.raises(UserError, match=r"no such key: \*\*\*"):
        at(server, api_key_env="MY_KEY").stream(QUESTION, print)
