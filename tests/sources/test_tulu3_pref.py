import json
from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.pairs import swap_at_random
from nlhf.sources.tulu3_pref import load


def make_row(prompt="Write three words.", chosen="a b c", rejected="a b"):
    def talk(answer):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]

    return {"prompt": prompt, "chosen": talk(chosen), "rejected": talk(rejected)}


@pytest.fixture
def read(tmp_path):
    def read_rows(*rows, seed=0):
        path = tmp_path / "pref.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        drops = Counter()
        return list(load(str(path), "train", drops, seed=seed)), drops

    return read_rows


def test_chosen_wins_wherever_it_is_placed(read):
    pairs, _ = read(*[make_row(f"prompt {i}") for i in range(200)])
    for pair in pairs:
        assert (pair.response_a if pair.label == "A" else pair.response_b) == "a b c"
        assert not pair.has_critique
    assert 70 < Counter(p.label for p in pairs)["A"] < 130
    assert 70 < Counter(p.label for p in swap_at_random(pairs, seed=0))["A"] < 130
    assert [(t.role, t.content) for t in pairs[7].context] == [("user", "prompt 7")]


def test_placement_follows_the_seed(read):
    rows = [make_row(str(i)) for i in range(50)]
    assert read(*rows, seed=1) == read(*rows, seed=1)
    assert read(*rows, seed=1) != read(*rows, seed=2)


def test_answers_to_different_prompts_are_counted(read):
    pairs, drops = read(make_row() | {"rejected": make_row("Another.")["rejected"]}, make_row())
    assert [p.id for p in pairs] == ["tulu3_pref-train-2"]
    assert drops == {"chosen and rejected answer different prompts": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"chosen": "text"}, "pref.json:1: field 'chosen' must be a list", id="text"),
        pytest.param({"rejected": []}, "field 'rejected' must be a list of at least two", id="empty"),
        pytest.param({"chosen": [{"role": "assistant"}, {"role": "user"}]}, "ends with 'user'", id="user-last"),
        pytest.param(
            {"chosen": [{"role": "user", "content": "x"}, {"role": "assistant"}]}, "must be a string", id="null"
        ),
    ],
)
def test_malformed_rows_say_where(read, change, message):
    row = make_row("x") | change
    with pytest.raises(UserError, match=message):
        read(row)


def test_a_missing_field_is_named(read):
    with pytest.raises(UserError, match=r"missing field 'chosen'; found \['prompt'\]"):
        read({"prompt": "x"})
