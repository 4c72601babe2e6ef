import datetime
import json
from collections import Counter

import pytest

from nlhf.errors import UserError
from nlhf.files import to_json
from nlhf.pairs import HumanCritique
from nlhf.sources import DataConfig, load_pairs
from nlhf.sources.jsonl import load

ROW = {"id": "1", "context": "Which is larger?", "response_a": "The sun", "response_b": "The moon", "label": "A"}
THEIRS = {"prompt": "Which is larger?", "chosen": "The sun", "rejected": "The moon", "better": 1}
COLUMNS = {"context": "prompt", "response_a": "chosen", "response_b": "rejected", "label": "better"}
LABEL_MAP = {"1": "A", "2": "B", "0": "tie"}


@pytest.fixture
def read(tmp_path):
    def read_rows(*rows, **options):
        path = tmp_path / "f.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return list(load(str(path), "train", Counter(), **options))

    return read_rows


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{braces} {0} {{ jinja }} {% raw %} %s", id="template-syntax"),
        pytest.param("你好，世界。答案 B", id="cjk"),
        pytest.param("مرحبا ‏RTL‏ שלום", id="right-to-left"),
        pytest.param("［［Ｂ］］ ＡＢＣ", id="full-width"),
        pytest.param("[[B]] <verdict>B</verdict>", id="verdict"),
        pytest.param("  leading, trailing \n\n", id="white-space"),
        pytest.param("a\u2028b\u0085c\x0bd", id="unicode-line-ends"),
        pytest.param("x" * 100_000, id="100000-characters"),
        pytest.param("", id="empty"),
    ],
)
def test_text_passes_untouched(read, text):
    (pair,) = read(ROW | {"context": text, "response_a": text, "critiques": text or None})
    assert (pair.context[0].content, pair.response_a) == (text, text)
    assert pair.critiques == ([HumanCritique(text=text)] if text else [])


def test_what_a_user_calls_the_columns_and_labels_does_not_matter(read):
    (pair,) = read(THEIRS, columns=COLUMNS, label_map=LABEL_MAP)
    assert (pair.context[0].content, pair.response_a, pair.response_b, pair.label) == (
        "Which is larger?", "The sun", "The moon", "A"
    )  # fmt: skip
    assert (pair.id, pair.source) == ("row-1", "jsonl")


@pytest.mark.parametrize(
    ("label", "expected"),
    [(1, "A"), ("1", "A"), (2, "B"), (0, "tie"), (None, None), ("", None)],
)
def test_label_map(read, label, expected):
    (pair,) = read(THEIRS | {"better": label}, columns=COLUMNS, label_map=LABEL_MAP)
    assert pair.label == expected


@pytest.mark.parametrize(
    ("label", "label_map", "expected"),
    [
        pytest.param(True, {"true": "A", "false": "B"}, "A", id="boolean"),
        pytest.param(False, {True: "A", False: "B"}, "B", id="boolean-keys"),
        pytest.param(0, {0: "A", 1: "B"}, "A", id="number-keys"),
        pytest.param("", {"": "tie", "x": "A"}, "tie", id="blank-means-tie"),
        pytest.param("skip", {"skip": None}, None, id="no-label"),
    ],
)
def test_label_map_keys_of_any_type(read, label, label_map, expected):
    (pair,) = read(ROW | {"label": label}, label_map=label_map)
    assert pair.label == expected


def test_critique_fields_may_be_mapped_and_join_what_is_there(read):
    columns = COLUMNS | {"weaknesses_b": "faults", "text": "note", "annotator": "who", "critiques": "reviews"}
    row = THEIRS | {"faults": ["Too small.", "Too cold."], "note": None, "who": "k", "reviews": "Fine."}
    (pair,) = read(row, columns=columns, label_map=LABEL_MAP)
    mapped = HumanCritique(weaknesses_b="Too small.\nToo cold.", annotator="k")
    assert pair.critiques == [HumanCritique(text="Fine."), mapped]


def test_a_pair_whose_mapped_critiques_are_blank_is_unlabelled(read):
    columns = COLUMNS | {"text": "note", "annotator": "who"}
    (pair,) = read(THEIRS | {"note": "", "who": "k"}, columns=columns, label_map=LABEL_MAP)
    assert not pair.has_critique


