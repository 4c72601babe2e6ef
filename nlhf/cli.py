"""The command line: finds the verb first and imports only what that verb needs, so help and errors answer at once.

A verb is a function; its signature is its command line and its YAML (jsonargparse), its docstring the help text.
"""

import dataclasses
import errno
import functools
import importlib
import inspect
import io
import itertools
import json
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nlhf import __version__
from nlhf.complaints import ConfigurationError, explain, field_meant, nearest_option
from nlhf.config import ClassSpec
from nlhf.errors import UserError, nearest
from nlhf.files import check_yaml

Verbs = dict[str, tuple[str, str]]

VERBS: Verbs = {
    "data show": ("nlhf.data:show", "print a few pairs of a data set"),
    "data check": ("nlhf.data:check", "validate a file or data set: counts, drops, duplicates, overlap"),
    "data export": ("nlhf.data:export", "write a data set in our JSONL schema"),
    "cold-start": ("nlhf.cold_start:cold_start", "teach a model the judge format by supervised fine-tuning"),
    "train": ("nlhf.train:train", "train a judge by GRPO on its verdicts and critiques"),
    "train-policy": ("nlhf.train_policy:train_policy", "train a policy by GRPO on a judge's verdicts"),
    "judge": ("nlhf.judging:judge", "say which of two responses is better: one pair, or a file of pairs"),
    "evaluate": ("nlhf.evaluate:evaluate", "judge a data set in both orders and report with intervals"),
    "report": ("nlhf.report:report", "compare evaluated runs in one table and page"),
    "score-critiques validate": ("nlhf.critique.validation:validate", "hold critique scorers against human labels"),
    "score-critiques fit": ("nlhf.critique.fitting:fit", "learn the critique matcher from human labels"),
    "chat": ("nlhf.roleplay.chat:chat", "talk with a character of a scene, played by a model"),
    "roleplay principles": ("nlhf.roleplay.principles:show", "check and print principles, built in or of a file"),
    "roleplay teach": ("nlhf.roleplay.teaching:teach", "make pairs for a cold start from a teacher's judgements"),
    "roleplay coser": ("nlhf.roleplay.coser:coser", "let a model act scenes and score them by the flaws a judge finds"),
    "suite": ("nlhf.suite:suite", "run arms x seeds of an experiment and compare them"),
}


def main(argv: Sequence[str] | None = None, prog: str = "nlhf", verbs: Verbs = VERBS) -> int:
    """Run one verb and return the exit code: 0, or 2 for bad input or configuration (one message, no traceback)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed by who called us; the libraries that log would fail on it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text may have what the terminal's encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_overview(prog, verbs))
            return 0
        if arguments[0] == "--version":
            print(f"{prog} {__version__}")
            return 0
        verb, rest = _find_verb(arguments, prog, verbs)
        if verb is None:  # the name of a group of verbs, alone or with --help
            print(_overview(f"{prog} {arguments[0]}", _group(verbs, arguments[0])))
            return 0
        run_verb(verbs[verb][0], f"{prog} {verb}", rest)
        return 0
    except UserError as error:
        print(f"{prog}: error: {_shortened(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"{prog}: error: {_shortened(where + error.strerror)}", file=sys.stderr)
        return 2


# What a machine or its administrator may refuse anywhere, at no fault of ours.
_MACHINE = (errno.EACCES, errno.EDQUOT, errno.ENAMETOOLONG, errno.ENOSPC, errno.EPERM, errno.EROFS)


_LONGEST = 1500


def _shortened(message: str) -> str:
    """A message that repeats a very long value, without its middle: it begins with the place and ends with advice."""
    if len(message) <= _LONGEST:
        return message
    left_out = len(message) - _LONGEST
    return f"{message[: 2 * _LONGEST // 3]} ... ({left_out} more characters) ... {message[-_LONGEST // 3 :]}"


def run_verb(target: str, prog: str, arguments: Sequence[str]) -> Any:
    """Parse ``arguments`` after the signature of ``target`` ("module:function") and call it."""
    function = _load(target)
    parser = make_parser(function, prog)
    arguments = _named_first(_spelled_out(arguments, function), function)
    try:
        _fill_in(parser, function, arguments)
        values = _as_typed(parser.parse_args(arguments), arguments, function)
    except UnicodeDecodeError as error:
        files = ", ".join(_config_files(arguments)) or "a configuration file"
        raise UserError(
            f"{files}: not UTF-8 text ({error.reason} at byte {error.start}); convert it to UTF-8"
        ) from None
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        files = ", ".join(_config_files(arguments)) or "the options"
        raise UserError(f"{files}: a number of thousands of digits") from None
    except RecursionError:
        files = ", ".join(_config_files(arguments)) or "the options"
        raise UserError(f"{files}: a value within itself, or far too many brackets within brackets") from None
    except ConfigurationError as error:
        message = str(error).replace('"<unicode string>"', ", ".join(_config_files(arguments)))
        raise UserError(f"{message}\nFor the accepted options run: {prog} --help") from None
    return function(**_settings(function, parser, values))


def _named_first(arguments: list[str], function: Any) -> list[str]:
    """Bare words with the name of their option; ``-`` is a word, standard input."""
    words = list(itertools.takewhile(lambda argument: argument == "-" or not argument.startswith("-"), arguments))
    if not words:
        return arguments
    option = _option_of_words(function)
    hint = typing.get_type_hints(function).get(option)
    if typing.get_origin(hint) is list and not words[0].startswith("["):
        return [f"--{option}", json.dumps(words), *arguments[len(words) :]]
    return [f"--{option}", *arguments]


def _option_of_words(function: Any) -> str:
    """What bare words are: what the verb works on (``data check FILE``, ``report RUN RUN``), else its configuration."""
    hints = typing.get_type_hints(function)
    first = "path" if "path" in hints else next(iter(hints))
    whole = first in ("path", "input", "runs", "data", "principles", "model_path")
    return first if whole and not dataclasses.is_dataclass(hints[first]) else "config"


def _spelled_out(arguments: Sequence[str], function: Any) -> list[str]:
    """Options as the parser knows them: ``--dry-run`` is ``--dry_run``, and a switch on its own means true."""
    switches = {f"--{p.name}" for p in inspect.signature(function).parameters.values() if p.annotation is bool}
    options: list[str] = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("-", "_").replace("__", "--", 1) + equals + value
        options.append(argument)
        if argument in switches and following.startswith("--"):
            options.append("true")
    return options


def call(target: str, prog: str, values: dict[str, Any]) -> Any:
    """Call a verb with a configuration given as nested dicts, checked exactly as a YAML would be."""
    return _load(target)(**read(target, prog, values))


def read(target: str, prog: str, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which `call` calls the verb."""
    function = _load(target)
    parser = make_parser(function, prog)
    _set_preset(parser, function, values.get("preset"))
    return _settings(function, parser, parser.parse_object(values))


