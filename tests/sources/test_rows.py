import json

import pytest

from nlhf.errors import UserError
from nlhf.sources.rows import local_file, local_or_hub_rows, read_rows

ROWS = [{"a": "x", "b": "1"}, {"a": '多行\n"quoted", {{ jinja }}', "b": ""}]


def write(folder, name, rows=ROWS):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        quoted = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row.values()] for row in rows]
        separator = "\t" if path.suffix == ".tsv" else ","
        lines = [separator.join(rows[0]), *(separator.join(values) for values in quoted)]
        path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig", newline="")
    elif name.startswith("list"):
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("name", ["f.jsonl", "f.ndjson", "list.json", "lines.json", "f.csv", "f.tsv", "f.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = write(tmp_path, name)
    places, rows = zip(*read_rows(path), strict=True)
    assert list(rows) == ROWS
    start = 2 if path.suffix in (".csv", ".tsv") else 1
    assert places == (f"{path}:{start}", f"{path}:{start + 1}")


def test_a_csv_row_is_named_by_the_line_on_which_it_begins(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text('a,b\n"one\ntwo",1\n\nx,2\n', encoding="utf-8")
    assert [place for place, _ in read_rows(path)] == [f"{path}:2", f"{path}:5"]


def test_a_csv_field_may_be_longer_than_the_library_allows_by_itself(tmp_path):
    path = write(tmp_path, "f.csv", [{"a": "x" * 200_000, "b": "1"}])
    assert len(next(read_rows(path))[1]["a"]) == 200_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("f.jsonl", b"", "f.jsonl: the file holds no rows", id="empty-jsonl"),
        pytest.param("f.jsonl", b"\n \n", "no rows", id="blank-lines"),
        pytest.param("f.csv", b"", "no rows", id="empty-csv"),
        pytest.param("f.csv", b"a,b\n", "no rows", id="header-alone"),
        pytest.param("f.json", b"[]", "no rows", id="empty-list"),
        pytest.param("f.jsonl", b'{"a": 1}\n{"a": \n', "f.jsonl:2: not valid JSON", id="torn-line"),
        pytest.param("f.jsonl", b"[1]\n", "f.jsonl:1: a row must be an object .* got list", id="row-is-a-list"),
        pytest.param("f.json", b'[{"a": 1}, 2]', "f.json:2: a row must be an object .* got int", id="row-is-a-number"),
        pytest.param("f.json", b'[{"a": 1},\n}]', "f.json:2: not valid JSON", id="bad-json"),
        pytest.param("f.jsonl", b'{"a": "\xff"}', "not UTF-8", id="latin-1-jsonl"),
        pytest.param("f.csv", b"a\n\xff\n", "not UTF-8", id="latin-1-csv"),
        pytest.param("f.json", b"[\xff]", "not UTF-8", id="latin-1-json"),
        pytest.param("f.csv", b"a,b\n1,2\n1\n", "f.csv:3: expected 2 columns", id="short-record"),
        pytest.param("f.csv", b"a,a\n1,2\n", "f.csv:1: column 'a' occurs more than once", id="column-twice"),
        pytest.param("f.csv", b'a,b\n1,2\n"x,2\n', "f.csv:3: not valid CSV", id="open-quote"),
        pytest.param("f.parquet", b"PAR1", "cannot read", id="torn-parquet"),
        pytest.param("f.txt", b"x", "cannot tell the kind of file", id="unknown-kind"),
        pytest.param("f.jsonl.gz", b"x", "Unpack it first", id="compressed"),
    ],
)
def test_malformed_files_say_where(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_rows(path))


def test_a_folder_gives_the_file_named_after_the_split(tmp_path):
    write(tmp_path, "train.csv")
    assert local_file(tmp_path, "train") == tmp_path / "train.csv"
    with pytest.raises(UserError, match=r"split 'validation'; expected validation.jsonl or"):
        local_file(tmp_path, "validation")
    with pytest.raises(UserError, match="no such file or folder"):
        local_file(tmp_path / "nowhere", "train")


class TestHub:
    @pytest.fixture
    def datasets(self):
        return pytest.importorskip("datasets")

    def test_rows_come_from_the_hub_when_there_is_no_path(self, datasets, monkeypatch):
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: datasets.Dataset.from_list(ROWS))
        assert list(local_or_hub_rows(None, "train", "o/r")) == [("o/r [train]:1", ROWS[0]), ("o/r [train]:2", ROWS[1])]

    @pytest.mark.parametrize("kind", [ConnectionError, ValueError, "DatasetNotFoundError", "DatasetGenerationError"])
    def test_a_hub_out_of_reach_names_the_flag_for_a_local_copy(self, datasets, monkeypatch, kind):
        error = kind if isinstance(kind, type) else getattr(datasets.exceptions, kind)

        def fail(*args, **options):
            raise error("no route\nsecond line")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(UserError, match=r"cannot fetch split 'train' of o/r .*\(no route\).*--data.path") as caught:
            list(local_or_hub_rows(None, "train", "o/r"))
        assert "\n" not in str(caught.value)


DEEP = b"[" * 100_000 + b"]" * 100_000
LONG_NUMBER = b'[{"a": ' + b"9" * 5000 + b"}]"


@pytest.mark.parametrize("content", [DEEP, LONG_NUMBER], ids=["nested", "long-number"])
@pytest.mark.parametrize("name", ["f.jsonl", "f.json"])
def test_json_beyond_what_python_reads_names_the_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*cannot be read"):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("name", ["f.jsonl", "f.csv", "f.tsv"])
def test_the_case_of_an_ending_does_not_matter(tmp_path, name):
    write(tmp_path, name).rename(tmp_path / name.upper())
    assert [row for _, row in read_rows(tmp_path / name.upper())] == ROWS


def test_a_parquet_column_that_occurs_twice_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["a", "a"])
    parquet.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(UserError, match="column 'a' occurs more than once"):
        list(read_rows(tmp_path / "f.parquet"))
