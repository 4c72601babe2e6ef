"""Every formula against figures worked out by hand, with numbers on which the likely mistake gives another result."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from nlhf.evaluation.benchmark_rules import TiesPrompt, macro_figures, rating_credit, ties_score
from nlhf.evaluation.benchmarks import BENCHMARKS, benchmark_scores, weighted_mean
from nlhf.evaluation.records import Record
from nlhf.pairs import Pair, Turn, other_label
from nlhf.sources import SOURCES
from nlhf.sources.rewardbench import SECTIONS


def make_pair(name, subset="", label="A", group="", **meta):
    return Pair(name, [Turn("user", "q")], "a", "b", label, subset=subset, group=group, meta=meta)


def judged(pair, ab, ba=..., sample=0, scores=None):
    """Records of a pair from its winners in both orders ("A" or "B" of the data, "tie", None); one order without ba."""
    winners = {"AB": ab} if ba is ... else {"AB": ab, "BA": ba}
    return [
        Record(
            pair_id=pair.id,
            cluster=pair.cluster,
            subset=pair.subset,
            order=order,
            sample=sample,
            label=pair.label,
            verdict=winner if order == "AB" else other_label(winner),
            scores=None if scores is None else (scores if order == "AB" else scores[::-1]),
        )
        for order, winner in winners.items()
    ]


def score(source, cases, **options):
    """Scores by name of (pair, *winners) cases."""
    pairs = [pair for pair, *_ in cases]
    records = [record for pair, *winners in cases for record in judged(pair, *winners)]
    return {s.name: s for s in benchmark_scores(source, records, pairs, **{"resamples": 0} | options)}


def values(scores):
    return {name: s.value for name, s in scores.items()}


def several(subset, n, right, wrong="B", label="A"):
    """``n`` pairs of a subset, the first ``right`` judged rightly in both orders and the others not."""
    pairs = [make_pair(f"{subset}{i}", subset, label) for i in range(n)]
    return [(pair, *(("A",) * 2 if i < right else (wrong,) * 2)) for i, pair in enumerate(pairs)]


def test_every_benchmark_is_a_source_and_other_sources_have_no_scores():
    assert set(BENCHMARKS) <= set(SOURCES)
    pair = make_pair("p")
    assert benchmark_scores("comve", judged(pair, "A", "A"), [pair]) == []
    assert all(benchmark_scores(name, [], []) == [] for name in BENCHMARKS)


# --------------------------------------------------------------------------------------------------------------- LLMBar


class TestLLMBar:
    def test_average_is_over_subsets_and_not_over_pairs(self):
        """Natural 4/4, Neighbor 0/2, GPTInst 1/2, GPTOut 1/1, Manual 1/4: average (1 + 0 + .5 + 1 + .25) / 5 = 0.55.

        Pooled it would be 7/13, and with the adversarial subsets as one half (1 + .4375) / 2.
        """
        cases = [
            *several("Natural", 4, 4),
            *several("Neighbor", 2, 0),
            *several("GPTInst", 2, 1),
            *several("GPTOut", 1, 1),
            *several("Manual", 4, 1),
        ]
        found = score("llmbar", cases)
        assert found["average"].value == pytest.approx(0.55)
        assert found["Adversarial"].value == pytest.approx((0 + 0.5 + 1 + 0.25) / 4)
        assert found["Manual"].value == 0.25
        assert [found[name].n for name in ("average", "Adversarial", "Natural")] == [13, 9, 4]

    def test_orders_are_averaged_and_strict_asks_for_both(self):
        """Right twice, once, once (then a tie), once (then nothing): 5/8 right, 1/4 in both, and 1/4 agree."""
        pairs = [make_pair(str(i), "Natural") for i in range(4)]
        cases = list(zip(pairs, ("A", "A", "A", None), ("A", "B", "tie", "A"), strict=True))
        found = values(score("llmbar", cases))
        assert found["Natural"] == 5 / 8
        assert found["Natural (strict)"] == 1 / 4
        assert found["Natural (agreement)"] == 1 / 4

    def test_two_missing_verdicts_agree_as_upstream_has_it(self):
        found = values(score("llmbar", [(make_pair("p", "Manual"), None, None)]))
        assert (found["Manual"], found["Manual (strict)"], found["Manual (agreement)"]) == (0, 0, 1)

    def test_one_order_has_no_agreement(self):
        found = score("llmbar", [(make_pair("p", "Manual"), "A")])
        assert found["Manual"].value == 1
        assert not [name for name in found if "agreement" in name]

    def test_a_missing_subset_is_said(self):
        found = score("llmbar", several("Natural", 2, 1) + several("Manual", 1, 1))
        assert found["average"].value == pytest.approx((0.5 + 1) / 2)
        assert found["average"].note.endswith("; nothing was judged of GPTInst, GPTOut, Neighbor")
        assert "nothing was judged" not in found["Natural"].note
        assert "Neighbor" not in found


# ----------------------------------------------------------------------------------------------------------- JudgeBench


class TestJudgeBench:
    @pytest.mark.parametrize(
        ("winners", "right", "strict"),
        [
            pytest.param(("A", "A"), 1, 1, id="both"),
            pytest.param(("A", "tie"), 1, 0, id="right-and-tie"),
            pytest.param(("A", None), 1, 0, id="right-and-none"),
            pytest.param(("A", "B"), 0, 0, id="flipped"),
            pytest.param(("tie", "tie"), 0, 0, id="ties"),
            pytest.param(("tie", "B"), 0, 0, id="wrong-and-tie"),
            pytest.param((None, None), 0, 0, id="none"),
            pytest.param(("B", "B"), 0, 0, id="wrong"),
        ],
    )
    @pytest.mark.parametrize("label", ["A", "B"])
    def test_the_sign_of_the_summed_votes_decides(self, winners, right, strict, label):
        named = winners if label == "A" else tuple(map(other_label, winners))
        found = values(score("judgebench", [(make_pair("p", "math", label), *named)]))
        assert (found["overall"], found["math"]) == (right, right)
        assert found["overall (strict)"] == strict

    def test_votes_of_all_samples_count(self):
        pair = make_pair("p", "math")
        records = judged(pair, "A", "B") + judged(pair, "A", None, sample=1)
        [found] = [s for s in benchmark_scores("judgebench", records, [pair]) if s.name == "overall"]
        assert found.value == 1  # 2 for, 1 against

    def test_overall_is_over_pairs_and_not_over_categories(self):
        found = score("judgebench", several("knowledge", 8, 8) + several("coding", 2, 0))
        assert (found["overall"].value, found["overall"].n) == (0.8, 10)
        assert (found["knowledge"].value, found["coding"].value) == (1, 0)

    def test_flip_rate_is_among_pairs_with_two_verdicts(self):
        pairs = [make_pair(str(i), "math") for i in range(4)]
        cases = list(zip(pairs, ("A", "A", "A", "B"), ("A", "B", None, "tie"), strict=True))
        found = score("judgebench", cases)["overall (flip rate)"]
        assert (found.value, found.n) == (pytest.approx(2 / 3), 3)

    def test_an_unknown_category_counts_in_the_whole(self):
        assert score("judgebench", [(make_pair("p", "new-part"), "A", "A")])["overall"].n == 1


# ------------------------------------------------------------------------------------------------------------- RM-Bench

STYLES = ("concise", "detailed", "markdown")


def rm_bench_row(domain, name, matrix, label="A"):
    """The nine cases of a row; ``matrix[i][j]`` says whether chosen style i beats rejected style j."""
    cases = []
    for i, j in product(range(3), repeat=2):
        kind = "hard" if i < j else "easy" if i > j else "normal"
        styles = {"chosen_style": STYLES[i], "rejected_style": STYLES[j]}
        pair = make_pair(f"{domain}{name}{i}{j}", f"{domain}/{kind}", label, f"{domain}{name}", **styles)
        cases.append((pair, label if matrix[i][j] else other_label(label)))
    return cases


class TestRMBench:
    UPPER = ((0, 1, 1), (0, 0, 1), (0, 0, 0))

    def test_hard_is_above_the_diagonal_of_chosen_by_rejected(self):
        found = values(score("rm_bench", rm_bench_row("chat", 1, self.UPPER)))
        assert (found["chat/hard"], found["chat/normal"], found["chat/easy"]) == (1, 0, 0)
        assert found["chat"] == pytest.approx(1 / 3)

    def test_as_the_published_code_computes_it(self):
        """Random matrices, against numpy's triangles as in the README of RM-Bench."""
        rng = np.random.default_rng(0)
        rows = rng.integers(0, 2, (7, 3, 3))
        found = values(score("rm_bench", [c for n, m in enumerate(rows) for c in rm_bench_row("code", n, m)]))
        matrix = rows.mean(axis=0)
        assert found["code/hard"] == pytest.approx(np.triu(matrix, 1).sum() / 3)
        assert found["code/normal"] == pytest.approx(np.diag(matrix).mean())
        assert found["code/easy"] == pytest.approx(np.tril(matrix, -1).sum() / 3)

    def test_overall_is_the_mean_of_domains(self):
        """One right row of chat against three wrong ones of math: 1/2, not 1/4."""
        good, bad = ((1, 1, 1),) * 3, ((0, 0, 0),) * 3
        cases = rm_bench_row("chat", 0, good)
        cases += [case for n in range(3) for case in rm_bench_row("math", n, bad)]
        found = score("rm_bench", cases)
        assert (found["overall"].value, found["hard"].value, found["overall"].n) == (0.5, 0.5, 36)
        assert found["overall"].note.endswith("; nothing was judged of code, safety")

    def test_a_tie_and_no_verdict_are_wrong(self):
        cases = [(pair, verdict) for verdict in ("tie", None) for pair, _ in rm_bench_row("chat", verdict, self.UPPER)]
        assert values(score("rm_bench", cases))["overall"] == 0

    def test_the_side_does_not_matter(self):
        swapped = rm_bench_row("chat", 1, self.UPPER, label="B")
        assert values(score("rm_bench", swapped)) == values(score("rm_bench", rm_bench_row("chat", 1, self.UPPER)))

    def test_a_missing_cell_is_said(self):
        found = score("rm_bench", rm_bench_row("chat", 1, self.UPPER)[:-1])
        assert found["chat"].note.endswith("; nothing was judged of chat/markdown-markdown")

    def test_the_interval_resamples_rows(self):
        """Rows all right or all wrong: nine pairs of a row are one observation, so n = 8 gives a wide interval."""
        rows = [((bool(n % 2),) * 3,) * 3 for n in range(8)]
        cases = [case for n, matrix in enumerate(rows) for case in rm_bench_row("chat", n, matrix)]
        found = score("rm_bench", cases, resamples=500)["overall"]
        assert (found.value, found.n) == (0.5, 72)
        assert found.low <= 0.25 < 0.75 <= found.high


