import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nlhf.cli import main
from nlhf.errors import UserError
from nlhf.files import write_jsonl
from nlhf.formats import get_format
from nlhf.formats.her_rm import JUDGEMENTS, exchange_candidates
from nlhf.pairs import Pair, Turn
from nlhf.rewards import JudgeReward, RewardConfig, well_formed
from nlhf.roleplay.teaching import TeacherReply, read_replies, taught_pairs
from nlhf.training import training_pairs
from tests.roleplay.cases import SCENE, reply, result

FIRST, SECOND = "Maren: Go away, option A.", "<system_thinking>plan</system_thinking>Maren: Come in."


def pair(label=None, name="p1", **changes):
    return Pair(name, [Turn("system", SCENE), Turn("Jo", "Open!")], FIRST, SECOND, label, **changes)


def teach(pairs, *replies):
    drops = Counter()
    return taught_pairs(pairs, [TeacherReply(*r) for r in replies], drops), dict(drops)


def test_a_reply_becomes_the_lesson_of_a_pair_without_its_plan():
    [taught], drops = teach([pair()], ("p1", "AB", reply("A", "A", "B", "A")))
    assert (taught.label, drops) == ("A", {})
    [row] = taught.meta[JUDGEMENTS]
    assert (row["cand_1"], row["cand_2"]) == (FIRST, "Maren: Come in.")
    assert Pair.from_dict(json.loads(json.dumps(taught.to_dict()))) == taught


@pytest.mark.parametrize("verdict", ["A", "B", "tie"])
def test_both_orders_of_a_lesson_are_the_contract_and_say_the_label(verdict):
    judge_format = get_format("her_rm")
    [taught], _ = teach([pair()], ("p1", "AB", reply(verdict, verdict, "tie", verdict)))
    for shown in (taught, taught.swap()):
        text = "".join(judge_format.target(shown, None))
        whole = json.loads(text)["result"][0]
        assert judge_format.parse(text).label == shown.label
        assert list(whole) == ["cand_1", "cand_2", "principle", "analysis", "better_response"]
        assert whole["cand_1"] == judge_format.variables(shown)["response_a"]
        assert list(whole["analysis"]["principle_comparisons"][0]) == list(
            result("A", "A")["analysis"]["principle_comparisons"][0]
        )


def test_an_exchanged_lesson_names_the_other_response_everywhere_but_in_the_responses():
    [taught], _ = teach([pair()], ("p1", "AB", reply("A", "A")))
    whole = json.loads("".join(get_format("her_rm").target(taught.swap(), None)))["result"][0]
    [row] = whole["analysis"]["principle_comparisons"]
    assert row["winner"] == whole["better_response"] == "cand_2"
    assert row["cand_2_performance"] == "Response 2 sends him away."
    assert row["cand_1_performance"] == "Response 1 gives in."
    assert row["comparison_reason"].startswith("Candidate 2 and candidate 1 differ; cand_2 is first.")
    assert whole["analysis"]["principle_summary"] == "cand_2 wins by weight."
    assert whole["cand_2"] == FIRST  # "option A" is the response's own words


texts = st.text(max_size=20) | st.sampled_from(["Response 1", "cand_2 wins", "candidates 1 and 2", "\nResponse 2"])
rows = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cand_1", "cand_2", "cand_1_performance", "winner"]) | texts, inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["cand_1", "cand_2", "analysis", "better_response", "cand_1_x"]), rows))
def test_exchanging_twice_changes_nothing(row):
    if ("cand_1" in row) == ("cand_2" in row):
        assert exchange_candidates(exchange_candidates(row)) == row


def test_a_reply_in_the_other_order_is_taken_as_it_is():
    """Order BA: what the teacher read as candidate 1 is response B of the data."""
    [taught], _ = teach([pair()], ("p1", "BA", reply("B", "B")))
    assert taught.label == "A"
    assert taught.meta[JUDGEMENTS][0]["cand_1"] == "Maren: Come in."
    both, _ = teach([pair()], ("p1", "AB", reply("A", "A", "A")), ("p1", "BA", reply("B", "B")))
    for shown, principles in ((both[0], 2), (both[0].swap(), 1)):
        whole = json.loads("".join(get_format("her_rm").target(shown, None)))["result"][0]
        assert len(whole["principle"]) == principles  # each order has the reply that was written for it


@pytest.mark.parametrize(
    ("label", "replies", "drops"),
    [
        pytest.param(None, [("AB", "cand_1")], {"the reply is not a whole result": 1}, id="unread"),
        pytest.param(None, [("AB", reply("A", "A")[:-3])], {"the reply is not a whole result": 1}, id="cut-off"),
        pytest.param(None, [("AB", reply("B", "A"))], {"the principles contradict the verdict": 1}, id="contradiction"),
        pytest.param("B", [("AB", reply("A", "A"))], {"the verdict is not the pair's label": 1}, id="label"),
        pytest.param("tie", [("AB", reply("A", "A"))], {"the verdict is not the pair's label": 1}, id="label-tie"),
        pytest.param(
            None,
            [("AB", reply("A", "A")), ("BA", reply("A", "A"))],
            {"the orders of a pair without a label have different verdicts": 2},
            id="flipped",
        ),
        pytest.param(None, [], {}, id="nothing"),
    ],
)
def test_what_teaches_nothing_is_left_out_and_counted(label, replies, drops):
    assert teach([pair(label)], *[("p1", *r) for r in replies]) == ([], drops)


