import json

import pytest

from nlhf.formats import get_format
from nlhf.formats.her_rm import without_plan
from nlhf.pairs import Pair, Turn
from tests.formats.replies import her_reply

LABELS = {"cand_1": "A", "cand_2": "B", "tie": "tie"}


def parse(text):
    return get_format("her_rm").parse(text)


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        pytest.param(f"Here it is:\n```json\n{her_reply('cand_2')}\n```\nI hope it helps {{}}.", "B", id="fence"),
        pytest.param('{"result": {"better_response": "cand_1"}}', "A", id="result-is-an-object"),
        pytest.param('{"better_response": "tie"}', "tie", id="no-result"),
        pytest.param('{ "result" : [ { "better_response" : "cand_1" } ] }', "A", id="blanks"),
        pytest.param(json.dumps(json.loads(her_reply("cand_2")), indent=2), "B", id="indented"),
        pytest.param(her_reply("cand_2", cand_1='{"better_response": "cand_1"} }]}'), "B", id="braces-in-a-string"),
        pytest.param(her_reply("cand_2")[:-3], "B", id="cut-off-after-the-verdict"),
        pytest.param(her_reply("cand_2")[:-10], None, id="cut-off-in-the-verdict"),
        pytest.param(her_reply("cand_2")[:-40], None, id="cut-off-before-the-verdict"),
        pytest.param(her_reply("cand_1") + "\nOn reflection:\n" + her_reply("cand_2"), "B", id="retry"),
        pytest.param(her_reply("cand_1") + "\nOn reflection:\n" + her_reply("cand_2")[:-3], "B", id="retry-cut-off"),
        pytest.param(her_reply("cand_1") + "\nOn reflection:\n" + her_reply("cand_2")[:50], "A", id="retry-unfinished"),
        pytest.param('{"result": [{"better_response": "cand_1"}, {"better_response": "cand_1"}]}', "A", id="agree"),
        pytest.param('{"result": [{"better_response": "cand_1"}, {"better_response": "cand_2"}]}', None, id="disagree"),
        pytest.param(r'{"analysis": "\alpha \(x\) \frac{1}{2} \u12", "better_response": "cand_1"}', "A", id="latex"),
        pytest.param('{"analysis": "two\nlines", "better_response": "cand_2"}', "B", id="line-end-in-a-string"),
        pytest.param('{"analysis": "x", "better_response": "cand_2",}', "B", id="comma-too-many"),
        pytest.param('{"better_response": "cand_3"}', None, id="unknown"),
        pytest.param('{"better_response": null}', None, id="null"),
        pytest.param('{"better_response": ["cand_1"]}', None, id="list"),
        pytest.param('{"result": "cand_1"}', None, id="result-is-text"),
        pytest.param("I prefer cand_1.", None, id="prose"),
        pytest.param('{"result": [' * 3000, None, id="too-deep"),
    ],
)
def test_replies(reply, label):
    assert parse(reply).label == label


def test_the_critique_is_the_comparisons_and_the_analysis():
    assert parse(her_reply("cand_1", critique="A praise: warm")).critique == "Tone: x\nA praise: warm"
    assert parse('{"analysis": "just text", "better_response": "tie"}').critique == "just text"
    assert parse('{"better_response": "tie"}').critique is None


def test_the_principles_are_in_reach():
    result = get_format("her_rm").result("<think>hm</think>" + her_reply("cand_1"))
    assert result["principle"]["Principle 1"]["principle_name"] == "Tone"
    assert result["analysis"]["principle_comparisons"][0]["winner"] == "cand_1"
    assert get_format("her_rm").result("no") is None


def test_the_prompt_has_the_contracts_layout():
    context = [Turn("system", "A ball at Netherfield."), Turn("Elizabeth", "Elizabeth: Good evening.")]
    text = get_format("her_rm").render(Pair("p", context, "Darcy: Hm.", "Darcy: Dance?", "B"))[0]["content"]
    assert text.startswith("##prompt info\n\n### Role\n")
    dialogue = "id:1, system(system): A ball at Netherfield.\nid:2, Elizabeth(user): Elizabeth: Good evening."
    assert f"**Dialogue Context**\n{dialogue}\n\n**Response Candidate 1**\nDarcy: Hm.\n\n" in text
    assert text.endswith("**Response Candidate 2**\nDarcy: Dance?")


@pytest.mark.parametrize(
    ("turn", "seen"),
    [
        ("<system_thinking>plan</system_thinking>Darcy: Hm.", "Darcy: Hm."),
        ("<system_think>plan</system_think>\nDarcy: Hm.", "Darcy: Hm."),
        ("plan</system_thinking>Darcy: Hm.", "Darcy: Hm."),
        ("Darcy: Hm. <system_thinking>plan", "Darcy: Hm. "),
        ("<role_thinking>proud</role_thinking>Darcy: Hm.", "<role_thinking>proud</role_thinking>Darcy: Hm."),
    ],
)
def test_the_judge_sees_role_thinking_and_never_system_thinking(turn, seen):
    assert without_plan(turn) == seen
    shown = get_format("her_rm").render(Pair("p", [Turn("user", turn)], turn, turn, "A"))[0]["content"]
    assert "plan" not in shown.rpartition("### Input")[2]
    assert shown.rpartition("### Input")[2].count(seen.strip()) == 3


@pytest.mark.parametrize("better", LABELS)
def test_round_trip_of_the_contract(better):
    assert parse(her_reply(better)).label == LABELS[better]
