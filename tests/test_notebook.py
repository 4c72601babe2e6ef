"""The notebook runs from a fresh clone; its helpers show what was judged as text and filter as the figures count."""

import os
import re
import sys
from pathlib import Path

import pytest

from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import ExactScorer
from nlhf.errors import UserError
from nlhf.evaluation.metrics import Record
from nlhf.evaluation.results import Evaluation, Run
from nlhf.notebook import difference_table, figure_table, judgement_table, show_judgements, show_table
from nlhf.pairs import HumanCritique, Pair, Turn
from tests.report.outline import Outline

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ATTACK = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>\"'></div></details><b>&amp;</b> {{ 7 * 7 }} $x$ שלום 你好"
)

SOUND, BESIDE = "{0} praise: {1}clear", "{0} praise: {1}long"
# For each pair what the judge says in order AB and in order BA: label and critique.
REPLIES = {
    "sound": [("A", SOUND), ("B", SOUND)],
    "lucky": [("A", BESIDE), ("B", BESIDE)],
    "flipped": [("A", SOUND), ("A", SOUND)],
    "wrong": [("B", SOUND), ("A", SOUND)],
    "silent": [(None, None), ("B", SOUND)],
}


def make_run(text: str = "", name: str = "run", replies=REPLIES, scorer: bool = True, label="A") -> Run:
    """Five pairs whose better response is A; ``text`` stands in everything that a model or a data set may write."""
    records, pairs = [], {}
    for kind, orders in replies.items():
        pair = Pair(
            f"{kind}{text}",
            [Turn(f"user{text}", f"question {text}")],
            f"first {text}",
            f"second {text}",
            label=label,
            critiques=[HumanCritique(strengths_a=f"{text.replace('.', '')}clear")],
            subset=f"s{text}",
        )
        pairs[pair.id] = pair
        for order, (verdict, critique) in zip(("AB", "BA"), orders, strict=True):
            written = critique and critique.format(verdict, text)
            shown = pair if order == "AB" else pair.swap()
            match: CritiqueMatch | None = ExactScorer().score([written], [shown])[0] if scorer else None
            records.append(
                Record(
                    pair.id,
                    pair.cluster,
                    pair.subset,
                    order,
                    0,
                    label,
                    verdict,
                    critique=written,
                    match=match,
                    reply=f"reply {written} {text}",
                    truncated=verdict is None,
                )
            )
    config = {"wrong_critique_threshold": 0.5, "resamples": 50, "seed": 0}
    return Run(Path("runs") / name, name, config, {}, {}, pairs, Evaluation.of(records, resamples=50))


def names(table) -> list[tuple[str, str]]:
    return [(pair, order) for pair, order, _ in table.index]


def test_a_row_for_each_judgement():
    run = make_run()
    table = judgement_table(run)
    assert list(table.index) == [r.key for r in run.records]
    assert table.loc["sound", "BA", 0].winner == "A"
    assert table.critique.iloc[1] == "B praise: clear"  # as written, in the order shown
    assert table.f1.tolist()[:4] == [1, 1, 0, 0]
    assert table.f1.isna().sum() == 1  # without a verdict a score does not count


def test_filters_find_what_their_names_say():
    table = judgement_table(make_run())
    assert names(table[table.flipped]) == [("flipped", "AB"), ("flipped", "BA")]
    assert names(table[table.lucky]) == [("lucky", "AB"), ("lucky", "BA")]
    assert names(table[table.truncated]) == [("silent", "AB")]
    assert names(table[~table.correct]) == [("flipped", "BA"), ("wrong", "AB"), ("wrong", "BA"), ("silent", "AB")]


def test_filters_count_as_the_figures_do():
    run = make_run()
    table, metrics = judgement_table(run), run.metrics
    assert table.flipped.sum() / 2 == metrics["position_consistency"].n - metrics["position_consistency"].k
    assert table.lucky.sum() == metrics["wrong_critique_rate"].k
    assert table.correct.sum() == metrics["accuracy"].k
    assert table.f1.mean() == pytest.approx(metrics["critique_f1"].value)


