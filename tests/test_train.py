"""Cold start and GRPO through the command line, on the shipped 152-thousand-parameter judge."""

import inspect
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nlhf import cold_start as cold_start_module
from nlhf import train as train_module
from nlhf.callbacks import Watch, keep_best, put_back
from nlhf.cli import main
from nlhf.cold_start import ColdStartConfig, tokenize
from nlhf.errors import UserError
from nlhf.files import read_jsonl
from nlhf.formats import get_format
from nlhf.models import ModelConfig, load_model, load_tokenizer, resolve
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.rewards import JudgeReward, RewardConfig
from nlhf.runs import alone
from nlhf.sampler import put_in_order, shuffled
from nlhf.sources import DataConfig, load_pairs
from nlhf.train import GRPOSettings, fitting_prompts, make_trainer
from nlhf.training import forget_after, last_checkpoint, training_dtype

START = "package:nlhf"
ROOT = Path(__file__).resolve().parents[1]
VALIDATION = {"data": {"source": "sandbox", "split": "validation", "limit": 4}, "every": 2, "scorer": "exact"}

# Six pairs, two prompts a step: an epoch has three steps.
GRPO = {
    "model": {"name": START},
    "data": [{"source": "sandbox", "limit": 6}],
    "format": "sandbox",
    "process": {"class_path": "critique", "init_args": {"scorer": {"class_path": "exact"}}},
    "grpo": {
        "learning_rate": 1e-3,
        "max_steps": 7,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "temperature": 1.0,
        "beta": 0.01,
        "max_prompt_length": 64,
        "max_completion_length": 26,
        "save_steps": 1,
        "save_total_limit": 20,
    },
    "samples": {"every": 1, "count": 99},
    "seed": 3,
}
# Six rows in batches of two.
COLD_START = {
    "model": {"name": START},
    "data": [{"source": "sandbox", "split": "cold_start", "limit": 6}],
    "format": "sandbox",
    "sft": {
        "learning_rate": 1e-3,
        "max_steps": 7,
        "per_device_train_batch_size": 2,
        "max_length": 64,
        "max_completion_length": 26,
        "save_steps": 1,
        "save_total_limit": 20,
    },
    "seed": 3,
}
CONFIGS = {"train": GRPO, "cold-start": COLD_START}
SETTINGS = {"train": "grpo", "cold-start": "sft"}
# Clocks, and what is counted anew in every session.
CLOCKS = {"seconds", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}


