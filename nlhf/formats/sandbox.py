"""The sandbox judge's format: RM-NLHF's tags in a vocabulary of single words, with a prompt of about 20 tokens."""

from nlhf.critique.arguments import critique_lines
from nlhf.formats.rm_nlhf import RMNLHFFormat
from nlhf.pairs import HumanCritique, Pair


class SandboxFormat(RMNLHFFormat):
    """`RMNLHFFormat` with another prompt; tags and words are separated by blanks for the word-level tokenizer."""

    name = "sandbox"
    template = "sandbox.jinja"

    def variables(self, pair: Pair) -> dict[str, object]:
        """Words of response B become tokens of their own (``exact@B``): a tiny model does not bind words to sides."""
        return {
            "context": " ".join(turn.content for turn in pair.context),
            "response_a": pair.response_a,
            "response_b": " ".join(f"{word}@B" for word in pair.response_b.split()),
        }

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """See `JudgeFormat.target`."""
        _, verdict = super().target(pair, None, verdict_only=True)
        if verdict_only:
            return "", _spaced(verdict)
        lines = " \n ".join(critique_lines(critique)) if critique else ""
        return f"<critics> {lines} </critics> ", _spaced(verdict)


def _spaced(verdict: str) -> str:
    return verdict.replace("<choice>", "<choice> ").replace("</choice>", " </choice>")