# ---------------------------------------------------------------------------------------------------------- RewardBench


class TestRewardBench:
    def test_sections_weigh_subsets_by_their_published_counts(self):
        """Judged 1 of each, all right in mt-bench-hard (37 of 456) alone: 37 / 456, neither 1/6 nor a pooled mean."""
        names = SECTIONS["Chat Hard"]
        cases = [case for name in names for case in several(name, 1, name == "mt-bench-hard")]
        found = score("rewardbench", cases)
        assert found["Chat Hard"].value == pytest.approx(37 / 456)
        assert found["Chat Hard (strict)"].value == pytest.approx(37 / 456)

    def test_math_prm_weighs_as_much_as_all_code(self):
        cases = several("math-prm", 2, 2) + [c for name in list(SECTIONS["Reasoning"])[1:] for c in several(name, 3, 0)]
        assert score("rewardbench", cases)["Reasoning"].value == pytest.approx(0.5)

    def test_overall_is_the_mean_of_sections(self):
        """Safety 740 rows and Chat 358 count the same."""
        cases = several("donotanswer", 5, 5) + several("alpacaeval-easy", 2, 0) + several("hep-go", 1, 1)
        found = score("rewardbench", cases)
        assert found["overall"].value == pytest.approx(2 / 3)
        assert "math-prm" in found["Reasoning"].note

    @pytest.mark.parametrize("winner", ["tie", None])
    def test_no_verdict_is_half_upstream_and_nothing_strictly(self, winner):
        found = values(score("rewardbench", [(make_pair("p", "hep-go"), winner)]))
        assert (found["overall"], found["overall (no verdict is wrong)"], found["overall (strict)"]) == (0.5, 0, 0)

    def test_a_flip_is_half_right_and_strictly_wrong(self):
        found = values(score("rewardbench", [(make_pair("p", "hep-go"), "A", "B")]))
        assert (found["overall"], found["overall (no verdict is wrong)"], found["overall (strict)"]) == (0.5, 0.5, 0)

    def test_counts_are_those_of_the_data_set(self):
        """2,985 rows in all; math-prm has 447 of them and weighs as much as the 984 of code."""
        counts = {name: count for subsets in SECTIONS.values() for name, count in subsets.items()}
        assert len(counts) == 23
        assert sum(counts.values()) - counts["math-prm"] + 447 == 2985
        assert counts["math-prm"] == sum(count for name, count in counts.items() if name.startswith("hep-"))


