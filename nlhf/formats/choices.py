"""Released and benchmark judges whose reply names the better response: each is a prompt, a declaration and its labels.

The prompts are in our own words, with each judge's block markers and verdict; the exact prompt of a released model can
be put in their place by ``prompt_file``.
"""

import re
from types import MappingProxyType

from nlhf.formats.base import JudgeFormat
from nlhf.verdict import Verdict, last_block, last_declaration, tag

_BY_NUMBER = MappingProxyType({"1": "A", "2": "B"})
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def joined(item: str) -> str:
    """The pattern of one item or several ("A", "A or B"): a declaration in prose ends where no other label follows."""
    return rf"{item}(?:\s*(?:/|,|&|\bor\b|\band\b)\s*{item}){{0,9}}"


_LETTERS = joined(r"(?:response[ ]+)?[A-Z]\b")
_DECISIONS = joined(r"(?:response[ ]*[0-9]\b|[12]\b|tie\b)")


class RewardBenchFormat(JudgeFormat):
    """The judge of RewardBench (arXiv 2403.13787): reasons, then ``[[A]]`` or ``[[B]]``.

    Under ``compat``: A if ``[[A]]`` occurs anywhere, else B if ``[[B]]`` does. Upstream counts no verdict as 0.5.
    """

    name = "rewardbench"
    template = "rewardbench.jinja"
    declaration = "[[{}]]"
    bare_question = True

    def _parse_upstream(self, text: str) -> Verdict:
        return Verdict(next((label for label in "AB" if f"[[{label}]]" in text), None), critique=text.strip() or None)


class SkyworkCriticFormat(RewardBenchFormat):
    """The judge of Skywork-Critic-Llama-3.1: RewardBench's blocks, and nothing but the label as a reply.

    Under ``compat``: A if the letter occurs anywhere in the reply, else B.
    """

    name = "skywork_critic"
    template = "skywork_critic.jinja"
    reasons = ""

    def _parse_upstream(self, text: str) -> Verdict:
        return Verdict("A" if "A" in text else "B")


class ArenaHardFormat(JudgeFormat):
    """The judge of Arena-Hard, with which JudgeBench (arXiv 2410.12784) measures: ``[[A>>B]]`` to ``[[B>>A]]``.

    A forced verdict is one of the five in the prompt, and P(A) that of both in which A is better.
    Under ``compat``: one distinct verdict in the whole reply, else none.
    """

    name = "arena_hard"
    template = "arena_hard.jinja"
    declaration = "[[{}]]"
    labels = MappingProxyType(
        {
            **{"A>B": "A", "B>A": "B", "A=B": "tie", "A>>B": "A", "B>>A": "B"},
            **{"B=A": "tie", "A<B": "B", "B<A": "A", "A<<B": "B", "B<<A": "A"},
        }
    )
    choices = ("A>>B", "A>B", "A=B", "B>A", "B>>A")
    strengths = MappingProxyType(
        {
            **{"A>>B": -3, "A>B": -1, "A=B": 0, "B>A": 1, "B>>A": 3},
            **{"B<<A": -3, "B<A": -1, "B=A": 0, "A<B": 1, "A<<B": 3},
        }
    )
    ties = True
    bare_question = True

    def _parse_upstream(self, text: str) -> Verdict:
        found = set(re.findall(r"\[\[([AB<>=]+)\]\]", text))
        token = found.pop() if len(found) == 1 else None
        return Verdict(self.labels.get(token), self.strengths.get(token), critique=text.strip() or None)


class RMR1Format(JudgeFormat):
    """The judge of RM-R1 (arXiv 2505.02387): a rubric or a solution of its own, then ``<answer>[[A]]</answer>``.

    Under ``compat`` (the reward of its training): the last 80 characters hold the one answer and not the other.
    """

    name = "rm_r1"
    template = "rm_r1.jinja"
    declaration = "<answer>[[{}]]</answer>"
    pattern = tag("answer")

    def _parse_upstream(self, text: str) -> Verdict:
        found = [label for label in "AB" if f"<answer>[[{label}]]</answer>" in text[-80:]]
        return Verdict(found[0] if len(found) == 1 else None, critique=text.strip() or None)


