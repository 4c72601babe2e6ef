"""The format of HER-RM (arXiv 2601.21459), the judge of role-play: principles, comparisons and a winner, in JSON.

The prompt in prompts/her_rm.jinja is the interface of the released model, byte for byte (see NOTICE), with its slots
rewritten for Jinja.
"""

import hashlib
import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nlhf.critique.arguments import critique_lines
from nlhf.errors import UserError
from nlhf.formats.base import JudgeFormat
from nlhf.formats.json_replies import json_objects, last_field, repair
from nlhf.pairs import HumanCritique, Label, Pair, Turn, swap_references
from nlhf.roleplay.principles import Library, library, load_principles
from nlhf.roleplay.turns import PLAN, scrub
from nlhf.verdict import Verdict, half_width, strip_thinking

_CHAT_ROLES = ("system", "user", "assistant")
_SPEAKER = re.compile(rf"(.+)\(({'|'.join(_CHAT_ROLES)})\)", re.DOTALL)

JUDGEMENTS = "her_rm_judgements"
"""Key of a pair's ``meta``: a teacher's results on it, in the contract of `HERRMFormat`, one or one for each order."""


class HERRMFormat(JudgeFormat):
    """A JSON object whose ``better_response`` is ``cand_1``, ``cand_2`` or ``tie``.

    Read are fenced and bare JSON with prose around it, ``result`` as a list or an object, LaTeX in strings, and JSON
    that is cut off behind ``better_response``. `result` gives the principles and their winners. Under ``compat``: the
    first ``"better_response": "..."`` anywhere.
    """

    name = "her_rm"
    template = "her_rm.jinja"
    declaration = '"better_response": "{}"'
    labels = MappingProxyType({"CAND_1": "A", "CAND_2": "B", "TIE": "tie"})
    written = MappingProxyType({"A": "cand_1", "B": "cand_2", "tie": "tie"})
    opening = '{"result": [{'
    ties = True

    def _read_principles(self, path: Path | None) -> Library:
        return load_principles(path) if path else library()

    def variables(self, pair: Pair) -> dict[str, object]:
        """The judge sees what a character thinks, and never the plan of the model behind it."""
        return {
            "context": self.render_context([Turn(t.role, without_plan(t.content)) for t in pair.context]),
            "response_a": without_plan(pair.response_a),
            "response_b": without_plan(pair.response_b),
        }

    def render_context(self, context: list[Turn]) -> str:
        """Lines ``id:1, name(role): content``.

        A turn's role is one of a chat, a character's name (then a user's), or both: ``Ada(assistant)``.
        """
        return "\n".join(f"id:{i}, {_speaker(turn.role)}: {turn.content}" for i, turn in enumerate(context, start=1))

    def result(self, text: str) -> dict[str, Any] | None:
        """The judge's whole result: ``principle``, ``analysis``, ``better_response``; None when it cannot be read.

        Of several results the last one counts; results of one list that disagree are empty.
        """
        found = self._last_result(repair(strip_thinking(text)))
        return found[1] if found else None

    def _last_result(self, text: str) -> tuple[int, dict[str, Any]] | None:
        for at, found in reversed(json_objects(text)):
            inner = found.get("result", found)
            results = [r for r in (inner if isinstance(inner, list) else [inner]) if isinstance(r, dict)]
            declared = [r for r in results if "better_response" in r]
            if declared and len({self.read_label(r["better_response"]) for r in declared}) == 1:
                return at, declared[-1]
            if declared:
                return at, {}
        return None

    def read_label(self, value: object) -> Label | None:
        """What a ``winner`` or a ``better_response`` means; None for anything but the three."""
        return self.labels.get(half_width(str(value)).strip().upper())

    def _parse(self, text: str) -> Verdict:
        text = repair(text)
        found = self._last_result(text)
        # A last answer may be cut off behind its verdict, be it the only one or a second one.
        begin = re.compile(r'\{\s*"result"' if found else r'\{\s*"').search(text, found[0] + 1 if found else 0)
        cut_off = begin and last_field(text[begin.start() :], "better_response", tuple(self.written.values()))
        if cut_off:
            critique = text[begin.start() : begin.start() + cut_off.start()]
            return Verdict(self.labels[cut_off[1].upper()], critique=critique.strip())
        if not found:
            return Verdict(None, critique=text.strip() or None)
        return Verdict(self.read_label(found[1].get("better_response")), critique=_critique(found[1]))

    def _parse_upstream(self, text: str) -> Verdict:
        found = re.search(r'"better_response"\s*:\s*"(cand_1|cand_2|tie)"', text)
        return Verdict(self.labels[found[1].upper()] if found else None, critique=text.strip() or None)

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """See `JudgeFormat.target`.

        A pair with a teacher's `JUDGEMENTS` teaches the whole contract. Otherwise the critique is the overall analysis,
        for a person names no principles.

        Raises:
            UserError: no judgement is of these two responses, or it does not come to the pair's label.
        """
        verdict = self._declare(pair) + "}]}"
        if verdict_only:
            return "", self.opening + verdict
        if pair.meta.get(JUDGEMENTS):
            result = self._taught(pair)
        else:
            result = {"analysis": {"overall_analysis": "\n".join(critique_lines(critique)) if critique else ""}}
        return '{"result": [' + json.dumps(result, ensure_ascii=False)[:-1] + ", ", verdict

    def has_reasons(self, pair: Pair) -> bool:
        """See `JudgeFormat.has_reasons`: a human's critique or a teacher's judgement."""
        return bool(pair.meta.get(JUDGEMENTS)) or super().has_reasons(pair)

    def _taught(self, pair: Pair) -> dict[str, Any]:
        """The teacher's result in the order shown, without its verdict."""
        shown = self.variables(pair)
        found = pair.meta[JUDGEMENTS]
        results = [r for r in found if isinstance(r, dict)] if isinstance(found, list) else []
        for result in sorted(results, key=lambda r: r.get("cand_1") != shown["response_a"]):
            found = result if result.get("cand_1") == shown["response_a"] else exchange_candidates(result)
            if (found.get("cand_1"), found.get("cand_2")) == (shown["response_a"], shown["response_b"]):
                break
        else:
            raise UserError(f"pair {pair.id!r}: no result in meta.{JUDGEMENTS} has the pair's responses as candidates")
        if self.read_label(found.get("better_response")) != pair.label:
            raise UserError(
                f"pair {pair.id!r}: its label is {pair.label!r}, but the result in meta.{JUDGEMENTS} says "
                f"{found.get('better_response')!r}"
            )
        return {key: value for key, value in found.items() if key != "better_response"}