# -------------------------------------------------------------------------------------------------------- RewardBench 2


def best_of_row(name, subset, *winners, **options):
    """Records and pairs of a row from (AB, BA) for each pair."""
    group = f"{subset}{name}"
    pairs = [make_pair(f"{group}-{i}", subset, group=group, pairs_in_row=3) for i in range(len(winners))]
    return pairs, [r for pair, won in zip(pairs, winners, strict=True) for r in judged(pair, *won, **options)]


def score_rows(*rows, **options):
    pairs = [pair for row in rows for pair in row[0]]
    records = [record for row in rows for record in row[1]]
    return {s.name: s for s in benchmark_scores("rewardbench2", records, pairs, **{"resamples": 0} | options)}


class TestRewardBench2:
    RIGHT, FLIPPED, WRONG = ("A", "A"), ("A", "B"), ("B", "B")

    def test_a_row_counts_only_if_all_three_pairs_are_right(self):
        """8 of 9 pairs are right but only 2 of 3 rows."""
        rows = [best_of_row(n, "Math", self.RIGHT, self.RIGHT, self.WRONG if n == 2 else self.RIGHT) for n in range(3)]
        found = score_rows(*rows)
        assert (found["Math"].value, found["Math"].n) == (pytest.approx(2 / 3), 3)

    def test_the_orders_are_shown_each_on_its_own(self):
        """All right in order AB, one wrong in BA: half, strictly nothing."""
        found = values(score_rows(best_of_row(0, "Math", self.RIGHT, self.RIGHT, self.FLIPPED)))
        assert (found["Math"], found["Math (strict)"]) == (0.5, 0)

    def test_errors_in_different_orders_do_not_hide_each_other(self):
        """Each order has one wrong pair: 0, though every pair is right once."""
        found = values(score_rows(best_of_row(0, "Math", self.RIGHT, ("B", "A"), ("A", "B"))))
        assert found["Math"] == 0

    def test_a_tie_is_not_right(self):
        assert values(score_rows(best_of_row(0, "Math", ("A",), ("A",), ("tie",))))["Math"] == 0

    def test_overall_is_the_mean_of_the_five_subsets(self):
        """Focus 1/1, Safety 0/3: 1/2, not 1/4."""
        rows = [best_of_row(0, "Focus", *(self.RIGHT,) * 3)]
        rows += [best_of_row(n, "Safety", *(self.WRONG,) * 3) for n in range(3)]
        found = score_rows(*rows)
        assert found["overall"].value == 0.5
        assert found["overall"].note.endswith("; nothing was judged of Factuality, Math, Precise IF")

    def test_an_incomplete_row_is_left_out_and_said(self):
        rows = [best_of_row(0, "Math", *(self.RIGHT,) * 3), best_of_row(1, "Math", self.WRONG)]
        found = score_rows(*rows)["Math"]
        assert (found.value, found.n) == (1, 1)
        assert found.note.endswith("; 1 incomplete rows left out")

    def test_by_scores_only_where_the_judge_gives_scores(self):
        assert "Math (by scores)" not in score_rows(best_of_row(0, "Math", *(self.RIGHT,) * 3))
        pairs, records = best_of_row(0, "Math", *(self.RIGHT,) * 3, scores=(8.0, 6.0))
        tied = [r for pair in pairs[:1] for r in judged(pair, "tie", "tie", scores=(8.0, 8.0))]
        found = score_rows((pairs, records), best_of_row(1, "Math", *(self.WRONG,) * 3, scores=(2.0, 9.0)))
        assert found["Math (by scores)"].value == 0.5
        found = score_rows((pairs, tied + records[2:]))
        assert found["Math (by scores)"].value == 0.5  # two answers share the top

    @pytest.mark.parametrize(
        ("ratings", "credit"),
        [
            pytest.param([9, 3, 4, 5], 1, id="alone"),
            pytest.param([9, 9, 4, 5], 1 / 2, id="two"),
            pytest.param([9, 9, 9, 9], 1 / 4, id="all"),
            pytest.param([8, 9, 4, 5], 0, id="not-the-top"),
            pytest.param([8, None, 4, 5], 1, id="rival-unreadable"),
            pytest.param([None, 2, 4, 5], 0, id="right-one-unreadable"),
            pytest.param([None] * 4, 1 / 4, id="nothing-readable"),
        ],
    )
    def test_ratings(self, ratings, credit):
        assert rating_credit(ratings) == credit

    def test_strictly_nothing_readable_is_nothing(self):
        assert rating_credit([None] * 4, unreadable=0.0) == 0


