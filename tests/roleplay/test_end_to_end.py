"""A teacher's judgements, a cold start, outcome RL with ties, an evaluation and its report: by the verbs alone.

Every stage runs from the YAML of experiments/her_rm with a tiny model in the place of 32 billion parameters.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from nlhf.cli import main
from nlhf.files import read_jsonl, write_jsonl
from nlhf.pairs import Pair, Turn
from tests.roleplay.cases import SCENE, reply

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "her_rm"
LABELS = ["A", "B", "tie", "A"]
SMALL = {"gradient_accumulation_steps": 1, "gradient_checkpointing": "false", "max_steps": 1, "warmup_steps": 0}


@pytest.fixture
def taught(tmp_path):
    pairs = [
        Pair(f"p{i}", [Turn("system", SCENE), Turn("Jo", f"Open, {i}!")], f"Maren: Go, {i}.", f"Maren: Come, {i}.")
        for i in range(len(LABELS))
    ]
    write_jsonl(tmp_path / "pairs.jsonl", [p.to_dict() for p in pairs])
    replies = [{"pair_id": f"p{i}", "order": "AB", "reply": reply(v, v, "tie", v)} for i, v in enumerate(LABELS)]
    write_jsonl(tmp_path / "judgements.jsonl", replies)
    return teach(tmp_path / "pairs.jsonl", tmp_path, tmp_path / "taught.jsonl")


def teach(pairs, judgements, out):
    data = ["--data.source", "jsonl", "--data.path", str(pairs)]
    assert main(["roleplay", "teach", *data, "--judgements", str(judgements), "--out", str(out)]) == 0
    return out


def run(verb, *options):
    config = FOLDER / f"{verb.replace('-', '_')}.yaml"
    assert main([verb, "--config", *map(str, (config, *options))]) == 0


def settings(section, **values):
    return [word for name, value in values.items() for word in (f"--{section}.{name}", value)]


@pytest.mark.slow
def test_the_whole_path(tmp_path, taught, model_cache):
    data = ("--data", json.dumps([{"source": "jsonl", "path": str(taught)}]))
    tiny = ("--model.name", "random:qwen3-tiny")
    sft = settings("sft", **SMALL, lr_scheduler_type="constant", max_length=20_000)
    run("cold-start", *tiny, *data, *sft, "--out", tmp_path / "sft")
    manifest = json.loads((tmp_path / "sft/manifest.json").read_text())
    assert (manifest["rows"], manifest["without_critique"], manifest["too_long"]) == (2 * len(LABELS), 0, 0)

    grpo = SMALL | {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8}
    grpo |= {"max_prompt_length": 20_000, "extra": "{}"}
    start = ("--model.name", tmp_path / "sft/final")
    run("train", *start, *data, *settings("grpo", **grpo), "--out", tmp_path / "rl")
    manifest = json.loads((tmp_path / "rl/manifest.json").read_text())
    assert manifest["prompts"] == 2 * len(LABELS)
    assert manifest["data"][0]["labels"]["tie"] == 1

    judged = ("--model.name", tmp_path / "rl/final", "--model.dtype", "float32", "--sampling.max_new_tokens", 4)
    run("evaluate", "--data.path", taught, *judged, "--ledger", "null", "--out", tmp_path / "eval")
    report = (tmp_path / "eval/report.md").read_text(encoding="utf-8")
    for title in ("Tie recall", "Mixed selection", "Verdict entailed", "Verdict contradicted"):
        assert title in report


WRITTEN = FOLDER / "pairs.jsonl", FOLDER / "replies.jsonl"


def test_the_written_pairs_can_be_taught(tmp_path, capsys):
    """48 replies: 6 are not whole, 3 contradict themselves, 9 of the others are wrong; 4 pairs are left with none."""
    out = teach(*WRITTEN, tmp_path / "taught.jsonl")
    assert capsys.readouterr().out.splitlines() == [
        f"20 of 24 pairs with 30 of 48 replies written to {out}",
        "left out: the principles contradict the verdict: 3",
        "left out: the reply is not a whole result: 6",
        "left out: the verdict is not the pair's label: 9",
    ]
    assert Counter(row["label"] for _, row in read_jsonl(out)) == {"A": 9, "B": 8, "tie": 3}


@pytest.mark.parametrize(
    ("verb", "processes", "shown"),
    [
        pytest.param("cold-start", 8, "64 sequences", id="cold-start"),
        pytest.param("train", 32, "2048 sequences", id="train"),
    ],
)
def test_dry_run_of_a_gpu_experiment_prints_its_budget(verb, processes, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    rows = [row for _, row in read_jsonl(teach(*WRITTEN, tmp_path / "taught.jsonl"))]
    many = tmp_path / "many.jsonl"  # enough prompts for one step
    write_jsonl(many, [row | {"id": f"{row['id']}-{i}"} for row in rows for i in range(7)])
    # The tiny tokenizer reads letter by letter, so that the limits in tokens are too low for it.
    limit = "--sft.max_length" if verb == "cold-start" else "--grpo.max_prompt_length"
    model = ("--model.name", "Qwen/Qwen3-32B", "--model.tokenizer", "random:qwen3-tiny", limit, 40_000)
    data = ("--data", json.dumps([{"source": "jsonl", "path": str(many)}]))
    run(verb, *model, *data, "--out", tmp_path / "run", "--dry_run", "true")
    printed = capsys.readouterr().err
    assert "32,762,123,264" in printed
    assert f"steps of {shown} on {processes} process(es)" in printed
    assert not (tmp_path / "run").exists()