def test_without_scores_and_labels_nothing_is_wrong():
    table = judgement_table(make_run(scorer=False, label=None))
    assert table.correct.isna().all()
    assert not table.lucky.any()
    assert table.f1.isna().all()
    assert names(table[table.flipped]) == [("flipped", "AB"), ("flipped", "BA")]


def test_a_single_order_cannot_flip():
    run = make_run()
    records = [r for r in run.records if r.order == "AB"]
    half = Run(run.folder, run.name, run.config, {}, {}, run.pairs, Evaluation.of(records, resamples=0))
    assert not judgement_table(half).flipped.any()


def test_figures_with_counts_and_intervals():
    run = make_run()
    table = figure_table(run)
    row, metric = table.loc["Accuracy"], run.metrics["accuracy"]
    assert (row.value, row.k, row.n, row.low, row.high) == (metric.value, 6, 10, metric.low, metric.high)
    assert "Scorer failures" in table.index
    assert "Scorer failures" not in figure_table(make_run(scorer=False)).index


def test_differences_are_second_minus_first():
    better = {kind: [("A", SOUND), ("B", SOUND)] for kind in REPLIES}
    row = difference_table(make_run(name="old"), make_run(name="new", replies=better)).loc["Accuracy"]
    assert (row["old"], row["new"], row["difference"]) == pytest.approx((0.6, 1.0, 0.4))
    assert row["low"] <= 0.4 <= row["high"]
    with pytest.raises(UserError, match="not measured on the same pairs"):
        difference_table(make_run(), make_run(replies={"sound": REPLIES["sound"]}))


@pytest.mark.parametrize("scorer", [True, False], ids=["scored", "not_scored"])
def test_judged_text_is_text(scorer):
    """No tag and no attribute beyond those of harmless text, whatever was judged, and all of it is there to read."""
    harmless, attacked = make_run(scorer=scorer), make_run(ATTACK, scorer=scorer)
    for show in (
        lambda run: show_judgements(run, judgement_table(run)),
        lambda run: show_table(judgement_table(run), width=10_000),
    ):
        safe, shown = (Outline(show(run).data) for run in (harmless, attacked))
        assert shown.tags == safe.tags
        assert shown.attributes == safe.attributes
        assert ATTACK in shown.text
        assert "mathjax_ignore" in show(attacked).data


def test_a_card_shows_the_pair_as_the_judge_saw_it():
    run = make_run()
    table = judgement_table(run)
    as_is, exchanged = (
        Outline(show_judgements(run, table.loc[[("sound", order, 0)]]).data).text.split() for order in ("AB", "BA")
    )
    for words, order in ((as_is, ["first", "second"]), (exchanged, ["second", "first"])):
        assert [w for w in words if w in ("first", "second")] == order
    assert "label is A" in " ".join(as_is)
    assert "label is B" in " ".join(exchanged)


def test_matched_arguments_carry_one_number():
    run = make_run()
    table = judgement_table(run)
    sound, lucky = (show_judgements(run, table.loc[[(kind, "AB", 0)]]).data for kind in ("sound", "lucky"))
    assert re.findall(r"<mark>(\d+)</mark> A praise: (\w+)", sound) == [("1", "clear"), ("1", "clear")]
    assert "<mark>" not in lucky
    assert "right label, wrong critique" in lucky
    assert "right label, wrong critique" not in sound


def test_both_critiques_are_shown_without_a_score():
    run = make_run(scorer=False)
    html = show_judgements(run, judgement_table(run).head(1)).data
    assert html.count("A praise: clear") == 3  # the judge's, the human's, and the reply
    assert "<mark>" not in html


def test_how_many_are_left_out_is_said():
    run = make_run()
    table = judgement_table(run)
    assert "7 more are not shown" in show_judgements(run, table, limit=3).data
    assert "not shown" not in show_judgements(run, table).data
    assert "No judgement is like that" in show_judgements(run, table.head(0)).data


def test_wide_texts_of_a_table_are_cut_visibly():
    run = make_run()
    html = show_table(judgement_table(run).assign(reply="x" * 100), width=50).data
    assert html.count(f">{'x' * 50}…<") == len(run.records)