def test_the_first_usable_reply_of_an_order_counts():
    replies = [("p1", "AB", "?"), ("p1", "AB", reply("A", "A", "A")), ("p1", "AB", reply("A", "A"))]
    [taught], drops = teach([pair("A")], *replies)
    assert len(taught.meta[JUDGEMENTS][0]["principle"]) == 2
    assert drops == {"the reply is not a whole result": 1, "another reply in the same order": 1}


def test_a_lesson_of_other_responses_or_another_label_is_refused():
    [taught], _ = teach([pair()], ("p1", "AB", reply("A", "A")))
    judge_format = get_format("her_rm")
    changed = Pair.from_dict(taught.to_dict() | {"response_a": "another"})
    with pytest.raises(UserError, match=r"pair 'p1': no result in meta\.her_rm_judgements"):
        judge_format.target(changed, None)
    with pytest.raises(UserError, match=r"its label is 'B', but the result .* says 'cand_1'"):
        judge_format.target(Pair.from_dict(taught.to_dict() | {"label": "B"}), None)
    with pytest.raises(UserError, match="no result"):
        judge_format.target(Pair.from_dict(taught.to_dict() | {"meta": {JUDGEMENTS: "x"}}), None)


# ------------------------------------------------------------------------------------------------------------ the verb


def written(tmp_path, replies, nested=False):
    write_jsonl(tmp_path / "pairs.jsonl", [pair(name="p1").to_dict(), pair("tie", name="p2").to_dict()])
    found = [{"pair_id": i, "order": order, "reply": text} for i, order, text in replies]
    if nested:
        found = [{"id": row.pop("pair_id"), "judgements": [row]} for row in found]
    write_jsonl(tmp_path / "judgements.jsonl", found)
    return [
        *("roleplay", "teach", "--data.source", "jsonl", "--data.path", str(tmp_path / "pairs.jsonl")),
        *("--out", str(tmp_path / "taught.jsonl"), "--judgements"),
    ]


@pytest.mark.parametrize("nested", [False, True], ids=["evaluate", "judge"])
def test_the_verb_writes_pairs_that_can_be_trained_on(tmp_path, capsys, nested):
    replies = [("p1", "AB", reply("A", "A")), ("p2", "BA", reply("tie", "tie")), ("p2", "AB", "?")]
    command = written(tmp_path, replies, nested)
    where = str(tmp_path / "judgements.jsonl") if nested else str(tmp_path)
    assert main([*command, where]) == 0
    assert "2 of 2 pairs with 2 of 3 replies" in capsys.readouterr().out
    taught = [Pair.from_dict(json.loads(line)) for line in (tmp_path / "taught.jsonl").read_text().splitlines()]
    assert [p.label for p in taught] == ["A", "tie"]
    assert main([*command, where]) == 2  # it does not overwrite


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([("p9", "AB", reply("A", "A"))], "1 pairs are not in the data, for example 'p9'"),
        ([("p1", "AB", "?")], "none of 1 replies can be learned from"),
        ([("p1", "A first", "?")], "judgements.jsonl:1: not a judgement"),
        ([(None, "AB", "?")], "does not name its pair"),
    ],
    ids=["foreign", "nothing", "order", "no-id"],
)
def test_judgements_that_cannot_be_used_are_refused(tmp_path, capsys, replies, message):
    assert main([*written(tmp_path, replies), str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "taught.jsonl").exists()


@pytest.mark.parametrize("name", ["judgements.jsonl", "pairs.jsonl"])
def test_what_is_read_is_not_overwritten(tmp_path, capsys, name):
    command = written(tmp_path, [("p1", "AB", reply("A", "A"))])
    before = (tmp_path / name).read_bytes()
    out = ["--overwrite", "true", "--out", str(tmp_path / "." / name)]
    assert main([*command, str(tmp_path), *out]) == 2
    assert "is read here; choose another file" in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == before


def test_a_row_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "judgements.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match=r"judgements\.jsonl:1: a row must be an object"):
        list(read_replies(tmp_path))


# ------------------------------------------------------------------------------------------------------------ training


def test_ties_are_trained_on_as_a_class(tmp_path):
    """Exact match with all three labels, in both orders, by the reward and the data of `nlhf train`."""
    from nlhf.sources import DataConfig

    rows = [pair(label, name=label).to_dict() | {"response_b": f"Maren: {label}."} for label in ("A", "B", "tie")]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    data = [DataConfig(source="jsonl", path=str(tmp_path / "pairs.jsonl"))]
    prepared = training_pairs(data, get_format("her_rm"), "both", seed=0)
    assert Counter(p.label for p in prepared.pairs) == {"A": 2, "B": 2, "tie": 2}
    config = RewardConfig(max_lines=30, max_characters=20_000)
    reward = JudgeReward(prepared.pairs, get_format("her_rm").parse, config)
    for said in ("A", "B", "tie"):
        completions = [reply(said, said, said, said, said, said)] * 6
        rewards = reward(completions, range(6), lambda *_: None)
        assert rewards == [float(p.label == said) for p in prepared.pairs]
    assert reward(["cand_1"] * 6, range(6), lambda *_: None) == [-1.0] * 6


def test_five_principles_are_a_format_failure_under_the_limits_of_rm_nlhf():
    """Why docs/roleplay.md sets reward.max_lines: a line of the critique is a principle."""
    verdict = get_format("her_rm").parse(reply("A", "A", "A", "A", "A", "A"))
    assert not well_formed(verdict, RewardConfig())
    assert well_formed(verdict, RewardConfig(max_lines=30, max_characters=20_000))
