"""The verb `train-policy` on tiny models: a policy rewarded by a judge's verdicts, resumed, refused, and read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nlhf.cli import main, make_parser
from nlhf.errors import UserError
from nlhf.files import read_jsonl
from nlhf.formats import get_format
from nlhf.models import ModelConfig, load_tokenizer, resolve
from nlhf.pairs import Pair, Turn
from nlhf.sandbox.policy import draw_example
from nlhf.sandbox.tokenizer import vocabulary
from nlhf.sandbox.world import FLOURISH, WORDS
from nlhf.train_policy import PromptConfig, train_policy

ROOT = Path(__file__).resolve().parents[1]
YAML = ROOT / "experiments/policy/sandbox.yaml"
START = "random:qwen3-tiny"
# Three prompts of training, two a step: an epoch has no whole number of steps.
CONFIG = {
    "model": {"name": START},
    "judge": {
        "model": {"name": "random:qwen3-tiny:1"},
        "mode": "probability",
        "sampling": {"max_new_tokens": 8, "batch_size": 64},
    },
    "grpo": {
        "learning_rate": 1e-3,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "temperature": 1.0,
        "beta": 0.01,
        "max_prompt_length": 200,
        "max_completion_length": 6,
        "save_steps": 1,
        "save_total_limit": 20,
    },
    "samples": {"every": 1, "count": 99},
    "seed": 3,
}
# Clocks, and what a process that was started anew asks again.
ANEW = {
    *("seconds", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"),
    *("judge/calls", "judge/cached_rate"),
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> dict[str, str]:
    """Files of prompts: texts for training, conversations held out."""
    folder = tmp_path_factory.mktemp("prompts")
    files = {
        "train": [{"prompt": f"Name {word}."} for word in ("a bird", "a prime", "a king", "a bird")],
        "held_out": [{"id": "w", "context": [{"role": "system", "content": "Hm"}, {"role": "user", "content": "Why"}]}],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {name: str(folder / f"{name}.jsonl") for name in files}


@pytest.fixture(scope="module")
def config(prompts) -> dict:
    validation = {"prompts": {"file": prompts["held_out"]}, "every": 2}
    return {**CONFIG, "prompts": {"file": prompts["train"]}, "validation": validation}


def run(config: dict, out: Path, *options: str) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["train-policy", "--config", str(out.with_suffix(".yaml")), "--out", str(out), *options]) == 0
    return out


def refused(config: dict, out: Path, capsys, *options: str) -> str:
    out.with_suffix(".yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["train-policy", "--config", str(out.with_suffix(".yaml")), "--out", str(out), *options]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def rows(folder: Path, name: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ANEW} for _, row in read_jsonl(folder / name)]


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@pytest.fixture(scope="module", params=["reference", "tournament"])
def finished(request, config, tmp_path_factory) -> tuple[str, dict, Path]:
    """An uninterrupted run of each kind."""
    kind = request.param
    config = {**config, "reward": {"kind": kind}}
    return kind, config, run(config, tmp_path_factory.mktemp(kind) / "run")


# ---------------------------------------------------------------------------------------------------------- end to end


def test_a_run_writes_its_files_and_moves_every_parameter(finished):
    _, _, folder = finished
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "environment.json", "manifest.json", "metrics.jsonl", "samples.jsonl"} <= names
    assert {"references.jsonl", "best", "final", "checkpoint-4"} <= names
    before, after = weights(resolve(START)), weights(folder / "final")
    assert not [name for name in before if torch.equal(before[name], after[name])]
    load_tokenizer(ModelConfig(str(folder / "final")))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["prompts"]["prompts"] == 3  # one of four was there twice
    assert manifest["held_out"]["prompts"] == 1
    assert manifest["judge"]["format"] == "rm_nlhf"
    assert manifest["judge"]["weights"] != manifest["reference"]["weights"]
    assert len(manifest["reference"]["weights"]) == 12


def test_samples_are_what_was_rewarded(finished):
    kind, _, folder = finished
    samples = rows(folder, "samples.jsonl")
    assert len(samples) == 4 * 8
    references = {row["prompt"][-1]["content"]: row for row in rows(folder, "references.jsonl") if not row["greedy"]}
    allowed = {-1.0, 0.0, 1.0} if kind == "reference" else {i / 6 for i in range(7)} | {i / 3 for i in range(4)} | {0.5}
    for sample in samples:
        assert min(abs(sample["reward"] - value) for value in allowed) < 1e-9
        if kind == "reference":
            assert sample["reference"] == references[sample["prompt"][0]["content"]]["response"]
        else:
            assert sample["reference"] is None
    logged = {row["step"]: row["reward"] for row in rows(folder, "metrics.jsonl") if "reward" in row}
    for step in range(4):
        rewards = [sample["reward"] for sample in samples if sample["step"] == step]
        assert logged[step + 1] == pytest.approx(sum(rewards) / 8)


def test_validation_begins_with_the_reference_itself(finished):
    """Greedy against greedy: before training the policy is its own reference, and a tie needs no judge."""
    _, _, folder = finished
    found = [row for row in rows(folder, "metrics.jsonl") if "validation/score" in row]
    assert [row["step"] for row in found] == [0, 2, 4]
    assert found[0]["validation/score"] == 0
    assert found[0]["validation/tie_rate"] == 1
    best = json.loads((folder / "best" / "validation.json").read_text())
    assert best["score"] == max(row["validation/score"] for row in found)


def test_every_figure_is_in_the_glossary(finished):
    kind, _, folder = finished
    logged = {key for row in rows(folder, "metrics.jsonl") for key in row if key.split("/")[0] in PREFIXES}
    logged |= {"judge/calls", "judge/cached_rate"}
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert [key for key in sorted(logged) if f"`{key}`" not in text] == []
    assert ("tournament/matches" in logged) == (kind == "tournament")
    assert ("judge/win_rate" in logged) == (kind == "reference")


PREFIXES = ("judge", "response", "tournament")


@pytest.mark.parametrize("step", [1, 2], ids=["inside the first epoch", "inside the second"])
def test_a_resumed_run_equals_an_uninterrupted_one(finished, tmp_path, step, monkeypatch):
    _, config, source = finished
    folder = shutil.copytree(source, tmp_path / "run")
    shutil.rmtree(folder / "final")
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > step:
            shutil.rmtree(checkpoint)
    monkeypatch.setattr(
        "nlhf.policy_validation.References._answer", lambda *_: pytest.fail("references are in the folder")
    )
    run(config, folder, "--resume", "true")
    expected, found = weights(source / "final"), weights(folder / "final")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for name in ("metrics.jsonl", "samples.jsonl", "references.jsonl"):
        assert rows(folder, name) == rows(source, name)


def test_a_dry_run_prints_the_budget_and_writes_nothing(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nlhf.comparer.JudgeConfig.load", lambda self: pytest.fail("the judge was loaded"))
    config = {**config, "out": str(tmp_path / "run")}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    assert main(["train-policy", "--config", str(tmp_path / "c.yaml"), "--dry-run"]) == 0
    assert "tokens per run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# -------------------------------------------------------------------------------------------------------------- prompts


def write(path: Path, *found: dict) -> PromptConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return PromptConfig(str(path))


def test_prompts_are_texts_or_conversations(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    found = write(tmp_path / "p.jsonl", {"prompt": "t"}, {"prompt": messages, "id": 7}, {"context": "c"}).load()
    assert [prompt.id for prompt in found] == ["p-0", "7", "p-2"]
    assert [[turn.content for turn in prompt.context] for prompt in found] == [["t"], ["s", "u"], ["c"]]


def test_each_prompt_is_asked_once_and_the_first_stays(tmp_path):
    found = write(tmp_path / "p.jsonl", *({"prompt": word, "id": f"{i}"} for i, word in enumerate("abacbd")))
    assert [prompt.id for prompt in found.load()] == ["0", "1", "3", "5"]
    found.skip, found.limit = 1, 2
    assert [prompt.id for prompt in found.load()] == ["1", "3"]


def test_the_conversations_of_a_source_are_prompts():
    from nlhf.sources import DataConfig

    found = PromptConfig(data=DataConfig("sandbox", limit=30), limit=5).load()
    assert len({prompt.key for prompt in found}) == 5
    assert {prompt.response_a + prompt.response_b for prompt in found} == {""}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q"}, r"p\.jsonl:1: a prompt needs field 'prompt' or 'context'"),
        ({"prompt": "q", "context": "q"}, "one of them"),
        ({"prompt": 3}, "field 'context' must be"),
        ({"prompt": [{"role": "assistant", "content": "So."}]}, "ends with the assistant's turn"),
    ],
    ids=["neither", "both", "number", "assistant"],
)
def test_what_is_no_prompt_is_said(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        write(tmp_path / "p.jsonl", row).load()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either file, data or conversations"),
        ({"file": "f", "limit": 0}, "at least 1"),
        ({"file": "f", "skip": -1}, "negative"),
    ],
)
def test_prompt_settings_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        PromptConfig(**options)


def test_nothing_left_after_skipping(tmp_path):
    found = write(tmp_path / "p.jsonl", {"prompt": "t"})
    found.skip = 1
    with pytest.raises(UserError, match="none is left of 1"):
        found.load()


# ------------------------------------------------------------------------------------------------------------- refusals


def test_held_out_prompts_must_not_be_trained_on(config, prompts, tmp_path, capsys):
    config = {**config, "validation": {"prompts": {"file": prompts["train"], "skip": 1}}}
    assert "2 of 2 held-out prompts are trained on too" in refused(config, tmp_path / "run", capsys)


def test_a_judge_of_single_responses_is_refused(config, tmp_path, capsys):
    judge = {**config["judge"], "format": "rewardbench2_ratings", "mode": "generate"}
    message = refused({**config, "judge": judge}, tmp_path / "run", capsys)
    assert "rates one response at a time" in message


def test_a_judge_that_cannot_read_a_response_ends_the_run(config, tmp_path, capsys):
    judge = {**config["judge"], "sampling": {"max_new_tokens": 8, "max_prompt_tokens": 20}}
    out = tmp_path / "run"
    out.with_suffix(".yaml").write_text(yaml.safe_dump({**config, "judge": judge, "validation": None}))
    assert main(["train-policy", "--config", str(out.with_suffix(".yaml")), "--out", str(out)]) == 2
    assert "the judge cannot compare two responses to prompt 'Name " in capsys.readouterr().err


def test_tournaments_need_whole_groups_in_each_process(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    grpo = {**config["grpo"], "per_device_train_batch_size": 2}
    message = refused({**config, "grpo": grpo, "reward": {"kind": "tournament"}}, tmp_path / "run", capsys)
    assert "2 responses a process are not divisible by grpo.num_generations 4" in message


# ---------------------------------------------------------------------------------------------------------- the sandbox


def test_the_experiment_is_accepted_as_written(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    values = yaml.safe_load(YAML.read_text(encoding="utf-8"))
    values["model"]["name"] = START  # made by the experiment's first command
    parser = make_parser(train_policy, "nlhf train-policy")
    settings = parser.instantiate(parser.parse_object({**values, "out": str(tmp_path)}))
    training, held_out = settings.prompts.load(), settings.validation.prompts.load()
    assert (len(training), len(held_out)) == (54, 18)
    assert not {prompt.key for prompt in training} & {prompt.key for prompt in held_out}


def test_the_sandbox_judge_can_read_whatever_its_policy_writes():
    """Words that are none of a response are left out; the others stand as in the format's own prompt."""
    shown = [word for good, bad in WORDS.values() for word in (*good, *bad)] + [FLOURISH]
    ours = get_format("sandbox", str(ROOT / "experiments/policy/judge.jinja"))
    tokenizer = load_tokenizer(ModelConfig("package:nlhf"))
    everything = " ".join(vocabulary())
    context = [Turn("user", "function bug")]
    [message] = ours.render(Pair("p", context, everything, everything))
    tokenizer(message["content"])  # an unknown word would be an error
    words = " ".join(shown)
    assert [message] == get_format("sandbox").render(Pair("p", context, words, words))


def test_the_writer_learns_responses_of_the_world():
    import random

    prompt, response = draw_example(random.Random(1))
    known = set(vocabulary())
    assert {*prompt.split(), *response.split(), *(f"{word}@B" for word in response.split())} <= known
    assert len(prompt.split()) == 2
