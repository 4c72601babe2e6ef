"""The judge: both orders, several samples, probabilities, votes, and labels in the data's own order."""

import math
import re
from dataclasses import replace

import pytest

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.judge import (
    ORDERS,
    Judge,
    Judgement,
    Reply,
    forced_reply,
    pair_probabilities,
    prompt_hash,
    shown_pairs,
    vote,
)
from nlhf.pairs import HumanCritique, Pair, Turn, other_label
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


class Rating:
    """Rates the response it is shown: splendid 8, dismal 3, less the number of the sample; keeps what it was asked."""

    def __init__(self, **ratings):
        self.ratings, self.prompts = {"splendid": 8, "dismal": 3, **ratings}, []

    def generate(self, prompts, samples=1, progress=None):
        self.prompts += [p[0]["content"] for p in prompts]
        rating = [next(r for word, r in self.ratings.items() if word in p[0]["content"]) for p in prompts]
        return [
            [Reply(f"Hm.\nRating: {'-' if r is None else r - k}", False, 5) for k in range(samples)] for r in rating
        ]


class TestPointwise:
    """Order AB rates A, order BA rates B, and the verdict of each order compares the two."""

    def test_ratings_of_both_orders_make_the_verdicts(self):
        generator = Rating()
        judgements = Judge(get_format("rewardbench2_ratings"), generator).judge(PAIRS, samples=2)
        assert [(j.pair_id, j.order, j.sample) for j in judgements] == [
            (pair_id, order, k) for pair_id in ("p0", "p1") for order in ("AB", "BA") for k in range(2)
        ]
        assert [j.verdict.label for j in judgements] == ["A", "A", "B", "B", "B", "B", "A", "A"]  # as shown
        assert {j.label for j in judgements if j.pair_id == "p0"} == {"A"}
        assert [j.verdict.scores for j in judgements[:4]] == [(8, 3), (7, 2), (3, 8), (2, 7)]  # sample by sample
        assert [j.strength for j in judgements[:4]] == [-5] * 4
        assert [j.verdict.raw for j in judgements[:3]] == ["Hm.\nRating: 8", "Hm.\nRating: 7", "Hm.\nRating: 3"]
        assert all(("splendid" in prompt) != ("dismal" in prompt) for prompt in generator.prompts)

    def test_equal_ratings_are_a_tie(self):
        judgements = Judge(get_format("rewardbench2_ratings"), Rating(dismal=8)).judge(PAIRS)
        assert [j.label for j in judgements] == ["tie"] * 4

    def test_a_rating_that_cannot_be_read_is_no_verdict_in_either_order(self):
        judgements = Judge(get_format("rewardbench2_ratings"), Rating(dismal=None)).judge(PAIRS[:1])
        assert [(j.label, j.verdict.scores) for j in judgements] == [(None, (8,)), (None, None)]

    @pytest.mark.parametrize("orders", [("AB",), ("BA",), ("AB", "AB")], ids="-".join)
    def test_one_order_is_refused(self, orders):
        generator = Rating()
        with pytest.raises(UserError, match=r"rates one response at a time.*set orders to both"):
            Judge(get_format("prometheus2_absolute"), generator).judge(PAIRS, orders)
        assert generator.prompts == []

    def test_ratings_have_no_probability(self):
        generator = Rating()
        generator.choice_log_probs = lambda *a, **o: pytest.fail("asked")
        with pytest.raises(UserError, match="declares numbers"):
            Judge(get_format("rewardbench2_ratings"), generator).judge(PAIRS, mode="probability")

    def test_a_rating_without_its_counterpart_is_no_judgement(self):
        """As where a server lost the second sample of order BA."""
        generator = Rating()
        answer = generator.generate
        generator.generate = lambda *a, **o: [group[: 1 if i == 1 else 2] for i, group in enumerate(answer(*a, **o))]
        judgements = Judge(get_format("rewardbench2_ratings"), generator).judge(PAIRS, samples=2)
        assert [(j.pair_id, j.order, j.sample) for j in judgements] == [
            ("p0", "AB", 0),
            ("p0", "BA", 0),
            *(("p1", order, k) for order in ("AB", "BA") for k in range(2)),
        ]


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


class Forced(Scripted):
    """A generator whose log-probabilities are given; keeps what was asked for them."""

    def __init__(self, *log_probs):
        super().__init__()
        self.log_probs, self.asked = log_probs, None

    def choice_log_probs(self, prompts, prefixes, continuations, progress=None):
        self.asked = list(prompts), list(prefixes), list(continuations)
        if progress:
            progress(len(prompts))
        return [list(self.log_probs[i % len(self.log_probs)]) for i in range(len(prompts))]


def log(*probabilities):
    return [math.log(p) for p in probabilities]


