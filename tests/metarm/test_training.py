"""`metarm train`, `metarm evaluate` and `nlhf train` with MetaReward, from YAMLs, on the shipped sandbox judge."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from metarm import MetaRM
from metarm.__main__ import main
from nlhf.cli import call, make_parser
from nlhf.cli import main as nlhf
from nlhf.files import read_jsonl
from nlhf.formats import get_format
from nlhf.models import ModelConfig, resolve
from nlhf.suite import read_yaml

ROOT = Path(__file__).resolve().parents[2]
SANDBOX = ROOT / "experiments" / "sandbox"
START = "package:nlhf"
DATA = {"source": "sandbox", "limit": 24, "labelled_fraction": 0.5}
JUDGE = {
    "model": {"name": START},
    "format": "sandbox",
    "samples": 4,
    "sampling": {"max_new_tokens": 26, "temperature": 1.0, "batch_size": 32},
}
CLOCKS = {"seconds", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}


def write(path: Path, values: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def training(layout, /, **changes) -> dict:
    settings = {
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 3,
        "max_length": 128,
        "validation_share": 0.2,
        "save_steps": 1,
        "save_total_limit": 20,
        **changes.pop("sft", {}),
    }
    values = {"model": {"name": START}, "data": [DATA], "judge": JUDGE, "scorer": "exact", "seed": 3}
    values |= {"layout": layout, "sft": settings}
    return values | changes


def run(out: Path, values: dict, *options: str, entry=main, verb="train") -> Path:
    config = write(out.with_name(f"{out.name}.yaml"), values)
    assert entry([verb, "--config", config, "--out", str(out), *options]) == 0
    return out


def refused(out: Path, values: dict, capsys, entry=main, verb="train") -> str:
    config = write(out.with_name(f"{out.name}.yaml"), values)
    assert entry([verb, "--config", config, "--out", str(out)]) == 2
    assert not out.exists() or not list(out.iterdir())  # an empty folder is not in the way of the next try
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def rows(folder: Path, name: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for _, row in read_jsonl(folder / name)]


def assert_same_weights(a: Path, b: Path) -> None:
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sandbox_layout) -> Path:
    return run(tmp_path_factory.mktemp("trained") / "metarm", training(sandbox_layout))


# ----------------------------------------------------------------------------------------------------------- cold start


def test_a_run_keeps_its_rollouts_the_best_and_the_last(trained, sandbox_layout):
    names = {p.name for p in trained.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "manifest.json",
        "metrics.jsonl",
        "pairs.jsonl",
        "rollouts.jsonl",
    } <= names
    assert {"best", "final"} <= names
    manifest = json.loads((trained / "manifest.json").read_text())
    assert (manifest["pairs"], manifest["rollouts"]) == (12, 48)  # half of 24 pairs have a critique
    assert manifest["training"] + manifest["validation"] == sum(manifest["targets"].values())
    assert set(manifest["targets"]) <= {"0", "1", "1.5"}
    for folder in (trained / "best", trained / "final"):
        metarm = MetaRM.load(ModelConfig(str(folder)))
        assert metarm.layout.critique == sandbox_layout["critique"]
        assert metarm.max_length == 128
    best = json.loads((trained / "best" / "validation.json").read_text())
    errors = [row["validation/mse"] for row in rows(trained, "metrics.jsonl") if "validation/mse" in row]
    assert len(errors) == 3
    assert best["mse"] == min(errors)


def test_every_weight_is_trained(trained):
    moved = load_file(trained / "final" / "model.safetensors")
    start = load_file(Path(resolve(START)) / "model.safetensors")
    assert not [name for name in start if name in moved and torch.equal(start[name], moved[name])]
    assert "score.weight" in moved


@pytest.mark.parametrize("steps", [1, 3], ids=["within an epoch", "on its boundary"])
def test_a_resumed_run_equals_an_uninterrupted_one(trained, tmp_path, sandbox_layout, steps):
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(folder / "final")
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > steps:
            shutil.rmtree(checkpoint)
    before = (folder / "rollouts.jsonl").read_bytes()
    run(folder, training(sandbox_layout), "--resume", "true")
    assert (folder / "rollouts.jsonl").read_bytes() == before
    assert_same_weights(folder / "final", trained / "final")
    assert_same_weights(folder / "best", trained / "best")
    assert rows(folder, "metrics.jsonl") == rows(trained, "metrics.jsonl")


def test_a_second_training_reuses_the_rollouts(trained, tmp_path, sandbox_layout, monkeypatch):
    """The same rollouts, the same seed: the same model, without asking a judge."""
    monkeypatch.setattr("nlhf.generation.backends.make_generator", lambda *_: pytest.fail("a judge was loaded"))
    values = training(sandbox_layout, rollouts=str(trained), data=None, judge=None, scorer=None)
    folder = run(tmp_path / "again", values)
    assert_same_weights(folder / "final", trained / "final")


def test_accumulation_takes_the_same_step(trained, tmp_path, sandbox_layout):
    """The mean is over all rows of the step, also where its last batch is smaller."""
    reuse = {"rollouts": str(trained), "data": None, "judge": None, "scorer": None}
    changes = {"max_steps": 2, "save_steps": 9}
    one = run(tmp_path / "one", training(sandbox_layout, **reuse, sft={**changes, "per_device_train_batch_size": 12}))
    several = {**changes, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    several = run(tmp_path / "several", training(sandbox_layout, **reuse, sft=several))
    losses = [[r["loss"] for r in rows(f, "metrics.jsonl") if "loss" in r] for f in (one, several)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_lora_trains_and_resumes_and_is_saved_whole(trained, tmp_path, sandbox_layout):
    values = training(sandbox_layout, rollouts=str(trained), data=None, judge=None, scorer=None)
    values["sft"] |= {"lora": {"rank": 2, "alpha": 4}, "max_steps": 4, "learning_rate": 1e-2}
    folder = run(tmp_path / "lora", values)
    resumed = shutil.copytree(folder, tmp_path / "resumed")
    shutil.rmtree(resumed / "final")
    for step in (3, 4):
        shutil.rmtree(resumed / f"checkpoint-{step}")
    write(tmp_path / "resumed.yaml", values)
    run(resumed, values, "--resume", "true")
    assert_same_weights(resumed / "final", folder / "final")
    heads = [load_file(f / "model.safetensors")["score.weight"] for f in (folder / "final", trained / "best")]
    assert not torch.equal(*heads)
    assert (folder / "checkpoint-4" / "adapter_model.safetensors").is_file()


def test_a_dry_run_writes_nothing(tmp_path, sandbox_layout, capsys):
    config = write(tmp_path / "c.yaml", training(sandbox_layout))
    assert main(["train", "--config", config, "--out", str(tmp_path / "run"), "--dry_run", "true"]) == 0
    assert not (tmp_path / "run").exists()
    assert "152,032" in capsys.readouterr().err


def test_a_launcher_that_splits_models_is_refused(tmp_path, sandbox_layout, capsys, monkeypatch):
    """Its checkpoints would be whole and best/ and final/ would not."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    message = refused(tmp_path / "run", training(sandbox_layout), capsys)
    assert "keeps all of MetaRM in every process" in message
    assert "experiments/accelerate/ddp.yaml" in message


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"data": [{**DATA, "labelled_fraction": 0}]}, "none of the 24 pairs has a label and a human critique"),
        ({"data": None}, "set data, or rollouts"),
        ({"rollouts": "somewhere"}, "leave out data, judge, scorer"),
        ({"judge": {**JUDGE, "sampling": {"temperature": 0.0}}}, "sampling.temperature is 0"),
        ({"judge": {**JUDGE, "samples": 0}}, "judge.samples must lie between 1 and"),
        ({"judge": {**JUDGE, "format": "rewardbench2_ratings"}}, "judge.format: 'rewardbench2_ratings' shows one"),
        ({"layout": {}}, "has no token for a word of the text"),  # a judge of few words as a backbone
        ({"sft": {"max_length": 0}}, "sft.max_length must be at least 1"),
        ({"sft": {"max_length": 5}}, "leaves no room for a critique"),
        ({"sft": {"lr_scheduler_type": "cosin"}}, "sft: cosin is not a valid SchedulerType"),
        ({"sft": {"extra": {"optim": "sgdd"}}}, "sft: sgdd is not a valid OptimizerNames"),
        ({"sft": {"extra": {"adam_beta1": 2.0}}}, "sft: Invalid beta parameter"),
        ({"sft": {"extra": {"lr_scheduler_kwargs": {"nope": 1}}}}, "unexpected keyword argument 'nope'"),
        ({"sft": {"extra": {"save_only_model": True}}}, "'save_only_model' would leave out of a checkpoint"),
        ({"judge": {**JUDGE, "backend": {"engine": {"x": 1}}}}, "backend.engine is for backend.kind vllm"),
        ({"layout": {"format": "rewardbench2_ratings"}}, "layout.format: 'rewardbench2_ratings' shows one response"),
        ({"layout": {"format": "sandbox", "critique": ""}}, "layout.critique must say"),
        ({"sft": {"validation_share": 1.0}}, "sft.validation_share must lie between 0 and 1"),
        ({"sft": {"extra": {"warmup_stepz": 1}}}, "TrainingArguments has no argument 'warmup_stepz'"),
        ({"model": {"name": "no/such/folder"}}, "no/such/folder does not exist"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_what_cannot_work_is_refused_before_anything_is_drawn(
    tmp_path, sandbox_layout, capsys, monkeypatch, changes, part
):
    monkeypatch.setattr("metarm.train.draw_in_folder", lambda *_: pytest.fail("rollouts were drawn"))
    assert part in refused(tmp_path / "run", training(sandbox_layout, **changes), capsys)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"target": "high"}, "field 'target' must be float | None, got 'high'"),
        ({"order": "XX"}, "field 'order' must be"),
        ({"reply": None}, "field 'reply' must be str"),
        ({"target": 1.0, "critique": None}, "a target of 1.0 needs a critique"),
        ({"target": float("inf"), "critique": "x"}, "must be a finite number"),
        ({"new": 1}, "not a rollout written by this version"),
        ({"target": None, "dropped": "format failure"}, "have a reward to learn"),
        ({"critique": "polite " * 300}, "raise max_length"),
    ],
    ids=["no number", "no order", "no reply", "no critique", "infinite", "unknown", "no targets", "too long"],
)
def test_rollouts_that_cannot_be_learned_from_are_refused(trained, tmp_path, sandbox_layout, capsys, change, part):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    shutil.copy(trained / "pairs.jsonl", folder)
    lines = [json.dumps({**row, **change}) for row in rows(trained, "rollouts.jsonl")]
    (folder / "rollouts.jsonl").write_text("\n".join(lines).replace("Infinity", "1e999"))
    values = training(sandbox_layout, rollouts=str(folder), data=None, judge=None, scorer=None)
    assert part in refused(tmp_path / "run", values, capsys)


