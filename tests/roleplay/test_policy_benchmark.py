"""What `benchmarks/roleplay_policy.py` says of a run: by hand, and as the documents print it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = "Tom: <role_thinking>Hm.</role_thinking> <role_action>nods</role_action> The fire is low."
EVADES = GOOD.replace("fire is low", "end")
ROBOT = EVADES.replace("The end", "I am an AI")


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("roleplay_policy", ROOT / "benchmarks" / "roleplay_policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(group: str, response: str, reference: str, margin: float | None, shown: bool = True) -> dict:
    return {
        "group": group,
        "prompt": "Is the fire out?",
        "character": "Tom",
        "response": response,
        "reference": reference,
        "shown": response if shown else None,
        "margin": margin,
    }


@pytest.fixture(scope="module")
def found(benchmark) -> dict:
    return benchmark.figures(
        [
            row("a", GOOD, EVADES, 1.0),
            row("a", GOOD, GOOD, 0.0),
            row("b", ROBOT, EVADES, 1.0),  # the judge is wrong
            row("b", EVADES, ROBOT, None),
            row("b", "", GOOD, -1.0, shown=False),
        ]
    )


def test_figures_by_hand(found):
    """Faults: 0, 0, 2, 1, 2; of the reference 1, 0, 1, 2, 0."""
    values = {name: (figure["value"], figure["n"]) for name, figure in found.items() if isinstance(figure, dict) and
              "value" in figure}  # fmt: skip
    assert values["score"] == (0.25, 4)
    assert values["win_rate"] == (0.5, 4)
    assert values["tie_rate"] == (0.25, 4)
    assert values["score_by_rules"] == (0.0, 5)  # 1, 0, -1, 1, -1
    assert values["faultless"] == (0.4, 5)
    assert values["evades"] == (0.6, 5)
    assert values["breaks"] == (0.2, 5)
    assert values["unshaped"] == (0.2, 5)
    assert values["well_formed"] == (0.8, 5)
    assert found["no_verdict"] == 1
    assert found["agreement"] == {"agree": 2, "n": 3}
    assert found["characters"] == pytest.approx((2 * len(GOOD) + len(ROBOT) + len(EVADES)) / 5)


def test_intervals_are_over_scenarios(benchmark):
    """All replies of a scenario alike: copies make the interval no narrower."""
    few = benchmark.interval([1.0, 0.0], ["a", "b"])
    many = benchmark.interval([1.0] * 50 + [0.0] * 50, ["a"] * 50 + ["b"] * 50)
    assert (few["low"], few["high"]) == (many["low"], many["high"]) == (0.0, 1.0)


def test_the_table_has_a_column_for_each_validation(benchmark, found):
    about = {"held_out": 5, "scenarios": ["a", "b"], "seed": 0, "rollouts": 64, "calls": 1200, "seconds": 90}
    judge = {name: {"value": 0.75, "low": 0.5, "high": 1.0, "n": 8} for name in ("accuracy", "position_consistency")}
    by_fault = {"evades": {"right": 1, "n": 2}, "breaks": {"right": 2, "n": 2}}
    steps = {"0": found, "20": found}
    text = benchmark.table({"policy": about, "judge": judge, "judge_by_fault": by_fault, "validations": steps})
    assert "the difference: evades 1 of 2, breaks 2 of 2." in text
    assert "right in 75.0 % [50.0, 100.0] of 8 judgements" in text
    assert "| Held-out replies after step | 0 | 20 |" in text
    assert "| replies without a fault | 40.0 % [" in text
    assert "64 rollouts, 1,200 judge prompts, 2 minutes" in text
