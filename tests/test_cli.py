"""The command line: one clear message for every mistake, at once, with nothing half-written."""

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml

import nlhf
from nlhf.cli import VERBS, call, main, make_parser, run_verb
from nlhf.complaints import ConfigurationError, explain
from nlhf.config import ClassSpec, OptimizationConfig
from nlhf.errors import UserError
from nlhf.presets import PRESETS
from nlhf.suite import set_key

ROOT = Path(__file__).resolve().parents[1]
PAIR = {"id": "1", "context": "q", "response_a": "x", "response_b": "y", "label": "A"}

TRAIN = {
    "model": {"name": "package:nlhf"},
    "data": [{"source": "sandbox", "limit": 4}],
    "format": "sandbox",
    "grpo": {"max_steps": 1, "num_generations": 4, "max_prompt_length": 64, "max_completion_length": 26},
}
COLD_START = {
    "model": {"name": "package:nlhf"},
    "data": [{"source": "sandbox", "limit": 4}],
    "format": "sandbox",
    "sft": {"max_steps": 1, "max_length": 64},
}
EVALUATE = {"model": {"name": "package:nlhf"}, "data": {"source": "sandbox", "limit": 4}, "format": "sandbox"}
SUITE = {
    "name": "s",
    "seeds": [1],
    "start": {"verb": "cold-start", "config": "start.yaml"},
    "arms": [{"name": "a"}, {"name": "b", "train": {"config": "train.yaml"}}],
    "tests": [{"name": "t", "evaluate": {"verb": "evaluate", "config": "test.yaml"}}],
    "baseline": "a",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, values in (("start", COLD_START), ("train", TRAIN), ("test", EVALUATE)):
        Path(f"{name}.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def merged(base: dict, changes: dict) -> dict:
    values = json.loads(json.dumps(base))
    for key, value in changes.items():
        node = values
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return values


def complaint(capsys, arguments: list[str], out: str = "out") -> str:
    """What a command that must be refused says on standard error; it must leave nothing behind."""
    before = sorted(str(p) for p in Path().rglob("*"))
    assert main(arguments) == 2
    assert sorted(str(p) for p in Path().rglob("*")) == before
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    lines = [line for line in shown.err.splitlines() if not line.startswith("For the accepted options run: ")]
    messages = [line for line in lines if line.startswith("nlhf: error: ")]
    assert len(messages) == 1
    assert len(messages[0]) < 600
    return messages[0]


def refused(capsys, verb: str, values: dict, *arguments: str) -> str:
    Path("config.yaml").write_text(yaml.safe_dump(values))
    return complaint(capsys, [*verb.split(), "--config", "config.yaml", "--out", "out", *arguments])


# ------------------------------------------------------------------------------------------------------------ bad input

FILES = {
    "an empty file": ("", ["pairs.jsonl", "no rows"]),
    "a wrong column": (json.dumps({**PAIR, "respons_b": "y"} | {"response_b": None})[:-1].replace(
        '"response_b": null', '"x": 1') + "}", ["response_b", "Did you mean 'respons_b'?"]),
    "a label of another kind": (json.dumps({**PAIR, "label": "left"}), ["pairs.jsonl:1", "'A', 'B', 'tie'", "'left'"]),
    "all responses equal": (json.dumps({**PAIR, "response_b": "x"}), ["no pairs left", "1 x equal responses"]),
    "no JSON": ("{", ["pairs.jsonl:1", "not valid JSON"]),
    "two pairs of one name": (json.dumps(PAIR) + "\n" + json.dumps(PAIR), ["two pairs have the id '1'"]),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["train", "cold-start", "evaluate", "data check"])
@pytest.mark.parametrize(("text", "parts"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_data_set(capsys, verb, text, parts):
    Path("pairs.jsonl").write_text(text)
    source = {"source": "jsonl", "path": "pairs.jsonl"}
    if verb == "data check":
        message = complaint(capsys, ["data", "check", "pairs.jsonl"])
    elif verb == "evaluate":
        message = refused(capsys, verb, {**EVALUATE, "data": source})
    else:
        message = refused(capsys, verb, {**(TRAIN if verb == "train" else COLD_START), "data": [source]})
    for part in parts:
        assert part in message


@pytest.mark.parametrize("verb", ["train", "cold-start"])
def test_training_needs_labels(capsys, verb):
    Path("pairs.jsonl").write_text(json.dumps({**PAIR, "label": None}))
    values = {**(TRAIN if verb == "train" else COLD_START), "data": [{"source": "jsonl", "path": "pairs.jsonl"}]}
    assert "pair '1' has no label" in refused(capsys, verb, values)


# ---------------------------------------------------------------------------------------------------- bad configuration

CASES = {
    "a missing model": ("train", {"model.name": "./nowhere"}, ["folder ./nowhere does not exist"]),
    "a model of an unknown kind": ("train", {"model.name": "pakage:nlhf"}, ["Did you mean 'package'?"]),
    "an unknown preset": ("evaluate", {"model.name": "random:qwen3-tny"}, ["random:qwen3-tiny"]),
    "a misspelt key": ("train", {"sed": 3}, ["'sed'", "Did you mean 'seed'?"]),
    "a misspelt key of a class": ("train", {"grpo.lerning_rate": 3}, ["lerning_rate", "learning_rate'?"]),
    "a misspelt key in a list": ("train", {"data": [{"source": "sandbox", "splitt": "x"}]}, ["data: unknown option",
                                 "Did you mean 'split'?"]),
    "a misspelt key where null may be": ("train", {"validation": {"data": {"source": "sandbox"}, "evry": 3}},
                                         ["validation: unknown option 'evry'. Did you mean 'every'?"]),
    "a misspelt key two levels down": ("train", {"validation": {"data": {"source": "sandbox", "splt": "x"}}},
                                       ["validation", "'splt'", "split'?"]),
    "a misspelt key in extra": ("train", {"grpo.extra": {"top_kk": 1}}, ["grpo.extra", "Did you mean 'top_k'?"]),
    "a misspelt key in extra of a cold start": ("cold-start", {"sft.extra": {"adam_epsilonn": 1}}, ["sft.extra",
                                                "Did you mean 'adam_epsilon'?"]),
    "checkpoints to resume nothing from": ("train", {"grpo.extra": {"save_only_model": True}},
                                           ["grpo.extra: 'save_only_model' would leave out of a checkpoint"]),
    "a number for a text in extra": ("cold-start", {"sft.extra": {"adam_epsilon": "small"}},
                                     ["sft.extra: 'adam_epsilon' must be float, got 'small'"]),
    "a format that rates one response": ("train", {"format": "rewardbench2_ratings"},
                                         ["format: 'rewardbench2_ratings' shows one response and rates it"]),
    "a cold start of such a format": ("cold-start", {"format": "prometheus2_absolute"}, ["shows one response"]),
    "no completion at all": ("train", {"grpo.max_completion_length": 0}, ["grpo.max_completion_length must be at"]),
    "a nucleus of more than all": ("train", {"grpo.top_p": 2}, ["grpo.top_p must lie in (0, 1], got 2"]),
    "a misspelt argument of a class": ("train", {"process": {"class_path": "critique", "init_args": {"scorr": 1}}},
                                       ["critique takes no argument 'scorr'", "Did you mean 'scorer'?"]),
    "text for a number": ("train", {"grpo.learning_rate": "fast"}, ["grpo.learning_rate: expected a number, got fast"]),
    "text for a whole number or null": ("train", {"data": [{"source": "sandbox", "limit": "all"}]},
                                        ["data.limit: expected a whole number, got all"]),
    "a wrong type two levels down": ("train", {"validation": {"data": {"source": "sandbox", "limit": "x"}}},
                                     ["validation.data.limit: expected a whole number, got x"]),
    "a number for a flag": ("train", {"resume": 3}, ["resume: expected true or false, got 3"]),
    "a word that is no choice": ("train", {"order": "sideways"}, ["order: expected one of 'random', 'both', 'given'"]),
    "a choice where null may be": ("train", {"validation": {"data": {"source": "sandbox"}, "metric": "fame"}},
                                   ["validation.metric: expected one of 'accuracy'", "got fame"]),
    "a mapping for a list": ("train", {"data": {"source": "sandbox"}}, ["data: expected a list"]),
    "a name for a data set": ("train", {"data": ["sandbox"]}, ["data: expected fields with values, got sandbox"]),
    "a name for a model": ("train", {"model": "package:nlhf"}, ["model: expected fields with values"]),
    "no class path": ("train", {"process": {"clas_path": "x"}}, ["process: expected a class_path"]),
    "a batch that cannot be divided": ("train", {"grpo.num_generations": 3}, ["num_generations to one of [2, 4, 8]"]),
    "an unknown source": ("train", {"data": [{"source": "sandbx"}]}, ["Did you mean 'sandbox'?"]),
    "an unknown source where null may be": ("train", {"validation": {"data": {"source": "sandbx"}}},
                                            ["unknown data source 'sandbx'", "Did you mean 'sandbox'?"]),
    "an unknown option of a source": ("train", {"data": [{"source": "jsonl", "path": "p", "options": {"colums": 1}}]},
                                      ["unknown option 'colums'", "Did you mean 'columns'?"]),
    "an unknown format": ("train", {"format": "rm_nlfh"}, ["rm_nlhf"]),
    "a prompt file that is not there": ("evaluate", {"prompt_file": "p.jinja"}, ["p.jinja"]),
    "validation without data": ("train", {"validation": {"every": 3}}, ["validation: missing: data.source"]),
    "two checks of one class": ("train", {"grpo.learning_rate": 0, "grpo.save_steps": 0},
                                ["learning_rate", "save_steps"]),
    "a suite's misspelt key": ("suite", {"arms": [{"name": "a", "train": {"confg": "x"}}]},
                               ["arms.train: unknown option 'confg'. Did you mean 'config'?"]),
    "a suite's missing file": ("suite", {"arms": [{"name": "a", "train": {"config": "gone.yaml"}}]},
                               ["gone.yaml: no such file"]),
    "a suite's unknown verb": ("suite", {"start": {"verb": "cold-strat", "config": "start.yaml"}}, ["'cold-strat'"]),
    "a suite's test that trains": ("suite", {"tests": [{"name": "t", "evaluate": {"config": "test.yaml"}}]},
                                   ["test 't': verb is 'train', but it must be evaluate"]),
    "a suite's unknown baseline": ("suite", {"baseline": "c"}, ["baseline 'c' is not an arm; arms: a, b"]),
    "a suite's unknown figure": ("suite", {"metrics": ["acuracy"]}, ["Did you mean 'accuracy'?"]),
    "two arms in one folder": ("suite", {"arms": [{"name": "a b"}, {"name": "A-b"}]}, ["folder name of its own"]),
    "an arm named as the start": ("suite", {"arms": [{"name": "Start"}], "baseline": "Start"}, ["'start' is the name"]),
    "a suite without seeds": ("suite", {"seeds": []}, ["seeds: name at least one"]),
    "a report without runs": ("report", {"runs": []}, ["runs"]),
    "a report on no run": ("report", {"runs": ["nowhere"]}, ["nowhere"]),
}  # fmt: skip
BASES = {"train": TRAIN, "cold-start": COLD_START, "evaluate": EVALUATE, "suite": SUITE, "report": {}}


@pytest.mark.parametrize(("verb", "changes", "parts"), CASES.values(), ids=CASES)
def test_a_configuration_that_cannot_be(capsys, verb, changes, parts):
    message = refused(capsys, verb, merged(BASES[verb], changes))
    for part in parts:
        assert part in message
    for jargon in ("Union", "NoneType", "NestedArg", "class '", "Parser key", "typing."):
        assert jargon not in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--grpo.lerning_rate", "3"], ["--grpo.lerning_rate", "Did you mean 'grpo.learning_rate'?"]),
        (["--grpo.lerning_rate=3"], ["Did you mean 'grpo.learning_rate'?"]),
        (["--confg", "x"], ["Did you mean 'config'?"]),
        (["--validation.evry", "3"], ["validation: unknown option 'evry'. Did you mean 'every'?"]),
        (["--seed", "x"], ["seed: expected a whole number, got x"]),
        (["train.yaml"], ["unexpected train.yaml", "right behind the verb"]),
        (["--process.class_path", "critique"], ["process: expected a class_path", "in quotes"]),
    ],
)
def test_a_mistake_on_the_command_line(capsys, arguments, parts):
    message = refused(capsys, "train", TRAIN, *arguments)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["evaluate", "--model", "package:nlhf"], "Did you mean --model.name package:nlhf?"),
        (["evaluate", "--data", "sandbox"], "Did you mean --data.source sandbox?"),
    ],
)
def test_a_value_for_a_whole_class_is_its_required_field(capsys, arguments, meant):
    assert meant in complaint(capsys, arguments)


