import json
from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.pairs import swap_at_random
from nlhf.sources import DataConfig, load_pairs
from nlhf.sources.defacto import load


def make_row(number=1, **change):
    feedback = {
        "summary": "The shop closed in May.",
        "evidence": "It closed in May.",
        "explanation": "The month is wrong.",
        "instruction": "Replace June with May.",
    } | change.pop("feedback", {})
    row = {
        "article": f"Article {number}. It closed in May. {{{{ braces }}}}",
        "candidate": "The shop closed in June.",
        "doc_id": number,
        "has_error": True,
        "intrinsic_error": True,
        "extrinsic_error": False,
        "feedback": feedback,
    }
    return row | change


def write(folder, rows, name="train.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


def read(path, split="train", seed=0):
    drops = Counter()
    return list(load(path, split, drops, seed=seed)), drops


def test_the_corrected_summary_wins_and_the_critique_blames_the_other(tmp_path):
    pairs, drops = read(write(tmp_path, [make_row(i) for i in range(200)]))
    assert not drops
    for pair in pairs:
        winner, loser = (pair.response_a, pair.response_b)[:: 1 if pair.label == "A" else -1]
        assert (winner, loser) == ("The shop closed in May.", "The shop closed in June.")
        blame = getattr(pair.critiques[0], "weaknesses_b" if pair.label == "A" else "weaknesses_a")
        assert blame == "The month is wrong.\nReplace June with May."
    assert pairs[3].id == "defacto-train-3"
    assert pairs[3].context[0].content.endswith("Article 3. It closed in May. {{ braces }}")


def test_placement_is_fair_seeded_and_independent_of_the_rows_around(tmp_path):
    path = write(tmp_path, [make_row(i) for i in range(200)])
    pairs, _ = read(path)
    assert 70 < Counter(p.label for p in pairs)["A"] < 130
    assert pairs == read(path)[0] != read(path, seed=1)[0]
    assert read(write(tmp_path, [make_row(i) for i in range(50, 200)]))[0] == pairs[50:]


def test_the_swap_of_training_with_the_same_seed_does_not_undo_the_placement(tmp_path):
    pairs, _ = read(write(tmp_path, [make_row(i) for i in range(200)]), seed=0)
    assert 70 < Counter(p.label for p in swap_at_random(pairs, seed=0))["A"] < 130


def test_rows_that_prefer_nothing_are_counted(tmp_path):
    rows = [
        make_row(1, has_error=False),
        make_row(2, has_error=False, feedback={"summary": None}),
        make_row(3, feedback={"summary": " "}),
        make_row(4, feedback={"summary": "The shop closed in June. "}),
        make_row(5),
    ]
    pairs, drops = read(write(tmp_path, rows))
    assert [p.id for p in pairs] == ["defacto-train-5"]
    assert drops == {
        "no error in the candidate summary": 2,
        "no corrected summary": 1,
        "correction equals the candidate": 1,
    }


def test_pairs_of_one_article_form_a_group_across_splits(tmp_path):
    write(tmp_path, [make_row(1), make_row(2)])
    write(tmp_path, [make_row(9, article=make_row(1)["article"])], "val.jsonl")
    first, second = read(str(tmp_path))[0]
    (again,) = read(str(tmp_path), "validation")[0]
    assert again.group == first.group != second.group


@pytest.mark.parametrize(
    ("intrinsic", "extrinsic", "subset"),
    [
        (True, False, "intrinsic"),
        (False, True, "extrinsic"),
        (True, True, "intrinsic+extrinsic"),
        (False, False, "unspecified"),
    ],
)
def test_subset_is_the_kind_of_error(tmp_path, intrinsic, extrinsic, subset):
    row = make_row(intrinsic_error=intrinsic, extrinsic_error=extrinsic)
    assert read(write(tmp_path, [row]))[0][0].subset == subset


def test_malformed_rows_say_where(tmp_path):
    row = make_row(2)
    row["candidate_summary"] = row.pop("candidate")
    with pytest.raises(UserError, match=r"train.jsonl:2: missing field 'candidate'.*Did you mean 'candidate_summary'"):
        read(write(tmp_path, [make_row(1), row]))
    with pytest.raises(UserError, match=r":1: field 'feedback' must be an object, got str"):
        read(write(tmp_path, [make_row() | {"feedback": "x"}]))
    with pytest.raises(UserError, match=r":1: field 'feedback': missing field 'summary'"):
        read(write(tmp_path, [make_row() | {"feedback": {}}]))


def test_a_missing_file_or_folder_says_what_to_download(tmp_path):
    for path in (None, str(tmp_path / "nowhere")):
        with pytest.raises(UserError, match=r"Download .*github.com/microsoft/DeFacto.*--data.path.*train.jsonl"):
            read(path)
    with pytest.raises(UserError, match=r"expected val.jsonl or validation.jsonl"):
        read(str(tmp_path), "validation")


@pytest.mark.data
def test_the_real_data(data_dir):
    drops, counts, labels = Counter(), {}, Counter()
    for split in ("train", "validation", "test"):
        pairs = load_pairs(DataConfig(source="defacto", split=split, path=str(data_dir / "defacto")), drops)
        counts[split] = len(pairs)
        labels += Counter(p.label for p in pairs)
        assert all(p.has_critique for p in pairs)
    assert counts == {"train": 696, "validation": 337, "test": 773}
    assert drops == {"no error in the candidate summary": 740, "correction equals the candidate": 15}
    assert abs(labels["A"] / sum(labels.values()) - 0.5) < 0.03