class TestTies:
    def test_by_hand(self):
        """Four numbers, ratings 1 to 10.

        1 tied: correct 9, 7; wrong 6, 2: spread 2, margin 1, accurate. ref: 8 over 5: margin 3. Lesser margin 1.
        2 tied: correct 8, 8; wrong 9: spread 0, margin -1. ref: 9 over 4: margin 5. Lesser margin -1.
        3 tied: correct 9, 8; wrong 4: spread 1, margin 4, accurate. ref: 6 over 7: margin -1. Lesser margin -1.
        4 tied: correct 9, 8; wrong 1: spread 1, margin 7, accurate. ref: 9 over 3: margin 6. Lesser margin 6.
        tied accuracy 3/4, ref accuracy 3/4, margin > spread 2/4 (3 and 4), lesser > spread 1/4 (4),
        tanh of: 1/2 - 1 = -0.5; -1 / 0 = -inf; -1 / 1 - 1 = -2; 6 / 1 - 1 = 5.
        """
        prompts = [
            TiesPrompt("tied:1", (9, 7, 6, 2), 2),
            TiesPrompt("ref:1", (8, 5), 1),
            TiesPrompt("tied:2", (8, 8, 9), 2),
            TiesPrompt("ref:2", (9, 4), 1),
            TiesPrompt("tied:3", (9, 8, 4), 2),
            TiesPrompt("ref:3", (6, 7), 1),
            TiesPrompt("tied:4", (9, 8, 1), 2),
            TiesPrompt("ref:4", (9, 3), 1),
        ]
        found = ties_score(prompts)
        tanh = (math.tanh(-0.5) - 1 + math.tanh(-2) + math.tanh(5)) / 4
        expected = {
            "tied accuracy": 3 / 4,
            "ref accuracy": 3 / 4,
            "margin over spread": 2 / 4,
            "lesser margin over spread": 1 / 4,
            "tanh": tanh,
            "overall": 0.3 * 3 / 4 + 0.3 * 3 / 4 + 0.2 * 2 / 4 + 0.2 / 4 + 0.01 * tanh,
        }
        assert found == pytest.approx(expected)
        assert ties_score(prompts[::-1]) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("ref", "tanh"),
        [
            pytest.param((9, 4), 1, id="positive"),
            pytest.param((4, 4), 0, id="zero-over-zero"),
            pytest.param((4, 9), -1, id="negative"),
        ],
    )
    def test_without_spread_the_limit_counts(self, ref, tanh):
        assert ties_score([TiesPrompt("tied:1", (8, 8, 2), 2), TiesPrompt("ref:1", ref, 1)])["tanh"] == tanh

    def test_shares_are_over_numbers_with_both_prompts_and_accuracies_over_all(self):
        prompts = [
            TiesPrompt("tied:1", (9, 9, 2), 2),
            TiesPrompt("ref:1", (9, 2), 1),
            TiesPrompt("tied:2", (2, 2, 9), 2),
        ]
        found = ties_score(prompts)
        assert (found["tied accuracy"], found["margin over spread"]) == (0.5, 1)

    def test_a_prompt_with_an_unreadable_rating_is_worth_the_least(self):
        """The wrong answer's rating is missing: neither accurate nor ahead, and the limit of tanh is -1."""
        found = ties_score([TiesPrompt("tied:1", (9, 8, None), 2), TiesPrompt("ref:1", (9, 2), 1)])
        expected = {"tied accuracy": 0, "ref accuracy": 1, "margin over spread": 0, "lesser margin over spread": 0}
        assert found == {**expected, "tanh": -1, "overall": pytest.approx(0.3 - 0.01)}

    @pytest.mark.parametrize(
        "prompt",
        [
            pytest.param(TiesPrompt("other:1", (1, 2), 1), id="kind"),
            pytest.param(TiesPrompt("tied:1", (1, 2), 1), id="one-correct"),
            pytest.param(TiesPrompt("tied:1", (1, 2), 2), id="no-incorrect"),
            pytest.param(TiesPrompt("ref:1", (1, 2), 0), id="no-correct"),
            pytest.param(TiesPrompt("ref:1", (1, 2), 1), id="no-partner"),
        ],
    )
    def test_malformed(self, prompt):
        with pytest.raises(ValueError, match="Ties"):
            ties_score([prompt])


