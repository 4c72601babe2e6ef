"""The format of RM-NLHF (arXiv 2601.07349): ``<critics>`` reasons ``</critics>`` then ``<choice>[[A]]</choice>``."""

import re

from nlhf.formats.base import JudgeFormat
from nlhf.verdict import BRACKETS, Verdict, last_block, last_declaration, single_label, tag


class RMNLHFFormat(JudgeFormat):
    """Critique and choice in tags, no ties.

    Ours: the last ``<choice>`` wins; without one, the last ``[[..]]`` after the critique. Under ``compat``: the last
    ``<choice>``, else the first ``[[A]]`` or ``[[B]]`` anywhere, thinking and critique included.
    """

    name = "rm_nlhf"
    template = "rm_nlhf.jinja"
    declaration = "<choice>[[{}]]</choice>"
    pattern = tag("choice")
    reasons = "<critics>\n{}\n</critics>\n"

    def _parse(self, text: str) -> Verdict:
        critique = last_declaration(text, tag("critics"))
        choice = last_declaration(text, self.pattern)
        choice = choice or last_declaration(text, BRACKETS, critique.end() if critique else 0)
        written = text[critique.start(1) : critique.end(1)].strip() if critique else None
        return Verdict(single_label(choice[1], self.labels) if choice else None, critique=written or None)

    def _parse_upstream(self, text: str) -> Verdict:
        critique = last_block(text, "critics")
        choice = last_block(text, "choice")
        found = re.search(r"\[\[([AB])\]\]", choice[1] if choice else text)
        return Verdict(found[1] if found else None, critique=critique[1].strip() if critique else None)