def test_probability_forces_the_verdict_at_once_and_writes_nothing():
    generator, done = Forced(log(0.6, 0.2), log(0.1, 0.3)), []
    judge = Judge(get_format("rm_nlhf"), generator)
    judgements = judge.judge(PAIRS[:1], mode="probability", progress=done.append)
    assert (generator.calls, done) == ([], [2])
    prompts, prefixes, continuations = generator.asked
    assert prompts == [judge.format.render(shown) for _, shown in shown_pairs(PAIRS[:1])]
    assert (prefixes, continuations) == (["<choice>[["] * 2, ["A", "B"])
    assert [(j.order, j.sample, j.tokens) for j in judgements] == [("AB", 0, 0), ("BA", 0, 0)]
    assert [j.verdict.label for j in judgements] == ["A", "B"]  # as shown
    assert [j.label for j in judgements] == ["A", "A"]
    assert [j.probability for j in judgements] == pytest.approx([0.75, 0.25])  # of the one shown first
    assert [j.probability_a for j in judgements] == pytest.approx([0.75, 0.75])
    assert [j.mass for j in judgements] == pytest.approx([0.8, 0.4])
    assert [j.tie_probability for j in judgements] == [None, None]
    assert judgements[0].verdict.raw == "<choice>[[A"
    assert judgements[0].verdict.critique is None
    assert not judgements[0].verdict.truncated


def test_critique_probability_forces_the_verdict_in_the_place_of_the_one_given():
    generator = Forced(log(0.1, 0.3))
    judgements = Judge(get_format("rm_nlhf"), generator).judge(PAIRS, samples=3, mode="critique_probability")
    [(_, samples)] = generator.calls
    prompts, prefixes, _ = generator.asked
    assert samples == 3
    assert len(prompts) == len(judgements) == 12
    assert prompts[0] == prompts[2] != prompts[3]
    assert prefixes[1] == "<critics>\nA praise: reason 1\n</critics>\n<choice>[["
    assert [(j.pair_id, j.order, j.sample) for j in judgements[2:4]] == [("p0", "AB", 2), ("p0", "BA", 0)]
    assert judgements[1].verdict.critique == "A praise: reason 1"
    assert judgements[1].verdict.raw == prefixes[1] + "B"  # whatever the reply itself had declared
    assert (judgements[1].verdict.label, judgements[1].tokens, judgements[1].probability) == (
        "B",
        8,
        pytest.approx(0.25),
    )
    assert [j.verdict.truncated for j in judgements[:3]] == [False, False, True]


@pytest.mark.parametrize(
    ("probabilities", "label", "probability", "tie"),
    [
        ((0.4, 0.1, 0.2), "A", 0.8, 2 / 7),
        ((0.1, 0.2, 0.4), "tie", 1 / 3, 4 / 7),
        ((0.3, 0.3, 0.1), None, 0.5, 1 / 7),
        ((0.3, 0.1, 0.3), None, 0.75, 3 / 7),
    ],
    ids=["A", "tie", "A and B level", "A and tie level"],
)
def test_ties_are_beside_the_probability(probabilities, label, probability, tie):
    judge = Judge(get_format("auto_j"), Forced(log(*probabilities)))
    [judgement] = judge.judge(PAIRS[:1], orders=["AB"], mode="probability")
    assert list(judge.format.verdict_choices()[1].values()) == ["A", "B", "tie"]
    assert judgement.label == label
    assert judgement.probability == pytest.approx(probability)
    assert judgement.tie_probability == pytest.approx(tie)


@pytest.mark.parametrize(
    ("probabilities", "label", "raw", "probability", "tie"),
    [
        ((0.2, 0.1, 0.05, 0.25, 0.0), "A", "[[A>>B", 0.3 / 0.55, 0.05 / 0.6),
        ((0.0, 0.2, 0.05, 0.1, 0.15), "B", "[[B>>A", 0.2 / 0.45, 0.05 / 0.5),
        ((0.1, 0.1, 0.3, 0.2, 0.0), "tie", "[[A=B", 0.2 / 0.4, 0.3 / 0.7),
    ],
    ids=["A together", "B together", "tie"],
)
def test_several_tokens_of_one_label_are_added_up(probabilities, label, raw, probability, tie):
    """Arena-Hard's [[A>B]] and [[A>>B]] both say A; the likeliest single token may be another label's."""
    generator = Forced([math.log(p) if p else -math.inf for p in probabilities])
    [judgement] = Judge(get_format("arena_hard"), generator).judge(PAIRS[:1], ["AB"], mode="probability")
    assert generator.asked[1:] == (["[["], ["A>>B", "A>B", "A=B", "B>A", "B>>A"])
    assert (judgement.label, judgement.verdict.raw) == (label, raw)
    assert judgement.probability == pytest.approx(probability)
    assert judgement.tie_probability == pytest.approx(tie)
    assert judgement.mass == pytest.approx(sum(probabilities))