def rated_row(prompt, correct, incorrect, label="A"):
    """Records and pairs of a row of Ties whose answers have these ratings; None is one that cannot be read."""
    counts = len(correct), len(incorrect)
    pairs, records = [], []
    for i in range(max(counts)):
        places = i % counts[0], i % counts[1]
        rated = {"prompt": prompt, "answers": list(places), "counts": list(counts)}
        pair = make_pair(f"{prompt}-{i}", "Ties", label, f"Ties-{prompt.partition(':')[2]}", rated=rated)
        scores = [correct[places[0]], incorrect[places[1]]][:: 1 if label == "A" else -1]
        for order, shown in (("AB", scores), ("BA", scores[::-1])):
            said = None if shown[0] is None else tuple(s for s in shown if s is not None)
            records.append(replace(judged(pair, None)[0], order=order, scores=said))
        pairs.append(pair)
    return pairs, records


class TestTiesFromPairs:
    ROWS = (
        rated_row("tied:1", (9, 7), (6, 2)),
        rated_row("ref:1", (8,), (5,)),
        rated_row("tied:2", (8, 8), (9,), label="B"),
        rated_row("ref:2", (9,), (4, 3, 2), label="B"),
    )

    def test_ratings_of_answers_make_the_formula(self):
        prompts = [
            TiesPrompt("tied:1", (9, 7, 6, 2), 2),
            TiesPrompt("ref:1", (8, 5), 1),
            TiesPrompt("tied:2", (8, 8, 9), 2),
            TiesPrompt("ref:2", (9, 4, 3, 2), 1),
        ]
        expected = ties_score(prompts)
        found = values(score_rows(*self.ROWS))
        assert found.pop("Ties") == pytest.approx(expected.pop("overall"))
        assert found == pytest.approx({f"Ties/{part}": worth for part, worth in expected.items()})

    def test_beside_the_other_subsets(self):
        """Ties takes no part in their figures, and they take none in Ties."""
        row = best_of_row(0, "Math", *(TestRewardBench2.RIGHT,) * 3)
        alone, together = score_rows(row), score_rows(*self.ROWS, row)
        assert {name: together[name] for name in alone} == alone
        assert {**together} == {**alone, **score_rows(*self.ROWS)}

    def test_an_unreadable_rating_is_said(self):
        found = score_rows(rated_row("tied:1", (9, 7), (None, 2)), rated_row("ref:1", (8,), (5,)))
        assert (found["Ties/tied accuracy"].value, found["Ties/ref accuracy"].value) == (0, 1)
        assert found["Ties"].note.endswith("; 1 prompts with a rating that could not be read are worth the least")

    def test_a_row_of_which_an_answer_was_not_shown_is_left_out_and_said(self):
        cut = tuple(part[:2] for part in rated_row("tied:3", (2, 2, 2), (9,)))
        found = score_rows(*self.ROWS, cut)
        assert found["Ties"].value == score_rows(*self.ROWS)["Ties"].value
        assert found["Ties"].note.endswith("; 1 incomplete rows left out")
        assert score_rows(cut) == {}

    def test_the_interval_resamples_numbers(self):
        found = score_rows(*self.ROWS, resamples=200)["Ties"]
        assert found.low < found.value < found.high
        assert score_rows(*self.ROWS[:2], resamples=200)["Ties"].low is None


