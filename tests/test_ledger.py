"""The ledger only grows, also with two writers and after a crash."""

import dataclasses
import multiprocessing

import pytest

from nlhf import ledger
from nlhf.errors import UserError
from nlhf.evaluation.metrics import Metric
from nlhf.ledger import LedgerRow, format_metric, read_ledger, table


def row(**more) -> LedgerRow:
    values = {
        "run_name": "r",
        "out": "runs/r",
        "source": "sandbox",
        "split": "id",
        "data_n": 2,
        "data_hash": "d",
        "model": "m",
        "model_hash": None,
        "format": "rm_nlhf",
        "prompt_hash": "p",
        "seed": 0,
        "orders": ["AB", "BA"],
        "samples": 1,
        "sampling": {"temperature": 0.0},
        "scorer": None,
        "n": 4,
        "metrics": {"accuracy": Metric(0.75, 3, 4, 0.5, 1.0), "critique_f1": Metric(None, 0, 0)},
    }
    return LedgerRow(**values | more)


def test_a_row_says_where_a_figure_comes_from(tmp_path):
    written = ledger.append(tmp_path / "new" / "ledger.jsonl", row())
    assert read_ledger(tmp_path / "new" / "ledger.jsonl") == [written]
    assert written["metrics"]["accuracy"] == {"value": 0.75, "k": 3, "n": 4, "low": 0.5, "high": 1.0}
    assert {"run_id", "time", "commit", "dirty", "version", "data_hash", "prompt_hash"} <= written.keys()


def test_the_same_evaluation_twice_is_two_rows(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = ledger.append(path, row())
    before = path.read_bytes()
    second = ledger.append(path, row())
    assert path.read_bytes().startswith(before)
    assert first["run_id"] != second["run_id"]


def test_selecting_rows(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for model, split in (("a", "id"), ("b", "id"), ("b", "ood")):
        ledger.append(path, row(model=model, split=split))
    assert len(read_ledger(path, model="b")) == 2
    assert len(read_ledger(path, model="b", split="ood")) == 1
    assert len(read_ledger(path, split=("id", "ood"), orders=["AB", "BA"])) == 3
    assert read_ledger(path, model="c") == []
    with pytest.raises(UserError, match=r"no field 'modle'.*Did you mean 'model'\?"):
        read_ledger(path, modle="b")


def test_a_missing_ledger_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_ledger(tmp_path / "none.jsonl")


@pytest.mark.parametrize("torn", [b'{"run_id": "x", "tim', '{"run_id": "é'.encode()[:-1]], ids=["text", "character"])
def test_a_torn_line_costs_only_itself(tmp_path, torn):
    path = tmp_path / "ledger.jsonl"
    ledger.append(path, row(model="before"))
    with path.open("ab") as file:
        file.write(torn)
    ledger.append(path, row(model="after"))
    assert [r["model"] for r in read_ledger(path)] == ["before", "after"]


def _write_many(path, model):
    for i in range(50):
        ledger.append_jsonl(path, {"run_id": f"{model}{i}", "model": model, "text": "x" * 20_000})


def test_two_processes_append_without_mixing_lines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, model)) for model in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = read_ledger(path)
    for model in "ab":
        assert [r["run_id"] for r in rows if r["model"] == model] == [f"{model}{i}" for i in range(50)]


def test_the_table_is_markdown(tmp_path):
    written = ledger.append(tmp_path / "l.jsonl", row(run_name="a|b\nc"))
    lines = table([written], ["accuracy", "critique_f1", "parse_rate"], ["run_name", "model"]).splitlines()
    assert lines == [
        "| run_name | model | accuracy | critique_f1 | parse_rate |",
        "| --- | --- | --- | --- | --- |",
        "| a\\|b c | m | 75.0 % [50.0, 100.0] (3/4) | – | – |",
    ]


def test_the_table_shows_shares_in_per_cent_and_nothing_else():
    metrics = {
        "coser/Average": Metric(52.5, 105.0, 2, 40.0, 65.0),
        "brier": Metric(0.1284, 12.84, 100),
        "accuracy": Metric(1.0, 2, 2),
    }
    written = dataclasses.asdict(row(metrics=metrics))
    shown = table([written], list(metrics), []).splitlines()[-1]
    assert shown == "| 52.5 [40.0, 65.0] (105.0/2) | 0.128 (12.8/100) | 100.0 % (2/2) |"


@pytest.mark.parametrize(
    ("metric", "rate", "text"),
    [
        (Metric(0.712, 356, 500, 0.68, 0.741), True, "71.2 % [68.0, 74.1] (356/500)"),
        (Metric(0.1284, 12.84, 100, 0.1, 0.15), False, "0.128 [0.100, 0.150] (12.8/100)"),
        (Metric(34.26, 3426.0, 100), False, "34.3 (3426.0/100)"),
        (Metric(None, 0, 0), True, "–"),
    ],
    ids=["share", "between 0 and 1", "tokens", "nothing counts"],
)
def test_figures_have_the_digits_that_say_something(metric, rate, text):
    assert format_metric(metric, rate) == text
