"""Suites of arms and seeds through the command line, on the shipped judge and a few steps."""

import json
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml

from nlhf import suite as suite_module
from nlhf.cli import main
from nlhf.errors import UserError
from nlhf.evaluation.intervals import SeedInterval
from nlhf.files import read_jsonl
from nlhf.suite import Arm, Stage, read_yaml, run_job, set_key
from nlhf.suite import Test as Judged  # pytest would collect it by its own name
from nlhf.suite import report as suite_report
from nlhf.suite.report import Cell, in_percent, markdown, summarize

COLD_START = {
    "model": {"name": "package:nlhf"},
    "data": [{"source": "sandbox", "split": "cold_start", "limit": 8}],
    "format": "sandbox",
    "sft": {"learning_rate": 1e-3, "max_steps": 2, "per_device_train_batch_size": 4, "max_length": 64},
}
TRAIN = {
    "model": {"name": "to be replaced"},
    "data": [{"source": "sandbox", "limit": 8}],
    "format": "sandbox",
    "grpo": {
        "learning_rate": 1e-3,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_prompt_length": 64,
        "max_completion_length": 26,
    },
    "validation": {"data": {"source": "sandbox", "split": "validation", "limit": 2}, "every": 1, "scorer": "exact"},
}
EVALUATE = {
    "model": {"name": "to be replaced"},
    "data": {"source": "sandbox", "split": "id", "limit": 6},
    "format": "sandbox",
    "sampling": {"max_new_tokens": 26},
    "scorer": "exact",
    "resamples": 50,
}
SUITE = {
    "name": "tiny",
    "out": "suite",
    "seeds": [1, 2],
    "start": {"verb": "cold-start", "config": "start.yaml"},
    "arms": [
        {"name": "start alone"},
        {"name": "trained", "train": {"config": "train.yaml", "options": {"grpo.max_steps": 3}}, "model": "best"},
    ],
    "baseline": "start alone",
    "tests": [{"name": "in distribution", "evaluate": {"verb": "evaluate", "config": "test.yaml"}}],
    "ledger": "ledger.jsonl",
}


class SamePool:
    """A pool of no processes: a job is done when it is handed in."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, function, *arguments) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(suite_module, "_pool", lambda workers: SamePool())


def write_files(folder: Path, **changes) -> None:
    for name, values in (("start", COLD_START), ("train", TRAIN), ("test", EVALUATE), ("suite", {**SUITE, **changes})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A suite that ran in worker processes."""
    folder = tmp_path_factory.mktemp("suite")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["suite", "--config", "suite.yaml"]) == 0
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def value(folder: Path, seed: int, arm: str, metric: str) -> float:
    path = folder / "suite" / f"seed-{seed}" / arm / "test-in-distribution" / "metrics.json"
    return json.loads(path.read_text())["metrics"][metric]["value"]


