"""The documents are true: what they name exists, what they show runs, and every figure is explained."""

import ast
import functools
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from nlhf import cli
from nlhf.errors import UserError
from nlhf.evaluation.metrics import definitions
from nlhf.pairs import Pair

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "experiments").glob("**/*.md")]
    if path.name != "CHANGELOG.md"  # it tells of what was, which may be gone
)
OURS = [
    ROOT / name
    for name in (
        "CONTRIBUTING.md",
        "docs/backends.md",
        "docs/benchmarks.md",
        "docs/chat.md",
        "docs/coser.md",
        "docs/data.md",
        "docs/footguns.md",
        "docs/methods.md",
        "docs/metrics.md",
        "docs/reproducibility.md",
        "docs/roleplay.md",
        "docs/scaling.md",
        "docs/tutorial.md",
    )
]
FOLDERS = ("nlhf", "metarm", "selfdistill", "experiments", "notebooks", "benchmarks", "tests", "docs", ".ci")
FILES = (
    "Makefile",
    "NOTICE",
    "LICENSE",
    "pyproject.toml",
    "requirements.lock",
    "requirements-models.txt",
    ".gitignore",
)


class Block(NamedTuple):
    """A fenced block of a document."""

    kind: str
    title: str
    text: str
    line: int


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, f"{path}: a block is never closed"
    found = re.finditer(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2].strip(), m[3], text.count("\n", 0, m.start()) + 1) for m in found]