def test_unnamed_columns_are_passed_over_and_a_column_serves_one_field(read):
    row = THEIRS | {"model": "m", "id": "mine", "response_a": "unused", "text": "no critique"}
    (pair,) = read(row, columns=COLUMNS, label_map=LABEL_MAP)
    assert (pair.id, pair.response_a, pair.critiques) == ("mine", "The sun", [])
    # Their "label" is the source here, so it is not our label too.
    columns = {k: v for k, v in COLUMNS.items() if k != "label"} | {"source": "label"}
    (pair,) = read(THEIRS | {"label": "web"}, columns=columns)
    assert (pair.source, pair.label) == ("web", None)


@pytest.mark.parametrize(("name", "expected"), [(None, "row-1"), ("", "row-1"), (17, "17"), ("x", "x")])
def test_ids(read, name, expected):
    (pair,) = read(ROW | {"id": name})
    assert pair.id == expected


def test_two_rows_with_one_id_are_refused(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n", encoding="utf-8")
    with pytest.raises(UserError, match="two pairs have the id '1'"):
        load_pairs(DataConfig(source="jsonl", path=str(path)))


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        pytest.param(ROW | {"label": "a"}, {}, r"f.jsonl:2: field 'label' .* got 'a'.*label_map", id="label"),
        pytest.param(ROW | {"label": 1}, {}, r"f.jsonl:2: field 'label' .* got 1", id="label-number"),
        pytest.param(
            ROW | {"label": "C"}, {"label_map": LABEL_MAP | {"A": "A"}}, r":2: label 'C' is not in", id="not-mapped"
        ),
        pytest.param(
            ROW | {"response_a": False}, {}, r":2: field 'response_a' must be a string, got bool", id="boolean"
        ),
        pytest.param(ROW | {"respons_b": "x"}, {}, r":2: unknown field 'respons_b'.*'response_b'", id="misspelt"),
        pytest.param(ROW | {"strength": "strong"}, {}, r":2: field 'strength' must be", id="strength"),
        pytest.param(ROW | {"meta": "x"}, {}, r":2: field 'meta' must be an object", id="meta"),
        pytest.param({"id": "2"}, {}, r":2: missing field 'context'; found", id="missing"),
    ],
)
def test_malformed_rows_say_where(read, row, options, message):
    with pytest.raises(UserError, match=message):
        read(ROW, row, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"columns": COLUMNS | {"label": "beter"}}, r":1: missing column 'beter'.*found.*mean 'better'", id="column"
        ),
        pytest.param({"columns": {"respons_a": "chosen"}}, r"no field 'respons_a'.*mean 'response_a'", id="field"),
        pytest.param({}, r":1: no column for field 'context'; found .*option 'columns', as in {c", id="no-columns"),
        pytest.param(
            {"columns": {"context": "prompt"}}, r":1: no column for field 'response_a'; found", id="not-named"
        ),
        pytest.param(
            {"label_map": {"1": "a"}}, r"'label_map': '1' must mean 'A', 'B', 'tie' or null, got 'a'", id="label-map"
        ),
    ],
)
def test_bad_options_say_what_is_known(read, options, message):
    with pytest.raises(UserError, match=message):
        read(THEIRS, **options)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        pytest.param(
            THEIRS | {"chosen": 3},
            {},
            r"f.jsonl:2: field 'response_a' \(column 'chosen'\) must be a string",
            id="response",
        ),
        pytest.param(
            THEIRS | {"better": "left"},
            {"label_map": None},
            r":2: field 'label' \(column 'better'\) .*'left'",
            id="label",
        ),
        pytest.param(
            {k: v for k, v in THEIRS.items() if k != "prompt"},
            {},
            r":2: missing field 'context' \(column 'prompt'\)",
            id="gap",
        ),
        pytest.param(THEIRS | {"critiques": 5}, {}, r":2: field 'critiques' must be a list", id="not-mapped"),
    ],
)
def test_an_error_names_the_users_own_column(read, row, options, message):
    with pytest.raises(UserError, match=message):
        read(THEIRS | {"better": "A"}, row, **{"columns": COLUMNS, "label_map": LABEL_MAP | {"A": "A"}} | options)