def write_config(path: Path, values: dict, **changes) -> str:
    """A YAML of nested values; changes are given as ``grpo__max_steps=2``, and None takes a key out."""
    values = json.loads(json.dumps(values))
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node.pop(last, None)
        if value is not None:
            node[last] = value
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def run(verb: str, out: Path, **changes) -> Path:
    """Run a verb to its end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    config = write_config(out.with_suffix(".yaml"), CONFIGS[verb], **changes)
    assert main([verb, "--config", config, "--out", str(out)]) == 0
    return out


def refused(verb: str, out: Path, capsys, **changes) -> str:
    """Run a verb that must be refused with nothing written, and return the message."""
    config = write_config(out.with_suffix(".yaml"), CONFIGS[verb], **changes)
    assert main([verb, "--config", config, "--out", str(out)]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def assert_same_weights(a, b) -> None:
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def rows(folder: Path, name: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for _, row in read_jsonl(folder / name)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """One uninterrupted run of each verb, with validation."""
    base = tmp_path_factory.mktemp("runs")
    return {verb: run(verb, base / verb, validation=VALIDATION) for verb in CONFIGS}


@pytest.fixture
def caught_trainer(monkeypatch):
    """Stops a verb just before it trains, and holds the trainer it made."""
    caught = SimpleNamespace(trainer=None)

    def catch(trainer, folder, resume):
        caught.trainer = trainer

    for module in (train_module, cold_start_module):
        monkeypatch.setattr(module, "run_trainer", catch)
    return caught


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize("verb", CONFIGS)
def test_a_run_writes_all_its_files(runs, verb):
    folder = runs[verb]
    names = {p.name for p in folder.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "manifest.json",
        "metrics.jsonl",
        "checkpoint-7",
        "best",
        "final",
    } <= names
    assert not [name for name in names if name.startswith(".")]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["data"][0]["pairs"] == 6
    assert manifest["too_long"] == 0
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed"] == 3
    assert config[SETTINGS[verb]]["max_steps"] == 7


@pytest.mark.parametrize("verb", CONFIGS)
def test_metrics_have_a_row_a_step_and_validation_first_and_last(runs, verb):
    found = rows(runs[verb], "metrics.jsonl")
    steps = [row["step"] for row in found if "loss" in row]
    assert steps == list(range(1, 8))
    validated = [row["step"] for row in found if "validation/accuracy" in row]
    assert validated == [0, 2, 4, 6, 7]
    best = json.loads((runs[verb] / "best" / "validation.json").read_text())
    accuracies = {row["step"]: row["validation/accuracy"] for row in found if "validation/accuracy" in row}
    assert best["accuracy"] == max(accuracies.values())
    assert best["step"] == min(step for step, value in accuracies.items() if value == best["accuracy"])


@pytest.mark.parametrize("verb", CONFIGS)
def test_every_parameter_moved_and_the_model_loads_again(runs, verb):
    before, after = weights(resolve(START)), weights(runs[verb] / "final")
    assert before.keys() == after.keys()
    assert not [name for name in before if torch.equal(before[name], after[name])]
    model = load_model(ModelConfig(str(runs[verb] / "final")))
    for name, value in model.state_dict().items():
        assert torch.isfinite(value).all(), name
    load_tokenizer(ModelConfig(str(runs[verb] / "final")))
    assert_same_weights(runs[verb] / "final", runs[verb] / "checkpoint-7")


def test_samples_tell_what_was_rewarded_and_why(runs):
    samples = rows(runs["train"], "samples.jsonl")
    assert len(samples) == 7 * 8
    for sample in samples:
        right = sample["verdict"] == sample["label"]
        expected = -1.0 if not sample["well_formed"] else 0.0 if not right else 1 + 0.5 * sample["bonus"]
        assert sample["reward"] == expected
    by_step = {step: [s["reward"] for s in samples if s["step"] == step] for step in range(7)}
    logged = {row["step"]: row["reward"] for row in rows(runs["train"], "metrics.jsonl") if "reward" in row}
    for step, rewards in by_step.items():  # a sample's step is the number of steps taken before it was drawn
        assert logged[step + 1] == pytest.approx(sum(rewards) / 8)


def test_outcome_only_differs_by_the_process_reward_alone(tmp_path):
    folder = run("train", tmp_path / "run", process=None, grpo__max_steps=1)
    assert {s["reward"] for s in rows(folder, "samples.jsonl")} <= {-1.0, 0.0, 1.0}
    assert {s["bonus"] for s in rows(folder, "samples.jsonl")} == {None}


def test_without_a_kl_term_no_copy_is_kept(tmp_path, caught_trainer):
    run("train", tmp_path / "run", grpo__beta=0.0)
    assert caught_trainer.trainer.ref_model is None


# ------------------------------------------------------------------------------------------------------------ resuming


def interrupted(source: Path, target: Path, step: int) -> Path:
    """A copy of a finished run as a kill just after the checkpoint of ``step`` and during the next would leave it."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "final")
    for checkpoint in target.glob("checkpoint-*"):
        number = int(checkpoint.name.rpartition("-")[2])
        if number == step + 1:
            (checkpoint / "trainer_state.json").write_text('{"epoch": 0.')
            (checkpoint / "optimizer.pt").write_bytes(b"half")
        elif number > step:
            shutil.rmtree(checkpoint)
    with (target / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    return target


@pytest.mark.parametrize("step", [2, 3, 5], ids=["inside the first epoch", "on its boundary", "inside the second"])
@pytest.mark.parametrize("verb", CONFIGS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, tmp_path, verb, step):
    folder = interrupted(runs[verb], tmp_path / "run", step)
    run(verb, folder, validation=VALIDATION, resume=True)
    assert_same_weights(folder / "final", runs[verb] / "final")
    assert rows(folder, "metrics.jsonl") == rows(runs[verb], "metrics.jsonl")
    if verb == "train":
        assert rows(folder, "samples.jsonl") == rows(runs[verb], "samples.jsonl")


@pytest.mark.parametrize("verb", CONFIGS)
def test_two_processes_do_not_train_in_one_folder(runs, tmp_path, verb, capsys):
    folder = interrupted(runs[verb], tmp_path / "run", 2)
    before = (folder / "metrics.jsonl").read_bytes()
    config = write_config(tmp_path / "again.yaml", CONFIGS[verb], validation=VALIDATION, resume=True)
    with alone(folder):
        assert main([verb, "--config", str(config), "--out", str(folder)]) == 2
    assert "another process is at work on this run" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("verb", CONFIGS)
def test_every_epoch_has_an_order_of_its_own_and_sees_every_pair(runs, caught_trainer, tmp_path, verb):
    """trl's own sampler would repeat the first epoch's order after resuming."""
    run(verb, tmp_path / "run")
    trainer = caught_trainer.trainer
    sampler = trainer._get_train_sampler(trainer.train_dataset)
    orders = []
    for epoch in (0.0, 1.0, 2.0):
        trainer.state.epoch = epoch
        orders.append(list(dict.fromkeys(sampler)))
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    trainer.state.epoch = 1.5  # as a checkpoint inside the second epoch says
    assert list(dict.fromkeys(sampler)) == orders[1]


def test_a_killed_run_resumes_to_the_same_end(tmp_path):
    """kill -9 at whatever point after the second checkpoint."""
    changes = {"validation": VALIDATION, "grpo__max_steps": 12, "grpo__save_steps": 2}
    whole = run("train", tmp_path / "whole", **changes)
    out = tmp_path / "killed"
    config = write_config(tmp_path / "killed.yaml", GRPO, **changes)
    command = [sys.executable, "-m", "nlhf", "train", "--config", config, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (out / "checkpoint-4" / "trainer_state.json").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "final").exists()
    assert main(["train", "--config", config, "--out", str(out)]) == 2  # never without being asked
    assert main(["train", "--config", config, "--out", str(out), "--resume", "true"]) == 0
    assert_same_weights(out / "final", whole / "final")
    assert_same_weights(out / "best", whole / "best")
    assert rows(out, "metrics.jsonl") == rows(whole, "metrics.jsonl")
    assert rows(out, "samples.jsonl") == rows(whole, "samples.jsonl")


@pytest.mark.parametrize("verb", CONFIGS)
def test_resuming_a_finished_run_changes_nothing(runs, tmp_path, verb):
    folder = shutil.copytree(runs[verb], tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != "environment.json"}
    run(verb, folder, validation=VALIDATION, resume=True)
    after = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != "environment.json"}
    assert {p: t for p, t in after.items() if p.name != "manifest.json"} == {
        p: t for p, t in before.items() if p.name != "manifest.json"
    }


