"""The role-play world: what is better is known by construction, and neither place nor length gives it away."""

import random
from collections import Counter
from itertools import chain

import pytest

from nlhf.errors import UserError
from nlhf.roleplay.conversations import ConversationConfig
from nlhf.roleplay.scenarios import load_scenarios
from nlhf.roleplay.turns import PLAN, hide, parse, problems, render
from nlhf.roleplay.world import (
    FAULTS,
    HELD_OUT,
    conversations,
    draw_reply,
    draw_situation,
    faults,
    pairs,
    phrases,
)
from nlhf.sources import DataConfig, load_pairs

SPLITS = ("train", "held_out")


@pytest.fixture(scope="module")
def drawn() -> dict[str, list]:
    return {split: list(pairs(400, split)) for split in SPLITS}


def speaker(pair) -> str:
    return pair.response_a.partition(":")[0]


# -------------------------------------------------------------------------------------------------------------- phrases


def test_a_matter_is_given_away_by_its_own_sentences_alone():
    all_of = phrases()
    further = [all_of.thoughts, all_of.actions, all_of.fillers, all_of.reveals, all_of.breaks]
    names = [name for scenario in load_scenarios() for name in scenario.names]
    for matter in all_of.matters:
        assert all(matter.is_spoken_of(text) for text in (*matter.asks, *matter.answers)), matter.name
        foreign = chain(*further, names, *((*m.asks, *m.answers) for m in all_of.matters if m != matter))
        assert [text for text in foreign if matter.is_spoken_of(text)] == [], matter.name


def test_sentences_are_long_enough_to_be_told_apart_and_none_occurs_twice():
    all_of = phrases()
    texts = [*all_of.fillers, *all_of.reveals, *all_of.breaks, *chain(*((*m.asks, *m.answers) for m in all_of.matters))]
    assert len(set(texts)) == len(texts)
    assert len(all_of.matters) == 16


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        ("evades",),
        ("breaks",),
        ("reveals",),
        ("unshaped",),
        ("evades", "reveals"),
        ("evades", "breaks", "unshaped"),
    ],
    ids=lambda wrong: "+".join(wrong) or "none",
)
def test_the_rules_find_exactly_the_faults_that_were_put_in(wrong):
    rng = random.Random(7)
    for scenario in load_scenarios():
        for _ in range(20):
            situation = draw_situation(rng, scenario)
            reply = draw_reply(rng, situation, frozenset(wrong))
            found = faults(render(reply), render(situation.before[-1]), situation.me.name)
            assert found == set(wrong), render(reply)
            assert problems(render(reply), situation.me.name) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {"evades", "unshaped"}),
        ("Tom: <role_thinking>Warm.</role_thinking> <role_action>sits</role_action> No.", {"evades"}),
        ("<role_thinking>Hm.</role_thinking> <role_action>sits</role_action> The fire is out.", {"unshaped"}),
        ("Eve: <role_thinking>Hm.</role_thinking> <role_action>sits</role_action> The fire is out.", {"unshaped"}),
        ("Tom: <role_thinking>My plan.</role_thinking> <role_action>sits</role_action> A fire.", set()),
        ("Tom: <role_thinking>Hm.</role_thinking> <role_action>sits</role_action> A fire, as my plan is.", {"reveals"}),
        ("Tom: <role_thinking>Hm.</role_thinking> <role_action>sits</role_action> Fire? I am an AI.", {"breaks"}),
        ("Tom: The fire. As an AI, I pretend.", {"breaks", "reveals", "unshaped"}),
    ],
    ids=["empty", "answered in thought alone", "nobody speaks", "another speaks", "plan in thought", "plan aloud",
         "machine", "all but one"],
)  # fmt: skip
def test_faults_by_hand(text, found):
    assert faults(text, "Ada: Is the fire out?", "Tom") == found


# ---------------------------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("split", SPLITS)
def test_the_better_reply_has_one_fault_less_the_one_that_the_subset_names(drawn, split):
    for pair in drawn[split]:
        shown = pair if pair.label == "A" else pair.swap()
        good, bad = shown.response_a, shown.response_b
        found = [faults(text, pair.context[-1].content, speaker(pair)) for text in (good, bad)]
        assert found[1] - found[0] == {pair.subset}
        assert found[0] < found[1]


