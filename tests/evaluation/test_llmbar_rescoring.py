"""LLMBar's own judgements (GPT-4 and LLaMA-2-70B-Chat, chain of thought) through our parser and our scoring.

The published figures are those of ``statistics.json`` beside each ``result.json`` in the benchmark's repository:
right verdicts in the order of the file, with the outputs exchanged, in both orders, and equal verdicts.
"""

import json

import pytest

from nlhf.evaluation.benchmarks import benchmark_scores
from nlhf.evaluation.records import Record
from nlhf.formats import get_format
from nlhf.judge import Judgement
from nlhf.sources import DataConfig, load_pairs

PUBLISHED = {
    "GPT-4": {
        "Natural": (94, 95, 90, 91, 100),
        "Neighbor": (101, 100, 94, 121, 134),
        "GPTInst": (75, 78, 72, 83, 92),
        "GPTOut": (37, 33, 32, 41, 47),
        "Manual": (33, 35, 30, 38, 46),
    },
    "LLaMA2": {
        "Natural": (72, 79, 59, 67, 100),
        "Neighbor": (56, 43, 28, 90, 134),
        "GPTInst": (33, 33, 12, 48, 92),
        "GPTOut": (21, 21, 6, 17, 47),
        "Manual": (18, 18, 6, 22, 46),
    },
}


def judge_again(data_dir, judge, compat):
    """The pairs, and records of the judge's published replies."""
    judge_format = get_format("llmbar", compat=compat)
    pairs = load_pairs(DataConfig(source="llmbar", split="test", path=str(data_dir / "llmbar")))
    records = []
    for subset in PUBLISHED[judge]:
        folder = subset if subset == "Natural" else f"Adversarial/{subset}"
        file = data_dir / "llmbar" / "LLMBar" / folder / "evaluators" / judge / "CoT" / "result.json"
        rows = json.loads(file.read_text(encoding="utf-8"))
        for pair, row in zip([p for p in pairs if p.subset == subset], rows, strict=True):
            assert (pair.response_a, pair.response_b) == (row["output_1"], row["output_2"])
            for order, swapped in (("AB", False), ("BA", True)):
                verdict = judge_format.parse(row["results"][-1][f"swap = {swapped}"]["completion"][0])
                records.append(Record.of(Judgement(pair.id, order, 0, verdict, "", 0), pair))
    return pairs, records


@pytest.mark.data
@pytest.mark.parametrize("compat", [False, True], ids=["ours", "compat"])
@pytest.mark.parametrize("judge", PUBLISHED)
def test_the_published_figures_come_out(data_dir, judge, compat):
    pairs, records = judge_again(data_dir, judge, compat)
    found = {s.name: s for s in benchmark_scores("llmbar", records, pairs, resamples=0)}
    for subset, (first, second, both, equal, n) in PUBLISHED[judge].items():
        for order, right in (("AB", first), ("BA", second)):
            assert sum(r.correct for r in records if r.subset == subset and r.order == order) == right
        assert found[subset].n == n
        assert found[subset].value == pytest.approx((first + second) / 2 / n)
        assert found[f"{subset} (strict)"].value == pytest.approx(both / n)
        assert found[f"{subset} (agreement)"].value == pytest.approx(equal / n)


@pytest.mark.data
def test_replies_without_a_verdict_are_as_many_as_published(data_dir):
    """All were cut off by LLaMA-2's token limit, before the last sentence."""
    assert sum(r.verdict is None for r in judge_again(data_dir, "GPT-4", False)[1]) == 0
    silent = [r for r in judge_again(data_dir, "LLaMA2", False)[1] if r.verdict is None]
    assert [r.subset for r in silent] == ["Neighbor", "GPTInst", "GPTInst", "Manual"]
    assert not any(r.reply.rstrip().endswith(".") for r in silent)
