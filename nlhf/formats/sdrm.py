"""The format of SDRM (arXiv 2609.38792): free analysis, then ``<verdict>A</verdict>``.

The prompt in prompts/sdrm.jinja is the interface of the released models, byte for byte (Apache-2.0, see NOTICE), with
its slots rewritten for Jinja.
"""

import re

from nlhf.formats.base import JudgeFormat
from nlhf.pairs import Pair, Turn
from nlhf.verdict import Verdict, last_block, tag

_STANDALONE = re.compile(r"\b([AB])\b")


class SDRMFormat(JudgeFormat):
    """Analysis in prose, verdict in a tag, no ties.

    Ours: the last ``<verdict>`` block must name exactly one response; without a block there is no verdict. Under
    ``compat`` (the model card): the last standalone A or B of the last block, else the last one anywhere.
    """

    name = "sdrm"
    template = "sdrm.jinja"
    declaration = "<verdict>{}</verdict>"
    pattern = tag("verdict")

    def render_context(self, context: list[Turn]) -> str:
        """Turns as ``<user>`` and ``<assistant>`` blocks, a blank line between."""
        return "\n\n".join(_block(turn.role, turn.content) for turn in context)

    def variables(self, pair: Pair) -> dict[str, object]:
        """Each response is one ``<assistant>`` block."""
        return {
            "context": self.render_context(pair.context),
            "response_a": _block("assistant", pair.response_a),
            "response_b": _block("assistant", pair.response_b),
        }

    def _parse_upstream(self, text: str) -> Verdict:
        block = last_block(text, "verdict")
        found = _STANDALONE.findall(block[1] if block else text)
        critique = text[: block.start()].strip() if block else text.strip()
        return Verdict(found[-1] if found else None, critique=critique or None)


def _block(role: str, content: str) -> str:
    return f"<{role}>\n{content}\n</{role}>"
