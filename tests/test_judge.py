"""The judge: both orders, several samples, and labels that come back in the data's own order."""

import re

import pytest

from nlhf.formats import get_format
from nlhf.judge import ORDERS, Judge, Judgement, Reply, prompt_hash, shown_pairs
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.verdict import Verdict

PAIRS = [
    Pair("p0", [Turn("user", "first?")], "splendid", "dismal", "A", critiques=[HumanCritique(strengths_a="good")]),
    Pair("p1", [Turn("user", "第二?")], "dismal", "splendid {braces} \ud800", "B"),
]


class Scripted:
    """Finds "splendid" and says so with the number of the sample; keeps what it was asked."""

    def __init__(self):
        self.calls: list[tuple[list, int]] = []

    def generate(self, prompts, samples=1, progress=None):
        self.calls.append((list(prompts), samples))
        if progress:
            progress(len(prompts))
        return [[self._reply(p[0]["content"], k) for k in range(samples)] for p in prompts]

    def _reply(self, prompt: str, k: int) -> Reply:
        side = "A" if prompt.index("splendid") < prompt.index("dismal") else "B"
        return Reply(f"<critics>\n{side} praise: reason {k}\n</critics>\n<choice>[[{side}]]</choice>", k == 2, 7 + k)


@pytest.fixture
def generator():
    return Scripted()


@pytest.fixture
def judge(generator):
    return Judge(get_format("rm_nlhf"), generator)


def test_judgements_come_by_pair_then_order_then_sample(judge, generator):
    judgements = judge.judge(PAIRS, samples=3)
    assert [(j.pair_id, j.order, j.sample) for j in judgements] == [
        (pair_id, order, k) for pair_id in ("p0", "p1") for order in ("AB", "BA") for k in range(3)
    ]
    [(prompts, samples)] = generator.calls  # one call, so that the generator may batch as it likes
    assert (len(prompts), samples) == (4, 3)


def test_the_same_response_wins_in_both_orders(judge):
    judgements = judge.judge(PAIRS)
    assert [j.verdict.label for j in judgements] == ["A", "B", "B", "A"]  # as shown
    assert [j.label for j in judgements] == ["A", "A", "B", "B"]  # in the data's order
    assert [j.verdict.critique[0] for j in judgements] == ["A", "B", "B", "A"]


def test_replies_are_kept_with_length_and_truncation(judge):
    judgements = judge.judge(PAIRS[:1], orders=("AB",), samples=3)
    assert [(j.verdict.critique, j.tokens, j.verdict.truncated) for j in judgements] == [
        ("A praise: reason 0", 7, False),
        ("A praise: reason 1", 8, False),
        ("A praise: reason 2", 9, True),
    ]
    assert judgements[0].verdict.raw.endswith("<choice>[[A]]</choice>")


@pytest.mark.parametrize("orders", [("AB",), ("BA",), ("BA", "AB")], ids="-".join)
def test_orders_are_the_callers(judge, orders):
    judgements = judge.judge(PAIRS, orders=orders)
    assert [j.order for j in judgements] == [*orders, *orders]
    assert {j.label for j in judgements if j.pair_id == "p1"} == {"B"}


def test_no_pairs_no_judgements(judge):
    assert judge.judge([]) == []


def test_progress_reaches_the_generator(judge):
    done = []
    judge.judge(PAIRS, progress=done.append)
    assert done == [4]


def test_a_generator_that_loses_a_prompt_is_found_out(judge, generator):
    generator.generate = lambda prompts, samples, progress: [[Reply("", False, 0)]]
    with pytest.raises(ValueError, match="zip"):
        judge.judge(PAIRS)


@pytest.mark.parametrize(
    ("order", "verdict", "label"),
    [
        ("AB", "A", "A"),
        ("AB", "B", "B"),
        ("BA", "A", "B"),
        ("BA", "B", "A"),
        ("AB", "tie", "tie"),
        ("BA", "tie", "tie"),
        ("AB", None, None),
        ("BA", None, None),
    ],
)
def test_label_in_the_datas_order(order, verdict, label):
    assert Judgement("p", order, 0, Verdict(verdict), "", 0).label == label


def test_shown_pairs_exchange_the_responses_and_what_was_said_of_them():
    (first, as_is), (second, exchanged) = shown_pairs(PAIRS[:1])
    assert (first, second) == ORDERS
    assert as_is is PAIRS[0]
    assert (exchanged.response_a, exchanged.label) == ("dismal", "B")
    assert exchanged.critiques[0].strengths_b == "good"


def test_the_hash_is_of_what_was_asked_and_of_nothing_else(judge):
    judgements = judge.judge(PAIRS, samples=2)
    hashes = [j.prompt_hash for j in judgements]
    assert hashes[::2] == hashes[1::2]  # samples share a prompt
    assert len(set(hashes)) == 4
    assert all(re.fullmatch(r"[0-9a-f]{16}", h) for h in hashes)
    assert hashes[0] == prompt_hash(judge.format.render(PAIRS[0]))
    relabelled = Pair("other id", PAIRS[0].context, "splendid", "dismal", "B", source="elsewhere")
    assert judge.judge([relabelled])[0].prompt_hash == hashes[0]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a "}],
        [{"role": "system", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "a"}],
        [],
    ],
    ids=["blank", "role", "twice", "none"],
)
def test_any_difference_in_the_messages_changes_the_hash(messages):
    assert prompt_hash(messages) != prompt_hash([{"role": "user", "content": "a"}])


def test_the_hash_is_stable_between_versions():
    """SHA-256 of the JSON text ``[{"role": "user", "content": "é"}]``, which old runs have on file."""
    assert prompt_hash([{"role": "user", "content": "é"}]) == "7fef57e230fa61b3"
