"""Double elimination: who plays, who is out, and what the scores are worth."""

import itertools
import random
from statistics import fmean

import pytest

from nlhf.tournament import Match, Tournament, play

SIZES = [1, 2, 3, 5, 8]


def by_strength(i: int, match: Match) -> float:
    """A judge who prefers the higher number."""
    return float(match.first > match.second)


def played(n: int, verdict=by_strength, seed: int | str = 0) -> Tournament:
    tournament = Tournament(n, seed)
    play([tournament], lambda matches: [verdict(i, match) for i, match in matches])
    return tournament


def losses(n: int, verdict, seed: int) -> list[int]:
    """How often each has lost, told by a judge who keeps a list."""
    lost = [0] * n

    def keep(i, match):
        result = verdict(i, match)
        lost[match.second if result > 0.5 else match.first] += 1
        return result

    played(n, keep, seed)
    return lost


def noisy(rng: random.Random):
    return lambda i, match: float(rng.random() < 0.5)


# ------------------------------------------------------------------------------------------------------------- by hand


def test_one_alone_scores_a_half():
    tournament = played(1)
    assert tournament.scores() == [0.5]
    assert (tournament.rounds, tournament.matches) == (0, 0)


def test_two_meet_twice():
    tournament = played(2)
    assert tournament.scores() == [0.0, 1.0]
    assert (tournament.rounds, tournament.matches) == (2, 2)


def test_a_lost_grand_final_is_played_again():
    """1 wins the first match, 0 the grand final; then both have lost once, and the third match decides."""
    tournament = Tournament(2)
    results = []
    for better in (1, 0, 0):
        [match] = tournament.next_round()
        results.append(match)
        tournament.record([float(match.first == better)])
    assert tournament.next_round() == []
    assert tournament.scores() == [1.0, 0.0]
    assert (tournament.rounds, tournament.matches) == (3, 3)


def test_three_by_hand():
    """One rests in the first round, and the loser of that round, alone in its bracket, in the second."""
    tournament = Tournament(3)
    sizes = []
    while matches := tournament.next_round():
        sizes.append(len(matches))
        tournament.record([by_strength(0, match) for match in matches])
    assert sizes == [1, 1, 1, 1]
    assert tournament.scores() == [0.0, 0.5, 1.0]


def test_eight_play_both_brackets_in_one_round():
    tournament = Tournament(8)
    sizes = []
    while matches := tournament.next_round():
        sizes.append(len(matches))
        tournament.record([by_strength(0, match) for match in matches])
    # Winners 4, 2, 1, then the champion waits; losers -, 2, 2, 1 and a bye, 1; then the grand final.
    assert sizes == [4, 4, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("close", "expected"), [(0.75, [0, 1]), (1.0, [0.5, 0.5])], ids=["one lost by little", "equal to the last"]
)
def test_those_who_leave_in_one_round_are_ranked_by_their_match_scores(close, expected):
    """Of eight, two leave in round 2: means of 0 and (0 + 0.25) / 2, then ranks 0 and 1, or both 0 and 0.5 each."""
    tournament = Tournament(8)
    tournament.record([1.0 for _ in tournament.next_round()])
    *_, clear, narrow = tournament.next_round()
    tournament.record([1.0, 1.0, 1.0, close])
    while matches := tournament.next_round():
        tournament.record([1.0 for _ in matches])
    scores = tournament.scores()
    assert [scores[clear.second], scores[narrow.second]] == [rank / 7 for rank in expected]
    assert min(scores) == min(expected) / 7


