"""Benchmarks, statistics and the table, on small data of our own; the published claims on the real data."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from nlhf.config import ClassSpec
from nlhf.critique.benchmarks import (
    Benchmark,
    Comparison,
    CritiqueUnits,
    Reasons,
    load_argkp,
    load_metacritique,
    references_shuffled,
    right_or_confusing,
    same_or_other,
    standard_benchmarks,
    units_covered,
)
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer, LexicalScorer
from nlhf.critique.validation import (
    Validation,
    answers,
    measure,
    run_validation,
    soft_f1,
    validate,
    weighted_auc,
    weighted_spearman,
)
from nlhf.errors import UserError


def comparison(label=1.0, cluster="c", stratum="", generated=("a b",), reference=("a b",)):
    return Comparison(generated, reference, label, cluster, stratum)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 3)), min_size=2, max_size=40))
def test_weighted_auc_is_the_auc_of_the_resampled_rows(rows):
    scores, labels, weights = (np.array(x, dtype=float) for x in zip(*rows, strict=True))
    sample = np.repeat(np.arange(len(rows)), weights.astype(int))
    ours = weighted_auc(scores, labels, np.zeros(len(rows), int))(weights)
    if len(set(labels[sample])) < 2:
        assert np.isnan(ours)
    else:
        assert ours == pytest.approx(roc_auc_score(labels[sample], scores[sample]))


def test_strata_are_never_compared_with_each_other():
    """In stratum 0 the positive wins, in stratum 1 it loses one of two; 2 of 3 couples. Pooled it would be 3 of 6."""
    scores = np.array([0.2, 0.1, 0.7, 0.6, 0.9])
    labels = np.array([1, 0, 1, 0, 0])
    strata = np.array([0, 0, 1, 1, 1])
    assert weighted_auc(scores, labels, strata)(np.ones(5)) == pytest.approx(2 / 3)


def test_weighted_spearman():
    scores, labels = np.array([1.0, 2.0, 3.0, 9.0]), np.array([1.0, 3.0, 2.0, 0.0])
    statistic = weighted_spearman(scores, labels, np.zeros(4))
    assert statistic(np.array([1, 1, 1, 0])) == pytest.approx(0.5)
    assert np.isnan(statistic(np.array([2, 0, 0, 0])))


@pytest.mark.parametrize(
    ("matrix", "value"),
    [([[1.0]], 1.0), ([[1.0, 0.0]], 2 / 3), ([[0.0]], 0.0), (np.zeros((0, 2)), 0.0)],
)
def test_soft_f1(matrix, value):
    assert soft_f1(np.array(matrix)) == pytest.approx(value)


def test_a_gain_is_measured_over_the_better_baseline_on_the_same_resamples():
    rng = np.random.default_rng(0)
    rows = [comparison(float(i % 2), f"c{i // 4}") for i in range(200)]
    labels = np.array([r.label for r in rows])
    scores = {
        "lexical": labels + rng.normal(0, 3, 200),
        "embedding": labels + rng.normal(0, 1.5, 200),
        "learned": labels + rng.normal(0, 0.3, 200),
    }
    figures = measure(Benchmark("b", "B", "auc", rows), scores, resamples=200)
    assert figures["lexical"].gain is None
    assert figures["embedding"].gain is None
    gain = figures["learned"].gain
    assert gain["over"] == "embedding"
    assert gain["value"] == pytest.approx(figures["learned"].value - figures["embedding"].value)
    assert 0 < gain["low"] < gain["value"] < gain["high"]
    assert (figures["learned"].n, figures["learned"].clusters) == (200, 50)
    equal = measure(Benchmark("b", "B", "auc", rows), scores | {"learned": scores["embedding"]}, resamples=200)
    assert (equal["learned"].gain["low"], equal["learned"].gain["high"]) == (0.0, 0.0)


def test_an_answer_that_failed_counts_for_nobody():
    rows = [comparison(1.0, "a"), comparison(0.0, "b"), comparison(0.0, "c")]
    figures = measure(
        Benchmark("b", "B", "auc", rows),
        {"lexical": np.array([0.5, 0.1, 0.9]), "other": np.array([0.5, 0.1, np.nan])},
        resamples=100,
    )
    assert (figures["lexical"].value, figures["lexical"].n, figures["lexical"].failures) == (1.0, 2, 0)
    assert figures["other"].failures == 1


class Whole(CritiqueScorer):
    """Reads critiques as a whole; fails on one."""

    name = "whole"

    def score(self, critiques, pairs):
        return [
            CritiqueMatch(0, 0, 0, failure="no") if c == "fail" else CritiqueMatch(0.2, float(c == "x\ny"), 0.3)
            for c, p in zip(critiques, pairs, strict=True)
            if p.critiques[0].text == "r"
        ]


def test_a_scorer_that_reads_critiques_as_a_whole_gives_recall_or_f1():
    rows = [comparison(generated=g, reference=("r",)) for g in (("x", "y"), ("z",), ("fail",))]
    np.testing.assert_array_equal(answers(Whole(), Benchmark("b", "B", "auc", rows)), [1.0, 0.0, np.nan])
    np.testing.assert_array_equal(answers(Whole(), Benchmark("b", "B", "spearman", rows)), [0.3, 0.3, np.nan])


ITEMS = [Reasons("i", ("r1", "r2", "r3"), ("c1", "c2")), Reasons("j", ("s1", "s2", "s3"), ("d1",))]


def test_a_right_reason_is_never_compared_with_itself():
    rows = right_or_confusing(ITEMS)
    assert all(c.generated != c.reference for c in rows)
    assert [sum(c.label == y for c in rows if c.cluster == "i") for y in (1, 0)] == [6, 6]


def test_the_control_takes_references_from_another_item_and_leaves_labels_with_the_candidates():
    rows = right_or_confusing(ITEMS, rotation=1)
    assert {(c.generated[0][0], c.reference[0][0]) for c in rows} == {("r", "s"), ("c", "s"), ("s", "r"), ("d", "r")}
    assert all(c.label == (c.generated[0][0] in "rs") for c in rows)


CRITIQUES = [
    CritiqueUnits("0", "human_critique", ("u",), ("p", "q"), (True, False), 0.5),
    CritiqueUnits("1", "human_critique", ("v", "w"), ("s",), (True,), 1.0),
]


def test_metacritique_comparisons_and_their_two_controls():
    assert units_covered(CRITIQUES)[0] == comparison(1.0, "0", generated=("u",), reference=("p",))
    assert [(c.generated, c.reference, c.label) for c in units_covered(CRITIQUES, 1)] == [
        (("v", "w"), ("p",), 1.0),
        (("v", "w"), ("q",), 0.0),
        (("u",), ("s",), 1.0),
    ]
    assert [c.stratum for c in units_covered(CRITIQUES, within=True)] == ["0 0", "0 1", "1 0"]
    shuffled = references_shuffled(CRITIQUES, 1, random.Random(0))
    assert [(c.generated, c.label) for c in shuffled] == [(("u",), 1.0), (("u",), 0.0), (("v", "w"), 1.0)]
    assert [c.reference for c in shuffled[:2]] == [("s",), ("s",)]
    assert shuffled[2].reference[0] in "pq"


def test_same_or_other_is_balanced_and_never_pairs_an_item_with_itself():
    items = [(str(i), (f"{i}a", f"{i}b", f"{i}c")) for i in range(5)]
    rows = same_or_other(items, random.Random(1))
    assert sum(c.label for c in rows) == len(rows) / 2
    assert all((c.generated[0][0] == c.reference[0][0]) == c.label for c in rows)


def small_data(folder):
    meta = folder / "metacritique"
    meta.mkdir(parents=True)
    critique = {"aius": ["the sum is wrong"], "recall_labels": [True, False], "f1_score": 0.5}
    rows = [
        {
            "index": i,
            "gpt4_critique": {"aius": [f"sum {i} is wrong", "no source is given"]},
            "human_critique": critique,
            "llm1_critique": critique,
            "llm2_critique": critique | {"recall_labels": [False, False], "f1_score": 0.1},
        }
        for i in range(3)
    ]
    (meta / "annotation_data.json").write_text(json.dumps(rows))
    argkp = folder / "argkp2021" / "test_data"
    argkp.mkdir(parents=True)
    (argkp / "arguments_test.csv").write_text(
        "arg_id,argument,topic,stance\na0,taxes fund schools,t,1\na1,taxes hurt,t,1\n"
    )
    (argkp / "key_points_test.csv").write_text("key_point_id,key_point,topic,stance\nk0,Taxes fund schools,t,1\n")
    (argkp / "labels_test.csv").write_text("arg_id,key_point_id,label\na0,k0,1\na1,k0,0\n")
    comve = folder / "comve" / "test"
    comve.mkdir(parents=True)
    (comve / "subtaskA_test_data.csv").write_text(
        "id,sent0,sent1\n1,Fish fly.,Fish swim.\n2,Snow is hot.,Snow melts.\n"
    )
    (comve / "subtaskA_gold_answers.csv").write_text("1,0\n2,0\n")
    (comve / "subtaskB_test_data.csv").write_text(
        "id,FalseSent,OptionA,OptionB,OptionC\n1,Fish fly.,Fish have no wings.,Fish are wet.,Fish are food.\n"
        "2,Snow is hot.,Snow is frozen.,Snow is white.,Snow is fun.\n"
    )
    (comve / "subtaskB_gold_answers.csv").write_text("1,A\n2,A\n")
    (comve / "subtaskC_gold_answers.csv").write_text(
        "1,Fish have no wings.,Fish lack wings.,Only birds have wings.\n2,Snow is frozen.,Snow is cold.,Heat melts.\n"
    )
    defacto = folder / "defacto"
    defacto.mkdir()
    feedback = {
        "summary": "Good.",
        "explanation": "the year is wrong",
        "instruction": "change the year",
        "evidence": "",
    }
    (defacto / "test.jsonl").write_text(
        "".join(
            json.dumps({"article": f"a{i}", "candidate": "Bad.", "doc_id": i, "has_error": True, "feedback": feedback})
            + "\n"
            for i in range(3)
        )
    )
    return folder


def test_the_verb_prints_and_saves_one_table(tmp_path, capsys):
    data = small_data(tmp_path / "data")
    scorers = {"lexical": ClassSpec("lexical"), "exact": ClassSpec("exact")}
    result = validate(str(data), str(tmp_path / "out"), scorers, resamples=100)
    saved = Validation.from_dict(json.loads((tmp_path / "out" / "validation.json").read_text()))
    assert saved.to_dict() == json.loads(json.dumps(result.to_dict()))
    table = (tmp_path / "out" / "validation.md").read_text()
    assert table == saved.markdown()
    assert len(table.splitlines()) == 2 + len(standard_benchmarks(data))
    assert "ComVE test: right" in capsys.readouterr().out
    figure = saved.figures["lexical"]["argkp_pooled"]
    assert (figure.value, figure.n, figure.clusters) == (1.0, 2, 2)
    assert "over lexical" in table


def test_limit_keeps_fewer_items(tmp_path):
    data = small_data(tmp_path)
    sizes = {b.name: len(b.comparisons) for b in standard_benchmarks(data, limit=2)}
    assert sizes["metacritique_units"] == 2 * 3 * 2
    with pytest.raises(UserError, match="at least two items"):
        standard_benchmarks(data, limit=1)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("metacritique/annotation_data.json", "recall_labels", "recall", "missing field 'recall_labels'"),
        ("metacritique/annotation_data.json", "[true, false]", "[true]", "1 recall_labels for 2 units"),
        ("argkp2021/test_data/labels_test.csv", "a1,k0,0", "a9,k0,0", "labels_test.csv:3: an unknown argument"),
        ("argkp2021/test_data/labels_test.csv", "a1,k0,0", "a1,k0,x", "label other than 0 and 1"),
        ("argkp2021/test_data/arguments_test.csv", "argument,", "text,", "missing field 'argument'"),
    ],
)
def test_malformed_data_says_where(tmp_path, file, old, new, message):
    data = small_data(tmp_path)
    text = (data / file).read_text()
    assert old in text
    (data / file).write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        standard_benchmarks(data)


@pytest.mark.parametrize("load", [load_metacritique, lambda path: load_argkp(path, "test")], ids=["meta", "argkp"])
def test_missing_data_says_where_it_is_published(tmp_path, load):
    with pytest.raises(UserError, match=r"no such folder; .* is published at https://github.com"):
        load(tmp_path / "nowhere")


@pytest.mark.data
def test_the_real_data_have_the_sizes_that_the_docs_state(data_dir):
    benchmarks = {b.name: b for b in standard_benchmarks(data_dir)}
    assert len(benchmarks["metacritique_units"].comparisons) == 1236
    assert len(benchmarks["argkp_pooled"].comparisons) == 3426
    assert len(benchmarks["comve_confusing"].comparisons) == 12_000
    lexical = run_validation({"lexical": LexicalScorer()}, [benchmarks["metacritique_units"]], resamples=100)
    assert lexical.figures["lexical"]["metacritique_units"].value == pytest.approx(0.643, abs=0.001)


@pytest.mark.data
@pytest.mark.slow
def test_the_default_scorer_beats_both_baselines_and_not_by_style(data_dir):
    """The claim of docs/critique_scorers.md, on the data that it is made about."""
    from nlhf.critique.validation import default_scorers

    wanted = ("metacritique_units", "comve_confusing", "metacritique_control", "comve_control")
    benchmarks = [b for b in standard_benchmarks(data_dir, rotations=2) if b.name in wanted]
    built = {name: spec.build() for name, spec in default_scorers().items()}
    figures = run_validation(built, benchmarks, resamples=500).figures["learned"]
    assert figures["metacritique_units"].gain["low"] > 0
    assert figures["comve_confusing"].gain["low"] > 0
    assert abs(figures["metacritique_control"].value - 0.5) < 0.05
    assert abs(figures["comve_control"].value - 0.5) < 0.05
