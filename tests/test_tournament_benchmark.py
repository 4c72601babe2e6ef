"""What `benchmarks/tournament.py` measures: the calls by count, the order by hand, and what the documents print."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAVED = ROOT / "experiments/policy/tournament.json"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("tournament_benchmark", ROOT / "benchmarks" / "tournament.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_right_order_by_hand(benchmark):
    """Five pairs differ in quality: one tie, one wrong, three right; the two that are equal are no pair."""
    assert benchmark.right_order([[0.5, 0.5, 0.9, 0.2]], [[1, 0, 0, -1]]) == pytest.approx((0.5 + 0 + 1 + 1 + 1) / 5)


def test_groups_are_of_one_task_and_all_different(benchmark):
    task, texts, qualities = benchmark.draw_group(random.Random(1), 9)
    assert len(set(texts)) == len(texts) == len(qualities) == 9
    assert set(qualities) <= {-1, 0, 1}
    assert len(task.split()) == 2


def test_the_benchmark_counts_prompts_and_calls(benchmark, tmp_path, monkeypatch, capsys):
    out = tmp_path / "tournament.json"
    monkeypatch.setattr(sys, "argv", ["tournament.py", "--groups", "2", "--n", "4", "--out", str(out)])
    benchmark.main()
    ways = json.loads(out.read_text())["ways"]
    assert (ways["reference"]["prompts"], ways["reference"]["batches"]) == (8, 1)
    assert (ways["round robin"]["prompts"], ways["round robin"]["batches"]) == (12, 1)
    together, alone = ways["tournament"], ways["tournament, match by match"]
    assert together["prompts"] == alone["prompts"] <= 14
    assert together["right_order"] == alone["right_order"]
    assert together["batches"] < alone["batches"] == alone["prompts"]  # two groups, two orders
    assert "| round robin | 12.0 | 1 |" in capsys.readouterr().out


def test_the_saved_figures_are_of_groups_of_eight():
    result = json.loads(SAVED.read_text(encoding="utf-8"))
    assert result["n"] == 8
    assert result["threads"] == 1
    assert set(result["ways"]) == {"reference", "tournament", "round robin", "tournament, match by match"}