# -------------------------------------------------------------------------------------------------------------- PandaLM


class TestPandaLM:
    # (label, verdict): how often. Rows A, B, tie of the confusion matrix: (3, 1, 0), (1, 2, 1), (1, 0, 1).
    COUNTS = np.array([3, 1, 0, 1, 2, 1, 1, 0, 1.0])

    def test_macro_figures(self):
        """Precision 3/5, 2/3, 1/2; recall 3/4, 2/4, 1/2; F1 6/9, 4/7, 2/4."""
        expected = [np.mean([3 / 5, 2 / 3, 1 / 2]), np.mean([3 / 4, 1 / 2, 1 / 2]), np.mean([6 / 9, 4 / 7, 1 / 2])]
        assert macro_figures(self.COUNTS) == pytest.approx(expected)
        assert macro_figures(np.stack([self.COUNTS, 2 * self.COUNTS])) == pytest.approx(np.stack([expected] * 2))

    def test_as_scikit_learn_computes_them(self):
        metrics = pytest.importorskip("sklearn.metrics")
        names = ("A", "B", "tie")
        pairs = [(a, b) for (a, b), n in zip(product(names, names), self.COUNTS, strict=True) for _ in range(int(n))]
        labels, verdicts = zip(*pairs, strict=True)
        expected = metrics.precision_recall_fscore_support(labels, verdicts, average="macro", labels=names)[:3]
        assert macro_figures(self.COUNTS) == pytest.approx(expected)

    def test_a_class_that_nobody_names_counts_zero(self):
        assert macro_figures(np.array([4, 0, 0, 0, 4, 0, 2, 0, 0.0]))[1] == pytest.approx(2 / 3)

    def test_no_verdict_is_a_tie_upstream_and_wrong_strictly(self):
        cases = [(make_pair("t", label="tie"), None), (make_pair("a"), "A"), (make_pair("b", label="B"), None)]
        found = score("pandalm", cases)
        assert found["accuracy"].value == pytest.approx(2 / 3)
        assert found["accuracy (strict)"].value == pytest.approx(1 / 3)
        # A 1 of 1; B recall 0; tie recall 1, precision 1 of 2.
        assert found["macro recall"].value == pytest.approx(2 / 3)
        assert found["macro precision"].value == pytest.approx((1 + 0 + 1 / 2) / 3)

    def test_the_macro_figures_have_an_interval(self):
        cases = [(make_pair(f"{i}", label="AB"[i % 2]), "A") for i in range(20)]
        found = score("pandalm", cases, resamples=200)["macro F1"]
        assert found.low < found.value < found.high


