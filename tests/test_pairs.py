import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn, hide_critiques, swap_at_random, swap_references

ROW = {"id": "1", "context": "Which is larger?", "response_a": "The sun", "response_b": "The moon"}


def make_pair(name: str = "1", **fields) -> Pair:
    return Pair.from_dict(ROW | {"id": name} | fields)


# Texts made of whole references, parts of them and anything else, so that matches touch and overlap.
_REFERENCES = (
    "Response",
    "response ",
    "@Response 1",
    "Responses 1 and 2",
    "Assistant A",
    "summary",
    "cand_2",
    "options",
)
_REST = ("B", " A", " a ", "1", "2", ".5", " and ", "答案 B", "ſ", "/", ", ", "\n", "vs. ")
_FRAGMENTS = st.sampled_from((*_REFERENCES, *_REST))
TEXTS = st.lists(_FRAGMENTS | st.text(max_size=4), max_size=8).map("".join)
CRITIQUES = st.builds(
    HumanCritique, text=TEXTS, strengths_a=TEXTS, weaknesses_a=TEXTS, strengths_b=TEXTS, weaknesses_b=TEXTS
)
JUDGEMENTS = st.sampled_from([("A", None), ("B", 2), ("A", -3), ("tie", 0), ("tie", None), (None, None), (None, 1)])


@st.composite
def pairs(draw):
    label, strength = draw(JUDGEMENTS)
    return Pair(
        id="p",
        context=[Turn("user", draw(TEXTS))],
        response_a=draw(TEXTS),
        response_b=draw(TEXTS),
        label=label,
        strength=strength,
        critiques=draw(st.lists(CRITIQUES, max_size=2)),
        meta={"kept": True},
    )


@given(pairs())
def test_swap_twice_is_the_same_pair(pair):
    assert pair.swap().swap() == pair


@given(TEXTS)
def test_swapping_references_twice_is_the_same_text(text):
    assert swap_references(swap_references(text)) == text


@given(pairs())
def test_a_pair_survives_the_round_trip_through_its_dict(pair):
    assert Pair.from_dict(pair.to_dict()) == pair


def test_swap_moves_everything_that_belongs_to_a_response():
    pair = make_pair(
        label="A",
        strength=-2,
        critiques=[{"strengths_a": "Response A is right", "weaknesses_b": "unlike Response A", "annotator": "x"}],
    )
    swapped = pair.swap()
    assert (swapped.response_a, swapped.response_b) == ("The moon", "The sun")
    assert (swapped.label, swapped.strength) == ("B", 2)
    critique = HumanCritique(strengths_b="Response B is right", weaknesses_a="unlike Response B", annotator="x")
    assert swapped.critiques == [critique]
    assert swapped.context == pair.context


@pytest.mark.parametrize(
    ("text", "swapped"),
    [
        pytest.param("Response A is better", "Response B is better", id="letter"),
        pytest.param("@Response 1 beats @Response 2.", "@Response 2 beats @Response 1.", id="at-sign-and-number"),
        pytest.param("response1 and Response2", "response2 and Response1", id="no-blank"),
        pytest.param("Assistant B's answer", "Assistant A's answer", id="possessive"),
        pytest.param("Responses 1 and 2 differ", "Responses 2 and 1 differ", id="one-noun-two-names"),
        pytest.param("Response A vs. B", "Response B vs. A", id="versus"),
        pytest.param("cand_1", "cand_2", id="underscore"),
        pytest.param("the answer a user wants", "the answer a user wants", id="article"),
        pytest.param("answer a question, B", "answer a question, B", id="article-then-letter"),
        pytest.param("Response 1.5", "Response 1.5", id="decimal"),
        pytest.param("Response 10", "Response 10", id="ten"),
        pytest.param("Response 1 and 3 others", "Response 2 and 3 others", id="another-number"),
        pytest.param("Response 1.", "Response 2.", id="end-of-sentence"),
        pytest.param("vitamin A and B", "vitamin A and B", id="no-noun"),
        pytest.param("**Response B**: wrong", "**Response A**: wrong", id="bold"),
        pytest.param("", "", id="empty"),
    ],
)
def test_references_to_the_responses_are_exchanged(text, swapped):
    assert swap_references(text) == swapped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"id": ""}, "'id' must be a non-empty string", id="empty-id"),
        pytest.param({"id": 7}, "'id' must be a non-empty string", id="number-as-id"),
        pytest.param({"response_a": True}, "'response_a' must be a string, got bool", id="boolean-response"),
        pytest.param({"response_b": None}, "'response_b' must be a string, got NoneType", id="null-response"),
        pytest.param({"context": []}, "at least one turn", id="no-turn"),
        pytest.param({"context": 3}, "'context' must be a list", id="context-number"),
        pytest.param({"context": [{"role": "user"}]}, r"'context\[0\]'", id="turn-without-content"),
        pytest.param({"context": [{"role": "user", "content": None}]}, "must be strings", id="null-content"),
        pytest.param({"label": "a"}, "'label' must be", id="lower-case-label"),
        pytest.param({"label": 1}, "'label' must be", id="number-as-label"),
        pytest.param({"strength": 4}, "from -3 to 3", id="strength-too-large"),
        pytest.param({"strength": True}, "from -3 to 3", id="boolean-strength"),
        pytest.param({"strength": 1.5}, "from -3 to 3", id="fractional-strength"),
        pytest.param({"strength": -1, "label": "B"}, "says 'A' but 'label' says 'B'", id="strength-against-label"),
        pytest.param({"strength": 0, "label": "A"}, "says 'tie' but 'label' says 'A'", id="tie-against-label"),
        pytest.param({"critiques": [3]}, r"'critiques\[0\]' must be a string or an object", id="critique-number"),
        pytest.param({"critiques": 3}, "'critiques' must be a list", id="critiques-number"),
        pytest.param({"critiques": {"weakness_a": "x"}}, "Did you mean 'weaknesses_a'", id="critique-field-misspelt"),
        pytest.param({"critiques": {"text": 5}}, "'text' must be a string", id="critique-text-number"),
        pytest.param({"meta": "x"}, "'meta' must be an object", id="meta-text"),
        pytest.param({"respones_a": "x"}, "Did you mean 'response_a'", id="field-misspelt"),
    ],
)
def test_malformed_rows_say_what_and_where(change, message):
    with pytest.raises(UserError, match=message) as error:
        Pair.from_dict(ROW | change, "f.jsonl:3")
    assert str(error.value).startswith("f.jsonl:3: ")


