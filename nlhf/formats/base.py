"""What a judge format is: a prompt template, a parser and the reply it would have liked to see."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import jinja2
import jinja2.sandbox

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.verdict import Verdict

Message = dict[str, str]


@functools.cache
def _environment() -> jinja2.Environment:
    # Prompts are plain text, not HTML, so nothing is escaped. Data enters as *values* of the template and is never
    # itself compiled: braces and Jinja syntax in a response come out as written. Prompt files are passed around, so
    # they get neither files (no loader finds anything) nor Python's own objects, nor loops that never end.
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=jinja2.FunctionLoader(lambda _: None),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=False,
        autoescape=False,
    )


# What a prompt file is tried on, so that a mistake in it is found before a model is loaded.
_TRIAL = Pair("trial", [Turn("user", "question")], "first", "second", "A")


class JudgeFormat:
    """How a pair is shown to a judge and how the judge's reply is read.

    Subclasses set `name`, `template` (a file beside the module) and `ties`, and write `_parse` and `target`.
    """

    name: str
    template: str
    ties = False

    def __init__(self, prompt_file: Path | None = None, compat: bool = False):
        self.compat = compat
        path = prompt_file or Path(__file__).parent / self.template
        try:
            self.prompt_text = path.read_text(encoding="utf-8-sig")
            self._template = _environment().from_string(self.prompt_text)
        except OSError as error:
            raise UserError(f"prompt file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"prompt file {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"prompt file {path}, line {error.lineno}: {error.message}") from None
        if prompt_file:
            self._try_out(path)

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the prompt template, first 12 digits: what the ledger records."""
        return hashlib.sha256(self.prompt_text.encode()).hexdigest()[:12]

    def render(self, pair: Pair) -> list[Message]:
        """The chat messages that put ``pair`` to the judge, in the order A, B; the label is never among them."""
        variables = self.variables(pair)
        try:
            text = self._template.render(**variables)
        except Exception as error:  # a template is a program of its author's, who can mend whatever it raises
            if isinstance(error, jinja2.UndefinedError):
                reason = f"{error.message}; known: {sorted(variables)}"
            elif isinstance(error, jinja2.TemplateNotFound):
                reason = f"it stands alone, {error.name!r} cannot be included, imported or extended"
            else:
                reason = f"{type(error).__name__}: {error}"
            raise UserError(f"prompt of format {self.name!r}: {reason}") from None
        return [{"role": "user", "content": text}]

    def _try_out(self, path: Path) -> None:
        prompt = self.render(_TRIAL)
        for name in ("response_a", "response_b"):
            if self.render(dataclasses.replace(_TRIAL, **{name: "another"})) == prompt:
                raise UserError(f"prompt file {path} does not show {name}; write {{{{ {name} }}}} where it belongs")

    def variables(self, pair: Pair) -> dict[str, object]:
        """The template's variables: the conversation in the format's own layout, and both responses."""
        return {
            "context": self.render_context(pair.context),
            "response_a": pair.response_a,
            "response_b": pair.response_b,
        }

    def render_context(self, context: list[Turn]) -> str:
        """The conversation as text."""
        return "\n\n".join(f"{turn.role}:\n{turn.content}" for turn in context)

    def parse(self, text: str, truncated: bool = False) -> Verdict:
        """Read a reply. Never raises: what cannot be read is a verdict whose label is None."""
        verdict = self._parse_upstream(text) if self.compat else self._parse(text)
        return Verdict(verdict.label, verdict.strength, verdict.scores, verdict.critique, raw=text, truncated=truncated)

    def _parse(self, text: str) -> Verdict:
        raise TypeError(f"{type(self).__name__} must define _parse")

    def _parse_upstream(self, text: str) -> Verdict:
        raise UserError(f"format {self.name!r} has no upstream parser: leave out compat")

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """The reply to learn in a cold start, as (critique part, verdict part), which are concatenated.

        Args:
            pair: Gives the label, in the order shown; it must be A or B (or a tie where the format has ties).
            critique: The human critique to imitate; None for an empty critique part.
            verdict_only: Ask for the verdict part alone.
        """
        raise TypeError(f"{type(self).__name__} must define target")