def test_resuming_under_another_configuration_names_the_keys(runs, tmp_path, capsys):
    folder = shutil.copytree(runs["train"], tmp_path / "run")
    config = write_config(tmp_path / "c.yaml", GRPO, validation=VALIDATION, grpo__learning_rate=1e-4, resume=True)
    assert main(["train", "--config", config, "--out", str(folder)]) == 2
    assert "grpo.learning_rate: 0.001 -> 0.0001" in capsys.readouterr().err


def test_the_newest_whole_checkpoint_counts(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for number, state in ((2, "{}"), (10, "{}"), (12, '{"epoch'), (14, None)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_of_several_processes_all_must_have_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-1" / "rng_state_0.pth").touch()
    assert last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-1" / "rng_state_1.pth").touch()
    assert last_checkpoint(tmp_path) is not None


def test_logs_are_cut_to_what_the_checkpoint_knows(tmp_path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"step": {i}}}\n' for i in range(5)) + '{"step"')
    forget_after(tmp_path, 2)
    assert [row["step"] for _, row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["step"] for _, row in read_jsonl(tmp_path / "samples.jsonl")] == [0, 1]  # 2 is drawn again


# --------------------------------------------------------------------------------------------------------- invariances


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder, "metrics.jsonl") if "loss" in row]


def assert_close_weights(a: Path, b: Path, tolerance: float) -> None:
    before, a, b = weights(resolve(START)), weights(a / "final"), weights(b / "final")
    for name in a:
        # Against the way that was gone: steps of AdamW are about the learning rate, whatever the gradient.
        assert (a[name] - b[name]).abs().max() <= tolerance * (a[name] - before[name]).abs().max(), name


def test_cold_start_accumulates_to_the_same_step(tmp_path):
    """Rows differ in length and tokens in weight, so a mean of means would differ."""
    changes = {"sft__max_steps": 3, "sft__verdict_weight": 5.0}
    one = run("cold-start", tmp_path / "one", sft__per_device_train_batch_size=6, **changes)
    several = run(
        "cold-start",
        tmp_path / "several",
        sft__per_device_train_batch_size=1,
        sft__gradient_accumulation_steps=6,
        **changes,
    )
    assert losses(one) == pytest.approx(losses(several), rel=1e-5)
    assert_close_weights(one, several, 1e-2)


def test_grpo_accumulates_to_the_same_step(tmp_path):
    """All rollouts of a step are drawn at once, whatever the accumulation: the same rollouts, the same trajectory."""
    changes = {"grpo__max_steps": 3, "grpo__extra": {"disable_dropout": True}}
    one = run("train", tmp_path / "one", **changes)
    several = run(
        "train",
        tmp_path / "several",
        grpo__per_device_train_batch_size=1,
        grpo__gradient_accumulation_steps=8,
        **changes,
    )
    assert rows(one, "samples.jsonl") == rows(several, "samples.jsonl")
    assert losses(one) == pytest.approx(losses(several), rel=1e-3, abs=1e-6)
    assert_close_weights(one, several, 1e-2)


@pytest.mark.parametrize("verb", CONFIGS)
def test_validation_does_not_change_training(runs, tmp_path, verb):
    without = run(verb, tmp_path / "run")
    assert_same_weights(without / "final", runs[verb] / "final")
    assert not (without / "best").exists()


@pytest.mark.parametrize("verb", CONFIGS)
def test_the_seed_decides_everything(runs, tmp_path, verb):
    other = run(verb, tmp_path / "run", seed=4, **{f"{SETTINGS[verb]}__max_steps": 2})
    same_start = weights(runs[verb] / "checkpoint-2")
    assert any(not torch.equal(value, same_start[name]) for name, value in weights(other / "final").items())