@pytest.mark.parametrize(
    ("log_probs", "label", "probability"),
    [
        ([-5000.0, -5001.0], "A", 1 / (1 + math.exp(-1))),
        ([-1.0, -5000.0], "A", 1.0),
        ([-math.inf, -3.0], "B", 0.0),
        ([-math.inf, -math.inf], None, None),
    ],
    ids=["both tiny", "certain", "one impossible", "both impossible"],
)
def test_probabilities_do_not_underflow(log_probs, label, probability):
    [judgement] = Judge(get_format("rm_nlhf"), Forced(log_probs)).judge(PAIRS[:1], ["AB"], mode="probability")
    assert (judgement.label, judgement.probability) == (label, pytest.approx(probability))
    assert judgement.mass == pytest.approx(sum(map(math.exp, log_probs)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "probabilty"}, "Did you mean 'probability'"),
        ({"mode": "probability", "samples": 4}, "samples must be 1, got 4.*critique_probability"),
        ({"mode": "critique_probability", "generator": Scripted()}, "Scripted gives no probabilities"),
        ({"mode": "probability", "format": "deepseek_grm"}, "declares numbers"),
    ],
    ids=["unknown", "samples", "generator", "format"],
)
def test_a_mode_that_does_not_fit_is_refused_before_anything_is_generated(options, message):
    generator = options.pop("generator", Forced(log(0.5, 0.5)))
    judge = Judge(get_format(options.pop("format", "rm_nlhf")), generator)
    with pytest.raises(UserError, match=message):
        judge.judge(PAIRS, **options)
    assert generator.calls == []


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        ("", "<choice>[["),
        ("good\n<choice>[[A]]</choice>", "good\n<choice>[["),
        ("good <choice> [[ A ]] </choice> and more", "good <choice>[["),
        ("good <CHOICE>[[a]]</choice>", "good <choice>[["),
        ("<choice>[[A]]</choice> no, <choice>[[B]]</choice>", "<choice>[[A]]</choice> no, <choice>[["),
        ("<critics>cut off in the ", "<critics>cut off in the\n</critics>\n<choice>[["),
        ("<critics>so</critics>", "<critics>so</critics>\n<choice>[["),
        ("cut off <choice>[[", "cut off <choice>[["),
        ("<think>hm <choice>[[A]]</choice>", "<think>hm <choice>[[A]]</choice>\n</think>\n<choice>[["),
        (
            "<think>hm <choice>[[A]]</choice></think>so",
            "<think>hm <choice>[[A]]</choice></think>so\n</critics>\n<choice>[[",
        ),
        ("<think>x</think>so <choice>[[A]]", "<think>x</think>so <choice>[["),
        ("hm <choice>[[A]]</think>\n\nso", "hm <choice>[[A]]</think>\n\nso\n</critics>\n<choice>[["),
        ("<thinking>a", "<thinking>a\n</thinking>\n<choice>[["),
    ],
    ids=[
        "nothing",
        "declared",
        "blanks",
        "letter case",
        "the last counts",
        "critique cut off",
        "no declaration",
        "half a declaration",
        "thinking open",
        "declared in thinking",
        "declared after thinking",
        "thinking prefilled",
        "another tag",
    ],
)
def test_forced_reply(text, begun):
    assert forced_reply(get_format("rm_nlhf"), text) == begun


@pytest.mark.parametrize(
    ("name", "text", "begun"),
    [
        ("llmbar", "Output (b) is vague. Output (a) is better than Output (b).", "Output (b) is vague. Output ("),
        ("rewardbench", "first, [[A]], no: [[B]], not ]]", "first, [[A]], no: [["),
        ("auto_j", "key factors\nSo, the final decision is Tie. Both", "key factors\nSo, the final decision is"),
        ("auto_j", "key factors", "key factors\n\nSo, the final decision is"),
        ("her_rm", '{"result": [{"better_response": "tie"}]}', '{"result": [{"better_response": "'),
        ("her_rm", "", '{"result": [{"better_response": "'),
        ("her_rm", "<think>hm", '<think>hm\n</think>\n{"result": [{"better_response": "'),
        ("her_rm", "<think>hm</think>\n", '<think>hm</think>\n{"result": [{"better_response": "'),
        (
            "her_rm",
            '{"result": [{"analysis": {}, "better',
            '{"result": [{"analysis": {}, "better\n\n"better_response": "',
        ),
        ("rm_nlhf", "<think>hm</think>\n\n", "<think>hm</think>\n<choice>[["),
        ("sandbox", "<critics> A praise: \n B", "<critics> A praise: \n B </critics> <choice>"),
        ("sandbox", "<critics> A </critics> <choice> [[B]] </choice>", "<critics> A </critics> <choice>"),
    ],
    ids=[
        "named in reasons too",
        "the last whole one",
        "tie",
        "none",
        "JSON",
        "JSON at once",
        "JSON after open thinking",
        "JSON after thinking",
        "JSON begun",
        "thinking alone",
        "words cut off",
        "words",
    ],
)
def test_forced_reply_of_other_formats(name, text, begun):
    assert forced_reply(get_format(name), text) == begun


