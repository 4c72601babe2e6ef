"""The page shows what it was given as text, needs nothing from outside, and says how its figures were made."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nlhf.critique.arguments import Argument
from nlhf.critique.matching import CritiqueMatch
from nlhf.errors import UserError
from nlhf.metrics import Record
from nlhf.pairs import HumanCritique, Pair, Turn
from nlhf.report import MAX_CHARACTERS, build_report
from nlhf.results import Evaluation, Run

ATTACK = "<script>alert('x')</script></script><img src=x onerror=alert(1)>\"'><b>&amp;</b> {{ 7 * 7 }} ${x} | `a`"


def make_run(name="run", n=4, text="plain", verdict="A", scorer=True, orders="both", **config) -> Run:
    """A run whose every text that a model, a data set or a user may write is ``text``."""
    pairs = [
        Pair(
            f"{i} {text}",
            [Turn(text, f"question {text}")],
            f"a {text}",
            f"b {text}",
            label="A",
            critiques=[HumanCritique(strengths_a=f"human {text}")],
            subset=f"s{i % 2} {text}",
        )
        for i in range(n)
    ]
    argument = Argument("A", 1, f"argument {text}")
    match = CritiqueMatch(1, 1, 1, ((0, 0),), (argument, Argument("A", 1, "other")), (argument,), False, None)
    records = [
        Record(
            p.id,
            p.cluster,
            p.subset,
            order,
            0,
            "A",
            verdict,
            critique=f"critique {text}",
            match=match if scorer else None,
            reply=f"reply {text}",
            tokens=5,
            prompt_hash=f"hash {text}",
            length_a=3,
            length_b=2,
        )
        for p in pairs
        for order in (("AB", "BA") if orders == "both" else (orders,))
    ]
    return Run(
        folder=Path("runs") / name,
        name=name,
        config={
            "model": {"name": f"model {text}"},
            "data": {"source": "jsonl", "split": f"split {text}"},
            "format": "rm_nlhf",
            "sampling": {"temperature": 0.0, "max_new_tokens": 64},
            "scorer": {"class_path": "exact", "init_args": {"model": text}} if scorer else None,
            "orders": orders,
            "samples": 1,
            "resamples": 20,
            "seed": 0,
            "wrong_critique_threshold": 0.5,
        }
        | config,
        environment={"nlhf": "0", "commit": "abc", "dirty": True, "time": "now"},
        manifest={
            "data": {"data_hash": "d" * 64},
            "model_hash": "m",
            "judge": {"prompt_hash": "p", "ties": False},
        },
        pairs={p.id: p for p in pairs},
        evaluation=Evaluation.of(records, resamples=20),
    )


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


@pytest.mark.parametrize("runs", [1, 2], ids=["one run", "comparison"])
@pytest.mark.parametrize("scorer", [True, False], ids=["scored", "not scored"])
def test_no_text_becomes_markup(runs, scorer):
    def page(text):
        names = [f"run {k} {text}" for k in range(runs)]
        return outline(*(make_run(name, text=text, scorer=scorer) for name in names))

    attacked, plain = page(ATTACK), page("plain")
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in plain.tags]
    assert attacked.scripts == plain.scripts
    assert len(plain.scripts) == 1
    assert not any(key.startswith("on") for _, attributes in attacked.tags for key in attributes)
    for what in ("question", "a", "b", "reply", "run 0", "model", "split"):
        assert f"{what} {ATTACK}" in attacked.text, what
    assert f"{'argument' if scorer else 'critique'} {ATTACK}" in attacked.text
    assert {attributes["data-tags"] for tag, attributes in attacked.tags if attributes.get("class") == "card"}


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
    assert f"reply {text}" in build_report([make_run(text=text)]).html


def test_the_header_says_how_the_figures_were_made():
    text = " ".join(outline(make_run()).text.split())
    for part in (
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


def cards(page: str) -> list[dict]:
    return [attributes for _, attributes in Outline(page).tags if attributes.get("class") == "card"]


def test_tags_for_the_filters():
    tags = [card["data-tags"].split() for card in cards(build_report([make_run(n=1)]).html)]
    assert tags == [["right", "flipped"], ["wrong", "flipped"]]
    assert cards(build_report([make_run(n=1, verdict=None)]).html)[0]["data-tags"] == "unparsed"
    run = make_run(n=1)
    poor = [dataclasses.replace(r, match=dataclasses.replace(r.match, f1=0.1), truncated=True) for r in run.records]
    run = dataclasses.replace(run, evaluation=Evaluation.of(poor, resamples=0))
    assert cards(build_report([run]).html)[0]["data-tags"].split() == ["right", "flipped", "lucky", "truncated"]


def test_judgements_are_capped_by_whole_pairs_and_the_page_says_so():
    run = make_run(n=20)
    page = build_report([run], max_judgements=7)
    assert len(cards(page.html)) == 6
    assert "6 of 40 judgements are shown: all of those on 3 of 20 pairs" in page.html
    assert page == build_report([run], max_judgements=7)
    assert page.html != build_report([run], max_judgements=7, seed=1).html
    assert "All 40 judgements are shown" in build_report([run]).html


def test_two_runs_show_the_same_pairs():
    page = build_report([make_run("a", n=20), make_run("b", n=20)], max_judgements=8).html
    assert [card["data-run"] for card in cards(page)] == ["a", "a", "b", "b"] * 2


def test_long_texts_are_cut_and_say_so():
    page = build_report([make_run(n=1, text="x" * (MAX_CHARACTERS + 500))]).html
    assert "more characters)" in page


def test_matched_arguments_carry_the_same_number():
    page = build_report([make_run(n=1)]).html
    assert page.count('aria-label="match 1"') == 4  # the judge's and the human's, in both orders
    assert page.count('class="matched"') == 4


def test_a_failed_score_gives_its_reason():
    run = make_run(n=1)
    failed = [dataclasses.replace(r, match=CritiqueMatch(0, 0, 0, failure="server busy")) for r in run.records]
    run = dataclasses.replace(run, evaluation=Evaluation.of(failed, resamples=0))
    page = build_report([run]).html
    assert "Not scored: server busy" in page
    assert "2 of 2 critiques could not be scored" in page


def test_plots_take_the_colours_of_the_page():
    page = build_report([make_run("$a_b$"), make_run("second")]).html
    assert page.count("<svg") == 3
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


def test_a_run_is_not_compared_with_itself():
    with pytest.raises(UserError, match="named more than once"):
        build_report([make_run("a"), make_run("a")])
