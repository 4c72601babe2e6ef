"""Files are whole or absent, JSON is valid JSON, and an error names file and line."""

import errno
import json
import os
import stat

import pytest

from nlhf import files
from nlhf.errors import UserError
from nlhf.files import (
    append_jsonl,
    check_appendable,
    check_yaml,
    from_json,
    read_json,
    read_jsonl,
    read_yaml,
    to_json,
    write_json,
    write_jsonl,
    write_text,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "null"),
        ({"x": [1.5, float("inf"), (float("-inf"), 2)]}, '{"x": [1.5, null, [null, 2]]}'),
        ("剂量 “ş” 👍", '"剂量 “ş” 👍"'),
        ("a\u2028b\nc", '"a\u2028b\\nc"'),
        ({"deep": {"er": [{"x": float("nan")}]}}, '{"deep": {"er": [{"x": null}]}}'),
        (True, "true"),
    ],
    ids=["nan", "infinity", "scripts", "line_separator", "nested", "bool"],
)
def test_to_json(value, text):
    assert to_json(value) == text
    json.loads(text)


def test_to_json_knows_numpy_floats():
    numpy = pytest.importorskip("numpy")
    assert to_json({"f1": numpy.float64("nan"), "p": numpy.float64(0.5)}) == '{"f1": null, "p": 0.5}'


def test_what_is_no_json_is_an_error_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "f.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["f.json"]


ROWS = [{"text": "第一行\n第二行"}, {"text": "half \ud83d of a pair"}, {"text": "\u2028 \x85 \r"}, [], None, {"x": 0.1}]


def test_rows_come_back_with_their_line_numbers(tmp_path):
    path = tmp_path / "deep" / "er" / "rows.jsonl"
    write_jsonl(path, iter(ROWS))
    for row in ROWS:
        append_jsonl(path, row)
    assert list(read_jsonl(path)) == list(enumerate(ROWS * 2, start=1))


def test_an_empty_file_has_no_rows(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [])
    assert list(read_jsonl(tmp_path / "rows.jsonl")) == []


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("step", "error", "raised"),
    [
        ("replace", OSError(28, "No space left on device"), UserError),
        ("chmod", KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["disk_full", "interrupted"],
)
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, error, raised):
    path = tmp_path / "f.txt"
    write_text(path, "old")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(raised) as caught:
        write_text(path, "new")
    if raised is UserError:
        assert str(caught.value) == f"cannot write {path}: No space left on device"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f.txt"]


def test_readers_never_see_a_part(tmp_path, monkeypatch):
    """Until the moment of renaming, the old text is there, and the new text is complete beside it."""
    path = tmp_path / "f.txt"
    write_text(path, "old")
    replace = os.replace

    def watching(source, target):
        with open(source, encoding="utf-8") as file:
            assert file.read() == "new " * 100_000
        assert path.read_text() == "old"
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", watching)
    write_text(path, "new " * 100_000)
    assert path.read_text() == "new " * 100_000


def test_others_may_read_what_is_written(tmp_path):
    write_text(tmp_path / "f.txt", "x")
    append_jsonl(tmp_path / "f.jsonl", {})
    for name in ("f.txt", "f.jsonl"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o600 == 0o600
    assert stat.S_IMODE((tmp_path / "f.txt").stat().st_mode) == 0o644


@pytest.mark.parametrize("write", [write_text, append_jsonl], ids=["write", "append"])
@pytest.mark.parametrize("where", ["file/inside.txt", "folder"], ids=["below_a_file", "a_folder"])
def test_what_cannot_be_written_is_named(tmp_path, write, where):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"cannot write .*{where}: "):
        write(tmp_path / where, "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


TORN = ['{"a": 1, "te', '{"a": "é'.encode()[:-1], '{"a": "\\ud8']


@pytest.mark.parametrize("torn", TORN, ids=["object", "character", "escape"])
def test_a_torn_last_line_is_closed_before_more_is_appended(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, {"a": 0})
    with path.open("ab") as file:
        file.write(torn if isinstance(torn, bytes) else torn.encode())
    append_jsonl(path, {"a": 2})
    append_jsonl(path, {"a": 3})
    assert list(read_jsonl(path, skip_torn=True)) == [(1, {"a": 0}), (3, {"a": 2}), (4, {"a": 3})]
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not (valid JSON|UTF-8 text)"):
        list(read_jsonl(path))


def test_rows_before_a_bad_line_are_read_first(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\nnonsense\n')
    rows = read_jsonl(path)
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not valid JSON \(Expecting value at column 1\)"):
        next(rows)


def test_what_a_line_lacks_is_missed_at_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1\n')
    with pytest.raises(UserError, match=r"Expecting ',' delimiter at column 8"):
        list(read_jsonl(path))


def test_a_short_write_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "write", lambda handle, line: len(line) - 1)
    with pytest.raises(UserError, match="disk is full"):
        append_jsonl(tmp_path / "rows.jsonl", {"a": 1})


@pytest.mark.parametrize("name", ["missing.jsonl", "."], ids=["missing", "folder"])
def test_what_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(UserError, match="cannot read"):
        list(read_jsonl(tmp_path / name))


def test_a_document_with_half_a_surrogate_pair_comes_back(tmp_path):
    write_json(tmp_path / "f.json", {"\ud800": "\udfff"})
    assert read_json(tmp_path / "f.json") == {"\ud800": "\udfff"}


@pytest.mark.parametrize("text", ["[]", "null", "1", "{", "[" * 100_000, "9" * 5000], ids=lambda text: text[:4])
def test_a_document_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=r"f\.json"):
        read_json(tmp_path / "f.json")


