"""Asking servers that fail: what is repeated, what is waited for, what is given up, and that nothing is made up."""

import asyncio
import email.utils
import itertools
import json
import time

import pytest

from nlhf.errors import UserError
from nlhf.generation.server_config import ServerConfig
from nlhf.generation.servers import ChatServer, Failure, Question, encodable, retry_after
from tests.generation.faulty_server import FaultyServer, completion

pytest.importorskip("openai", reason="needs the extra openai: pip install 'nlhf[openai]'")


@pytest.fixture
def server():
    server = FaultyServer()
    yield server
    server.close()


def chat(server, **settings):
    return ChatServer(ServerConfig(**({"base_url": server.url, "backoff": 0.01, "timeout": 10} | settings)), "a test")


def questions(n=1):
    body = {"model": "m", "max_tokens": 5}
    return [Question({**body, "messages": [{"role": "user", "content": f"q{i}"}]}, lambda c: c.text) for i in range(n)]


def number(body):
    return int(body["messages"][0]["content"][1:])


GOOD = json.dumps(completion()).encode()
PASSING = {
    "429": 429,
    "429 that names a time": (429, {"retry-after": "0.05"}),
    "500": 500,
    "502": 502,
    "503 that names a time": (503, {"retry-after-ms": "50"}),
    "408": 408,
    "timeout": "hang",
    "bytes without an end": "trickle",
    "dropped connection": "drop",
    "cut off within the body": ("cut", GOOD[:40]),
    "torn JSON": GOOD[:40],
    "no JSON": b"<html>busy</html>",
    "nothing": b"",
    "JSON of another kind": b"[1]",
    "no choices": {"choices": []},
    "choices missing": {"error": "none"},
    "null for a choice": {"choices": [None]},
    "null for a message": {"choices": [{"message": None, "finish_reason": "stop"}]},
    "no reason to stop": {"choices": [{"message": {"content": "x"}}]},
    "content of another kind": completion([{"type": "text", "text": "x"}]),
    "filtered": completion("part of", finish_reason="content_filter"),
    "a call of a tool": completion(None, finish_reason="tool_calls"),
}


@pytest.mark.parametrize("fault", list(PASSING.values()), ids=list(PASSING))
def test_a_fault_that_passes_is_asked_again(server, fault):
    server.script = [fault]
    chat_server = chat(server, timeout=0.5 if fault in ("hang", "trickle") else 10)
    assert chat_server.ask(questions()) == ["fine"]
    assert (chat_server.usage.requests, chat_server.usage.retries, chat_server.usage.failures) == (2, 1, 0)


@pytest.mark.parametrize("fault", list(PASSING.values()), ids=list(PASSING))
def test_a_fault_that_stays_is_a_failure_and_never_an_answer(server, fault):
    server.default = fault
    chat_server = chat(server, timeout=0.3 if fault in ("hang", "trickle") else 10, retries=1)
    [answer] = chat_server.ask(questions())
    assert isinstance(answer, Failure)
    assert (answer.refused, chat_server.usage.requests, chat_server.usage.failures) == (False, 2, 1)


REASONS = [
    (500, "HTTP 500: status 500"),
    ("hang", "no answer within 0.3 s"),
    ("drop", "cannot reach http://127.0.0.1"),
    (b"<html>", "not a chat completion: '<html>'"),
    (completion("x", finish_reason="content_filter"), "stopped for the reason 'content_filter'"),
    ((422, {}, {"detail": "Unexpected fields"}), "HTTP 422: Unexpected fields"),
]


@pytest.mark.parametrize(("fault", "reason"), REASONS)
def test_a_failure_says_why(server, fault, reason):
    server.default = fault
    [answer] = chat(server, timeout=0.3 if fault == "hang" else 10, retries=0).ask(questions())
    assert reason in answer.reason


def test_other_questions_do_not_suffer(server):
    """Faults of one question among twelve: the others are answered, in order."""
    server.default = lambda body: 500 if number(body) == 4 else completion(f"a{number(body)}")
    answers = chat(server, retries=2, concurrency=4).ask(questions(12))
    assert [a for a in answers if isinstance(a, str)] == [f"a{i}" for i in range(12) if i != 4]
    assert answers[4] == Failure("HTTP 500: status 500")


def test_a_question_that_is_refused_is_not_asked_again(server):
    server.default = lambda body: 400 if number(body) < 5 else completion("fine")
    chat_server = chat(server, concurrency=1)
    answers = chat_server.ask(questions(6))
    assert [isinstance(a, Failure) for a in answers] == [True] * 5 + [False]
    assert (chat_server.usage.requests, chat_server.usage.retries, chat_server.usage.failures) == (6, 0, 5)


@pytest.mark.parametrize("status", [401, 402, 403, 404, (429, {}, {"error": {"code": "insufficient_quota"}})])
def test_a_server_that_refuses_to_serve_is_left_alone(server, status):
    server.default = status
    answers = chat(server, concurrency=1).ask(questions(5))
    assert all(a.refused and a.lost for a in answers)
    assert len(server.bodies) == 1


def test_a_dead_server_is_given_up_after_three_questions(server):
    server.default = 500
    chat_server = chat(server, concurrency=1, retries=1)
    answers = chat_server.ask(questions(50))
    assert len(server.bodies) == 6
    assert "failed on 3 questions in a row" in answers[49].reason
    assert all(a.lost for a in answers[2:])
    assert chat_server.usage.failures == 50


