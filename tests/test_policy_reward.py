"""Verdicts as the reward of a policy: who wins, what it costs, and that nothing but a verdict becomes a reward."""

import itertools
import random
import re
from statistics import fmean

import pytest

from nlhf.comparer import Comparer, Comparison, JudgeConfig, margin_of
from nlhf.errors import UserError
from nlhf.evaluation.decision import Decision
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import GenerationFailed
from nlhf.judge import Judge, Judgement, Reply
from nlhf.judging import PairJudge
from nlhf.models import ModelConfig
from nlhf.pairs import Turn
from nlhf.policy_reward import PolicyReward, PolicyRewardConfig, best_of_n, tournament_scores, watch
from nlhf.verdict import Verdict

SIZES = [1, 2, 3, 5, 8]
TOURNAMENT = PolicyRewardConfig(kind="tournament")
CHOICE = "<critics>\nA praise: so\n</critics>\n<choice>[[{}]]</choice>"


class Weighing:
    """A judge's model: of the numbers in the two responses ("q7") the larger is better.

    It mumbles about a response with "?", says A whatever it reads where one has "!", and gets no reply through about
    one with "dead". Its noise, if any, decides by a coin for each prompt.
    """

    def __init__(self, noise: random.Random | None = None):
        self.noise, self.batches = noise, []

    @property
    def calls(self) -> int:
        return sum(self.batches)

    def generate(self, prompts, samples=1, progress=None):
        self.batches.append(len(prompts) * samples)
        texts = [prompt[0]["content"] for prompt in prompts]
        replies = [[None if "dead" in text else self.reply(text)] * samples for text in texts]
        if reasons := {i: "HTTP 503" for i, text in enumerate(texts) if "dead" in text}:
            raise GenerationFailed("the server", replies, reasons)
        return replies

    def reply(self, text: str) -> Reply:
        first, second = map(int, re.findall(r"q(\d+)", text))
        better = "A" if "!" in text or first > second else "B"
        if self.noise:
            better = self.noise.choice("AB")
        return Reply("Hm." if "?" in text else CHOICE.format(better), False, 9)


def comparer(generator=None, **options) -> Comparer:
    return Comparer(PairJudge(Judge(get_format("rm_nlhf"), generator or Weighing())), **options)


def reward(config=None, generator=None, **options) -> PolicyReward:
    return PolicyReward(comparer(generator), config, **options)


def logged(function: PolicyReward, *arguments, **columns) -> tuple[list[float], dict[str, float]]:
    """Rewards and what was logged."""
    found = {}
    return function(*arguments, **columns, log_metric=found.__setitem__), found


# -------------------------------------------------------------------------------------------------- against a reference


def test_win_tie_and_loss_against_the_reference():
    completions = ["q5", "q1", "q3", "q9 !"]
    rewards, found = logged(reward(), ["p"] * 4, completions, reference=["q3"] * 4)
    assert rewards == [1.0, -1.0, 0.0, 0.0]  # the same text, and orders that contradict each other, are ties
    assert found["judge/win_rate"] == 0.25
    assert found["judge/tie_rate"] == 0.5
    assert found["judge/invalid_rate"] == 0


def test_conversations_come_as_trl_gives_them():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p"}]
    completion = [{"role": "assistant", "content": "q5"}]
    assert reward()(prompts=[prompt], completions=[completion], reference=["q3"], completion_ids=[[1]]) == [1.0]


@pytest.mark.parametrize("samples", [1, 3])
def test_exchanging_response_and_reference_changes_the_sign_even_for_a_judge_that_rolls_dice(samples):
    rng = random.Random(1)
    judge = PairJudge(Judge(get_format("rm_nlhf"), Weighing(random.Random(2))), samples=samples)
    texts = [(f"q{rng.randrange(99)} {i}", f"q{rng.randrange(99)} {i}") for i in range(60)]
    function = PolicyReward(judge)
    there = function(["p"] * 60, [a for a, _ in texts], reference=[b for _, b in texts])
    back = function(["p"] * 60, [b for _, b in texts], reference=[a for a, _ in texts])
    assert back == [-r for r in there]
    assert len(set(there)) > 1


