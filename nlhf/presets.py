"""Released judges, run as their model cards say: the model, the format it knows, and how it is sampled.

Station of the path: it fills the configuration of **JudgeFormat.render** and of the **Generator**. A preset sets only
what the user did not, so ``--preset sdrm-qwen3-4b-mask70 --sampling.temperature 0`` is greedy.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nlhf.errors import UserError, nearest
from nlhf.generation import SamplingConfig


@dataclass(frozen=True)
class Preset:
    """A released judge.

    Attributes:
        model: Its name on the hub.
        format: The judge format it was trained with, a key of `nlhf.formats.FORMATS`.
        sampling: Fields of `nlhf.generation.SamplingConfig`.
        note: What to know before comparing with published figures.
    """

    model: str
    format: str
    sampling: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def settings(self) -> dict[str, Any]:
        """The preset as arguments of `nlhf.evaluate.evaluate`."""
        return {"model": {"name": self.model}, "format": self.format, "sampling": dict(self.sampling)}


_RM_NLHF_NOTE = "the prompt is our own wording; give prompt_file to use the one of the release"


def _rm_nlhf(model: str) -> Preset:
    # arXiv 2601.07349: replies of at most 8,192 tokens, temperature 0.6 in validation.
    sampling = {"temperature": 0.6, "max_new_tokens": 8192}
    return Preset(f"Tongyi-ConvAI/{model}", "rm_nlhf", sampling, _RM_NLHF_NOTE)


PRESETS = {
    "sdrm-qwen3-4b-mask70": Preset(
        "opsd-genrm/SDRM-Qwen3-4B-mask70",
        "sdrm",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 8192},
        "the prompt is the released one, byte for byte",
    ),
    "her-rm-32b": Preset(
        "ChengyuDu0123/HER-RM-32B",
        "her_rm",
        # The card's 2,048 tokens can end a reply before its verdict, which comes last.
        {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 4096},
        "the prompt is the released one, byte for byte; the card has 2,048 tokens, which can cut off the verdict",
    ),
    "rm-nlhf-qwen-7b": _rm_nlhf("RM-NLHF-Qwen-7B"),
    "rm-nlhf-qwen-32b": _rm_nlhf("RM-NLHF-Qwen-32B"),
    "outcome-baseline-qwen-7b": _rm_nlhf("Baseline-Outcome-Reward-Qwen-7B"),
}
"""Every preset by its name on the command line."""


def apply_preset(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings with the gaps filled by a preset.

    Args:
        name: A key of `PRESETS`.
        values: What the user set, and nothing else: nested as in a YAML file, or with dotted keys as on the command
            line (``{"sampling.temperature": 0}``). What is there stays, whatever it is.

    Returns:
        A new nested dict.

    Raises:
        UserError: there is no such preset; the nearest name is offered.
    """
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}.{nearest(name, PRESETS)}")
    return _merge(PRESETS[name].settings(), _nested(values))


def with_preset(
    name: str | None, judge_format: str | None = None, sampling: SamplingConfig | None = None
) -> tuple[str, SamplingConfig]:
    """Format and sampling of a judge: what is given, else the preset's, else ``rm_nlhf`` and the default sampling.

    Raises:
        UserError: there is no such preset.
    """
    known = apply_preset(name, {}) if name is not None else {"format": "rm_nlhf", "sampling": {}}
    return judge_format or known["format"], sampling or SamplingConfig(**known["sampling"])


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = key.split(".")
        value = _nested(value) if isinstance(value, Mapping) else value
        for part in reversed([*path, leaf]):
            value = {part: value}
        found = _merge(found, value)
    return found


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` with the gaps filled by ``under``, level by level."""
    merged = {**copy.deepcopy(under), **copy.deepcopy(over)}
    for key in under.keys() & over.keys():
        if isinstance(under[key], dict) and isinstance(over[key], dict):
            merged[key] = _merge(under[key], over[key])
    return merged