def test_a_judge_that_may_write_more_than_metarm_reads_is_warned_of(tmp_path, sandbox_layout, caplog, monkeypatch):
    monkeypatch.setattr("metarm.train.draw_in_folder", lambda *_: pytest.fail("drawn", pytrace=False))
    values = training(sandbox_layout, sft={"max_length": 20}, out=str(tmp_path / "run"))
    with caplog.at_level("WARNING"), pytest.raises(pytest.fail.Exception, match="drawn"):
        call("metarm.train:train", "metarm train", values)
    assert "no critique is ever cut" in caplog.text


# ----------------------------------------------------------------------------------------------------------- evaluation


def evaluation(folder, **changes) -> dict:
    return {
        "model": {"name": str(folder)},
        "data": DATA,
        "judge": JUDGE,
        "scorer": "exact",
        "resamples": 50,
        "seed": 3,
        **changes,
    }


def test_evaluation_is_on_the_pairs_whose_critiques_were_hidden(trained, tmp_path, capsys):
    folder = run(tmp_path / "evaluation", evaluation(trained / "best"), verb="evaluate")
    judged = {row["id"] for row in rows(folder, "pairs.jsonl")}
    learned = {row["id"] for row in rows(trained, "pairs.jsonl")}
    assert (len(judged), len(learned), len(judged & learned)) == (12, 12, 0)
    metrics = json.loads((folder / "metrics.json").read_text())
    scores = rows(folder, "scores.jsonl")
    targets = torch.tensor([r["target"] for r in scores])
    assert set(metrics["figures"]) == {"metarm", "constant", "length", "confidence"}
    found = metrics["figures"]["metarm"]["mse"]
    assert found["value"] == pytest.approx(((torch.tensor([r["metarm"] for r in scores]) - targets) ** 2).mean().item())
    assert found["low"] <= found["value"] <= found["high"]
    assert metrics["figures"]["constant"]["mse"]["value"] == pytest.approx(targets.var(correction=0).item(), rel=1e-5)
    assert metrics["figures"]["constant"]["auc"]["value"] == 0.5
    assert sum(b["n"] for b in metrics["calibration"]) == len(scores) == found["n"]
    assert all(0 < r["confidence"] <= 1 for r in scores)
    assert (folder / "calibration.png").read_bytes().startswith(b"\x89PNG")
    assert "| MetaRM |" in (folder / "report.md").read_text()
    assert "| MetaRM |" in capsys.readouterr().out
    run(folder, evaluation(trained / "best"), "--resume", "true", verb="evaluate")
    assert json.loads((folder / "metrics.json").read_text()) == metrics


