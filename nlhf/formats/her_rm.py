"""The format of HER-RM (arXiv 2601.21459), the judge of role-play: principles, comparisons and a winner, in JSON.

The prompt in prompts/her_rm.jinja is the interface of the released model, byte for byte (see NOTICE), with its slots
rewritten for Jinja.
"""

import json
import re
from types import MappingProxyType
from typing import Any

from nlhf.critique.arguments import critique_lines
from nlhf.formats.base import JudgeFormat
from nlhf.formats.json_replies import json_objects, last_field, repair
from nlhf.pairs import HumanCritique, Label, Pair, Turn
from nlhf.verdict import Verdict, half_width, strip_thinking

_CHAT_ROLES = ("system", "user", "assistant")
_SYSTEM_THINKING = re.compile(
    r"<(system_think(?:ing)?)>.*?(?:</\1>|\Z)\s*|\A.*?</system_think(?:ing)?>\s*", re.DOTALL | re.IGNORECASE
)


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
    ties = True

    def variables(self, pair: Pair) -> dict[str, object]:
        """The judge sees what a character thinks, and never the plan of the model behind it."""
        return {
            "context": self.render_context([Turn(t.role, without_plan(t.content)) for t in pair.context]),
            "response_a": without_plan(pair.response_a),
            "response_b": without_plan(pair.response_b),
        }

    def render_context(self, context: list[Turn]) -> str:
        """Lines ``id:1, name(role): content``; a turn whose role is a character's name is that character's."""
        return "\n".join(
            f"id:{i}, {turn.role}({turn.role if turn.role in _CHAT_ROLES else 'user'}): {turn.content}"
            for i, turn in enumerate(context, start=1)
        )

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
            if declared and len({self._label(r) for r in declared}) == 1:
                return at, declared[-1]
            if declared:
                return at, {}
        return None

    def _label(self, result: dict[str, Any]) -> Label | None:
        return self.labels.get(half_width(str(result.get("better_response"))).strip().upper())

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
        return Verdict(self._label(found[1]), critique=_critique(found[1]))

    def _parse_upstream(self, text: str) -> Verdict:
        found = re.search(r'"better_response"\s*:\s*"(cand_1|cand_2|tie)"', text)
        return Verdict(self.labels[found[1].upper()] if found else None, critique=text.strip() or None)

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """See `JudgeFormat.target`; the critique is the overall analysis, for a person names no principles."""
        verdict = self._declare(pair) + "}]}"
        if verdict_only:
            return "", '{"result": [{' + verdict
        analysis = {"overall_analysis": "\n".join(critique_lines(critique)) if critique else ""}
        return '{"result": [{"analysis": ' + json.dumps(analysis, ensure_ascii=False) + ", ", verdict


def without_plan(text: str) -> str:
    """A turn without the model's system thinking, closed or not."""
    return _SYSTEM_THINKING.sub("", text)


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
