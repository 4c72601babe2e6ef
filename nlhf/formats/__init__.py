"""Judge formats: how a pair is put to a judge and how its reply is read; the table of names is `FORMATS`.

Station of the path: Pair -> **JudgeFormat.render** -> Generator -> text -> **JudgeFormat.parse** -> Verdict. To add a
format, write one file beside this one and one line in `FORMATS`.
"""

from importlib import import_module
from pathlib import Path

from nlhf.errors import UserError, nearest
from nlhf.formats.base import JudgeFormat

FORMATS = {
    "rm_nlhf": "nlhf.formats.rm_nlhf:RMNLHFFormat",
    "sandbox": "nlhf.formats.sandbox:SandboxFormat",
    "sdrm": "nlhf.formats.sdrm:SDRMFormat",
}

__all__ = ["FORMATS", "JudgeFormat", "get_format"]


def get_format(name: str, prompt_file: str | None = None, compat: bool = False) -> JudgeFormat:
    """The format called ``name``.

    Args:
        name: A key of `FORMATS`.
        prompt_file: A Jinja template that replaces the format's own prompt (same variables).
        compat: Read replies as the upstream parser does, quirks included, to re-score published outputs.
    """
    if name not in FORMATS:
        raise UserError(f"unknown judge format {name!r}; known: {', '.join(sorted(FORMATS))}.{nearest(name, FORMATS)}")
    module, _, cls = FORMATS[name].partition(":")
    judge_format = getattr(import_module(module), cls)
    return judge_format(prompt_file=Path(prompt_file) if prompt_file else None, compat=compat)
