"""A teacher's judgements, a cold start, outcome RL with ties, an evaluation and its report: by the verbs alone."""

import json

import pytest

from nlhf.cli import main
from nlhf.files import write_jsonl
from nlhf.pairs import Pair, Turn
from tests.roleplay.cases import SCENE, reply

LABELS = ["A", "B", "tie", "A"]


@pytest.fixture
def taught(tmp_path):
    pairs = [
        Pair(f"p{i}", [Turn("system", SCENE), Turn("Jo", f"Open, {i}!")], f"Maren: Go, {i}.", f"Maren: Come, {i}.")
        for i in range(len(LABELS))
    ]
    write_jsonl(tmp_path / "pairs.jsonl", [p.to_dict() for p in pairs])
    replies = [{"pair_id": f"p{i}", "order": "AB", "reply": reply(v, v, "tie", v)} for i, v in enumerate(LABELS)]
    write_jsonl(tmp_path / "judgements.jsonl", replies)
    data = ["--data.source", "jsonl", "--data.path", str(tmp_path / "pairs.jsonl")]
    out = tmp_path / "taught.jsonl"
    assert main(["roleplay", "teach", *data, "--judgements", str(tmp_path), "--out", str(out)]) == 0
    return out


def run(verb, *options):
    assert main([verb, *map(str, options)]) == 0


@pytest.mark.slow
def test_the_whole_path(tmp_path, taught, model_cache):
    data = json.dumps([{"source": "jsonl", "path": str(taught)}])
    start = ("--model.name", "random:qwen3-tiny", "--format", "her_rm", "--order", "both", "--data", data)
    sft = ("--sft.max_steps", 1, "--sft.per_device_train_batch_size", 2, "--sft.max_length", 20_000)
    run("cold-start", *start, *sft, "--out", tmp_path / "sft")
    manifest = json.loads((tmp_path / "sft/manifest.json").read_text())
    assert (manifest["rows"], manifest["without_critique"], manifest["too_long"]) == (2 * len(LABELS), 0, 0)

    grpo = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 8}
    grpo["max_prompt_length"] = 20_000
    options = [x for name, value in grpo.items() for x in (f"--grpo.{name}", value)]
    run("train", *start, *options, "--reward.max_lines", 30, "--out", tmp_path / "rl")
    manifest = json.loads((tmp_path / "rl/manifest.json").read_text())
    assert manifest["prompts"] == 2 * len(LABELS)
    assert manifest["data"][0]["labels"]["tie"] == 1

    judged = ("--model.name", tmp_path / "rl/final", "--format", "her_rm", "--sampling.max_new_tokens", 4)
    run("evaluate", "--data.source", "jsonl", "--data.path", taught, *judged, "--out", tmp_path / "eval")
    report = (tmp_path / "eval/report.md").read_text(encoding="utf-8")
    for title in ("Tie recall", "Mixed selection", "Verdict entailed", "Verdict contradicted"):
        assert title in report
