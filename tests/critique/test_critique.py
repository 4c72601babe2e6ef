import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nlhf.critique.arguments import (
    Argument,
    generated_arguments,
    human_arguments,
    is_fatal,
    key_arguments,
    reference_sets,
    split_sentences,
)
from nlhf.critique.matching import gate, match
from nlhf.critique.scorers import ExactScorer, LexicalScorer
from nlhf.pairs import HumanCritique, Pair, Turn


def pair(*critiques):
    return Pair("p", [Turn("user", "q")], "x", "y", "A", critiques=list(critiques))


@pytest.mark.parametrize(
    ("line", "argument"),
    [
        ("A praise: clear", Argument("A", 1, "clear")),
        ("B blame: wrong dose", Argument("B", -1, "wrong dose")),
        ("- B blame: wrong dose", Argument("B", -1, "wrong dose")),
        ("2. Response A praise: clear", Argument("A", 1, "clear")),
        ("Chatbot B's response, blame: late", Argument("B", -1, "late")),
        ("Ａ praise： 很清楚", Argument("A", 1, "很清楚")),
        ("A praise clear", Argument("A", 1, "clear")),
        ("A clear answer", Argument(None, None, "A clear answer")),
        ("both are bad", Argument(None, None, "both are bad")),
        ("A praise:", Argument(None, None, "A praise:")),
        ("a praise: clear", Argument(None, None, "a praise: clear")),
    ],
)
def test_generated_argument(line, argument):
    assert generated_arguments(line) == [argument]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\n ", []),
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ("It costs 3.5 euros.", ["It costs 3.5 euros."]),
        ("* first\n* second", ["first", "second"]),
        ("1. first\n2) second", ["first", "second"]),
        ("第一点。第二点！", ["第一点。", "第二点！"]),
        ("הראשון. השני.", ["הראשון.", "השני."]),
    ],
)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_fields_give_side_and_polarity_and_text_gives_none():
    critique = HumanCritique(text="Overall fine.", strengths_a="clear\nshort", weaknesses_b="wrong")
    assert human_arguments(critique) == [
        Argument("A", 1, "clear"),
        Argument("A", 1, "short"),
        Argument("B", -1, "wrong"),
        Argument(None, None, "Overall fine."),
    ]


def test_gate_table():
    generated = [Argument("A", 1, ""), Argument("B", -1, ""), Argument(None, None, "")]
    reference = [Argument("A", 1, ""), Argument("B", 1, ""), Argument(None, None, ""), Argument("B", None, "")]
    expected = [[True, False, True, False], [False, False, True, True], [False, False, True, False]]
    assert gate(generated, reference).tolist() == expected


def test_matching_is_one_to_one():
    """Two generated arguments resemble the one reference: one match. P = 1/2, R = 1, F1 = 2/3."""
    result = match(
        [Argument("A", 1, "x"), Argument("A", 1, "y")], [Argument("A", 1, "z")], [[0.8], [0.9]], threshold=0.5
    )
    assert (result.precision, result.recall) == (0.5, 1.0)
    assert result.f1 == pytest.approx(2 / 3)
    assert result.matched == ((1, 0),)


def test_matching_is_optimal_not_greedy():
    """Greedy takes 0.9 and leaves the second argument alone; the best assignment matches both."""
    arguments = [Argument("A", 1, "x"), Argument("A", 1, "y")]
    result = match(arguments, arguments, [[0.9, 0.8], [0.8, 0.1]], threshold=0.5)
    assert result.f1 == 1.0


def test_matching_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        match([Argument("A", 1, "x")], [Argument("A", 1, "x")], [[np.nan]], threshold=0.5)


HUMAN = HumanCritique(strengths_a="accuracy", weaknesses_b="accuracy")
FULL = "A praise: accuracy\nB blame: accuracy"