@pytest.mark.parametrize(("invalid", "expected"), [(0.0, 0.0), (-0.5, -0.5)])
def test_no_verdict_is_a_reward_of_its_own_and_counted(invalid, expected):
    config = PolicyRewardConfig(invalid=invalid)
    rewards, found = logged(reward(config), ["p"] * 3, ["q9 ?", "q8", "q7 ?"], reference=["q5"] * 3)
    assert rewards == [expected, 1.0, expected]
    assert found["judge/invalid"] == 2
    assert found["judge/invalid_rate"] == pytest.approx(2 / 3)
    assert found["judge/win_rate"] == 1.0  # of those with a verdict


def test_without_any_verdict_no_rate_is_made_up():
    rewards, found = logged(reward(), ["p"], ["q9 ?"], reference=["q5"])
    assert rewards == [0.0]
    assert not {"judge/win_rate", "judge/tie_rate", "judge/order_agreement"} & set(found)


def test_a_missing_reference_is_said():
    with pytest.raises(UserError, match="column 'reference'"):
        reward()(["p"], ["q1"])


def test_thinking_is_not_judged():
    completions = ["<think>q1 ?</think>q9"]
    assert reward()(["p"], completions, reference=["q5"]) == [1.0]
    with pytest.raises(ValueError, match="too many values"):  # the judge sees three numbers
        reward(PolicyRewardConfig(hide_thinking=False))(["p"], completions, reference=["q5"])


def judgement(order, label=None, probability=None) -> Judgement:
    return Judgement("p", order, 0, Verdict(label), "hash", 1, probability=probability)


@pytest.mark.parametrize(
    ("judgements", "margin"),
    [
        ([judgement("AB", "A"), judgement("BA", "B")], 1.0),
        ([judgement("AB", "B"), judgement("BA", "A")], -1.0),
        ([judgement("AB", "A"), judgement("BA", "A")], 0.0),
        ([judgement("AB", "A"), judgement("BA", "tie")], 0.5),
        ([judgement("AB", "tie"), judgement("BA", "tie")], 0.0),
        ([judgement("AB", "A"), judgement("BA")], None),
        ([judgement("AB"), judgement("BA")], None),
        ([judgement("AB", "A"), judgement("AB"), judgement("AB", "B"), judgement("BA", "B")], 0.5),
        ([judgement("AB", "A", 0.9), judgement("BA", "A", 0.6)], 1.0),
        ([judgement("AB", "A", 0.6), judgement("BA", "A", 0.9)], -1.0),
    ],
    ids=[
        "A in both", "B in both", "contradiction", "a win and a tie", "tie", "one order without", "no verdict",
        "an order's samples first", "surer of A", "surer of B",
    ],
)  # fmt: skip
def test_margins(judgements, margin):
    assert margin_of(Decision.of(judgements)) == margin


# ------------------------------------------------------------------------------------------------------- in tournaments


def group(n: int) -> list[str]:
    return [f"q{10 + i}" for i in range(n)]


@pytest.mark.parametrize("n", SIZES)
def test_a_transitive_judge_crowns_the_best(n):
    rewards, found = logged(reward(TOURNAMENT), ["p"] * n, group(n))
    assert rewards[-1] == (1.0 if n > 1 else 0.5)
    assert sum(rewards) == pytest.approx(n / 2)
    if n <= 4:
        assert rewards == sorted(rewards)
    assert found["tournament/matches"] == (2 * n - 2 if n > 1 else 0)
    assert found["judge/calls"] <= 2 * found["tournament/matches"]  # both orders; a rematch is not judged again


@pytest.mark.parametrize("n", SIZES)
def test_scores_move_with_the_responses(n):
    texts, rng = group(n), random.Random(n)
    scores = dict(zip(texts, reward(TOURNAMENT)(["p"] * n, texts), strict=True))
    for _ in range(10):
        rng.shuffle(texts)
        assert reward(TOURNAMENT)(["p"] * n, texts) == [scores[text] for text in texts]


