import dataclasses
import json
from collections import Counter

import pytest

from nlhf.manifest import Lengths, build_manifest, data_hash, duplicates, overlap
from nlhf.pairs import Pair
from nlhf.sources import DataConfig

CONFIG = DataConfig(source="jsonl", split="train", path="f.jsonl")


def make_pair(name, context="q", a="one", b="three", **fields):
    return Pair.from_dict({"id": str(name), "context": context, "response_a": a, "response_b": b} | fields)


PAIRS = (
    make_pair(1, label="B", subset="x", critiques="Why.", group="g"),
    make_pair(2, "other q", label="A", subset="x", group="g"),
    make_pair(3, "third", label="tie", subset="y", critiques=[{"weaknesses_a": "Bad.", "text": " "}]),
    make_pair(4, "fourth", a="", b="same len"),
)


def test_counts():
    manifest = build_manifest(CONFIG, PAIRS, Counter({"equal responses": 2}))
    assert (manifest.source, manifest.split, manifest.path) == ("jsonl", "train", "f.jsonl")
    assert (manifest.pairs, manifest.labelled, manifest.groups, manifest.empty_responses) == (4, 2, 3, 1)
    assert manifest.labels == {"A": 1, "B": 1, "tie": 1, "none": 1}
    assert manifest.subsets == {"": 1, "x": 2, "y": 1}
    assert manifest.drops == {"equal responses": 2}
    # Pair 1: "three" (5) beats "one" (3); pair 2: "one" wins. The tie and the pair without a label do not count.
    assert manifest.longer_wins == 0.5
    assert manifest.lengths["critique"] == Lengths(minimum=4, median=4, mean=4, p95=4, maximum=4)
    assert manifest.lengths["response"].maximum == 8


def test_the_dict_is_json():
    manifest = build_manifest(CONFIG, PAIRS, Counter())
    row = json.loads(json.dumps(manifest.to_dict()))
    assert row["lengths"]["context"]["minimum"] == 1
    assert row["data_hash"] == data_hash(PAIRS)


def test_no_pairs():
    manifest = build_manifest(CONFIG, [], Counter())
    assert (manifest.pairs, manifest.longer_wins) == (0, None)
    assert set(manifest.lengths.values()) == {None}


@pytest.mark.parametrize(
    ("texts", "lengths"),
    [
        pytest.param(["abc"], Lengths(3, 3, 3, 3, 3), id="one"),
        pytest.param(["", "ab"], Lengths(0, 1, 1, 1.9, 2), id="two"),
        # 0 to 100: the 95th percentile is 95.
        pytest.param(["x" * i for i in range(101)], Lengths(0, 50, 50, 95, 100), id="hundred"),
    ],
)
def test_lengths(texts, lengths):
    assert Lengths.of(texts) == lengths


class TestDataHash:
    def test_depends_on_order_text_slot_and_label(self):
        hashes = {
            data_hash(PAIRS),
            data_hash(PAIRS[::-1]),
            data_hash(PAIRS[:3]),
            data_hash([PAIRS[0].swap(), *PAIRS[1:]]),
            data_hash([dataclasses.replace(PAIRS[0], label="A"), *PAIRS[1:]]),
            data_hash([make_pair(1, context="Q", label="B"), *PAIRS[1:]]),
        }
        assert len(hashes) == 6

    def test_does_not_depend_on_ids_or_critiques(self):
        bare = [dataclasses.replace(p, id=f"new-{p.id}", critiques=[], meta={"x": 1}) for p in PAIRS]
        assert data_hash(bare) == data_hash(PAIRS)


class TestDuplicates:
    def test_are_found_in_either_order_and_the_first_is_named(self):
        first = make_pair(1, label="A", critiques="x")
        pairs = [
            first,
            make_pair(2, context="else"),
            make_pair(3, label="A"),
            dataclasses.replace(first.swap(), id="4"),
        ]
        assert [(a.id, b.id) for a, b in duplicates(pairs)] == [("1", "3"), ("1", "4")]
        manifest = build_manifest(CONFIG, pairs, Counter())
        assert (manifest.duplicates, manifest.contradictions) == (2, 0)

    @pytest.mark.parametrize(
        ("later", "contradicts"),
        [
            pytest.param(make_pair(2, label="B"), True, id="other-winner"),
            pytest.param(make_pair(2, label="tie"), True, id="tie"),
            pytest.param(make_pair(2, a="three", b="one", label="B"), False, id="exchanged-same-winner"),
            pytest.param(make_pair(2, a="three", b="one", label="A"), True, id="exchanged-other-winner"),
        ],
    )
    def test_contradictions_go_by_the_winning_text(self, later, contradicts):
        manifest = build_manifest(CONFIG, [make_pair(1, label="A"), later], Counter())
        assert (manifest.duplicates, manifest.contradictions) == (1, int(contradicts))


def test_overlap():
    train = [make_pair(1, "q1", group="g"), make_pair(2, "q2"), make_pair(3, "q3")]
    test = [
        make_pair("a", "q1"),  # the same pair
        make_pair("b", "q2", a="three", b="one"),  # exchanged
        make_pair("c", "q3", a="new"),  # the same question
        make_pair("d", "q4", group="g"),  # the same group
        make_pair("e", "q5"),  # nothing; pairs without a group share none
    ]
    shared = overlap(test, train)
    assert (shared.pairs, shared.contexts, shared.groups) == (2, 3, 1)
    assert overlap(test, []) == overlap([], train)
    assert overlap(train, train).pairs == 3