@pytest.mark.parametrize(
    ("critique", "f1"),
    [
        (FULL, 1.0),
        ("A praise: Accuracy ", 2 / 3),
        ("A praise: accuracy\nB blame: accuracy\nA praise: tone", 0.8),
        ("A praise: tone", 0.0),
        ("A praise: accuracy\nA praise: accuracy", 0.0),
        ("accuracy", 0.0),
        ("A praise: accuracy\naccuracy", 0.5),
        ("", 0.0),
        (None, 0.0),
    ],
    ids=["full", "half", "one_too_many", "other", "repeated", "vague", "half_vague", "empty", "missing"],
)
@pytest.mark.parametrize("scorer", [ExactScorer(), LexicalScorer()], ids=["exact", "lexical"])
def test_scores(scorer, critique, f1):
    [result] = scorer.score([critique], [pair(HUMAN)])
    assert result.f1 == pytest.approx(f1)


@pytest.mark.parametrize("scorer", [ExactScorer(), LexicalScorer()], ids=["exact", "lexical"])
def test_flipped_side_or_polarity_scores_zero(scorer):
    flipped_side = "B praise: accuracy\nA blame: accuracy"
    flipped_polarity = "A blame: accuracy\nB praise: accuracy"
    assert [m.f1 for m in scorer.score([flipped_side, flipped_polarity], [pair(HUMAN)] * 2)] == [0.0, 0.0]


def test_several_humans_are_alternatives():
    other = HumanCritique(weaknesses_b="tone")
    [result] = ExactScorer().score(["B blame: tone"], [pair(HUMAN, other)])
    assert result.f1 == 1.0


def test_no_human_critique_is_none_not_zero():
    assert ExactScorer().score([FULL, FULL], [pair(), pair(HumanCritique(text=" "))]) == [None, None]


@settings(max_examples=50, deadline=None)
@given(st.permutations(["A praise: accuracy", "B blame: accuracy", "A blame: tone", "B praise: brevity"]))
def test_order_of_arguments_does_not_matter(lines):
    [result] = ExactScorer().score(["\n".join(lines)], [pair(HUMAN)])
    assert result.f1 == pytest.approx(2 * 0.5 * 1.0 / 1.5)


def test_score_does_not_depend_on_the_batch():
    critiques = [FULL, "A praise: accuracy", "", "B blame: accuracy\nB blame: tone"]
    pairs = [pair(HUMAN)] * 4
    for scorer in (ExactScorer(), LexicalScorer()):
        together = scorer.score(critiques, pairs)
        assert together == [scorer.score([c], [p])[0] for c, p in zip(critiques, pairs, strict=True)]


def test_swapping_pair_and_critique_leaves_the_score():
    swapped = "B praise: accuracy\nA blame: accuracy"
    for scorer in (ExactScorer(), LexicalScorer()):
        assert scorer.score([FULL], [pair(HUMAN)])[0].f1 == scorer.score([swapped], [pair(HUMAN).swap()])[0].f1


@pytest.mark.parametrize(
    ("text", "fatal"),
    [
        ("Fatal: the dose is ten times too high.", True),
        ("There is a fatal error in step 2.", True),
        ("This is a FATAL flaw.", True),
        ("The proof is fatally flawed.", True),
        ("致命错误：剂量不对。", True),
        ("The dose would be fatal.", False),
        ("No fatal errors.", False),
        ("It has no really fatal flaw.", False),
        ("It doesn't contain a fatal mistake.", False),
        ("A non-fatal error.", False),
        ("没有致命错误。", False),
        ("The fatality rate is wrong.", False),
    ],
)
def test_what_names_a_fatal_error(text, fatal):
    assert is_fatal(Argument("B", -1, text)) is fatal
    assert is_fatal(Argument(None, None, text)) is fatal
    assert not is_fatal(Argument("B", 1, text))


def test_a_fatal_error_is_all_that_counts():
    """N_ref = 1: of three human arguments only the fatal one; one of two generated arguments makes it: P 1/2, R 1."""
    human = HumanCritique(strengths_a="tone", weaknesses_b="too long\nFatal: wrong dose\nA second fatal error.")
    assert reference_sets(pair(human)) == [[Argument("B", -1, "Fatal: wrong dose")]]
    [result] = LexicalScorer().score(["A praise: tone\nB blame: fatal wrong dose"], [pair(human)])
    assert (result.precision, result.recall) == (0.5, 1.0)
    assert result.matched == ((1, 0),)


def test_without_a_fatal_error_all_arguments_count():
    arguments = human_arguments(HumanCritique(strengths_a="clear", weaknesses_b="slow"))
    assert key_arguments(arguments) == arguments
    assert key_arguments([]) == []