@pytest.mark.parametrize("verdict", ["!", "?"], ids=["always the first slot", "no verdict"])
def test_a_judge_without_a_preference_favours_no_place_and_no_text(verdict):
    """Each place in the group and each place in the alphabet wins as often: within four standard errors."""
    n, groups = 5, 600
    prompts = [f"p{g}" for g in range(groups) for _ in range(n)]
    texts = [f"{letter} q1 {verdict}" for g in range(groups) for letter in random.Random(g).sample("abcde", n)]
    rewards, found = logged(reward(TOURNAMENT), prompts, texts)
    assert found["tournament/coin_rate"] == 1.0
    for place in range(n):
        assert fmean(rewards[place::n]) == pytest.approx(0.5, abs=0.06)
        letter = "abcde"[place]
        mean = fmean(r for r, text in zip(rewards, texts, strict=True) if text[0] == letter)
        assert mean == pytest.approx(0.5, abs=0.06)


def test_a_judge_that_rolls_dice_favours_no_place():
    n, groups = 5, 600
    prompts = [f"p{g}" for g in range(groups) for _ in range(n)]
    rewards = reward(TOURNAMENT, Weighing(random.Random(3)))(prompts, [f"{i} q1" for i in range(n)] * groups)
    for place in range(n):
        assert fmean(rewards[place::n]) == pytest.approx(0.5, abs=0.06)


def test_a_round_of_all_groups_is_one_batch():
    generator = Weighing()
    rewards = reward(TOURNAMENT, generator)(["p"] * 8 + ["r"] * 8 + ["s"], group(8) * 2 + ["q1"])
    first, second, *later = generator.batches
    assert first == second == 4 * 2 * 2  # matches, groups, orders
    assert len(later) <= 4
    assert sum(later) <= (3 + 1 + 1 + 1) * 2 * 2  # rematches are not asked again
    alone = reward(TOURNAMENT)(["p"] * 8, group(8))
    assert rewards[:8] == alone
    assert rewards[16] == 0.5


def test_equal_responses_are_one_entrant():
    generator = Weighing()
    rewards = reward(TOURNAMENT, generator)(["p"] * 4, ["q1", "q2", "q1", "q2"])
    assert rewards == [0.0, 1.0, 0.0, 1.0]
    assert generator.calls == 2
    assert reward(TOURNAMENT, generator)(["p"] * 3, ["q1"] * 3) == [0.5] * 3
    assert generator.calls == 2


def test_groups_are_by_prompt_wherever_their_rows_are():
    rewards = reward(TOURNAMENT)(["p", "r", "p", "r"], ["q1", "q2", "q5", "q0"])
    assert rewards == [0.0, 1.0, 1.0, 0.0]


def test_invalid_verdicts_of_a_tournament_are_coins_and_counted():
    rewards, found = logged(reward(TOURNAMENT), ["p"] * 3, ["q1 ?", "q2 ?", "q3 ?"])
    assert sorted(rewards) == [0.0, 0.5, 1.0]
    assert found["tournament/coin_rate"] == 1.0
    assert found["judge/invalid"] >= 3
    again, _ = logged(reward(TOURNAMENT), ["p"] * 3, ["q1 ?", "q2 ?", "q3 ?"])
    assert again == rewards  # the coin has a seed
    others = {tuple(reward(TOURNAMENT, seed=seed)(["p"] * 3, ["q1 ?", "q2 ?", "q3 ?"])) for seed in range(20)}
    assert len(others) > 1


# ------------------------------------------------------------------------------------------------------------ best of n


@pytest.mark.parametrize("n", SIZES)
def test_best_of_n(n):
    texts = group(n)
    random.Random(n).shuffle(texts)
    judge = PairJudge(Judge(get_format("rm_nlhf"), Weighing()))
    [best, other] = best_of_n(judge, ["p", [{"role": "user", "content": "r"}]], [texts, ["q1", "q3"]])
    assert texts[best] == max(texts)
    assert other == 1