def test_required_options_are_named(capsys):
    assert "missing: model.name, data" in complaint(capsys, ["train", "--out", "out"])
    assert "missing: out" in complaint(capsys, ["evaluate", "--config", "test.yaml"])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: [", ["not valid YAML", "bad.yaml, line"]),
        ("- 1", ["a configuration holds options with values"]),
        ("\tx: 1", ["not valid YAML", "bad.yaml"]),
        ("", ["the configuration is empty"]),
        ("1: 2", ["an option's name must be a text, got 1"]),
        ("data: [null]", ["data: expected fields with values, got None"]),
        ("seed: 1\norder: both\nseed: 2", ["not valid YAML: 'seed' comes twice", "bad.yaml, line 3"]),
        ("grpo:\n  beta: 1\n  beta: 0", ["'beta' comes twice", "bad.yaml, line 3"]),
        (b"out: \xe9", ["bad.yaml: not UTF-8 text"]),
        ("a: 1".encode("utf-16"), ["bad.yaml: not UTF-8 text"]),
    ],
    ids=["unfinished", "a list", "a tab", "empty", "a number", "null for a data set", "a key twice",
         "a deep key twice", "latin-1", "utf-16"],
)  # fmt: skip
@pytest.mark.parametrize("option", [["--config", "bad.yaml"], ["--config=bad.yaml"]], ids=["apart", "joined"])
def test_bad_yaml(capsys, text, parts, option):
    Path("bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    message = complaint(capsys, ["train", *option, "--out", "out"])
    for part in parts:
        assert part in message


def test_a_missing_configuration_file(capsys):
    assert "gone.yaml" in complaint(capsys, ["train", "--config", "gone.yaml", "--out", "out"])


@pytest.mark.parametrize("verb", ["train", "cold-start", "evaluate", "suite"])
class TestOutput:
    def test_a_file_in_its_place(self, capsys, verb):
        Path("out").write_text("x")
        assert "out is a file" in refused(capsys, verb, BASES[verb])

    def test_a_file_as_its_parent(self, capsys, verb):
        Path("out").write_text("x")
        message = refused(capsys, verb, BASES[verb], "--out", "out/run")
        assert "out/run" in message

    def test_a_folder_in_use(self, capsys, verb):
        Path("out").mkdir()
        Path("out/thesis.tex").write_text("x")
        assert "out is not empty and holds no run (it has 'thesis.tex')" in refused(capsys, verb, BASES[verb])


@pytest.mark.parametrize("verb", ["train", "cold-start", "evaluate"])
def test_the_folder_of_another_run(capsys, verb):
    Path("out").mkdir()
    Path("out/config.yaml").write_text("seed: 1")
    assert "already holds a run" in refused(capsys, verb, BASES[verb])


# ---------------------------------------------------------------------------------------------------------------- verbs


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["data", "chekc"], "Did you mean 'check'?"),
        (["xyzzy"], "cold-start, data, evaluate"),
    ],
)
def test_an_unknown_verb(capsys, arguments, part):
    assert part in complaint(capsys, arguments)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_verb(capsys, arguments):
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for verb, (_, summary) in VERBS.items():
        assert f"  {verb} " in shown
        assert summary in shown


