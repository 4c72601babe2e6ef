"""The verb end to end with a scripted judge: what is written, what is refused, and what an interruption costs."""

import dataclasses
import hashlib
import json
import logging
import math
import re
from pathlib import Path

import pytest
import yaml

import nlhf.evaluate
from nlhf.config import ClassSpec
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import ExactScorer, LexicalScorer
from nlhf.errors import UserError
from nlhf.evaluate import evaluate
from nlhf.evaluation.measure import evaluate_judge, judge_and_score
from nlhf.evaluation.results import Evaluation, compare_run_decisions, compare_runs, load_run
from nlhf.files import write_jsonl
from nlhf.formats import get_format
from nlhf.generation import SamplingConfig
from nlhf.judge import Judge, Reply
from nlhf.ledger import read_ledger
from nlhf.models import ModelConfig
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.report import report
from nlhf.runs import alone
from nlhf.sources import DataConfig

MODEL = ModelConfig("random:qwen3-tiny")
SAMPLING = SamplingConfig(batch_size=1)  # chunks of four prompts


def make_pairs(n: int = 10) -> list[Pair]:
    """The better response says "splendid"; it stands in A in the even pairs."""
    pairs = []
    for i in range(n):
        a, b = ("splendid", "dismal") if i % 2 == 0 else ("dismal", "splendid")
        label = "A" if i % 2 == 0 else "B"
        critique = HumanCritique(**{f"strengths_{label.lower()}": "it is good"})
        pairs.append(
            Pair(
                f"p{i}",
                [Turn("user", f"question {i} 你好")],
                f"{a} {i}",
                f"{b} {i}",
                label=label,
                critiques=[critique],
                subset="even" if i % 2 == 0 else "odd",
            )
        )
    return pairs