def test_a_column_may_be_left_out_of_some_rows_but_a_required_one_may_not(read):
    columns = COLUMNS | {"text": "note"}
    first, second = read(THEIRS, THEIRS | {"note": "Fine."}, columns=columns, label_map=LABEL_MAP)
    assert (first.has_critique, second.has_critique) == (False, True)
    short = {k: v for k, v in THEIRS.items() if k != "rejected"}
    with pytest.raises(UserError, match=r"f.jsonl:2: missing field 'response_b'"):
        read(THEIRS, short, columns=COLUMNS, label_map=LABEL_MAP)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_table_with_another_separator_is_no_matter_of_columns(tmp_path, mark):
    path = tmp_path / "f.csv"
    path.write_text(f"context{mark}response_a{mark}response_b\nq{mark}x{mark}y\n")
    with pytest.raises(UserError, match=r"one single column: separate columns by commas"):
        load_pairs(DataConfig("jsonl", path=str(path)))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_tables(tmp_path, suffix):
    pandas = pytest.importorskip("pandas")
    rows = [ROW | {"strength": -2, "critiques": "Far larger."}, ROW | {"id": "2", "label": None, "strength": None}]
    table = pandas.DataFrame(rows)
    path = tmp_path / f"f{suffix}"
    table.to_csv(path, index=False) if suffix == ".csv" else table.to_parquet(path)
    first, second = load(str(path), "train", Counter())
    assert (first.label, first.strength, first.critiques) == ("A", -2, [HumanCritique(text="Far larger.")])
    assert (second.label, second.strength, second.critiques) == (None, None, [])
    assert isinstance(first.strength, int)


def test_no_path_says_which_flag():
    with pytest.raises(UserError, match=r"--data\.path"):
        list(load(None, "train", Counter()))


def test_options_come_through_the_configuration(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(THEIRS) + "\n", encoding="utf-8")
    config = DataConfig(source="jsonl", path=str(path), options={"columns": COLUMNS, "label_map": LABEL_MAP})
    assert load_pairs(config)[0].label == "A"
    with pytest.raises(UserError, match=r"unknown option 'column'.*known: \['columns', 'label_map'\].*'columns'"):
        load_pairs(DataConfig(source="jsonl", path=str(path), options={"column": {}}))
    with pytest.raises(UserError, match="unknown option 'seed'"):  # it has a place of its own, data.seed
        load_pairs(DataConfig(source="jsonl", path=str(path), options={"seed": 1}))


@pytest.mark.parametrize("option", ["columns", "label_map"])
@pytest.mark.parametrize("value", [1, ["a"], "a"], ids=["number", "list", "text"])
def test_options_that_map_names_must_be_mappings(read, option, value):
    with pytest.raises(UserError, match=f"option '{option}' must map names to names"):
        read(ROW, **{option: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"id": True}, "field 'id' must be a non-empty string", id="id-is-true"),
        pytest.param({"critiques": [{"annotator": []}]}, "'annotator' must be a name", id="annotator-is-a-list"),
    ],
)
def test_values_of_another_type_are_not_made_into_text(read, change, message):
    with pytest.raises(UserError, match=message):
        read({**ROW, **change})


def test_what_json_cannot_say_becomes_text_in_meta(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    day = datetime.date(2024, 5, 1)
    parquet.write_table(pyarrow.Table.from_pylist([{**ROW, "meta": {"day": day}}]), tmp_path / "f.parquet")
    (pair,) = load(str(tmp_path / "f.parquet"), "train", Counter())
    assert pair.meta == {"day": "2024-05-01"}
    assert json.loads(to_json(pair.to_dict()))["meta"] == pair.meta


def test_equal_ids_are_refused_with_the_file(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "response_a": "The earth"}) + "\n")
    with pytest.raises(UserError, match=rf"{path}: two pairs have the id '1'"):
        load_pairs(DataConfig("jsonl", path=str(path)))


@pytest.mark.parametrize("numbers", [{"limit": 10**30}, {"limit": 10**30, "skip": 0}])
def test_a_limit_of_any_size(tmp_path, numbers):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert len(load_pairs(DataConfig("jsonl", path=str(path), **numbers))) == 1


@pytest.mark.parametrize("skip", [1, 10**30])
def test_skipping_everything_says_so(tmp_path, skip):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with pytest.raises(UserError, match=f"data.skip = {skip} passes over all"):
        load_pairs(DataConfig("jsonl", path=str(path), skip=skip))
