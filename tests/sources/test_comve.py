from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique
from nlhf.sources import DataConfig, load_pairs
from nlhf.sources.comve import load

# Two pairs of our own, laid out like the train split; first sent0 is against common sense, then sent1.
FILES = {
    "subtaskA_data_all.csv": (
        'id,sent0,sent1\n5,"The fish, alive, flies.",The fish swims.\n7,Snow is cold.,Snow is hot.\n'
    ),
    "subtaskA_answers_all.csv": "5,0\n7,1\n",
    "subtaskB_data_all.csv": (
        "id,FalseSent,OptionA,OptionB,OptionC\n"
        '5,"The fish, alive, flies.",Fish are wet.,Fish have no wings.,Fish are food.\n'
        "7,Snow is hot.,,Snow is white.,Snow would melt.\n"
    ),
    "subtaskB_answers_all.csv": "5,B\n7,C\n",
    "subtaskC_answers_all.csv": (
        "7,Snow would melt.,Snow is frozen.,Heat melts snow.\n"
        "5,Fish have no wings.,Fish live in water.,Only birds fly.\n"
    ),
}


def write(folder, files=FILES, split="train"):
    (folder / split).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / split / name).write_text(text, encoding="utf-8")
    return str(folder)


def read(path, split="train"):
    return list(load(path, split, Counter()))


def test_the_sensible_statement_wins_and_the_reasons_blame_the_other(tmp_path):
    first, second = read(write(tmp_path))
    assert (first.id, first.label, first.response_a) == ("comve-train-5", "B", "The fish, alive, flies.")
    assert (second.id, second.label, second.response_b) == ("comve-train-7", "A", "Snow is hot.")
    assert [turn.content for turn in first.context] == ["Which statement makes sense?"]
    reasons = ["Fish have no wings.", "Fish live in water.", "Only birds fly."]
    assert first.critiques == [HumanCritique(weaknesses_a=reason) for reason in reasons]
    assert [c.weaknesses_b for c in second.critiques] == ["Snow would melt.", "Snow is frozen.", "Heat melts snow."]


def test_a_confusing_reason_that_is_a_reason_as_well_is_left_out(tmp_path):
    reasons = FILES["subtaskC_answers_all.csv"].replace("Only birds fly.", "Fish are wet.")
    first, _ = read(write(tmp_path, FILES | {"subtaskC_answers_all.csv": reasons}))
    assert first.meta["confusing_reasons"] == ["Fish are food."]


def test_confusing_reasons_are_the_wrong_options_and_blanks_are_left_out(tmp_path):
    first, second = read(write(tmp_path))
    assert first.meta["confusing_reasons"] == ["Fish are wet.", "Fish are food."]
    assert second.meta["confusing_reasons"] == ["Snow is white."]


@pytest.mark.parametrize(
    ("split", "folder", "data", "answers"),
    [
        ("train", "Training  Data", "data_all", "answers_all"),
        ("validation", "Dev Data", "dev_data", "gold_answers"),
        ("validation", "dev", "dev_data", "gold_answers"),
        ("test", "Test Data", "test_data", "gold_answers"),
    ],
)
def test_the_published_folders_are_known(tmp_path, split, folder, data, answers):
    files = {n.replace("data_all", data).replace("answers_all", answers): text for n, text in FILES.items()}
    assert [p.id for p in read(write(tmp_path, files, folder), split)] == [f"comve-{split}-5", f"comve-{split}-7"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param(
            "subtaskA_answers_all.csv", "5,0\n", r"subtaskA_data_all.csv:3: the id '7' is missing in", id="no-answer"
        ),
        pytest.param(
            "subtaskA_answers_all.csv", "5,0\n7,2\n", r"answers_all.csv:2: .*one of 0, 1, got '2'", id="bad-answer"
        ),
        pytest.param("subtaskB_answers_all.csv", "5,D\n7,A\n", "one of A, B, C, got 'D'", id="bad-option"),
        pytest.param("subtaskA_data_all.csv", "id,sent0,sent1\n5,x\n", "csv:2: expected 3 columns", id="short-record"),
        pytest.param("subtaskC_answers_all.csv", "", "holds no rows", id="empty-file"),
        pytest.param("subtaskA_answers_all.csv", "5,0\n7,1\n5,1\n", ":3: the id '5' occurs twice", id="twice"),
        pytest.param("subtaskA_data_all.csv", 'id,sent0,sent1\n5,"x,y\n', "csv:2: not valid CSV", id="open-quote"),
    ],
)
def test_malformed_files_say_where(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path, FILES | {name: text}))


def test_a_missing_file_or_folder_says_what_to_download(tmp_path):
    for path in (None, str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match=r"Download .*github.com/wangcunxiang.*--data.path.*subtask"):
            read(path)
    with pytest.raises(UserError, match="expected train or Training  Data"):
        read(str(tmp_path))
    write(tmp_path)
    (tmp_path / "train" / "subtaskC_answers_all.csv").unlink()
    with pytest.raises(UserError, match=r"subtaskC_answers_all.csv: missing; ComVE is published at"):
        read(str(tmp_path))


def test_an_unknown_split_offers_the_nearest():
    with pytest.raises(UserError, match=r"no split 'valid'.*Did you mean 'validation'"):
        read(None, "valid")


@pytest.mark.data
@pytest.mark.parametrize(("split", "rows", "equal"), [("train", 10_000, 5), ("validation", 997, 0), ("test", 1_000, 0)])
def test_the_real_data(data_dir, split, rows, equal):
    drops = Counter()
    pairs = load_pairs(DataConfig(source="comve", split=split, path=str(data_dir / "comve")), drops)
    assert len(pairs) == rows - equal
    assert drops == ({"equal responses": equal} if equal else {})
    labels = Counter(p.label for p in pairs)
    assert set(labels) == {"A", "B"}
    assert abs(labels["A"] / len(pairs) - 0.5) < 0.03
    assert all(len(p.critiques) == 3 and p.has_critique for p in pairs)
    assert sum(len(p.meta["confusing_reasons"]) < 2 for p in pairs) == (6 if split == "train" else 0)
