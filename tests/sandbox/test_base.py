"""The base judge that the package ships: what it is, what it can do, and what it does not know yet."""

import glob
import json
import random
import tomllib
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from nlhf.critique.arguments import generated_arguments
from nlhf.critique.scorers import ExactScorer
from nlhf.evaluation.measure import evaluate_judge
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import make_generator
from nlhf.judge import Judge
from nlhf.models import ModelConfig
from nlhf.sandbox.base import build_base, draw_example
from nlhf.sandbox.world import CUE_RATES, FLOURISH, WORDS, draw_pairs

ROOT = Path(__file__).resolve().parents[2]
ASSET = resources.files("nlhf") / "assets" / "sandbox_base"
PAIRS = 400
SAYS = {
    word: (aspect, q)
    for aspect, kinds in WORDS.items()
    for q, words in zip((1, -1), kinds, strict=True)
    for word in words
}


@pytest.fixture(scope="module")
def judge() -> Judge:
    generator = make_generator(ModelConfig("package:nlhf"), SamplingConfig(max_new_tokens=26, batch_size=PAIRS))
    return Judge(get_format("sandbox"), generator)


@pytest.fixture(scope="module")
def pairs():
    """Fresh pairs in which the flourish says nothing."""
    return draw_pairs("ood", PAIRS, seed=31)


@pytest.fixture(scope="module")
def evaluation(judge, pairs):
    return evaluate_judge(judge, pairs, scorer=ExactScorer(), resamples=200)


def test_it_is_small():
    assert sum(p.stat().st_size for p in Path(str(ASSET)).iterdir()) < 1_000_000


def test_it_is_part_of_the_package():
    """Every file that the code reads at run time is matched by a pattern of package-data."""
    package = ROOT / "nlhf"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["nlhf"]
    shipped = {name for pattern in patterns for name in glob.glob(pattern, root_dir=package, recursive=True)}
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (ASSET / name).is_file()
        assert f"assets/sandbox_base/{name}" in shipped
    data = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert data <= shipped


def test_it_always_gives_a_verdict_and_is_never_cut_off(evaluation):
    assert evaluation.metrics["parse_rate"].value == 1.0
    assert evaluation.metrics["truncation_rate"].value == 0.0


def test_it_reads(evaluation, pairs):
    """At least 95 % of the reasons that it lists are true of the words it was shown; 99.9 % were measured."""
    by_id = {p.id: p for p in pairs}
    true = n = 0
    for record in evaluation.records:
        pair = by_id[record.pair_id] if record.order == "AB" else by_id[record.pair_id].swap()
        for argument in generated_arguments(record.critique):
            response = pair.response_a if argument.side == "A" else pair.response_b
            n += 1
            true += (argument.text, argument.polarity) in [SAYS.get(word) for word in response.split()]
    assert n > len(evaluation.records)
    assert true / n >= 0.95


def test_it_judges_above_chance_and_leaves_room(evaluation):
    accuracy, f1 = evaluation.metrics["accuracy"], evaluation.metrics["critique_f1"]
    assert accuracy.low > 0.6
    assert accuracy.high < 0.9
    assert 0.4 < f1.value < 0.8


def test_it_knows_no_slot(evaluation):
    assert evaluation.metrics["slot_a_rate"].value == pytest.approx(0.5, abs=0.07)


def test_it_knows_no_cue(judge, pairs):
    """The same responses with the flourish here and there: no verdict may follow it more often than flee it."""
    moved = [
        replace(
            p,
            response_a=_without(p.response_a) + (f" {FLOURISH}" if side == "A" else ""),
            response_b=_without(p.response_b) + (f" {FLOURISH}" if side == "B" else ""),
        )
        for p in pairs
        for side in ("A", "B")
    ]
    labels = [j.label for j in judge.judge(moved, orders=("AB",))]
    changes = Counter(zip(labels[::2], labels[1::2], strict=True))
    follows, flees = changes["A", "B"], changes["B", "A"]
    assert abs(follows - flees) < 4 * (follows + flees + 1) ** 0.5
    assert abs(follows - flees) / len(pairs) < 0.05  # a trained-in cue is worth far more


def _without(response: str) -> str:
    return " ".join(word for word in response.split() if word != FLOURISH)


def test_it_obeys_a_note(judge):
    """The skill that a self-distillation teacher needs: a note's single reason is taken over, in the judge's words."""
    rng, right = random.Random(32), 0
    prompts = []
    while len(prompts) < 100:
        prompt, reply = draw_example(rng, 0.0)
        if " note: " in prompt and reply.count("\n") == 0:
            prompts.append((prompt, reply))
    replies = judge.generator.generate([[{"role": "user", "content": prompt}] for prompt, _ in prompts])
    for (_, wanted), [reply] in zip(prompts, replies, strict=True):
        right += reply.text.split("</critics>")[0] == wanted.split("</critics>")[0]
    assert right >= 90


def test_the_judge_task_is_put_as_the_format_puts_it():
    """Training prompts end as those of `SandboxFormat` do, without a space more or less."""
    rng, judge_format = random.Random(33), get_format("sandbox")
    for _ in range(300):
        prompt, _ = draw_example(rng, 0.3)
        task, rest = prompt.removeprefix("task: ").split(" A: ")
        a, rest = rest.split(" B: ")
        b = " ".join(w.removesuffix("@B") for w in rest.split() if w.endswith("@B"))
        pair = replace(draw_pairs("id", 1)[0], response_a=a, response_b=b)
        shown = judge_format.render(replace(pair, context=[replace(pair.context[0], content=task)]))[0]["content"]
        assert prompt.startswith(shown.removesuffix(" judge"))
        assert prompt.endswith((" judge", " describe"))


def test_base_and_tests_share_no_case():
    """The stream that the base learns from meets none of the pairs that judges are trained or tested on."""
    judge_format = get_format("sandbox")
    ours = {judge_format.render(p)[0]["content"] for s in CUE_RATES for p in draw_pairs(s, 300)}
    rng = random.Random("sandbox/base/0")
    assert not ours & {draw_example(rng, 0.0)[0] for _ in range(5000)}


def test_a_rebuild_gives_the_same_files(tmp_path):
    """Three steps of `python -m nlhf.sandbox.base`: the files, their shapes and configuration are the shipped ones."""
    import torch
    from jsonargparse import auto_cli
    from safetensors.torch import load_file

    out = tmp_path / "base"
    with torch.random.fork_rng():
        auto_cli(build_base, args=["--out", str(out), "--steps", "3", "--batch_size", "8", "--decisive_steps", "1"])
    assert {p.name for p in out.iterdir()} == {p.name for p in ASSET.iterdir()}
    for name in ("config.json", "generation_config.json"):
        built, shipped = (json.loads((folder / name).read_text()) for folder in (out, ASSET))
        assert built | {"transformers_version": None} == shipped | {"transformers_version": None}

    built, shipped = (load_file(str(folder / "model.safetensors")) for folder in (out, ASSET))
    assert {k: (v.shape, v.dtype) for k, v in built.items()} == {k: (v.shape, v.dtype) for k, v in shipped.items()}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_text() == (ASSET / name).read_text()