@functools.cache
def prose(path: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def spans(path: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(path))


def played_out(loop: re.Match) -> str:
    """The body of a shell loop once for each value."""
    return "".join(loop[3].replace(f"${loop[1]}", value) for value in loop[2].split())


def bash_lines(path: Path) -> list[str]:
    """Commands of bash blocks, without comments, continued lines joined."""
    text = "\n".join(block.text for block in blocks(path) if block.kind == "bash").replace("\\\n", " ")
    text = re.sub(r"^for (\w+) in (.*?); do\n(.*?)^done$", played_out, text, flags=re.MULTILINE | re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def nlhf_arguments(line: str) -> list[str] | None:
    """What follows ``nlhf`` (or ``-m nlhf``) in a shell command; None for another command."""
    words = shlex.split(line, comments=True)
    words = words[next((i for i, w in enumerate(words) if not re.fullmatch(r"[A-Z0-9_]+=\S*", w)), 0) :]
    if words[:1] == ["nlhf"]:
        return words[1:]
    launched = [i for i, pair in enumerate(itertools.pairwise(words)) if pair == ("-m", "nlhf")]
    return words[launched[0] + 2 :] if launched else None


# --------------------------------------------------------------------------------------------- what is named exists


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path):
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", prose(path)) if "://" not in t and not t.startswith("mailto:")]
    assert [t for t in targets if not leads_somewhere(path, t)] == []


def leads_somewhere(path: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    there = (path.parent / file) if file else path
    if not anchor:
        return there.exists()
    headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def named_paths(path: Path) -> list[str]:
    inline = [s for s in spans(path) if re.fullmatch(rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./-]*(::\w+)*", s)]
    inline += [s for s in spans(path) if s in FILES]
    shown = re.findall(r"\bexperiments/[\w./-]+\w", "\n".join(bash_lines(path)))
    return sorted({*inline, *shown})


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_files_and_tests_exist(path):
    assert [name for name in named_paths(path) if not exists(name)] == []


def exists(name: str) -> bool:
    """A path, or ``file.py::test`` or ``file.py::Class::test``."""
    file, *parts = name.split("::")
    if not (ROOT / file).exists():
        return name in metarm_keys()
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body if parts else []
    for part in parts:
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        if node is None:
            return False
        body = node.body
    return True


@functools.cache
def metarm_keys() -> set[str]:
    """What `metarm.MetaReward` logs; its keys look like paths."""
    source = (ROOT / "metarm/online.py").read_text(encoding="utf-8")
    keys = set(re.findall(r'log_metric\(f?"(metarm/[^"{]+)"', source))
    return keys | {"metarm/shortened_conversations", "metarm/shortened_responses"}


def test_every_key_of_metarm_is_in_the_glossary():
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert [key for key in sorted(metarm_keys()) if f"`{key}`" not in text] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_code_exists(path):
    names = {s.removesuffix("()") for s in spans(path) if re.fullmatch(r"nlhf(\.\w+)+(\(\))?", s)}
    assert [name for name in sorted(names) if not resolves(name)] == []


def resolves(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(lambda o, part: getattr(o, part, None), parts[end:], found) is not None
    return False


def test_a_name_that_does_not_exist_is_found_out():
    assert not resolves("nlhf.rewards.nothing")
    assert not exists("tests/test_docs.py::test_nothing")
    assert exists("tests/test_train.py::TestTwoProcesses::test_a_refusal_ends_both")


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_make_targets_exist(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join([*spans(path), *bash_lines(path)])
    assert set(re.findall(r"(?:^|[`\s])make ([a-z]+)", text, re.MULTILINE)) - targets == set()


# --------------------------------------------------------------------------------------------- commands and settings


@functools.cache
def parser(verb: str):
    return cli.make_parser(cli._load(cli.VERBS[verb][0]), f"nlhf {verb}")


@functools.cache
def options() -> set[str]:
    """Every option of every verb, dotted, without its dashes."""
    from nlhf.training import ValidationConfig

    known = {action.dest for verb in cli.VERBS for action in parser(verb)._actions}
    # The parser does not list the settings of what may be null.
    return known | {"help", "version"} | {f"validation.{name}" for name in ValidationConfig.__dataclass_fields__}


@functools.cache
def launcher_options() -> set[str]:
    from accelerate.commands.launch import launch_command_parser

    strings = {string for action in launch_command_parser()._actions for string in action.option_strings}
    return {string.lstrip("-") for string in strings} | {"nproc_per_node"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_verbs_exist(path):
    named = [s for s in spans(path) if re.match(r"nlhf [a-z]", s)]
    assert [s for s in named if cli._find_verb(shlex.split(s)[1:], "nlhf", cli.VERBS) is None] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_named_options_exist(path):
    dashed = {s.split()[0].removeprefix("--") for s in spans(path) if re.match(r"--[a-z][\w.]*( |$)", s)}
    groups = "model|data|grpo|sft|reward|sampling|validation|samples"
    dotted = {s for s in spans(path) if re.fullmatch(rf"({groups})(\.\w+)+", s)}
    files = {s for s in dotted if re.search(r"\.(jsonl|json|parquet|csv)$", s)}
    named = {re.sub(r"\.\d+", "", s) for s in (dashed | dotted) - files}  # data.0.path is an option of an entry of data
    assert sorted(named - options() - launcher_options()) == []


COMMANDS = [
    pytest.param(line, id=f"{relative(path)}: {line[:60]}")
    for path in DOCUMENTS
    for line in bash_lines(path)
    if nlhf_arguments(line)
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_accepted(line, monkeypatch, tmp_path):
    """Parsed as the entry point would, configuration files included; the verb itself is not called."""
    monkeypatch.chdir(ROOT)
    called = []
    load = cli._load
    monkeypatch.setattr(cli, "_load", lambda target: functools.wraps(load(target))(lambda: None))  # its signature alone
    monkeypatch.setattr(cli, "_settings", lambda function, parser, values: called.append(values) or {})
    arguments = nlhf_arguments(line)
    if "/config.yaml" in line:  # of a run that another command makes
        i = arguments.index("--config") + 1
        made = tmp_path / "config.yaml"
        made.write_text((ROOT / "experiments/sandbox/rm_nlhf.yaml").read_text(encoding="utf-8"), encoding="utf-8")
        arguments[i] = str(made)
    verb, rest = cli._find_verb(arguments, "nlhf", cli.VERBS)
    cli.run_verb(cli.VERBS[verb][0], f"nlhf {verb}", rest)
    assert len(called) == 1


YAMLS = [
    pytest.param(block, id=f"{relative(path)}:{block.line}")
    for path in DOCUMENTS
    for block in blocks(path)
    if block.kind == "yaml"
]


@pytest.mark.parametrize("block", YAMLS)
def test_yaml_examples_are_accepted(block):
    """A block is titled with its verb; what the verb requires and the example leaves out is filled in."""
    assert block.title in cli.VERBS, "title the block with its verb: ```yaml train"
    required = {
        "train": {"model": {"name": "random:qwen3-tiny"}, "data": [{"source": "sandbox"}], "out": "runs/x", "grpo": {}},
        "evaluate": {"model": {"name": "random:qwen3-tiny"}, "data": {"source": "sandbox"}, "out": "runs/x"},
    }
    parser(block.title).parse_object({**required.get(block.title, {}), **yaml.safe_load(block.text)})


def test_examples_are_found():
    assert len(COMMANDS) > 20
    assert len(YAMLS) > 5


def test_a_misspelt_key_is_found_out():
    with pytest.raises(UserError):
        test_yaml_examples_are_accepted(Block("yaml", "train", "grpo: {learning_rat: 1}\n", 1))


def test_defaults_in_methods_are_the_defaults():
    from nlhf.train import GRPOSettings

    rows = re.findall(r"^\| `grpo\.(\w+)` \| (\S+) \|", (ROOT / "docs/methods.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) > 10
    settings = GRPOSettings()
    assert {name: str(getattr(settings, name)) for name, _ in rows} == dict(rows)


# -------------------------------------------------------------------------------------------------------------- data


def test_the_example_pair_is_one():
    [block] = [b for b in blocks(ROOT / "docs/data.md") if b.title == "pair"]
    row = json.loads(block.text)
    pair = Pair.from_dict(row)
    assert pair.has_critique
    assert set(row) == {f.name for f in Pair.__dataclass_fields__.values()}  # shows every field


def test_sources_in_data_are_all_there_are():
    from nlhf.sources import SOURCES

    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    section = text[text.index("## Sources") : text.index("## How HelpSteer3")]
    for name, module in SOURCES.items():
        rows = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(rows) == 2, name  # what it is, and its options
        load = importlib.import_module(module).load
        for option in set(load.__kwdefaults__) - {"seed"}:
            assert f"`{option}`" in rows[1], (name, option)


def test_reasons_for_leaving_out_are_all_there_are():
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    for file in sorted((ROOT / "nlhf/sources").glob("*.py")):
        for reason in re.findall(r'drops\["([^"]+)"\]', file.read_text(encoding="utf-8")):
            assert f"`{reason}`" in text, (file.name, reason)


def test_no_data_or_runs_are_committed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = listed.stdout.splitlines()
    assert [n for n in names if n.startswith(("data/", "runs/"))] == []
    tables = [n for n in names if n.endswith((".csv", ".tsv", ".parquet", ".jsonl"))]
    ours = r"ledger\.jsonl$|^experiments/her_rm/(pairs|replies)\.jsonl$"  # results, and pairs of our own writing
    assert [n for n in tables if not re.search(ours, n)] == []


def test_imports_run_one_way():
    for file in (ROOT / "nlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [m for m in modules if m.split(".")[0] in ("metarm", "selfdistill")], file


def test_memory_table():
    from transformers import AutoConfig

    from nlhf.budget import Workload, estimate, format_bytes
    from nlhf.models import _known_configs

    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(Qwen/\S+)` \| (\d+) \| (\w+) \| (.+?) \|", text, re.MULTILINE)
    assert len(rows) == 4
    for name, devices, sharding, shown in rows:
        work = Workload(1, 1, processes=int(devices), sharding=sharding, reference=True)
        assert format_bytes(estimate(AutoConfig.for_model(**_known_configs()[name]), work).fixed) == shown


def test_batch_table():
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(experiments/\S+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) == 2
    for file, *numbers in rows:
        devices, per_device, accumulated, rollouts, prompts = map(int, numbers)
        grpo = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["grpo"]
        assert (grpo["per_device_train_batch_size"], grpo["gradient_accumulation_steps"]) == (per_device, accumulated)
        assert rollouts == devices * per_device * accumulated == prompts * grpo["num_generations"]


# ---------------------------------------------------------------------------------------------------------- glossary


def glossary(section: str) -> dict[str, list[str]]:
    """Rows of the tables of one section of docs/metrics.md, by the names in the first cell."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    part = re.split(r"^## ", text, flags=re.MULTILINE)
    [part] = [p for p in part if p.startswith(section + "\n")]
    rows = {}
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in rows, f"{name} stands twice"
                rows[name] = cells[1:]
    return rows


def test_every_figure_of_an_evaluation_is_in_the_glossary():
    assert list(glossary("Evaluation")) == list(definitions())


@pytest.mark.parametrize("name", definitions())
def test_the_glossary_says_which_direction_is_good(name):
    word = {1: "higher", -1: "lower", 0: "neither"}[definitions()[name].better]
    assert glossary("Evaluation")[name][-1].startswith(word)


# --------------------------------------------------------------------------------------------- the tutorial is played

# What makes each verb of the tutorial a matter of seconds. The commands are otherwise run as printed, in order.
TINY = {
    "cold-start": ["--sft.max_steps", "2", "--sft.logging_steps", "1"],
    "train": [
        *("--grpo.max_steps", "2", "--grpo.logging_steps", "1", "--grpo.per_device_train_batch_size", "16"),
        *("--validation.data.limit", "4"),
    ],
    "evaluate": ["--data.limit", "4", "--resamples", "50"],
}


@pytest.fixture(scope="module")
def played(tmp_path_factory, model_cache):
    """A folder in which every command of the tutorial was run; commands that start processes are left out."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "experiments").symlink_to(ROOT / "experiments")
    [own] = [b for b in blocks(ROOT / "docs/tutorial.md") if b.kind == "jsonl"]
    (folder / own.title).write_text(own.text, encoding="utf-8")
    shown = bash_lines(ROOT / "docs/tutorial.md")
    lines = [line for line in shown if line.startswith("nlhf ") and not line.startswith("nlhf suite ")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in lines:
            arguments = nlhf_arguments(line)
            verb, _ = cli._find_verb(arguments, "nlhf", cli.VERBS)
            extra = TINY.get(verb, [])
            assert cli.main([*arguments, *extra]) == 0, line
        yield folder


@pytest.mark.slow
class TestTutorial:
    def test_files_that_it_names_are_made(self, played):
        named = re.findall(r"`(runs/[\w/.-]+)`", prose(ROOT / "docs/tutorial.md"))
        named = [name for name in named if "quickstart" not in name]
        assert named
        assert [name for name in named if not (played / name).exists()] == []

    def test_files_of_a_run_are_as_listed(self, played):
        text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
        listed = {n.rstrip("/") for n in re.findall(r"^\| `([\w.-]+/?)` \|", text, re.MULTILINE)}
        made = {p.name for p in (played / "runs/sandbox/cold_start").iterdir()}
        assert {re.sub(r"\d+", "N", n) for n in listed} == {re.sub(r"\d+", "N", n) for n in made}

    def test_own_data_give_a_report(self, played):
        metrics = json.loads((played / "runs/own/evaluation/metrics.json").read_text(encoding="utf-8"))["metrics"]
        assert metrics["parse_rate"]["n"] == 8
        assert (played / "runs/own/evaluation/report.html").is_file()

    @pytest.mark.parametrize("run", ["cold_start", "rm_nlhf", "outcome_only"])
    def test_every_key_of_a_training_log_is_in_the_glossary(self, played, run):
        keys = training_keys(played / "runs/sandbox" / run)
        known = glossary("Training")
        figures = {k for k in keys if k.startswith("validation/")}
        assert {k.removeprefix("validation/") for k in figures} <= set(definitions())
        assert sorted(keys - figures - set(known)) == []

    def test_the_glossary_of_training_has_nothing_that_is_never_logged(self, played):
        logged = training_keys(played / "runs/sandbox/rm_nlhf") | training_keys(played / "runs/sandbox/cold_start")
        text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
        under_some_settings = text[text.index("### Only under some settings") :]
        surely = {name for name in glossary("Training") if f"| `{name}`" not in under_some_settings}
        surely -= set(re.findall(r"`([^`]+)`", under_some_settings.split("### Validation")[0]))
        assert sorted(surely - logged - metarm_keys()) == []

    def test_the_configuration_of_a_run_is_a_configuration(self, played, monkeypatch):
        monkeypatch.chdir(played)
        config = "runs/sandbox/rm_nlhf/config.yaml"
        assert cli.main(["train", "--config", config, "--out", "runs/again", "--dry_run", "true"]) == 0


def training_keys(folder: Path) -> set[str]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return set().union(*map(json.loads, lines))


# -------------------------------------------------------------------------------------------------------- the recipes


def recipe_files() -> dict[str, str]:
    """Files of CONTRIBUTING.md, by path."""
    return {b.title: b.text for b in blocks(ROOT / "CONTRIBUTING.md") if re.search(r"\.(py|jinja)$", b.title)}


def table_lines() -> dict[str, str]:
    """Lines to add to a table of names, by the table's dotted name."""
    return {b.title: b.text for b in blocks(ROOT / "CONTRIBUTING.md") if re.fullmatch(r"nlhf[\w.]+\.[A-Z]+", b.title)}


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the package with the files and lines of the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(ROOT / "nlhf", folder / "nlhf", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in recipe_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, line in table_lines().items():
        module, _, table = name.rpartition(".")
        file = folder / Path(*module.split("."), "__init__.py")
        text = file.read_text(encoding="utf-8")
        assert f"\n{table} = {{\n" in text
        file.write_text(text.replace(f"\n{table} = {{\n", f"\n{table} = {{\n{line}"), encoding="utf-8")
    return folder


def test_the_recipes_work(extended):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(extended), "PYTEST_ADDOPTS": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=extended, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == 3 + 11 + 2 + 5


def test_the_recipes_keep_the_style(extended):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.is_file():
        pytest.skip("ruff is not installed")
    files = [name for name in recipe_files() if name.endswith(".py")]
    shutil.copy(ROOT / "pyproject.toml", extended)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, *files], cwd=extended, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_recipe_has_its_test_and_its_line():
    files = recipe_files()
    modules = {Path(name).stem for name in files if name.endswith(".py") and not name.startswith("tests/")}
    tests = {Path(name).stem.removeprefix("test_") for name in files if name.startswith("tests/")}
    assert modules == tests == {"riddles", "ballot", "my_rewards", "my_scorers"}
    assert set(table_lines()) == {"nlhf.sources.SOURCES", "nlhf.formats.FORMATS"}


def test_every_module_is_in_a_room():
    """CONTRIBUTING.md's table of rooms leaves no module out."""
    rooms = {s.rstrip("/") for s in spans(ROOT / "CONTRIBUTING.md")}
    for file in (ROOT / "nlhf").glob("*.py"):
        assert file.name.startswith("__") or f"nlhf/{file.name}" in rooms, file.name
    for folder in (ROOT / "nlhf").iterdir():
        if (folder / "__init__.py").is_file():
            assert f"nlhf/{folder.name}" in rooms, folder.name


def test_documents_are_all_there_and_in_plain_text():
    for path in OURS:
        text = path.read_text(encoding="utf-8")
        assert not re.search("[\U0001f300-\U0001faff\u2600-\u27bf]", text), f"{path}: no emojis"
        assert inspect.cleandoc(text).startswith("# ")


# --------------------------------------------------------------------------------------------- figures are the results


def test_tables_are_what_the_saved_results_say():
    """`make tables` writes them; a figure typed by hand, or results replaced without it, fails here."""
    subprocess.run([sys.executable, str(ROOT / "docs" / "tables.py"), "--check"], check=True, cwd=ROOT)


def test_kept_evaluations_are_in_the_ledger():
    ledger = (ROOT / "experiments" / "ledger.jsonl").read_text(encoding="utf-8")
    origin = ("model", "model_hash", "data_hash", "format", "prompt_hash")
    rows = {tuple(row[name] for name in origin): row for line in ledger.splitlines() if (row := json.loads(line))}
    kept = [json.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob("experiments/*/*.json")]
    kept = [summary for summary in kept if "evaluation" in summary]
    assert kept
    for summary in kept:
        row = rows[tuple(summary["evaluation"][name] for name in origin)]
        for name, metric in summary["metrics"].items():
            assert row["metrics"][name] == pytest.approx(metric), name  # intervals are drawn anew: rounding may differ


def test_figures_of_comve_are_those_of_the_ledger():
    text = (ROOT / "experiments/comve_smollm2/README.md").read_text(encoding="utf-8")
    ledger = (ROOT / "experiments" / "ledger.jsonl").read_text(encoding="utf-8")
    rows = [row for line in ledger.splitlines() if (row := json.loads(line))["source"] == "comve"]
    assert len(rows) == 10
    for row in rows:
        for name in ("accuracy", "position_consistency", "critique_f1", "wrong_critique_rate"):
            value, low, high = (100 * row["metrics"][name][key] for key in ("value", "low", "high"))
            assert f"{value:.1f} % [{low:.1f}, {high:.1f}]" in text, (row["run_name"], name)