def test_the_loss_is_the_weighted_mean_over_the_reply(tmp_path, caught_trainer):
    """sum(w * nll) / sum(w): w is 0 on the prompt, 1 on the critique, verdict_weight on verdict and end of turn."""
    run("cold-start", tmp_path / "run", sft__verdict_weight=4.0)
    trainer = caught_trainer.trainer
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    total, count = 0.0, 0.0
    for i in range(3):
        row = trainer.train_dataset[i]
        for t in range(1, len(row["input_ids"])):
            scores = logits[i, t - 1]
            nll = math.log(sum(math.exp(s) for s in scores.tolist())) - scores[row["input_ids"][t]].item()
            total += row["weights"][t] * nll
            count += row["weights"][t]
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(total / count, rel=1e-5)


def test_verdict_tokens_and_the_end_of_turn_carry_the_weight():
    tokenizer, judge_format = load_tokenizer(ModelConfig(START)), get_format("sandbox")
    pairs = load_pairs(DataConfig(source="sandbox", split="cold_start", limit=2))
    both, _ = tokenize(tokenizer, judge_format, pairs, ColdStartConfig(verdict_weight=7.0, max_length=64))
    verdict, _ = tokenize(tokenizer, judge_format, pairs, ColdStartConfig(target="verdict", max_length=64))
    for pair, row, short in zip(pairs, both, verdict, strict=True):
        heavy = [i for i, w in zip(row["input_ids"], row["weights"], strict=True) if w == 7.0]
        assert heavy[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(heavy[:-1]) == f"<choice> [[{pair.label}]] </choice>"
        light = [i for i, w in zip(row["input_ids"], row["weights"], strict=True) if w == 1.0]
        assert "<critics>" in tokenizer.decode(light)
        learned = [i for i, w in zip(short["input_ids"], short["weights"], strict=True) if w > 0]
        assert learned == heavy


# --------------------------------------------------------------------------------------------------------------- orders


def test_a_and_b_are_exchanged_by_a_seeded_coin(tmp_path):
    """The public release shows every pair as it comes."""
    pairs = load_pairs(DataConfig(source="sandbox", limit=40))
    shown = put_in_order(pairs, "random", 5)
    exchanged = [p.response_a != q.response_a for p, q in zip(pairs, shown, strict=True)]
    assert 8 <= sum(exchanged) <= 32
    for pair, other, swapped in zip(pairs, shown, exchanged, strict=True):
        assert other == (pair.swap() if swapped else pair)
    assert put_in_order(pairs, "random", 5) == shown
    assert put_in_order(pairs, "random", 6) != shown
    folder = run("train", tmp_path / "run", grpo__max_steps=3, order="random")
    by_id = {p.id: p for p in load_pairs(DataConfig(source="sandbox", limit=6), seed=3)}
    samples = rows(folder, "samples.jsonl")
    exchanged = {s["response_a"] != by_id[s["pair_id"]].response_a for s in samples}
    assert exchanged == {True, False}
    for s in samples:  # the gold label goes with its response
        pair = by_id[s["pair_id"]]
        winner = pair.response_a if pair.label == "A" else pair.response_b
        assert s[f"response_{s['label'].lower()}"] == winner


def test_both_orders_of_a_pair_share_a_step_of_grpo(tmp_path):
    folder = run("train", tmp_path / "run", order="both", grpo__max_steps=6)
    samples = rows(folder, "samples.jsonl")
    for step in range(6):
        shown = {(s["pair_id"], s["response_a"]) for s in samples if s["step"] == step}
        assert len(shown) == 2
        assert len({pair_id for pair_id, _ in shown}) == 1
    assert len({s["pair_id"] for s in samples}) == 6


def test_both_orders_of_a_pair_share_a_batch_of_the_cold_start(tmp_path, caught_trainer):
    run("cold-start", tmp_path / "run", order="both", sft__per_device_train_batch_size=4, sft__target="verdict")
    trainer = caught_trainer.trainer
    position = {tuple(row["input_ids"]): i for i, row in enumerate(trainer.train_dataset)}
    for batch in trainer.get_train_dataloader():
        unpadded = [
            tuple(ids[: int(mask.sum())])
            for ids, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"], strict=True)
        ]
        indices = [position[ids] for ids in unpadded]
        assert len(indices) == 4
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(indices[::2], indices[1::2], strict=True))


@pytest.mark.parametrize("group", [1, 2])
def test_a_shuffle_keeps_groups_and_loses_nothing(group):
    order = shuffled(12, group, seed=1)
    assert sorted(order) == list(range(12))
    assert order != list(range(12))
    assert order == shuffled(12, group, seed=1)
    assert order != shuffled(12, group, seed=2)
    assert all(order[i : i + group] == list(range(order[i], order[i] + group)) for i in range(0, 12, group))


class LongerOneWay:
    """A format whose prompt is longer when a certain response comes first."""

    def render(self, pair):
        return [{"role": "user", "content": "correct " * (50 if pair.response_a == "long" else 2)}]

    def target(self, pair, critique, verdict_only=False):
        return "", f"<choice> [[{pair.label}]] </choice>"


