"""What the checklist of docs/reproducibility.md claims and no other test shows."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from nlhf.ledger import LedgerRow
from nlhf.manifest import overlap
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.sources import SOURCES, DataConfig, load_pairs
from nlhf.suite import read_yaml
from tests.test_docs import DOCUMENTS, ROOT, bash_lines, exists, relative

CHECKLIST = ROOT / "docs" / "reproducibility.md"


def section(title: str) -> str:
    """One section of the document, by its heading."""
    [part] = [p for p in re.split(r"^## ", CHECKLIST.read_text(encoding="utf-8"), flags=re.M) if p.startswith(title)]
    return part


def rows(text: str) -> list[list[str]]:
    """The cells of a document's tables, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = [i for i, row in enumerate(cells) if set(row[0]) <= {"-", " "}]
    return [row for i, row in enumerate(cells) if i not in heads and i + 1 not in heads]


LINES = rows(section("The checklist"))


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_each_line_of_the_checklist_names_what_shows_it(line):
    shown = re.findall(r"`([^`]+)`", line[-1])
    assert shown
    for name in shown:
        assert name.startswith(("nlhf ", "make ")) or exists(name), name


def test_the_checklist_is_whole():
    assert len(LINES) == 19


# -------------------------------------------------------------------------------------------------- the environment


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([\w.+!-]+)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {normal(match[1]): match[2] for match in found}


def test_the_lock_pins_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in wanted}
    assert names - set(locked()) == set()


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="an environment of your own may have other versions")
def test_the_environment_is_the_locked_one():
    installed = {name: metadata.version(name).partition("+")[0] for name in locked()}
    assert installed == locked()


# -------------------------------------------------------------------------------------------------------- the files

PLACEHOLDER = re.compile(
    r"path/to/|<(?:your|path|my)[ _-]|\byour[_-](?:model|data|name|key|path|org|user)|\bYOUR_"
    r"|/home/\w|/Users/\w|/mnt/\w|\bT[O]DO\b|\bFIX[M]E\b|\bX[X]X\b|lorem ipsum",
    re.IGNORECASE,
)


