"""Figures: hand-computed cases, invariances, and intervals that mean what they say."""

import dataclasses
import itertools
import json
import random
import time

import numpy as np
import pytest

from nlhf.critique.arguments import Argument
from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.judge import Judgement
from nlhf.metrics import Record, compare, compute, compute_by_subset, definitions, seed_interval
from nlhf.pairs import Pair, Turn, other_label
from nlhf.verdict import Verdict


def record(pair_id="p", order="AB", verdict="A", label="A", **more) -> Record:
    return Record(
        pair_id,
        more.pop("cluster", pair_id),
        more.pop("subset", ""),
        order,
        more.pop("sample", 0),
        label,
        verdict,
        **more,
    )


def scored(f1, precision=0.5, recall=0.25, failure=None) -> CritiqueMatch:
    return CritiqueMatch(precision, recall, f1, failure=failure)


def at_random(seed: int, n: int = 40) -> list[Record]:
    """A judge with a taste for slot A, both orders, some verdicts missing."""
    rng = random.Random(seed)
    records = []
    for i in range(n):
        label = rng.choice(["A", "B", "tie", None])
        lengths = {"length_a": rng.randrange(50), "length_b": rng.randrange(50)}
        for order in ("AB", "BA"):
            verdict = rng.choice(["A", "A", "A", "B", "tie", None])
            match = scored(rng.random()) if rng.random() < 0.7 else None
            records.append(
                record(
                    f"p{i}",
                    order,
                    verdict,
                    label,
                    cluster=f"c{i // 2}",
                    match=match,
                    tokens=rng.randrange(9),
                    **lengths,
                )
            )
    return records


def values(records, **options):
    return {name: m.value for name, m in compute(records, resamples=0, **options).items()}


def counts(records):
    return {name: (m.k, m.n) for name, m in compute(records, resamples=0).items()}


def test_a_case_by_hand():
    """Four pairs, both orders.

    1: label A; says A, then (swapped) B = data A: right twice, consistent.
    2: label B; says A, then A = data B: wrong, right, flipped.
    3: label A; no verdict, then B = data A: unparsed, right, excluded from consistency.
    4: label tie; says tie, then A = data B: right, wrong, flipped.
    """
    records = [
        record("1", "AB", "A", "A", match=scored(0.8), length_a=9, length_b=3, tokens=10),
        record("1", "BA", "B", "A", match=scored(0.4), length_a=9, length_b=3, tokens=20),
        record("2", "AB", "A", "B", match=scored(0.2), length_a=9, length_b=3, tokens=30),
        record("2", "BA", "A", "B", match=scored(0.0, failure="timeout"), length_a=9, length_b=3, tokens=40),
        record("3", "AB", None, "A", match=scored(1.0), truncated=True, length_a=5, length_b=5),
        record("3", "BA", "B", "A", length_a=5, length_b=5),
        record("4", "AB", "tie", "tie", length_a=5, length_b=5),
        record("4", "BA", "A", "tie", length_a=5, length_b=5),
    ]
    assert counts(records) == {
        "accuracy": (5, 8),
        "accuracy_parsed": (5, 7),
        "length_baseline": (4, 8),  # pair 1 twice, pair 4 twice (equal lengths say tie)
        "parse_rate": (7, 8),
        "position_consistency": (1, 3),
        "position_excluded": (1, 4),
        "accuracy_slot_a": (2, 3),  # 1 AB right, 2 BA right, 3 AB without a verdict
        "accuracy_slot_b": (2, 3),  # 1 BA right, 2 AB wrong, 3 BA right
        "slot_a_rate": (4, 7),
        "tie_rate": (1, 7),
        "tie_labels": (2, 8),
        "truncation_rate": (1, 8),
        "critique_f1": (pytest.approx(1.4), 3),
        "critique_precision": (1.5, 3),
        "critique_recall": (0.75, 3),
        "wrong_critique_rate": (1, 2),
        "scorer_failures": (1, 5),
        "reply_tokens": (100, 8),
    }
    assert values(records)["critique_f1"] == pytest.approx(1.4 / 3)


def test_a_missing_verdict_is_not_right_not_a_tie_and_not_the_other_response():
    only_missing = [
        record(str(i), order, None, label) for i, label in enumerate(["A", "B", "tie"]) for order in ("AB", "BA")
    ]
    result = counts(only_missing)
    assert result["accuracy"] == (0, 6)
    assert result["parse_rate"] == (0, 6)
    assert result["position_excluded"] == (3, 3)
    for name in ("accuracy_parsed", "position_consistency", "slot_a_rate", "tie_rate", "critique_f1"):
        assert result[name] == (0, 0)
        assert values(only_missing)[name] is None


@pytest.mark.parametrize("verdict", ["A", "B"])
def test_a_pair_labelled_tie_is_right_only_by_a_tie(verdict):
    assert counts([record(label="tie", verdict=verdict)])["accuracy"] == (0, 1)
    assert counts([record(label="tie", verdict="tie")])["accuracy"] == (1, 1)
    assert counts([record(label=verdict, verdict="tie")])["accuracy"] == (0, 1)