@pytest.mark.parametrize("arguments", [["data"], ["data", "--help"]])
def test_a_group_of_verbs_has_an_overview(capsys, arguments):
    assert main(arguments) == 0
    assert "check" in capsys.readouterr().out


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nlhf {nlhf.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_its_options(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: nlhf {verb}" in shown
    assert "--config" in shown


def test_an_error_of_ours_keeps_its_traceback():
    def broken() -> None:
        raise ValueError("ours")

    sys.modules["nlhf_test_broken"] = type(sys)("nlhf_test_broken")
    sys.modules["nlhf_test_broken"].broken = broken
    with pytest.raises(ValueError, match="ours"):
        main(["broken"], verbs={"broken": ("nlhf_test_broken:broken", "")})


def test_an_interrupt_is_no_traceback(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    sys.modules["nlhf_test_interrupt"] = type(sys)("nlhf_test_interrupt")
    sys.modules["nlhf_test_interrupt"].verb = interrupted
    assert main(["verb"], verbs={"verb": ("nlhf_test_interrupt:verb", "")}) == 130
    assert capsys.readouterr().err == "nlhf: interrupted\n"


@dataclass
class Inner:
    size: int | None = None
    kind: Literal["big", "small"] = "big"

    def __post_init__(self):
        if self.size == 13:
            raise ValueError("13 is unlucky")


@dataclass
class Outer:
    inner: Inner | None = None
    several: list[Inner] = field(default_factory=list)


def sample_verb(outer: Outer | None = None, spec: ClassSpec | None = None, n: int = 1) -> tuple:
    """A verb."""
    return outer, spec, n


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outer": {"inner": {"size": "x"}}}, "outer.inner.size: expected a whole number, got x"),
        ({"outer": {"inner": {"kind": "x"}}}, "outer.inner.kind: expected one of 'big', 'small', got x"),
        ({"outer": {"several": [{"sise": 1}]}}, "outer.several: unknown option 'sise'. Did you mean 'size'?"),
        ({"outer": {"inner": {"size": 13}}}, "13 is unlucky"),
        ({"spec": 3}, "spec: expected a class_path"),
    ],
)
def test_the_one_reason_is_found_however_deep(values, message):
    with pytest.raises(ConfigurationError) as caught:
        call(f"{__name__}:sample_verb", "t", values)
    assert message in str(caught.value)


def test_values_arrive_as_their_classes(monkeypatch):
    outer, spec, n = call(f"{__name__}:sample_verb", "t", {"outer": {"inner": {"size": 2}}, "spec": "exact", "n": 3})
    assert (outer, spec, n) == (Outer(Inner(2)), ClassSpec("exact"), 3)
    assert run_verb(f"{__name__}:sample_verb", "t", ["--spec", "{class_path: a.B, init_args: {c: 1}}"])[1] == ClassSpec(
        "a.B", {"c": 1}
    )


def test_a_message_without_a_known_pattern_is_kept():
    assert explain("something  else\nhappened", None) == "something else happened"


def test_settings_become_the_trainers_arguments():
    settings = OptimizationConfig(gradient_checkpointing=True, extra={"fsdp": "x"})
    arguments = settings.arguments()
    assert arguments["activation_checkpointing"] is True
    assert arguments["fsdp"] == "x"
    assert "gradient_checkpointing" not in arguments
    with pytest.raises(UserError, match=r"set sft\.gradient_checkpointing instead"):
        OptimizationConfig(extra={"activation_checkpointing": True}).check_extra(OptimizationConfig, "sft")


# ---------------------------------------------------------------------------------------------------- every YAML parses


def launched_verb(path: Path) -> str:
    """The verb that the comment on top of a YAML launches it with."""
    header = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    found = re.search(rf"\bnlhf ({'|'.join(VERBS)})(?![\w-])", header)
    return found[1] if found else "suite" if "make quickstart" in header else ""


YAMLS = sorted(p for p in (ROOT / "experiments").rglob("*.yaml") if p.parent.name not in ("accelerate", "results"))
OURS = [p for p in YAMLS if not re.search(r"^#.*\b(metarm|selfdistill) [a-z]", p.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", OURS, ids=[str(p.relative_to(ROOT)) for p in OURS])
def test_every_experiment_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    verb = launched_verb(path)
    assert verb, "the comment on top has a launch command: nlhf VERB --config ..."
    target = VERBS[verb][0]
    module, _, name = target.partition(":")
    parser = make_parser(getattr(__import__(module, fromlist=[name]), name), f"nlhf {verb}")
    arguments = ["--config", str(path), "--out", "out"]
    # A model that another run makes is not there yet.
    arguments += [] if verb == "suite" else ["--model.name", "package:nlhf"]
    arguments += ["--judge.model.name", "package:nlhf"] if verb == "train-policy" else []
    settings = parser.instantiate(parser.parse_args(arguments))
    if verb == "train":
        from trl import GRPOConfig

        settings.grpo.check_extra(GRPOConfig, "grpo")


# ---------------------------------------------------------------------------------------------------------------- speed


def cpu_seconds(arguments: list[str]) -> tuple[float, int]:
    """The least processor time of three runs (on a busy machine the wall clock says little), and the exit status."""
    best, status = float("inf"), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status = os.waitstatus_to_exitcode(status)
        best = min(best, usage.ru_utime + usage.ru_stime)
    return best, status


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="measures processor time")
class TestSpeed:
    LIMIT = 0.5  # seconds above the bare interpreter

    @pytest.fixture(scope="class")
    def bare(self) -> float:
        return cpu_seconds(["-c", "pass"])[0]

    @pytest.mark.parametrize(
        ("arguments", "status"),
        [
            (["--help"], 0),
            (["--version"], 0),
            (["trian"], 2),
            (["data", "check", "BAD"], 2),
            (["train", "--config", "train.yaml", "--out", "out"], 2),
            (["cold-start", "--config", "start.yaml", "--out", "out"], 2),
            (["evaluate", "--config", "test.yaml", "--out", "out"], 2),
            (["train", "--config", "bad.yaml", "--out", "out"], 2),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_help_and_mistakes_are_answered_at_once(self, folder, bare, arguments, status):
        (folder / "BAD.jsonl").write_text("{")
        (folder / "bad.yaml").write_text("a: [")
        source = {"source": "jsonl", "path": str(folder / "BAD.jsonl")}
        for name, values in (("train", TRAIN), ("start", COLD_START)):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump({**values, "data": [source]}))
        (folder / "test.yaml").write_text(yaml.safe_dump({**EVALUATE, "data": source}))
        arguments = [str(folder / a) if a.endswith(".yaml") or a == "out" else a for a in arguments]
        arguments = [str(folder / "BAD.jsonl") if a == "BAD" else a for a in arguments]
        seconds, found = cpu_seconds(["-m", "nlhf", *arguments])
        assert found == status
        assert seconds - bare < self.LIMIT

    @pytest.mark.parametrize(
        "module", ["report", "data", "evaluate", "train", "cold_start", "suite", "generation", "cli"]
    )
    def test_no_verb_imports_torch_before_it_needs_it(self, module):
        heavy = ("torch", "transformers", "trl", "datasets", "scipy", "sklearn", "matplotlib", "sentence_transformers")
        code = f"import sys, nlhf.{module}; print([m for m in {heavy} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        assert done.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------- nulls, homes, machines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": None}, "seed: expected a value, got null"),
        ({"orders": None}, "orders: expected a value, got null"),
        ({"resume": None}, "resume: expected a value, got null"),
        ({"sampling": None}, "sampling: expected a value, got null"),
        ({"sampling": []}, "sampling: expected fields with values, got []"),
        ({"sampling.temperature": None}, "sampling.temperature: expected a value, got null"),
        ({"data.split": None}, "data.split: expected a value, got null"),
        ({"scorer": {"class_path": 1}}, "class_path must be a text"),
        ({"scorer": {"class_path": None}}, "class_path must be a text"),
        ({"scorer": {"class_path": "exact", "init_args": [1]}}, "init_args fields with values"),
        ({"scorer": "nlhf.pairs.LABELS"}, "is no class but a tuple"),
        ({"scorer": "builtins.dict"}, "does not say which arguments it takes"),
        ({"scorer": "..x"}, "neither an import path"),
        ({"data.options": {"path": "x"}}, "unknown option 'path'"),
        ({"data.options": {1: 2}}, "unknown option"),
        ({"seed": -1}, "seed must lie between 0 and"),
        ({"ledger": "test.yaml/ledger.jsonl"}, "test.yaml is a file"),
    ],
    ids=str,
)
def test_evaluate_refuses(capsys, changes, message):
    assert message in refused(capsys, "evaluate", merged(EVALUATE, changes))