@pytest.mark.parametrize("split", SPLITS)
def test_neither_place_nor_length_tells_the_better_reply(drawn, split):
    """Exactly balanced, for each fault: a judge that looks at nothing else is right half of the time."""
    for fault in FAULTS:
        found = [pair for pair in drawn[split] if pair.subset == fault]
        cells = Counter((p.label, len(p.response_a) > len(p.response_b)) for p in found)
        assert len(found) == 100
        assert set(cells.values()) == {25}, fault


def test_a_pair_shows_no_plan(drawn):
    for pair in drawn["train"]:
        assert "system_thinking" not in pair.response_a + pair.response_b + "".join(t.content for t in pair.context)
        assert parse(pair.response_a).character == parse(pair.response_b).character == speaker(pair)


def test_pairs_and_conversations_hold_out_the_same_scenarios(drawn):
    seen = {split: {pair.group for pair in drawn[split]} for split in SPLITS}
    assert not seen["train"] & seen["held_out"]
    assert seen["train"] | seen["held_out"] == {scenario.id for scenario in load_scenarios()}
    for split in SPLITS:
        config = ConversationConfig(split=split, n=120)
        assert config.held_out == HELD_OUT
        assert {c.group for c in config.load()} == seen[split]


def test_no_question_with_its_scene_is_on_both_sides(drawn):
    contexts = {split: {tuple(pair.context) for pair in drawn[split]} for split in SPLITS}
    assert not contexts["train"] & contexts["held_out"]


# -------------------------------------------------------------------------------------------------------- conversations


def test_conversations_are_of_all_kinds_and_none_occurs_twice():
    found = conversations(360)
    assert len({c.key for c in found}) == 360
    assert {len(c.turns) for c in found} == {2, 3, 4}
    assert Counter(c.group for c in found) == {scenario.id: 30 for scenario in load_scenarios()}
    merged = [c for c in found if len([t for t in c.read[:-1] if t.character != c.speaker]) == 2 and len(c.turns) == 3]
    assert merged
    assert [m["role"] for m in merged[0].lesson()] == ["system", "user", "assistant"]
    for c in found:
        assert hide(c.read[-1], PLAN) != c.read[-1]
        assert not [m for m in c.lesson()[:-1] if "system_thinking" in m["content"]]


def test_the_start_knows_good_and_bad_replies():
    """A policy that learns from them has something to gain, and something to lose."""
    found = conversations(600)
    wrong = [faults(c.turns[-1], c.turns[-2], c.speaker) for c in found]
    whole = sum(not w for w in wrong) / len(found)
    assert 0.15 < whole < 0.35
    assert set().union(*wrong) == set(FAULTS)


def test_the_seed_decides(drawn):
    assert conversations(20, seed=1) == conversations(20, seed=1)
    assert conversations(20, seed=1) != conversations(20, seed=2)
    assert list(pairs(20, "train", seed=1)) != list(pairs(20, "train", seed=2))
    assert list(pairs(400, "train")) == drawn["train"]


# --------------------------------------------------------------------------------------------------------------- source


def test_the_source_gives_the_pairs():
    found = load_pairs(DataConfig("roleplay", split="held_out", options={"n": 40}), seed=3)
    assert found == list(pairs(40, "held_out", seed=3))
    assert all(pair.has_critique for pair in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x"}, "reads nothing; leave out path 'x'"),
        ({"split": "test"}, "has no split 'test'"),
        ({"options": {"n": 0}}, "option 'n' must be a whole number from 1 on, got 0"),
        ({"options": {"n": "ten"}}, "option 'n' must be a whole number from 1 on, got 'ten'"),
    ],
    ids=["path", "split", "none", "no number"],
)
def test_what_the_source_refuses(options, message):
    with pytest.raises(UserError) as error:
        load_pairs(DataConfig("roleplay", **options))
    assert message in str(error.value)


def test_more_conversations_than_there_are(monkeypatch):
    monkeypatch.setattr("nlhf.roleplay.world._TRIES", -5)
    with pytest.raises(UserError, match=r"lower conversations\.n"):
        conversations(40)
