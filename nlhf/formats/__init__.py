"""Judge formats: how a pair is put to a judge and how its reply is read; the table of names is `FORMATS`.

Station of the path: Pair -> **JudgeFormat.render** -> Generator -> text -> **JudgeFormat.parse** -> Verdict. To add a
format, write one file beside this one and one line in `FORMATS`.
"""

from importlib import import_module
from pathlib import Path

from nlhf.errors import UserError, nearest
from nlhf.formats.base import JudgeFormat

FORMATS = {
    "arena_hard": "nlhf.formats.choices:ArenaHardFormat",
    "auto_j": "nlhf.formats.choices:AutoJFormat",
    "deepseek_grm": "nlhf.formats.scores:DeepSeekGRMFormat",
    "her_rm": "nlhf.formats.her_rm:HERRMFormat",
    "her_rm_teacher": "nlhf.formats.her_rm:HERTeacherFormat",
    "j1": "nlhf.formats.choices:J1Format",
    "judgelrm": "nlhf.formats.scores:JudgeLRMFormat",
    "llmbar": "nlhf.formats.llmbar:LLMBarFormat",
    "nemotron_genrm": "nlhf.formats.scores:NemotronGenRMFormat",
    "prometheus2": "nlhf.formats.choices:Prometheus2Format",
    "prometheus2_absolute": "nlhf.formats.scores:Prometheus2AbsoluteFormat",
    "rewardbench": "nlhf.formats.choices:RewardBenchFormat",
    "rewardbench2": "nlhf.formats.scores:RewardBench2Format",
    "rewardbench2_ratings": "nlhf.formats.scores:RewardBench2RatingsFormat",
    "rm_nlhf": "nlhf.formats.rm_nlhf:RMNLHFFormat",
    "rm_r1": "nlhf.formats.choices:RMR1Format",
    "rrm": "nlhf.formats.choices:RRMFormat",
    "sandbox": "nlhf.formats.sandbox:SandboxFormat",
    "sdrm": "nlhf.formats.sdrm:SDRMFormat",
    "skywork_critic": "nlhf.formats.choices:SkyworkCriticFormat",
    "think_rm": "nlhf.formats.choices:ThinkRMFormat",
    "think_rm_strength": "nlhf.formats.scores:ThinkRMStrengthFormat",
}

__all__ = ["FORMATS", "JudgeFormat", "get_format"]


def get_format(
    name: str, prompt_file: str | None = None, compat: bool = False, principles: str | None = None
) -> JudgeFormat:
    """The format called ``name``.

    Args:
        name: A key of `FORMATS`.
        prompt_file: A Jinja template that replaces the format's own prompt (same variables).
        compat: Read replies as the upstream parser does, quirks included, to re-score published outputs.
        principles: A YAML file of principles in the place of ours, for the formats of HER-RM.
    """
    if name not in FORMATS:
        raise UserError(f"unknown judge format {name!r}; known: {', '.join(sorted(FORMATS))}.{nearest(name, FORMATS)}")
    module, _, cls = FORMATS[name].partition(":")
    judge_format = getattr(import_module(module), cls)
    files = {"prompt_file": prompt_file, "principles": principles}
    return judge_format(compat=compat, **{key: Path(file) if file else None for key, file in files.items()})