def test_null_where_it_means_something():
    assert call(f"{__name__}:sample_verb", "t", {"outer": None, "spec": None}) == (None, None, 1)
    assert call(f"{__name__}:sample_verb", "t", {"outer": {"inner": None}})[0] == Outer()


def test_null_in_a_list_of_classes():
    with pytest.raises(ConfigurationError, match=r"outer\.several\.kind: expected a value, got null"):
        call(f"{__name__}:sample_verb", "t", {"outer": {"several": [{"kind": None}]}})


def test_a_guess_is_one_of_the_group(capsys):
    message = refused(capsys, "evaluate", merged(EVALUATE, {"data.nmae": 1}))
    assert "unknown option 'nmae' in 'data'" in message
    assert "'name'" not in message


def test_the_home_folder_is_found_where_no_shell_looks(capsys, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "pairs.jsonl").write_text(json.dumps(PAIR))
    assert main(["data", "export", "--data.source=jsonl", "--data.path=~/pairs.jsonl", "--out=~/out.jsonl"]) == 0
    assert (folder / "out.jsonl").is_file()
    assert not (folder / "~").exists()


@pytest.mark.parametrize("verb", [["data", "check"], ["data", "export", "--data.source=sandbox", "--out"]])
def test_a_name_that_is_too_long_for_the_machine(capsys, verb):
    assert "File name too long" in complaint(capsys, [*verb, "x" * 300 + ".jsonl"])