def judgement(label=None, order="AB", **options):
    """A judgement whose label is in the data's order."""
    shown = {key: options.pop(key) for key in ("strength", "scores") if key in options}
    return Judgement("p", order, 0, Verdict(label if order == "AB" else other_label(label), **shown), "", 0, **options)


@pytest.mark.parametrize(
    ("labels", "winner"),
    [
        (["A"], "A"),
        (["A", "A", "B"], "A"),
        (["A", "B"], "tie"),
        (["A", "A", "B", "B", "tie"], "tie"),
        (["tie", "tie", "A"], "tie"),
        (["A", "A", "B", "tie"], "A"),
        (["A", "tie"], "tie"),
        (["B", None, None], "B"),
        ([None, None], None),
        ([], None),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_majority(labels, winner):
    """Equal votes at the top are a tie; what could not be read abstains and is no vote for a tie."""
    for orders in ("AB",), ("BA",), ("AB", "BA"):
        judgements = [judgement(label, orders[n % len(orders)]) for n, label in enumerate(labels)]
        assert vote(judgements) == winner
        assert vote([replace(j, verdict=j.verdict.swap()) for j in judgements]) == other_label(winner)


@pytest.mark.parametrize(
    ("verdicts", "winner"),
    [
        ([{"label": "A", "strength": -1}, {"label": "B", "strength": 3}, {"label": "A", "strength": -1}], "B"),
        ([{"label": "A", "strength": -1}, {"label": "B", "strength": 1}], "tie"),
        ([{"label": "A", "strength": 3, "order": "BA"}, {"label": "B", "strength": 2}], "A"),
        ([{"label": "A", "scores": (8, 6)}, {"label": "B", "scores": (2, 3)}], "A"),
        ([{"label": "A", "scores": (8, 6)}, {"label": "B", "scores": (9, 2), "order": "BA"}], "B"),
        ([{"label": "B"}, {"label": "A", "strength": -1}, {"label": "B"}], "A"),
        ([{"label": None, "strength": 3}, {"label": "A", "strength": -1}], "A"),
        ([{"label": "A", "strength": -0.1}] * 10 + [{"label": "B", "strength": 1.0}], "tie"),
        ([{"label": None}], None),
    ],
    ids=["few but strong", "level", "orders", "scores", "scores, orders", "no strength", "unread", "exact", "none"],
)
def test_mean_strength(verdicts, winner):
    assert vote([judgement(**v) for v in verdicts], "mean_strength") == winner


@pytest.mark.parametrize(
    ("judgements", "rule", "error", "message"),
    [
        ([judgement("A")], "mean_strength", UserError, "a format whose verdicts have a strength"),
        ([judgement("A")], "median", UserError, "majority, mean_strength, got 'median'"),
        ([judgement("A"), replace(judgement("A"), pair_id="q")], "majority", ValueError, "several pairs"),
    ],
    ids=["no strength", "unknown rule", "two pairs"],
)
def test_votes_that_cannot_be_counted(judgements, rule, error, message):
    with pytest.raises(error, match=message):
        vote(judgements, rule)


def test_pair_probabilities_are_the_mean_over_samples_then_orders():
    """P(A): order AB says (0.9 + 0.5) / 2 = 0.7; order BA says 0.8 for its first, that is 0.2; the mean is 0.45."""
    judgements = [
        judgement("A", probability=0.9),
        judgement("A", probability=0.5),
        judgement("A", probability=None),
        judgement("B", order="BA", probability=0.8),
        replace(judgement("A", probability=0.6), pair_id="one order"),
        replace(judgement("A"), pair_id="none"),
    ]
    assert pair_probabilities(judgements) == {"p": pytest.approx(0.45), "one order": pytest.approx(0.6)}


def test_a_slots_advantage_cancels_in_the_pairs_probability():
    """A judge that always gives the first slot 0.7 says nothing of the pair."""
    judge = Judge(get_format("rm_nlhf"), Forced(log(0.7, 0.3)))
    assert pair_probabilities(judge.judge(PAIRS, mode="probability")) == {
        "p0": pytest.approx(0.5),
        "p1": pytest.approx(0.5),
    }