def test_a_missing_field_offers_the_nearest_name():
    row = {k: v for k, v in ROW.items() if k != "response_a"} | {"responseA": "x"}
    with pytest.raises(UserError, match=r"missing field 'response_a'.*Did you mean 'responseA'"):
        Pair.from_dict(row, "f.jsonl:3")


def test_a_row_that_is_no_object():
    with pytest.raises(UserError, match="got list"):
        Pair.from_dict([1], "f.jsonl:3")


def test_plain_strings_stand_for_a_user_turn_and_a_free_critique():
    pair = make_pair(critiques="Too short.")
    assert pair.context == [Turn("user", "Which is larger?")]
    assert pair.critiques == [HumanCritique(text="Too short.")]


def test_key_tells_what_is_judged_apart_and_nothing_else():
    pair = make_pair()
    assert make_pair("2", label="A", critiques="x", subset="s").key == pair.key
    assert pair.swap().key != pair.key
    assert make_pair(context=[{"role": "system", "content": "Which is larger?"}]).key != pair.key
    # Text that moves from one response to the other is another pair.
    assert make_pair(response_a="ab", response_b="c").key != make_pair(response_a="a", response_b="bc").key


@pytest.mark.parametrize(
    ("critiques", "labelled"),
    [
        pytest.param([], False, id="none"),
        pytest.param([{}], False, id="empty-object"),
        pytest.param([{"text": " \n"}], False, id="white-space"),
        pytest.param([{"annotator": "x"}], False, id="annotator-alone"),
        pytest.param([{}, {"weaknesses_b": "wrong"}], True, id="one-of-two"),
    ],
)
def test_labelled_is_a_property_of_the_row(critiques, labelled):
    assert make_pair(critiques=critiques).has_critique is labelled


class TestHideCritiques:
    # Every third pair has no critique to begin with.
    PAIRS = tuple(make_pair(str(i), label="A", critiques=[] if i % 3 == 0 else "why") for i in range(90))

    def kept(self, fraction, seed=0):
        hidden = hide_critiques(self.PAIRS, fraction, seed)
        assert [dataclasses.replace(p, critiques=[]) for p in hidden] == [
            dataclasses.replace(p, critiques=[]) for p in self.PAIRS
        ]
        return {p.id for p in hidden if p.has_critique}

    @pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.25, 15), (0.5, 30), (0.99, 59), (1.0, 60)])
    def test_the_share_is_exact(self, fraction, count):
        assert len(self.kept(fraction)) == count

    def test_smaller_shares_are_nested_in_larger_ones(self):
        shares = [self.kept(f / 10) for f in range(11)]
        assert all(small <= large for small, large in pairwise(shares))

    def test_the_seed_decides_which(self):
        assert self.kept(0.5, seed=1) == self.kept(0.5, seed=1)
        assert self.kept(0.5, seed=1) != self.kept(0.5, seed=2)

    @pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
    def test_a_share_outside_0_to_1_is_refused(self, fraction):
        with pytest.raises(UserError, match="between 0 and 1"):
            hide_critiques(self.PAIRS, fraction, 0)


def test_swap_at_random_is_seeded_and_fair():
    plain = [make_pair(str(i), label="A") for i in range(400)]
    swapped = swap_at_random(plain, seed=5)
    assert swapped == swap_at_random(plain, seed=5)
    assert swapped != swap_at_random(plain, seed=6)
    assert 160 < Counter(p.label for p in swapped)["A"] < 240
    assert [p.id for p in swapped] == [p.id for p in plain]
