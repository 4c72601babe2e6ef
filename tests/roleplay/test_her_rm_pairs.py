"""The written pairs of experiments/her_rm, judged by recorded replies through `nlhf evaluate`: every figure by hand."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nlhf.evaluation.metrics import definitions
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import further_figures, load_run
from nlhf.files import read_json, read_jsonl
from nlhf.formats import get_format
from nlhf.judge import shown_pairs
from nlhf.pairs import other_label
from nlhf.roleplay import turns
from nlhf.roleplay.judgements import contract_problems, entailment, mixed_selection, read_case
from nlhf.roleplay.principles import library
from nlhf.sources import DataConfig, load_pairs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "her_rm"
PAIRS = load_pairs(DataConfig("jsonl", path=str(FOLDER / "pairs.jsonl")))
REPLIES = [row for _, row in read_jsonl(FOLDER / "replies.jsonl")]
JUDGE = get_format("her_rm")


# ---------------------------------------------------------------------------------------------------------- the pairs


def test_labels_and_slots_are_balanced():
    assert Counter(p.label for p in PAIRS) == {"A": 9, "B": 9, "tie": 6}
    for subset in {p.subset for p in PAIRS} - {"equal"}:
        labels = Counter(p.label for p in PAIRS if p.subset == subset)
        assert abs(labels["A"] - labels["B"]) <= 1, subset
        assert labels["tie"] == 0
    assert {p.label for p in PAIRS if p.subset == "equal"} == {"tie"}


@pytest.mark.parametrize("seen", [lambda text: text, lambda text: turns.scrub(text, turns.PLAN)], ids=["all", "judge"])
def test_the_longer_response_wins_one_half(seen):
    decided = [p for p in PAIRS if p.label != "tie"]
    longer = [(len(seen(p.response_a)) > len(seen(p.response_b))) == (p.label == "A") for p in decided]
    assert sum(longer) * 2 == len(longer) == 18


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: p.id)
def test_a_pair_is_two_dual_layer_turns_a_critique_and_a_principle(pair):
    assert [turns.problems(text, pair.meta["character"]) for text in (pair.response_a, pair.response_b)] == [[], []]
    system, *said = pair.context
    assert system.role == "system"
    assert f"{pair.meta['character']}(assistant)" in [turn.role for turn in said]
    assert said[-1].role != f"{pair.meta['character']}(assistant)"  # it is the character's turn
    for turn in said:
        assert turns.problems(f"X: {turn.content}", needs_plan=False) == []
    assert any("<role_thinking>" in turn.content for turn in said)
    [critique] = pair.critiques
    assert len(re.findall(r"[.!?](?:\s|$)", critique.text)) == 1
    assert re.search(r"Response [AB]|[Bb]oth responses", critique.text)
    assert pair.meta["principle"] in {p.id for p in library().principles}


def test_scenes_are_groups_and_the_history_of_a_group_is_one():
    assert len({p.group for p in PAIRS}) == 12
    assert len({(p.group, tuple(p.context)) for p in PAIRS}) == 12
    assert Counter(p.group for p in PAIRS).most_common(1)[0][1] == 2


def test_no_plan_reaches_the_judge():
    for _, pair in shown_pairs(PAIRS):
        prompt = JUDGE.render(pair)[0]["content"]
        for text in (pair.response_a, pair.response_b):
            plan = re.search("<system_thinking>(.*?)</system_thinking>", text)[1]
            assert plan not in prompt
        assert "system_thinking" not in prompt


# -------------------------------------------------------------------------------------------------------- the replies

CASES = {
    *("fenced", "bare", "text around it", "thinking before it", "result is an object", "no result around it"),
    *("braces inside a string", "cut off behind the verdict", "cut off before the verdict", "prose without JSON"),
    *("two results that agree", "two results that disagree", "unknown better_response"),
    *("unknown winner of a principle", "a principle that the library does not have", "one principle"),
    *("a negative principle contradicts the verdict", "a winner out of ties", "a tie although one alone wins"),
    *("tie", "tie, fenced", "tie by balance"),
}


def test_every_case_of_the_parser_occurs_and_each_prompt_has_one_reply():
    assert {row["case"] for row in REPLIES} == CASES
    assert [(r["pair_id"], r["order"]) for r in REPLIES] == [(p.id, order) for order, p in shown_pairs(PAIRS)]
    assert {r["winner"] for r in REPLIES} == {"A", "B", "tie", None}
    assert {r["entailment"] for r in REPLIES} == {"entailed", "open", "contradicted", None}


@pytest.mark.parametrize("row", REPLIES, ids=lambda r: f"{r['pair_id']}-{r['order']}: {r['case']}")
def test_a_reply_is_read_as_annotated(row):
    verdict, case = JUDGE.parse(row["reply"], row["truncated"]), read_case(row["reply"])
    winner = verdict.label if row["order"] == "AB" else other_label(verdict.label)
    assert winner == row["winner"]
    assert (entailment(case) if case else None) == row["entailment"]
    assert (mixed_selection(case) if case and case.winners else None) == row["mixed_selection"]
    if case:
        named = {"unknown better_response": ["no verdict"]}
        named["unknown winner of a principle"] = ["a winner is none of cand_1, cand_2 and tie"]
        assert contract_problems(case) == named.get(row["case"], [])


# ---------------------------------------------------------------------------------------------------- the evaluation

# Winners in the data's order, as (order AB, order BA); "-" is no verdict.
VERDICTS = {
    "ball-answer": "A A", "hut-people": "B B", "tea_table-cups": "A A", "ramparts-question": "A B",
    "consulting_room-case": "A A", "ship-captain": "B B", "castle-glass": "- A", "consulting_room-details": "B B",
    "mansion-light": "A B", "gate-whip": "A A", "ferry-white": "A tie", "hut-answer": "B -",
    "attic-feel": "A A", "garden-valve": "B B", "ship-soup": "A A", "castle-street": "tie B",
    "gate-bridle": "B B", "ferry-oar": "- A", "ball-custom": "tie tie", "tea_table-riddle": "tie tie",
    "mansion-grass": "tie A", "attic-spite": "A B", "ramparts-pay": "tie -", "garden-count": "B B",
}  # fmt: skip
"""Right by pair, in this order: 2 2 2 1 2 2 1 2 1 0 1 1 2 2 2 1 2 1 (27 of 36 decided), 2 2 1 0 1 0 (6 of 12 ties)."""

FIGURES = {
    "accuracy": (33, 48),
    "accuracy_parsed": (33, 44),
    "accuracy_strict": (12, 24),  # both right: ten of the decided pairs, two of the ties
    "parse_rate": (44, 48),  # castle-glass AB, hut-answer BA, ferry-oar AB, ramparts-pay BA have none
    "truncation_rate": (2, 48),  # ship-captain AB behind its verdict, castle-glass AB before
    "position_consistency": (14, 20),  # not: ramparts, mansion-light, ferry-white, castle-street, grass, spite
    "flip_rate": (3, 20),  # ramparts-question, mansion-light, attic-spite
    "position_excluded": (4, 24),
    "slot_a_rate": (20, 44),  # ten times A in AB, ten times B in BA
    "tie_rate": (8, 44),
    "tie_precision": (6, 8),  # not: ferry-white BA, castle-street AB
    "tie_recall": (6, 12),  # not: grass BA, spite twice, pay BA, count twice
}
PRINCIPLES = {
    "Principles read": "(44/48)",  # not: ship-captain, castle-glass, ferry-oar AB; ramparts-pay BA
    "Verdict entailed": "(39/43)",  # read and with a verdict: 44 less hut-answer BA; the others:
    "Verdict contradicted": "(3/43)",  # gate-whip AB, mansion-grass AB, garden-count BA; details AB is open
    "Mixed selection": "(11/42)",  # read, less ship-soup, which compares by one principle
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the one command, which is run from another folder than the repository's."""
    out = tmp_path_factory.mktemp("written") / "run"
    command = [sys.executable, str(FOLDER / "written.py"), "--out", str(out), "--resamples", "50"]
    done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