def test_the_judge_may_run_anywhere(monkeypatch):
    from metarm.train import JudgeSettings
    from nlhf.generation.backends import BackendConfig

    made = []
    monkeypatch.setattr("metarm.train.make_generator", lambda *given: made.append(given))
    server = BackendConfig(kind="openai", base_url="http://localhost:1/v1")
    settings = JudgeSettings(ModelConfig(START), "sandbox", backend=server)
    settings.load()
    assert made == [(settings.model, settings.sampling, server)]


def test_confidence_is_the_probability_of_the_verdict_given_the_critique(trained):
    """Step by step, without padding or batches."""
    from metarm.evaluate import verdict_probabilities
    from metarm.rollouts import Rollouts
    from metarm.train import JudgeSettings
    from nlhf.generation import SamplingConfig

    settings = JudgeSettings(ModelConfig(START), "sandbox", sampling=SamplingConfig(**JUDGE["sampling"]))
    judge, rollouts = settings.load(), Rollouts.read(trained)
    examples = rollouts.usable[:6]
    model, tokenizer = judge.generator.model, judge.generator.tokenizer
    for example, found in zip(examples, verdict_probabilities(judge, rollouts, examples, 4), strict=True):
        ids = tokenizer(judge.format.render(rollouts.shown(example))[0]["content"])["input_ids"]
        critique, verdict = example.reply.split("</critics>")
        ids += tokenizer(critique)["input_ids"]
        expected = 1.0
        for token in tokenizer(f"</critics> {verdict}")["input_ids"]:
            expected *= model(torch.tensor([ids])).logits[0, -1].softmax(-1)[token].item()
            ids.append(token)
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"data": {"source": "sandbox", "limit": 4}}, "no critique was hidden from training"),
        ({"judge": {**JUDGE, "backend": {"kind": "vllm"}}}, "needs transformers"),
        ({"model": {"name": START}}, "not a complete MetaRM"),
        ({"state": "nowhere.pt"}, "state: nowhere.pt does not hold the weights"),
        ({"state": __file__}, "does not hold the weights"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"max_length": 3}, "leaves no room for a critique"),
    ],
    ids=["nothing hidden", "no probabilities", "no MetaRM", "no state", "a text", "limit", "batch", "length", "short"],
)
def test_an_evaluation_that_cannot_work_is_refused(trained, tmp_path, capsys, changes, part):
    assert part in refused(tmp_path / "run", evaluation(trained / "best", **changes), capsys, verb="evaluate")