class J1Format(JudgeFormat):
    """The judge of J1 (arXiv 2505.10320): ``<answer> [[A]] </answer>``, maybe scores from 0 to 10 beside it.

    The label decides; scores that are missing for one side or out of range are none.
    """

    name = "j1"
    template = "j1.jinja"
    declaration = "<answer> [[{}]] </answer>"
    pattern = tag("answer")
    bare_question = True

    def _parse(self, text: str) -> Verdict:
        verdict = super()._parse(text)
        written = [last_declaration(text, tag(f"score_{side}")) for side in "AB"]
        numbers = [_NUMBER.fullmatch(found[1].strip()) if found else None for found in written]
        scores = tuple(float(number[0]) for number in numbers if number)
        if len(scores) != 2 or not all(0 <= score <= 10 for score in scores):
            return verdict
        return Verdict(verdict.label, scores=scores, critique=verdict.critique)


class ThinkRMFormat(JudgeFormat):
    """The judge of Think-RM (arXiv 2505.16265) that names the better response: ``<answer>A</answer>``.

    Under ``compat``: the last answer block must be the bare letter.
    """

    name = "think_rm"
    template = "think_rm.jinja"
    declaration = "<answer>{}</answer>"
    pattern = tag("answer")

    def _parse_upstream(self, text: str) -> Verdict:
        block = last_block(text, "answer")
        answer = block[1].strip() if block else None
        return Verdict(answer if answer in self.labels else None, critique=text.strip() or None)


class RRMFormat(JudgeFormat):
    r"""The judge of Reward Reasoning Models (arXiv 2505.14674): reasoning, then ``\boxed{Assistant 1}``.

    Other boxes (a solution of the task, for example) declare nothing.
    """

    name = "rrm"
    template = "rrm.jinja"
    declaration = r"\boxed{Assistant {}}"
    labels = _BY_NUMBER
    pattern = re.compile(r"\\boxed\{\s*(?:\\text\{\s*)?(assistant\b[^{}]{0,40})\}", re.IGNORECASE)
    bare_question = True


class Prometheus2Format(JudgeFormat):
    """The relative judge of Prometheus 2 (arXiv 2405.01535): feedback, then ``[RESULT] A``.

    Under ``compat``: the result must end the reply.
    """

    name = "prometheus2"
    template = "prometheus2.jinja"
    declaration = "[RESULT] {}"
    # The word behind the letter tells an article ("[RESULT] A good answer ...") from a verdict.
    pattern = re.compile(rf"\[result\][\s*:]*({_LETTERS}(?:[ ]+[a-z]+)?)", re.IGNORECASE)
    reasons = "{}\n"
    bare_question = True

    def _parse_upstream(self, text: str) -> Verdict:
        found = re.search(r"\[RESULT\]\s*([AB])\s*$", text)
        return Verdict(found[1] if found else None, critique=text.strip() or None)


class AutoJFormat(JudgeFormat):
    """The pairwise judge of Auto-J (arXiv 2310.05470): key factors, then ``So, the final decision is Response 1``.

    Under ``compat``: the first word or two after the last "final decision is " (in this spelling) decide.
    """

    name = "auto_j"
    template = "auto_j.jinja"
    declaration = "So, the final decision is {}"
    labels = MappingProxyType({**_BY_NUMBER, "TIE": "tie"})
    written = MappingProxyType({"A": "Response 1", "B": "Response 2", "tie": "Tie"})
    pattern = re.compile(rf"(?:\bso,\s+)?(?:\bthe\s+)?\bfinal\s+decision\s+is[\s*:]*({_DECISIONS})", re.IGNORECASE)
    ties = True
    bare_question = True

    def _parse_upstream(self, text: str) -> Verdict:
        _, found, rest = text.strip().rpartition("final decision is ")
        rest = rest.strip().lower() if found else ""
        label = next((label for label, token in self.written.items() if rest.startswith(token.lower())), None)
        return Verdict(label, critique=text.strip() or None)
