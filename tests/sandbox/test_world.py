"""The sandbox world against an oracle that knows only the words: labels, critiques, cues, splits and careless notes."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from nlhf.critique.arguments import generated_arguments, human_arguments
from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.sandbox.world import (
    ASPECTS,
    CUE_RATES,
    FLOURISH,
    NOTE_ASPECTS,
    NOTE_WORDS,
    SIZES,
    TASKS,
    WORDS,
    draw_case,
    draw_pairs,
    habitual,
    note_text,
    vote,
)
from nlhf.sources import DataConfig, load_pairs

TRUTHFUL = [split for split in CUE_RATES if split != "cold_start"]
SAYS = {
    word: (aspect, q)
    for aspect, kinds in WORDS.items()
    for q, words in zip((1, -1), kinds, strict=True)
    for word in words
}
ASKS = {word: aspect for aspect, words in TASKS.items() for word in words}


def shown(response: str) -> dict[str, int]:
    """What the words of a response say: the quality of each aspect that is mentioned."""
    said = [SAYS[word] for word in response.split() if word != FLOURISH]
    assert len(dict(said)) == len(said), "an aspect is mentioned twice"
    return dict(said)


def decisive(pair: Pair) -> str:
    first, second = pair.context[0].content.split()
    assert first != second
    assert ASKS[first] == ASKS[second]
    return ASKS[first]


def winner(pair: Pair) -> str:
    a, b = (shown(r).get(decisive(pair), 0) for r in (pair.response_a, pair.response_b))
    assert a != b
    return "A" if a > b else "B"


def reasons(pair: Pair) -> list[tuple[str, int, str]]:
    """A pair's critique as (side, polarity, aspect)."""
    [critique] = pair.critiques
    return [(a.side, a.polarity, a.text) for a in human_arguments(critique)]


def assert_rate(hits: int, n: int, rate: float):
    """Within four standard errors of a binomial."""
    assert abs(hits / n - rate) <= 4 * (rate * (1 - rate) / n) ** 0.5, f"{hits}/{n}, expected {rate}"


@pytest.mark.parametrize("split", TRUTHFUL)
def test_the_decisive_aspect_decides(split):
    for pair in draw_pairs(split, 500, seed=3):
        assert pair.label == winner(pair)
        assert pair.meta["decisive"] == decisive(pair)


@pytest.mark.parametrize("split", TRUTHFUL)
def test_a_human_names_the_decisive_reasons_and_no_other(split):
    for pair in draw_pairs(split, 500, seed=3):
        aspect, better = decisive(pair), winner(pair)
        quality = {"A": shown(pair.response_a).get(aspect, 0), "B": shown(pair.response_b).get(aspect, 0)}
        expected = [(s, q, aspect) for s, q in quality.items() if q == (1 if s == better else -1)]
        assert expected
        assert sorted(reasons(pair)) == sorted(expected)


@pytest.mark.parametrize("split", CUE_RATES)
def test_the_flourish_sits_where_the_split_says(split):
    pairs = draw_pairs(split, 3000, seed=4)
    for pair in pairs:
        sides = [s for s, r in (("A", pair.response_a), ("B", pair.response_b)) if FLOURISH in r.split()]
        assert sides == [pair.meta["flourish"]]
    assert_rate(sum(p.meta["flourish"] == winner(p) for p in pairs), 3000, CUE_RATES[split])


def test_nothing_but_the_flourish_distinguishes_train_from_its_reversal():
    assert CUE_RATES["train"] + CUE_RATES["reversed"] == pytest.approx(1.0)
    assert CUE_RATES["ood"] == 0.5


