"""Weights of a cold start's reply: the side that begins a critique line can weigh more than its wording."""

import pytest

from nlhf.cold_start import ColdStartConfig, tokenize
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.models import ModelConfig, load_tokenizer
from nlhf.pairs import HumanCritique, Pair, Turn

PAIR = Pair(
    id="1",
    context=[Turn("user", "Which?")],
    response_a="one",
    response_b="two",
    label="B",
    critiques=[HumanCritique(weaknesses_a="A praise: is quoted – B blame: too.\nBad.", strengths_b="Good.")],
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(ModelConfig(tiny_model))


def heavy(tokenizer, weight: float, pair: Pair = PAIR, **options) -> tuple[str, list[int]]:
    """The row as text, and where its tokens (bytes) weigh `weight`."""
    (row,), _ = tokenize(tokenizer, get_format("rm_nlhf"), [pair], ColdStartConfig(side_weight=weight, **options))
    return row["input_ids"], [i for i, w in enumerate(row["weights"]) if w == weight]


def test_exactly_the_sides_that_begin_a_line_are_heavy(tokenizer):
    ids, places = heavy(tokenizer, 7.0)
    assert tokenizer.decode([ids[i] for i in places]) == "AAB"
    assert [tokenizer.decode(ids[i : i + 9]) for i in places] == ["A blame: ", "A blame: ", "B praise:"]


def test_the_sides_follow_the_exchange(tokenizer):
    ids, places = heavy(tokenizer, 7.0, PAIR.swap())
    assert sorted(tokenizer.decode([ids[i] for i in places])) == ["A", "B", "B"]


def test_a_weight_changes_no_token(tokenizer):
    assert heavy(tokenizer, 7.0)[0] == heavy(tokenizer, 1.0)[0]


def test_a_verdict_alone_has_no_sides(tokenizer):
    assert heavy(tokenizer, 7.0, target="verdict")[1] == []


def test_a_weight_must_be_positive():
    with pytest.raises(UserError, match="side_weight must be positive"):
        ColdStartConfig(side_weight=0.0)
