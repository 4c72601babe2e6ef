"""The adversarial probe: fillers in the place of one response, apart from everything else."""

import dataclasses

import pytest

from nlhf.evaluation.probe import FILLERS, PROBED_PAIRS, probe_pairs
from nlhf.pairs import HumanCritique, Pair, Turn


def pair(i: int, label: str | None = "A", **more) -> Pair:
    critiques = [HumanCritique(text="good")]
    values = {"response_a": f"one {i}", "response_b": f"two {i}", "label": label, "critiques": critiques} | more
    return Pair(f"p{i}", [Turn("user", f"{i}?")], **values)


@pytest.mark.parametrize(("label", "kept"), [("A", "A"), ("B", "B"), ("tie", "A"), (None, "A")])
def test_the_better_response_stays_and_wins(label, kept):
    probed = probe_pairs([pair(1, label)], seed=0)
    assert [p.subset for p in probed] == list(FILLERS)
    for found in probed:
        texts = {"A": found.response_a, "B": found.response_b}
        assert found.label == kept
        assert texts.pop(kept) == ("two 1" if kept == "B" else "one 1")
        assert list(texts.values()) == [FILLERS[found.subset]]
        assert not found.critiques
        assert found.cluster == "p1"


def test_a_small_set_by_seed_in_the_order_of_the_data():
    pairs = [pair(i) for i in range(100)]
    probed = probe_pairs(pairs, seed=1)
    assert len(probed) == PROBED_PAIRS * len(FILLERS)
    assert probed == probe_pairs(pairs, seed=1)
    assert probed != probe_pairs(pairs, seed=2)
    numbers = [int(p.cluster[1:]) for p in probed]
    assert numbers == sorted(numbers)
    assert len({p.id for p in probed}) == len(probed)


@pytest.mark.parametrize("text", ["", ":", " Solution\n"])
def test_a_response_that_is_itself_a_filler_is_passed_over(text):
    assert probe_pairs([pair(1, response_a=text)], seed=0) == []
    assert len(probe_pairs([pair(1, response_a=text, label="B")], seed=0)) == 3


def test_a_pair_with_strength_stays_one():
    assert len(probe_pairs([dataclasses.replace(pair(1), strength=-3)], seed=0)) == 3