def fails_with(code: int):
    raise OSError(code, os.strerror(code), "model.safetensors")


def test_a_full_disk_is_a_message_and_a_missing_file_of_ours_is_not(capsys):
    verbs = {"verb": (f"{__name__}:fails_with", "")}
    assert main(["verb", "--code", str(errno.ENOSPC)], verbs=verbs) == 2
    assert capsys.readouterr().err == "nlhf: error: model.safetensors: No space left on device\n"
    with pytest.raises(FileNotFoundError):
        main(["verb", "--code", str(errno.ENOENT)], verbs=verbs)


def test_bare_words_are_the_runs_of_a_report(capsys):
    assert "first holds no run" in complaint(capsys, ["report", "first", "second", "--out", "out"])
    assert "first holds no run" in complaint(capsys, ["report", "[first]", "--out", "out"])


@pytest.mark.parametrize("verb", ["train", "suite", "evaluate"])
def test_a_bare_word_is_the_configuration_of_a_verb_that_reads_no_file(capsys, verb):
    assert re.search(r"config: File does not exist: .*gone\.yaml", complaint(capsys, [verb, "gone.yaml"]))


def test_help_says_what_a_bare_word_is_and_names_every_preset(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # no name is broken at a hyphen
    for verb, shown in (("judge", "nlhf judge INPUT [options]"), ("train", "nlhf train CONFIG [options]")):
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert shown in text
        assert verb == "train" or all(preset in text for preset in PRESETS)


def test_a_package_that_builds_on_this_one_has_a_purpose_of_its_own(capsys):
    assert main([], "metarm", {"train": ("metarm.train:train", "cold start")}) == 0
    assert "MetaRM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"grpo.learning_rate": float("nan")},
            "learning_rate: expected a number, got nan|learning_rate must be positive",
        ),
        ({"grpo.max_steps": 0}, "max_steps must be at least 1, or -1"),
        ({"grpo.max_steps": -7}, "max_steps must be at least 1, or -1"),
        ({"grpo.warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"grpo.weight_decay": -1}, "weight_decay must not be negative"),
        ({"grpo.max_grad_norm": -1}, "max_grad_norm must not be negative"),
        ({"process": {"class_path": "critique", "init_args": {"scorer": "exact"}}}, "scorer must be a critique scorer"),
    ],
    ids=str,
)
def test_train_refuses(capsys, changes, message):
    assert re.search(message, refused(capsys, "train", merged(TRAIN, changes)))


