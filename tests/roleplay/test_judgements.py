import json

import pytest

from nlhf.evaluation.metrics import compute
from nlhf.evaluation.records import Record
from nlhf.judge import Judgement
from nlhf.pairs import Pair, Turn
from nlhf.roleplay.judgements import (
    COMPARISON_FIELDS,
    PRINCIPLE_FIELDS,
    contract_problems,
    entailment,
    mixed_selection,
    principle_figures,
    read_case,
)
from tests.roleplay.cases import reply, result


@pytest.mark.parametrize(
    ("verdict", "winners", "expected"),
    [
        pytest.param("A", ["A", "A", "tie"], "entailed", id="majority"),
        pytest.param("A", ["A", "B", "A"], "entailed", id="mixed-majority"),
        pytest.param("B", ["A", "B", "A"], "open", id="minority-may-weigh-more"),
        pytest.param("B", ["A", "A"], "contradicted", id="nothing-speaks-for-it"),
        pytest.param("B", ["tie", "tie"], "contradicted", id="a-winner-out-of-ties"),
        pytest.param("tie", ["tie", "tie"], "entailed", id="all-ties"),
        pytest.param("tie", ["A", "B"], "entailed", id="balance"),
        pytest.param("tie", ["A", "B", "A"], "open", id="tie-against-a-majority"),
        pytest.param("tie", ["A", "tie"], "contradicted", id="tie-although-one-alone-wins"),
        pytest.param("A", ["A", "B"], "open", id="winner-out-of-balance"),
        pytest.param("cand_3", ["A"], None, id="no-verdict"),
        pytest.param("A", ["cand_3"], None, id="no-winner"),
        pytest.param("A", [], None, id="no-comparison"),
    ],
)
def test_whether_the_winners_entail_the_verdict(verdict, winners, expected):
    assert entailment(read_case(reply(verdict, *winners))) == expected


@pytest.mark.parametrize(
    ("verdict", "names", "winners", "expected"),
    [
        pytest.param("A", ["Out of character", "x", "y"], ["A", "B", "B"], "entailed", id="one-violation-decides"),
        pytest.param("B", ["Out of character", "x", "y"], ["A", "B", "B"], "contradicted", id="whatever-else"),
        pytest.param("B", ["Out of character", "x", "y"], ["tie", "B", "A"], "open", id="a-tie-decides-nothing"),
        pytest.param("B", ["Anachronism", "Repetition", "x"], ["A", "B", "B"], "entailed", id="both-violate-something"),
        pytest.param("B", ["Distinct voice", "x", "y"], ["A", "B", "B"], "entailed", id="a-positive-one-only-counts"),
    ],
)
def test_negative_principles_come_first(verdict, names, winners, expected):
    assert entailment(read_case(reply(verdict, *winners, names=names))) == expected


def test_exchanging_the_responses_leaves_the_entailment():
    for winners in (["A", "B", "A"], ["A", "tie"], ["tie"], ["B", "B", "A", "A"]):
        for verdict in ("A", "B", "tie"):
            other = {"A": "B", "B": "A", "tie": "tie"}
            exchanged = reply(other[verdict], *[other[w] for w in winners])
            assert entailment(read_case(reply(verdict, *winners))) == entailment(read_case(exchanged))


@pytest.mark.parametrize(
    ("winners", "mixed"),
    [
        (["A", "B"], True),
        (["A", "A"], False),
        (["A", "tie"], False),
        (["A"], None),
        (["A", "cand_3"], None),
        ([], None),
    ],
)
def test_mixed_selection(winners, mixed):
    assert mixed_selection(read_case(reply("A", *winners))) is mixed


@pytest.mark.parametrize(
    "text",
    ["", "cand_1 is better", '{"better_response": "cand_1"', json.dumps({"result": [{"principle": {}}]})],
    ids=["empty", "prose", "cut-off", "no-verdict"],
)
def test_a_reply_without_a_whole_result_is_no_case(text):
    assert read_case(text) is None