def test_all_is_written(finished):
    out = finished / "suite"
    assert {p.name for p in out.iterdir() if not p.name.startswith(".")} == {
        "config.yaml", "environment.json", "summary.json", "summary.md", "summary.png", "index.html",
        "seed-1", "seed-2",
    }  # fmt: skip
    assert (out / "summary.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text()
    for part in (
        "tiny",
        "start alone",
        "trained",
        "in distribution",
        "seed-1/trained/test-in-distribution/report.html",
    ):
        assert part in page
    assert page.count("<svg") == 4  # reward, and three figures of the validation, in the page's own colours
    assert "During training" in (out / "seed-1/trained/test-in-distribution/report.html").read_text()
    for seed in (1, 2):
        assert (out / f"seed-{seed}" / "start" / "train" / "final").is_dir()
        assert (out / f"seed-{seed}" / "trained" / "done").is_file()
        assert "INFO step 3/3" in (out / f"seed-{seed}" / "trained.log").read_text()
    assert len(list(read_jsonl(finished / "ledger.jsonl"))) == 4


def test_every_run_has_its_seed_its_start_and_its_options(finished):
    out = finished / "suite"
    for seed in (1, 2):
        config = yaml.safe_load((out / f"seed-{seed}" / "trained" / "train" / "config.yaml").read_text())
        assert config["seed"] == seed
        assert config["model"]["name"] == f"suite/seed-{seed}/start/train/final"
        assert config["grpo"]["max_steps"] == 3
        judged = yaml.safe_load((out / f"seed-{seed}" / "trained" / "test-in-distribution" / "config.yaml").read_text())
        assert judged["seed"] == seed
        assert judged["model"]["name"] == f"suite/seed-{seed}/trained/train/best"
        assert judged["run_name"] == f"tiny/trained/in distribution/{seed}"
    pairs = [
        {row["context"][0]["content"] + row["response_a"] for _, row in read_jsonl(path)}
        for path in sorted(out.glob("seed-*/start-alone/test-in-distribution/pairs.jsonl"))
    ]
    assert pairs[0] != pairs[1]  # each seed draws its own
    same = [out / "seed-1" / arm / "test-in-distribution" / "pairs.jsonl" for arm in ("start-alone", "trained")]
    assert same[0].read_bytes() == same[1].read_bytes()  # and judges all arms on them


def test_the_summary_is_what_a_hand_computes(finished):
    """n = 2: mean +- t(0.975, 1) * |x1 - x2| / 2, where t = 12.7062."""
    summary = json.loads((finished / "suite" / "summary.json").read_text())
    cells = {(c["arm"], c["metric"]): c for c in summary["cells"]}
    assert len(cells) == 2 * 4
    for (arm, metric), cell in cells.items():
        slug = arm.replace(" ", "-")
        values = [value(finished, seed, slug, metric) for seed in (1, 2)]
        assert cell["values"] == [v for v in values if v is not None]
        if None in values:
            continue
        assert cell["mean"]["mean"] == pytest.approx(sum(values) / 2)
        assert cell["mean"]["high"] == pytest.approx(
            sum(values) / 2 + 12.7062 * abs(values[0] - values[1]) / 2, rel=1e-4
        )
        if arm == "start alone":
            assert cell["difference"] is None
            continue
        base = [value(finished, seed, "start-alone", metric) for seed in (1, 2)]
        differences = [a - b for a, b in zip(values, base, strict=True)]
        assert cell["difference"]["mean"] == pytest.approx(sum(differences) / 2, abs=1e-12)
        half = 12.7062 * abs(differences[0] - differences[1]) / 2
        assert cell["difference"]["low"] == pytest.approx(sum(differences) / 2 - half, rel=1e-4, abs=1e-9)


def test_the_summary_keeps_the_curves_of_the_trained_arm(finished):
    curves = json.loads((finished / "suite" / "summary.json").read_text())["curves"]
    found = {c["key"]: c for c in curves}
    assert {c["name"] for c in curves} == {"trained"}
    assert found["reward"]["steps"] == [1, 2, 3]
    assert found["validation/accuracy"]["steps"] == [0, 1, 2, 3]
    logs = (finished / "suite" / f"seed-{seed}" / "trained" / "train" / "metrics.jsonl" for seed in (1, 2))
    rewards = [[row["reward"] for _, row in read_jsonl(log) if "reward" in row] for log in logs]
    means = [sum(pair) / 2 for pair in zip(*rewards, strict=True)]
    assert found["reward"]["mean"] == pytest.approx(means, abs=1e-5)


def test_an_interrupted_suite_does_what_is_left(finished, tmp_path, monkeypatch, in_process):
    folder = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(folder)
    out = folder / "suite"
    summary = (out / "summary.json").read_bytes()
    lost = out / "seed-2" / "trained"
    (lost / "done").unlink()
    (lost / "test-in-distribution" / "metrics.json").unlink()  # interrupted while judging
    judgements = lost / "test-in-distribution" / "judgements.jsonl"
    judgements.write_text("".join(judgements.read_text().splitlines(keepends=True)[:5]) + '{"pair')
    shutil.rmtree(out / "seed-1" / "trained")  # never begun
    for name in ("summary.json", "index.html"):
        (out / name).unlink()
    kept = out / "seed-1" / "start-alone" / "test-in-distribution" / "judgements.jsonl"
    before = kept.stat().st_mtime_ns, (lost / "train" / "final" / "model.safetensors").stat().st_mtime_ns
    assert main(["suite", "--config", "suite.yaml"]) == 0
    after = kept.stat().st_mtime_ns, (lost / "train" / "final" / "model.safetensors").stat().st_mtime_ns
    assert before == after
    assert (out / "summary.json").read_bytes() == summary


def test_a_finished_suite_is_only_reported_again(finished, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(suite_module, "run_job", lambda *_: pytest.fail("a job ran again"))
    changed = ["--metrics", "[accuracy]", "--baseline", "trained", "--workers", "1"]
    assert main(["suite", "--config", "suite.yaml", *changed]) == 0
    cells = json.loads((folder / "suite" / "summary.json").read_text())["cells"]
    assert {(c["arm"], c["metric"], c["difference"] is None) for c in cells} == {
        ("start alone", "accuracy", False),
        ("trained", "accuracy", True),
    }
    assert "start alone" in capsys.readouterr().out


def test_a_suite_is_not_continued_with_another_version_of_a_file(finished, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(folder)
    set_key(changed := read_yaml("train.yaml"), "grpo.learning_rate", 0.5, "train.yaml")
    Path("train.yaml").write_text(yaml.safe_dump(changed))
    assert main(["suite", "--config", "suite.yaml"]) == 2
    assert "files.train.yaml.grpo.learning_rate: 0.001 -> 0.5" in capsys.readouterr().err


def test_a_figure_that_is_no_share_is_refused(folder, capsys):
    write_files(folder)
    assert main(["suite", "--config", "suite.yaml", "--metrics", "[reply_tokens]"]) == 2
    assert "'reply_tokens' is not a share" in capsys.readouterr().err


def test_a_job_that_fails_is_one_message_with_its_log(folder, capsys):
    write_files(folder, seeds=[7], arms=[{"name": "b", "train": {"config": "train.yaml"}}], baseline="b")
    set_key(values := read_yaml("train.yaml"), "grpo.num_generations", 3, "train.yaml")
    Path("train.yaml").write_text(yaml.safe_dump(values))
    assert main(["suite", "--config", "suite.yaml"]) == 2
    shown = capsys.readouterr().err
    [message] = [line for line in shown.splitlines() if "error" in line]
    assert message.startswith("nlhf: error: b, seed 7: 8 rollouts a step")
    assert message.endswith("(log: suite/seed-7/b.log)")
    assert "Traceback" not in shown
    assert "UserError: 8 rollouts a step" in Path("suite/seed-7/b.log").read_text()
    assert not Path("suite/seed-7/b/done").exists()
    assert not Path("suite/seed-7/b/train").exists()


def test_a_failing_job_stops_those_that_wait(folder, capsys, in_process, monkeypatch):
    done = []

    def job(job, *_):
        if job.arm is not None:
            raise FloatingPointError("loss is nan")
        (job.folder).mkdir(parents=True)
        done.append(job.seed)

    monkeypatch.setattr(suite_module, "run_job", job)
    assert main(["suite", "--config", "suite.yaml"]) == 2
    assert done == [1, 2]
    assert "loss is nan (log: suite/seed-" in capsys.readouterr().err


def test_a_job_that_another_worker_finished_is_not_done_again(folder, monkeypatch):
    job = suite_module.Job(1, "a", folder / "suite" / "seed-1" / "a", Arm("a"))
    job.folder.mkdir(parents=True)
    (job.folder / "done").touch()
    monkeypatch.setattr(suite_module, "_run", lambda *_: pytest.fail("it ran again"))
    run_job(job, [Judged("t", Stage("test.yaml", "evaluate"))], "s", None)


# -------------------------------------------------------------------------------------------------------------- options


def test_a_stage_may_be_a_verb_of_a_package_that_builds_on_ours(folder):
    stage = Stage("start.yaml", "metarm train")
    assert (stage.target, stage.prog) == ("metarm.train:train", "metarm train")


@pytest.mark.parametrize(
    "verb", ["metarm", "metarm trian", "no_such_package train", "json tool", "report", ". x", "..a x"]
)
def test_an_unknown_verb_is_refused(folder, verb):
    with pytest.raises(UserError, match=f"unknown verb '{verb}' in a suite"):
        Stage("start.yaml", verb)


def test_a_text_names_the_folders_of_earlier_steps():
    folders = {"start": "s/start/train", "small-metarm": "s/small-metarm/train"}
    assert suite_module._filled("{start}/final", folders) == "s/start/train/final"
    assert suite_module._filled("{small MetaRM}/best", folders) == "s/small-metarm/train/best"
    assert suite_module._filled(0.25, folders) == 0.25
    nested = {"init_args": {"model": "{start}/final", "of": ["{small MetaRM}/best", 1]}}
    assert suite_module._filled(nested, folders) == {
        "init_args": {"model": "s/start/train/final", "of": ["s/small-metarm/train/best", 1]}
    }
    with pytest.raises(UserError, match="no step 'metarm' comes before; known: start, small-metarm"):
        suite_module._filled("{metarm}/best", folders)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prepare": [{"name": "start", "stage": {"config": "start.yaml", "verb": "cold-start"}}]}, "common start"),
        (
            {"prepare": [{"name": "Trained", "stage": {"config": "start.yaml", "verb": "cold-start"}}]},
            "folder name of its own",
        ),
        (
            {"prepare": [{"name": "p", "stage": {"config": "test.yaml", "verb": "evaluate"}}]},
            "step 'p': verb is 'evaluate', but it must be one that trains",
        ),
        (
            {
                "prepare": [
                    {
                        "name": "p",
                        "stage": {
                            "config": "start.yaml",
                            "verb": "cold-start",
                            "options": {"model.name": "{later}/final"},
                        },
                    }
                ]
            },
            "no step 'later' comes before; known: start",
        ),
        ({"arms": [{"name": "x" * 300}], "baseline": "x" * 300}, "too long for the name of a folder"),
        ({"tests": [{"name": "试" * 90, "evaluate": SUITE["tests"][0]["evaluate"]}]}, "too long for the name of a"),
        (
            {"arms": [{"name": "b", "train": {"config": "train.yaml", "options": {"1": 2}}}], "baseline": "b"},
            "arm 'b' (train.yaml): unknown option '1'",
        ),
        ({"start": {"verb": "cold-start", "config": "start.yaml", "options": {1: 2}}}, "no place for the option 1"),
        ({"start": {"verb": "train-policy", "config": "start.yaml"}}, "which trains judges and measures them"),
    ],
    ids=["name of the start", "name of an arm", "does not train", "a step that comes later", "long arm", "long test",
         "a number", "no text", "policy"],
)  # fmt: skip
def test_a_wrong_step_is_refused(folder, capsys, change, message):
    write_files(folder, **change)
    assert main(["suite", "--config", "suite.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("suite").exists()


OPTIONS = {
    "seed": ("seed", 9),
    "grpo.max_steps": ("grpo", {"max_steps": 9}),
    "grpo.extra.fsdp": ("grpo", {"max_steps": 1, "extra": {"fsdp": 9}}),
    "data.0.limit": ("data", [{"limit": 9}, {"limit": 2}]),
    "data.1.options.x": ("data", [{"limit": 1}, {"limit": 2, "options": {"x": 9}}]),
    "data.1": ("data", [{"limit": 1}, 9]),
    "new.deep.key": ("new", {"deep": {"key": 9}}),
    "1": ("1", 9),  # a number is a place in lists alone
    "grpo.2.x": ("grpo", {"max_steps": 1, "2": {"x": 9}}),
}


def nested() -> dict:
    return {"grpo": {"max_steps": 1}, "data": [{"limit": 1}, {"limit": 2}], "name": "x", "none": None}


@pytest.mark.parametrize("key", OPTIONS)
def test_an_option_is_set_where_its_key_leads(key):
    set_key(values := nested(), key, 9, "a.yaml")
    name, expected = OPTIONS[key]
    assert values == {**nested(), name: expected}


@pytest.mark.parametrize(
    "key", ["data.2.limit", "data.2", "data.x", "data.²", "data.-1", "name.x", "none.x", "grpo.max_steps.x"]
)
def test_an_option_without_a_place_is_refused(key):
    with pytest.raises(UserError, match=rf"a\.yaml: there is no place for the option '{key}'"):
        set_key(nested(), key, 9, "a.yaml")


# --------------------------------------------------------------------------------------------------------------- report


def test_differences_are_paired_by_seed(monkeypatch, folder):
    """Differences .1, .0, .2: mean .1, s = .1, 95 % interval .1 +- 4.302653 * .1 / sqrt(3)."""
    figures = {
        ("base", 1): (0.4, 0.2), ("base", 2): (0.6, None), ("base", 3): (0.5, 0.1),
        ("ours", 1): (0.5, 0.3), ("ours", 2): (0.6, 0.9), ("ours", 3): (0.7, 0.4),
    }  # fmt: skip

    class FakeRun:
        def __init__(self, accuracy, f1):
            metric = {"accuracy": accuracy, "critique_f1": f1}
            self.metrics = {name: type("M", (), {"value": v})() for name, v in metric.items()}

    def load_run(path, resamples):
        seed, arm = int(path.parts[-3].removeprefix("seed-")), path.parts[-2]
        return FakeRun(*figures[arm, seed])

    monkeypatch.setattr(suite_report, "load_run", load_run)
    arms, tests = [Arm("base"), Arm("ours")], [Judged("t", Stage("test.yaml", "evaluate"))]
    cells = summarize(Path("s"), [1, 2, 3], arms, tests, "base", ["accuracy", "critique_f1"])
    found = {(c.arm, c.metric): c for c in cells}
    difference = found["ours", "accuracy"].difference
    assert difference.mean == pytest.approx(0.1)
    assert difference.high - difference.mean == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-6)
    assert found["base", "accuracy"].difference is None
    assert found["base", "critique_f1"].values == [0.2, 0.1]  # the seed without a value is left out
    assert found["ours", "critique_f1"].difference.mean == pytest.approx((0.1 + 0.3) / 2)
    assert found["ours", "critique_f1"].difference.n == 2


@pytest.mark.parametrize(
    ("interval", "signed", "shown"),
    [
        (None, False, "-"),
        (SeedInterval(None, None, None, 0), False, "-"),
        (SeedInterval(0.5, None, None, 1), False, "50.0"),
        (SeedInterval(0.7622, 0.701, 0.8234, 3), False, "76.2 [70.1, 82.3]"),
        (SeedInterval(0.1, -0.02, 0.22, 3), True, "+10.0 [-2.0, +22.0]"),
    ],
)
def test_intervals_are_shown_in_percent(interval, signed, shown):
    assert in_percent(interval, signed) == shown


def test_the_table_names_seeds_and_baseline():
    cells = [
        Cell("t", "base", "accuracy", [0.5], SeedInterval(0.5, None, None, 1), None),
        Cell("t", "ours", "accuracy", [0.6], SeedInterval(0.6, None, None, 1), SeedInterval(0.1, None, None, 1)),
    ]
    table = markdown(cells, ["accuracy"], "base", 1)
    assert "Mean over 1 seeds" in table
    assert "difference from base in points" in table
    assert "| t | ours | 60.0<br>+10.0 |" in table
