import json
from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.sources import DataConfig, load_pairs
from nlhf.sources.helpsteer3 import load


def annotator(score, reasoning="", feedback1="", feedback2=""):
    return {"score": score, "reasoning": reasoning, "feedback1": feedback1, "feedback2": feedback2}


def make_row(name="q", preference=-2, **change):
    return {
        "domain": "general",
        "language": "english",
        "context": [{"role": "user", "content": name}],
        "response1": "one",
        "response2": "two",
        "overall_preference": preference,
        "individual_preference": [annotator(preference, "@Response 1 is fuller than @Response 2.")],
    } | change


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path, split="train", **options):
    drops = Counter()
    return list(load(path, split, drops, **options)), drops


@pytest.fixture
def read_rows(tmp_path):
    return lambda rows, **options: read(write(tmp_path / "rows.jsonl", rows), **options)


@pytest.mark.parametrize(("preference", "label"), [(-3, "A"), (-1, "A"), (1, "B"), (3, "B")])
def test_negative_preference_means_the_first_response(read_rows, preference, label):
    ((pair,), _) = read_rows([make_row(preference=preference)])
    assert (pair.label, pair.strength, pair.response_a, pair.response_b) == (label, preference, "one", "two")


def test_rows_are_cleaned_in_order_and_each_drop_has_its_reason(read_rows):
    rows = [
        make_row("a"),
        make_row("a", domain="multilingual", preference=0),  # both reasons: the first in order counts
        make_row("a", preference=0),  # would be a repetition too
        make_row("a", preference=3),  # repeats, with another preference: the first stays
        make_row("a", response1="two", response2="one"),  # exchanged: no repetition
        make_row("b"),
        make_row("b", domain="code"),
    ]
    pairs, drops = read_rows(rows)
    assert [(p.id, p.label) for p in pairs] == [
        ("helpsteer3-train-1", "A"),
        ("helpsteer3-train-5", "A"),
        ("helpsteer3-train-6", "A"),
    ]
    assert drops == {"multilingual domain": 1, "preference 0": 1, "repeated within the split": 2}


class TestValidation:
    TRAIN = (make_row("seen"), make_row("tie in train", preference=0))
    ROWS = (make_row("seen"), make_row("new"), make_row("new"), make_row("tie in train"))
    KEPT = ("helpsteer3-validation-2", "helpsteer3-validation-4")
    DROPS = {"occurs in train": 1, "repeated within the split": 1}  # noqa: RUF012 - never changed

    def test_in_a_folder(self, tmp_path):
        write(tmp_path / "train.jsonl", self.TRAIN)
        write(tmp_path / "validation.jsonl", self.ROWS)
        pairs, drops = read(str(tmp_path), "validation")
        assert tuple(p.id for p in pairs) == self.KEPT
        assert drops == self.DROPS

    def test_with_a_train_file_of_its_own(self, tmp_path):
        train = write(tmp_path / "t.jsonl", self.TRAIN)
        pairs, drops = read(write(tmp_path / "v.jsonl", self.ROWS), "validation", train_path=train)
        assert tuple(p.id for p in pairs) == self.KEPT
        assert drops == self.DROPS

    def test_on_the_hub(self, monkeypatch):
        datasets = pytest.importorskip("datasets")
        splits = {"train": self.TRAIN, "validation": self.ROWS}
        calls = []

        def load_dataset(repository, name, split):
            calls.append((repository, name, split))
            return datasets.Dataset.from_list(list(splits[split]))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        pairs, drops = read(None, "validation")
        assert tuple(p.id for p in pairs) == self.KEPT
        assert drops == self.DROPS
        assert set(calls) == {
            ("nvidia/HelpSteer3", "preference", "train"),
            ("nvidia/HelpSteer3", "preference", "validation"),
        }

    def test_without_the_train_file_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="train_path"):
            read(write(tmp_path / "v.jsonl", self.ROWS), "validation")


@pytest.mark.parametrize(
    ("annotators", "chosen"),
    [
        pytest.param([annotator(-1, "sign"), annotator(-2, "equal")], "equal", id="equal-score-before-sign"),
        pytest.param([annotator(2, "against"), annotator(-3, "sign")], "sign", id="sign-before-order"),
        pytest.param([annotator(-1, "first"), annotator(-3, "second")], "first", id="first-of-one-rank"),
        pytest.param([annotator(-2, "first"), annotator(-2, "second")], "first", id="first-of-equal-scores"),
        pytest.param([annotator(1, "against"), annotator(0, "neutral")], "against", id="else-the-first"),
        pytest.param([annotator(-2, " "), annotator(-1, "sign")], "sign", id="equal-score-but-nothing-written"),
        pytest.param([annotator(None, "no score"), annotator(-1, "sign")], "sign", id="no-score"),
        pytest.param([annotator(-2, None), annotator(3, "  against ")], "against", id="null-reasoning"),
        pytest.param([annotator(-2), annotator(-1)], None, id="nobody-wrote"),
        pytest.param([], None, id="no-annotator"),
        pytest.param(None, None, id="null"),
    ],
)
def test_the_annotator_who_agrees_most_is_chosen(read_rows, annotators, chosen):
    ((pair,), _) = read_rows([make_row(preference=-2, individual_preference=annotators)])
    assert [c.text for c in pair.critiques] == ([chosen] if chosen else [])
    assert pair.has_critique is bool(chosen)


def test_reasoning_follows_a_swap(read_rows):
    ((pair,), _) = read_rows([make_row()])
    assert pair.swap().critiques[0].text == "@Response 2 is fuller than @Response 1."


def test_feedback_names_its_response_and_follows_a_swap(read_rows):
    people = [annotator(-2, "x", "Too long.", "Right."), annotator(-2, "y")]
    ((pair,), _) = read_rows([make_row(individual_preference=people)], critique="feedback")
    assert pair.critiques[0].text == "Response A: Too long.\nResponse B: Right."
    assert pair.swap().critiques[0].text == "Response B: Too long.\nResponse A: Right."
    ((pair,), _) = read_rows([make_row(individual_preference=[annotator(-2, "x", "", "Right.")])], critique="feedback")
    assert pair.critiques[0].text == "Response B: Right."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"overall_preference": 5}, "rows.jsonl:1: field 'overall_preference' must be", id="preference"),
        pytest.param({"overall_preference": None}, "'overall_preference' must be", id="null-preference"),
        pytest.param({"overall_preference": True}, "'overall_preference' must be", id="boolean-preference"),
        pytest.param({"individual_preference": {"score": 1}}, "must be a list of objects", id="one-annotator"),
        pytest.param({"response2": None}, "'response_b' must be a string", id="null-response"),
        pytest.param({"context": []}, "at least one turn", id="no-turn"),
    ],
)
def test_malformed_rows_say_where(read_rows, change, message):
    with pytest.raises(UserError, match=message):
        read_rows([make_row(**change)])


def test_bad_options_and_splits_are_refused(read_rows):
    with pytest.raises(UserError, match="'critique' must be reasoning or feedback, got 'reason'"):
        read_rows([make_row()], critique="reason")
    with pytest.raises(UserError, match="no split 'test'"):
        read(None, "test")
    with pytest.raises(UserError, match=r"unknown option 'critiques'.*Did you mean 'critique'"):
        load_pairs(DataConfig(source="helpsteer3", path="x", options={"critiques": "feedback"}))