# ---------------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", SIZES[1:])
def test_two_losses_eliminate_and_the_champion_has_at_most_one(n, seed):
    lost = losses(n, noisy(random.Random(seed)), seed)
    assert sorted(lost)[0] in (0, 1)
    assert sorted(lost)[1:] == [2] * (n - 1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", SIZES)
def test_scores_add_up_and_matches_are_counted(n, seed):
    tournament = played(n, noisy(random.Random(seed)), seed)
    assert sum(tournament.scores()) == pytest.approx(n / 2)
    assert tournament.matches in ({0} if n == 1 else {2 * n - 2, 2 * n - 1})
    assert n == 1 or max(tournament.scores()) == 1.0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", [3, 5, 7])
def test_nobody_rests_while_another_of_the_bracket_has_rested_less(n, seed):
    """Counted from outside: who is in the round before and after it, but in no match of it."""
    tournament = Tournament(n, seed)
    lost, byes, rng = [0] * n, [0] * n, random.Random(seed)
    while matches := tournament.next_round():
        playing = {i for match in matches for i in match}
        final = sum(count == 0 for count in lost) == sum(count == 1 for count in lost) == 1
        for bracket in (0, 1):
            members = [i for i in range(n) if lost[i] == bracket]
            resting = [i for i in members if i not in playing]
            assert len(resting) == (0 if final else len(members) % 2)
            for i in resting:
                assert byes[i] == min(byes[j] for j in members)
                byes[i] += 1
        results = [float(rng.random() < 0.5) for _ in matches]
        for match, result in zip(matches, results, strict=True):
            lost[match.second if result else match.first] += 1
        tournament.record(results)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("n", SIZES)
def test_a_transitive_judge_has_the_best_first_and_the_second_best_second(n, seed):
    """The best never loses, and the second best loses to the best alone: to the end, then, and there again."""
    scores = played(n, seed=seed).scores()
    assert scores[-1] == max(scores)
    if n > 1:
        assert scores[-2] == (n - 2) / (n - 1)
    if n <= 4:
        assert scores == sorted(scores)


def test_a_transitive_judge_gives_the_true_order_in_the_mean_over_draws():
    """14 matches have too few outcomes (2^14) to order 8 entrants (8! = 40,320) each time."""
    found = [played(8, seed=seed).scores() for seed in range(400)]
    means = [fmean(scores) for scores in zip(*found, strict=True)]
    assert means == sorted(means)
    assert all(b - a > 0.03 for a, b in itertools.pairwise(means))


def test_random_verdicts_favour_no_number():
    rng = random.Random(5)
    found = [played(5, noisy(rng), seed).scores() for seed in range(3000)]
    for scores in zip(*found, strict=True):
        assert fmean(scores) == pytest.approx(0.5, abs=0.025)  # four standard errors


@pytest.mark.parametrize("verdict", [0.5, None], ids=["tie", "no verdict"])
@pytest.mark.parametrize("n", SIZES[1:])
def test_without_a_winner_a_coin_decides_and_is_counted(n, verdict):
    tournament = played(n, lambda i, match: verdict, seed=3)
    assert tournament.coins == tournament.matches
    assert all(points == 0.5 for points in itertools.chain(*tournament._points))
    champions = [played(n, lambda i, match: verdict, seed).scores().index(1.0) for seed in range(60)]
    assert len(set(champions)) > 1
    assert played(n, lambda i, match: verdict, seed=3).scores() == tournament.scores()  # the coin has a seed


def test_clear_verdicts_need_no_coin():
    assert played(8).coins == 0


# ----------------------------------------------------------------------------------------------------------- the batch


def test_a_round_of_all_groups_is_one_call():
    calls = []

    def judge(matches):
        calls.append(len(matches))
        return [by_strength(i, match) for i, match in matches]

    tournaments = [Tournament(n, n) for n in (1, 2, 8, 8)]
    play(tournaments, judge)
    assert len(calls) == max(t.rounds for t in tournaments)
    assert calls[0] == 0 + 1 + 4 + 4
    assert sum(calls) == sum(t.matches for t in tournaments)
    for n, together in zip((1, 2, 8, 8), tournaments, strict=True):
        assert together.scores() == played(n, seed=n).scores()


def test_nothing_to_play_is_no_call():
    play([Tournament(1), Tournament(1)], lambda matches: pytest.fail("called"))
    play([], lambda matches: pytest.fail("called"))


@pytest.mark.parametrize("results", [[], [1.0, 1.0], [1.5], [-0.1], [float("nan")]], ids=str)
def test_results_that_cannot_be(results):
    tournament = Tournament(2)
    tournament.next_round()
    with pytest.raises(ValueError, match=r"zip|\[0, 1\]"):
        tournament.record(results)


def test_too_many_results_of_a_round():
    with pytest.raises(ValueError, match="more than 1 results"):
        play([Tournament(2)], lambda matches: [1.0] * (len(matches) + 1))


def test_rounds_in_their_order():
    tournament = Tournament(3)
    tournament.next_round()
    with pytest.raises(ValueError, match="not recorded"):
        tournament.next_round()
    with pytest.raises(ValueError, match="not over"):
        Tournament(3).scores()
    with pytest.raises(ValueError, match="needs an entrant"):
        Tournament(0)