class Scripted:
    """A judge that finds "splendid", but by question 3 says nothing, by 4 is cut off, and by 5 always says A."""

    def __init__(self, fail_after: int | None = None):
        self.calls: list[str] = []
        self.fail_after = fail_after

    def generate(self, prompts, samples=1, progress=None):
        if self.fail_after is not None and len(self.calls) >= self.fail_after:
            raise KeyboardInterrupt
        self.calls += [p[0]["content"] for p in prompts]
        if progress:
            progress(len(prompts))
        return [[self.reply(p[0]["content"], k) for k in range(samples)] for p in prompts]

    def reply(self, prompt: str, k: int) -> Reply:
        side = "A" if prompt.index("splendid") < prompt.index("dismal") else "B"
        if "question 3 " in prompt:
            return Reply("I cannot say.", False, 4)
        if "question 4 " in prompt:
            return Reply(f"<critics>\n{side} praise: it is", True, 9)
        side = "A" if "question 5 " in prompt else side
        reason = "it is good" if "question 6 " not in prompt else "it is long"
        return Reply(f"<critics>\n{side} praise: {reason}\n</critics>\n<choice>[[{side}]]</choice>", False, 10 + k)


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Arguments of `evaluate` for ten pairs and the scripted judge, which is returned with them."""
    write_jsonl(tmp_path / "pairs.jsonl", (p.to_dict() for p in make_pairs()))
    generator = Scripted()
    monkeypatch.setattr(nlhf.evaluate, "make_generator", lambda *_: generator)
    monkeypatch.setattr("nlhf.models.model_hash", lambda name, *_: f"hash of {name}")
    arguments = {
        "model": MODEL,
        "data": DataConfig("jsonl", path=str(tmp_path / "pairs.jsonl")),
        "out": str(tmp_path / "run"),
        "sampling": SAMPLING,
        "scorer": ClassSpec("exact"),
        "resamples": 50,
        "ledger": str(tmp_path / "ledger.jsonl"),
    }
    return arguments, generator


def test_a_run_writes_its_folder(setup, tmp_path):
    arguments, _ = setup
    evaluation = evaluate(**arguments)
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        "config.yaml",
        "environment.json",
        "manifest.json",
        "pairs.jsonl",
        "judgements.jsonl",
        "timing.jsonl",
        "metrics.json",
        "report.md",
        "report.html",
    }
    counts = {name: (m.k, m.n) for name, m in evaluation.metrics.items()}
    assert counts["parse_rate"] == (16, 20)
    assert counts["accuracy"] == (15, 20)
    assert counts["accuracy_parsed"] == (15, 16)
    assert counts["position_consistency"] == (7, 8)
    assert counts["position_excluded"] == (2, 10)
    assert counts["truncation_rate"] == (2, 20)
    assert counts["wrong_critique_rate"] == (2, 15)
    assert counts["critique_f1"] == (13, 16)
    assert counts["scorer_failures"] == (0, 20)
    assert set(evaluation.subsets) == {"even", "odd"}


def test_a_line_of_judgements_says_all_about_a_judgement(setup, tmp_path):
    arguments, _ = setup
    evaluate(**arguments)
    text = (tmp_path / "run" / "judgements.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    row = rows[3]  # pair 1, exchanged: the better response is shown first
    assert (row["pair_id"], row["order"], row["sample"], row["cluster"], row["subset"]) == ("p1", "BA", 0, "p1", "odd")
    assert (row["label"], row["verdict"], row["winner"]) == ("B", "A", "B")
    assert row["critique"] == "A praise: it is good"
    assert row["match"]["f1"] == 1
    assert row["match"]["reference"] == [{"side": "A", "polarity": 1, "text": "it is good"}]
    assert row["reply"].endswith("<choice>[[A]]</choice>")
    assert (row["tokens"], row["truncated"], len(row["prompt_hash"])) == (10, False, 16)
    assert [(r["pair_id"], r["order"]) for r in rows[:3]] == [("p0", "AB"), ("p0", "BA"), ("p1", "AB")]


def test_all_figures_come_back_from_the_judgements(setup, tmp_path):
    arguments, _ = setup
    evaluation = evaluate(**arguments)
    run = load_run(tmp_path / "run")
    assert run.evaluation == evaluation
    assert run.name == "run"
    assert run.pairs["p0"] == make_pairs()[0]
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert written["metrics"]["accuracy"] == vars(evaluation.metrics["accuracy"])
    assert written["subsets"]["odd"]["accuracy"]["n"] == 10


def test_the_ledger_has_the_origin(setup, tmp_path):
    arguments, _ = setup
    evaluate(**arguments, run_name="mine")
    (row,) = read_ledger(tmp_path / "ledger.jsonl", run_name="mine")
    assert row["model"] == MODEL.name
    assert row["model_hash"] == f"hash of {MODEL.name}"
    assert row["data_n"] == 10
    assert row["n"] == 20
    assert row["orders"] == ["AB", "BA"]
    assert row["scorer"] == {"class_path": "exact", "init_args": {}}
    assert row["metrics"]["accuracy"]["k"] == 15
    assert row["data_hash"]


def test_a_folder_in_use_is_refused_before_anything_is_judged(setup):
    arguments, generator = setup
    evaluate(**arguments)
    judged = len(generator.calls)
    with pytest.raises(UserError, match="already holds a run; choose another"):
        evaluate(**arguments)
    assert len(generator.calls) == judged


def test_a_mistake_leaves_no_folder_behind(setup, tmp_path):
    arguments, _ = setup
    with pytest.raises(UserError, match="exct"):
        evaluate(**arguments | {"scorer": ClassSpec("exct")})
    with pytest.raises(UserError, match="unknown judge format"):
        evaluate(**arguments | {"format": "rm_nhlf"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "samples must lie between 1 and 10,000"),
        ({"samples": 2}, r"samples is 2 but sampling\.temperature is 0"),
        ({"wrong_critique_threshold": 0.0}, "wrong_critique_threshold"),
        ({"resamples": -1}, "resamples"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_are_checked(setup, change, message):
    arguments, _ = setup
    with pytest.raises(UserError, match=message):
        evaluate(**arguments | change)


@pytest.mark.parametrize(("orders", "expected"), [("AB", ["AB"]), ("BA", ["BA"])])
def test_one_order(setup, orders, expected):
    arguments, _ = setup
    evaluation = evaluate(**arguments, orders=orders)
    assert sorted({r.order for r in evaluation.records}) == expected
    assert evaluation.metrics["position_consistency"].n == 0


def test_several_samples(setup):
    arguments, _ = setup
    evaluation = evaluate(**arguments | {"sampling": SamplingConfig(batch_size=1, temperature=1.0)}, samples=3)
    assert len(evaluation.records) == 60
    assert [r.sample for r in evaluation.records[:3]] == [0, 1, 2]


def test_truncation_is_warned_of_with_the_setting(setup, caplog):
    arguments, _ = setup
    with caplog.at_level(logging.WARNING):
        evaluate(**arguments)
    assert "max_new_tokens" not in caplog.text  # 10 % is below the limit
    assert "4 of 20 replies have no verdict" in caplog.text
    with caplog.at_level(logging.WARNING):
        short = arguments["data"].path
        data = DataConfig("jsonl", path=short, skip=4, limit=2)
        evaluate(**arguments | {"data": data, "out": arguments["out"] + "-2"})
    assert "50 % of the replies (2/4) were cut off" in caplog.text
    assert "raise sampling.max_new_tokens" in caplog.text


# Resuming


def contents(folder: Path) -> dict[str, str]:
    return {
        name: (folder / name).read_text(encoding="utf-8") for name in ("judgements.jsonl", "metrics.json", "report.md")
    }


@pytest.mark.parametrize("torn", ["", '{"pair_id": "p2", "ord'], ids=["whole lines", "torn line"])
@pytest.mark.parametrize("kept", [0, 1, 3, 4, 19, 20])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(setup, tmp_path, kept, torn):
    arguments, generator = setup
    evaluate(**arguments | {"out": str(tmp_path / "whole" / "run")})
    evaluate(**arguments)
    folder = tmp_path / "run"
    lines = (folder / "judgements.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "judgements.jsonl").write_text("".join(lines[:kept]) + torn, encoding="utf-8")
    for name in ("metrics.json", "report.md", "report.html"):
        (folder / name).unlink()
    generator.calls.clear()
    evaluate(**arguments, resume=True)
    assert len(generator.calls) == 20 - kept
    after, whole = contents(folder), contents(tmp_path / "whole" / "run")
    for name in ("judgements.jsonl", "metrics.json"):
        assert after[name] == whole[name]


def test_two_processes_do_not_work_on_one_run(setup, tmp_path):
    arguments, generator = setup
    evaluate(**arguments)
    (tmp_path / "run" / "judgements.jsonl").unlink()
    generator.calls.clear()
    with alone(tmp_path / "run"), pytest.raises(UserError, match="run: another process is at work on this run"):
        evaluate(**arguments, resume=True)
    assert not generator.calls
    evaluate(**arguments, resume=True)
    assert len(generator.calls) == 20


def test_a_kill_costs_one_chunk(setup, tmp_path, monkeypatch):
    arguments, _ = setup
    dying = Scripted(fail_after=8)
    monkeypatch.setattr(nlhf.evaluate, "make_generator", lambda *_: dying)
    with pytest.raises(KeyboardInterrupt):
        evaluate(**arguments)
    assert len((tmp_path / "run" / "judgements.jsonl").read_text().splitlines()) == 8
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(UserError, match="did not finish"):
        load_run(tmp_path / "run")


def test_resume_refuses_another_configuration_and_names_it(setup):
    arguments, _ = setup
    evaluate(**arguments)
    changed = arguments | {"sampling": SamplingConfig(batch_size=1, max_new_tokens=7), "scorer": ClassSpec("lexical")}
    with pytest.raises(UserError) as caught:
        evaluate(**changed, resume=True)
    assert "sampling.max_new_tokens: 1024 -> 7" in str(caught.value)
    assert "scorer.class_path: 'exact' -> 'lexical'" in str(caught.value)


def test_resume_accepts_another_batch_size(setup):
    arguments, _ = setup
    first = evaluate(**arguments)
    assert evaluate(**arguments | {"sampling": SamplingConfig(batch_size=5)}, resume=True) == first


def test_resuming_a_finished_run_adds_no_row_to_the_ledger(setup, tmp_path):
    arguments, generator = setup
    evaluate(**arguments)
    generator.calls.clear()
    evaluate(**arguments, resume=True)
    assert not generator.calls
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 1


def test_resume_refuses_changed_data(setup, tmp_path):
    arguments, _ = setup
    evaluate(**arguments)
    write_jsonl(tmp_path / "pairs.jsonl", (p.to_dict() for p in make_pairs(11)))
    with pytest.raises(UserError, match="the data changed since it began"):
        evaluate(**arguments, resume=True)


def test_the_probe_stands_apart(setup, tmp_path):
    """Its judgements have a file of their own, its figures a place of their own, and no other figure moves."""
    arguments, generator = setup
    plain = evaluate(**arguments | {"out": str(tmp_path / "plain")})
    generator.reply = lambda prompt, k: Reply("<critics>\nA praise: x\n</critics><choice>[[A]]</choice>", False, 9)
    with_probe = evaluate(**arguments | {"out": str(tmp_path / "plain")}, resume=True)
    assert with_probe == plain
    probed = evaluate(**arguments, probe=True)
    assert (probed.metrics["accuracy"].k, probed.metrics["accuracy"].n) == (10, 20)  # always A: half are right
    assert set(probed.probe.subsets) == {"empty", "colon", "solution"}
    assert all(found["accuracy"].n == 20 for found in probed.probe.subsets.values())
    assert probed.probe.subsets["empty"]["accuracy"].value == 0.5
    run = load_run(tmp_path / "run")
    assert run.evaluation == probed
    assert len(run.records) == 20
    assert "Probe: empty" in (tmp_path / "run" / "report.md").read_text()
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert written["probe"]["subsets"]["colon"]["accuracy"]["n"] == 20
    (tmp_path / "run" / "probe.jsonl").write_text("")
    with pytest.raises(UserError, match=r"probe\.jsonl does not hold one judgement for each pair"):
        load_run(tmp_path / "run")


def test_the_time_is_kept_apart_from_the_judgements(setup, tmp_path):
    arguments, _ = setup
    evaluate(**arguments)
    run = load_run(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert sum(row["judgements"] for row in rows) == 20
    assert run.seconds == pytest.approx(sum(row["seconds"] for row in rows))
    report([str(tmp_path / "run")], str(tmp_path / "again"))


class Sure(Scripted):
    """Also says how likely its verdicts are: nine to one for what it finds better, whichever stands first."""

    def choice_log_probs(self, prompts, prefixes, continuations, progress=None):
        if progress:
            progress(len(prompts))
        sides = ["A" if p[0]["content"].index("splendid") < p[0]["content"].index("dismal") else "B" for p in prompts]
        return [[math.log(0.9 if side in text else 0.1) for text in continuations] for side in sides]


def test_by_probability(setup, tmp_path, monkeypatch):
    arguments, _ = setup
    monkeypatch.setattr(nlhf.evaluate, "make_generator", lambda *_: Sure())
    evaluation = evaluate(**arguments, mode="probability")
    assert evaluation.metrics["accuracy"].value == 1
    assert evaluation.metrics["brier"].value == pytest.approx(0.01)
    assert evaluation.metrics["calibration_error"].value == pytest.approx(0.1)
    [point] = evaluation.reliability
    assert (point.n, point.confidence, point.accuracy) == (10, pytest.approx(0.9), 1)
    assert load_run(tmp_path / "run").evaluation == evaluation
    row = json.loads((tmp_path / "run" / "judgements.jsonl").read_text().splitlines()[1])
    assert (row["order"], row["verdict"], row["probability"]) == ("BA", "B", pytest.approx(0.1))


def test_a_generator_without_probabilities_is_refused_at_the_start(setup, tmp_path):
    arguments, _ = setup
    with pytest.raises(UserError, match="gives no probabilities"):
        evaluate(**arguments, mode="probability")
    assert not (tmp_path / "run").exists()


def test_runs_that_count_votes_differently_are_not_compared(setup, tmp_path):
    arguments, _ = setup
    evaluate(**arguments)
    run = load_run(tmp_path / "run")
    other = dataclasses.replace(run, config=run.config | {"vote": "mean_strength"})
    for compare in (compare_runs, compare_run_decisions):
        with pytest.raises(UserError, match=r"differ in vote \(majority and mean_strength\)"):
            compare(run, other)


# The core


class Rating(Scripted):
    """Rates the response it is shown: splendid 9, else 4; by question 3 it does not say."""

    def reply(self, prompt: str, k: int) -> Reply:
        rating = "no number" if "question 3 " in prompt else 9 if "splendid" in prompt else 4
        return Reply(f"It is what it is.\nRating: {rating}", False, 7)


@pytest.fixture
def rating(setup, monkeypatch):
    arguments, _ = setup
    generator = Rating()
    monkeypatch.setattr(nlhf.evaluate, "make_generator", lambda *_: generator)
    return arguments | {"format": "rewardbench2_ratings", "scorer": None}, generator


def test_a_format_that_rates_one_response_judges_pairs(rating):
    arguments, _ = rating
    evaluation = evaluate(**arguments)
    counts = {name: (m.k, m.n) for name, m in evaluation.metrics.items()}
    assert counts["parse_rate"] == counts["accuracy"] == (18, 20)
    assert counts["position_consistency"] == (9, 9)  # by construction
    assert [record.scores for record in evaluation.records[:3]] == [(9, 4), (4, 9), (4, 9)]


def test_a_pair_whose_ratings_were_torn_apart_is_rated_anew(rating, tmp_path):
    """A kill between the lines of both orders: a lone rating would have nothing to be compared with."""
    arguments, generator = rating
    first = evaluate(**arguments)
    lines = (tmp_path / "run" / "judgements.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "run" / "judgements.jsonl").write_text("".join(lines[:7]), encoding="utf-8")
    generator.calls.clear()
    assert evaluate(**arguments, resume=True) == first
    assert len(generator.calls) == 2 * (10 - 3)  # three pairs were whole


def test_a_format_that_rates_one_response_needs_both_orders(rating, tmp_path):
    arguments, generator = rating
    with pytest.raises(UserError, match="set orders to both"):
        evaluate(**arguments | {"orders": "AB"})
    assert not (tmp_path / "run").exists()
    assert generator.calls == []


def test_the_ties_subset_is_rated_and_scored(rating, tmp_path):
    arguments, _ = rating
    row = {"prompt": "question", "subset": "Ties"}
    rows = [
        row | {"id": "tied:1", "chosen": ["splendid 1", "splendid 2"], "rejected": ["bad 1", "bad 2", "bad 3"]},
        row | {"id": "ref:1", "chosen": ["splendid 3"], "rejected": ["bad 4"]},
    ]
    write_jsonl(tmp_path / "test.jsonl", rows)
    arguments["data"] = DataConfig("rewardbench2", "test", str(tmp_path / "test.jsonl"), options={"ties": True})
    found = {score.name: score.value for score in evaluate(**arguments).scores}
    assert found["Ties"] == pytest.approx(1.01)  # right by 5 without spread
    assert load_run(tmp_path / "run").evaluation.scores[0].name == "Ties"
    with pytest.raises(UserError, match=r"data.options.ties.*'rm_nlhf' compares two.*rewardbench2_ratings"):
        evaluate(**arguments | {"format": "rm_nlhf", "out": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()


def test_a_preset_in_python_sets_what_is_not_set(setup, tmp_path, monkeypatch):
    arguments, generator = setup
    made = []
    monkeypatch.setattr(nlhf.evaluate, "make_generator", lambda *a: made.append(a) or generator)
    arguments.pop("sampling")
    evaluate(**arguments, preset="rm-nlhf-qwen-7b")
    evaluate(**arguments | {"out": str(tmp_path / "own")}, preset="her-rm-32b", format="rm_nlhf", sampling=SAMPLING)
    assert [(sampling.temperature, sampling.max_new_tokens) for _, sampling, _ in made] == [(0.6, 8192), (0.0, 1024)]
    configs = [load_run(tmp_path / name).config for name in ("run", "own")]
    assert [config["format"] for config in configs] == ["rm_nlhf", "rm_nlhf"]
    assert [config["sampling"]["temperature"] for config in configs] == [0.6, 0.0]
    with pytest.raises(UserError, match="unknown preset"):
        evaluate(**arguments | {"out": str(tmp_path / "none")}, preset="rm-nlhf")


class FailingScorer(ExactScorer):
    """Fails on every critique the first time."""

    def __init__(self):
        super().__init__()
        self.busy = True

    def score(self, critiques, pairs):
        matches = super().score(critiques, pairs)
        return [CritiqueMatch(0, 0, 0, failure="busy") for _ in matches] if self.busy else matches


def judge() -> Judge:
    return Judge(get_format("rm_nlhf"), Scripted())


def test_a_failed_score_is_no_score_and_is_made_good_later():
    scorer, pairs = FailingScorer(), make_pairs(2)
    failed = evaluate_judge(judge(), pairs, scorer=scorer, resamples=0)
    assert (failed.metrics["scorer_failures"].k, failed.metrics["critique_f1"].n) == (4, 0)
    scorer.busy = False
    records = judge_and_score(judge(), pairs, scorer=scorer, done=failed.records)
    again = Evaluation.of(records, resamples=0)
    assert (again.metrics["scorer_failures"].k, again.metrics["critique_f1"].k) == (0, 4)


def test_without_a_scorer_there_are_no_critique_figures():
    evaluation = evaluate_judge(judge(), make_pairs(2), resamples=0)
    assert evaluation.metrics["critique_f1"].n == evaluation.metrics["scorer_failures"].n == 0
    assert evaluation.metrics["accuracy"].value == 1


def test_pairs_without_a_human_critique_are_not_scored():
    pairs = [*make_pairs(2), Pair("x", [Turn("user", "?")], "splendid", "dismal", label="A")]
    evaluation = evaluate_judge(judge(), pairs, scorer=LexicalScorer(), resamples=0)
    assert evaluation.metrics["critique_f1"].n == 4


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
def test_chunks_do_not_matter(chunk_size):
    whole = judge_and_score(judge(), make_pairs(), scorer=ExactScorer())
    assert judge_and_score(judge(), make_pairs(), scorer=ExactScorer(), chunk_size=chunk_size) == whole


# The verb `report`


def test_runs_are_compared_with_the_baseline(setup, tmp_path, capsys):
    arguments, _ = setup
    evaluate(**arguments)
    evaluate(**arguments | {"out": str(tmp_path / "other")})
    report([str(tmp_path / "run"), str(tmp_path / "other")], str(tmp_path / "both"), baseline=str(tmp_path / "other"))
    assert capsys.readouterr().out.endswith(f"report: {tmp_path / 'both' / 'report.html'}\n")
    text = (tmp_path / "both" / "report.md").read_text()
    assert "Differences from other" in text
    assert "| Accuracy | run | +0.0 points [+0.0, +0.0] | equal |" in text
    assert "| Pairs decided rightly (McNemar's exact test) | run | 0 only here, 0 only there; p = 1 | equal |" in text
    assert "Differences from" in (tmp_path / "both" / "report.html").read_text()


def test_runs_on_other_pairs_are_not_compared(setup, tmp_path):
    arguments, _ = setup
    evaluate(**arguments)
    data = DataConfig("jsonl", path=arguments["data"].path, limit=4)
    evaluate(**arguments | {"out": str(tmp_path / "few"), "data": data})
    with pytest.raises(UserError, match="6 differ"):
        report([str(tmp_path / "run"), str(tmp_path / "few")], str(tmp_path / "both"))


def test_report_needs_evaluations(tmp_path):
    with pytest.raises(UserError, match="at least one"):
        report([], str(tmp_path / "out"))
    with pytest.raises(UserError, match="holds no run"):
        report([str(tmp_path)], str(tmp_path / "out"))
    (tmp_path / "config.yaml").write_text("model: x\n")
    with pytest.raises(UserError, match="another kind of run"):
        report([str(tmp_path)], str(tmp_path / "out"))


# With a real model


def test_an_evaluation_does_not_depend_on_the_batch(tmp_path, monkeypatch):
    """Random weights never end a reply, so the text of every reply is compared, not only its verdict."""
    monkeypatch.setenv("NLHF_CACHE", str(tmp_path / "cache"))
    write_jsonl(tmp_path / "pairs.jsonl", (p.to_dict() for p in make_pairs(3)))
    found = []
    for size in (1, 4):
        evaluation = evaluate(
            MODEL,
            DataConfig("jsonl", path=str(tmp_path / "pairs.jsonl")),
            str(tmp_path / f"run{size}"),
            sampling=SamplingConfig(max_new_tokens=12, temperature=0.7, seed=1, batch_size=size),
            samples=2,
            resamples=0,
            ledger=None,
        )
        found.append([(r.key, r.reply, r.tokens, r.truncated, r.prompt_hash) for r in evaluation.records])
    assert found[0] == found[1]
    assert len({reply for _, reply, *_ in found[0]}) > 6  # samples differ


def test_replies_are_hashed_with_their_prompt(setup):
    arguments, generator = setup
    evaluation = evaluate(**arguments)
    messages = [{"role": "user", "content": generator.calls[0]}]
    expected = hashlib.sha256(json.dumps(messages, ensure_ascii=False).encode()).hexdigest()[:16]
    assert evaluation.records[0].prompt_hash == expected


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda lines: lines[:-1], id="lost"),
        pytest.param(lambda lines: [], id="all-lost"),
        pytest.param(lambda lines: [*lines[:-1], lines[-1][:-30]], id="torn"),
        pytest.param(lambda lines: [*lines, lines[0]], id="twice"),
        pytest.param(lambda lines: [lines[0].replace('"p0"', '"nobody"'), *lines[1:]], id="foreign"),
    ],
)
def test_a_finished_run_with_other_judgements_is_not_reported(setup, tmp_path, change):
    arguments, _ = setup
    evaluate(**arguments)
    path = tmp_path / "run" / "judgements.jsonl"
    path.write_text("".join(f"{line}\n" for line in change(path.read_text(encoding="utf-8").splitlines())))
    with pytest.raises(UserError, match="does not hold one judgement for each pair"):
        load_run(tmp_path / "run")
    evaluate(**{**arguments, "resume": True})
    assert len(load_run(tmp_path / "run").records) == 20


# One field of a run's file as somebody may have left it, and what the message says.
EDITED = {
    "a verdict of another kind": ("judgements.jsonl", "verdict", "left", "judgements.jsonl:1: field 'verdict' must be"),
    "an order of another kind": ("judgements.jsonl", "order", "BB", "judgements.jsonl:1: field 'order' must be"),
    "a reply that is none": ("judgements.jsonl", "reply", None, "judgements.jsonl:1: field 'reply' must be str"),
    "a length in words": ("judgements.jsonl", "length_a", "long", "judgements.jsonl:1: field 'length_a' must be int"),
    "scores in words": ("judgements.jsonl", "scores", ["a", "b"], "judgements.jsonl:1: field 'scores' must be"),
    "a flag that is a number": ("judgements.jsonl", "truncated", 0, "jsonl:1: field 'truncated' must be bool"),
    "a match without its F1": ("judgements.jsonl", "match", {"matched": []}, "1: match: field 'precision' must be"),
    "seconds in words": ("timing.jsonl", "seconds", "long", "timing.jsonl:1: field 'seconds' must be float"),
    "a manifest without data": ("manifest.json", "data", None, "manifest.json: field 'data' must be dict"),
    "a judge that is a number": ("manifest.json", "judge", 3, "manifest.json: field 'judge.prompt_hash' must be str"),
    "a seed in words": ("config.yaml", "seed", "x", "config.yaml: field 'seed' must be int"),
    "a seed below zero": ("config.yaml", "seed", -1, "seed must lie between 0 and"),
    "orders of another kind": ("config.yaml", "orders", "all", "config.yaml: field 'orders' must be"),
    "a model that is a name": ("config.yaml", "model", "m", "config.yaml: field 'model.name' must be str"),
    "no name": ("config.yaml", "run_name", None, "config.yaml: field 'run_name' must be str"),
}


@pytest.mark.parametrize(("file", "name", "value", "message"), EDITED.values(), ids=EDITED)
def test_a_run_edited_by_hand_is_refused_and_the_field_is_named(setup, tmp_path, file, name, value, message):
    arguments, _ = setup
    evaluate(**arguments)
    path = tmp_path / "run" / file
    first, *others = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    row = yaml.safe_load(first) | {name: value}  # JSON is YAML too
    path.write_text("\n".join([json.dumps(row), *others]) + "\n")
    with pytest.raises(UserError, match=re.escape(message)):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("line", ["[1]", "null", "3"])
def test_a_line_that_is_no_judgement_is_named(setup, tmp_path, line):
    arguments, _ = setup
    evaluate(**arguments)
    (tmp_path / "run" / "judgements.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"judgements.jsonl:1: not a judgement"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ledger": "."}, "it is a folder"),
        ({"seed": -1}, "seed must lie between"),
        ({"scorer": ClassSpec("nlhf.pairs.HumanCritique")}, "has no method score"),
    ],
    ids=["ledger", "seed", "scorer"],
)
def test_what_would_fail_in_the_end_fails_at_the_start(setup, tmp_path, change, message):
    arguments, generator = setup
    with pytest.raises(UserError, match=message):
        evaluate(**{**arguments, **change})
    assert not (tmp_path / "run").exists()
    assert not generator.calls


def test_one_prompt_that_is_too_long_is_refused_before_anything_is_judged(tmp_path, tiny_model):
    rows = [p.to_dict() for p in make_pairs()]
    rows[-1]["response_a"] = "long " * 1000
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(UserError, match="2 of 20 prompts are longer than"):
        evaluate(
            ModelConfig(tiny_model),
            DataConfig("jsonl", path=str(tmp_path / "pairs.jsonl")),
            out=str(tmp_path / "run"),
            sampling=SamplingConfig(max_new_tokens=4, max_prompt_tokens=4000),
            ledger=None,
        )
    assert not (tmp_path / "run").exists()
