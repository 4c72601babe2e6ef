import pytest

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.sandbox.world import draw_pairs
from selfdistill.contexts import (
    CONTEXTS,
    get_context,
    gold_verdict,
    name_responses,
    per_response_feedback,
    rationale,
    rubric,
    sandbox_note,
    shuffle_critiques,
)


def pair(*critiques, **changes):
    fields = {"id": "p", "context": [Turn("user", "?")], "response_a": "a", "response_b": "b", "label": "A"}
    return Pair(critiques=list(critiques), **fields | changes)


FIELDS = HumanCritique(strengths_a="Names the dose.\nIs short.", weaknesses_b="Invents a source.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Response 1 is better than Response 2.", "Assistant A's response is better than Assistant B's response."),
        ("@Response 2 lists @Response 1", "Assistant B's response lists Assistant A's response"),
        ("Chatbot B's answer is wrong", "Assistant B's response is wrong"),
        ("Assistant A's response", "Assistant A's response"),
        ("The response A is fine", "Assistant A's response is fine"),
        ("Responses 1 and 2 agree", "Assistant A's response and Assistant B's response agree"),
        ("Response 1's tone", "Assistant A's response's tone"),
        ("the answer a user wants; model 2; version B", "the answer a user wants; model 2; version B"),
        ("Response 1.5 is no name", "Response 1.5 is no name"),
        ("", ""),
    ],
)
def test_responses_get_the_names_of_the_prompt(text, expected):
    assert name_responses(text) == expected
    assert name_responses(expected) == expected
    assert name_responses(text, "Chatbot {}'s response") == expected.replace("Assistant", "Chatbot")


@pytest.mark.parametrize(
    ("naming", "expected"),
    [("Output ({lower})", "Output (a) beats Output (b)."), ("cand_{number}", "cand_1 beats cand_2.")],
)
def test_names_of_other_prompts(naming, expected):
    assert name_responses("Response A beats the answer 2.", naming) == expected


def test_rationale_is_the_first_critique_with_something_in_it():
    shown = pair(HumanCritique(text=" "), HumanCritique(text=" Response 1 errs. "), HumanCritique(text="no"))
    assert rationale(shown) == "Assistant A's response errs."
    assert rationale(pair(FIELDS)).splitlines() == [
        "Assistant A's response is good because: Names the dose.",
        "Assistant A's response is good because: Is short.",
        "Assistant B's response is worse because: Invents a source.",
    ]


def test_per_response_feedback_keeps_each_response_apart():
    assert per_response_feedback(pair(FIELDS)) == (
        "Feedback on Assistant A's response:\nStrengths: Names the dose.\nIs short.\n\n"
        "Feedback on Assistant B's response:\nWeaknesses: Invents a source."
    )
    assert per_response_feedback(pair(HumanCritique(text="Response A: good"))) == "Assistant A's response: good"


def test_rubric_is_read_from_meta():
    assert rubric(pair(meta={"rubric": ["Is it safe? ", "", "Is it true?"]})) == "- Is it safe?\n- Is it true?"
    assert rubric(pair(meta={"rubric": " Safety first. "})) == "Safety first."
    with pytest.raises(UserError, match=r"'p'.*list of texts"):
        rubric(pair(meta={"rubric": 3}))


@pytest.mark.parametrize(("label", "said"), [("A", "Assistant A's"), ("B", "Assistant B's"), ("tie", "Neither")])
def test_gold_verdict(label, said):
    assert gold_verdict(pair(label=label)).startswith(said)


@pytest.mark.parametrize("name", CONTEXTS)
def test_nothing_said_is_no_feedback(name):
    assert get_context(name)(pair(label=None)) == ""


@pytest.mark.parametrize("name", ["rationale", "per_response_feedback", "gold_verdict", "sandbox_note"])
def test_feedback_follows_the_responses_when_they_trade_places(name):
    critique = HumanCritique(strengths_a="safety", weaknesses_b="tone")
    context = get_context(name)
    shown, swapped = context(pair(critique)), context(pair(critique).swap())
    exchanged = shown.translate(str.maketrans("AB", "BA")).replace("Bssistant", "Assistant")
    assert sorted(swapped.split()) == sorted(exchanged.split())
    assert swapped != shown
    assert context(pair(critique).swap().swap()) == shown


@pytest.mark.parametrize("name", [n for n in CONTEXTS if n != "gold_verdict"])
def test_no_context_but_one_shows_the_gold_verdict(name):
    """The label alone, without a critique, leaves no trace."""
    critique = HumanCritique(strengths_a="safety")
    assert get_context(name)(pair(critique, label="A")) == get_context(name)(pair(critique, label="B"))


def test_sandbox_note_is_in_the_words_of_notes():
    for drawn in draw_pairs("train", n=20):
        note = sandbox_note(drawn)
        assert note.split()[0] in ("A", "B")
        assert len(note.split()) % 3 == 0
        assert note == sandbox_note(drawn)
    with pytest.raises(UserError, match="no reason of the sandbox"):
        sandbox_note(pair(FIELDS))


def test_unknown_context():
    with pytest.raises(UserError, match="Did you mean 'rationale'"):
        get_context("rational")


def test_shuffled_critiques_are_all_someone_elses_and_of_another_group():
    pairs = [pair(HumanCritique(text=f"{i}"), id=f"{i}", group=f"g{i // 3}") for i in range(12)] + [pair(id="mute")]
    shuffled = shuffle_critiques(pairs, seed=0)
    texts = [p.critiques[0].text for p in shuffled[:-1]]
    assert sorted(texts, key=int) == [str(i) for i in range(12)]
    assert all(int(text) // 3 != i // 3 for i, text in enumerate(texts))
    assert shuffled[-1] == pairs[-1]
    assert [p.label for p in shuffled] == [p.label for p in pairs]
    assert shuffle_critiques(pairs, seed=0) == shuffled != shuffle_critiques(pairs, seed=1)


def test_shuffled_critiques_of_one_group_still_are_someone_elses():
    pairs = [pair(HumanCritique(text=f"{i}"), id=f"{i}", group="one") for i in range(3)]
    assert all(p.critiques[0].text != p.id for p in shuffle_critiques(pairs, seed=0))
    with pytest.raises(UserError, match="two pairs"):
        shuffle_critiques(pairs[:1], seed=0)


def test_shuffled_critiques_are_reworded_with_the_pair_they_are_shown_with():
    pairs = [pair(HumanCritique(text="Response 1 errs."), id=str(i)) for i in range(2)]
    assert rationale(shuffle_critiques(pairs, seed=0)[0].swap()) == "Assistant B's response errs."
