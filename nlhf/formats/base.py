"""What a judge format is: a prompt template, a parser and the reply it would have liked to see.

Station of the path: Pair -> **JudgeFormat.render** -> Generator -> text -> **JudgeFormat.parse** -> Verdict.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import jinja2
import jinja2.sandbox

from nlhf.critique.arguments import critique_lines
from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Label, Pair, Turn
from nlhf.verdict import BRACKETS, Verdict, label_tokens, last_declaration, single_label, strip_thinking

if TYPE_CHECKING:
    from nlhf.roleplay.principles import Library

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


def _read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"prompt file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"prompt file {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


# What a prompt file is tried on, so that a mistake in it is found before a model is loaded.
_TRIAL = Pair("trial", [Turn("user", "question")], "first", "second", "A")


class JudgeFormat:
    """How a pair is shown to a judge and how the judge's reply is read.

    Most formats are data: a subclass sets the attributes below and is done. One whose replies are not a critique with
    a declared label (JSON, scores) writes `_parse` itself.

    Attributes:
        name: Its key in `nlhf.formats.FORMATS`.
        template: The prompt, a Jinja file in ``prompts``; empty where the model's own chat template holds the prompt.
        declaration: How a judge declares its verdict, ``{}`` for the token of the label: ``"<verdict>{}</verdict>"``.
        labels: What each token means.
        written: How each label is written in a declaration; by default as its first token in ``labels``.
        choices: The tokens of ``labels`` whose probabilities are compared when a verdict is forced, where a label has
            several; by default each label as it is written.
        opening: What a reply without a critique has before its declaration.
        pattern: Finds a declaration; group 1 is its content.
        strengths: How much better a token says the response is, -3..3, negative for A.
        reasons: How a critique is written before the declaration, ``{}`` for its lines; empty when it has no place.
        ties: Whether ``labels`` (or equal scores) can say "tie".
        pointwise: The prompt shows response A alone and the reply rates it: ``Verdict.scores`` holds one number and
            there is no label. `nlhf.verdict.compare_ratings` makes a verdict of the ratings in both orders.
        bare_question: A conversation of one turn is shown as its text, without the role.
    """

    name: str
    template: str
    declaration: str = ""
    labels: Mapping[str, Label] = MappingProxyType({"A": "A", "B": "B"})
    written: Mapping[Label, str] = MappingProxyType({})
    choices: Sequence[str] = ()
    opening: str = ""
    pattern: re.Pattern = BRACKETS
    strengths: Mapping[str, float] = MappingProxyType({})
    reasons: str = "{}\n\n"
    ties: bool = False
    pointwise: bool = False
    bare_question: bool = False

    def __init__(self, prompt_file: Path | None = None, compat: bool = False, principles: Path | None = None):
        if compat and not self.has_upstream_parser():
            raise UserError(f"format {self.name!r} has no upstream parser of its own to follow: leave out compat")
        self.compat = compat
        self.principles = self._read_principles(principles)
        path = prompt_file or Path(__file__).parent / "prompts" / self.template
        self.prompt_text = _read_prompt(path) if prompt_file or self.template else ""
        try:
            self._template = _environment().from_string(self.prompt_text)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"prompt file {path}, line {error.lineno}: {error.message}") from None
        if prompt_file:
            self._try_out(path)

    @classmethod
    def has_upstream_parser(cls) -> bool:
        """Whether ``compat`` is possible: the format's upstream parser reads some replies in another way than we do."""
        return cls._parse_upstream is not JudgeFormat._parse_upstream

    def _read_principles(self, path: Path | None) -> "Library | None":
        """The principles that replies are held against; None for a format that has none."""
        if path is not None:
            raise UserError(f"format {self.name!r} judges by no list of principles: leave out principles")
        return None

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the prompt template, first 12 digits: what the ledger records."""
        return hashlib.sha256(self.prompt_text.encode()).hexdigest()[:12]

    def render(self, pair: Pair) -> list[Message]:
        """The chat messages that put ``pair`` to the judge, in the order A, B; the label is never among them.

        Judged text is shown byte for byte, also where it holds a format's own block markers: released judges know
        their prompts exactly, and a changed response is another response. No verdict is read from the prompt.
        """
        return self._fill(self.variables(pair))

    def _fill(self, variables: Mapping[str, object]) -> list[Message]:
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
        for name in ("response_a",) if self.pointwise else ("response_a", "response_b"):
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
        if self.bare_question and len(context) == 1:
            return context[0].content
        return "\n\n".join(f"{turn.role}:\n{turn.content}" for turn in context)

    def parse(self, text: str, truncated: bool = False) -> Verdict:
        """Read a reply. Never raises: what cannot be read is a verdict whose label is None."""
        verdict = self._parse_upstream(text) if self.compat else self._parse(strip_thinking(text))
        return dataclasses.replace(verdict, raw=text, truncated=truncated)

    def _parse(self, text: str) -> Verdict:
        """Read a reply without its thinking: the last declaration decides, what stands before it is the critique."""
        found = last_declaration(text, self.pattern)
        verdict = self._read(found[1]) if found else Verdict(None)
        return dataclasses.replace(verdict, critique=(text[: found.start()] if found else text).strip() or None)

    def _read(self, declared: str) -> Verdict:
        """Read the content of a declaration."""
        label = single_label(declared, self.labels)
        strengths = {self.strengths.get(token) for token in label_tokens(declared, self.labels)}
        return Verdict(label, strengths.pop() if label and len(strengths) == 1 else None)

    def _parse_upstream(self, text: str) -> Verdict:
        raise TypeError(f"{type(self).__name__} must define _parse_upstream")

    def has_reasons(self, pair: Pair) -> bool:
        """Whether the pair holds reasons to learn to write: a human's critique."""
        return pair.has_critique

    def target(self, pair: Pair, critique: HumanCritique | None, verdict_only: bool = False) -> tuple[str, str]:
        """The reply to learn in a cold start, as (critique part, verdict part), which are concatenated.

        The critique is written one argument a line, as our own prompts ask.

        Args:
            pair: Gives the label, in the order shown; it must be A or B (or a tie where the format has ties).
            critique: The human critique to imitate; None for an empty critique part.
            verdict_only: Ask for the verdict part alone.

        Raises:
            UserError: the format cannot say the pair's label, or declares more than a label.
        """
        verdict = self._declare(pair)
        if verdict_only:
            return "", self.opening + verdict
        lines = critique_lines(critique) if critique else []
        return self.reasons.replace("{}", "\n".join(lines)), verdict

    def _declare(self, pair: Pair) -> str:
        tokens = self._tokens()
        if pair.label not in tokens:
            known = [repr(label) for label in tokens]
            known = f"{', '.join(known[:-1])} or {known[-1]}"
            raise UserError(f"pair {pair.id!r}: format {self.name!r} can learn label {known}, not {pair.label!r}")
        return self.declaration.replace("{}", tokens[pair.label])

    def verdict_choices(self) -> tuple[str, dict[str, Label]]:
        """How a verdict is forced, to compare the probabilities of the labels.

        Returns:
            The text that follows the critique up to the label, and the continuations of it with the label that each
            means; none of them is the beginning of another.

        Raises:
            UserError: the format declares no label but numbers.
        """
        tokens = self._tokens()
        start = self.declaration.partition("{}")[0]
        prefix = start.rstrip()  # tokens begin with their blank, they do not end with one
        meaning = {token: self.labels[token] for token in self.choices} or {t: label for label, t in tokens.items()}
        return prefix, {start[len(prefix) :] + token: label for token, label in meaning.items()}

    def _tokens(self) -> dict[Label, str]:
        """How each label is written."""
        if not self.declaration:
            raise UserError(
                f"format {self.name!r} declares numbers, which a label does not give: it can neither be taught by "
                "labels nor asked for the probability of one; choose another format"
            )
        first = {label: token for token, label in reversed(self.labels.items())}
        return dict(self.written) or dict(sorted(first.items()))
