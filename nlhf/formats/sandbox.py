"""The sandbox judge's format: RM-NLHF's tags in a vocabulary of single words, with a prompt of about 20 tokens."""

from nlhf.critique.arguments import critique_lines
from nlhf.formats.rm_nlhf import RMNLHFFormat
from nlhf.pairs import HumanCritique, Label, Pair


class SandboxFormat(RMNLHFFormat):
    """`RMNLHFFormat` with another prompt; tags and words are separated by blanks for the word-level tokenizer."""

    name = "sandbox"
    template = "sandbox.jinja"
    declaration = "<choice> [[{}]] </choice>"
    reasons = "<critics> {} </critics> "

    def variables(self, pair: Pair) -> dict[str, object]:
        """Words of response B become tokens of their own (``exact@B``): a tiny model does not bind words to sides."""
        return {
            "context": " ".join(turn.content for turn in pair.context),
            "response_a": pair.response_a,
            "response_b": " ".join(f"{word}@B" for word in pair.response_b.split()),
        }

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """See `JudgeFormat.target`; the end of a line is a word as well."""
        _, verdict = super().target(pair, None, verdict_only=True)
        if verdict_only:
            return "", verdict
        lines = " \n ".join(critique_lines(critique)) if critique else ""
        return self.reasons.replace("{}", lines), verdict

    def verdict_choices(self) -> tuple[str, dict[str, Label]]:
        """See `JudgeFormat.verdict_choices`; the label and its brackets are one word."""
        return "<choice>", {f" [[{token}]]": label for label, token in self._tokens().items()}
