import json
import re

import pytest

from nlhf.cli import main
from nlhf.data import check, export, show
from nlhf.errors import UserError
from nlhf.sources import DataConfig, load_pairs

ROWS = [
    {"id": "1", "context": "Which is larger?", "response_a": "The sun", "response_b": "The moon", "label": "A"},
    {"id": "2", "context": "Which is larger?", "response_a": "The moon", "response_b": "The sun", "label": "A"},
    {"id": "3", "context": "[bold red]hi[/] :smile:", "response_a": "[/oops]", "response_b": "same", "label": "tie"},
    {"id": "4", "context": "q", "response_a": "equal", "response_b": "equal"},
    {"id": "5", "context": "q", "response_a": "a\x1b[2Jb", "response_b": "\ud800 你好 שלום",
     "critiques": [{"weaknesses_a": "Bad [x]."}]},
]  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(path)


class TestShow:
    def test_prints_every_part_of_a_pair(self, file, capsys):
        show(DataConfig(source="jsonl", path=file), n=4)
        shown = capsys.readouterr().out
        for part in ("label A", "Which is larger?", "response A (better)", "The moon", "blame of A: Bad [x]."):
            assert part in shown

    def test_markup_in_judged_text_is_shown_and_not_obeyed(self, file, capsys):
        show(DataConfig(source="jsonl", path=file), n=4)
        shown = capsys.readouterr().out
        assert "[bold red]hi[/] :smile:" in shown
        assert "[/oops]" in shown

    def test_control_characters_become_visible(self, file, capsys):
        show(DataConfig(source="jsonl", path=file), n=4)
        shown = capsys.readouterr().out
        assert r"a\x1b[2Jb" in shown
        assert r"\ud800 你好 שלום" in shown
        assert "\x1b" not in shown

    @pytest.mark.parametrize(("n", "limit", "expected"), [(1, None, 1), (3, 2, 2), (2, 3, 2), (99, None, 4)])
    def test_prints_so_many(self, file, capsys, n, limit, expected):
        show(DataConfig(source="jsonl", path=file, limit=limit), n=n)
        assert capsys.readouterr().out.count("response A") == expected

    def test_none_at_all_is_refused(self, file):
        with pytest.raises(UserError, match="--n must be at least 1"):
            show(DataConfig(source="jsonl", path=file), n=0)

    def test_from_the_command_line(self, file, capsys):
        assert main(["data", "show", "--data.source", "jsonl", "--data.path", file, "--n", "1"]) == 0
        assert "The sun" in capsys.readouterr().out


