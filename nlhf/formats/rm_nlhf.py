"""The format of RM-NLHF (arXiv 2601.07349): ``<critics>`` reasons ``</critics>`` then ``<choice>[[A]]</choice>``."""

import re

from nlhf.critique.arguments import critique_lines
from nlhf.errors import UserError
from nlhf.formats.base import JudgeFormat
from nlhf.pairs import HumanCritique, Pair
from nlhf.verdict import Verdict, half_width, last_block, single_label, strip_thinking

_LABELS = {"A": "A", "B": "B"}
_BRACKETS = re.compile(r"\[\[([^\[\]]{1,20})\]\]")


class RMNLHFFormat(JudgeFormat):
    """Critique and choice in tags, no ties.

    Ours: thinking goes first, the last ``<choice>`` wins; without one, the last ``[[..]]`` after the critique. Two
    labels in one declaration are no verdict. Under ``compat``: the last ``<choice>``, else the first ``[[A]]`` or
    ``[[B]]`` anywhere, thinking and critique included.
    """

    name = "rm_nlhf"
    template = "rm_nlhf.jinja"

    def _parse(self, text: str) -> Verdict:
        text = strip_thinking(text)
        readable = half_width(text)  # same length: positions found in it hold in the text
        critique = last_block(readable, "critics")
        choice = last_block(readable, "choice")
        if choice:
            declaration = choice[1]
        else:
            after = readable[critique.end() :] if critique else readable
            declarations = _BRACKETS.findall(after)
            declaration = declarations[-1] if declarations else ""
        written = text[critique.start(1) : critique.end(1)].strip() if critique else None
        return Verdict(single_label(declaration, _LABELS), critique=written or None)

    def _parse_upstream(self, text: str) -> Verdict:
        critique = last_block(text, "critics")
        choice = last_block(text, "choice")
        found = re.search(r"\[\[([AB])\]\]", choice[1] if choice else text)
        return Verdict(found[1] if found else None, critique=critique[1].strip() if critique else None)

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """See `JudgeFormat.target`; the critique is written one argument a line, as the prompt asks."""
        if pair.label not in _LABELS:
            raise UserError(f"pair {pair.id!r}: format {self.name!r} can learn label 'A' or 'B', not {pair.label!r}")
        verdict = f"<choice>[[{pair.label}]]</choice>"
        if verdict_only:
            return "", verdict
        lines = critique_lines(critique) if critique else []
        return "<critics>\n" + "\n".join(lines) + "\n</critics>\n", verdict