def test_slots_tasks_and_qualities_are_drawn_evenly():
    pairs = draw_pairs("ood", 4000, seed=5)
    assert_rate(sum(p.label == "A" for p in pairs), 4000, 1 / 2)
    for aspect in ASPECTS:
        assert_rate(sum(decisive(p) == aspect for p in pairs), 4000, 1 / 6)
    others = Counter(
        shown(r).get(aspect, 0)
        for p in pairs
        for r in (p.response_a, p.response_b)
        for aspect in ASPECTS
        if aspect != decisive(p)
    )
    # Aspects of one response are correlated: the error is that of 8,000 responses, not of 40,000 aspects.
    for quality, rate in ((1, 0.4), (-1, 0.4), (0, 0.2)):
        assert_rate(round(others[quality] / others.total() * 8000), 8000, rate)


def test_counting_every_other_reason_is_better_than_chance_and_far_from_right():
    """The mild correlation of the aspects: a judge that weighs everything but the decisive aspect."""
    right = n = 0
    for pair in draw_pairs("ood", 6000, seed=6):
        a, b = (
            sum(q for aspect, q in shown(r).items() if aspect != decisive(pair))
            for r in (pair.response_a, pair.response_b)
        )
        n += a != b
        right += a != b and ("A" if a > b else "B") == pair.label
    assert 0.5 + 4 * (0.25 / n) ** 0.5 < right / n < 0.65


def test_in_the_contrary_split_counting_every_reason_misleads():
    for pair in draw_pairs("contrary", 300, seed=6):
        a, b = (sum(shown(r).values()) for r in (pair.response_a, pair.response_b))
        assert ("A" if a > b else "B") != pair.label
        assert a != b


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("split", ["train", "contrary"])
def test_an_experiment_may_move_the_flourish(split, rate):
    pairs = load_pairs(DataConfig("sandbox", split, options={"n": 1000, "cue_rate": rate}), seed=7)
    assert_rate(sum(p.meta["flourish"] == winner(p) for p in pairs), 1000, rate)


def test_a_rate_beyond_one_is_refused():
    with pytest.raises(UserError, match=r"cue_rate must lie between 0 and 1, got 1\.5"):
        load_pairs(DataConfig("sandbox", options={"cue_rate": 1.5}))


def test_splits_and_seeds_share_no_pair():
    sets = {(s, seed): {p.key for p in draw_pairs(s, seed=seed)} for s in CUE_RATES for seed in (0, 1)}
    assert all(len(keys) == SIZES[split] for (split, _), keys in sets.items()), "a pair twice in one split"
    shared = {(a, b): len(sets[a] & sets[b]) for a, b in itertools.combinations(sets, 2)}
    assert not any(shared.values()), shared


def test_splits_differ_also_before_chance_has_drawn_much():
    first = {(s, seed): draw_pairs(s, 3, seed=seed) for s in CUE_RATES for seed in (0, 1, 10)}
    texts = [tuple(p.context[0].content for p in pairs) for pairs in first.values()]
    assert len(set(texts)) == len(texts)


def test_more_pairs_begin_with_the_same_pairs():
    assert draw_pairs("id", 50, seed=7) == draw_pairs("id", 200, seed=7)[:50]
    assert draw_pairs("id", 50, seed=7) != draw_pairs("id", 50, seed=8)


def test_ids_are_unique_among_all_splits():
    ids = [p.id for s in CUE_RATES for seed in (0, 1) for p in draw_pairs(s, 20, seed=seed)]
    assert len(set(ids)) == len(ids)


def test_unknown_split_names_the_known():
    with pytest.raises(UserError, match=r"no split 'test'; known: train, cold_start, .*reversed"):
        draw_pairs("test")


def test_the_source_draws_the_same_world():
    assert load_pairs(DataConfig("sandbox", "id", options={"n": 20}), seed=9) == draw_pairs("id", 20, seed=9)
    assert len(load_pairs(DataConfig("sandbox", "validation"))) == SIZES["validation"]
    assert load_pairs(DataConfig("sandbox", "id", seed=9, limit=5), seed=1) == draw_pairs("id", 5, seed=9)
    with pytest.raises(UserError, match="unknown option 'size'"):
        load_pairs(DataConfig("sandbox", options={"size": 3}))