@pytest.mark.parametrize(
    ("file", "text", "changes", "message"),
    [
        (
            "test.yaml",
            "- 1",
            {},
            "test 't' (test.yaml): test.yaml: a configuration holds options with values, got a list",
        ),
        ("start.yaml", "", {}, "start (start.yaml): missing: model.name"),
        ("train.yaml", None, {"arms.1.train.options": {"grpo.nope": 1}}, "arm 'b' (train.yaml): unknown option 'nope'"),
        ("train.yaml", None, {"arms.1.train.options": {"grpo.max_steps": 0}}, "arm 'b' (train.yaml): max_steps"),
        ("start.yaml", None, {"start.options": {"data.9.limit": 1}}, "there is no place for the option 'data.9.limit'"),
        ("start.yaml", None, {"seeds": [-1]}, "seed must lie between"),
        ("start.yaml", None, {"threads": 0}, "threads must be at least 1"),
        ("start.yaml", None, {"ledger": "."}, "it is a folder"),
    ],
    ids=["a list", "empty", "unknown", "impossible", "no place", "seed", "threads", "ledger"],
)
def test_a_suite_reads_every_configuration_before_it_trains(capsys, file, text, changes, message):
    if text is not None:
        Path(file).write_text(text)
    values = json.loads(json.dumps(SUITE))
    for key, value in changes.items():
        set_key(values, key, value, "suite")
    assert message in refused(capsys, "suite", values)