def _fill_in(parser: Any, function: Any, arguments: Sequence[str]) -> None:
    """Make the settings of a preset, named by an option or in a YAML, the defaults: what the user sets comes first."""
    if "preset" not in inspect.signature(function).parameters:
        return
    names = [b for a, b in itertools.pairwise(arguments) if a == "--preset"]
    names += [a.partition("=")[2] for a in arguments if a.startswith("--preset=")]
    if not names:
        import yaml

        for path in filter(os.path.isfile, _config_files(arguments)):
            try:
                found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            except (yaml.YAMLError, RecursionError, ValueError):
                continue  # the parser says what is wrong with it
            names += [found["preset"]] if isinstance(found, dict) and found.get("preset") else []
    _set_preset(parser, function, names[-1] if names else None)


def _set_preset(parser: Any, function: Any, name: Any) -> None:
    if name is None or "preset" not in inspect.signature(function).parameters:
        return
    from nlhf.presets import apply_preset

    parser.set_defaults(
        {
            f"{key}.{field}" if field else key: item
            for key, value in apply_preset(str(name), {}).items()
            for field, item in (value.items() if isinstance(value, dict) else [("", value)])
        }
    )


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _settings(function: Any, parser: Any, values: Any) -> dict[str, Any]:
    values.pop("config", None)
    _refuse_nulls(function, values)
    values = _at_home(values)
    try:
        settings = parser.instantiate(values)
    except ValueError as error:  # a check of a configuration class failed
        raise ConfigurationError(explain(str(error), error)) from None
    return vars(settings)


def _refuse_nulls(owner: Any, values: Any, prefix: str = "") -> None:
    """Null only where the signature allows it, and fields where it has a class: jsonargparse lets others pass."""
    from jsonargparse import Namespace

    for name, hint in typing.get_type_hints(owner).items():
        if name not in values:
            continue
        value, key, kinds = values[name], f"{prefix}{name}", (hint, *typing.get_args(hint))
        if value is None:
            if type(None) not in kinds and hint is not Any:
                raise ConfigurationError(f"{key}: expected a value, got null; leave it out to get its default")
            continue
        for kind in filter(dataclasses.is_dataclass, kinds):
            for item in value if typing.get_origin(hint) is list else [value]:
                if isinstance(item, Namespace):
                    _refuse_nulls(kind, item, f"{key}.")
                elif not isinstance(item, kind | dict | str):
                    raise ConfigurationError(f"{key}: expected fields with values, got {item!r}")


