r"""Judges that declare numbers: a score for each response, a strength, or the rating of one response at a time.

A declaration with another number of scores than asked for, or with one out of range, is no verdict. Prompts are in our
own words, as in `nlhf.formats.choices`.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from nlhf.errors import UserError
from nlhf.formats.base import JudgeFormat, Message
from nlhf.formats.choices import joined
from nlhf.formats.json_replies import json_objects, repair
from nlhf.pairs import Pair
from nlhf.verdict import Verdict, better, last_declaration, single_label, strip_thinking, tag

_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?!\w)")
_NUMBERS = rf"{joined(_NUMBER.pattern)}(?:\s*/\s*\d+\b)?"  # a number, perhaps "7/10"; several are no rating


class ScoresFormat(JudgeFormat):
    """A judge that scores both responses: the higher score wins, equal scores are a tie.

    Attributes:
        low: Lowest score.
        high: Highest score.
    """

    ties = True
    low: int = 1
    high: int = 10

    def _read(self, declared: str) -> Verdict:
        scores = self.scores(declared, 2)
        return Verdict(better(scores) if scores else None, scores=scores)

    def scores(self, declared: str, n: int) -> tuple[float, ...] | None:
        """The n scores in a declaration; None when there are more or fewer, or one is out of range."""
        numbers = _NUMBER.findall(re.sub(rf"/\s*{self.high}\b", "", declared))
        scores = tuple(float(number.replace("−", "-")) for number in numbers)
        return scores if len(scores) == n and all(self.low <= score <= self.high for score in scores) else None


class PointwiseFormat(ScoresFormat):
    """A judge that rates the response shown as A, without seeing the other; see `nlhf.verdict.compare_ratings`."""

    pointwise = True
    bare_question = True

    def _read(self, declared: str) -> Verdict:
        return Verdict(None, scores=self.scores(declared, 1))

    def variables(self, pair: Pair) -> dict[str, object]:
        """The other response stays out of the template's reach."""
        return {"context": self.render_context(pair.context), "response_a": pair.response_a}


class ListFormat(JudgeFormat):
    """A judge that reads any number of responses in one prompt; a pair is a list of two.

    The template has the variable ``responses`` beside ``response_a`` and ``response_b``, which serve a pair alone.
    """

    bare_question = True

    def variables(self, pair: Pair) -> dict[str, object]:
        """See `JudgeFormat.variables`."""
        return {**super().variables(pair), "responses": [pair.response_a, pair.response_b]}

    def render_list(self, pair: Pair, responses: Sequence[str]) -> list[Message]:
        """The chat messages that put these responses (2 to 26) to the pair's conversation."""
        if not 2 <= len(responses) <= 26:
            raise UserError(f"format {self.name!r} compares 2 to 26 responses, got {len(responses)}")
        return self._fill({**self.variables(pair), "responses": list(responses)})

    def parse_list(self, text: str, n: int) -> tuple[float, ...] | None:
        """Read the reply to n responses.

        Returns:
            A score for each response, the best the highest (1 for the one chosen and 0 for the others where the judge
            only chooses); None when no verdict can be read.
        """
        found = last_declaration(strip_thinking(text), self.pattern)
        return self._list_scores(found[1], n) if found else None

    def _list_scores(self, declared: str, n: int) -> tuple[float, ...] | None:
        raise TypeError(f"{type(self).__name__} must define _list_scores")


class DeepSeekGRMFormat(ListFormat, ScoresFormat):
    r"""The judge of DeepSeek-GRM (arXiv 2504.02495): principles, critiques, then ``Scores: \boxed{8, 6}``.

    Upstream votes over k samples by the sum of the scores, which is the rule ``mean_strength`` of `nlhf.judge.vote`. A
    box with a single number (a solution of the task, for example) declares nothing.
    """

    name = "deepseek_grm"
    template = "deepseek_grm.jinja"
    pattern = re.compile(r"\\boxed\{([^{}]*\d\s*,[^{}]*)\}")

    def _list_scores(self, declared: str, n: int) -> tuple[float, ...] | None:
        return self.scores(declared, n)


class RewardBench2Format(ListFormat):
    """The four-way judge of RewardBench 2 (arXiv 2506.01937): reasons, then ``[[C]]``; no ties.

    Under ``compat``: the first of ``[[A]]``, ``[[B]]``, ... that occurs anywhere, in the order of the alphabet.
    Upstream counts no verdict as 0.25.
    """

    name = "rewardbench2"
    template = "rewardbench2.jinja"
    declaration = "[[{}]]"

    def parse_list(self, text: str, n: int) -> tuple[float, ...] | None:
        """See `ListFormat.parse_list`."""
        if not self.compat:
            return super().parse_list(text, n)
        chosen = next((i for i in range(n) if f"[[{_LETTERS[i]}]]" in text), None)
        return None if chosen is None else _one_hot(chosen, n)

    def _list_scores(self, declared: str, n: int) -> tuple[float, ...] | None:
        letters = {letter: letter for letter in _LETTERS[:n]}
        chosen = single_label(declared, letters)
        return _one_hot(_LETTERS.index(chosen), n) if chosen else None

    def _parse_upstream(self, text: str) -> Verdict:
        return Verdict(next((label for label in "AB" if f"[[{label}]]" in text), None), critique=text.strip() or None)


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _one_hot(i: int, n: int) -> tuple[float, ...]:
    return tuple(float(k == i) for k in range(n))