def test_nothing_to_choose_from_is_said():
    with pytest.raises(UserError, match="'Name a prime' has no candidates"):
        best_of_n(comparer(), ["Name a prime"], [[]])


# ------------------------------------------------------------------------------------------------------- cost and cache


def test_nothing_is_asked_twice():
    generator = Weighing()
    function = reward(None, generator)
    prompts, texts, reference = ["p", "p", "r"], ["q1", "q1", "q1"], ["q3"] * 3
    _, first = logged(function, prompts, texts, reference=reference)
    _, second = logged(function, prompts, texts, reference=reference)
    assert generator.batches == [4]  # two different questions in both orders
    assert (first["judge/calls"], first["judge/cached_rate"]) == (4, 0)
    assert (second["judge/calls"], second["judge/cached_rate"]) == (0, 1)
    _, exchanged = logged(function, ["p"], ["q3"], reference=["q1"])
    assert exchanged["judge/calls"] == 0


def test_the_conversation_is_part_of_the_question():
    generator = Weighing()
    found = comparer(generator)
    for context in ((Turn("user", "p"),), (Turn("system", "p"),), (Turn("user", "p"), Turn("user", ""))):
        found.margins([Comparison(context, "q1", "q2")])
    assert generator.calls == 6


def test_the_cache_is_bounded_and_never_too_small_for_a_call():
    generator = Weighing()
    found = comparer(generator, cached=2)
    asked = [Comparison((Turn("user", "p"),), f"q{i}", "q5") for i in range(5)]
    assert found.margins(asked) == [-1.0] * 5
    assert len(found._answers) == 2
    found.margins(asked[3:])
    assert generator.calls == 10
    found.margins(asked[:1])
    assert generator.calls == 12


def test_samples_count_as_calls():
    judge = PairJudge(Judge(get_format("rm_nlhf"), Weighing()), samples=3)
    _, found = logged(PolicyReward(judge), ["p"], ["q1"], reference=["q2"])
    assert found["judge/calls"] == 6


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("config", [None, TOURNAMENT], ids=["reference", "tournament"])
def test_a_judge_that_does_not_reply_is_an_error_that_names_the_prompt(config):
    with pytest.raises(GenerationFailed, match=r"Name a prime \[\w{12}\]' in order AB: HTTP 503"):
        reward(config)(["Other", "Name a prime", "Name a prime"], ["q1", "q1 dead", "q2"], reference=["q3"] * 3)


def test_what_was_answered_before_a_failure_is_kept():
    generator = Weighing()
    found = comparer(generator)
    context = (Turn("user", "p"),)
    asked = [Comparison(context, "q1", "q2"), Comparison(context, "q3 dead", "q2")]
    with pytest.raises(GenerationFailed):
        found.margins(asked)
    assert found.margins(asked[:1]) == [-1.0]
    assert generator.calls == 4  # of the first call alone


def test_a_prompt_that_the_judge_cannot_read_is_named(tiny_model):
    """The generator says how long the longest of all prompts is; whose it is, we say."""
    sampling = SamplingConfig(max_new_tokens=4, max_prompt_tokens=2000)
    judge = JudgeConfig(ModelConfig(tiny_model), sampling=sampling).load()
    with pytest.raises(UserError, match=r"prompt 'Long one \[\w{12}\]': 2 of 2 prompts are longer than 2000 tokens"):
        PolicyReward(judge)(["Short", "Long one"], ["a", "b" * 2000], reference=["c", "d"])


def test_an_exception_of_the_judge_is_not_swallowed():
    class Broken:
        def generate(self, prompts, samples=1, progress=None):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        reward(None, Broken())(["p"], ["q1"], reference=["q2"])


def test_judges_that_do_not_compare_are_refused():
    with pytest.raises(UserError, match="must see both orders"):
        Comparer(PairJudge(Judge(get_format("rm_nlhf"), Weighing()), orders=["AB"]))
    with pytest.raises(UserError, match="rates one response at a time"):
        Comparer(PairJudge(Judge(get_format("rewardbench2_ratings"), Weighing())))


