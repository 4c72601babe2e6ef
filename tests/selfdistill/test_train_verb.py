"""`selfdistill train` through the command line, on the shipped 152-thousand-parameter judge."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nlhf.cli import _load, call, make_parser
from nlhf.files import read_jsonl
from nlhf.formats import get_format
from nlhf.models import resolve
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.suite import read_yaml, set_key
from selfdistill import train as train_module
from selfdistill.__main__ import VERBS, main
from selfdistill.teacher import slot_of, teacher_messages
from selfdistill.trainer import TEACHER_FILE

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments"
START = "package:nlhf"
TARGET = "selfdistill.train:train"
VALIDATION = {"data": {"source": "sandbox", "split": "validation", "limit": 4}, "every": 2, "scorer": "exact"}

# Six pairs, two prompts a step: an epoch has three steps.
CONFIG = {
    "model": {"name": START},
    "data": [{"source": "sandbox", "limit": 6}],
    "format": "sandbox",
    "context": "sandbox_note",
    "sdrm": {
        "learning_rate": 1e-3,
        "max_steps": 7,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_prompt_length": 64,
        "max_teacher_prompt_length": 96,
        "max_completion_length": 26,
        "support_size": 8,
        "teacher_rate": 0.1,
        "profile_prompts": 2,
        "save_steps": 1,
        "save_total_limit": 20,
    },
    "samples": {"every": 1, "count": 99},
    "seed": 3,
}
# Clocks, and what is counted anew in every session.
CLOCKS = {"seconds", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"}


def write_config(path: Path, **changes) -> str:
    """The YAML with changes as ``sdrm__max_steps=2``; None takes a key out."""
    values = json.loads(json.dumps(CONFIG))
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


def run(out: Path, **changes) -> Path:
    config = write_config(out.with_suffix(".yaml"), **changes)
    assert main(["train", "--config", config, "--out", str(out)]) == 0
    return out


def refused(out: Path, capsys, **changes) -> str:
    config = write_config(out.with_suffix(".yaml"), **changes)
    assert main(["train", "--config", config, "--out", str(out)]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def rows(folder: Path, name: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for _, row in read_jsonl(folder / name)]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder, "metrics.jsonl") if "loss" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def teacher(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / TEACHER_FILE, weights_only=True)["weights"]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One uninterrupted run, with validation."""
    return run(tmp_path_factory.mktemp("runs") / "whole", validation=VALIDATION)


# ---------------------------------------------------------------------------------------------------------- end to end


