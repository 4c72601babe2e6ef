"""The verb `chat`, typed into a pseudo-terminal or read from a pipe."""

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
import yaml

from nlhf import cli
from nlhf.errors import UserError
from nlhf.roleplay.record_chat import TYPED, record, screen, spawn_chat
from nlhf.roleplay.scenarios import find_scenario, load_scenarios
from nlhf.roleplay.session import system_prompt
from tests.generation.streaming_server import StreamingServer

pytest.importorskip("openai", reason="needs the extra openai: pip install 'nlhf[openai]'")
pexpect = pytest.importorskip("pexpect", reason="needs the package pexpect")

GATSBY = find_scenario(load_scenarios(), "great_gatsby")
NICK = "Nick Carraway> "
REPLY = (
    "<system_thinking>SECRET plan.</system_thinking>\n\nJay Gatsby: <role_thinking>SECRET thought.</role_thinking> "
    "<role_action>smiles</role_action> Old sport."
)
SHOWN = "Jay Gatsby: (smiles) Old sport."


@pytest.fixture
def serve():
    servers = []

    def start(*script):
        servers.append(StreamingServer(*script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def options(server, *more, chosen=("--scenario", "2", "--character", "1", "--user", "2")):
    backend = ["--backend.kind", "openai", "--backend.base_url", server.url, "--backend.retries", "0"]
    return ["--model-path", "m", *backend, *chosen, "--transcript", "t.jsonl", *more]


@pytest.fixture
def spawn(tmp_path):
    children = []

    def start(arguments):
        children.append(spawn_chat(arguments, cwd=tmp_path))
        return children[-1]

    yield start
    for child in children:
        child.close(force=True)


def say(child, text, prompt=NICK):
    child.expect_exact(prompt)
    child.sendline(text)


def code(child):
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def rows(folder):
    return [json.loads(line) for line in (folder / "t.jsonl").read_text(encoding="utf-8").splitlines()]


# ----------------------------------------------------------------------------------------------------- at a terminal


def test_a_whole_chat(spawn, serve, tmp_path):
    server = serve(REPLY, REPLY.replace("Old sport", "\x1b[2JCome \u202ein"), "No plan. [SECRET]")
    child = spawn(options(server, chosen=()))
    say(child, "drakula", "Number or name> ")
    child.expect_exact("Did you mean 'dracula'")
    say(child, "great_gatsby", "Number or name> ")
    say(child, "7", "Number or name> ")
    say(child, "jay gatsby", "Number or name> ")
    say(child, "1", "Number or name> ")
    child.expect_exact("the model plays Jay Gatsby; choose somebody else")
    say(child, "Ada", "Number or name> ")
    say(child, "Who are you? (steps back) [Hm.]", "Ada> ")
    child.expect_exact(" Old sport.")
    say(child, "retry", "Ada> ")
    child.expect_exact("Come")
    say(child, "history", "Ada> ")
    say(child, "prompt", "Ada> ")
    say(child, "/HELP", "Ada> ")
    say(child, "/histroy", "Ada> ")
    child.expect_exact("Did you mean 'history'?")
    say(child, "", "Ada> ")
    say(child, "clear", "Ada> ")
    say(child, "Again.", "Ada> ")
    say(child, "exit", "Ada> ")
    assert code(child) == 0
    seen = screen(child)
    assert "SECRET" not in child.logfile_read.getvalue()
    assert f"Ada> Who are you? (steps back) [Hm.]\n{SHOWN}\nAda> retry\n" in seen
    wary = "Jay Gatsby: (smiles) \\x1b[2JCome \\u202ein."
    assert f"{wary}\nAda> history\nAda: Who are you? (steps back)\n{wary}\nAda> prompt" in seen
    assert "\x1b[2J" not in child.logfile_read.getvalue()
    assert GATSBY.characters[0].goal in seen
    assert seen.count(GATSBY.opening) == 2
    assert seen.endswith("Ada> Again.\nJay Gatsby: No plan.\nAda> exit\nTranscript: t.jsonl\n")

    first, second, third = (body["messages"] for body in server.bodies)
    assert first == second
    assert [m["role"] for m in third] == ["system", "user"]
    assert "Ada: somebody new to you" in first[0]["content"]
    kinds = [row["kind"] for row in rows(tmp_path)]
    assert kinds == ["header", "turn", "turn", "retry", "turn", "clear", "turn", "turn", "end"]
    header, *_, end = rows(tmp_path)
    assert header["model"]["name"] == "m"
    assert header["backend"]["base_url"] == server.url
    assert header["sampling"]["temperature"] == 0.7
    assert header["environment"]["nlhf"]
    assert end["reason"] == "quit"


def test_ctrl_c_stops_a_reply_and_ctrl_d_ends_the_chat(spawn, serve, tmp_path):
    server = serve(
        ["<think>SECRET</think>Jay Gatsby: Old sport.", "<role_action>", "PAUSE"], ["<think>SEC", "PAUSE"], REPLY
    )
    child = spawn(options(server))
    say(child, "Hello.")
    child.expect_exact("Old sport.")
    child.send("\x03")
    child.expect_exact("(stopped; retry draws another reply, or go on)")
    say(child, "Go on.")
    child.expect_exact("Jay Gatsby ...")  # it waits
    while len(server.bodies) < 2:
        time.sleep(0.01)
    child.send("\x03")
    child.expect_exact("(stopped")
    say(child, "And now?")
    child.expect_exact("(smiles)")
    child.expect_exact(NICK)
    child.send("\x04")
    assert code(child) == 0
    assert "SEC" not in child.logfile_read.getvalue()
    written = rows(tmp_path)
    assert [row["ended"] for row in written if row.get("author") == "model"] == ["interrupted", "interrupted", "stop"]
    assert written[-1]["reason"] == "end of input"
    assert server.bodies[2]["messages"][2]["content"] == "Jay Gatsby: Old sport."
    assert server.bodies[2]["messages"][3]["content"] == "Nick Carraway: Go on.\n\nNick Carraway: And now?"


def test_ctrl_c_at_the_prompt_ends_the_chat(spawn, serve, tmp_path):
    child = spawn(options(serve(REPLY)))
    say(child, "Hello.")
    child.expect_exact("Old sport.")
    child.expect_exact(NICK)
    child.send("\x03")
    child.expect_exact("Transcript: t.jsonl")
    assert code(child) == 0
    assert [row["kind"] for row in rows(tmp_path)] == ["header", "turn", "turn", "end"]
    assert rows(tmp_path)[-1]["reason"] == "interrupted"


def test_both_layers_are_shown_when_they_are_asked_for(spawn, serve):
    child = spawn(options(serve(REPLY), "--show-think", "--show-rolethink"))
    say(child, "Hello.")
    say(child, "q")
    assert code(child) == 0
    seen = screen(child)
    assert "[plan: SECRET plan.]\nJay Gatsby: [SECRET thought.] (smiles) Old sport.\n" in seen
    assert "\x1b[" in child.logfile_read.getvalue()  # with colours


def test_a_server_that_fails_does_not_end_the_chat(spawn, serve):
    child = spawn(options(serve((500, "busy"), REPLY)))
    say(child, "Hello.")
    child.expect_exact("No reply: HTTP 500: busy. retry asks again.")
    say(child, "retry")
    child.expect_exact("(smiles)")
    say(child, "quit")
    assert code(child) == 0


@pytest.mark.slow
def test_a_model_in_this_process_whose_context_is_full(spawn, tiny_model, tmp_path):
    """A token is a byte here."""
    chosen = ["--scenario", "2", "--character", "1", "--user", "2", "--transcript", "t.jsonl"]
    room = len(system_prompt(GATSBY, GATSBY.characters[0], "Nick Carraway") + GATSBY.opening) + 900
    limits = ["--sampling.max_new_tokens", "4", "--sampling.max_prompt_tokens", str(room)]
    child = spawn(["--model-path", tiny_model, *chosen, *limits])
    for _ in range(4):
        say(child, "x" * 300)
        child.expect_exact("cut off")
    say(child, "y" * 2000)
    child.expect_exact("too long for the model")
    child.expect_exact("say it in fewer words")
    say(child, "Shorter.")
    child.expect_exact("cut off")
    say(child, "history")
    say(child, "quit")
    assert code(child) == 0
    seen = screen(child)
    assert seen.count("its oldest turns are no longer read") == 1
    assert seen.count("(what stands above is no longer read by the model)") == 1
    replies = [row for row in rows(tmp_path) if row.get("author") == "model"]
    assert replies[0]["forgotten"] == 0 < replies[-1]["forgotten"] <= len(replies) * 2
    assert [row["kind"] for row in rows(tmp_path)].count("refused") == 1
    assert rows(tmp_path)[0]["model_hash"]


@pytest.mark.slow
def test_ctrl_c_stops_a_model_in_this_process(spawn, tiny_model, tmp_path):
    chosen = ["--scenario", "2", "--character", "1", "--user", "2", "--transcript", "t.jsonl"]
    endless = ["--sampling.max_new_tokens", "20000", "--sampling.temperature", "0"]  # greedy never ends
    child = spawn(["--model-path", tiny_model, *chosen, *endless])
    for _ in range(2):
        say(child, "Hello.")
        child.expect_exact("Jay Gatsby ...")
        time.sleep(0.5)  # it writes now
        child.send("\x03")
        child.expect_exact("(stopped")
    say(child, "quit")
    assert code(child) == 0
    assert [row["ended"] for row in rows(tmp_path) if row.get("author") == "model"] == ["interrupted"] * 2


def test_kill_9_loses_no_more_than_the_unfinished_turn(spawn, serve, tmp_path):
    child = spawn(options(serve(REPLY, ["<think>p</think>Jay Gatsby: Hm. <role_action>", "PAUSE"])))
    say(child, "Hello.")
    say(child, "Go on.")
    child.expect_exact("Hm.")
    child.kill(9)
    child.expect(pexpect.EOF)
    assert [(row["kind"], row.get("author")) for row in rows(tmp_path)] == [
        ("header", None),
        ("turn", "user"),
        ("turn", "model"),
        ("turn", "user"),
    ]


# ---------------------------------------------------------------------------------------------------------- on a pipe


@pytest.fixture
def pipe(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)

    def run(arguments, typed=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        returned = cli.main(["chat", *arguments])
        out, err = capsys.readouterr()
        return returned, out, err

    return run


def test_a_chat_on_a_pipe_is_plain_text(pipe, serve, tmp_path):
    server = serve(REPLY, REPLY)
    typed = "2\nJay Gatsby\nnick carraway\nHello, Žofia \ud83d\ude00.\n\nGo on.".encode("utf-8", "surrogatepass")
    returned, out, _ = pipe(options(server, chosen=()), typed)
    assert returned == 0
    assert "\x1b" not in out
    assert f"{NICK}Go on.\n{SHOWN}\nTranscript: t.jsonl\n" in out
    assert "SECRET" not in out
    assert len(server.bodies) == 2
    assert rows(tmp_path)[-1]["reason"] == "end of input"


def test_letters_that_the_output_cannot_show_do_not_end_a_chat(pipe, serve, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    assert pipe(options(serve("Jay Gatsby: Žofia \N{EM DASH} old sport.")), b"Hello.\n")[0] == 0
    assert b"Jay Gatsby: \\u017dofia \\u2014 old sport." in out.getvalue()


def test_a_model_that_fails_on_a_pipe_is_an_error(pipe, serve, tmp_path):
    returned, out, err = pipe(options(serve((401, "no key"))), b"Hello.\nGo on.\n")
    assert returned == 2
    assert "the model gave no reply: HTTP 401: no key" in err
    assert "Transcript: t.jsonl" in out
    assert [row["kind"] for row in rows(tmp_path)] == ["header", "turn", "turn", "end"]
    assert rows(tmp_path)[-1]["reason"] == "failed"


def test_a_message_that_is_too_long_on_a_pipe_is_refused_and_the_chat_goes_on(pipe, serve):
    server = serve((400, "maximum context length is 10 tokens"), REPLY)
    returned, out, _ = pipe(options(server), b"Long.\nShort.\n")
    assert returned == 0
    assert "too long for the model: HTTP 400: maximum context length is 10 tokens. It has been taken back" in out
    assert "Long." not in json.dumps(server.bodies[1])


def test_the_default_transcript_is_named_by_time_and_scene(pipe, serve, tmp_path):
    arguments = options(serve())
    at = arguments.index("--transcript")
    returned, out, _ = pipe(arguments[:at] + arguments[at + 2 :], b"q\n")
    assert returned == 0
    [file] = Path("runs/chat").iterdir()
    assert re.fullmatch(r"\d{14}-great_gatsby\.jsonl", file.name)
    assert f"Transcript: {Path('runs/chat') / file.name}" in out


def test_scenes_of_ones_own(pipe, serve, tmp_path):
    scene = {
        "id": "lighthouse",
        "title": "The light",
        "setting": "A lighthouse.",
        "opening": "Somebody knocks.",
        "characters": [
            {"name": "Maren", "description": "The keeper.", "goal": "To be alone."},
            {"name": "Jo", "description": "Her brother.", "goal": "To be let in."},
        ],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"scenarios": [scene]}))
    server = serve("Maren: No.")
    chosen = ("--scenarios", "mine.yaml", "--scenario", "lighthouse", "--character", "Maren", "--user", "Jo")
    returned, out, _ = pipe(options(server, chosen=chosen), b"Knock, knock.\n")
    assert returned == 0
    assert "Jo> Knock, knock.\nMaren: No.\n" in out
    assert "From the world of" not in server.bodies[0]["messages"][0]["content"]


def test_the_card_and_we_name_the_model_alike(pipe, serve, tmp_path):
    server = serve()
    for flag in ("--model-path", "--model_path", "--model.name"):
        arguments = [flag if a == "--model-path" else a for a in options(server)]
        assert pipe(arguments, b"q\n")[0] == 0
        assert rows(tmp_path)[0]["model"]["name"] == "m"
        (tmp_path / "t.jsonl").unlink()
    arguments = options(server)[2:]
    assert pipe(["m", *arguments], b"q\n")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "missing: model.name (or --model-path)", id="no-model"),
        pytest.param(["--model-path", "m", "--model.name", "n"], "both name a model", id="two-models"),
        pytest.param(["--model-path", "m", "--scenario", "99"], "no scenario '99'; there are 1 to 12", id="scene"),
        pytest.param(["--model-path", "m", "--scenario", "drakula"], "Did you mean 'dracula'?", id="scene-by-id"),
        pytest.param(["--model-path", "m", "--scenario", "2", "--character", "9"], "there are 1 to 3", id="character"),
        pytest.param(
            ["--model-path", "m", "--scenario", "2", "--character", "Mr. Gatsby"], "mean 'Jay Gatsby'", id="name"
        ),
        pytest.param(
            ["--model-path", "m", "--scenario", "2", "--character", "1", "--user", "jay gatsby"],
            "the model plays Jay Gatsby",
            id="same",
        ),
        pytest.param(
            ["--model-path", "m", "--scenario", "2", "--character", "1", "--user", "9"], "there are 1 to 3", id="user"
        ),
        pytest.param(
            ["--model-path", "m", "--scenario", "2", "--character", "1", "--user", "A: b"],
            "user 'A: b': field 'name': 'A: b' cannot stand before the colon",
            id="user-with-a-colon",
        ),
        pytest.param(
            ["--model-path", "m", "--scenario", "2", "--character", "1", "--user", "narrator"],
            "who tells the scene",
            id="narrator",
        ),
        pytest.param(["--model-path", "m"], "no scenario was chosen; --scenario chooses one", id="nothing-typed"),
        pytest.param(["--model-path", "m", "--scenario", "2"], "no character was chosen", id="no-character"),
        pytest.param(["--model-path", "m", "--scenarios", "none.yaml"], "No such file", id="no-file"),
        pytest.param(["--model-path", "m", "--show-thnk"], "unknown option", id="option"),
        pytest.param(["--model-path", "random:tiny"], "random:", id="model-name"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(pipe, tmp_path, arguments, message):
    returned, _, err = pipe(arguments)
    assert returned == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_choice_on_a_pipe_is_an_error(pipe):
    returned, _, err = pipe(["--model-path", "m"], b"drakula\n2\n")
    assert returned == 2
    assert "Did you mean 'dracula'" in err


def test_a_transcript_is_not_overwritten(pipe, serve, tmp_path):
    (tmp_path / "t.jsonl").write_text("precious")
    returned, _, err = pipe(options(serve()), b"q\n")
    assert returned == 2
    assert "t.jsonl exists already" in err
    assert (tmp_path / "t.jsonl").read_text() == "precious"


def test_a_chat_without_input_or_output_is_refused(pipe, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["chat", "--model-path", "m"]) == 2
    assert "needs standard input" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- recording


def test_a_recording_that_would_overwrite_or_cannot_run_is_refused(tmp_path):
    file = tmp_path / "chat.txt"
    with pytest.raises(UserError, match=r"the chat ended early.*unknown random model"):
        record(str(file), "random:nothing")
    assert not file.exists()
    file.write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        record(str(file))
    assert file.read_text() == "precious"
    with pytest.raises(UserError, match=r"chat\.txt is a file"):
        record(str(file / "chat.txt"))


@pytest.mark.slow
def test_one_command_records_a_chat(tmp_path):
    file = tmp_path / "chat.txt"
    record(str(file), "random:qwen3-tiny")
    text = file.read_text(encoding="utf-8")
    assert text.startswith("$ nlhf chat --model-path random:qwen3-tiny ")
    assert text.count("Number or name> ") == 3
    assert text.count("Elizabeth Bennet> ") == 4
    assert text.count("\nMr. Darcy:") >= 5
    assert "\x1b" not in text
    assert re.search(r"Transcript: runs/chat/\d+-pride_and_prejudice\.jsonl\n$", text)


# ------------------------------------------------------------------------------------------------------ the document


def documented(title):
    """A fenced block of docs/chat.md."""
    text = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    return re.search(rf"^```text {title}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def test_the_scene_in_the_document_is_one(tmp_path):
    (tmp_path / "mine.yaml").write_text(documented("mine.yaml"), encoding="utf-8")
    [scene] = load_scenarios(tmp_path / "mine.yaml")
    assert scene.opening_turn


def test_the_session_in_the_document_was_recorded_with_these_scenes():
    text = documented("recorded")
    assert re.findall(r"^(?:Number or name|Elizabeth Bennet)> (.*)$", text, re.MULTILINE) == list(TYPED)
    for place, scene in enumerate(load_scenarios(), start=1):
        assert f"{place:>3}  {scene.title} - {scene.work}, {scene.author}, {scene.year}\n" in text
    assert find_scenario(load_scenarios(), "1").opening in text
    assert text.startswith("$ nlhf chat ")