def test_a_pair_that_is_too_long_in_one_order_goes_in_both():
    """Otherwise all later rows would be grouped with a stranger."""
    tokenizer = load_tokenizer(ModelConfig(START))
    pairs = [
        Pair(id=str(i), context=[Turn("user", "q")], response_a="short", response_b=b, label="A")
        for i, b in enumerate(["x", "long", "y"])
    ]
    shown = put_in_order(pairs, "both", 0)
    kept, dropped = fitting_prompts(shown, LongerOneWay(), tokenizer, limit=30, group=2)
    assert ([p.id for p in kept], dropped) == (["0", "0", "2", "2"], 2)
    learned, dropped = tokenize(tokenizer, LongerOneWay(), shown, ColdStartConfig(max_length=30), group=2)
    assert (len(learned), dropped) == (4, 2)


def test_rows_that_are_too_long_are_counted_and_said(tmp_path, capsys):
    lengths = []
    tokenizer, judge_format = load_tokenizer(ModelConfig(START)), get_format("sandbox")
    for pair in load_pairs(DataConfig(source="sandbox", split="cold_start", limit=6), seed=3):
        lengths.append(len(tokenize(tokenizer, judge_format, [pair], ColdStartConfig())[0][0]["input_ids"]))
    limit = min(lengths)
    kept = sum(n <= limit for n in lengths)
    assert kept < 6
    folder = run("cold-start", tmp_path / "run", order="given", sft__max_length=limit, sft__max_steps=1)
    assert json.loads((folder / "manifest.json").read_text())["too_long"] == 6 - kept
    assert f"left out {6 - kept} of 6 rows longer than sft.max_length = {limit}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_process_reward_without_a_human_critique_is_refused(tmp_path, capsys):
    """As shipped, the public release counts every pair as unlabelled, and its process reward never acts."""
    message = refused(
        "train", tmp_path / "run", capsys, data=[{"source": "sandbox", "limit": 6, "labelled_fraction": 0}]
    )
    for part in ("process", "none of the 6 training pairs has a human critique", "labelled_fraction"):
        assert part in message


@pytest.mark.parametrize("verb", CONFIGS)
def test_a_pair_without_a_label_is_refused(tmp_path, capsys, verb):
    path = tmp_path / "pairs.jsonl"
    row = {"context": "q", "response_a": "x", "response_b": "y", "critiques": [{"weaknesses_b": "bad"}]}
    path.write_text(json.dumps({**row, "id": "one", "label": "A"}) + "\n" + json.dumps({**row, "id": "two"}) + "\n")
    message = refused(verb, tmp_path / "run", capsys, data=[{"source": "jsonl", "path": str(path)}])
    assert f"{path}: pair 'two' has no label" in message


def test_pairs_in_two_sources_must_differ(tmp_path, capsys):
    twice = [{"source": "sandbox", "limit": 6}] * 2
    assert "occurs in two sources" in refused("train", tmp_path / "run", capsys, data=twice)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"grpo__num_generations": 3}, ["8 rollouts a step", "num_generations to one of [2, 4, 8]", "multiple of 3"]),
        ({"grpo__num_generations": 12}, ["multiple of 3"]),
        ({"grpo__num_generations": 1}, ["num_generations must be at least 2"]),
        ({"grpo__temperature": 0}, ["grpo.temperature must be positive"]),
        ({"grpo__per_device_train_batch_size": 32}, ["need 8 prompts, but there are only 6"]),
        ({"order": "both", "grpo__num_generations": 8}, ["order: both needs an even number"]),
        ({"grpo__learning_rate": -1, "grpo__save_steps": 0}, ["learning_rate must be positive", "save_steps"]),
        ({"grpo__max_prompt_length": 3}, ["no prompt fits into grpo.max_prompt_length = 3"]),
        ({"grpo__extra": {"top_kk": 3}}, ["grpo.extra: GRPOConfig has no argument 'top_kk'. Did you mean 'top_k'?"]),
        ({"grpo__extra": {"num_generations": 3}}, ["set grpo.num_generations instead"]),
        ({"grpo__extra": {"seed": 3}}, ["'seed' is set by the run itself"]),
        ({"grpo__extra": {"loss_type": "x"}}, ["set grpo.loss_type instead"]),
        ({"grpo__extra": {"generation_batch_size": 9}}, ["grpo: ", "generation_batch_size"]),
        ({"samples__every": 0}, ["samples.every"]),
        ({"validation": {**VALIDATION, "every": 0}}, ["validation.every must be at least 1"]),
        ({"validation": {"data": {"source": "sandbox"}, "metric": "critique_f1"}}, ["validation.scorer is not set"]),
        ({"process": {"class_path": "metarm.MetaReward"}}, ["metarm.MetaReward needs init_args.model"]),
        ({"process": "critik"}, ["Did you mean 'critique'?"]),
        ({"model__name": "no-such/folder/here"}, ["no-such/folder/here does not exist"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(value),
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(tmp_path, capsys, changes, parts):
    message = refused("train", tmp_path / "run", capsys, **changes)
    for part in parts:
        assert part in message
    assert "Traceback" not in message


def test_the_advice_on_accumulation_works():
    settings = GRPOSettings(per_device_train_batch_size=6, num_generations=8)
    with pytest.raises(UserError, match="multiple of 4"):
        settings.check_batch(1, "random", 99)
    GRPOSettings(per_device_train_batch_size=6, num_generations=8, gradient_accumulation_steps=4).check_batch(
        1, "given", 9
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"order": "both", "sft__per_device_train_batch_size": 3}, "needs an even number"),
        ({"sft__verdict_weight": 0}, "sft.verdict_weight must be positive"),
        ({"sft__max_length": 3}, "no row fits into sft.max_length = 3"),
        ({"sft__extra": {"warmup_stepz": 3}}, "TrainingArguments has no argument 'warmup_stepz'"),
    ],
)
def test_a_cold_start_that_cannot_work_is_refused(tmp_path, capsys, changes, part):
    assert part in refused("cold-start", tmp_path / "run", capsys, **changes)