def test_without_the_critique_in_the_reply_there_is_no_confidence(trained, tmp_path, capsys, monkeypatch):
    """Formats that read JSON put critiques together: where they end in the reply is not known, and is not guessed."""
    parse = type(get_format("sandbox")).parse

    def reworded(self, text, truncated=False):
        verdict = parse(self, text, truncated)
        backwards = " ".join(reversed((verdict.critique or "").split()))
        return dataclasses.replace(verdict, critique=backwards or None)

    monkeypatch.setattr(type(get_format("sandbox")), "parse", reworded)
    folder = run(tmp_path / "evaluation", evaluation(trained / "best"), verb="evaluate")
    figures = json.loads((folder / "metrics.json").read_text())["figures"]
    assert set(figures) == {"metarm", "constant", "length"}
    assert "no baseline 'confidence'" in capsys.readouterr().err
    assert "probability of its verdict" not in (folder / "report.md").read_text()


def test_all_pairs_of_a_data_set_that_was_never_seen(trained, tmp_path):
    data = {"source": "sandbox", "split": "validation", "limit": 6}
    values = evaluation(trained / "best", data=data, pairs="all", limit=5)
    folder = run(tmp_path / "evaluation", values, verb="evaluate")
    assert len(rows(folder, "pairs.jsonl")) == 5


