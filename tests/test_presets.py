import dataclasses
import hashlib
import os
from pathlib import Path

import pytest

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.pairs import Pair, Turn
from nlhf.presets import PRESETS, apply_preset, with_preset

PROMPTS = Path(os.environ.get("NLHF_DATA", Path(__file__).parent.parent / "../shared/data")).parent / "spec" / "prompts"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_configuration_that_can_be_built(name):
    settings = apply_preset(name, {})
    assert set(settings) == {"model", "format", "sampling"}
    assert settings["model"]["name"].count("/") == 1
    assert SamplingConfig(**settings["sampling"]).temperature > 0
    assert get_format(settings["format"]).name == settings["format"]


def test_the_settings_of_the_cards():
    assert apply_preset("sdrm-qwen3-4b-mask70", {}) == {
        "model": {"name": "opsd-genrm/SDRM-Qwen3-4B-mask70"},
        "format": "sdrm",
        "sampling": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 8192},
    }
    assert apply_preset("her-rm-32b", {})["sampling"] == {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 4096}
    for name in ("rm-nlhf-qwen-7b", "rm-nlhf-qwen-32b", "outcome-baseline-qwen-7b"):
        assert apply_preset(name, {})["sampling"] == {"temperature": 0.6, "max_new_tokens": 8192}


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        pytest.param({"sampling": {"temperature": 0}}, {"sampling.temperature": 0}, id="nested"),
        pytest.param({"sampling.temperature": 0, "sampling.seed": 7}, {"sampling.temperature": 0}, id="dotted"),
        pytest.param({"model": {"name": "runs/mine"}}, {"model.name": "runs/mine"}, id="model"),
        pytest.param({"format": "rm_nlhf", "out": "x"}, {"format": "rm_nlhf"}, id="format"),
        pytest.param({"model.dtype": "bfloat16"}, {}, id="another-field"),
        pytest.param({"prompt_file": None}, {}, id="none-is-a-value"),
    ],
)
def test_what_the_user_set_stays(values, changed):
    given = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    settings = apply_preset("sdrm-qwen3-4b-mask70", values)
    assert values == given
    flat = flatten(settings)
    assert flat == {**flatten(apply_preset("sdrm-qwen3-4b-mask70", {})), **flatten(values), **changed}


def flatten(values, before=""):
    found = {}
    for key, value in values.items():
        found |= flatten(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def test_a_preset_is_never_changed_by_what_is_made_of_it():
    apply_preset("her-rm-32b", {})["sampling"]["temperature"] = 0
    assert apply_preset("her-rm-32b", {})["sampling"]["temperature"] == 0.7
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["her-rm-32b"].format = "sdrm"


@pytest.mark.parametrize(
    ("preset", "given", "expected"),
    [
        (None, {}, ("rm_nlhf", SamplingConfig())),
        (None, {"judge_format": "sdrm"}, ("sdrm", SamplingConfig())),
        ("her-rm-32b", {}, ("her_rm", SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=4096))),
        ("her-rm-32b", {"sampling": SamplingConfig(top_k=3)}, ("her_rm", SamplingConfig(top_k=3))),
        ("her-rm-32b", {"judge_format": "sdrm", "sampling": SamplingConfig()}, ("sdrm", SamplingConfig())),
    ],
    ids=["nothing", "a format", "a preset", "its sampling replaced", "all of it replaced"],
)
def test_format_and_sampling_with_a_preset(preset, given, expected):
    assert with_preset(preset, **given) == expected


def test_an_unknown_preset_offers_the_nearest():
    with pytest.raises(UserError, match=r"unknown preset 'her-rm-32'.*Did you mean 'her-rm-32b'"):
        apply_preset("her-rm-32", {})


PAIR = Pair("p", [Turn("user", "CONTEXT")], "FIRST", "SECOND", "A")
SLOTS = {
    "her_rm": {"context": "id:1, user(user): CONTEXT", "cand_1": "FIRST", "cand_2": "SECOND"},
    "sdrm": {
        "context": "<user>\nCONTEXT\n</user>",
        "response_a": "<assistant>\nFIRST\n</assistant>",
        "response_b": "<assistant>\nSECOND\n</assistant>",
    },
}
# SHA-256 of the rendering of PAIR, taken from the released prompts.
RELEASED = {
    "her_rm": "ea0f4799fb62fb2ad301f0d9982ac5960cee859bc49e0639e01e192da0cdb950",
    "sdrm": "2a7fa06a1502239bbb9e3469a91d8d96c83a53f6dac03cf4e1fb4d45d8fa8c72",
}


def rendered(name):
    return get_format(name).render(PAIR)[0]["content"]


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_prompt_is_the_released_one_byte_for_byte(name):
    assert hashlib.sha256(rendered(name).encode()).hexdigest() == RELEASED[name]


@pytest.mark.data
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_prompt_is_the_text_of_the_release(name):
    file = PROMPTS / f"{name}.txt"
    if not file.is_file():
        if os.environ.get("CI"):
            pytest.fail(f"{file} is missing")
        pytest.skip(f"{file} is missing")
    text = file.read_text(encoding="utf-8").removesuffix("\n")
    for slot, value in SLOTS[name].items():
        assert text.count(f"{{{{ {slot} }}}}") == 1
        text = text.replace(f"{{{{ {slot} }}}}", value)
    assert rendered(name) == text