@pytest.mark.parametrize("verb", CONFIGS)
def test_a_dry_run_loads_no_weights_and_writes_nothing(tmp_path, capsys, monkeypatch, verb):
    for module in (train_module, cold_start_module):
        monkeypatch.setattr(module, "make_trainer", lambda *_, **__: pytest.fail("a trainer was made"))
    monkeypatch.setattr("nlhf.models.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    run(verb, tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists()
    shown = capsys.readouterr().err
    assert "152,032" in shown  # parameters
    assert "7 steps of" in shown


# ------------------------------------------------------------------------------------------------------------- warnings


def warned(watch: Watch, caplog, rows_of_logs: list[dict]) -> list[str]:
    caplog.clear()
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    with caplog.at_level(logging.WARNING):
        for logs in rows_of_logs:
            watch.on_log(None, state, None, logs=logs)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("bad", "good", "part"),
    [
        ({"completions/clipped_ratio": 0.5}, {"completions/clipped_ratio": 0.2}, "max_completion_length"),
        ({"frac_reward_zero_std": 0.9}, {"frac_reward_zero_std": 0.8}, "they teach nothing"),
    ],
)
def test_a_warning_comes_once_in_so_many_rows(caplog, bad, good, part):
    assert warned(Watch(), caplog, [good] * 5) == []
    messages = warned(Watch(patience=25), caplog, [bad] * 60)
    assert len(messages) == 3
    assert all(part in message for message in messages)


def test_a_collapse_of_the_format_is_noticed(caplog):
    assert warned(Watch(), caplog, [{"format_rate": r} for r in (0.1, 0.2, 0.9, 0.5)]) == []
    [message] = warned(Watch(), caplog, [{"format_rate": r} for r in (0.9, 0.4, 0.3)])
    assert "only 40% of the replies are well-formed, down from 90%" in message


def test_warnings_of_a_real_run_reach_standard_error(tmp_path, capsys):
    run("train", tmp_path / "run", grpo__max_steps=2, grpo__max_completion_length=2)
    shown = capsys.readouterr().err
    assert shown.count("WARNING truncation: 100% of the replies hit the token limit") == 1
    assert shown.count("WARNING zero variance") == 1


@pytest.mark.parametrize("verb", CONFIGS)
def test_libraries_are_quiet(tmp_path, capfd, verb):
    run(verb, tmp_path / "run", validation=VALIDATION, **{f"{SETTINGS[verb]}__max_steps": 2})
    shown = capfd.readouterr()
    assert shown.out == ""
    for noise in ("pin_memory", "gradient_checkpointing", "Writing model shards", "it/s]", "{'loss'"):
        assert noise not in shown.err
    assert "INFO step 2/2: loss" in shown.err


@pytest.mark.parametrize("verb", CONFIGS)
def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, verb):
    with pytest.raises(FloatingPointError, match=r"step \d: (loss|grad_norm) is (nan|inf)"):
        run(verb, tmp_path / "run", **{f"{SETTINGS[verb]}__learning_rate": 1e25})
    assert not (tmp_path / "run" / "final").exists()


# ------------------------------------------------------------------------------------------------------------ libraries


def test_trl_still_has_what_we_rely_on():
    from transformers import Trainer
    from trl import GRPOTrainer
    from trl.trainer.utils import RepeatSampler

    assert list(inspect.signature(GRPOTrainer._get_train_sampler).parameters) == ["self", "dataset"]
    assert list(inspect.signature(RepeatSampler.__init__).parameters) == [
        "self", "data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle", "seed",
    ]  # fmt: skip
    sampler = RepeatSampler(range(4), 2, batch_size=2, repeat_count=1, shuffle=False)
    assert vars(sampler).keys() >= {"data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle"}
    assert list(sampler) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(inspect.signature(GRPOTrainer._log_metric).parameters) == ["self", "name", "value"]
    assert "log_metric" in inspect.getsource(GRPOTrainer._calculate_rewards)
    assert list(inspect.signature(Trainer._get_num_items_in_batch).parameters) == ["self", "batch_samples", "device"]
    assert list(inspect.signature(Trainer._get_train_sampler).parameters) == ["self", "train_dataset"]
    assert list(inspect.signature(Trainer.compute_loss).parameters) == [
        "self", "model", "inputs", "return_outputs", "num_items_in_batch",
    ]  # fmt: skip
    assert Trainer.loss_is_scaled_for_ga is None  # we set it