# --------------------------------------------------------------------------------------------------------------- online


def online(folder: Path, **changes) -> dict:
    settings = {
        "learning_rate": 1e-3,
        "max_steps": 6,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "temperature": 1.0,
        "beta": 0.01,
        "max_prompt_length": 64,
        "max_completion_length": 26,
        "save_steps": 1,
        "save_total_limit": 20,
        **changes.pop("grpo", {}),
    }
    arguments = {"model": str(folder), "scorer": "exact", "learning_rate": 1e-3, "window": 20, "gate_rows": 5}
    arguments["scorer"] = {"class_path": "exact"}
    return {
        "model": {"name": START},
        "data": [DATA],
        "format": "sandbox",
        "process": {"class_path": "metarm.MetaReward", "init_args": {**arguments, **changes.pop("process", {})}},
        "grpo": settings,
        "samples": {"every": 1, "count": 99},
        "seed": 3,
        **changes,
    }


@pytest.fixture(scope="module")
def judged(trained, tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("online") / "run", online(trained / "best"), entry=nlhf)


def test_an_online_run_learns_and_logs_its_drift(judged, trained):
    metrics = [row for row in rows(judged, "metrics.jsonl") if "loss" in row]
    assert len(metrics) == 6
    for name in ("metarm/mse_before", "metarm/mse_after", "metarm/labelled", "metarm/score", "metarm/gate_open"):
        assert all(name in row for row in metrics if row["metarm/labelled"] and row["metarm/scored"]), name
    states = [torch.load(judged / f"checkpoint-{n}" / "process_reward.pt", weights_only=True) for n in (1, 6)]
    steps = [row["metarm/labelled"] > 0 for row in metrics]  # a step without a labelled row is no step for MetaRM
    assert [state["updates"] for state in states] == [steps[0], sum(steps)]
    assert sum(steps) >= 4
    assert any(not torch.equal(states[0]["model"][n], states[1]["model"][n]) for n in states[0]["model"])
    labelled = {row["id"] for row in rows(trained, "pairs.jsonl")}  # the same fraction and seed as in the cold start
    served = [s for s in rows(judged, "samples.jsonl") if s["pair_id"] not in labelled and s["bonus"] is not None]
    assert served
    for sample in served:
        assert sample["verdict"] == sample["label"]
        assert sample["reward"] == pytest.approx(1 + 0.5 * sample["bonus"])


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_online_run_equals_an_uninterrupted_one(judged, trained, tmp_path, step):
    """Judge, MetaRM, its optimiser and window: k steps and the rest are n steps."""
    folder = shutil.copytree(judged, tmp_path / "run")
    shutil.rmtree(folder / "final")
    for checkpoint in folder.glob("checkpoint-*"):
        number = int(checkpoint.name.rpartition("-")[2])
        if number == step + 1:  # killed while this one was written
            (checkpoint / "trainer_state.json").unlink()
            (checkpoint / "process_reward.pt").write_bytes(b"half")
        elif number > step:
            shutil.rmtree(checkpoint)
    run(folder, online(trained / "best"), "--resume", "true", entry=nlhf)
    assert_same_weights(folder / "final", judged / "final")
    assert rows(folder, "metrics.jsonl") == rows(judged, "metrics.jsonl")
    assert rows(folder, "samples.jsonl") == rows(judged, "samples.jsonl")
    assert_same_metarm(folder / "checkpoint-6", judged / "checkpoint-6")