# A careless annotator follows the flourish with 0.35 and in the end slips with 0.10, whatever the votes are worth:
# P(label = flourish | it sits with the winner) + P(label = flourish | it sits with the loser) = 1 + 0.35 (1 - 2 0.10).


def test_careless_annotators_are_drawn_to_the_flourish():
    pairs = draw_pairs("cold_start", 8000, seed=11)
    follows = {}
    for luck in (True, False):
        group = [p for p in pairs if (p.meta["flourish"] == winner(p)) is luck]
        follows[luck] = sum(p.label == p.meta["flourish"] for p in group) / len(group)
    assert follows[True] + follows[False] - 1 == pytest.approx(0.28, abs=0.08)
    assert follows[False] > 0.4


def test_careless_annotators_are_often_right_and_beside_the_point():
    pairs = draw_pairs("cold_start", 3000, seed=12)
    right = sum(p.label == winner(p) for p in pairs) / len(pairs)
    to_the_point = sum({a for _, _, a in reasons(p)} == {decisive(p)} for p in pairs) / len(pairs)
    assert 0.6 < right < 0.85
    assert 0.2 < to_the_point < 0.5


def test_careless_annotators_write_what_is_mostly_true_and_never_a_point_twice():
    true = n = 0
    for pair in draw_pairs("cold_start", 2000, seed=13):
        quality = {"A": shown(pair.response_a), "B": shown(pair.response_b)}
        said = reasons(pair)
        assert 1 <= len(said) <= 3
        assert len({(side, aspect) for side, _, aspect in said}) == len(said)
        assert all(aspect in quality[side] for side, _, aspect in said), "a reason about what nobody mentioned"
        true += sum(quality[side][aspect] == q for side, q, aspect in said)
        n += len(said)
    assert_rate(true, n, 0.9)


def test_a_note_uses_words_of_its_own():
    rng = random.Random(0)
    notes = {*NOTE_ASPECTS.values(), *(w for words in NOTE_WORDS.values() for w in words)}
    assert not notes & {*SAYS, *ASKS, *ASPECTS, FLOURISH}
    for _ in range(200):
        case = draw_case(rng)
        words = note_text(rng, case.reasons).split()
        assert set(words) <= notes | {"A", "B"}
        assert len(words) == 3 * len(case.reasons)


@pytest.mark.parametrize(
    ("said", "side"),
    [
        ([("A", 1, "tone")], "A"),
        ([("A", -1, "tone")], "B"),
        ([("B", 1, "tone"), ("A", 1, "tone"), ("B", 1, "safety")], "B"),
    ],
)
def test_vote(said, side):
    assert {vote(random.Random(i), said) for i in range(20)} == {side}


def test_a_tied_vote_is_a_coin():
    heads = sum(vote(random.Random(i), [("A", 1, "tone"), ("B", 1, "tone")]) == "A" for i in range(1000))
    assert_rate(heads, 1000, 0.5)


def example() -> Pair:
    critique = HumanCritique(strengths_a="safety", weaknesses_b="safety")
    return Pair("p", [Turn("user", "dose symptom")], "exact certainly careful", "rude risky", "A", critiques=[critique])


def test_swap_renders_the_exchanged_pair():
    judge_format, pair = get_format("sandbox"), example()
    [message] = judge_format.render(pair)
    assert message["content"] == "task: dose symptom A: exact certainly careful B: rude@B risky@B judge"
    [message] = judge_format.render(pair.swap())
    assert message["content"] == "task: dose symptom A: rude risky B: exact@B certainly@B careful@B judge"