def test_a_pair_without_label_counts_for_consistency_and_parsing_only():
    result = counts([record(label=None, verdict="A"), record(label=None, verdict="B", order="BA")])
    assert result["position_consistency"] == (1, 1)
    assert result["parse_rate"] == (2, 2)
    for name in (
        "accuracy",
        "accuracy_parsed",
        "accuracy_slot_a",
        "accuracy_slot_b",
        "length_baseline",
        "tie_labels",
    ):
        assert result[name] == (0, 0)


def test_consistency_pairs_each_sample_with_its_own_twin():
    records = [
        record("p", order, verdict, sample=k)
        for k, (ab, ba) in enumerate([("A", "B"), ("A", "A"), ("B", None)])
        for order, verdict in (("AB", ab), ("BA", ba))
    ]
    assert counts(records)["position_consistency"] == (1, 2)
    assert counts(records)["position_excluded"] == (1, 3)


def test_one_order_alone_has_no_consistency():
    result = counts([record("1", "AB"), record("2", "AB")])
    assert result["position_consistency"] == result["position_excluded"] == (0, 0)


@pytest.mark.parametrize(("f1", "wrong"), [(0.49, 1), (0.5, 0)])
def test_the_wrong_critique_threshold_is_exclusive(f1, wrong):
    assert counts([record(match=scored(f1))])["wrong_critique_rate"] == (wrong, 1)
    assert values([record(match=scored(f1))], threshold=0.1)["wrong_critique_rate"] == 0


def test_a_wrong_label_has_no_wrong_critique():
    assert counts([record(verdict="B", match=scored(0.0))])["wrong_critique_rate"] == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_exchanging_the_data_and_the_orders_changes_nothing(seed):
    """What the judge saw and said is the same, only the data's names of the responses are exchanged."""
    records = at_random(seed)
    exchanged = [
        dataclasses.replace(
            r,
            label=other_label(r.label),
            order="BA" if r.order == "AB" else "AB",
            length_a=r.length_b,
            length_b=r.length_a,
        )
        for r in records
    ]
    assert values(exchanged) == values(records)


@pytest.mark.parametrize("seed", range(5))
def test_exchanging_what_is_shown_mirrors_the_slots(seed):
    records = at_random(seed)
    mirrored = [dataclasses.replace(r, label=other_label(r.label), verdict=other_label(r.verdict)) for r in records]
    before, after = values(records), values(mirrored)
    assert after["accuracy_slot_a"] == before["accuracy_slot_b"]
    assert after["accuracy_slot_b"] == before["accuracy_slot_a"]
    assert after["slot_a_rate"] == pytest.approx(1 - before["slot_a_rate"] - before["tie_rate"])
    for name in before.keys() - {"accuracy_slot_a", "accuracy_slot_b", "slot_a_rate", "length_baseline"}:
        assert after[name] == before[name], name


def test_the_order_of_the_records_does_not_matter():
    records = at_random(0)
    assert values(records) == pytest.approx(values(records[::-1]))
    for one, other in zip(compute(records).values(), compute(records[::-1]).values(), strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other))


def test_intervals_are_seeded_and_hold_the_value():
    records = at_random(1, n=100)
    first = compute(records, seed=3)
    assert first == compute(records, seed=3)
    assert first["accuracy"].low != compute(records, seed=4)["accuracy"].low
    for name, metric in first.items():
        if metric.n:
            assert metric.low <= metric.value <= metric.high, name


def test_resampling_matches_a_plain_loop():
    """The vectorised ratio of sums is the textbook bootstrap over clusters."""
    records = at_random(2, n=30)
    clusters = sorted({r.cluster for r in records})
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(clusters), size=(200, len(clusters)))
    accuracies = []
    for row in drawn:
        chosen = [r for i in row for r in records if r.cluster == clusters[i] and r.label is not None]
        accuracies.append(sum(r.correct for r in chosen) / len(chosen))
    metric = compute(records, resamples=200, seed=0)["accuracy"]
    assert (metric.low, metric.high) == pytest.approx(tuple(np.percentile(accuracies, [2.5, 97.5])))


def width(records):
    metric = compute(records)["accuracy"]
    return metric.high - metric.low


def test_copies_in_a_cluster_do_not_shrink_the_interval():
    rng = random.Random(0)
    once = [record(str(i), verdict=rng.choice("AB"), cluster=f"c{i}") for i in range(60)]
    copies = [dataclasses.replace(r, pair_id=f"{r.pair_id}-{k}") for r in once for k in range(10)]
    independent = [dataclasses.replace(r, cluster=r.pair_id) for r in copies]
    assert width(copies) == pytest.approx(width(once))
    assert width(independent) < width(once) / 2


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """200 data sets of 60 clusters of 2 equal rows, true accuracy 0.7: held 88 to 99 % of the time."""
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(200):
        verdicts = np.where(rng.random(60) < 0.7, "A", "B")
        records = [record(f"{i}-{k}", verdict=str(v), cluster=str(i)) for i, v in enumerate(verdicts) for k in range(2)]
        metric = compute(records, resamples=300, seed=seed)["accuracy"]
        held += metric.low <= 0.7 <= metric.high
    assert 176 <= held <= 198


