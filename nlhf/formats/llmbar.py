"""The judge with which LLMBar measures (arXiv 2310.07641): reasons, then "Output (a) is better"; our wording."""

import re
from types import MappingProxyType

from nlhf.formats.base import JudgeFormat
from nlhf.verdict import Verdict


class LLMBarFormat(JudgeFormat):
    """Reasons in prose, then ``Output (a) is better.`` or ``Output (b) is better.``, no ties.

    Under ``compat``: A if its sentence occurs anywhere, else B if its own does, letter case as in the prompt.
    """

    name = "llmbar"
    template = "llmbar.jinja"
    declaration = "Output ({}) is better."
    written = MappingProxyType({"A": "a", "B": "b"})
    pattern = re.compile(r"\boutput\s*\(([^()]{1,20})\)\s+is\s+better\b", re.IGNORECASE)
    bare_question = True

    def _parse_upstream(self, text: str) -> Verdict:
        sentences = {"A": "Output (a) is better", "B": "Output (b) is better"}
        return Verdict(next((k for k, v in sentences.items() if v in text), None), critique=text.strip() or None)
