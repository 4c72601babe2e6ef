"""The YAMLs of experiments/: every one is accepted as written, and those for GPUs hold together without one."""

import json
from pathlib import Path

import pytest
import yaml

from nlhf.cli import _load, call, make_parser
from nlhf.config import ClassSpec
from nlhf.suite import VERBS, read_yaml, set_key

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
ACCELERATE = sorted((EXPERIMENTS / "accelerate").glob("*.yaml"))
RUNS = sorted(p for p in EXPERIMENTS.glob("*/*.yaml") if p not in ACCELERATE)
# Folder of the experiment: processes, the launcher's sign of sharding, parameters of the model.
GPU = {
    "helpsteer3_qwen3_4b": (8, ("ACCELERATE_USE_FSDP", "true"), 4_022_468_096),
    "helpsteer3_qwen3_32b": (32, ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3"), 32_762_123_264),
}
ARMS = ("outcome_only", "rm_nlhf", "rm_nlhf_metarm_offline", "rm_nlhf_metarm_online")
GPU_TRAINING = [(folder, arm) for folder in GPU for arm in ARMS]
PROMPTS, ROLLOUTS = 256, 8  # of one step, in the paper


def relative(path: Path) -> str:
    return str(path.relative_to(EXPERIMENTS))


def verb_of(path: Path) -> str | None:
    """The verb of this package that a YAML is for, by its launch command."""
    launch = next((verb for verb in (*VERBS, "suite") if f"nlhf {verb} " in path.read_text(encoding="utf-8")), None)
    return launch


OURS = [p for p in RUNS if verb_of(p)]


@pytest.mark.parametrize("path", RUNS, ids=relative)
def test_the_comment_says_purpose_hardware_and_launch_command(path):
    head = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    for word in ("Purpose:", "Hardware:", "Launch:"):
        assert any(word in line for line in head), word


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_its_verb_accepts_every_key(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    verb = verb_of(path)
    target = VERBS.get(verb, "nlhf.suite:suite")
    values = {"out": str(tmp_path), **read_yaml(str(path))}
    model = values.get("model", {}).get("name", "")
    if model.startswith("runs/"):  # made by another experiment
        set_key(values, "model.name", "random:qwen3-tiny", str(path))
    make_parser(_load(target), f"nlhf {verb}").parse_object(values)


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_named_prompt_files_exist(path):
    prompt_file = read_yaml(str(path)).get("prompt_file")
    assert prompt_file is None or (ROOT / prompt_file).is_file()


@pytest.mark.parametrize("experiment", ["sandbox", "comve_smollm2", *GPU])
def test_the_arms_differ_in_the_process_reward_alone(experiment):
    outcome_only = read_yaml(str(EXPERIMENTS / experiment / "outcome_only.yaml"))
    human = read_yaml(str(EXPERIMENTS / experiment / "rm_nlhf.yaml"))
    assert human.pop("process")
    assert human == outcome_only


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def preferences(tmp_path_factory) -> Path:
    """A folder with rows in the published schemas of HelpSteer3 and Tulu 3, enough for one step of the paper's."""
    folder = tmp_path_factory.mktemp("preferences")
    helpsteer3 = [
        {
            "domain": "general",
            "language": "english",
            "context": [{"role": "user", "content": f"How many legs have {i} spiders?"}],
            "response1": f"They have {8 * i} legs.",
            "response2": f"They have {6 * i} legs.",
            "overall_preference": -2,
            "individual_preference": [
                {"score": -2, "reasoning": "@Response 1 counts eight legs a spider.", "feedback1": "", "feedback2": ""}
            ],
        }
        for i in range(1, 201)
    ]
    tulu3 = [
        {
            "chosen": [{"role": "user", "content": f"Name {i}."}, {"role": "assistant", "content": f"{i}"}],
            "rejected": [{"role": "user", "content": f"Name {i}."}, {"role": "assistant", "content": f"{i + 1}"}],
        }
        for i in range(100)
    ]
    for name, rows in (("helpsteer3", helpsteer3), ("tulu3", tulu3)):
        (folder / name).mkdir()
        write_rows(folder / name / "train.jsonl", rows)
    return folder


def gpu_values(folder: str, arm: str, preferences: Path, out: Path) -> dict:
    """A GPU experiment with what a test cannot have replaced: the data, the hub's tokenizer and sentence encoder."""
    path = str(EXPERIMENTS / folder / f"{arm}.yaml")
    values = read_yaml(path)
    set_key(values, "data.0.path", str(preferences / "helpsteer3"), path)
    set_key(values, "data.1.path", str(preferences / "tulu3"), path)
    set_key(values, "model.tokenizer", "random:qwen3-tiny", path)
    if "process" in values:
        set_key(values, "process.init_args.scorer", {"class_path": "lexical"}, path)
        if values["process"]["class_path"] == "metarm.MetaReward":  # made by the cold start
            set_key(values, "process.init_args.model", "random:qwen3-tiny", path)
    return {**values, "out": str(out), "dry_run": True}


@pytest.mark.parametrize(("folder", "arm"), GPU_TRAINING)
def test_dry_run_of_a_gpu_experiment_prints_its_budget(folder, arm, preferences, tmp_path, monkeypatch, capsys):
    processes, (variable, value), parameters = GPU[folder]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv(variable, value)
    values = gpu_values(folder, arm, preferences, tmp_path / "run")
    call(VERBS["train"], "nlhf train", values)
    printed = capsys.readouterr().err
    grpo = values["grpo"]
    tokens = PROMPTS * ROLLOUTS * (grpo["max_prompt_length"] + grpo["max_completion_length"])
    assert f"{parameters:,}" in printed
    assert f"{tokens:,}" in printed
    assert f"steps of {PROMPTS * ROLLOUTS} sequences on {processes} process(es)" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", GPU)
def test_dry_run_of_a_cold_start_of_metarm_prints_its_budget(folder, preferences, tmp_path, monkeypatch, capsys):
    """Eight processes with all weights each; 200 pairs, four rollouts each, three epochs of 512 rows."""
    from metarm.__main__ import VERBS as METARM

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WORLD_SIZE", "8")
    path = str(EXPERIMENTS / folder / "metarm_cold_start.yaml")
    values = read_yaml(path)
    set_key(values, "data.0.path", str(preferences / "helpsteer3"), path)
    set_key(values, "scorer", {"class_path": "lexical"}, path)
    call(METARM["train"][0], "metarm train", {**values, "out": str(tmp_path / "run"), "dry_run": True})
    printed = capsys.readouterr().err
    assert "1,720,574,976" in printed
    assert "steps of 512 sequences on 8 process(es)" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("folder", GPU)
def test_metarm_has_the_papers_settings(folder):
    cold, offline, online, human = (
        read_yaml(str(EXPERIMENTS / folder / f"{name}.yaml"))
        for name in ("metarm_cold_start", "rm_nlhf_metarm_offline", "rm_nlhf_metarm_online", "rm_nlhf")
    )
    sft, judge = cold["sft"], cold["judge"]
    assert sft["per_device_train_batch_size"] * sft["gradient_accumulation_steps"] * 8 == 512
    assert [sft[k] for k in ("learning_rate", "lr_scheduler_type", "num_train_epochs")] == [1e-5, "cosine", 3]
    assert [sft[k] for k in ("warmup_steps", "weight_decay", "validation_share", "max_length")] == [
        0.01, 0.01, 0.05, 10_240,
    ]  # fmt: skip
    assert (judge["samples"], judge["sampling"]["temperature"]) == (4, human["grpo"]["temperature"])
    assert judge["model"]["name"] == human["model"]["name"]
    assert cold["scorer"]["class_path"] == human["process"]["init_args"]["scorer"]["class_path"]
    process = online["process"]["init_args"]
    assert [process.pop(k) for k in ("online", "learning_rate", "max_grad_norm")] == [True, 5e-6, 1.0]
    assert offline["process"]["init_args"].pop("online") is False
    assert online == offline
    for values in (offline, human):
        del values["process"], values["grpo"]["extra"]["vllm_gpu_memory_utilization"]
    assert offline == human


@pytest.mark.parametrize(("folder", "arm"), GPU_TRAINING)
def test_a_step_is_the_papers(folder, arm):
    grpo = read_yaml(str(EXPERIMENTS / folder / f"{arm}.yaml"))["grpo"]
    rollouts = grpo["per_device_train_batch_size"] * grpo["gradient_accumulation_steps"] * GPU[folder][0]
    assert (rollouts, grpo["num_generations"]) == (PROMPTS * ROLLOUTS, ROLLOUTS)
    assert grpo["extra"]["vllm_max_model_length"] == grpo["max_prompt_length"] + grpo["max_completion_length"]
    assert GPU[folder][0] % grpo["extra"]["vllm_tensor_parallel_size"] == 0


@pytest.mark.parametrize("arm", ARMS[1:])
@pytest.mark.parametrize("folder", GPU)
def test_the_scorer_is_what_the_hub_would_load(folder, arm):
    """The dry run replaces the scorer; here its class and arguments are checked, without loading the encoder."""
    import inspect

    values = read_yaml(str(EXPERIMENTS / folder / f"{arm}.yaml"))
    spec = ClassSpec.from_dict(values["process"]["init_args"]["scorer"])
    assert set(spec.init_args) <= set(inspect.signature(spec._import()).parameters)


@pytest.mark.parametrize("path", ACCELERATE, ids=relative)
def test_accelerate_accepts_its_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    config = load_config_from_file(str(path))
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "-m", "nlhf", "train"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == config.num_processes == (2 if path.stem == "cpu2" else 8)
    sharing = {"fsdp2": "use_fsdp", "zero3": "use_deepspeed"}.get(path.stem, "multi_gpu")
    assert getattr(arguments, sharing)


def test_fsdp_saves_a_whole_model():
    """With SHARDED_STATE_DICT transformers' save_model writes no weights, and final/ would be empty."""
    config = yaml.safe_load((EXPERIMENTS / "accelerate" / "fsdp2.yaml").read_text(encoding="utf-8"))
    assert config["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"