def test_a_run_writes_all_its_files(whole):
    names = {p.name for p in whole.iterdir()}
    assert {
        "config.yaml",
        "environment.json",
        "manifest.json",
        "metrics.jsonl",
        "samples.jsonl",
        "profile.json",
    } <= names
    assert {"checkpoint-7", "best", "final"} <= names
    manifest = json.loads((whole / "manifest.json").read_text())
    assert (manifest["prompts"], manifest["too_long"], manifest["feedback"]) == (6, 0, {})
    before, after = weights(resolve(START)), weights(whole / "final")
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_metrics_tell_what_is_not_rewarded(whole):
    found = [row for row in rows(whole, "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in found] == list(range(1, 8))
    for row in found:
        assert row.keys() >= {
            "accuracy", "verdict_rate", "format_rate", "feedback_rate", "entropy", "teacher_entropy", "entropy_gap",
            "kl", "kept/share", "kept/kl_share", "completions/mean_length", "completions/clipped_ratio", "grad_norm",
        }  # fmt: skip
        assert 0.3 <= row["kept/share"] < 0.4
        assert row["feedback_rate"] == 1
    validated = [row["step"] for row in rows(whole, "metrics.jsonl") if "validation/accuracy" in row]
    assert validated == [0, 2, 4, 6, 7]


def test_samples_show_the_feedback_and_no_reward(whole):
    samples = rows(whole, "samples.jsonl")
    assert len(samples) == 7 * 8
    assert not {"reward", "bonus"} & set(samples[0])
    by_step = {step: [s for s in samples if s["step"] == step] for step in range(7)}
    logged = {row["step"]: row["accuracy"] for row in rows(whole, "metrics.jsonl") if "accuracy" in row}
    for step, drawn in by_step.items():
        assert logged[step + 1] == pytest.approx(sum(s["verdict"] == s["label"] for s in drawn) / 8)
        assert len({s["pair_id"] for s in drawn}) == 2
    # Steps 3 to 5 are the second epoch: every pair in the other order.
    shown = [{s["pair_id"]: s["response_a"] for t in steps for s in by_step[t]} for steps in ((0, 1, 2), (3, 4, 5))]
    assert shown[0].keys() == shown[1].keys()
    assert all(shown[0][name] != shown[1][name] for name in shown[0])


def test_the_profile_is_printed_before_training_and_changes_nothing(whole, tmp_path, capsys):
    other = run(tmp_path / "run", sdrm__profile_prompts=5, sdrm__max_steps=2)
    printed = capsys.readouterr().err
    assert printed.index("Divergence KL by entropy gap") < printed.index("step 1/2")
    assert json.loads((other / "profile.json").read_text())["rollouts"] == 20
    assert json.loads((whole / "profile.json").read_text())["rollouts"] == 8
    assert_same(weights(other / "final"), weights(whole / "checkpoint-2"))


def test_a_mask_that_keeps_too_little_is_warned_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("selfdistill.profile.LEAST_SHARE", 0.5)  # of the few rollouts here mask70 keeps about 7 %
    run(tmp_path / "run", sdrm__max_steps=1)
    printed = capsys.readouterr().err
    assert "WARNING the positions kept" in printed
    assert "Set rho to 0" in printed


def test_libraries_are_quiet(tmp_path, capfd):
    run(tmp_path / "run", sdrm__max_steps=2)
    shown = capfd.readouterr()
    assert shown.out == ""
    for noise in ("pin_memory", "gradient_checkpointing", "Writing model shards", "it/s]", "{'loss'"):
        assert noise not in shown.err


def test_the_shuffled_control_gives_each_pair_the_words_of_another(whole, tmp_path):
    folder = run(tmp_path / "run", sdrm__max_steps=3, shuffled=True)
    own, borrowed = (
        {s["pair_id"]: s["feedback"] for s in rows(f, "samples.jsonl") if s["step"] < 3} for f in (whole, folder)
    )
    assert own.keys() == borrowed.keys()
    assert sum(own[name] != borrowed[name] for name in own) >= 4


# ------------------------------------------------------------------------------------------------------------ resuming


def interrupted(source: Path, target: Path, step: int) -> Path:
    """A copy of a finished run as a kill just after the checkpoint of ``step`` would leave it."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "final")
    for checkpoint in target.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    return target


@pytest.mark.parametrize("step", [2, 3, 5], ids=["inside the first epoch", "on its boundary", "inside the second"])
def test_a_resumed_run_equals_an_uninterrupted_one(whole, tmp_path, step):
    folder = interrupted(whole, tmp_path / "run", step)
    run(folder, validation=VALIDATION, resume=True)
    assert_same(weights(folder / "final"), weights(whole / "final"))
    assert_same(teacher(folder / "checkpoint-7"), teacher(whole / "checkpoint-7"))
    assert rows(folder, "metrics.jsonl") == rows(whole, "metrics.jsonl")
    assert rows(folder, "samples.jsonl") == rows(whole, "samples.jsonl")


def test_the_teacher_of_a_checkpoint_is_neither_the_start_nor_the_student(whole):
    """The public code begins anew with the base model when it resumes."""
    averages, start, student = teacher(whole / "checkpoint-5"), weights(resolve(START)), weights(whole / "checkpoint-5")
    assert all(value.dtype == torch.float32 for value in averages.values())
    for name, value in averages.items():
        assert not torch.equal(value, start[name]), name
        assert not torch.equal(value, student[name]), name


def test_a_frozen_teacher_is_not_saved_and_is_the_start_again_when_resumed(tmp_path):
    changes = {"sdrm__teacher": "frozen", "sdrm__max_steps": 4}
    one = run(tmp_path / "one", **changes)
    assert not (one / "checkpoint-2" / TEACHER_FILE).exists()
    two = interrupted(one, tmp_path / "two", 2)
    run(two, resume=True, **changes)
    assert_same(weights(one / "final"), weights(two / "final"))
    assert rows(one, "metrics.jsonl") == rows(two, "metrics.jsonl")


# --------------------------------------------------------------------------------------------------------- invariances


@pytest.mark.parametrize("normalizer", ["kept_tokens", "per_rollout"])
def test_accumulation_takes_the_same_steps(tmp_path, normalizer):
    changes = {"sdrm__max_steps": 3, "sdrm__normalizer": normalizer}
    one = run(tmp_path / "one", **changes)
    several = run(
        tmp_path / "several",
        sdrm__per_device_train_batch_size=1,
        sdrm__gradient_accumulation_steps=8,
        **changes,
    )
    assert rows(one, "samples.jsonl") == rows(several, "samples.jsonl")
    assert losses(one) == pytest.approx(losses(several), rel=1e-3)
    for figure in ("kl", "kept/kl_share", "teacher_entropy"):
        a, b = ([row[figure] for row in rows(f, "metrics.jsonl") if "loss" in row] for f in (one, several))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6)
    a, b = weights(one / "final"), weights(several / "final")
    for name in a:
        assert (a[name] - b[name]).abs().max() < 1e-4, name


# Rollouts that hang on the prompt alone: two processes draw what one would have drawn.
LAUNCHED = """
import random, sys
from selfdistill.__main__ import main
from selfdistill.trainer import SDRMTrainer

def generate(self, prompt_ids, images, multimodal_fields):
    replies = []
    for ids in prompt_ids:
        rng = random.Random(str(ids))
        replies.append([rng.randrange(4, 40) for _ in range(rng.randint(3, 20))] + [self.eos_token_ids[0]])
    return replies

SDRMTrainer._generate_single_turn = generate
sys.exit(main(sys.argv[1:]))
"""


def launch(tmp_path: Path, out: Path, processes: int, **changes) -> Path:
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    config = write_config(tmp_path / f"{out.name}.yaml", **changes)
    command = [sys.executable]
    if processes == 2:
        command += ["-m", "accelerate.commands.launch", "--config_file"]
        command += [str(EXPERIMENTS / "accelerate" / "cpu2.yaml"), "--main_process_port", "0"]
    command += [str(script), "train", "--config", config, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", ["kept_tokens", "per_rollout"])
def test_two_processes_equal_one_on_the_joined_batch(tmp_path, normalizer):
    """Two of the six pairs have no feedback, so that a process may have none in a step and its divisor differs."""
    critiques = [[HumanCritique(strengths_a="tone")], []]
    pairs = [
        Pair(f"p{i}", [Turn("user", "refund complaint")], response_a, "rude curt", "A", critiques=critiques[i % 3 == 0])
        for i, response_a in enumerate(("polite", "warm", "patient", "gracious", "polite warm", "warm patient"))
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(p.to_dict()) + "\n" for p in pairs))
    changes = {
        "data": [{"source": "jsonl", "path": str(path)}],
        "sdrm__max_steps": 5,
        "sdrm__num_generations": 2,
        "sdrm__normalizer": normalizer,
        "validation": VALIDATION,
    }
    one = launch(tmp_path, tmp_path / "one", 1, sdrm__per_device_train_batch_size=4, **changes)
    two = launch(tmp_path, tmp_path / "two", 2, sdrm__per_device_train_batch_size=2, **changes)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    for figure in ("kl", "teacher_entropy", "kept/kl_share", "accuracy", "verdict_rate", "feedback_rate"):
        a, b = ([row.get(figure) for row in rows(f, "metrics.jsonl") if "loss" in row] for f in (one, two))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6), figure
    for kind, load in (("final", weights), ("checkpoint-5", teacher)):
        a, b = load(one / kind), load(two / kind)
        for name in a:
            assert (a[name] - b[name]).abs().max() < 1e-4, name


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"sdrm__num_generations": 3}, "Either set num_generations to one of [1, 2, 4, 8]"),
        ({"sdrm__rho": 1.5}, "must lie in [0, 1)"),
        ({"sdrm__selector": "lowest"}, "low_dh"),
        ({"context": "rationales"}, "Did you mean 'rationale'?"),
        ({"context": "gold_verdict", "shuffled": True}, "shuffled exchanges critiques, but context gold_verdict"),
        ({"feedback_after": "x", "feedback_before": "y"}, "feedback_after or feedback_before, not both"),
        ({"feedback_after": "nowhere"}, "has no 'nowhere'"),
        ({"context": "rubric"}, "none of the 6 training pairs has feedback"),
        ({"sdrm__extra": {"temperatur": 1}}, "no argument 'temperatur'"),
        ({"sdrm__extra": {"beta": 1.0}}, "sdrm.divergence"),
        ({"sdrm__extra": {"save_only_model": True}}, "would leave out of a checkpoint"),  # the teacher
        ({"sdrm__extra": {"eval_strategy": "steps"}}, "sdrm.extra: 'eval_strategy' has no use"),
        ({"sdrm__extra": {"bf16": "maybe"}}, "sdrm.extra: 'bf16' must be bool | None, got 'maybe'"),
        ({"sdrm__extra": {"top_k": "all"}}, "sdrm.extra: 'top_k' must be int, got 'all'"),
        ({"sdrm__extra": {"chat_template_kwargs": 3}}, "sdrm.extra: 'chat_template_kwargs' must be dict"),
        ({"sdrm__extra": {"chat_template_kwargs": {"tokenize": False}}}, "'tokenize' is no variable"),
        ({"sdrm__extra": {"optim": "sgdd"}}, "sdrm: sgdd is not a valid OptimizerNames"),
        ({"sdrm__extra": {"adam_beta1": 2.0}}, "sdrm: Invalid beta parameter"),
        ({"sdrm__lr_scheduler_type": "cosin"}, "sdrm: cosin is not a valid SchedulerType"),
        ({"sdrm__top_p": 2.0}, "sdrm.top_p must lie in (0, 1]"),
        ({"sdrm__max_prompt_length": 0}, "sdrm.max_prompt_length must be at least 1"),
        ({"sdrm__max_completion_length": 0}, "sdrm.max_completion_length must be at least 1"),
        ({"sdrm__max_completion_length": 128}, "leaves no room for a prompt in the model's context of 128"),
        ({"sdrm__max_steps": 10**20}, "max_steps must be at least 1"),
        ({"format": "rewardbench2_ratings", "feedback_after": "[User Question]"}, "shows one response and rates it"),
        ({"sdrm__per_device_train_batch_size": 64}, "need 16 prompts, but there are only 6"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, capsys, changes, part):
    assert part in refused(tmp_path / "run", capsys, **changes)


def test_zero_3_is_refused_with_what_works(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert "experiments/accelerate/fsdp2.yaml" in refused(tmp_path / "run", capsys)


def test_another_configuration_is_not_resumed(whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "run")
    config = write_config(tmp_path / "c.yaml", validation=VALIDATION, sdrm__rho=0.5, resume=True)
    assert main(["train", "--config", config, "--out", str(folder)]) == 2
    assert "sdrm.rho: 0.7 -> 0.5" in capsys.readouterr().err


def test_help_and_unknown_verbs_load_no_library():
    code = "import sys; from selfdistill.__main__ import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.rstrip().endswith("False")
    assert "selfdistill VERB" in done.stdout


# --------------------------------------------------------------------------------------------------------- experiments

YAMLS = sorted(p for p in EXPERIMENTS.glob("*/*.yaml") if "sdrm" in read_yaml(str(p)))
GPUS = {"helpsteer3_qwen3_4b": 8, "helpsteer3_qwen3_30b_a3b": 16, "helpsteer3_qwen3_32b": 32}


def relative(path: Path) -> str:
    return str(path.relative_to(EXPERIMENTS))


def test_yamls_are_found():
    folders = {p.parent.name for p in YAMLS}
    assert folders == {"sandbox", "comve_smollm2", *GPUS}


@pytest.mark.parametrize("path", YAMLS, ids=relative)
def test_every_key_is_accepted(path, tmp_path):
    values = {"out": str(tmp_path), **read_yaml(str(path))}
    if values["model"]["name"].startswith("runs/"):  # made by another experiment
        set_key(values, "model.name", "random:qwen3-tiny", str(path))
    make_parser(_load(VERBS["train"][0]), "selfdistill train").parse_object(values)


def difference(folder: str, a: str, b: str) -> set[str]:
    def flat(name: str) -> dict:
        values = read_yaml(str(EXPERIMENTS / folder / f"{name}.yaml"))
        return {**{k: v for k, v in values.items() if k != "sdrm"}, **values["sdrm"]}

    one, two = flat(a), flat(b)
    return {k for k in one.keys() | two.keys() if one.get(k) != two.get(k)}


@pytest.mark.parametrize(
    ("folder", "a", "b", "keys"),
    [
        *((folder, "sdrm", "sdrm_mask70", {"rho"}) for folder in GPUS),
        ("comve_smollm2", "sdrm", "sdrm_mask70", {"rho", "selector"}),
        ("sandbox", "sdrm", "sdrm_mask70", {"rho", "selector"}),
        ("sandbox", "sdrm_mask70", "sdrm_mask70_high_dh", {"selector"}),
        ("sandbox", "sdrm_mask70", "sdrm_mask70_random", {"selector"}),
        ("sandbox", "sdrm", "sdrm_shuffled", {"shuffled"}),
    ],
)
def test_arms_differ_in_what_they_are_about(folder, a, b, keys):
    assert difference(folder, a, b) == keys


@pytest.fixture(scope="module")
def helpsteer3(tmp_path_factory) -> Path:
    """Rows in the published schema of HelpSteer3, enough for a step of the paper's."""
    folder = tmp_path_factory.mktemp("helpsteer3")
    reason = "@Response 1 counts eight legs, Response 2 only six."
    lines = [
        {
            "domain": "general",
            "language": "english",
            "context": [{"role": "user", "content": f"How many legs have {i} spiders?"}],
            "response1": f"They have {8 * i} legs.",
            "response2": f"They have {6 * i} legs.",
            "overall_preference": -2,
            "individual_preference": [{"score": -2, "reasoning": reason, "feedback1": "", "feedback2": ""}],
        }
        for i in range(1, 300)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("arm", ["sdrm", "sdrm_mask70", "dr_grpo"])
@pytest.mark.parametrize("folder", GPUS)
def test_dry_run_of_a_gpu_experiment(folder, arm, helpsteer3, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WORLD_SIZE", str(GPUS[folder]))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    path = str(EXPERIMENTS / folder / f"{arm}.yaml")
    values = read_yaml(path)
    set_key(values, "data.0.path", str(helpsteer3), path)
    set_key(values, "model.tokenizer", "random:qwen3-tiny", path)
    target = "nlhf.train:train" if arm == "dr_grpo" else TARGET
    call(target, "train", {**values, "out": str(tmp_path / "run"), "dry_run": True})
    rollouts = 256 * (8 if arm == "dr_grpo" else 4)
    printed = capsys.readouterr().err
    assert f"steps of {rollouts} sequences on {GPUS[folder]} process(es)" in printed
    assert not (tmp_path / "run").exists()
    settings = values["grpo" if arm == "dr_grpo" else "sdrm"]
    assert settings["extra"]["vllm_max_model_length"] == 4096 + 8192
    assert GPUS[folder] % settings["extra"]["vllm_tensor_parallel_size"] == 0


def test_dr_grpo_is_the_papers(monkeypatch):
    for path in EXPERIMENTS.glob("*/dr_grpo.yaml"):
        grpo = read_yaml(str(path))["grpo"]
        assert (grpo["loss_type"], grpo["scale_rewards"], grpo["beta"]) == ("dr_grpo", "none", 0.0)
        assert (grpo["epsilon"], grpo["extra"]["epsilon_high"]) == (0.2, 0.28)


def test_the_place_in_the_prompt_of_comve():
    values = read_yaml(str(EXPERIMENTS / "comve_smollm2" / "sdrm.yaml"))
    judge_format = get_format("rm_nlhf", str(ROOT / values["prompt_file"]))
    pair = Pair("p", [Turn("user", "Which is sensible?")], "He ate rice.", "He ate a car.", "A")
    slot = slot_of(judge_format, before=values["feedback_before"])
    [student], [shown] = judge_format.render(pair), teacher_messages(judge_format, pair, "Nobody eats cars.", slot)
    assert shown["content"].replace("\n\nNobody eats cars.", "") == student["content"]


def test_a_dry_run_loads_no_weights_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_module, "make_trainer", lambda *_, **__: pytest.fail("a trainer was made"))
    run(tmp_path / "run", dry_run=True)
    assert not (tmp_path / "run").exists()
    assert "7 steps of 8 sequences" in capsys.readouterr().err
