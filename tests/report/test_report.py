"""The page shows what it was given as text, needs nothing from outside, and says how its figures were made."""

import base64
import dataclasses
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import nlhf.report
from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.evaluation.benchmarks import Score
from nlhf.evaluation.results import Evaluation, Run
from nlhf.pairs import HumanCritique
from nlhf.report import build_report
from nlhf.report.browser import MAX_CHARACTERS, script_json
from tests.report.runs import ATTACK, make_run

ASSETS = Path(nlhf.report.__file__).parents[1] / "assets" / "report"


class Outline(HTMLParser):
    """Tags with their attributes, the text of scripts, and all other text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts, self.text, self._in = [], "", ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in == "script":
            self.scripts.append(data)
        elif self._in != "style":
            self.text += data


def outline(*runs: Run) -> Outline:
    return Outline(build_report(runs).html)


def data(page: str) -> dict:
    """What the browser of judgements is given."""
    (found,) = (json.loads(text) for text in Outline(page).scripts if text.startswith("{"))
    return found


@pytest.mark.parametrize("runs", [1, 2], ids=["one run", "comparison"])
@pytest.mark.parametrize("scorer", [True, False], ids=["scored", "not scored"])
def test_no_text_becomes_markup(runs, scorer):
    def page(text):
        names = [f"run {k} {text}" for k in range(runs)]
        return build_report([make_run(name, text=text, scorer=scorer) for name in names]).html

    attacked, plain = Outline(page(ATTACK)), Outline(page("plain"))
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in plain.tags]
    assert attacked.scripts[1:] == plain.scripts[1:]
    assert len(plain.scripts) == 2
    assert not any(key.startswith("on") for _, attributes in attacked.tags for key in attributes)
    for what in ("run 0", "model", "split", "s0"):
        assert f"{what} {ATTACK}" in attacked.text, what
    shown = data(page(ATTACK))
    pair, judgement = shown["pairs"][0], shown["judgements"][0]
    assert pair["context"] == [[ATTACK, f"question {ATTACK}"]]
    assert pair["responses"] == [f"a {ATTACK}", f"b {ATTACK}"]
    assert judgement["reply"] == f"reply {ATTACK}"
    if scorer:
        assert judgement["generated"][0]["text"] == f"A praise: argument {ATTACK}"
    else:
        assert judgement["critique"] == f"critique {ATTACK}"


def test_the_policy_names_the_script_by_its_hash_and_allows_no_other():
    page = build_report([make_run()]).html
    (script,) = (text for text in Outline(page).scripts if not text.startswith("{"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for t, a in Outline(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.count("unsafe-inline") == 1  # of the style sheet


@pytest.mark.parametrize(
    "text",
    ["</script>", "<!--<script>", "\u2028\u2029", "\ud800", '\x00\x1b"\\', "评论 مرحبا 😀", "]]>&lt;", "\ud83d\ude00"],
    ids=["end", "comment", "line ends", "half a surrogate", "controls", "scripts", "entities", "surrogates"],
)
def test_data_within_a_script_comes_back_as_it_was(text):
    page = script_json({text: [text]})
    assert not set(page) & set("<>&\u2028\u2029")
    page.encode("utf-8")
    assert json.loads(page) == json.loads(json.dumps({text: [text]}))


def test_the_page_needs_nothing_from_outside():
    page = build_report([make_run(), make_run("second")]).html
    for tag, attributes in Outline(page).tags:
        assert tag not in ("link", "iframe", "object", "base", "image"), tag
        for name in ("src", "href", "xlink:href", "action", "poster", "srcset"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
    assert "@import" not in page
    assert "url(http" not in page
    assert "default-src 'none'" in page


def test_ids_are_unique():
    ids = [
        a["id"]
        for tag, a in outline(make_run(), make_run("second")).tags
        if tag not in ("path", "clippath") and "id" in a
    ]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "text",
    ["评论：回答更好", "مرحبا", "［［Ａ］］", "😀\u2028\x00\x0b", "\ud800"],
    ids=["CJK", "right to left", "full width", "controls", "half a surrogate"],
)
def test_any_script_can_be_shown(text):
    assert data(build_report([make_run(text=text)]).html)["judgements"][0]["reply"] == f"reply {text}"


def test_the_header_says_how_the_figures_were_made():
    text = " ".join(outline(make_run()).text.split())
    for part in (
        "jsonl, split split plain, 2 subsets",
        "4 pairs, 8 judgements a run",
        "both; 1 reply to each prompt",
        "every judgement counts once",
        "a pair labelled a tie is right only if the verdict is a tie; this format cannot say so, which concerns 0 of 8",
        "95 % percentile bootstrap, 20 resamples of 4 clusters",
        "exact (model plain)",
        "commit abc with local changes",
        "Parse rate",
    ):
        assert part in text, part
    assert "AB only" in outline(make_run(orders="AB")).text


def test_figures_stand_with_counts_and_intervals():
    page = build_report([make_run()])
    for text in (page.html, page.markdown):
        assert "50.0 % [50.0, 50.0] (4/8)" in text  # slot A always: right in one order of each pair
        assert "0.0 % [0.0, 0.0] (0/4)" in text  # and never consistent


def test_a_comparison_names_direction_and_baseline():
    good, bad = make_run("good"), make_run("bad", verdict=None)
    page = build_report([good, bad])
    assert "Differences from good" in page.html
    assert "| Accuracy | bad | -50.0 points [-50.0, -50.0] | worse |" in page.markdown
    assert "| Parse rate | good | +100.0 points [+100.0, +100.0] | better |" in build_report([bad, good]).markdown


def test_equal_names_are_told_apart_by_folder():
    first, second = make_run("x"), make_run("x")
    second = dataclasses.replace(second, folder=Path("runs/elsewhere"))
    assert "Differences from runs/x" in build_report([first, second]).markdown


def test_unequal_thresholds_are_not_compared():
    with pytest.raises(UserError, match="wrong_critique_threshold"):
        build_report([make_run(), make_run("b", wrong_critique_threshold=0.4)])


def test_truncation_is_warned_of():
    run = make_run()
    cut = [dataclasses.replace(r, truncated=True) for r in run.records]
    run = dataclasses.replace(run, evaluation=Evaluation.of(cut, resamples=0))
    for text in (build_report([run]).html, build_report([run]).markdown):
        assert "raise sampling.max_new_tokens" in text
    assert "max_new_tokens." not in build_report([make_run()]).html


def test_a_low_parse_rate_is_warned_of():
    run = make_run(n=10)
    silent = [dataclasses.replace(r, verdict=None) if i < 3 else r for i, r in enumerate(run.records)]
    run = dataclasses.replace(run, evaluation=Evaluation.of(silent, resamples=0))
    assert "only 85.0 % (17/20) of the replies have a verdict" in build_report([run]).markdown
    assert "have a verdict, and" not in build_report([make_run()]).markdown


@pytest.mark.parametrize(
    ("judge", "meta", "warned"),
    [
        ("Qwen/Qwen3-4B", {"chosen_model": "qwen2.5-72b", "rejected_model": "gpt-4o"}, "named Qwen in 4 of 4 pairs"),
        ("meta-llama/Llama-3", {"models": "llama-7b_vicuna-7b"}, "named llama in 4 of 4 pairs"),
        ("Qwen/Qwen3-4B", {"chosen_model": "gpt-4o", "note": "qwen"}, None),
        ("runs/dolphin", {"chosen_model": "phi-3"}, None),
        ("Qwen/Qwen3-4B", {}, None),
    ],
    ids=["one author", "both in one field", "another family", "part of a word", "unknown"],
)
def test_a_judge_of_its_own_kind_is_warned_of(judge, meta, warned):
    run = make_run(model={"name": judge})
    run = dataclasses.replace(run, pairs={i: dataclasses.replace(p, meta=meta) for i, p in run.pairs.items()})
    text = build_report([run]).markdown
    assert (warned in text) if warned else ("their own kind" not in text)


def test_tags_for_the_filters():
    def tags(run):
        return [judgement["tags"] for judgement in data(build_report([run]).html)["judgements"]]

    assert tags(make_run(n=1)) == [["right", "flipped"], ["wrong", "flipped"]]
    assert tags(make_run(n=1, verdict=None))[0] == ["unparsed"]
    run = make_run(n=1)
    poor = [dataclasses.replace(r, match=dataclasses.replace(r.match, f1=0.1), truncated=True) for r in run.records]
    run = dataclasses.replace(run, evaluation=Evaluation.of(poor, resamples=0))
    assert tags(run)[0] == ["right", "flipped", "lucky", "truncated"]


def test_judgements_are_capped_by_whole_pairs_and_the_page_says_so():
    run = make_run(n=20)
    page = build_report([run], max_judgements=7)
    assert len(data(page.html)["judgements"]) == 6
    assert "6 of 40 judgements are here: all of those on 3 of 20 pairs" in page.html
    assert page == build_report([run], max_judgements=7)
    assert page.html != build_report([run], max_judgements=7, seed=1).html
    assert "All 40 judgements are here" in build_report([run]).html


def test_two_runs_show_the_same_pairs_with_each_text_once():
    shown = data(build_report([make_run("a", n=20), make_run("b", n=20)], max_judgements=8).html)
    assert [(j["pair"], j["run"], j["order"]) for j in shown["judgements"]] == [
        (pair, run, order) for pair in (0, 1) for run in (0, 1) for order in ("AB", "BA")
    ]
    assert len(shown["pairs"]) == 2


def test_humans_call_the_responses_by_the_names_that_the_judge_saw():
    run = make_run(n=1, scorer=False)
    pair = dataclasses.replace(next(iter(run.pairs.values())), critiques=[HumanCritique(text="Response A is right")])
    shown = data(build_report([dataclasses.replace(run, pairs={pair.id: pair})]).html)["pairs"][0]["humans"]
    assert [shown[order][0][0]["text"] for order in ("AB", "BA")] == ["Response A is right", "Response B is right"]


def test_long_texts_are_cut_and_say_so():
    page = build_report([make_run(n=1, text="x" * (MAX_CHARACTERS + 500))]).html
    assert "more characters)" in page


def test_matched_arguments_carry_the_same_number():
    for judgement in data(build_report([make_run(n=1)]).html)["judgements"]:
        assert [argument["match"] for argument in judgement["generated"]] == [1, None]
        assert [argument["match"] for argument in judgement["reference"]] == [1]


def test_a_judgement_has_its_numbers():
    run = make_run(n=1)
    sure = [dataclasses.replace(r, probability=0.731, mass=0.9, strength=-2, scores=(7.0, 3.5)) for r in run.records]
    run = dataclasses.replace(run, evaluation=Evaluation.of(sure, resamples=0))
    facts = dict(data(build_report([run]).html)["judgements"][0]["facts"])
    assert facts == {
        "P(A is better)": "73.1 %",
        "Mass of the verdicts": "90.0 %",
        "Strength": "-2",
        "Scores": "7, 3.5",
        "Critique": "F1 1.00 (precision 1.00, recall 1.00)",
        "Reply": "5 tokens",
        "Prompt": "hash plain",
    }


def test_a_failed_score_gives_its_reason():
    run = make_run(n=1)
    failed = [dataclasses.replace(r, match=CritiqueMatch(0, 0, 0, failure="server busy")) for r in run.records]
    run = dataclasses.replace(run, evaluation=Evaluation.of(failed, resamples=0))
    page = build_report([run]).html
    assert dict(data(page)["judgements"][0]["facts"])["Critique"] == "not scored: server busy"
    assert "2 of 2 critiques could not be scored" in page


def titles(*runs: Run) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", build_report(runs).html)


def test_a_plot_stands_where_there_is_something_to_plot():
    always = ["Figures with 95 % intervals", "Accuracy by subset", "Accuracy by the slot of the better response"]
    run = make_run(n=8, scorer=False)
    assert titles(run) == always
    assert titles(make_run()) == [*always, "Distribution of critique F1"]
    sure = [dataclasses.replace(r, probability=0.6) for r in run.records]
    sure = dataclasses.replace(run, evaluation=Evaluation.of(sure, resamples=0), name="sure", folder=Path("runs/sure"))
    assert titles(run, sure) == [
        *always,
        "Reliability: accuracy by confidence (dot: share of the pairs; dashes: calibrated)",
    ]
    one = dataclasses.replace(run, evaluation=Evaluation.of([dataclasses.replace(r, subset="") for r in run.records]))
    assert "Accuracy by subset" not in titles(one)


def test_the_scores_of_a_benchmark_stand_apart():
    score = Score("overall", 0.625, 8, "right verdicts", 0.25, 1.0)
    run = make_run()
    run = dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, scores=[score]))
    page = build_report([run, make_run("other")])
    _, own = page.markdown.split("## The benchmark's own scores")
    assert "| overall | 62.5 % [25.0, 100.0] (n = 8) | – | right verdicts |" in own
    assert "62.5 % [25.0, 100.0] (n = 8)" in page.html
    assert "own scores" not in build_report([make_run()]).markdown + build_report([make_run()]).html


def test_plots_take_the_colours_of_the_page():
    page = build_report([make_run("$a_b$"), make_run("second")]).html
    assert page.count("<svg") == 4
    assert "currentColor" in page
    assert "var(--series-1)" in page
    assert "$a_b$" in page  # no mathematics in names


def test_markdown_tables_survive_any_name():
    markdown = build_report([make_run("a | b\nc", text="x | y\nz")]).markdown
    table = markdown[markdown.index("## Subsets") :]
    table = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert len(table) == 4


def test_no_name_becomes_html_in_markdown():
    markdown = build_report([make_run("<script>alert(1)</script>", text=ATTACK)]).markdown
    assert "<script" not in markdown
    assert "<img" not in markdown


def luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb``, WCAG 2.2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_contrast(scheme):
    css = (ASSETS / "report.css").read_text()
    found = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme]
    colors = {name: long(value) for name, value in re.findall(r"--([\w-]+): (#\w+);", found)}
    texts = [*itertools.product(["ink", "dim"], ["paper", "raised"])]
    texts += [("right", "right-bg"), ("wrong", "wrong-bg"), ("flag", "flag-bg"), ("paper", "ink"), ("paper", "right")]
    texts += [("ink", "right-bg")]
    drawn = [(name, "paper") for name in colors if name.startswith("series")]
    drawn += itertools.product(["edge", "series-0"], ["paper", "raised"])
    low = {pair: contrast(*map(colors.get, pair)) for pair in texts if contrast(*map(colors.get, pair)) < 4.5}
    low |= {pair: contrast(*map(colors.get, pair)) for pair in drawn if contrast(*map(colors.get, pair)) < 3}
    assert low == {}


def long(color: str) -> str:
    return color if len(color) == 7 else "#" + "".join(2 * digit for digit in color[1:])


def test_a_run_is_not_compared_with_itself():
    with pytest.raises(UserError, match="named more than once"):
        build_report([make_run("a"), make_run("a")])