def test_a_reward_learns_only_while_the_model_trains(tmp_path, monkeypatch):
    """trl asks for rewards in evaluation too, and does not say that it is one."""
    from trl import GRPOTrainer

    learns = type("Learns", (SimpleNamespace,), {"__call__": lambda self, rollouts, log_metric: None})
    reward = learns(training=True, prepare=print, state_dict=dict, load_state_dict=print)
    settings = GRPOSettings(max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=8)
    judge_format, start = get_format("sandbox"), ModelConfig(START)
    pairs = load_pairs(DataConfig("sandbox", limit=1))
    judge_reward = JudgeReward(pairs, judge_format.parse, RewardConfig(), reward)
    trainer = make_trainer(start, load_tokenizer(start), judge_format, pairs, judge_reward, settings, tmp_path, seed=0)
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self: reward.training)
    for training in (False, True):
        trainer.model.train(training)
        assert trainer._calculate_rewards() is training


def test_trl_gives_each_reward_its_columns_state_and_log(tmp_path):
    folder = run("train", tmp_path / "run", grpo__max_steps=1)
    [row] = [r for r in rows(folder, "metrics.jsonl") if "loss" in r]
    assert row.keys() >= {
        "reward", "kl", "format_rate", "verdict_rate", "outcome", "labelled_rate", "process/unscored_wrong_label",
        "process/scorer_failures", "frac_reward_zero_std", "completions/clipped_ratio", "grad_norm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "gpu", "expected"),
    [
        ("auto", False, ("float32", False)),
        ("auto", True, ("float32", True)),
        ("bfloat16", True, ("bfloat16", True)),
        ("float32", True, ("float32", False)),
    ],
)
def test_trained_weights_are_kept_in_full_precision(monkeypatch, dtype, gpu, expected):
    """A step of 1e-6 is lost on a weight in bfloat16, which has 8 bits of precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert training_dtype(ModelConfig(START, dtype=dtype)) == expected
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 1e-6 == weight


def test_a_random_byte_level_model_trains_on_a_file(tmp_path, tiny_model):
    """Nothing is special about the sandbox: RM-NLHF's own prompt, JSON lines, another architecture."""
    path = tmp_path / "pairs.jsonl"
    critique = HumanCritique(weaknesses_b="It is too short.")
    pairs = [
        Pair(
            id=str(i),
            context=[Turn("user", f"q{i}")],
            response_a=f"a{i}",
            response_b="b",
            label="A",
            critiques=[critique],
        )
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(p.to_dict()) + "\n" for p in pairs))
    folder = run(
        "train",
        tmp_path / "run",
        model={"name": tiny_model},
        format="rm_nlhf",
        data=[{"source": "jsonl", "path": str(path)}],
        process={"class_path": "critique", "init_args": {"scorer": {"class_path": "lexical"}}},
        grpo__max_steps=1,
        grpo__max_prompt_length=4096,
        grpo__max_completion_length=8,
    )
    assert (folder / "final" / "model.safetensors").is_file()


# ---------------------------------------------------------------------------------------------------------- distributed

LAUNCHED = """
import hashlib, os, sys
from nlhf import cold_start, train
from nlhf.cli import main

def with_hashes(run_trainer):
    def run(trainer, folder, resume):
        run_trainer(trainer, folder, resume)
        digest = hashlib.sha256()
        for _, value in sorted(trainer.accelerator.unwrap_model(trainer.model).state_dict().items()):
            digest.update(value.numpy().tobytes())
        (folder / f"rank-{os.environ['RANK']}").write_text(digest.hexdigest())
    return run

for module in (train, cold_start):
    module.run_trainer = with_hashes(module.run_trainer)
sys.exit(main(sys.argv[1:]))
"""