# Options that are judged, not options of how: nothing in them is a path or YAML.
_TEXTS = ("prompt", "response_a", "response_b")


def _as_typed(values: Any, arguments: Sequence[str], function: Any) -> Any:
    """Texts as they were typed: where null is allowed, YAML takes ``# Title`` for a comment, and so for null."""
    hints = typing.get_type_hints(function)
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, equals, text = argument.removeprefix("--").partition("=")
        text = text if equals else following
        if not argument.startswith("--") or hints.get(name) != str | None or not text:
            continue
        if values[name] is None and (name in _TEXTS or text.lstrip().startswith("#")):
            values[name] = text
    return values


def _at_home(value: Any, key: str = "") -> Any:
    """Paths that begin with ``~/`` made whole: no shell does it in a YAML or behind an equals sign."""
    from jsonargparse import Namespace

    if isinstance(value, str):
        if "\0" in value:
            raise ConfigurationError(f"{key}: a NUL character, which no name of a file can have, in {value!r}")
        return str(Path(value).expanduser()) if value.startswith("~/") and key not in _TEXTS else value
    if isinstance(value, list):
        return [_at_home(item, key) for item in value]
    if isinstance(value, Namespace):
        for name, item in list(vars(value).items()):
            value[name] = _at_home(item, f"{key}.{name}" if key else name)
    return value


def _config_files(arguments: Sequence[str]) -> list[str]:
    following = [b for a, b in itertools.pairwise(arguments) if a == "--config"]
    return following + [a.partition("=")[2] for a in arguments if a.startswith("--config=")]


def make_parser(function: Any, prog: str) -> Any:
    """The jsonargparse parser of a verb; its errors are `ConfigurationError`."""
    from jsonargparse import ArgumentParser, set_parsing_settings
    from jsonargparse.typing import register_type

    _read_yaml_strictly()
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    # jsonargparse would import and build a class named by class_path while parsing; we build it when it is needed.
    register_type(ClassSpec, ClassSpec.to_dict, ClassSpec.from_dict, fail_already_registered=False)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> None:
            message += nearest_option(message, self)
            if not self.exit_on_error:  # a parser within ours, for one configuration class
                super().error(message, ex)
            message = explain(message, ex)
            raise ConfigurationError(message + field_meant(message, self)) from None

    purpose = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0].replace("``", "")
    option = _option_of_words(function)
    short = f"The first word may stand without its option: {prog} {option.upper()} [options] (--{option})."
    parser = Parser(prog=prog, description=purpose, epilog=short)
    parser.add_argument("--config", action="config", help="YAML file with these options; later options override it")
    parser.add_function_arguments(function, as_group=False, sub_configs=True)
    return parser


@functools.cache
def _read_yaml_strictly() -> None:
    """Have jsonargparse refuse a YAML with a key twice, of which it would take the last."""
    import yaml
    from jsonargparse import get_loader, set_loader

    load = get_loader("yaml")

    def load_checked(text: str) -> Any:
        check_yaml(text)
        return load(text)

    set_loader("yaml", load_checked, exceptions=(yaml.YAMLError,))


def _find_verb(arguments: Sequence[str], prog: str, verbs: Verbs) -> tuple[str | None, list[str]]:
    two = " ".join(arguments[:2])
    if two in verbs:
        return two, list(arguments[2:])
    if arguments[0] in verbs:
        return arguments[0], list(arguments[1:])
    group = _group(verbs, arguments[0])
    if group and (len(arguments) == 1 or arguments[1] in ("-h", "--help")):
        return None, []
    if group:
        raise UserError(
            f"unknown verb {two!r}; {prog} {arguments[0]} knows {', '.join(group)}.{nearest(arguments[1], group)}"
        )
    names = sorted({verb.split()[0] for verb in verbs})
    raise UserError(f"unknown verb {arguments[0]!r}; known: {', '.join(names)}.{nearest(arguments[0], names)}")


def _group(verbs: Verbs, name: str) -> Verbs:
    return {verb.split()[1]: entry for verb, entry in verbs.items() if verb.split()[0] == name and " " in verb}


def _overview(prog: str, verbs: Verbs) -> str:
    width = max(len(verb) for verb in verbs)
    lines = [f"  {verb:<{width}}  {summary}" for verb, (_, summary) in verbs.items()]
    usage = f"usage: {prog} VERB [--config FILE.yaml] [options]"
    purpose = (importlib.import_module(prog.split()[0]).__doc__ or "").partition("\n")[0]
    help_hint = f"Options of a verb: {prog} VERB --help"
    return "\n".join([usage, "", purpose, "", *lines, "", help_hint])