def tracked() -> list[Path]:
    """Text files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [p for p in paths if p.is_file() and p.suffix not in (".png", ".svg", ".safetensors")]


def test_no_file_has_a_placeholder():
    found = []
    for path in tracked():
        text = path.read_text(encoding="utf-8")
        found += [f"{path}:{text.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in PLACEHOLDER.finditer(text)]
    assert [place for place in found if Path(__file__).name not in place] == []


@pytest.mark.parametrize(
    "text", ["/path/to/model", "<your data>", "YOUR_KEY", "/home/me/x", "T" + "ODO: write", "your-org"]
)
def test_a_placeholder_is_found(text):
    assert PLACEHOLDER.search(f"before {text} behind")


def scripts() -> set[str]:
    """What documents and comments of YAMLs run by ``python FILE``."""
    texts = ["\n".join(bash_lines(path)) for path in DOCUMENTS]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "experiments").glob("**/*.yaml")]
    texts.append(CHECKLIST.read_text(encoding="utf-8"))
    return {name for text in texts for name in re.findall(r"\bpython ([\w/]+\.py)\b", text)}


def test_scripts_are_found():
    assert {"experiments/her_rm/written.py", "benchmarks/tournament.py"} <= scripts()


@pytest.mark.parametrize("script", sorted(scripts()))
def test_every_script_that_is_named_exists_and_is_tested(script):
    assert (ROOT / script).is_file()
    tests = [path for path in (ROOT / "tests").glob("**/*.py") if path != Path(__file__)]
    named = [path for path in tests if Path(script).stem in path.read_text(encoding="utf-8")]
    assert named or script in TESTED_HERE


TESTED_HERE = ("experiments/comve_smollm2/calibrate.py",)


def test_the_script_of_comves_thresholds_runs():
    from nlhf.critique.scorers import LexicalScorer

    spec = importlib.util.spec_from_file_location("calibrate", ROOT / TESTED_HERE[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reasons = ["stones are hard to eat", "nobody can eat stones", "stones hurt the teeth that eat"]
    critiques = [HumanCritique(weaknesses_b=reason) for reason in reasons]
    pair = Pair(
        "p", [Turn("user", "?")], "a", "b", "A", critiques=critiques, meta={"confusing_reasons": ["hills roll"]}
    )
    line = module.calibrate(LexicalScorer(), [pair])
    assert line.startswith("lexical: AUC 1.000")
    assert "accepts 100% of 3 right reasons and 0% of 3 confusing ones" in line


# ---------------------------------------------------------------------------------------------- splits and evaluation

BUILT_IN = ("sandbox", "roleplay")
TRAINING = [
    *(("comve", "train"), ("defacto", "train"), ("sandbox", "train"), ("sandbox", "cold_start"), ("roleplay", "train"))
]
EVALUATION = [
    *(("comve", "validation"), ("comve", "test"), ("defacto", "validation"), ("defacto", "test"), ("llmbar", "test")),
    *(
        ("judgebench", "gpt"),
        ("pandalm", "test"),
        ("rm_bench", "test"),
        ("her_rm", ""),
        ("sandbox", "id"),
        ("roleplay", "held_out"),
    ),
]


@functools.cache
def loaded(data_dir: Path, source: str, split: str) -> list[Pair]:
    if source == "her_rm":
        return load_pairs(DataConfig("jsonl", path=str(ROOT / "experiments/her_rm/pairs.jsonl")))
    return load_pairs(DataConfig(source, split=split, path=None if source in BUILT_IN else str(data_dir / source)))


@pytest.mark.data
@pytest.mark.parametrize("training", TRAINING, ids="-".join)
def test_training_data_hold_no_pair_of_an_evaluation_set(data_dir, training):
    train = loaded(data_dir, *training)
    for evaluation in EVALUATION:
        if {training[0], evaluation[0]} != {"comve"}:  # below
            assert overlap(loaded(data_dir, *evaluation), train).pairs == 0, evaluation


@pytest.mark.parametrize(
    ("training", "evaluation"),
    [
        pytest.param(("sandbox", "train"), ("sandbox", "id"), id="sandbox"),
        pytest.param(("roleplay", "train"), ("roleplay", "held_out"), id="roleplay"),
        pytest.param(("roleplay", "train"), ("her_rm", ""), id="written pairs"),
    ],
)
def test_built_in_data_share_no_conversation(training, evaluation):
    held_out = loaded(ROOT, *evaluation)
    found = overlap(held_out, loaded(ROOT, *training))
    assert held_out
    assert (found.pairs, found.groups) == (0, 0)
    if training[0] == "roleplay":  # the sandbox asks for a few tasks over and over
        assert found.contexts == 0


@pytest.mark.data
def test_the_check_finds_what_comves_splits_share(data_dir):
    train = loaded(data_dir, "comve", "train")
    shared = {split: overlap(loaded(data_dir, "comve", split), train).pairs for split in ("validation", "test")}
    sizes = {split: len(loaded(data_dir, "comve", split)) for split in shared}
    said = re.search(r"(\d+) of ([\d,]+) validation pairs and (\d+) of ([\d,]+) test pairs", section("The checklist"))
    numbers = [int(number.replace(",", "")) for number in said.groups()]
    assert numbers == [shared["validation"], sizes["validation"], shared["test"], sizes["test"]]


@pytest.mark.data
def test_the_comve_experiment_shares_no_pair(data_dir):
    """Each training YAML against the test pairs and against every validation; MetaRM's own data are no evaluation."""
    files = sorted((ROOT / "experiments/comve_smollm2").glob("*.yaml"))
    values = {path.stem: read_yaml(str(path)) for path in files}

    def pairs(data: dict) -> list[Pair]:
        return load_pairs(DataConfig(**data | {"path": str(data_dir / "comve")}))

    train = {name: v["data"] for name, v in values.items() if isinstance(v.get("data"), list)}
    held_out = [values["evaluate"]["data"], *(v["validation"]["data"] for v in values.values() if "validation" in v)]
    assert len(train) >= 8
    assert len(held_out) >= 3
    for name, parts in train.items():
        trained = [pair for data in parts for pair in pairs(data)]
        assert [overlap(pairs(data), trained).pairs for data in held_out] == [0] * len(held_out), name


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_has_an_origin_and_a_licence(source):
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    [row] = [cells for cells in rows(text[text.index("## Sources") :]) if cells[0] == f"`{source}`" and len(cells) == 5]
    assert row[4], "licence"
    assert row[3] or source == "jsonl", "published at"