@pytest.mark.parametrize("n", [0, 1], ids=["no cluster", "one cluster"])
def test_too_few_clusters_have_no_interval(n):
    metric = compute([record(str(i)) for i in range(n)])["accuracy"]
    assert (metric.low, metric.high) == (None, None)


def test_duplicate_judgements_are_a_bug():
    with pytest.raises(ValueError, match="same pair, order and sample"):
        compute([record(), record()])


def test_ten_thousand_judgements_take_seconds():
    records = [record(str(i), order, "A") for i in range(5000) for order in ("AB", "BA")]
    start = time.perf_counter()
    compute(records)
    assert time.perf_counter() - start < 15


def test_subsets():
    records = [record("1", subset="x"), record("2", subset="y", verdict="B")]
    by_subset = compute_by_subset(records, resamples=0)
    assert {name: m["accuracy"].value for name, m in by_subset.items()} == {"x": 1, "y": 0}
    assert compute_by_subset(records[:1]) == {}


# Comparison


def test_comparing_a_run_with_itself_is_exactly_zero():
    records = at_random(0)
    for difference in compare(records, records).values():
        assert difference.value in (0, None)
        assert difference.low in (0, None)


def test_a_paired_difference_is_tighter_than_two_intervals():
    """b is right wherever a is, and on a tenth of the pairs more: the pairing leaves little to vary."""
    rng = random.Random(0)
    a = [record(str(i), verdict=rng.choice("AB")) for i in range(200)]
    b = [dataclasses.replace(r, verdict="A") if int(r.pair_id) % 10 == 0 else r for r in a]
    difference = compare(a, b)["accuracy"]
    gained = sum(x.verdict != y.verdict for x, y in zip(a, b, strict=True))
    assert difference.value == pytest.approx(gained / 200)
    assert difference.second - difference.first == pytest.approx(difference.value)
    assert 0 < difference.low <= difference.value <= difference.high
    assert difference.high - difference.low < width(a)


def test_differences_change_sign_with_the_sides():
    a, b = at_random(0), at_random(0)
    b = [dataclasses.replace(r, verdict="A") for r in b]
    there, back = compare(a, b)["accuracy"], compare(b, a)["accuracy"]
    assert there.value == -back.value
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_a_figure_that_one_run_lacks_has_no_difference():
    difference = compare([record("1"), record("2")], [record("1", match=scored(1)), record("2", match=scored(1))])[
        "critique_f1"
    ]
    assert (difference.value, difference.low, difference.first, difference.second) == (None, None, None, 1)


def test_other_pairs_are_refused_with_their_number_and_two_names():
    a = [record(str(i)) for i in range(5)]
    with pytest.raises(UserError, match=r"3 differ, for example '2' and '3'"):
        compare(a, a[:2])
    with pytest.raises(UserError, match="1 differ"):
        compare(a, [dataclasses.replace(a[0], label="B"), *a[1:]])
    with pytest.raises(UserError, match="1 differ"):  # another file whose rows have the same ids and labels
        compare(a, [dataclasses.replace(a[0], length_a=7), *a[1:]])


def test_other_orders_are_refused():
    with pytest.raises(UserError, match="different orders"):
        compare([record()], [record(), record(order="BA")])


def test_seed_interval_by_hand():
    """1, 2, 3: mean 2, standard error 1 / sqrt 3, t(0.975, 2) = 4.302653."""
    result = seed_interval([1, 2, 3])
    assert (result.mean, result.n) == (2, 3)
    assert result.high - 2 == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert result.low + result.high == pytest.approx(4)


@pytest.mark.parametrize(("given", "mean"), [([], None), ([0.5], 0.5)])
def test_seed_interval_needs_two_runs(given, mean):
    result = seed_interval(given)
    assert (result.mean, result.low, result.high, result.n) == (mean, None, None, len(given))


def test_seed_interval_refuses_nan():
    with pytest.raises(ValueError, match="not finite"):
        seed_interval([0.1, float("nan")])


# Records


def test_a_record_survives_json():
    pair = Pair("p", [Turn("user", "?")], "long", "b", label="B", subset="s", group="g")
    match = CritiqueMatch(
        1.0,
        0.5,
        2 / 3,
        ((0, 1),),
        (Argument("A", -1, "x"),),
        (Argument(None, None, "y"), Argument("A", -1, "x")),
    )
    judged = Judgement("p", "BA", 2, Verdict("A", critique="A blame: x", raw="…[[A]]", truncated=True), "hash", 7)
    original = Record.of(judged, pair, match)
    assert (original.winner, original.better_slot, original.correct, original.cluster) == (
        "B",
        "A",
        True,
        "g",
    )
    row = original.to_dict()
    assert row["winner"] == "B"
    assert Record.from_dict(json.loads(json.dumps(row))) == original


def test_a_foreign_row_is_refused():
    with pytest.raises(UserError, match=r"file:3: not a judgement"):
        Record.from_dict({"id": 1}, "file:3")


def test_every_figure_is_explained():
    for definition, other in itertools.pairwise(definitions().values()):
        assert definition.title != other.title
        assert definition.meaning
