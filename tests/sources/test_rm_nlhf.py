import json
from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique
from nlhf.sources.rm_nlhf import load

CRITIQUE = {"strengths_A": "Clear.", "weaknesses_A": "", "strengths_B": "", "weaknesses_B": "Wrong.\nRude."}


def make_info(**change):
    return {
        "dataset_type": "DataWithHumanCritique",
        "context": [{"role": "user", "content": "问题 {{x}}"}],
        "response_A": "one",
        "response_B": "two",
        "winner": "A",
        "processed_critique": CRITIQUE,
    } | change


@pytest.fixture
def read(tmp_path):
    def read_rows(*rows):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        drops = Counter()
        return list(load(str(tmp_path), "train", drops)), drops

    return read_rows


EXPECTED = HumanCritique(strengths_a="Clear.", weaknesses_b="Wrong.\nRude.")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"extra_info": make_info()}, id="objects"),
        pytest.param({"extra_info": json.dumps(make_info())}, id="all-as-json"),
        pytest.param({"extra_info": make_info(processed_critique=json.dumps(CRITIQUE))}, id="critique-as-json"),
        pytest.param({"extra_info": make_info(context=json.dumps(make_info()["context"]))}, id="context-as-json"),
        pytest.param(
            {"extra_info": json.dumps(make_info(processed_critique=json.dumps(CRITIQUE)))}, id="json-within-json"
        ),
        pytest.param(
            {"extra_info": make_info(processed_critique=CRITIQUE | {"weaknesses_B": ["Wrong.", " Rude. "]})}, id="lists"
        ),
        pytest.param({"extra_info": make_info(processed_critique=CRITIQUE | {"weaknesses_A": None})}, id="null-field"),
        pytest.param(make_info(), id="flat-row"),
    ],
)
def test_every_spelling_of_a_row_reads_the_same(read, row):
    ((pair,), drops) = read(row)
    assert not drops
    assert (pair.id, pair.label, pair.subset) == ("rm_nlhf-train-1", "A", "DataWithHumanCritique")
    assert [(t.role, t.content) for t in pair.context] == [("user", "问题 {{x}}")]
    assert pair.critiques == [EXPECTED]


@pytest.mark.parametrize(
    "critique",
    [None, "", "null", "{}", {}, {"strengths_A": "", "weaknesses_A": " "}, json.dumps({"strengths_A": None})],
    ids=repr,
)
def test_an_empty_critique_leaves_the_pair_unlabelled(read, critique):
    ((pair,), drops) = read({"extra_info": make_info(processed_critique=critique)})
    assert not pair.has_critique
    assert not drops


@pytest.mark.parametrize("kind", ["Helpsteer3_A", "DataWithHumanCritique", "outcome_only", None])
def test_dataset_type_does_not_decide_who_is_labelled(read, kind):
    bare = {k: v for k, v in make_info(dataset_type=kind).items() if k != "processed_critique"}
    (with_critique, without), _ = read({"extra_info": make_info(dataset_type=kind)}, {"extra_info": bare})
    assert with_critique.has_critique
    assert not without.has_critique


@pytest.mark.parametrize("critique", ["not JSON", "[1]", [1], 7, CRITIQUE | {"strengths_A": {"x": 1}}], ids=repr)
def test_an_unreadable_critique_is_counted_and_never_taken_for_none(read, critique):
    pairs, drops = read({"extra_info": make_info(processed_critique=critique)})
    assert pairs == []
    assert drops == {"unreadable critique": 1}


def test_a_row_without_winner_is_counted(read):
    pairs, drops = read({"extra_info": make_info(winner=None)})
    assert pairs == []
    assert drops == {"no winner": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"extra_info": "x"}, ":1: field 'extra_info' is text but not JSON", id="no-json"),
        pytest.param({"extra_info": [1]}, "must be an object or JSON of one, got list", id="list"),
        pytest.param({"extra_info": make_info(winner="response_A")}, "field 'winner' must be", id="winner"),
        pytest.param({"extra_info": {"response_a": "x"}}, "missing field 'context'", id="missing"),
        pytest.param(
            {"extra_info": make_info(processed_critique={"strengths_a": "x"})}, "Did you mean 'strengths_a'", id="names"
        ),
        pytest.param({"extra_info": make_info(response_A=None)}, "'response_a' must be a string", id="null-response"),
    ],
)
def test_malformed_rows_say_where(read, row, message):
    with pytest.raises(UserError, match=message) as error:
        read(row)
    assert "train.jsonl:1" in str(error.value)