# ------------------------------------------------------------------------------------------------------- the results


def ledger() -> list[dict]:
    lines = (ROOT / "experiments/ledger.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_rows_of_the_ledger_have_every_field():
    fields = {field.name for field in dataclasses.fields(LedgerRow)}
    ids = [row["run_id"] for row in ledger()]
    assert len(set(ids)) == len(ids) > 500
    for row in ledger():
        assert set(row) == fields
        assert [name for name in fields - {"scorer"} if row[name] in (None, "", [], {})] == [], row["run_id"]
        for name, metric in row["metrics"].items():
            assert list(metric) == ["value", "k", "n", "low", "high"], name
            counted = metric["value"] is not None
            assert counted == (metric["n"] > 0) == (metric["low"] is not None), (row["run_id"], name)
            assert not counted or metric["value"] == pytest.approx(metric["k"] / metric["n"]), (row["run_id"], name)


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiments/*/results/*.json")), ids=lambda p: p.stem)
def test_saved_comparisons_have_three_seeds_or_more(path):
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert len(set(summary["seeds"])) >= 3
    for cell in summary["cells"]:
        assert cell["mean"]["low"] is not None, (cell["arm"], cell["metric"])


# ------------------------------------------------------------------------------------------------- points and percent


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_differences_are_in_points(path):
    """A signed percentage is a difference of shares, in points, or a relative change of time or memory."""
    signed = [
        line for line in path.read_text(encoding="utf-8").splitlines() if re.search(r"(?<![\w.])[+−-]\d[\d.]* ?%", line)
    ]
    if path.name == "scaling.md":  # the step's table of MetaRM: "adds to the step"
        signed = [line for line in signed if not line.startswith(("| critiques, ", "| MetaRM, "))]
    assert signed == []


def test_sums_in_the_table_of_claims_are_right():
    text = section("What others claim")
    sums = re.findall(r"([\d.]+) - ([\d.]+) = ([\d.]+) points(?: \((\d+) % relative\))?", text)
    assert len(sums) >= 9
    for first, second, points, relative_gain in sums:
        assert float(points) == pytest.approx(float(first) - float(second), abs=1e-6)
        if relative_gain:
            assert int(relative_gain) == int(100 * float(points) / float(second))
    parts = re.search(
        r"(\d+\.\d+) \(storyline consistency ([\d.]+), anthropomorphism ([\d.]+), character fidelity ([\d.]+), "
        r"storyline quality ([\d.]+)\)",
        text,
    )
    total, *dimensions = map(float, parts.groups())
    assert total == pytest.approx(sum(dimensions) / 4, abs=0.005)


def test_every_claim_says_its_n_and_its_runs():
    """A claim with a figure has a unit, an n or "not stated", and the number of runs; each says what can be checked."""
    for cells in rows(section("What others claim")):
        if len(cells) != 6:
            continue
        claim, figure, unit, n, runs, here = cells
        assert here, claim
        if re.search(r"\d", figure) and unit not in ("count", "tokens"):
            assert all((unit, n, runs)), claim


@pytest.mark.parametrize("name", ["roleplay", "policy"])
def test_what_role_play_claims_is_textual_preference(name):
    text = " ".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8").split())
    assert re.search(r"What is measured (?:here )?is textual preference\.", text)
    assert not re.search(r"\b(?:human-like cognition|understands? (?:humans|people)|is conscious)\b", text)
