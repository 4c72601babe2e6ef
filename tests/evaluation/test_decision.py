"""One decision on a pair from all its judgements."""

import pytest

from nlhf.evaluation.decision import Decision
from nlhf.evaluation.records import reply_hash
from nlhf.judge import Judgement
from nlhf.verdict import Verdict


def said(order: str, label: str | None, sample: int = 0, probability=None, strength=None, **more) -> Judgement:
    """A judgement with its label in the order shown."""
    return Judgement("p", order, sample, Verdict(label, strength, **more), "hash", 3, probability)


@pytest.mark.parametrize(
    ("judgements", "label", "consistent"),
    [
        ([said("AB", "A"), said("BA", "B")], "A", True),
        ([said("AB", "A"), said("BA", "A")], "tie", False),  # the first shown, whichever it is
        ([said("AB", "tie"), said("BA", "tie")], "tie", True),
        ([said("AB", "B"), said("BA", None)], "B", None),
        ([said("AB", None), said("BA", None)], None, None),
        ([said("BA", "B")], "A", None),
        ([said("AB", "A", 0), said("AB", "A", 1), said("BA", "A", 0), said("BA", "B", 1)], "A", False),
    ],
    ids=["agree", "contradict", "ties", "one silent", "both silent", "one order", "votes"],
)
def test_by_majority(judgements, label, consistent):
    decision = Decision.of(judgements)
    assert (decision.label, decision.consistent, decision.probability) == (label, consistent, None)


@pytest.mark.parametrize(
    ("ab", "ba", "label", "probability"),
    [(0.9, 0.4, "A", 0.75), (0.6, 0.9, "B", 0.35), (0.7, 0.7, "tie", 0.5)],
    ids=["A outweighs", "B outweighs", "slot only"],
)
def test_probabilities_decide_where_there_are_any(ab, ba, label, probability):
    labels = ["A" if p > 0.5 else "B" for p in (ab, ba)]
    decision = Decision.of([said("AB", labels[0], probability=ab), said("BA", labels[1], probability=ba)])
    assert decision.label == label
    assert decision.probability == pytest.approx(probability)


def test_verdicts_that_are_ties_stay_ties_whatever_is_likelier_of_a_and_b():
    assert Decision.of([said("AB", "tie", probability=0.6), said("BA", "tie", probability=0.4)]).label == "tie"


def test_strengths_count_in_the_order_given():
    judgements = [said("AB", "A", strength=-3), said("BA", "A", strength=-1)]
    decision = Decision.of(judgements, "mean_strength")
    assert (decision.label, decision.strength) == ("A", -1)
    assert Decision.of(judgements).label == "tie"


def test_the_text_says_what_was_decided_and_why():
    text = str(
        Decision.of(
            [
                said("AB", "A", probability=0.8, critique="A praise: short"),
                said("BA", "B", probability=0.2, critique="B praise: short"),
            ]
        )
    )
    assert text.startswith("A is better (probability of A 0.80, both orders agree)\n")
    assert "Order AB: A\nA praise: short" in text
    assert "Order BA: A (its critique calls B the first response, A)\nB praise: short" in text


def test_a_row_keeps_every_reply_with_hashes():
    row = Decision.of([said("BA", "A", raw="[[A]]", truncated=True)]).to_dict()
    [judgement] = row["judgements"]
    assert (judgement["label"], judgement["reply"], judgement["prompt_hash"]) == ("B", "[[A]]", "hash")
    assert judgement["reply_hash"] == reply_hash("[[A]]")
    assert judgement["truncated"] is True