# ------------------------------------------------------------------------------------- of two values none is the right


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"a": 1, "label": "A", "label": "B"}', "label"),
        ('{"meta": {"deep": [{"x": null, "x": null}]}}', "x"),
        ('{"é": 1, "\\u00e9": 2}', "é"),
    ],
    ids=["top", "deep", "escaped"],
)
def test_a_field_that_comes_twice_is_named_with_its_line(tmp_path, text, name):
    (tmp_path / "f.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"f\.json: field '{name}' comes twice"):
        read_json(tmp_path / "f.json")
    (tmp_path / "f.jsonl").write_text('{"a": 1}\n' + text + "\n", encoding="utf-8")
    for skip_torn in (False, True):  # a line that a kill tore is not JSON at all
        with pytest.raises(UserError, match=rf"f\.jsonl:2: field '{name}' comes twice"):
            list(read_jsonl(tmp_path / "f.jsonl", skip_torn))


def test_equal_names_in_several_objects_are_no_repetition():
    text = '[{"a": {"a": 1}}, {"a": 2}]'
    assert from_json(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb: 2\na: 3", "x:\n- {a: 1, a: 1}", '{"a": 1, "a": 2}', "x: &n {a: 1, 'a': 2}\ny: *n"],
    ids=["top", "deep", "json", "quoted"],
)
def test_a_key_that_comes_twice_in_a_yaml_is_named_with_its_line(tmp_path, text):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(UserError, match=r"f\.yaml: 'a' comes twice; leave one out in line \d, column \d"):
        read_yaml(tmp_path / "f.yaml")


@pytest.mark.parametrize(
    "text",
    ["a: {a: 1}\nb: {a: 1}", "b: &b {a: 1}\nx: {<<: *b, a: 2}", "b: &b {a: 1}\nx: *b\ny: *b", "1: x\n'1': y", ""],
    ids=["levels", "merge", "alias", "number and text", "empty"],
)
def test_keys_that_only_look_alike_are_no_repetition(text):
    check_yaml(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 900 + "]" * 900, "brackets within brackets"),
        ("[" * 20_000, "f.yaml: "),
        ("- 1", "got a list"),
        ("a: [", "f.yaml: "),
        ("x: " + "9" * 5000, "f.yaml: "),
        ("x: 2026-05-40", "f.yaml: "),
        (b"x: \xe9", "f.yaml: "),
    ],
    ids=["deep", "unfathomable", "list", "unfinished", "digits", "date", "latin-1"],
)
def test_a_yaml_that_cannot_be_read_is_one_message(tmp_path, text, message):
    (tmp_path / "f.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_yaml(tmp_path / "f.yaml")
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------------------ appending


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("folder", "it is a folder"),
        ("file/ledger", "file is a file"),
        ("x" * 300, "too long"),
        ("loop", "symbolic links"),
        ("to-folder", "it is a folder"),
        ("to-nowhere/ledger", "Not a directory|is a file"),
    ],
    ids=["folder", "under-a-file", "long-name", "loop", "link-to-folder", "link-to-below-a-file"],
)
def test_where_nothing_can_be_appended_is_said_before(tmp_path, where, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("pool")
    (tmp_path / "pool").symlink_to("loop")
    (tmp_path / "to-folder").symlink_to("folder")
    (tmp_path / "to-nowhere").symlink_to("file/gone")
    with pytest.raises(UserError, match=message):
        check_appendable(tmp_path / where)
    with pytest.raises(UserError, match="cannot write"):  # it would have failed
        append_jsonl(tmp_path / where, {})


def test_a_file_that_may_not_be_written_is_said_before(tmp_path, monkeypatch):
    (tmp_path / "ledger").write_text('{"kept": 1}\n')

    def refuse(path, flags, *mode):
        assert flags & (os.O_RDWR | os.O_WRONLY)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        check_appendable(tmp_path / "ledger")


def test_a_link_to_a_file_that_is_not_there_yet_is_written_through(tmp_path):
    (tmp_path / "ledger").symlink_to("real")
    check_appendable(tmp_path / "ledger")
    assert not (tmp_path / "real").exists()
    append_jsonl(tmp_path / "ledger", {"a": 1})
    assert list(read_jsonl(tmp_path / "real")) == [(1, {"a": 1})]


def test_checking_for_appending_writes_nothing(tmp_path):
    check_appendable(tmp_path / "new" / "ledger.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    assert pipe.is_fifo()
    os.close(reader)