def launch(tmp_path: Path, verb: str, out: Path, **changes) -> subprocess.CompletedProcess:
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    config = write_config(tmp_path / f"{out.name}.yaml", CONFIGS[verb], **changes)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(ROOT / "experiments" / "accelerate" / "cpu2.yaml"), "--main_process_port", "0"]
    command += [str(script), verb, "--config", config, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
class TestTwoProcesses:
    def test_cold_start_equals_one_process_on_the_joined_batch(self, tmp_path):
        changes = {"sft__max_steps": 4, "sft__verdict_weight": 3.0, "validation": VALIDATION}
        changes["data"] = [{"source": "sandbox", "split": "cold_start", "limit": 8}]
        one = run("cold-start", tmp_path / "one", sft__per_device_train_batch_size=4, **changes)
        done = launch(tmp_path, "cold-start", tmp_path / "two", sft__per_device_train_batch_size=2, **changes)
        assert done.returncode == 0, done.stderr[-3000:]
        two = tmp_path / "two"
        assert (two / "rank-0").read_text() == (two / "rank-1").read_text()
        assert losses(two) == pytest.approx(losses(one), rel=1e-5)
        assert_close_weights(one, two, 1e-2)
        validated = [[row for row in rows(f, "metrics.jsonl") if "validation/accuracy" in row] for f in (one, two)]
        assert [row["step"] for row in validated[1]] == [0, 2, 4]  # each once
        assert [row["validation/accuracy"] for row in validated[1]] == [
            row["validation/accuracy"] for row in validated[0]
        ]

    def test_grpo_runs_resumes_and_both_agree(self, tmp_path):
        changes = {"grpo__per_device_train_batch_size": 4, "grpo__max_steps": 5, "validation": VALIDATION}
        done = launch(tmp_path, "train", tmp_path / "two", **changes)
        assert done.returncode == 0, done.stderr[-3000:]
        two = tmp_path / "two"
        assert (two / "rank-0").read_text() == (two / "rank-1").read_text()
        found = rows(two, "metrics.jsonl")
        assert [row["step"] for row in found if "validation/accuracy" in row] == [0, 2, 4, 5]
        assert [row["step"] for row in found if "loss" in row] == [1, 2, 3, 4, 5]
        # A group of four lies on one process; the rewards of both are in the figure, the first writes its samples.
        assert len(rows(two, "samples.jsonl")) == 5 * 4
        for number in (4,):  # inside the second epoch
            resumed = interrupted(two, tmp_path / "resumed", number)
            done = launch(tmp_path, "train", resumed, resume=True, **changes)
            assert done.returncode == 0, done.stderr[-3000:]
            assert rows(resumed, "metrics.jsonl") == found
            assert_same_weights(resumed / "final", two / "final")

    def test_a_refusal_ends_both(self, tmp_path):
        done = launch(tmp_path, "train", tmp_path / "two", grpo__num_generations=3)
        assert done.returncode != 0
        assert "cannot be divided into groups" in done.stderr
        assert not (tmp_path / "two").exists()


def test_a_warm_up_that_the_schedule_ignores_is_refused():
    """transformers' schedule constant drops warmup_steps without a word; it cost us a set of experiments."""
    with pytest.raises(UserError, match="constant_with_warmup"):
        GRPOSettings(lr_scheduler_type="constant", warmup_steps=10)
    assert GRPOSettings(lr_scheduler_type="constant_with_warmup", warmup_steps=10).warmup_steps == 10


def test_pairs_without_a_critique_are_no_lesson_in_writing_one(caplog):
    """A label-only pair would teach an empty critique, which the format rule then punishes."""
    with_critique = Pair("1", [Turn("user", "q")], "x", "y", "A", critiques=[HumanCritique(text="better")])
    without = Pair("2", [Turn("user", "q")], "x", "y", "A")
    sft = cold_start_module.ColdStartConfig()
    assert cold_start_module._with_target([with_critique, without], sft) == [with_critique]
    assert "1 of 2 rows without a human critique" in caplog.text
    verdicts = cold_start_module.ColdStartConfig(target="verdict")
    assert cold_start_module._with_target([with_critique, without], verdicts) == [with_critique, without]
    with pytest.raises(UserError, match="none of the 1 pairs has a human critique"):
        cold_start_module._with_target([without], sft)


def test_a_kill_between_the_two_renames_loses_no_best_model(tmp_path):
    (tmp_path / ".best.old").mkdir()
    put_back(tmp_path / "best")
    assert (tmp_path / "best").is_dir()
    (tmp_path / ".best.old").mkdir()  # with a whole folder in place there is nothing to undo
    put_back(tmp_path / "best")
    assert (tmp_path / ".best.old").is_dir()


class Saves:
    """A trainer whose model is a file."""

    def __init__(self):
        self.accelerator = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)

    def save_model(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)


@pytest.mark.parametrize(
    ("least", "values", "kept"),
    [
        (False, [0.5, 0.4, None, 0.6, 0.6], [1, 1, 1, 4, 4]),
        (True, [0.5, 0.6, None, 0.4, 0.4], [1, 1, 1, 4, 4]),
        (True, [None, 0.0], [None, 2]),
    ],
    ids=["greatest", "least", "no figure at first"],
)
def test_the_best_model_is_kept_and_the_earlier_of_equals(tmp_path, least, values, kept):
    folder = tmp_path / "best"
    for step, (value, expected) in enumerate(zip(values, kept, strict=True), start=1):
        if folder.exists():
            folder.rename(tmp_path / ".best.old")  # killed between the two renames: that model still counts
        keep_best(Saves(), folder, {"step": step, "mse": value}, "mse", least)
        found = json.loads((folder / "validation.json").read_text())["step"] if folder.exists() else None
        assert found == expected


def test_a_scorer_in_the_place_of_a_process_reward_is_refused(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--config", "experiments/sandbox/rm_nlhf.yaml", "--model.name", "package:nlhf", "--out", str(out)]
    assert main(["train", *options, "--process", "exact"]) == 2
    assert "exact is no process reward; a scorer belongs inside one" in capsys.readouterr().err
    assert not out.exists()


def test_a_negative_kl_weight_is_refused():
    with pytest.raises(UserError, match=r"grpo\.beta must not be negative"):
        GRPOSettings(beta=-0.1)
