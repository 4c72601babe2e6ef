"""Figures: hand-computed cases, invariances, and intervals that mean what they say."""

import dataclasses
import hashlib
import itertools
import json
import random
import time

import numpy as np
import pytest

from nlhf.critique.arguments import Argument
from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.evaluation.figures import definitions
from nlhf.evaluation.intervals import seed_interval
from nlhf.evaluation.metrics import compare, compare_decisions, compute, compute_by_subset
from nlhf.evaluation.records import Record
from nlhf.judge import Judgement
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
        "accuracy_macro": (0, 0),  # one subset
        "length_baseline_macro": (0, 0),
        "accuracy_strict": (1, 4),
        "accuracy_majority": (0, 0),  # one sample
        "accuracy_pair": (2, 4),  # 1, and 3 by its one verdict; 2 and 4 contradict themselves
        "decided_rate": (2, 4),
        "parse_rate": (7, 8),
        "position_consistency": (1, 3),
        "flip_rate": (1, 3),  # 2; in 4 a tie turned into a winner
        "position_excluded": (1, 4),
        "accuracy_slot_a": (2, 3),  # 1 AB right, 2 BA right, 3 AB without a verdict
        "accuracy_slot_b": (2, 3),  # 1 BA right, 2 AB wrong, 3 BA right
        "slot_a_rate": (4, 7),
        "tie_rate": (1, 7),
        "tie_labels": (2, 8),
        "tie_precision": (1, 1),
        "tie_recall": (1, 2),
        "truncation_rate": (1, 8),
        "brier": (0, 0),  # no probabilities
        "calibration_error": (0, 0),
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
    start = time.process_time()  # whatever else the machine is doing
    compute(records)
    assert time.process_time() - start < 15


def test_subsets():
    records = [record("1", subset="x"), record("2", subset="y", verdict="B")]
    by_subset = compute_by_subset(records, resamples=0)
    assert {name: m["accuracy"].value for name, m in by_subset.items()} == {"x": 1, "y": 0}
    assert compute_by_subset(records[:1]) == {}


def test_macro_counts_every_subset_the_same():
    """3 of 3 in one subset, 0 of 1 in the other: 1/2 over subsets, 3/4 over judgements."""
    records = [record(str(i), subset="x", length_a=2) for i in range(3)]
    records += [record("z", subset="y", verdict="B", length_a=1, length_b=2)]
    found = compute(records, resamples=500)
    assert (found["accuracy_macro"].k, found["accuracy_macro"].n, found["accuracy_macro"].value) == (1, 2, 0.5)
    assert found["accuracy"].value == 0.75
    assert found["length_baseline_macro"].value == 0.5
    # A resample without the one pair of y has x alone, whose accuracy is 1; one without x has 0.
    assert (found["accuracy_macro"].low, found["accuracy_macro"].high) == (0.5, 1)
    by_subset = compute_by_subset(records, resamples=0)
    assert by_subset["x"]["accuracy_macro"].n == 0


def test_a_subset_without_labels_is_not_a_zero_in_the_macro_average():
    records = [record("1", subset="x"), record("2", subset="y", verdict="B"), record("3", subset="z", label=None)]
    assert counts(records)["accuracy_macro"] == (1, 2)


@pytest.mark.parametrize(
    ("ab", "ba", "strict"),
    [("A", "B", 1), ("A", "A", 0), ("A", None, 0), (None, None, 0), ("B", "A", 0)],
    ids=["right twice", "right once", "right and silent", "silent", "wrong twice"],
)
def test_strict_accuracy_wants_both_orders(ab, ba, strict):
    assert counts([record(verdict=ab), record(order="BA", verdict=ba)])["accuracy_strict"] == (strict, 1)
    assert counts([record(verdict=ab)])["accuracy_strict"] == (0, 0)


def votes(*verdicts, order="AB", label="A"):
    return [record(order=order, verdict=v, label=label, sample=k) for k, v in enumerate(verdicts)]


@pytest.mark.parametrize(
    ("records", "majority", "pair"),
    [
        (votes("A", "A", "B"), (1, 1), (1, 1)),
        (votes("A", "B", "B"), (0, 1), (0, 1)),
        (votes("A", "B"), (0, 1), (0, 1)),
        (votes("A", None, None), (1, 1), (1, 1)),
        (votes("A", "A", "B") + votes("A", "A", "A", order="BA"), (1, 2), (0, 1)),  # 2 : 4 in the data's order
        (votes("tie", "A", "B", label="tie"), (0, 1), (0, 1)),  # a contradiction is no tie found
        (votes("tie", "tie", "B", label="tie"), (1, 1), (1, 1)),
        (votes("A"), (0, 0), (1, 1)),
    ],
    ids=["two of three", "one of three", "even", "silent", "both orders", "torn", "tie", "one sample"],
)
def test_votes(records, majority, pair):
    found = counts(records)
    assert (found["accuracy_majority"], found["accuracy_pair"]) == (majority, pair)


