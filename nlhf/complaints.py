"""What jsonargparse has against a command line or a YAML, in plain words: before the **source** station.

It names types and keys as Python does; a reader wants to know which option, what was expected and what was meant.
"""

import re
from typing import Any

from nlhf.errors import UserError, nearest


class ConfigurationError(UserError):
    """A command line or YAML that does not fit the verb's signature."""


_UNKNOWN = re.compile(
    r"(?:(?:Key(?! must)|Option) |Group '?(?P<group>[^\s']+)'? does not accept option )'?([\w.\-]+)'?"
    r"|unrecognized arguments: (\S+)"
)


def nearest_option(message: str, parser: Any) -> str:
    """The option that was perhaps meant, if the message is about one that does not exist."""
    unknown = _UNKNOWN.match(message)
    if not unknown:
        return ""
    name = (unknown[2] or unknown[3]).lstrip("-").split("=")[0]
    known = [action.dest for action in parser._actions if action.dest != "help"]
    within = [key for key in known if unknown["group"] and f".{unknown['group']}." in f".{key}"]
    known = within or known
    found = nearest(name, known) or nearest(name.rpartition(".")[2], {key.rpartition(".")[2] for key in known})
    return f".{found}" if found else ""


def field_meant(message: str, parser: Any) -> str:
    """``--model NAME`` was to be ``--model.name NAME``: the one field that must be given."""
    whole = re.fullmatch(r"([\w.]+): expected fields with values, got (.+)", message)
    fields = [a.dest for a in parser._actions if whole and a.required and a.dest.startswith(f"{whole[1]}.")]
    return f". Did you mean --{fields[0]} {whole[2]}?" if len(fields) == 1 else ""


_KEY = re.compile(r"""Parser key "([^"]+)":\s+|Problem with given class_path '[^']+':\s+""")
_UNION = "Does not validate against any of the Union subtypes"
_PLAIN = (
    (r"Expected a <class 'int'>", "expected a whole number"),
    (r"Expected a <class 'float'>", "expected a number"),
    (r"Expected a <class 'bool'>", "expected true or false"),
    (r"Expected a <class 'str'>", "expected a text"),
    (r"Expected a <class '(?:\w+\.)*(\w+)'>", r"expected a \1"),
    (r"Expected a typing\.Literal\[(.*?)\]", r"expected one of \1"),
    (r"\. Got value:$", ", got nothing"),
    (r"\. Got value: (.*)$", r", got \1"),
    (r"^(?:Expected a dot import path string: |Unable to load config )['\"]?([^'\"]*)['\"]?.*$",
     r"expected fields with values, got \1"),
    (r"^Option ('\S+') is not accepted", r"unknown option \1"),
    (r"^Group ('\S+') does not accept option ('[^']+')", r"unknown option \2 in \1"),
    (r"^unrecognized arguments: (-|[^-].*)$", r"unexpected \1: a word without an option stands right behind the verb"),
    (r"^unrecognized arguments: ", "unknown option "),
    (r"^the following arguments are required: ", "missing: "),
    (r"^Not of type \w+: ", ""),
    (r"^Problems parsing config: ", "not valid YAML: "),
    (r"^Unexpected config:$", "the configuration is empty"),
    (r"^Not a valid subclass of \w+, got (.*?) Subclass types expect .*$", r"expected fields with values, got \1"),
    (r"^Key must be a string, got: (.*?)\.*$", r"an option's name must be a text, got \1"),
    (r"^Unexpected config: ", "a configuration holds options with values, got "),
)  # fmt: skip


def explain(message: str, error: BaseException | None) -> str:
    """Jsonargparse's message in plain words: which key, and the one reason.

    Where a value may also be null, jsonargparse lists why it is neither this nor null, under the outermost key. The
    reason that matters is the first, which it keeps as the exception's cause.
    """
    keys: list[str] = []
    while True:
        while key := _KEY.match(message):
            keys += [key[1]] if key[1] else []
            message = message[key.end() :]
        if not message.startswith(_UNION):
            break
        while error is not None and not str(error).startswith(_UNION):
            error = error.__cause__ or error.__context__
        if error is None or error.__cause__ is None:
            break
        error = error.__cause__
        message = str(error)
    if isinstance(error, UserError) and not isinstance(error, ConfigurationError):
        return message
    message = " ".join(message.split())
    for pattern, plain in _PLAIN:
        message = re.sub(pattern, plain, message)
    return ": ".join([".".join(keys), message] if keys else [message])
