"""What people get wrong when they judge something: one clear message each, exit code 2, and nothing written.

Mistakes in the configuration of training are in test_cli.py, those in the rows of a data set in tests/sources.
"""

import json
import sys
from pathlib import Path

import pytest

import nlhf.evaluate
import nlhf.judging
from nlhf.cli import main

PAIR = {"id": "1", "context": "q", "response_a": "x", "response_b": "y", "label": "A"}
ONE_PAIR = ["--prompt", "q", "--response_a", "x", "--response_b", "y"]
JUDGE = ["judge", "--model.name", "package:nlhf"]
EVALUATE = ["evaluate", "--model.name", "package:nlhf", "--data.source", "jsonl", "--data.path", "pairs.jsonl",
            "--out", "out", "--ledger", "ledger.jsonl"]  # fmt: skip


def lines(*rows) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def without(name: str, **more) -> dict:
    return {k: v for k, v in PAIR.items() if k != name} | more


def nested(levels: int) -> dict:
    return {"a": nested(levels - 1)} if levels else {}


# What a file named pairs.jsonl holds, unless another name is given, and what the message says.
FILES = {
    "an empty file": ("", ["pairs.jsonl: the file holds no rows"]),
    "a line that is not JSON": (lines(PAIR, "{'id': 2}"), ["pairs.jsonl:2: not valid JSON"]),
    "a row that is a list": (lines([1, 2]), ["pairs.jsonl:1: a row must be an object", "list"]),
    "a misspelt field": (lines(without("response_b", respons_b="y")), ["response_b", "Did you mean 'respons_b'?"]),
    "an unknown field": (lines(PAIR | {"rating": 3}), ["pairs.jsonl:1: unknown field 'rating'", "meta"]),
    "a field left out of one row": (lines(PAIR, without("response_b", id="2")), ["pairs.jsonl:2", "'response_b'"]),
    "a response that is a number": (lines(PAIR | {"response_a": 3}), ["pairs.jsonl:1", "must be a string"]),
    "a conversation without turns": (lines(PAIR | {"context": []}), ["pairs.jsonl:1", "at least one turn"]),
    "a turn without a role": (lines(PAIR | {"context": [{"content": "q"}]}), ["pairs.jsonl:1", "context[0]", "'role'"]),
    "a label of another kind": (lines(PAIR | {"label": "left"}), ["pairs.jsonl:1", "'A', 'B', 'tie'", "'left'"]),
    "a strength against the label": (lines(PAIR | {"strength": 2}), ["pairs.jsonl:1", "negative means A"]),
    "two rows of one id": (lines(PAIR, PAIR), ["two pairs have the id '1'"]),
    "brackets within brackets": (lines(PAIR, "[" * 100_000), ["pairs.jsonl:2: JSON that cannot be read"]),
    "meta of a thousand levels": (lines(PAIR | {"meta": nested(900)}), ["pairs.jsonl:1: field 'meta'", "100 levels"]),
    "a strength of 5,000 digits": (lines(PAIR | {"strength": "1" * 5000}), ["pairs.jsonl:1", "must be a whole number"]),
    "a subset that is a list": (lines(PAIR | {"subset": ["a"]}), ["pairs.jsonl:1: field 'subset' must be a name"]),
    "a label of 10,000 letters": (lines(PAIR | {"label": "k" * 10_000}), ["pairs.jsonl:1", "more characters"]),
    "a text in Latin-1": (json.dumps(PAIR | {"context": "é"}, ensure_ascii=False).encode("latin-1"),
                          ["pairs.jsonl:1: not UTF-8 text"]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder, where nothing may be loaded."""
    monkeypatch.chdir(tmp_path)
    for module in (nlhf.judging, nlhf.evaluate):
        monkeypatch.setattr(module, "make_generator", lambda *_: pytest.fail("a model was loaded"))
    Path("pairs.jsonl").write_text(lines(PAIR))
    return tmp_path


def contents() -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


def complaint(capsys, arguments: list[str]) -> str:
    """The one message of a command that must be refused and must leave everything as it was."""
    before = contents()
    assert main(arguments) == 2
    assert contents() == before
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    messages = [line for line in shown.err.splitlines() if line.startswith("nlhf: error: ")]
    assert len(messages) == 1
    assert len(messages[0]) < (600 if "more characters" not in messages[0] else 1600)
    return messages[0]


@pytest.mark.parametrize("verb", ["judge", "evaluate"])
@pytest.mark.parametrize(("text", "parts"), FILES.values(), ids=FILES)
def test_a_file_of_pairs_that_is_none(capsys, verb, text, parts):
    Path("pairs.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    judge = [*JUDGE, "--input", "pairs.jsonl", "--output", "out.jsonl"]
    message = complaint(capsys, judge if verb == "judge" else EVALUATE)
    for part in parts:
        assert part in message


OTHER_FILES = {
    "a file that is not there": ("gone.jsonl", None, ["gone.jsonl", "o such file"]),
    "a kind of file that is not known": ("pairs.txt", "x", ["pairs.txt", "known: .jsonl"]),
    "a packed file": ("pairs.jsonl.gz", "x", ["Unpack it first"]),
    "a table with uneven rows": (
        "pairs.csv",
        "context,response_a,response_b\nq,x\n",
        ["pairs.csv:2", "expected 3 columns"],
    ),
    "a column twice": (
        "pairs.csv",
        "context,context,response_b\nq,x,y\n",
        ["pairs.csv:1", "'context' occurs more than once"],
    ),
    "a quote that is never closed": (
        "pairs.csv",
        'context,response_a,response_b\nq,"x,y\n',
        ["pairs.csv:2", "not valid CSV"],
    ),
    "one object over several lines": (
        "pairs.json",
        json.dumps({"data": [PAIR]}, indent=2),
        ["pairs.json: one JSON object over several lines", "expected a list of rows"],
    ),
    "no parquet": ("pairs.parquet", "x", ["cannot read pairs.parquet"]),
}


@pytest.mark.parametrize(("name", "text", "parts"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_a_file_that_cannot_be_read(capsys, name, text, parts):
    if text is not None:
        Path(name).write_text(text)
    message = complaint(capsys, [*JUDGE, "--input", name])
    for part in parts:
        assert part in message


COMMANDS = {
    "nothing to judge": ([], ["nothing to judge: give a file of pairs (--input FILE"]),
    "half a pair": (["--prompt", "q", "--response_a", "x"], ["missing: --response_b"]),
    "a file and a pair": (["--input", "pairs.jsonl", *ONE_PAIR], ["either --input or one pair", "not both"]),
    "a folder for a file": (["--input", "."], [". is a folder; name a file of pairs in it"]),
    "columns without a file": ([*ONE_PAIR, "--columns", "{context: q}"], ["--columns names columns of a file"]),
    "a column that is not there": (["--input", "pairs.jsonl", "--columns", "{context: promt}"],
                                   ["missing column 'promt'"]),
    "a field that is not there": (["--input", "pairs.jsonl", "--columns", "{contxt: id}"],
                                  ["no field 'contxt'", "Did you mean 'context'?"]),
    "the input as output": (["--input", "pairs.jsonl", "--output", "./pairs.jsonl"], ["is the input itself"]),
    "a folder as output": (["--input", "pairs.jsonl", "--output", "."], ["it is a folder"]),
    "an output under a file": (["--input", "pairs.jsonl", "--output", "pairs.jsonl/x"], ["pairs.jsonl is a file"]),
    "an output of other content": (["--input", "pairs.jsonl", "--output", "notes.jsonl"],
                                   ["notes.jsonl:1: not a decision of nlhf judge; choose another file"]),
    "an unknown preset": ([*ONE_PAIR, "--preset", "her-rm-32"], ["unknown preset", "Did you mean 'her-rm-32b'?"]),
    "an unknown format": ([*ONE_PAIR, "--format", "rm_nlfh"], ["unknown judge format", "Did you mean 'rm_nlhf'?"]),
    "an unknown mode": ([*ONE_PAIR, "--mode", "guess"], ["mode: expected one of 'generate', 'probability'"]),
    "an unknown vote": ([*ONE_PAIR, "--vote", "mean"], ["vote: expected one of 'majority', 'mean_strength'"]),
    "an unknown order": ([*ONE_PAIR, "--orders", "BAB"], ["orders: expected one of 'both', 'AB', 'BA'"]),
    "an unknown backend": ([*ONE_PAIR, "--backend.kind", "olama"], ["backend.kind"]),
    "an address without a scheme": ([*ONE_PAIR, "--backend.kind", "openai", "--backend.base_url", "localhost:8000"],
                                    ["backend.base_url must be an address like http://localhost:8000/v1"]),
    "a key in the configuration": ([*ONE_PAIR, "--backend.kind", "openai", "--backend.api_key_env", "sk-123"],
                                   ["must be the NAME of an environment variable"]),
    "votes that would all be one": ([*ONE_PAIR, "--samples", "3"], ["samples is 3 but sampling.temperature is 0"]),
    "votes without sampling": ([*ONE_PAIR, "--samples", "3", "--sampling.temperature", "1", "--mode", "probability"],
                               ["samples must be 1, got 3", "critique_probability"]),
    "a model that is not there": ([*ONE_PAIR, "--model.name", "./nowhere"], ["folder ./nowhere does not exist"]),
    "a temperature below zero": ([*ONE_PAIR, "--sampling.temperature", "-1"], ["sampling.temperature must not be"]),
    "a text for a number": ([*ONE_PAIR, "--sampling.top_k", "many"], ["expected a whole number, got many"]),
    "an argument for the template": ([*ONE_PAIR, "--sampling.chat_template_kwargs", "{truncation: true}"],
                                     ["'truncation' is no variable of a chat template"]),
    "an address of two lines": ([*ONE_PAIR, "--backend.kind", "openai", "--backend.base_url", "http://h/v1\nx"],
                                ["backend.base_url must be an address"]),
    "a price of NaN": ([*ONE_PAIR, "--backend.kind", "openai", "--backend.price_per_million", "[.nan, 1]"],
                       ["backend.price_per_million must not be negative"]),
    "a request that is no JSON": ([*ONE_PAIR, "--backend.kind", "openai", "--backend.extra_body", "{x: .nan}"],
                                  ["backend.extra_body cannot be sent as JSON"]),
    "a seed of thirty digits": ([*ONE_PAIR, "--model.name", "random:qwen3-tiny:" + "9" * 30],
                                ["the seed a whole number of up to nine digits"]),
    "a name of 10,000 letters": ([*ONE_PAIR, "--format", "k" * 10_000], ["unknown judge format", "more characters"]),
    "a misspelt option": ([*ONE_PAIR, "--respnse_a", "z"], ["respnse_a", "Did you mean 'response_a'?"]),
    "a prompt file that does not end": ([*ONE_PAIR, "--prompt_file", "open.jinja"], ["open.jinja, line 1"]),
    "a prompt file without a response": ([*ONE_PAIR, "--prompt_file", "one.jinja"], ["does not show response_b"]),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "parts"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_cannot_be(capsys, arguments, parts):
    Path("notes.jsonl").write_text('{"my": "notes"}\n')
    Path("open.jinja").write_text("{{ context")
    Path("one.jinja").write_text("{{ context }} {{ response_a }}")
    message = complaint(capsys, [*JUDGE, *arguments])
    for part in parts:
        assert part in message
    for jargon in ("Union", "NoneType", "class '", "Parser key", "typing."):
        assert jargon not in message


def test_judge_without_a_model(capsys):
    assert "missing: model.name" in complaint(capsys, ["judge", *ONE_PAIR])


EVALUATIONS = {
    "a folder for a ledger": (["--ledger", "."], ["it is a folder"]),
    "a seed below zero": (["--seed", "-1"], ["seed must lie between 0 and"]),
    "a threshold above one": (["--wrong_critique_threshold", "1.5"], ["must lie in (0, 1], got 1.5"]),
    "resamples below zero": (["--resamples", "-5"], ["resamples must lie between 0 and 100,000, got -5"]),
    "resamples without end": (["--resamples", "1000000000000"], ["resamples must lie between 0 and 100,000"]),
    "samples without end": (["--samples", "1000000000000"], ["samples must lie between 1 and 10,000"]),
    "a scorer that is none": (["--scorer", "nlhf.pairs.HumanCritique"], ["has no method score"]),
    "an unknown scorer": (["--scorer", "lexicl"], ["Did you mean 'lexical'?"]),
    "a scorer by no path": (["--scorer", ".a.b"], ["neither an import path nor one of"]),
    "a path without a part": (["--scorer", "a..b"], ["neither an import path nor one of"]),
    "a threshold in words": (["--scorer", "{class_path: lexical, init_args: {threshold: high}}"],
                             ["threshold must be a number from 0 on, got 'high'"]),
    "a threshold of NaN": (["--scorer", "{class_path: lexical, init_args: {threshold: .nan}}"],
                           ["threshold must be a number from 0 on, got nan"]),
    "an unknown preset": (["--preset", "sdrm"], ["unknown preset 'sdrm'"]),
    "votes that would all be one": (["--samples", "2"], ["samples is 2 but sampling.temperature is 0"]),
    "a limit of none": (["--data.limit", "0"], ["data.limit must be at least 1, got 0"]),
    "all pairs passed over": (["--data.skip", "9"], ["no pairs left", "data.skip = 9 passes over all"]),
    "a probe that is a number": (["--probe", "3"], ["probe: expected true or false, got 3"]),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "parts"), EVALUATIONS.values(), ids=EVALUATIONS)
def test_an_evaluation_that_cannot_be(capsys, arguments, parts):
    message = complaint(capsys, [*EVALUATE, *arguments])
    for part in parts:
        assert part in message


# What a file named run.yaml holds; the last three make PyYAML or Python itself fail.
YAMLS = {
    "a NUL in a path": ('model: {name: "a\\0b"}', ["model.name: a NUL character"]),
    "a value within itself": ("model: &a [*a]", ["run.yaml: a value within itself"]),
    "brackets within brackets": ("columns: " + "[" * 5000, ["run.yaml"]),
    "a number of 5,000 digits": ("samples: " + "9" * 5000, ["run.yaml: a number of thousands of digits"]),
}


@pytest.mark.parametrize(("text", "parts"), YAMLS.values(), ids=YAMLS)
def test_a_configuration_that_cannot_be_read(capsys, text, parts):
    Path("run.yaml").write_text(text)
    message = complaint(capsys, ["judge", "--config", "run.yaml"])
    for part in parts:
        assert part in message


def test_a_closed_standard_output(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert main([*JUDGE, *ONE_PAIR]) == 2
    assert "standard output is closed; name a file for the decisions with --output" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["# Title", "~/notes  say//no", "null", "~", "007", "- a\n- b", "{a: b}"])
def test_a_text_to_judge_is_taken_as_it_was_typed(monkeypatch, text):
    """YAML would read a heading as a comment, and nothing in a text is a path."""
    judged = []
    monkeypatch.setattr(nlhf.judging, "_pairs", lambda _, *texts: judged.append(texts[:3]) or sys.exit())
    with pytest.raises(SystemExit):
        main([*JUDGE, "--prompt", text, f"--response_a={text}", "--response_b", text])
    assert judged == [(text, text, text)]


def test_there_are_at_least_twenty_kinds():
    assert len({*FILES, *OTHER_FILES, *COMMANDS, *EVALUATIONS, *YAMLS}) >= 20
