"""The rewards of the paper, case by case, and the traps of its public release."""

import json
import math
from pathlib import Path

import pytest

from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import ExactScorer
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.rewards import (
    DEFAULT_SCORER,
    CritiqueReward,
    JudgeReward,
    RewardConfig,
    Rollout,
    total_reward,
    well_formed,
)
from nlhf.verdict import Verdict

HUMAN = HumanCritique(strengths_a="accuracy", weaknesses_b="accuracy")
GOOD = "A praise: accuracy\nB blame: accuracy"
POOR = "A praise: tone"


def pair(critiques=(HUMAN,), label="A", name="p"):
    return Pair(name, [Turn("user", "q")], "x", "y", label, critiques=list(critiques))


def reply(critique, choice):
    return f"<critics>{critique}</critics><choice>[[{choice}]]</choice>"


def reward_of(text, pairs=None, process=None, config=None, **_):
    pairs = pairs or [pair()]
    logged = {}
    function = JudgeReward(pairs, get_format("rm_nlhf").parse, config or RewardConfig(), process)
    rewards = function([text] * len(pairs), list(range(len(pairs))), log_metric=logged.__setitem__)
    return rewards[0], logged


CRITIQUE = CritiqueReward(ExactScorer())
FIVE_LINES = "\n".join(f"A praise: point {i}" for i in range(5))
FOUR_LINES = "A praise: accuracy\n\nB blame: accuracy\nA praise: tone\nB blame: tone\n"

CASES = [
    ("right_and_sound", reply(GOOD, "A"), 1.5, 1.0),
    ("right_and_unsound", reply(POOR, "A"), 1.0, 1.0),
    ("wrong_and_sound", reply(GOOD, "B"), 0.0, 0.0),
    ("wrong_and_unsound", reply(POOR, "B"), 0.0, 0.0),
    ("no_choice", f"<critics>{GOOD}</critics>", -1.0, -1.0),
    ("no_critique", "<choice>[[A]]</choice>", -1.0, -1.0),
    ("empty_critique", reply("  ", "A"), -1.0, -1.0),
    ("two_labels", reply(GOOD, "A or B"), -1.0, -1.0),
    ("five_lines", reply(FIVE_LINES, "A"), -1.0, -1.0),
    ("four_lines_and_blanks", reply(FOUR_LINES, "A"), 1.5, 1.0),
    ("1500_characters", reply("x" * 1500, "A"), 1.0, 1.0),
    ("1501_characters", reply("x" * 1501, "A"), -1.0, -1.0),
    ("wrong_and_ill_formed", reply(FIVE_LINES, "B"), -1.0, -1.0),
    ("repeats_itself", reply("A praise: accuracy\nA praise: accuracy", "A"), 1.0, 1.0),
    ("thinking_does_not_count", f"<think>{reply(GOOD, 'B')}</think>{reply(GOOD, 'A')}", 1.5, 1.0),
    ("cut_off_in_thinking", f"<think>{reply(GOOD, 'A')}", -1.0, -1.0),
]