# ------------------------------------------------------------------------------------------------------- the notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_committed_without_outputs_and_machine_paths(path):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
        assert not re.search(r"""(?:^|[\s"'=(])(?:/(?:home|Users|root|tmp|work|mnt|data)\b|[A-Za-z]:\\)""", cell.source)
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Run a notebook with this interpreter's kernel, whatever kernels the user has; gives back all that it shows."""
    import nbformat
    from ipykernel.kernelspec import install
    from nbclient import NotebookClient

    install(prefix=str(tmp_path), kernel_name="python3")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("NLHF_RUN", "NLHF_OTHER_RUN", "NLHF_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str = "explore_judgements") -> str:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell("import sys; print(sys.executable)"))
        resources = {"metadata": {"path": str(ROOT / "notebooks")}}
        NotebookClient(notebook, kernel_name="python3", timeout=240, startup_timeout=180, resources=resources).execute()
        shown = _shown(notebook)
        assert sys.executable in shown
        return shown

    return run


def _shown(notebook) -> str:
    """Text, HTML and the kinds of images."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pieces = []
    for output in outputs:
        data = output.get("data", {})
        pieces += [output.get("text", ""), data.get("text/html", ""), *(kind for kind in data if "image" in kind)]
    return "\n".join(pieces)


def test_the_notebook_runs_without_a_run(execute):
    text = execute()
    assert "Right label, wrong critique" in text
    assert re.search(r"[1-9]\d* of 60 pairs are flipped", text)
    assert re.search(r"[1-9]\d* of [1-9]\d* right verdicts have a wrong critique", text)
    assert re.search(r"[1-9]\d* of 120 judgements name another winner", text)
    assert "<mark>1</mark>" in text
    assert text.count("image/png") == 1


def test_the_notebook_shows_the_run_that_it_is_given(execute, tmp_path, monkeypatch):
    """A run without scores, with attacks in its texts, and with nothing to compare with."""
    from nlhf.config import ClassSpec
    from nlhf.evaluate import evaluate
    from nlhf.files import write_jsonl
    from nlhf.generation import SamplingConfig
    from nlhf.models import ModelConfig
    from nlhf.sources import DataConfig

    write_jsonl(tmp_path / "pairs.jsonl", [p.to_dict() for p in make_run(ATTACK).pairs.values()])
    evaluate(
        ModelConfig("random:qwen3-tiny"),
        DataConfig("jsonl", path=str(tmp_path / "pairs.jsonl")),
        out=str(tmp_path / "mine"),
        sampling=SamplingConfig(max_new_tokens=8),
        scorer=ClassSpec("exact"),
        resamples=10,
        ledger=None,
    )
    monkeypatch.setenv("NLHF_RUN", str(tmp_path / "mine"))
    text = execute()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "0 of 5 pairs are flipped" in text
    assert "Set NLHF_OTHER_RUN to compare" in text


def test_the_notebook_of_self_distillation_runs_without_a_run(execute):
    text = execute("explore_self_distillation")
    assert re.search(r"Shape: not U-shaped: one-sided, at high dH", text)
    assert "&lt;critics&gt;" in text  # a word that is kept, and a token
    assert "kept for training" in text
    assert text.count("image/png") == 3


def test_the_notebook_of_self_distillation_shows_the_run_that_it_is_given(execute, tmp_path, monkeypatch):
    """On an untrained model, whose replies are noise, with attacks in the pairs."""
    from nlhf.files import write_jsonl
    from selfdistill.__main__ import main

    write_jsonl(tmp_path / "pairs.jsonl", [p.to_dict() for p in make_run(ATTACK).pairs.values()])
    arguments = ["profile", "--model.name", "random:qwen3-tiny", "--sampling.max_new_tokens", "12", "--samples", "1"]
    data = ["--data.source", "jsonl", "--data.path", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "mine")]
    assert main([*arguments, *data]) == 0
    monkeypatch.setenv("NLHF_PROFILE", str(tmp_path / "mine"))
    text = execute("explore_self_distillation")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "of 5 rollouts" in text
