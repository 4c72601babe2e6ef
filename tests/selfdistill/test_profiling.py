"""`selfdistill profile` from the command line on the shipped sandbox judge, and its views of hostile text."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nlhf.pairs import Pair, Turn
from nlhf.verdict import Verdict
from selfdistill.__main__ import main
from selfdistill.judged import Judged, read_judged, summarize
from selfdistill.views import divergence_figure, places_figure, show_tokens, tokens_page, word_rows, words_csv
from tests.report.outline import Outline

ROOT = Path(__file__).resolve().parents[2]
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'></div><b>&amp;</b> {{ 7 * 7 }} $x$ שלום 你好"
SANDBOX = [
    *("profile", "--model.name", "package:nlhf", "--data.source", "sandbox", "--data.limit", "12"),
    *("--format", "sandbox", "--context", "sandbox_note", "--sampling.max_new_tokens", "26"),
    *("--pairs", "5", "--samples", "2"),
]
FILES = {
    *("config.yaml", "environment.json", "manifest.json", "profile.json", "profile.md", "u_shape.png", "positions.png"),
    *("words.csv", "positions.jsonl", "judgements.jsonl", "tokens.html"),
}


def judged(tokens, kl=None, kept=None, text="", sample=0, **fields) -> Judged:
    n = len(tokens)
    kl = np.arange(n, dtype=float) if kl is None else np.array(kl, dtype=float)
    return Judged(
        pair=Pair(f"p{text}", [Turn(f"user{text}", f"q {text}")], f"a {text}", f"b {text}", label="A"),
        sample=sample,
        feedback=f"z {text}",
        verdict=Verdict("B", raw="".join(tokens)),
        ids=tuple(range(n)),
        tokens=tuple(tokens),
        kl=kl,
        student_entropy=np.linspace(0, 1, n),
        teacher_entropy=np.linspace(1, 0, n),
        kept=np.zeros(n, bool) if kept is None else np.array(kept, dtype=bool),
        **fields,
    )


# --- the verb


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "run"
    assert main([*SANDBOX, "--out", str(out)]) == 0
    return out


def test_every_file_is_there(run):
    assert {p.name for p in run.iterdir()} == FILES
    for name in ("u_shape.png", "positions.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


def test_files_agree(run):
    written = json.loads((run / "profile.json").read_text(encoding="utf-8"))
    measured = read_judged(run)
    found = summarize(measured)
    assert len({j.pair.id for j in measured}) == 5
    assert written["rollouts"] == 10
    assert written["kept_kl_share"] == pytest.approx(found.kept_kl_share)
    assert found.table() in (run / "profile.md").read_text(encoding="utf-8")
    with (run / "words.csv").open(encoding="utf-8", newline="") as file:
        words = list(csv.DictReader(file))
    assert sum(int(w["kept"]) for w in words) == found.kept
    assert sum(int(w["positions"]) for w in words) == found.n
    page = (run / "tokens.html").read_text(encoding="utf-8")
    assert page.count('class="t kept" style=') - 1 == found.kept  # one more in the legend
    assert "critics" in page


def test_the_same_again(run, tmp_path):
    """Equal settings give equal rollouts, another seed other pairs."""
    assert main([*SANDBOX, "--out", str(tmp_path / "again")]) == 0
    for name in FILES - {"config.yaml", "environment.json", "manifest.json", "u_shape.png", "positions.png"}:
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes(), name
    assert main([*SANDBOX, "--seed", "7", "--out", str(tmp_path / "other")]) == 0
    assert (tmp_path / "other" / "positions.jsonl").read_bytes() != (run / "positions.jsonl").read_bytes()


def test_the_table_is_printed_and_a_bad_choice_warned_of(tmp_path, capsys):
    """At rho 0.95 one position of each rollout is kept, the one at which feedback changes least."""
    assert main([*SANDBOX, "--rho", "0.95", "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "decile" in shown.out
    assert "Set rho to 0" in shown.err
    assert "**Warning:**" in (tmp_path / "run" / "profile.md").read_text(encoding="utf-8")


def test_the_shuffled_control_reads_other_feedback(run, tmp_path):
    assert main([*SANDBOX, "--shuffled", "--out", str(tmp_path / "run")]) == 0
    true = {j.pair.id: j.feedback for j in read_judged(run)}
    other = {j.pair.id: j.feedback for j in read_judged(tmp_path / "run")}
    assert true.keys() == other.keys()
    assert true != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rho", "1"], "rho, the fraction of positions masked"),
        (["--selector", "lowdh"], "selector"),
        (["--context", "nothing"], "unknown teacher context"),
        (["--pairs", "0"], "pairs must be at least 1"),
        (["--samples", "0"], "samples must lie between 1 and"),
        (["--samples", "1000000000000"], "samples must lie between 1 and"),
        (["--max_teacher_prompt", "0"], "max_teacher_prompt must be at least 1"),
        (["--teacher.name", "random:qwen3-tiny"], "has another vocabulary than model"),
        (["--format", "rewardbench2_ratings", "--feedback_after", "[User Question]"], "shows one response and rates"),
        (["--sampling.temperature", "0"], "would repeat one reply"),
        (["--data.labelled_fraction", "0"], "none of the 12 pairs has feedback"),
        (["--context", "gold_verdict", "--shuffled"], "reads none"),
        (["--feedback_after", "no such text"], "has no 'no such text'"),
        (["--feedback_after", "a", "--feedback_before", "b"], "not both"),
        (["--max_teacher_prompt", "3"], "prompt too long"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_message_and_leaves_nothing(tmp_path, capsys, options, message):
    assert main([*SANDBOX, *options, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused(run, capsys):
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    assert main([*SANDBOX, "--out", str(run)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def test_numbers_need_nothing_heavy():
    code = "import sys, selfdistill.profiling, selfdistill.__main__; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


# --- the page


@pytest.mark.parametrize(
    "show", [lambda j: tokens_page(j, j[0].pair.id), lambda j: show_tokens(j).data], ids=["page", "cell"]
)
def test_judged_text_is_text(show):
    """No tag and no attribute beyond those of harmless text, whatever was judged, and all of it is there to read."""
    harmless = Outline(show([judged(["fine", " text"])]))
    attacked = Outline(show([judged([ATTACK, *ATTACK], text=ATTACK)]))
    assert attacked.tags == harmless.tags
    assert attacked.attributes == harmless.attributes
    assert attacked.text.count(ATTACK) >= 2 + 5  # twice in the reply, then in name, feedback, conversation, responses


def test_the_page_needs_nothing_else():
    page = tokens_page([judged(["a"])], "t")
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|src=|@import|https?://", page)
    assert "prefers-color-scheme: dark" in page


def test_tokens_are_shaded_by_divergence_and_marked():
    page = tokens_page([judged(["x", " y", " z"], kl=[0, 1, 2], kept=[0, 1, 0])], "t")
    spans = re.findall(r'<span class="(t(?: kept)?)" style="--k:([\d.]+)" data-tip="([^"]*)">([^<]*)</span>', page)
    assert [(c, text) for c, _, _, text in spans] == [("t", "x"), ("t kept", " y"), ("t", " z")]
    shades = [float(k) for _, k, _, _ in spans]
    assert shades[0] == 0 < shades[1] < shades[2] == 1
    assert "KL  1.0000" in spans[1][2]
    assert "dH  +0.0000" in spans[1][2]
    assert "1 kept with 33.3 % of the divergence" in page


def test_invisible_tokens_can_be_pointed_at():
    page = tokens_page([judged(["a", "", "\n"])], "t")
    assert ">◦</span>" in page
    assert ">⏎\n</span>" in page


def test_pages_are_limited_and_say_so():
    many = [judged([f"s{k}p{i}"], sample=k) for i in range(4) for k in range(2)]
    page = tokens_page(many, "t", limit=5)
    assert page.count("<section>") == 5
    assert "3 more judgements are not shown" in page
    assert all(f"s0p{i}" in page for i in range(4)), "one sample of every pair first"


# --- words


def test_words_by_hand():
    """`right` is one word of two tokens, twice there; its first token is kept once."""
    one = judged(["The", " ri", "ght", ",", " right", "\n"], kl=[1, 2, 3, 0, 4, 0], kept=[0, 1, 0, 0, 0, 1])
    rows = {row["word"]: row for row in word_rows([one])}
    assert set(rows) == {"The", "right", "(line break)"}
    right = rows["right"]
    assert (right["occurrences"], right["positions"], right["kept"]) == (2, 4, 1)  # the comma belongs to it
    assert right["mean_kl"] == 9 / 4
    assert right["kl_share"] == 9 / 10
    assert [row["word"] for row in word_rows([one])][:2] == ["right", "(line break)"]


def test_words_of_a_script_without_blanks_are_characters():
    rows = word_rows([judged(["你好", "吗", " ok"])])
    assert {row["word"] for row in rows} == {"你", "吗", "ok"}


def test_marks_alone_are_words_of_their_own():
    assert {row["word"] for row in word_rows([judged(["**", " [[A]]", " </choice>"])])} == {"**", "[[A]]", "</choice>"}


def test_any_word_survives_the_file():
    hostile = judged(['"a,b"', " =1+1", " x;y", " \u2028z"])
    read = list(csv.DictReader(words_csv([hostile]).splitlines()))
    assert {row["word"] for row in read} == {row["word"] for row in word_rows([hostile])}


# --- figures


@pytest.mark.parametrize("kl", [[0.0] * 12, np.geomspace(1e-9, 10, 12)], ids=["none", "wide"])
def test_figures_of_any_divergence(kl, tmp_path):
    rollouts = [judged(["t"] * 12, kl=kl, kept=[1] * 4 + [0] * 8)]
    for figure in (divergence_figure(rollouts, summarize(rollouts)), places_figure(summarize(rollouts))):
        figure.savefig(tmp_path / "figure.png")
        assert len(figure.axes) >= 2