@pytest.mark.parametrize(("text", "labelled", "outcome_only"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_reward_table(text, labelled, outcome_only):
    assert reward_of(text, process=CRITIQUE)[0] == labelled
    assert reward_of(text)[0] == outcome_only
    assert reward_of(text, pairs=[pair(critiques=())], process=CRITIQUE)[0] == outcome_only


def test_soft_reward_is_f1_itself():
    """One of two human arguments found by the only one made: P = 1, R = 1/2, F1 = 2/3; R = 1 + 0.5 * 2/3."""
    soft = CritiqueReward(ExactScorer(), form="soft")
    assert reward_of(reply("A praise: accuracy", "A"), process=soft)[0] == pytest.approx(4 / 3)


def test_multiplicative_gate_is_worth_the_bonus():
    soft = CritiqueReward(ExactScorer(), form="soft")
    gate = RewardConfig(combine="multiply")
    assert reward_of(reply("A praise: accuracy", "A"), process=soft, config=gate)[0] == pytest.approx(2 / 3)
    assert reward_of(reply(POOR, "A"), process=soft, config=gate)[0] == 0.0
    assert reward_of(reply(GOOD, "B"), process=soft, config=gate)[0] == 0.0


def test_threshold_is_inclusive():
    """F1 of exactly 0.5 is sound: one of two made, one of two human arguments."""
    assert reward_of(reply("A praise: accuracy\nA praise: tone", "A"), process=CRITIQUE)[0] == 1.5


def test_labelled_is_a_property_of_the_row():
    """Trap of the public release: a data-set name decided, and with its own data nothing counted as labelled."""
    odd_source = Pair("p", [Turn("user", "q")], "x", "y", "A", critiques=[HUMAN], source="DataWithHumanCritique")
    assert reward_of(reply(GOOD, "A"), pairs=[odd_source], process=CRITIQUE)[0] == 1.5


def test_wrong_labels_are_not_scored_but_counted():
    class Counting(ExactScorer):
        seen = 0

        def score(self, critiques, pairs):
            Counting.seen += len(critiques)
            return super().score(critiques, pairs)

    _, logged = reward_of(reply(GOOD, "B"), process=CritiqueReward(Counting()))
    assert Counting.seen == 0
    assert logged["process/unscored_wrong_label"] == 1.0


def test_scorer_failure_is_no_bonus_and_counted():
    class Failing(ExactScorer):
        def score(self, critiques, pairs):
            return [CritiqueMatch(0, 0, 0, failure="timed out") for _ in critiques]

    reward, logged = reward_of(reply(GOOD, "A"), process=CritiqueReward(Failing()))
    assert reward == 1.0
    assert logged["process/scorer_failures"] == 1


def test_exception_in_a_scorer_is_not_swallowed():
    class Broken(ExactScorer):
        def score(self, critiques, pairs):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        reward_of(reply(GOOD, "A"), process=CritiqueReward(Broken()))


@pytest.mark.parametrize("bonus", [math.nan, -0.1, 1.1])
def test_bonus_outside_the_unit_interval_is_an_error_that_names_the_pair(bonus):
    rollout = Rollout(pair(), Verdict("A", critique="c"), "", True)
    with pytest.raises(ValueError, match="pair 'p'"):
        total_reward(rollout, bonus, RewardConfig())


def test_none_abstains():
    rollout = Rollout(pair(), Verdict("A", critique="c"), "", True)
    assert total_reward(rollout, None, RewardConfig()) == 1.0
    assert total_reward(rollout, None, RewardConfig(combine="multiply")) == 1.0


def test_swapped_pair_and_reply_earn_the_same():
    swapped = reply("B praise: accuracy\nA blame: accuracy", "B")
    assert (
        reward_of(swapped, pairs=[pair().swap()], process=CRITIQUE)[0]
        == reward_of(reply(GOOD, "A"), process=CRITIQUE)[0]
    )


def test_components_are_logged():
    pairs = [pair(name="1"), pair(name="2", critiques=())]
    _, logged = reward_of(reply(GOOD, "A"), pairs=pairs, process=CRITIQUE)
    expected = {
        "format_rate": 1,
        "verdict_rate": 1,
        "outcome": 1,
        "labelled_rate": 0.5,
        "process/bonus": 1,
        "process/f1": 1,
    }
    assert {k: logged[k] for k in expected} == expected


def test_conversational_completions_are_read():
    function = JudgeReward([pair()], get_format("rm_nlhf").parse, RewardConfig())
    completion = [[{"role": "assistant", "content": reply(GOOD, "A")}]]
    assert function(completion, [0], log_metric=lambda *_: None) == [1.0]


def test_samples_are_recorded_with_their_step():
    rows = []
    function = JudgeReward(
        [pair()], get_format("rm_nlhf").parse, RewardConfig(), record=lambda step, r: rows.append((step, r))
    )

    class State:
        global_step = 7

    function([reply(GOOD, "A")], [0], log_metric=lambda *_: None, trainer_state=State())
    assert rows[0][0] == 7
    assert rows[0][1][0]["reply"] == reply(GOOD, "A")


@pytest.mark.parametrize(
    "bad", [{"process_weight": -1}, {"max_lines": 0}, {"max_characters": 0}], ids=lambda b: next(iter(b))
)
def test_bad_reward_configuration(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        RewardConfig(**bad)


def test_well_formed_limits_are_configurable():
    assert not well_formed(Verdict("A", critique="1\n2"), RewardConfig(max_lines=1))
    assert not well_formed(Verdict("A", critique="123"), RewardConfig(max_characters=2))
    assert well_formed(Verdict("A", critique="12"), RewardConfig(max_characters=2))


def test_the_default_scorer_is_the_one_that_agrees_best_with_people():
    """Its gain over the better of overlap and cosine is above 0 on both sets of human labels, and it is no style."""
    path = Path(__file__).resolve().parents[1] / "experiments" / "critique_scorers" / "validation.json"
    found = json.loads(path.read_text(encoding="utf-8"))["figures"][DEFAULT_SCORER]
    for name in ("metacritique_units", "comve_confusing"):
        assert found[name]["gain"]["low"] > 0
    for name in ("metacritique_control", "comve_control"):
        assert abs(found[name]["value"] - 0.5) <= 0.05


def test_without_a_scorer_the_default_is_built(monkeypatch):
    built = ExactScorer()
    monkeypatch.setattr("nlhf.critique.learned.LearnedScorer", lambda: built)
    assert CritiqueReward().scorer is built