@pytest.mark.parametrize("analysis", [None, "text", [], {"principle_comparisons": "x"}, {"principle_comparisons": [1]}])
def test_a_result_whose_analysis_is_something_else_has_no_comparisons(analysis):
    case = read_case(json.dumps({"analysis": analysis, "better_response": "cand_1"}))
    assert (case.verdict, case.comparisons) == ("A", ())
    assert contract_problems(case)


def broken(change):
    row = result("A", "A", "B")
    change(row)
    return read_case(json.dumps(row))


def test_the_contract_is_kept_by_a_whole_result():
    assert contract_problems(read_case(reply("tie", "A", "B", "tie"))) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r.pop("principle"), "no principle"),
        (lambda r: r["principle"]["Principle 1"].pop("main_content"), "principle 1: no main_content"),
        (lambda r: r["principle"]["Principle 2"].update(dimension_name="Plot"), "principle 2: no dimension 'Plot'"),
        (lambda r: r["principle"]["Principle 2"].update(principle_level="turn"), "principle 2: no level 'turn'"),
        (lambda r: r["analysis"].pop("principle_comparisons"), "no comparison"),
        (lambda r: r["analysis"]["principle_comparisons"].pop(), "the principles compared are not those"),
        (lambda r: r["analysis"]["principle_comparisons"][0].update(winner="first"), "a winner is none of"),
        (lambda r: r["analysis"]["principle_comparisons"][1].update(comparison_reason=" "), "no comparison_reason"),
        (lambda r: r["analysis"].pop("principle_summary"), "no principle_summary"),
        (lambda r: r.update(better_response="cand_3"), "no verdict"),
    ],
)
def test_what_breaks_the_contract_is_named(change, problem):
    assert problem in "; ".join(contract_problems(broken(change)))


@pytest.mark.parametrize("name", ["her_rm", "her_rm_teacher"])
def test_the_fields_are_those_of_both_prompts(name):
    from nlhf.formats import get_format

    shape = get_format(name).prompt_text
    shape = json.loads(shape[shape.index('{"result"') : shape.index("\n\n", shape.index('{"result"'))])["result"][0]
    assert list(shape) == ["cand_1", "cand_2", "principle", "analysis", "better_response"] == list(result("A", "A"))
    assert tuple(shape["principle"]["Principle 1"]) == PRINCIPLE_FIELDS
    assert tuple(shape["analysis"]["principle_comparisons"][0]) == COMPARISON_FIELDS


def record(text, i, label="A", order="AB"):
    from nlhf.formats import get_format

    pair = Pair(f"p{i}", [Turn("user", "Knock.")], "Maren: Go.", "Maren: Come.", label)
    return Record.of(Judgement(pair.id, order, 0, get_format("her_rm").parse(text), "", 0), pair)


def test_figures_by_hand():
    """Five judgements: entailed, mixed; entailed, one winner; contradicted; verdict cut off; prose."""
    texts = [
        reply("A", "A", "B", "A", names=["Distinct voice", "x", "y"]),
        reply("tie", "tie"),
        reply("B", "A", "A"),
        reply("A", "A", "A")[:-40],
        "cand_1",
    ]
    found = {name: (m.k, m.n) for name, m in principle_figures([record(t, i) for i, t in enumerate(texts)]).items()}
    assert found == {
        "principles_read": (3, 5),
        "principles_compared": (6, 3),
        "principles_known": (pytest.approx(1 / 3), 3),
        "mixed_selection_rate": (1, 2),
        "entailed_rate": (2, 3),
        "contradicted_rate": (1, 3),
    }


def test_ties_are_a_class_of_their_own():
    """Labelled tie: found, missed, no verdict; labelled A: called a tie."""
    records = [record(reply("tie", "tie"), 0, "tie"), record(reply("A", "A"), 1, "tie"), record("?", 2, "tie")]
    records += [record(reply("tie", "tie"), 3, "A"), record(reply("tie", "tie"), 4, None)]
    found = compute(records, resamples=0)
    assert (found["tie_precision"].k, found["tie_precision"].n) == (1, 2)
    assert (found["tie_recall"].k, found["tie_recall"].n) == (1, 3)