class TestCheck:
    def test_prints_what_the_file_holds(self, file, capsys):
        manifest = check(file)
        assert (manifest.pairs, manifest.labelled, manifest.duplicates, manifest.contradictions) == (4, 1, 1, 1)
        assert manifest.drops == {"equal responses": 1}
        printed = capsys.readouterr().out
        for part in ("left out: equal responses", "ties", "response length", "duplicate: 2 repeats 1", "SHA-256"):
            assert part in printed

    def test_says_so_when_no_responses_are_equal(self, tmp_path, capsys):
        path = tmp_path / "f.jsonl"
        path.write_text(json.dumps(ROWS[0]), encoding="utf-8")
        check(str(path))
        assert re.search(r"left out: equal responses\W+0\b", capsys.readouterr().out)

    def test_tells_which_rows_were_rewritten(self, tmp_path, capsys):
        row = {
            **{"idx": 1, "instruction": "True?", "input": "", "response1": True, "response2": "No."},
            **{"annotator1": 1, "annotator2": 1, "annotator3": 1},
        }
        path = tmp_path / "testset-v1.json"
        path.write_text(json.dumps([row]), encoding="utf-8")
        check(data=DataConfig(source="pandalm", split="test", path=str(path)))
        assert re.search(r"rewritten: JSON boolean cast to text\W+1\b", capsys.readouterr().out)

    def test_of_a_source_with_options(self, tmp_path):
        path = tmp_path / "f.csv"
        path.write_text("p,x,y\nq,one,two\n", encoding="utf-8")
        columns = {"context": "p", "response_a": "x", "response_b": "y"}
        assert check(data=DataConfig(source="jsonl", path=str(path), options={"columns": columns})).pairs == 1

    def test_against_another_data_set(self, file, capsys):
        check(file, against=DataConfig(source="jsonl", path=file, limit=2))
        printed = " ".join(capsys.readouterr().out.split())
        assert "pairs that occur there: 2 (50.0%)" in printed
        assert "contexts that occur there: 2 (50.0%)" in printed

    def test_takes_either_a_file_or_a_data_set(self, file):
        with pytest.raises(UserError, match="give a file to check"):
            check()
        with pytest.raises(UserError, match="not both"):
            check(file, DataConfig(source="comve"))
        with pytest.raises(UserError, match="not both"):
            check(file, DataConfig(source="jsonl", path=file))

    def test_of_a_file_with_options(self, tmp_path):
        path = tmp_path / "f.csv"
        path.write_text("p,response_a,response_b\nq,one,two\n", encoding="utf-8")
        assert main(["data", "check", "--path", str(path), "--data.options.columns.context", "p"]) == 0

    def test_a_malformed_file_says_where(self, tmp_path):
        path = tmp_path / "f.jsonl"
        path.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1] | {"label": "left"}), encoding="utf-8")
        with pytest.raises(UserError, match=r"f.jsonl:2: field 'label'"):
            check(str(path))

    def test_from_the_command_line(self, file, capsys):
        source = ["--data.source", "jsonl", "--data.path", file]
        against = ["--against.source", "jsonl", "--against.path", file]
        assert main(["data", "check", file]) == 0
        by_path = capsys.readouterr().out
        assert main(["data", "check", *source, *against]) == 0
        by_source = capsys.readouterr().out
        assert by_source.startswith(by_path)
        assert "overlap with" in by_source

    def test_mistakes_on_the_command_line_are_one_message_and_exit_code_2(self, file, capsys):
        for arguments, message in (
            (["--data.source", "comvee"], "Did you mean 'comve'"),
            (["--path", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
            (["--data.source", "jsonl", "--data.path", file, "--data.options.column", "x"], "unknown option 'column'"),
        ):
            assert main(["data", "check", *arguments]) == 2
            error = capsys.readouterr().err
            assert message in error
            assert "Traceback" not in error


class TestExport:
    def test_what_is_written_loads_equal(self, file, tmp_path, capsys):
        out = tmp_path / "new" / "out.jsonl"
        export(DataConfig(source="jsonl", path=file), str(out))
        written = load_pairs(DataConfig(source="jsonl", path=str(out)))
        assert written == load_pairs(DataConfig(source="jsonl", path=file))
        assert "4 pairs written" in capsys.readouterr().out

    def test_an_existing_file_is_replaced_only_on_demand(self, file, tmp_path):
        out = tmp_path / "out.jsonl"
        out.write_text("precious", encoding="utf-8")
        with pytest.raises(UserError, match="--overwrite"):
            export(DataConfig(source="jsonl", path=file), str(out))
        assert out.read_text(encoding="utf-8") == "precious"
        export(DataConfig(source="jsonl", path=file), str(out), overwrite=True)
        assert out.read_bytes().count(b"\n") == 4

    def test_a_failure_leaves_the_old_file(self, tmp_path):
        out = tmp_path / "out.jsonl"
        out.write_text("precious", encoding="utf-8")
        with pytest.raises(UserError):
            export(DataConfig(source="jsonl", path="nowhere.jsonl"), str(out), overwrite=True)
        assert out.read_text(encoding="utf-8") == "precious"

    def test_a_name_that_would_be_read_as_another_kind_is_refused(self, file, tmp_path):
        with pytest.raises(UserError, match=r"name it .jsonl"):
            export(DataConfig(source="jsonl", path=file), str(tmp_path / "out.csv"))

    def test_from_the_command_line(self, file, tmp_path):
        out = tmp_path / "out.jsonl"
        source = ["--data.source", "jsonl", "--data.path", file, "--data.limit", "1"]
        assert main(["data", "export", *source, "--out", str(out)]) == 0
        assert main(["data", "export", *source, "--out", str(out)]) == 2
        assert json.loads(out.read_text(encoding="utf-8"))["id"] == "1"


def test_overrides_of_the_writing_direction_become_visible(tmp_path, capsys):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps({**ROWS[0], "response_a": "a\u202eb\u2066c", "response_b": "שלום"}))
    assert main(["data", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert r"a\u202eb\u2066c" in shown
    assert "שלום" in shown


def test_show_needs_a_file_or_a_data_set(file, capsys):
    with pytest.raises(UserError, match="give a file to show"):
        show()
    with pytest.raises(UserError, match="not both"):
        show(DataConfig("sandbox"), path=file)