class RewardBench2RatingsFormat(PointwiseFormat):
    """The rating judge of RewardBench 2, which its subset Ties needs: reasons, then ``Rating: 7``, from 1 to 10.

    A bare number at the very end counts as well. Under ``compat``: only a whole number that ends the reply.
    """

    name = "rewardbench2_ratings"
    template = "rewardbench2_ratings.jinja"
    pattern = re.compile(
        rf"(?:\brating(?:\s+(?:is|of))?[\s*:=\[]*|(?={_NUMBERS}[\s*.\]]*\Z))({_NUMBERS})", re.IGNORECASE
    )

    def _parse_upstream(self, text: str) -> Verdict:
        found = re.search(r"(\d+)\s*$", text)
        return Verdict(None, scores=self.scores(found[1], 1) if found else None, critique=text.strip() or None)


class Prometheus2AbsoluteFormat(PointwiseFormat):
    """The absolute judge of Prometheus 2 (arXiv 2405.01535): feedback, then ``[RESULT] 4``, from 1 to 5.

    Under ``compat``: the result must end the reply.
    """

    name = "prometheus2_absolute"
    template = "prometheus2_absolute.jinja"
    high = 5
    pattern = re.compile(rf"\[result\][\s*:]*({_NUMBERS})", re.IGNORECASE)

    def _parse_upstream(self, text: str) -> Verdict:
        found = re.search(r"\[RESULT\]\s*(\d)\s*$", text)
        return Verdict(None, scores=self.scores(found[1], 1) if found else None, critique=text.strip() or None)


class JudgeLRMFormat(ScoresFormat):
    """The judge of JudgeLRM (arXiv 2504.00050): after the thinking ``<answer>3</answer><answer>5</answer>``."""

    name = "judgelrm"
    template = "judgelrm.jinja"
    pattern = re.compile(r"((?:<answer>[^<]{0,40}</answer>[\s,;]*)+)", re.IGNORECASE)
    bare_question = True


class ThinkRMStrengthFormat(JudgeFormat):
    """The judge of Think-RM (arXiv 2505.16265) that says how much better: ``<answer>-2</answer>``, negative for A.

    From -3 to 3 without 0: there are no ties.
    """

    name = "think_rm_strength"
    template = "think_rm_strength.jinja"
    pattern = tag("answer")

    def _read(self, declared: str) -> Verdict:
        number = re.fullmatch(r"\s*\[*\s*([-−+]?)([1-3])\s*\]*\s*", declared)
        if not number:
            return Verdict(None)
        strength = float(number[2]) * (-1 if number[1] in ("-", "−") else 1)
        return Verdict("A" if strength < 0 else "B", strength)

    def _declare(self, pair: Pair) -> str:
        if not pair.strength:
            raise UserError(f"pair {pair.id!r}: format {self.name!r} learns a strength, and the pair has none")
        return f"<answer>{pair.strength}</answer>"


class NemotronGenRMFormat(ScoresFormat):
    r"""The judge of Nemotron GenRM: two scores from 1 to 5 and a ranking from 1 (A much better) to 6 (B much better).

    Either ``\boxed{4, 2}`` and after it ``\boxed{2}``, or JSON with ``score_1``, ``score_2`` and ``ranking``. The
    ranking decides, and its midpoint of 3.5 cannot be said: there are no ties. Without a ranking unequal scores decide.

    The instructions are in the released models' own chat template: responses are messages of the roles ``response_1``
    and ``response_2``, which other models' templates do not know (give those a ``prompt_file``).
    """

    name = "nemotron_genrm"
    template = ""
    ties = False
    high = 5
    pattern = re.compile(r"\\boxed\{([^{}]*\d\s*,[^{}]*)\}")
    single = re.compile(r"\\boxed\{([^{},]*)\}")

    def render(self, pair: Pair) -> list[Message]:
        """See `JudgeFormat.render`."""
        if self.prompt_text:
            return super().render(pair)
        turns = [(turn.role, turn.content) for turn in pair.context]
        turns += [("response_1", pair.response_a), ("response_2", pair.response_b)]
        return [{"role": role, "content": content} for role, content in turns]

    def _parse(self, text: str) -> Verdict:
        text = repair(text)
        pair = last_declaration(text, self.pattern)
        objects = [(at, found) for at, found in json_objects(text) if {"score_1", "ranking"} & found.keys()]
        if objects and (not pair or objects[-1][0] > pair.start()):
            at, found = objects[-1]
            scores, ranking = f"{found.get('score_1')} {found.get('score_2')}", found.get("ranking")
        else:
            box = last_declaration(text, self.single, pair.end() if pair else 0)
            at = pair.start() if pair else box.start() if box else len(text)
            scores, ranking = pair[1] if pair else "", box[1] if box else None
        return dataclasses.replace(_ranked(ranking, self.scores(scores, 2)), critique=text[:at].strip() or None)


def _ranked(ranking: Any, scores: tuple[float, ...] | None) -> Verdict:
    if ranking is None:
        label = better(scores) if scores else None
        return Verdict(None if label == "tie" else label, scores=scores)
    number = re.fullmatch(r"\s*([1-6])(?:\.0)?\s*", str(ranking))
    if not number:
        return Verdict(None, scores=scores)
    strength = int(number[1]) - (4 if int(number[1]) < 4 else 3)
    return Verdict("A" if strength < 0 else "B", float(strength), scores)