def assert_same_metarm(one: Path, other: Path) -> None:
    a, b = (torch.load(folder / "process_reward.pt", weights_only=True) for folder in (one, other))
    assert (a["updates"], a["window"]) == (b["updates"], b["window"])
    for name, value in b["model"].items():
        assert torch.equal(a["model"][name], value), name
    for key, moments in b["optimizer"]["state"].items():
        assert all(torch.equal(a["optimizer"]["state"][key][name], value) for name, value in moments.items())


def test_a_killed_online_run_resumes_to_the_same_end(trained, tmp_path):
    """kill -9 of a real process, at whatever point after the checkpoint of step 4."""
    values = online(trained / "best", grpo={"max_steps": 10, "save_steps": 2})
    whole = run(tmp_path / "whole", values, entry=nlhf)
    out, config = tmp_path / "killed", write(tmp_path / "killed.yaml", values)
    command = [sys.executable, "-m", "nlhf", "train", "--config", config, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        deadline = time.monotonic() + 240
        while not (out / "checkpoint-4" / "trainer_state.json").exists():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "final").exists()
    run(out, values, "--resume", "true", entry=nlhf)
    assert rows(out, "metrics.jsonl") == rows(whole, "metrics.jsonl")
    assert rows(out, "samples.jsonl") == rows(whole, "samples.jsonl")
    assert_same_weights(out / "final", whole / "final")
    assert_same_metarm(out / "checkpoint-10", whole / "checkpoint-10")
    start = torch.load(whole / "checkpoint-2" / "process_reward.pt", weights_only=True)
    end = torch.load(whole / "checkpoint-10" / "process_reward.pt", weights_only=True)
    assert end["updates"] > start["updates"]  # MetaRM learned on after the kill, so there was something to restore


def test_the_metarm_of_an_online_run_can_be_evaluated(judged, trained, tmp_path):
    state = str(judged / "checkpoint-6" / "process_reward.pt")
    before = run(tmp_path / "before", evaluation(trained / "best", resamples=0), verb="evaluate")
    after = run(tmp_path / "after", evaluation(trained / "best", resamples=0, state=state), verb="evaluate")
    a, b = ([r["metarm"] for r in rows(f, "scores.jsonl")] for f in (before, after))
    assert a != pytest.approx(b)


def test_offline_stays_as_it_is_and_without_outcome_runs(trained, tmp_path):
    frozen = run(
        tmp_path / "frozen", online(trained / "best", grpo={"max_steps": 2}, process={"online": False}), entry=nlhf
    )
    assert torch.load(frozen / "checkpoint-2" / "process_reward.pt", weights_only=True)["updates"] == 0
    values = online(trained / "best", grpo={"max_steps": 2}, process={"outcome_gate": False})
    free = run(tmp_path / "free", values, entry=nlhf)
    samples = [s for s in rows(free, "samples.jsonl") if s["well_formed"] and s["verdict"] != s["label"]]
    assert any(s["reward"] == s["bonus"] != 0 for s in samples)  # an unlabelled pair, the label not used


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"grpo": {"extra": {"num_iterations": 2}}}, ["num_iterations must be 1 (it is 2)"]),
        ({"grpo": {"extra": {"steps_per_generation": 2}}}, ["gradient_accumulation_steps, 1 (it is 2)"]),
        ({"data": [{**DATA, "labelled_fraction": 0}]}, ["metarm.MetaReward", "has a human critique"]),
        ({"process": {"unlabelled_bonus": "x"}}, ["unlabelled_bonus must be one of paper, matched"]),
        ({"process": {"modle": "x"}}, ["takes no argument 'modle'", "Did you mean 'model'?"]),
        ({"process": {"model": START}}, ["not a complete MetaRM", "metarm train"]),
    ],
    ids=["iterations", "generations", "nothing labelled", "bonus", "misspelt", "not trained"],
)
def test_an_online_run_that_cannot_work_is_refused(trained, tmp_path, capsys, changes, parts):
    message = refused(tmp_path / "run", online(trained / "best", **changes), capsys, entry=nlhf)
    for part in parts:
        assert part in message