def test_verdicts_are_as_counted(folder):
    found = {}
    for number, row in read_jsonl(folder / "judgements.jsonl"):
        record = Record.from_dict(row, str(number))
        found[record.pair_id] = [*found.get(record.pair_id, []), record.winner or "-"]
    assert {pair: " ".join(winners) for pair, winners in found.items()} == VERDICTS


def test_figures_are_as_counted(folder):
    metrics = read_json(folder / "metrics.json")["metrics"]
    assert set(FIGURES) <= set(definitions())
    assert {name: (metrics[name]["k"], metrics[name]["n"]) for name in FIGURES} == FIGURES


def test_figures_by_principle_are_as_counted(folder):
    found = {figure.title: figure.text for figure in further_figures(load_run(folder, resamples=0))}
    assert {title: found[title].split()[-1] for title in PRINCIPLES} == PRINCIPLES


def test_figures_by_what_decides(folder):
    """Right of all judgements of each subset."""
    found = {s: m["accuracy"] for s, m in read_json(folder / "metrics.json")["subsets"].items()}
    assert {subset: (metric["k"], metric["n"]) for subset, metric in found.items()} == {
        "breaks_character": (7, 8),
        "reveals_plan": (5, 6),
        "contradicts_history": (4, 8),
        "flat": (5, 6),
        "better_action": (6, 8),
        "equal": (6, 12),
    }