class HERTeacherFormat(HERRMFormat):
    """HER-RM's contract under a prompt of ours that gives the principles: what a teacher labels pairs with.

    The template's further variable ``principles`` is our library or the user's, see `nlhf.roleplay.principles`.
    """

    name = "her_rm_teacher"
    template = "her_rm_teacher.jinja"

    @property
    def prompt_hash(self) -> str:
        """Of the prompt template with the principles that it is filled with."""
        return hashlib.sha256(f"{self.prompt_text}\n{self.principles.text}".encode()).hexdigest()[:12]

    def variables(self, pair: Pair) -> dict[str, object]:
        """See `HERRMFormat.variables`."""
        return super().variables(pair) | {"principles": self.principles.text}


def without_plan(text: str) -> str:
    """A turn without the model's system thinking, closed or not."""
    return scrub(text, PLAN, "tags")


def _speaker(role: str) -> str:
    if _SPEAKER.fullmatch(role):
        return role
    return f"{role}({role if role in _CHAT_ROLES else 'user'})"


def exchange_candidates(result: dict[str, Any]) -> dict[str, Any]:
    """A result on the pair with its responses exchanged; an involution.

    The candidates' own texts change places and stay as they are; what is said about them names the other one, also in
    prose ("Response 1").
    """
    texts = {key: result[key] for key in ("cand_1", "cand_2") if key in result}
    rest = {key: value for key, value in result.items() if key not in texts}
    return {key: texts[_other(key)] for key in texts if _other(key) in texts} | _exchanged(rest)


def _other(key: str) -> str:
    return re.sub(r"^cand_([12])", lambda match: swap_references(match[0]), key)


def _exchanged(value: Any) -> Any:
    if isinstance(value, str):
        return swap_references(value)
    if isinstance(value, list):
        return [_exchanged(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {_other(key): _exchanged(item) for key, item in value.items()}
    return {key: found[key] for key in value if key in found} | found  # in the order of the contract


def _critique(result: dict[str, Any]) -> str | None:
    """The reasons in a result: a line for each principle that was compared, then the overall analysis."""
    analysis = result.get("analysis")
    if not isinstance(analysis, dict):
        return str(analysis).strip() or None if analysis else None
    compared = analysis.get("principle_comparisons")
    rows = [row for row in compared if isinstance(row, dict)] if isinstance(compared, list) else []
    lines = [f"{row.get('principle_name', '')}: {row.get('comparison_reason', '')}".strip(": ") for row in rows]
    lines += [str(analysis.get(key) or "").strip() for key in ("overall_analysis", "principle_summary")]
    return "\n".join(line for line in lines if line) or None