def test_a_server_that_dies_half_way_keeps_what_it_answered(server):
    served = itertools.count()
    server.default = lambda body: completion(f"a{number(body)}") if next(served) < 10 else "drop"
    answers = chat(server, concurrency=2, retries=1).ask(questions(40))
    assert answers[:8] == [f"a{i}" for i in range(8)]
    assert sum(isinstance(a, str) for a in answers) == 10
    assert answers[-1].lost


def test_the_time_that_a_server_names_is_kept_by_all(server):
    """One request of three is told to wait 0.6 s; nothing at all is sent meanwhile."""
    server.script = [(429, {"retry-after": "0.6"})]
    assert chat(server, concurrency=1).ask(questions(3)) == ["fine"] * 3
    first, *others = server.times
    assert min(others) - first >= 0.6


def test_waiting_doubles(server, monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("nlhf.generation.servers._sleep", sleep)
    server.default = 500
    chat(server, backoff=1.0, retries=8).ask(questions())
    assert all(low <= w <= high for w, (low, high) in zip(waits, [(2**i / 2, 2**i) for i in range(6)], strict=False))
    assert all(30 <= w <= 60 for w in waits[6:])
    assert len(waits) == 8


def test_a_server_that_asks_for_hours_is_not_waited_for(server):
    server.default = (429, {"retry-after": "7200"})
    start = time.monotonic()
    answers = chat(server, concurrency=1).ask(questions(4))
    assert time.monotonic() - start < 5
    assert "it asks to come back in 7200 s" in answers[0].reason
    assert all(a.lost for a in answers)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": email.utils.formatdate(0)}, 0.0),
    ],
)
def test_retry_after_is_read(headers, seconds):
    assert retry_after(headers) == seconds


def test_retry_after_may_be_a_date():
    assert 58 < retry_after({"retry-after": email.utils.formatdate(time.time() + 60)}) < 61


def test_no_more_requests_at_once_than_allowed(server):
    server.delay = 0.05
    assert chat(server, concurrency=3).ask(questions(12)) == ["fine"] * 12
    assert server.most_busy == 3


def test_tokens_are_counted_also_of_replies_that_are_not_used(server):
    server.script = [completion("x", finish_reason="content_filter"), completion("no usage", usage=None)]
    chat_server = chat(server)
    chat_server.ask(questions())
    usage = chat_server.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.uncounted) == (7, 3, 1)
    assert usage.cost((2.0, 10.0)) == pytest.approx((7 * 2 + 3 * 10) / 1e6)
    assert usage.cost(None) is None


def test_it_works_within_a_running_loop_as_in_a_notebook(server):
    async def cell():
        return chat(server).ask(questions(2))

    assert asyncio.run(cell()) == ["fine", "fine"]


def test_an_error_of_ours_is_no_failure_of_the_server(server):
    def broken(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        chat(server).ask([Question(questions()[0].body, broken)])


@pytest.mark.parametrize("fault", [500, 401, 400], ids=["passing", "refuses all", "refuses one"])
def test_a_server_that_repeats_the_key_does_not_get_it_into_a_message(server, fault, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "sk-very-secret")
    server.default = (fault, {}, {"error": {"message": "bad key sk-very-secret, sorry"}})
    [answer] = chat(server, api_key_env="SECRET_KEY", retries=0).ask(questions())
    assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    assert "bad key ***, sorry" in answer.reason


def test_openai_s_key_goes_to_openai_alone(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    chat(server).ask(questions())
    assert "sk-very-secret" not in str(server.headers[0])
    assert ServerConfig().key() == "sk-very-secret"


BAD = [
    ({"concurrency": 0}, "concurrency must be at least 1"),
    ({"retries": -1}, "retries must not be negative"),
    ({"timeout": 0}, "timeout must be positive"),
    ({"timeout": float("nan")}, "timeout must be positive"),
    ({"backoff": -1}, "backoff must not be negative"),
    ({"base_url": "localhost:8000"}, "an address like http://localhost:8000/v1"),
    ({"base_url": "http://"}, "an address like"),
    ({"base_url": "http://host /v1"}, "an address like"),
    ({"base_url": "http://host/v1\n"}, "an address like"),
    ({"base_url": "http://me:sk-very-secret@host/v1"}, "no user, password or query"),
    ({"base_url": "http://host/v1?key=sk-very-secret"}, "no user, password or query"),
    ({"base_url": "http://[sk-very-secret/v1"}, "cannot be read as an address"),
    ({"api_key_env": "sk-very-secret"}, "NAME of an environment variable"),
    ({"api_key_env": "hf_verysecret"}, "NAME of an environment variable"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings_are_refused_without_repeating_a_key(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        ServerConfig(**settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-very-secret\n", "sk very-secret", "sk-very-secrèt"])
def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(monkeypatch, key):
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(UserError, match="the key in MY_KEY holds a blank, a line break") as caught:
        ServerConfig(base_url="http://host/v1", api_key_env="MY_KEY").key()
    assert "very" not in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"base_url": "http://host/v1", "api_key_env": "MY_KEY"}])
def test_a_missing_key_is_named(settings, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    name = settings.get("api_key_env", "OPENAI_API_KEY")
    with pytest.raises(UserError, match=f"a test: set the environment variable {name}"):
        ChatServer(ServerConfig(**settings), "a test")


@pytest.mark.parametrize("text", ["答案", "half \ud800 a pair", "emoji 🙂"])
def test_any_text_can_be_sent(text):
    assert encodable(text) == text.replace("\ud800", "\ufffd")
