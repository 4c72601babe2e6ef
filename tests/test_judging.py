"""The verb `judge` and the Python interface: order kept, nothing judged twice, nothing lost, one clear message."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import nlhf.judging
from nlhf.cli import main
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import GenerationFailed
from nlhf.judge import Judge, Reply
from nlhf.judging import PairJudge, judge, load_judge
from nlhf.models import ModelConfig
from nlhf.pairs import Pair, Turn
from nlhf.sources import DataConfig, load_pairs

MODEL = ("--model.name", "random:qwen3-tiny", "--sampling.batch_size", "1")  # chunks of two pairs in both orders


class Scripted:
    """Finds "splendid"; says nothing about "mumble"; may die after some prompts, as a server does."""

    def __init__(self):
        self.prompts: list[str] = []
        self.dies_at: int | None = None

    def generate(self, prompts, samples=1, progress=None):
        replies = []
        for [message] in prompts:
            dead = self.dies_at is not None and len(self.prompts) >= self.dies_at
            replies.append([None] * samples if dead else [self.reply(message["content"])] * samples)
            self.prompts += [] if dead else [message["content"]]
        if [None] * samples in replies:
            reasons = {i: "HTTP 503" for i, group in enumerate(replies) if None in group}
            raise GenerationFailed("the server", replies, reasons, lost=True)
        return replies

    def reply(self, prompt: str) -> Reply:
        if "mumble" in prompt:
            return Reply("Hm.", False, 1)
        side = "A" if prompt.index("splendid") < prompt.index("dismal") else "B"
        return Reply(f"<critics>\n{side} praise: good 你好\n</critics>\n<choice>[[{side}]]</choice>", False, 9)


@pytest.fixture
def generator(monkeypatch, tmp_path) -> Scripted:
    monkeypatch.chdir(tmp_path)
    generator = Scripted()
    monkeypatch.setattr(nlhf.judging, "make_generator", lambda *_: generator)
    monkeypatch.setattr("nlhf.models.model_hash", lambda name, *_: f"hash of {name}")
    return generator


def row(i: int, **more) -> dict:
    a, b = ("splendid", "dismal") if i % 2 == 0 else ("dismal", "splendid")
    return {"id": f"p{i}", "context": f"question {i}", "response_a": a, "response_b": b, **more}


def write(rows: list, path: str = "pairs.jsonl") -> None:
    Path(path).write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")


def read(path: str = "out.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def run(*arguments: str) -> int:
    return main(["judge", *MODEL, *arguments])


STREAM = ("--input", "pairs.jsonl", "--output", "out.jsonl")


# ------------------------------------------------------------------------------------------------------------- a stream


def test_a_line_for_each_pair_in_order(generator):
    write([row(i) for i in range(7)])
    assert run(*STREAM) == 0
    rows = read()
    assert [r["id"] for r in rows] == [f"p{i}" for i in range(7)]
    assert [r["label"] for r in rows] == ["A", "B"] * 3 + ["A"]
    assert all(r["consistent"] for r in rows)
    assert [j["order"] for j in rows[1]["judgements"]] == ["AB", "BA"]
    assert rows[1]["judgements"][0]["critique"] == "B praise: good 你好"
    assert all(len(j["prompt_hash"]) == len(j["reply_hash"]) == 16 for j in rows[1]["judgements"])
    assert "你好" in Path("out.jsonl").read_text(encoding="utf-8")  # not as escapes


def test_to_standard_output(generator, capsys):
    write([row(0), row(1)])
    assert run("--input", "pairs.jsonl") == 0
    assert [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()] == ["A", "B"]


def test_a_bare_word_is_the_input(generator, capsys):
    write([row(0)])
    assert main(["judge", "pairs.jsonl", *MODEL]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "p0"


def test_equal_responses_and_equal_rows_keep_their_lines(generator):
    write([row(0), row(1, response_a="splendid dismal", response_b="splendid dismal"), row(0, id="again")])
    assert run(*STREAM) == 0
    assert [r["id"] for r in read()] == ["p0", "p1", "again"]
    assert len(generator.prompts) == 4  # what was asked once is not asked again


def test_a_silent_judge_gives_no_verdict(generator):
    write([row(0, context="mumble")])
    run(*STREAM)
    [found] = read()
    assert (found["label"], found["consistent"]) == (None, None)
    assert found["judgements"][0]["reply"] == "Hm."


def test_other_columns(generator):
    write([{"prompt": "q", "one": "dismal", "two": "splendid"}])
    columns = '{"context": "prompt", "response_a": "one", "response_b": "two"}'
    assert run(*STREAM, "--columns", columns) == 0
    assert [(r["id"], r["label"]) for r in read()] == [("row-1", "B")]


@pytest.mark.parametrize("order", ["AB", "BA"])
def test_one_order(generator, order):
    write([row(1)])
    assert run(*STREAM, "--orders", order) == 0
    [found] = read()
    assert (found["label"], found["consistent"], len(found["judgements"])) == ("B", None, 1)


def test_a_prompt_that_is_too_long_is_found_before_anything_is_judged(tmp_path, monkeypatch, tiny_model, capsys):
    monkeypatch.chdir(tmp_path)
    write([row(0), row(1), row(2, response_a="long " * 1000)])
    settings = ["--model.name", tiny_model, "--sampling.max_new_tokens", "4", "--sampling.max_prompt_tokens", "4000"]
    assert main(["judge", *STREAM, *settings]) == 2
    assert "2 of 6 prompts are longer than 4000 tokens" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_standard_input(generator, monkeypatch):
    """A named pipe in the place of standard input, which pytest keeps for itself."""
    os.mkfifo("pipe")
    monkeypatch.setattr(nlhf.judging, "_STDIN", "pipe")
    writer = threading.Thread(target=write, args=([row(0), row(1)], "pipe"))
    writer.start()
    assert main(["judge", "-", *MODEL, "--output", "out.jsonl"]) == 0
    writer.join()
    assert [r["label"] for r in read()] == ["A", "B"]


def test_the_end_counts_what_was_decided_and_loads_nothing_when_all_is(generator, monkeypatch, caplog):
    write([row(0), row(1), row(2, response_a="mumble")])
    assert run(*STREAM) == 0
    assert "out.jsonl: 3 decisions, 3 of them new (A 1, B 1, tie 0, no verdict 1)" in caplog.text
    monkeypatch.setattr(nlhf.judging, "make_generator", lambda *_: pytest.fail("a model was loaded"))
    assert run(*STREAM) == 0
    assert "out.jsonl: 3 decisions, 0 of them new (A 1, B 1, tie 0, no verdict 1)" in caplog.text


# ----------------------------------------------------------------------------------------------------- interrupted runs


@pytest.mark.parametrize("torn", ["", '{"id": "p3", "key": "ab'], ids=["whole lines", "torn line"])
@pytest.mark.parametrize("kept", [0, 1, 4, 6])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(generator, kept, torn):
    write([row(i) for i in range(6)])
    run(*STREAM)
    whole = Path("out.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    Path("out.jsonl").write_bytes(b"".join(lines[:kept]) + torn.encode())
    generator.prompts.clear()
    assert run(*STREAM) == 0
    assert Path("out.jsonl").read_bytes() == whole
    assert len(generator.prompts) == 2 * (6 - kept)


def test_new_rows_are_judged_and_stand_where_they_belong(generator):
    write([row(i) for i in (0, 1, 3)])
    run(*STREAM)
    generator.prompts.clear()
    write([row(i) for i in (2, 1, 0, 3)])
    assert run(*STREAM) == 0
    assert [r["id"] for r in read()] == ["p2", "p1", "p0", "p3"]
    assert len(generator.prompts) == 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("--sampling.max_new_tokens", "7"), "out.jsonl:1: a decision by another judge or with other settings"),
        (("--model.name", "package:nlhf"), "another judge"),
        (("--format", "sdrm"), "another judge"),
    ],
    ids=["sampling", "model", "format"],
)
def test_decisions_of_another_judge_are_not_taken_over(generator, capsys, change, part):
    write([row(0)])
    run(*STREAM)
    before = Path("out.jsonl").read_bytes()
    assert run(*STREAM, *change) == 2
    assert part in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == before


def test_another_batch_size_is_the_same_judge(generator):
    write([row(0), row(1)])
    run(*STREAM)
    generator.prompts.clear()
    assert run(*STREAM, "--sampling.batch_size", "8") == 0
    assert not generator.prompts


def test_a_server_that_dies_half_way_costs_what_was_not_answered(generator, capsys):
    write([row(i) for i in range(6)])
    generator.dies_at = 7  # the second order of pair 3 gets no answer
    assert run(*STREAM) == 2
    message = capsys.readouterr().err
    assert "no reply from the server: pair 'p3' in order BA: HTTP 503" in message
    assert "run the same command again" in message
    assert [r["id"] for r in read()] == ["p0", "p1", "p2"]
    generator.dies_at = None
    generator.prompts.clear()
    assert run(*STREAM) == 0
    assert [r["id"] for r in read()] == [f"p{i}" for i in range(6)]
    assert len(generator.prompts) == 6


# ------------------------------------------------------------------------------------------------------------- one pair

PAIR = ("--prompt", "q", "--response_a", "dismal", "--response_b", "splendid")


def test_one_pair_on_the_command_line(generator, capsys):
    assert run(*PAIR) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["label"], found["consistent"]) == ("B", True)


def test_on_a_terminal_it_is_made_for_reading(generator, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert run("--prompt", "q", "--response_a", "dismal [red]x \x1b[2J", "--response_b", "splendid") == 0
    shown = capsys.readouterr().out
    assert "B is better (both orders agree)" in shown
    assert "dismal [red]x \\x1b[2J" in shown  # judged text is shown, not obeyed
    assert "B praise: good" in shown
    assert "its critique calls B the first response" in shown


# --------------------------------------------------------------------------------------------------------------- Python


def test_three_lines_of_python():
    """As the README shows them, with the judge that ships with the package."""
    from nlhf import load_judge

    [pair] = load_pairs(DataConfig("sandbox", limit=1))
    judge = load_judge("package:nlhf", format="sandbox", sampling=SamplingConfig(max_new_tokens=4))
    decision = judge.compare(pair.context[0].content, pair.response_a, pair.response_b)
    assert decision.label in ("A", "B", "tie", None)
    assert [j.order for j in decision.judgements] == ["AB", "BA"]
    assert str(decision)


def pair_judge(generator: Scripted, **settings) -> PairJudge:
    return PairJudge(Judge(get_format("rm_nlhf"), generator), **settings)


def test_the_lines_of_the_readme_run(generator, capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(from nlhf import load_judge\n.*?)```", readme, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 3
    generator.reply = lambda prompt: pytest.fail("a reply was asked for")
    generator.choice_log_probs = lambda prompts, *_, **__: [[-0.1, -2.4] for _ in prompts]
    exec(code, {})
    assert "undecided (probability of A 0.50, the orders disagree)" in capsys.readouterr().out


def test_a_conversation_is_compared(generator):
    decision = pair_judge(generator).compare([{"role": "user", "content": "q"}], "dismal", "splendid")
    assert (decision.label, decision.consistent) == ("B", True)
    assert str(decision).startswith("B is better (both orders agree)")


def test_many_pairs_keep_their_order(generator):
    pairs = [Pair(f"p{i}", [Turn("user", "q")], "splendid", "dismal") for i in range(3)]
    decisions = pair_judge(generator, samples=2).decide([pairs[0], pairs[1].swap(), pairs[2]])
    assert [d.label for d in decisions] == ["A", "B", "A"]
    assert [len(d.judgements) for d in decisions] == [4, 4, 4]


def test_a_failure_is_an_exception_and_no_verdict(generator):
    generator.dies_at = 1
    with pytest.raises(GenerationFailed):
        pair_judge(generator).compare("q", "splendid", "dismal")


@pytest.mark.parametrize(("a", "b"), [(None, "x"), ("x", 3)])
def test_texts_must_be_texts(generator, a, b):
    with pytest.raises(UserError, match="must be a string"):
        pair_judge(generator).compare("q", a, b)


def test_settings_are_checked_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(nlhf.judging, "make_generator", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match="temperature"):
        load_judge("package:nlhf", samples=3)
    with pytest.raises(UserError, match="rm_nlhf"):
        load_judge("package:nlhf", format="rm_nlfh")


class Loaded(Exception):
    """Carries what would be loaded."""


@pytest.fixture
def loading(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def make_generator(model, sampling, backend):
        raise Loaded(model.name, sampling.temperature, sampling.top_k)

    monkeypatch.setattr(nlhf.judging, "make_generator", make_generator)
    monkeypatch.setattr("nlhf.models.model_hash", lambda *_: None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--preset", "sdrm-qwen3-4b-mask70"], ("opsd-genrm/SDRM-Qwen3-4B-mask70", 0.7, 20)),
        (["--preset=sdrm-qwen3-4b-mask70", "--sampling.temperature", "0"], ("opsd-genrm/SDRM-Qwen3-4B-mask70", 0, 20)),
        (["--model.name", "package:nlhf", "--preset", "sdrm-qwen3-4b-mask70"], ("package:nlhf", 0.7, 20)),
        (["--config", "judge.yaml"], ("opsd-genrm/SDRM-Qwen3-4B-mask70", 0.7, 5)),
    ],
    ids=["alone", "with a setting", "with a model", "in a file"],
)
def test_a_preset_fills_in_what_is_not_set(loading, arguments, expected):
    Path("judge.yaml").write_text("preset: sdrm-qwen3-4b-mask70\nsampling: {top_k: 5}\n")
    with pytest.raises(Loaded) as loaded:
        main(["judge", *PAIR, *arguments])
    assert loaded.value.args == expected


def test_a_preset_in_python(loading):
    with pytest.raises(Loaded) as loaded:
        load_judge(preset="sdrm-qwen3-4b-mask70")
    assert loaded.value.args == ("opsd-genrm/SDRM-Qwen3-4B-mask70", 0.7, 20)
    pair = {"prompt": "q", "response_a": "x", "response_b": "y"}
    with pytest.raises(Loaded) as loaded:
        judge(model=ModelConfig("package:nlhf"), preset="sdrm-qwen3-4b-mask70", **pair)
    assert loaded.value.args == ("package:nlhf", 0.7, 20)
    with pytest.raises(UserError, match="needs a model, or a preset"):
        load_judge()


def test_importing_the_package_stays_light():
    heavy = "[m for m in ('torch', 'transformers', 'jsonargparse', 'numpy') if m in sys.modules]"
    code = f"import sys, nlhf; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import nlhf as package

    with pytest.raises(AttributeError, match="no attribute 'load_jugde'"):
        package.load_jugde  # noqa: B018
