"""What benchmarks of whole steps measure and print: paired within a round, on the same rollouts."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


def benchmark(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grpo_step():
    return benchmark("grpo_step")


@pytest.fixture(scope="module")
def training():
    return benchmark("self_distillation_training")


RESULT = {
    "parameters": 2_000_000,
    "dtype": "float32",
    "rollouts": 8,
    "rounds": 3,
    "threads": 1,
    "metarms": {"MetaRM, offline": 1_000_000, "MetaRM, online": 1_000_000},
    "counts": {
        "critiques, exact": {},
        "MetaRM, offline": {"metarm/labelled": [2.0, 3.0, 2.0], "metarm/scored": [1.0, 4.0, 4.0]},
        "MetaRM, online": {},
    },
    "step": {
        "a rule": [1.0, 2.0, 4.0],
        "critiques, exact": [1.0, 2.0, 4.0],
        "MetaRM, offline": [1.05, 2.4, 4.2],
        "MetaRM, online": [1.3, 2.6, 4.4],
    },
    "reward": {
        "a rule": [0.0, 0.0, 0.0],
        "critiques, exact": [0.01, 0.04, 0.04],
        "MetaRM, offline": [0.04, 0.04, 0.04],
        "MetaRM, online": [0.2, 0.4, 0.8],
    },
    "floor": {"MetaRM, offline": [0.02, 0.04, 0.08], "MetaRM, online": [0.1, 0.2, 0.4]},
}


def test_ratios_are_paired_within_a_round(grpo_step):
    """Offline adds 5, 20 and 5 % to rounds that differ fourfold: median 5 %, not the ratio of the medians, 20 %."""
    lines = grpo_step.table(RESULT).splitlines()
    rows = {cells[1].strip(): [c.strip() for c in cells[2:-1]] for line in lines[2:] if (cells := line.split("|"))}
    assert rows["a rule"] == ["2.00", "-", "0.0 % [0.0, 0.0]", "-", "-"]
    assert rows["critiques, exact"][1] == "0.0 % [0.0, 0.0]"
    assert rows["MetaRM, offline"] == ["2.40", "5.0 % [5.0, 12.5]", "2.0 % [1.5, 3.0]", "2.0 %", "meets 10 %"]
    assert rows["MetaRM, online"] == ["2.60", "30.0 % [20.0, 30.0]", "20.0 % [20.0, 20.0]", "10.0 %", "misses 25 %"]


def test_the_heading_says_what_was_measured(grpo_step):
    assert grpo_step.heading("tiny", RESULT) == (
        "**tiny**: judge of 2.0 million parameters in float32, 8 rollouts a step (median 2 labelled and 4 scored), "
        "3 rounds, 1 thread; MetaRM of 1.0 million (offline), 1.0 million (online)."
    )


def test_every_round_has_the_same_share_of_labelled_pairs(grpo_step):
    pairs = [SimpleNamespace(has_critique=i % 4 == 0) for i in range(20)]
    found = grpo_step.blocks(pairs, prompts=4, share=0.25, rounds=6)
    assert all(sum(pairs[i].has_critique for i in block) == 1 and len(block) == 4 for block in found)
    assert len({i for block in found[:5] for i in block}) == 20  # nothing twice before all are shown


def test_other_rollouts_are_no_comparison(grpo_step):
    watch = grpo_step.Watch({grpo_step.PLAIN: grpo_step.rule, "ours": grpo_step.rule})
    for watch.name, reply in ((grpo_step.PLAIN, "[[A]]"), ("ours", "[[B]]")):
        watch([reply])
    with pytest.raises(AssertionError, match="round 0: contenders saw different rollouts"):
        watch.check_rollouts(1)


def test_a_round_in_the_sandbox(grpo_step, tmp_path, monkeypatch, capsys):
    """All contenders on the same rollouts (else it stops), costs and floors measured, other workloads kept."""
    out = tmp_path / "steps.json"
    out.write_text(json.dumps({"steps": {"other": RESULT}}))
    monkeypatch.setattr(sys, "argv", ["grpo_step.py", "sandbox", "--rounds", "1", "--out", str(out)])
    grpo_step.main()
    found = json.loads(out.read_text())["steps"]
    assert found["other"] == RESULT
    result = found["sandbox"]
    metarm = {"MetaRM, offline", "MetaRM, online"}
    assert set(result["step"]) == {"a rule", "critiques, exact", "critiques, embedding", "critiques, learned", *metarm}
    assert set(result["floor"]) == metarm
    for name in result["step"]:
        assert len(result["step"][name]) == len(result["reward"][name]) == 1
        assert 0 <= result["reward"][name][0] < result["step"][name][0]
    for name in metarm:
        assert 0 < result["floor"][name][0] < result["reward"][name][0]
        assert all(count > 0 for counts in result["counts"][name].values() for count in counts)
    assert "| MetaRM, online |" in capsys.readouterr().out


def test_the_table_in_the_documents_has_both_workloads():
    steps = json.loads((ROOT / "experiments/metarm/grpo_step.json").read_text(encoding="utf-8"))["steps"]
    assert set(steps) == {"sandbox", "comve"}
    assert all(result["rounds"] >= 1 for result in steps.values())


def contender(training, seconds: list[float], peak: list[int], loss: float = 0.5) -> dict:
    """Figures of steps that hold 2 GiB and spend all their time in the backward pass."""
    phases = {phase: seconds if phase == "backward" else [0.0] * len(seconds) for phase in training.PHASES}
    memory = {"peak": [n * 2**30 for n in peak], "above": [(n - 2) * 2**30 for n in peak]}
    return {"cpu": seconds, "seconds": seconds, "loss": [loss] * len(seconds), "phases": phases, **memory}


def test_time_and_memory_of_training_steps_are_paired_within_a_round(training):
    """Ours takes 0.9, 0.8 and 0.9 of trl's in rounds that differ fourfold: 0.90, not the 0.80 of the medians."""
    ours = contender(training, [0.9, 1.6, 3.6], [3, 3, 3])
    result = {"contenders": {training.TRL: contender(training, [1.0, 2.0, 4.0], [4, 4, 6]), "ours, rho 0": ours}}
    cells = [line.strip("| ").split(" | ") for line in training._comparison(result).splitlines()[2:]]
    assert cells[0] == [training.TRL, "0.5000", "2.00", "-", "2.00", "-", "4.00", "-", "2.00", "-"]
    assert cells[1][:4] == ["ours, rho 0", "0.5000", "1.60", "0.90 [0.85, 0.90]"]
    assert cells[1][6:] == ["3.00", "0.75 [0.62, 0.75]", "1.00", "0.50 [0.38, 0.50]"]
    times = training._breakdown(result).splitlines()[3].strip("| ").split(" | ")[1:]
    assert dict(zip(training.PHASES, times, strict=True)) == dict.fromkeys(training.PHASES, "0.00") | {
        "backward": "1.60"
    }