def test_the_report_has_them(folder):
    for name in ("report.md", "report.html"):
        text = (folder / name).read_text(encoding="utf-8")
        for title in (*PRINCIPLES, "Tie precision", "Tie recall", "Truncation rate"):
            assert title in text, (name, title)


def test_every_percentage_of_the_report_has_its_count(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    cells = [cell for line in text.splitlines() if line.startswith("| ") for cell in line.split(" | ")[1:]]
    shares = [cell for cell in cells if re.match(r"[\d.]+ %", cell)]
    assert len(shares) > 50
    assert [cell for cell in shares if not re.match(r"[\d.]+ % \[[\d.]+, [\d.]+\] \([\d.]+/\d+\)", cell)] == []


def test_the_comment_of_the_yaml_says_the_same():
    text = re.sub(r"\s*#\s*", " ", (FOLDER / "written.yaml").read_text(encoding="utf-8"))
    said = dict(re.findall(r"(\w[\w ]*?) (\d+/\d+)[,;]", text[text.index("Expected:") :]))
    counted = {definitions()[name].title.lower(): f"{k}/{n}" for name, (k, n) in FIGURES.items()}
    counted |= {title.lower(): ratio.strip("()") for title, ratio in PRINCIPLES.items()}
    counted["contradicted"] = counted["verdict contradicted"]
    assert len(said) == 8
    assert said == {name.lower(): counted[name.lower()] for name in said}


def test_nothing_is_claimed_in_a_ledger(folder):
    """The replies are of our own writing, so no figure of a judge is kept."""
    assert "ledger: null" in (folder / "config.yaml").read_text(encoding="utf-8")


def test_the_script_refuses_a_prompt_that_it_has_no_reply_to(tmp_path):
    rows = [row for _, row in read_jsonl(FOLDER / "pairs.jsonl")][:1]
    rows[0]["response_a"] += " Another word."
    other = tmp_path / "pairs.jsonl"
    other.write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    command = [sys.executable, "experiments/her_rm/written.py", "--out", str(tmp_path / "run")]
    command += ["--data.path", str(other), "--backend.retries", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "a prompt without a recorded reply" in done.stderr
