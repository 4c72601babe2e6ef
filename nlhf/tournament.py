"""Double elimination: the matches of a group, round by round, and the score of each entrant at the end.

Station of the path: Verdict -> **rewards**, where a judge of pairs is to reward single responses. Source: the public
code of RM-NLHF (arXiv 2601.07349), which rewards a policy so. Nothing here knows of judges or texts: entrants are
numbers, and who plays is said to the caller, who says how it went. So all matches of a round, of all groups, can be
judged in one batch (`play`).
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple


class Match(NamedTuple):
    """Two entrants, by their numbers."""

    first: int
    second: int


class Tournament:
    """One group's tournament: two losses eliminate.

    The winners' bracket holds who has not lost, the losers' bracket who has lost once; both play in the same round,
    each its first against its last, its second against its last but one. Where one is left over it has a bye: the
    entrant with the fewest so far. The last of each bracket meet in the grand final. If the undefeated one loses it,
    both have lost once and they play again (the reset).

    Without a winner, because the judge says tie or nothing, a coin decides who goes on, and each scores 0.5.

    Attributes:
        rounds: Rounds played.
        matches: Matches played; 2 n - 2, or 2 n - 1 with a reset.
        coins: How many of them a coin decided.
    """

    def __init__(self, entrants: int, seed: int | str = 0):
        """Draw the brackets.

        Args:
            entrants: How many take part, at least 1.
            seed: Of the draw and the coins; only who plays whom depends on it, no number has an advantage.
        """
        if entrants < 1:
            raise ValueError(f"a tournament needs an entrant, got {entrants}")
        self._rng = random.Random(f"tournament/{seed}")
        self._unbeaten, self._beaten_once = self._rng.sample(range(entrants), entrants), []
        self._points: list[list[float]] = [[] for _ in range(entrants)]
        self._eliminated: dict[int, int] = {}
        self._byes: Counter[int] = Counter()
        self._playing: list[Match] = []
        self.rounds = self.matches = self.coins = 0

    def next_round(self) -> list[Match]:
        """The matches of the next round, which `record` must be told the results of; empty when all is over."""
        if self._playing:
            raise ValueError("the results of the last round were not recorded")
        if len(self._unbeaten) == len(self._beaten_once) == 1:
            self._playing = [Match(self._unbeaten[0], self._beaten_once[0])]
        else:
            self._playing = self._drawn(self._unbeaten) + self._drawn(self._beaten_once)
        return list(self._playing)

    def record(self, results: Sequence[float | None]) -> None:
        """Take the results of the round.

        Args:
            results: For each match the score of its first entrant in [0, 1]: above 0.5 the first has won, below 0.5 the
                second; a coin decides 0.5, and None (no verdict), which scores 0.5.

        Raises:
            ValueError: there are more or fewer results than matches, or one is not in [0, 1].
        """
        if any(result is not None and not 0 <= result <= 1 for result in results):  # NaN is not
            raise ValueError(f"results must lie in [0, 1], got {results}")
        played = list(zip(self._playing, results, strict=True))
        self._playing, self.rounds = [], self.rounds + 1
        for match, result in played:
            self._settle(match, 0.5 if result is None else result)

    def scores(self) -> list[float]:
        """Each entrant's score, [n], from 0 for the one that left first to 1 for the champion.

        The rank is by the round of elimination, among those of one round by their mean match score; who is equal in
        both shares the mean of their ranks. Ranks are divided by n - 1, so that scores add up to n / 2;
        alone it is 0.5.
        """
        if len(self._points) == 1:
            return [0.5]
        if len(self._eliminated) != len(self._points) - 1:
            raise ValueError("the tournament is not over")
        keys = [(self._eliminated.get(i, self.rounds + 1), fmean(points)) for i, points in enumerate(self._points)]
        ranks = [(sum(k < key for k in keys) + sum(k <= key for k in keys) - 1) / 2 for key in keys]
        return [rank / (len(keys) - 1) for rank in ranks]

    def _drawn(self, bracket: Sequence[int]) -> list[Match]:
        """The matches of a bracket."""
        players = list(bracket)
        if len(players) % 2:
            rests = min(players, key=lambda i: self._byes[i])
            players.remove(rests)
            self._byes[rests] += 1
        half = len(players) // 2
        return [Match(first, second) for first, second in zip(players[:half], reversed(players[half:]), strict=True)]

    def _settle(self, match: Match, score: float) -> None:
        self.matches += 1
        self._points[match.first].append(score)
        self._points[match.second].append(1 - score)
        first_wins = score > 0.5
        if score == 0.5:
            self.coins += 1
            first_wins = self._rng.random() < 0.5
        loser = match.second if first_wins else match.first
        if loser in self._unbeaten:
            self._unbeaten.remove(loser)
            self._beaten_once.append(loser)
        else:
            self._beaten_once.remove(loser)
            self._eliminated[loser] = self.rounds


def play(tournaments: Sequence[Tournament], judge: Callable[[list[tuple[int, Match]]], Sequence[float | None]]) -> None:
    """Play all tournaments to their ends, the matches of a round in one call.

    Args:
        tournaments: The tournaments.
        judge: Is given matches, each with the index of its tournament, and gives their results, see
            `Tournament.record`.
    """
    while True:
        rounds = [tournament.next_round() for tournament in tournaments]
        matches = [(i, match) for i, found in enumerate(rounds) for match in found]
        if not matches:
            return
        results = iter(judge(matches))
        for tournament, found in zip(tournaments, rounds, strict=True):
            if found:
                tournament.record([next(results) for _ in found])
        if next(results, _NONE_LEFT) is not _NONE_LEFT:
            raise ValueError(f"the judge gave more than {len(matches)} results")


_NONE_LEFT = object()