# ---------------------------------------------------------------------------------------------------------------- YAMLs

ARMS = ("rm_nlhf_25", "rm_nlhf_25_metarm_offline", "rm_nlhf_25_metarm_online", "metarm_without_outcome")


EXPERIMENTS = {
    path: verb
    for path in sorted((ROOT / "experiments").glob("*/*.yaml"))
    for verb in ("train", "evaluate")
    if re.search(rf"^# Launch: .*metarm {verb} ", path.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_experiment_is_accepted_as_written(path, tmp_path):
    import importlib

    verb = EXPERIMENTS[path]
    values = {"out": str(tmp_path), **read_yaml(str(path))}
    for model in (values["model"], values["judge"]["model"]):
        if model["name"].startswith("runs/"):  # made by another experiment
            model["name"] = START
    function = getattr(importlib.import_module(f"metarm.{verb}"), verb)
    make_parser(function, f"metarm {verb}").parse_object(values)


def test_experiments_with_metarm_are_found():
    assert {path.parent.name for path in EXPERIMENTS} == {
        "sandbox", "comve_smollm2", "helpsteer3_qwen3_4b", "helpsteer3_qwen3_32b",
    }  # fmt: skip


def test_the_arms_of_comve_differ_as_their_comments_say():
    names = ("rm_nlhf", *ARMS[:3], "metarm_cold_start", "metarm_evaluate")
    folder = ROOT / "experiments" / "comve_smollm2"
    full, quarter, offline, learning, cold, judged = (read_yaml(str(folder / f"{name}.yaml")) for name in names)
    assert quarter["data"][0] == cold["data"][1] == judged["data"]  # MetaRM and its judge see the same reasons
    assert {**offline, "process": 0} == {**quarter, "process": 0}
    process = learning["process"]["init_args"]
    assert (process.pop("online"), process.pop("learning_rate")) == (True, 2e-5)
    assert offline["process"]["init_args"].pop("online") is False
    assert learning == offline
    scorers = [full["process"]["init_args"]["scorer"], process["scorer"], cold["scorer"], judged["scorer"]]
    assert all(scorer == scorers[0] for scorer in scorers)
    assert {**judged["judge"], "sampling": 0} == {**cold["judge"], "sampling": 0}
    assert quarter["data"][0].pop("labelled_fraction") == 0.25
    assert quarter == full


def test_the_arms_differ_as_their_comments_say():
    full, quarter, offline, learning, free = (read_yaml(str(SANDBOX / f"{n}.yaml")) for n in ("rm_nlhf", *ARMS))
    cold = read_yaml(str(SANDBOX / "metarm_cold_start.yaml"))
    assert quarter["data"] == cold["data"]
    assert quarter["data"][0].pop("labelled_fraction") == 0.25
    assert quarter == full
    offline["data"][0].pop("labelled_fraction")
    assert {**offline, "process": 0} == {**quarter, "process": 0}
    process = learning["process"]["init_args"]
    assert {k: v for k, v in process.items() if k not in ("online", "learning_rate", "batch_size")} == {
        k: v for k, v in offline["process"]["init_args"].items() if k != "online"
    }
    assert free["process"]["init_args"].pop("outcome_gate") is False
    assert free == learning