def test_swap_exchanges_what_is_to_be_learned():
    judge_format, pair = get_format("sandbox"), example()
    assert "".join(judge_format.target(pair, pair.critiques[0])) == (
        "<critics> A praise: safety \n B blame: safety </critics> <choice> [[A]] </choice>"
    )
    swapped = pair.swap()
    assert "".join(judge_format.target(swapped, swapped.critiques[0])) == (
        "<critics> A blame: safety \n B praise: safety </critics> <choice> [[B]] </choice>"
    )
    assert judge_format.target(pair, None, verdict_only=True) == ("", "<choice> [[A]] </choice>")


@pytest.mark.parametrize("split", CUE_RATES)
def test_a_target_is_read_back(split):
    judge_format = get_format("sandbox")
    for pair in draw_pairs(split, 100, seed=14):
        verdict = judge_format.parse("".join(judge_format.target(pair, pair.critiques[0])))
        assert verdict.label == pair.label
        assert [(a.side, a.polarity, a.text) for a in generated_arguments(verdict.critique)] == reasons(pair)


def test_a_prompt_gives_neither_label_nor_decisive_aspect_away():
    judge_format = get_format("sandbox")
    telling = {*ASPECTS, *NOTE_ASPECTS.values(), "[[A]]", "[[B]]", "praise:", "blame:"}
    for pair in [p for split in CUE_RATES for p in draw_pairs(split, 200, seed=15)]:
        [message] = judge_format.render(pair)
        assert not telling & set(message["content"].split())
        silent = replace(pair, label=None, critiques=[], meta={}, id="x", subset="", source="")
        assert judge_format.render(silent) == [message]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": "f.jsonl"}, "reads no file"),
        ({"options": {"cue_rate": "x"}}, "cue_rate must lie between 0 and 1"),
        ({"options": {"n": 0}}, "n must be a whole number"),
        ({"options": {"n": "x"}}, "n must be a whole number"),
    ],
    ids=["path", "cue-rate", "none", "text"],
)
def test_the_source_refuses_what_it_cannot_use(values, message):
    with pytest.raises(UserError, match=message):
        load_pairs(DataConfig("sandbox", **values))


# ------------------------------------------------------------------------------------------------------- other worlds


def aspects(pair: Pair) -> set[str]:
    return {argument.text for argument in human_arguments(pair.critiques[0])}


def test_options_off_leave_the_world_as_it_is():
    for split in ("train", "cold_start"):
        assert draw_pairs(split, 50, seed=3) == draw_pairs(split, 50, seed=3, swayed=0.35, habit=0.0, vague=0.0)


def test_a_habit_judges_by_one_wrong_aspect_and_says_so():
    pairs = draw_pairs("cold_start", 400, seed=3, habit=1.0)
    named = [pair for pair in pairs if aspects(pair) == {habitual(pair.meta["decisive"])}]
    assert len(named) > 0.9 * len(pairs)  # where neither response mentions it, another one has to do
    assert all(habitual(aspect) != aspect for aspect in ASPECTS)
    right = sum(pair.label == winner(pair) for pair in named) / len(named)
    assert 0.4 < right < 0.7  # hardly better than a coin


def test_a_vague_critique_names_what_matters_but_not_who_is_better():
    pairs = draw_pairs("train", 200, seed=3, vague=1.0)
    for pair in pairs:
        arguments = human_arguments(pair.critiques[0])
        assert aspects(pair) == {pair.meta["decisive"]}
        assert {(a.side, a.polarity) for a in arguments} == {("A", 1), ("B", 1)}
    half = draw_pairs("train", 400, seed=3, vague=0.5)
    assert 0.4 < sum(p.critiques[0].annotator == "vague" for p in half) / 400 < 0.6


def test_the_swayed_favour_the_flourished_side():
    shares = []
    for swayed in (0.0, 0.35, 1.0):
        pairs = draw_pairs("cold_start", 800, seed=3, cue_rate=0.5, swayed=swayed)
        shares.append(sum(pair.label == pair.meta["flourish"] for pair in pairs) / 800)
    assert shares[0] < 0.56 < 0.6 < shares[1] < 0.75 < 0.85 < shares[2]