# ----------------------------------------------------------------------------------------------------------- arithmetic


def test_weighted_mean():
    tree = ((1.0, "a"), (1.0, ((3.0, "b"), (1.0, "c"))))
    assert weighted_mean(tree, {"a": 0.5, "b": 1.0, "c": 0.0}) == pytest.approx((0.5 + 0.75) / 2)
    assert weighted_mean(tree, {"a": 0.5, "c": 0.0}) == pytest.approx(0.25)  # b is left out of its own mean alone
    assert np.isnan(weighted_mean(tree, {}))
    means = {"a": np.array([0.0, np.nan]), "b": np.array([1.0, 1.0]), "c": np.array([1.0, np.nan])}
    assert weighted_mean(tree, means) == pytest.approx([0.5, 1.0])


def test_the_order_of_records_does_not_matter():
    cases = several("Natural", 5, 3) + several("Manual", 4, 1)
    forth, back = (score("llmbar", c, resamples=100) for c in (cases, cases[::-1]))
    assert forth == back


def test_one_cluster_has_no_interval():
    found = score("llmbar", several("Natural", 1, 1), resamples=100)["Natural"]
    assert (found.low, found.high) == (None, None)


def test_the_interval_of_a_mean_of_subsets_is_not_that_of_the_pool():
    """One subset of 2 uncertain pairs weighs as much as one of 200 sure ones."""
    cases = several("Natural", 200, 200) + several("Manual", 2, 1)
    found = score("llmbar", cases, resamples=500)["average"]
    assert found.value == pytest.approx(0.75)
    assert found.high - found.low > 0.3
