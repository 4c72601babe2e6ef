"""The LLM scorer against a real HTTP server on this machine: what it sends, reads, repeats, keeps and counts."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nlhf.critique.arguments import Argument
from nlhf.critique.llm import LLMScorer
from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.rewards import CritiqueReward, Rollout
from nlhf.verdict import Verdict

openai = pytest.importorskip("openai", reason="needs the extra openai: pip install 'nlhf[openai]'")

HUMAN = HumanCritique(strengths_a="Right dose.", weaknesses_b="Rude.")


def pair(*critiques):
    return Pair("p", [Turn("user", "q")], "x", "y", "A", critiques=list(critiques or [HUMAN]))


def argument(side, polarity, text):
    return {"side": side, "polarity": polarity, "argument": text}


def answer(generated=None, human=None, matches=((0, 0), (1, 1)), fatal=None, repeated=False):
    both = [argument("A", "praise", "dose"), argument("B", "blame", "tone")]
    return {
        "generated": both if generated is None else generated,
        "human": both if human is None else human,
        "fatal": fatal,
        "repeated": repeated,
        "matches": [{"generated": i, "human": j} for i, j in matches],
    }


class Server:
    """Speaks /v1/chat/completions; ``script`` holds what the next requests get, then everyone gets ``default``.

    An entry is a reply (dict or text), an HTTP status, a pair (status, headers), "hang", or a function of the request.
    """

    def __init__(self):
        self.script, self.default, self.requests, self.authorization = [], answer(), [], []
        self.busy = self.most_busy = 0
        self.delay = 0.0
        self.finish_reason = "stop"
        self.lock = threading.Lock()
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer.lock:
                    outer.requests.append((self.path, body))
                    outer.authorization.append(self.headers["authorization"])
                    entry = outer.script.pop(0) if outer.script else outer.default
                    outer.busy += 1
                    outer.most_busy = max(outer.most_busy, outer.busy)
                if outer.delay:
                    time.sleep(outer.delay)
                if entry == "hang":
                    outer.released.wait(20)
                with outer.lock:
                    outer.busy -= 1
                if callable(entry):
                    entry = entry(body)
                status, headers = entry if isinstance(entry, tuple) else (entry, {})
                if isinstance(status, int):
                    self._send(status, {"error": {"message": f"status {status}"}}, headers)
                elif entry == "no json":
                    self._send(200, None, {})
                else:
                    content = entry if isinstance(entry, str) else json.dumps(entry)
                    message = {"role": "assistant", "content": content}
                    choice = {"index": 0, "message": message, "finish_reason": outer.finish_reason}
                    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
                    reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
                    self._send(200, reply | {"choices": [choice], "usage": usage}, {})

            def _send(self, status, value, headers):
                data = b"<html>" if value is None else json.dumps(value).encode()
                try:
                    self.send_response(status)
                    for name, text in ({"content-type": "application/json"} | headers).items():
                        self.send_header(name, text)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:  # the client has given up waiting
                    pass

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def make(server, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def make(**options):
        settings = {"model": "m", "base_url": server.url, "cache": str(tmp_path / "cache"), "backoff": 0.0}
        return LLMScorer(**(settings | options))

    return make


GOOD = "A praise: right dose\nB blame: impolite"


def test_one_call_a_comparison_and_the_score_is_computed_from_its_lists(make, server):
    server.default = answer(matches=[(1, 1)])
    [match] = make().score([GOOD], [pair()])
    assert (match.precision, match.recall, match.f1, match.failure) == (0.5, 0.5, 0.5, None)
    assert match.matched == ((1, 1),)
    assert match.generated == (Argument("A", 1, "dose"), Argument("B", -1, "tone"))
    [(path, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert body["model"] == "m"
    assert body["response_format"]["json_schema"]["schema"]["required"]
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    shown = json.loads(body["messages"][1]["content"])
    assert shown == {"generated": GOOD, "human": {"strengths_A": "Right dose.", "weaknesses_B": "Rude."}}


def test_figures_that_the_reply_claims_are_ignored(make, server):
    server.default = answer(matches=[]) | {"f1": 1.0, "precision": 1.0}
    [match] = make().score([GOOD], [pair()])
    assert match.f1 == 0.0


@pytest.mark.parametrize(
    "generated",
    [
        [argument("B", "praise", "dose"), argument("A", "blame", "tone")],
        [argument("A", "blame", "dose"), argument("B", "praise", "tone")],
        [argument(None, None, "dose"), argument(None, None, "tone")],
    ],
    ids=["side", "polarity", "vague"],
)
def test_a_match_across_sides_or_polarities_never_counts(make, server, generated):
    server.default = answer(generated=generated)
    [match] = make().score([GOOD], [pair()])
    assert (match.f1, match.failure) == (0.0, None)


def test_repetition_scores_zero(make, server):
    server.default = answer(repeated=True)
    [match] = make().score([GOOD], [pair()])
    assert (match.f1, match.repeated) == (0.0, True)


def test_a_fatal_error_is_all_that_counts(make, server):
    """Two generated arguments, one of them the fatal error: P = 1/2, R = 1/1."""
    server.default = answer(fatal=1)
    [match] = make().score([GOOD], [pair()])
    assert (match.precision, match.recall) == (0.5, 1.0)
    assert match.reference == (Argument("B", -1, "tone"),)
    assert match.matched == ((1, 0),)


MALFORMED = {
    "prose": "I think they agree.",
    "empty": "",
    "torn": '{"generated": [',
    "list": "[1]",
    "no_lists": {"f1": 1.0},
    "no_human_arguments": answer(human=[], matches=[]),
    "bad_side": answer(generated=[argument("C", "praise", "x")], matches=[]),
    "bad_polarity": answer(generated=[argument("A", "good", "x")], matches=[]),
    "no_text": answer(generated=[argument("A", "praise", " ")], matches=[]),
    "match_beyond": answer(matches=[(0, 2)]),
    "match_negative": answer(matches=[(-1, 0)]),
    "match_boolean": answer(matches=[(True, 0)]),
    "not_one_to_one": answer(matches=[(0, 0), (1, 0)]),
    "fatal_beyond": answer(fatal=5),
    "repeated_missing": {k: v for k, v in answer().items() if k != "repeated"},
    "matches_no_list": answer() | {"matches": "none"},
}


@pytest.mark.parametrize("reply", list(MALFORMED.values()), ids=list(MALFORMED))
def test_a_malformed_reply_is_asked_again(make, server, reply):
    server.script = [reply]
    scorer = make()
    [match] = scorer.score([GOOD], [pair()])
    assert (match.f1, match.failure) == (1.0, None)
    assert (scorer.usage.requests, scorer.usage.retries, scorer.usage.malformed) == (2, 1, 1)


@pytest.mark.parametrize(
    "wrap",
    [
        "```json\n{}\n```",
        "Here it is: {}",
        "<think>maybe {{0}}</think>{}",
    ],
    ids=["fence", "prose", "thinking"],
)
def test_json_is_found_within_other_text(make, server, wrap):
    server.default = wrap.replace("{}", json.dumps(answer()))
    [match] = make().score([GOOD], [pair()])
    assert match.f1 == 1.0


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503])
def test_a_passing_error_is_tried_again(make, server, status):
    server.script = [status, status]
    scorer = make()
    [match] = scorer.score([GOOD], [pair()])
    assert match.f1 == 1.0
    assert (scorer.usage.requests, scorer.usage.retries, scorer.usage.failures) == (3, 2, 0)


def test_a_timeout_is_tried_again(make, server):
    server.script = ["hang"]
    scorer = make(timeout=0.3)
    [match] = scorer.score([GOOD], [pair()])
    assert match.f1 == 1.0
    assert scorer.usage.retries == 1


def test_an_answer_that_is_no_json_is_tried_again(make, server):
    server.script = ["no json"]
    [match] = make().score([GOOD], [pair()])
    assert match.f1 == 1.0


def test_the_key_of_another_service_is_not_sent(make, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    make().score([GOOD], [pair()])
    assert server.authorization == ["Bearer none"]
    monkeypatch.setenv("MY_KEY", "mine")
    make(api_key_env="MY_KEY", temperature=1.0).score([GOOD], [pair()])
    assert server.authorization[-1] == "Bearer mine"


@pytest.mark.parametrize(
    ("entry", "requests", "reason"),
    [(500, 3, "HTTP 500"), (429, 3, "HTTP 429"), ("nonsense", 3, "malformed reply"), (400, 1, "HTTP 400: status 400")],
)
def test_what_fails_for_good_is_a_failure_and_not_a_judgement(make, server, entry, requests, reason):
    server.default = entry
    scorer = make(attempts=3)
    matches = scorer.score([GOOD, ""], [pair(), pair()])
    assert reason in matches[0].failure
    assert matches[1].failure is None
    assert (scorer.usage.requests, scorer.usage.failures) == (requests, 1)


def test_a_server_that_is_not_there_is_a_failure(make, server):
    scorer = make(base_url="http://127.0.0.1:9/v1", attempts=2, timeout=2)
    [match] = scorer.score([GOOD], [pair()])
    assert "cannot reach http://127.0.0.1:9/v1" in match.failure


def test_a_reply_that_was_cut_off_names_the_setting(make, server):
    server.finish_reason = "length"
    [match] = make(attempts=1).score([GOOD], [pair()])
    assert "max_tokens" in match.failure


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_stops_the_run(make, server, status):
    server.default = status
    with pytest.raises(UserError, match=f"refuses model 'm' .HTTP {status}.*base_url"):
        make(concurrency=1).score([GOOD, "A praise: x", "A praise: y"], [pair()] * 3)
    assert len(server.requests) <= 2  # the rest is not sent


def test_failures_reach_the_reward_as_counted_failures(make, server):
    server.default = 500
    reward = CritiqueReward(make(attempts=1))
    logged = {}
    rollout = Rollout(pair(), Verdict(label="A", critique=GOOD, raw=GOOD), GOOD, True)
    assert reward([rollout], logged.__setitem__) == [0.0]
    assert logged["process/scorer_failures"] == 1


def test_a_comparison_is_paid_for_once(make, server):
    scorer = make()
    first = scorer.score([GOOD, GOOD], [pair(), pair()])
    assert len(server.requests) == 1
    again = make()
    assert again.score([GOOD], [pair()]) == first[:1]
    assert len(server.requests) == 1
    assert (again.usage.cached, again.usage.requests, again.usage.prompt_tokens) == (1, 0, 0)


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"temperature": 0.5}, {"max_tokens": 99}, {"response_format": "json_object"}],
    ids=lambda change: next(iter(change)),
)
def test_another_request_is_another_cache_entry(make, server, change):
    make().score([GOOD], [pair()])
    make(**change).score([GOOD], [pair()])
    assert len(server.requests) == 2


def test_failures_are_not_kept(make, server):
    server.script = [500]
    make(attempts=1).score([GOOD], [pair()])
    [match] = make(attempts=1).score([GOOD], [pair()])
    assert match.f1 == 1.0


def test_a_torn_cache_file_is_named(make, server, tmp_path):
    make().score([GOOD], [pair()])
    [file] = (tmp_path / "cache").iterdir()
    file.write_text('{"content": ')
    with pytest.raises(UserError, match=rf"{file.name} cannot be read .*; remove it"):
        make().score([GOOD], [pair()])


def test_no_more_requests_at_once_than_allowed(make, server):
    server.delay = 0.05
    make(concurrency=3).score([f"A praise: {i}" for i in range(12)], [pair()] * 12)
    assert server.most_busy == 3


def test_results_keep_their_order(make, server):
    def reply(body):
        n = int(json.loads(body["messages"][1]["content"])["generated"].split()[-1])
        time.sleep(0.02 * (5 - n))
        return answer(matches=[(0, 0)][: n % 2])

    server.default = reply
    matches = make().score([f"A praise: {i}" for i in range(6)], [pair()] * 6)
    assert [m.f1 for m in matches] == [0.0, 0.5] * 3


def test_tokens_and_cost(make, server):
    server.script = [500, "malformed"]
    scorer = make(price_per_million=(2.0, 10.0))
    scorer.score([GOOD], [pair()])
    assert (scorer.usage.prompt_tokens, scorer.usage.completion_tokens) == (200, 40)  # the malformed reply costs too
    assert scorer.cost == pytest.approx((200 * 2 + 40 * 10) / 1e6)
    assert make().cost is None


def test_nothing_to_ask_is_not_asked(make, server):
    matches = make().score([GOOD, "", None, "  "], [pair(HumanCritique(text=" ")), pair(), pair(), pair()])
    assert matches[0] is None
    assert [m.f1 for m in matches[1:]] == [0.0, 0.0, 0.0]
    assert server.requests == []


def test_several_humans_are_alternatives_and_one_failure_does_not_hide_the_others(make, server):
    def reply(body):
        return 400 if "Rude" in body["messages"][1]["content"] else answer(matches=[(0, 0)])

    server.default = reply
    [match] = make().score([GOOD], [pair(HUMAN, HumanCritique(strengths_a="dose", weaknesses_b="tone"))])
    assert (match.f1, match.failure) == (0.5, None)


@pytest.mark.parametrize(
    "text",
    ["答案 A 更好。", "الجواب أ أفضل", "half \ud800 a pair", 'a "quote" {{brace}} \\ <|im_end|>', "word " * 20_000],
    ids=["chinese", "arabic", "surrogate", "quotes", "long"],
)
def test_any_text_arrives_whole(make, server, text):
    [match] = make().score([text], [pair()])
    assert match.failure is None
    shown = json.loads(server.requests[0][1]["messages"][1]["content"])
    assert shown["generated"] == text.replace("\ud800", "\ufffd")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"attempts": 0}, "attempts must be at least 1"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"response_format": "xml"}, "must be json_schema, json_object or none"),
        ({"base_url": None}, "set the environment variable OPENAI_API_KEY"),
    ],
)
def test_bad_settings(make, options, message):
    with pytest.raises(UserError, match=message):
        make(**options)