@pytest.mark.parametrize("prompt", [[], [{"role": "user", "content": None}]], ids=["empty", "no text"])
def test_a_prompt_that_is_no_text_is_said(prompt):
    with pytest.raises(UserError, match="must be text or messages of text"):
        reward()([prompt], ["q1"], reference=["q2"])


@pytest.mark.parametrize(
    ("options", "message"), [({"kind": "elo"}, "reference or tournament"), ({"invalid": -2}, "between -1 and 1")]
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        PolicyRewardConfig(**options)


# ---------------------------------------------------------------------------------------------- reward hacking, records


def test_orders_that_contradict_each_other_are_seen():
    _, found = logged(reward(), ["p"] * 4, ["q9 !", "q8 !", "q7 !", "q6"], reference=["q5"] * 4)
    assert found["judge/order_agreement"] == 0.25


def test_the_watch_by_hand():
    """Group p has lengths 2 and 4 and rewards 0 and 1, group r lengths 30 and 30: all that varies goes together."""
    contexts = [(Turn("user", name),) for name in ("p", "p", "r", "r")]
    responses = ["ab", "abcd", "# Title\n" + "x" * 22, "x" * 30]
    found = watch(contexts, responses, ["abc"] * 4, [0.0, 1.0, 0.5, 0.5], get_format("rm_nlhf"))
    assert found == {
        "characters": 16.5,
        "length_ratio": 66 / 12,
        "length_correlation": pytest.approx(1.0),
        "markup_rate": 0.25,
        "verdict_rate": 0.0,
        "distinct_rate": 1.0,
    }


def test_the_watch_is_silent_where_nothing_varies():
    contexts = [(Turn("user", "p"),)] * 2
    found = watch(contexts, ["ab", "ab"], None, [0.1, 0.7], get_format("rm_nlhf"))
    assert "length_correlation" not in found
    assert "length_ratio" not in found
    assert found["distinct_rate"] == 0.5


@pytest.mark.parametrize(
    ("text", "markup", "verdict"),
    [
        ("plain words - and a dash, 3. and 4) and a|b", 0, 0),
        ("# Heading", 1, 0),
        ("one\n- two", 1, 0),
        ("one\n  2) two", 1, 0),
        ("a **bold** word", 1, 0),
        ("```\ncode", 1, 0),
        ("Good. <choice>[[A]]</choice>", 0, 1),
    ],
)
def test_markup_and_speaking_for_the_judge_are_seen(text, markup, verdict):
    found = watch([(Turn("user", "p"),)], [text], None, [0.0], get_format("rm_nlhf"))
    assert (found["markup_rate"], found["verdict_rate"]) == (markup, verdict)


def test_rows_are_kept_for_reading_as_they_were_written():
    kept = []
    function = reward(record=lambda step, rows: kept.append((step, rows)))
    function(["p"], ["<think>x</think>q5"], reference=["q3"])
    turn = {"role": "user", "content": "p"}
    row = {"prompt": [turn], "response": "<think>x</think>q5", "reference": "q3", "reward": 1.0}
    assert kept == [(0, [row])]


def test_scores_with_their_tournaments():
    context = (Turn("user", "p"),)
    [(scores, tournament)] = tournament_scores(comparer(), [(context, ["q2", "q1"])])
    assert (scores, tournament.matches, tournament.coins) == ([1.0, 0.0], 2, 0)


def test_all_pairs_of_scores_are_comparable_across_groups():
    """Scores are ranks from 0 to 1 in every group, whatever its size."""
    for n in SIZES[1:]:
        rewards = reward(TOURNAMENT)(["p"] * n, group(n))
        assert (min(rewards), max(rewards)) == (0.0, 1.0) or len(set(rewards)) < n
        assert all(a == b or abs(a - b) >= 0.5 / (n - 1) for a, b in itertools.combinations(rewards, 2))
