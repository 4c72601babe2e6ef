"""What `benchmarks/grpo_step.py` measures and prints: paired within a round, on the same rollouts."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def grpo_step():
    spec = importlib.util.spec_from_file_location("grpo_step", ROOT / "benchmarks" / "grpo_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert all(result["rounds"] >= 2 for result in steps.values())