def test_a_phase_within_another_is_taken_out_of_it(training, monkeypatch):
    """The loss takes 1 s before and 2 s after a forward pass of 4 s, and the rest of the step 8 s."""
    now = [0.0]
    monkeypatch.setattr(training.time, "process_time", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    trainer = SimpleNamespace(forward=lambda: spend(4.0))
    trainer.loss = lambda: (spend(1.0), trainer.forward(), spend(2.0))
    phases = training.Phases()
    phases.watch(trainer, "forward", lambda: training.STUDENT)
    phases.watch(trainer, "loss", training.LOSS)
    phases.start()
    trainer.loss()
    spend(8.0)
    found = {phase: seconds for phase, seconds in phases.stop().items() if seconds}
    assert found == {training.STUDENT: 4.0, training.LOSS: 3.0, training.REST: 8.0}


def test_each_prompt_gets_its_own_rollouts_in_whatever_order(training):
    rollouts = [{"prompt": [p], "completion": [10 * p + i]} for p in (1, 2) for i in (0, 1)]
    reply = training._replies(rollouts)
    assert reply([[1], [1], [2], [2]]) == [[10], [11], [20], [21]]
    assert reply([[2], [1], [2], [1]]) == [[20], [10], [21], [11]]


@pytest.mark.parametrize("changed", [None, "prompt_ids", "teacher_prompt_ids", "completion_ids", "completion_mask"])
def test_a_loss_of_other_tokens_is_no_comparison(training, changed):
    import torch

    tensors = {"prompt_ids": [[0, 1]], "prompt_mask": [[0, 1]], "teacher_prompt_ids": [[1, 2]]}
    tensors |= {"teacher_prompt_mask": [[1, 1]], "completion_ids": [[3, 4]], "completion_mask": [[1, 1]]}
    inputs = {name: torch.tensor(value) for name, value in tensors.items()}
    if changed:
        inputs[changed] = inputs[changed] * 0
    trainer = SimpleNamespace(compute_loss=lambda model, inputs: torch.tensor(0.25))
    rollout = {"prompt": [1], "teacher_prompt": [1, 2], "completion": [3, 4]}
    losses = training._check_and_keep_loss(trainer, [rollout])
    if changed:
        with pytest.raises(AssertionError, match="not of the prompts and rollouts"):
            trainer.compute_loss(None, inputs)
    else:
        trainer.compute_loss(None, inputs)
        assert losses == [0.25]


def test_both_trainers_take_the_same_steps_in_the_sandbox(training, tmp_path, monkeypatch):
    """On the same rollouts (else it stops), with the same loss on all positions, every phase counted once."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    config = ["--config", str(ROOT / "experiments/sandbox/sdrm.yaml"), "--model", "package:nlhf", "--top-k", "100"]
    arguments = training._arguments([*config, "--tokens", "12"])
    job = training.Job(SimpleNamespace(**vars(arguments), folder=str(tmp_path)))
    assert 0 < job.draw()["tokens"]["completion"] <= 12
    found = {}
    for role, names in {"trl": [training.TRL] * 2, "ours": [*training.OURS]}.items():
        orders, answers = iter(["", *names]), []

        def wait(orders=orders) -> str:
            try:
                return next(orders)
            except StopIteration:
                raise EOFError from None

        job.train(role, wait, answers.append)
        found |= dict(zip(names, answers[1:], strict=True))
    for step in found.values():
        assert all(step["phases"][phase] > 0 for phase in training.PHASES)
        assert sum(step["phases"].values()) == pytest.approx(step["cpu"])
        assert step["peak"] >= step["held"] > 0
    losses = {name: step["loss"] for name, step in found.items()}
    assert losses["ours, rho 0"] == pytest.approx(losses[training.TRL], rel=1e-3)
    assert losses["ours, rho 0.7"] < 0.5 * losses["ours, rho 0"]  # the mask is on


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_the_training_steps_in_the_documents_are_of_smollm2_and_one_loss(training, checkpointing):
    file = "step_checkpointing.json" if checkpointing else "step.json"
    found = json.loads((ROOT / "experiments/self_distillation" / file).read_text(encoding="utf-8"))
    assert found["vocabulary"] == 49_152
    assert found["checkpointing"] is checkpointing
    assert found["rounds"] >= 2
    steps = found["contenders"]
    assert set(steps) == set(training.CONTENDERS)
    # Not equal: the likeliest tokens are the student's in trl, the teacher's in ours.
    assert steps["ours, rho 0"]["loss"] == pytest.approx(steps[training.TRL]["loss"], rel=0.1)