def test_the_rule_of_the_vote_can_be_strength():
    """Two weak votes for A against one strong for B."""
    records = [record(verdict=v, sample=k, strength=s) for k, (v, s) in enumerate([("A", -1), ("A", -1), ("B", 3)])]
    assert values(records)["accuracy_majority"] == 1
    assert values(records, rule="mean_strength")["accuracy_majority"] == 0


def test_undecided_pairs_are_counted():
    records = [record("1"), record("1", "BA", "A"), record("2"), record("2", "BA", "B"), record("3", verdict=None)]
    assert counts(records)["decided_rate"] == (1, 3)


@pytest.mark.parametrize(
    ("ab", "ba", "consistent", "flip"),
    [("A", "B", 1, 0), ("A", "A", 0, 1), ("A", "tie", 0, 0), ("tie", "tie", 1, 0)],
)
def test_a_flip_names_both_responses(ab, ba, consistent, flip):
    found = counts([record(verdict=ab), record(order="BA", verdict=ba)])
    assert (found["position_consistency"], found["flip_rate"]) == ((consistent, 1), (flip, 1))


# Comparison


def test_mcnemar_counts_pairs_and_not_judgements():
    """Three pairs in both orders: the second judge is right on one more; both contradict themselves on the last."""
    a = [record(str(i), order, v) for i, pair in enumerate([("A", "B"), ("B", "A"), ("A", "A")])
         for order, v in zip(("AB", "BA"), pair, strict=True)]  # fmt: skip
    b = [dataclasses.replace(r, verdict={"AB": "A", "BA": "B"}[r.order]) if r.pair_id == "1" else r for r in a]
    test = compare_decisions(a, b)
    assert (test.both, test.first, test.second, test.neither, test.p) == (1, 0, 1, 1, 1)
    with pytest.raises(UserError, match="3 differ"):
        compare_decisions(a, [dataclasses.replace(r, length_a=9) for r in b])


def test_pairs_without_a_label_are_not_compared():
    a = [record("1", label=None), record("2")]
    assert compare_decisions(a, a).both == 1


@pytest.mark.parametrize("name", ["accuracy_macro", "calibration_error"])
def test_a_comparison_of_parts_is_paired_too(name):
    """Figures that are no plain ratio: the difference of a run from itself has no width, from another it does."""
    a = [
        dataclasses.replace(r, subset=str(i % 3), probability=0.5 + (i % 5) / 10)
        for i, r in enumerate(at_random(0))
        if r.order == "AB"
    ]
    b = [dataclasses.replace(r, verdict="A", probability=0.9) for r in a]
    assert (compare(a, a)[name].low, compare(a, a)[name].high) == (0, 0)
    difference = compare(a, b)[name]
    assert difference.low < difference.value < difference.high


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
    verdict = Verdict("A", -2, (5.0, 3.0), critique="A blame: x", raw="…[[A]]", truncated=True)
    judged = Judgement("p", "BA", 2, verdict, "hash", 7, 0.75, 0.1, 0.9)
    original = Record.of(judged, pair, match)
    assert (original.winner, original.better_slot, original.correct, original.cluster) == (
        "B",
        "A",
        True,
        "g",
    )
    row = original.to_dict()
    assert row["winner"] == "B"
    assert row["reply_hash"] == hashlib.sha256("…[[A]]".encode()).hexdigest()[:16]
    assert Record.from_dict(json.loads(json.dumps(row))) == original
    assert original.judgement == judged


def test_a_reply_that_was_changed_is_found_out():
    row = record(reply="[[A]]").to_dict()
    assert Record.from_dict(row)
    with pytest.raises(UserError, match=r"file:3: the reply does not fit its reply_hash"):
        Record.from_dict(row | {"reply": "[[B]]"}, "file:3")


def test_a_judgement_of_a_version_before_hashes_is_read():
    row = record(reply="[[A]]").to_dict()
    for name in ("reply_hash", "probability", "tie_probability", "mass", "strength", "scores"):
        del row[name]
    assert Record.from_dict(row) == record(reply="[[A]]")


def test_a_foreign_row_is_refused():
    with pytest.raises(UserError, match=r"file:3: not a judgement"):
        Record.from_dict({"id": 1}, "file:3")


def test_every_figure_is_explained():
    for definition, other in itertools.pairwise(definitions().values()):
        assert definition.title != other.title
        assert definition.meaning
