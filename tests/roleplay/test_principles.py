import copy
import json

import pytest
import yaml

from nlhf.cli import main
from nlhf.errors import UserError
from nlhf.evaluation.results import further_figures, load_run
from nlhf.files import read_json, read_jsonl, write_jsonl
from nlhf.formats import FORMATS, get_format
from nlhf.pairs import Pair, Turn
from nlhf.roleplay.principles import BUILT_IN, DIMENSIONS, library, load_principles
from tests.generation.faulty_server import FaultyServer, completion
from tests.roleplay.cases import reply

ROWS = yaml.safe_load(BUILT_IN.read_text(encoding="utf-8"))


def test_the_library_covers_every_dimension_from_both_sides():
    found = {(p.dimension, p.polarity) for p in library().principles}
    assert found == {(d, p) for d in DIMENSIONS for p in ("negative", "positive")}
    assert len({p.definition for p in library().principles}) == len(library().principles) >= 48
    assert {p.level for p in library().principles} == {"sentence", "session"}


@pytest.mark.parametrize("name", ["Out of character", "out_of_character", "OUT-OF-CHARACTER", " out of  character. "])
def test_a_principle_is_found_by_its_name_however_written(name):
    assert library().find(name).id == "out_of_character"
    assert library().find(f"{name} too") is None
    assert library().find("") is None


def without(name):
    return lambda rows: [row.pop(name) for row in rows["principles"][:1]]


def changed(**values):
    return lambda rows: rows["principles"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(without("level"), r"principle 1: expected the fields id, .*definition, got", id="missing"),
        pytest.param(changed(weight=2), "principle 1: expected the fields", id="unknown"),
        pytest.param(changed(polarity="negativ"), "Did you mean 'negative'", id="polarity"),
        pytest.param(changed(dimension="Plot"), "field 'dimension' must be one of", id="dimension"),
        pytest.param(changed(level=None), "field 'level' must be one of sentence, session", id="null"),
        pytest.param(changed(id="Out of character"), "lower-case words joined by _", id="id"),
        pytest.param(changed(definition="Bad."), "20 to 300 characters", id="short"),
        pytest.param(lambda rows: rows["principles"].append(rows["principles"][0]), "two principles have", id="twice"),
        pytest.param(lambda rows: rows.update(principles=[]), "principles a list of at least one", id="none"),
        pytest.param(changed(definition="One line.\rAnother line of text."), "one line of 20", id="lines"),
        pytest.param(lambda rows: rows.update(version=1), "version must be a text", id="version"),
        pytest.param(lambda rows: rows.update(version=" "), "version must be a text", id="blank-version"),
        pytest.param(lambda rows: rows.pop("version"), "expected the fields version and principles", id="no-version"),
    ],
)
def test_a_library_that_is_wrong_is_refused_by_file_and_place(tmp_path, change, message):
    rows = copy.deepcopy(ROWS)
    change(rows)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(rows, sort_keys=False), encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load_principles(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["version: '1'\nprinciples: [", "[]", "", "a: b", "\0", "version: '1'\nversion: '2'"])
def test_a_file_that_is_no_library_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="mine"):
        load_principles(file)
    with pytest.raises(UserError, match=r"none\.yaml: .*o such file"):
        load_principles(tmp_path / "none.yaml")


def test_a_field_that_comes_twice_is_refused(tmp_path):
    file = tmp_path / "mine.yaml"
    row = yaml.safe_dump({"version": "1", "principles": ROWS["principles"][:1]}, sort_keys=False)
    file.write_text(row.replace("  polarity: negative", "  polarity: negative\n  polarity: positive"))
    with pytest.raises(UserError, match=r"mine\.yaml: .*'polarity' comes twice"):
        load_principles(file)


def test_what_would_clear_the_terminal_is_shown_as_text(tmp_path, capsys):
    rows = {"version": "1", "principles": [ROWS["principles"][0] | {"definition": "\x1b[2J wipes everything."}]}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(rows), encoding="utf-8")
    assert main(["roleplay", "principles", "--principles", str(file)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in "".join(out.split())


def test_a_teacher_reads_every_principle_and_a_judge_none():
    pair = Pair("p", [Turn("user", "Knock.")], "Maren: Go.", "Maren: Come.", "A")
    taught, judged = (get_format(name).render(pair)[0]["content"] for name in ("her_rm_teacher", "her_rm"))
    for principle in library().principles:
        assert f"/ {principle.name} ({principle.polarity}, {principle.level}): {principle.definition}" in taught
        assert principle.definition not in judged


# ------------------------------------------------------------------------------------------------- a file of the user's

MINE = {
    "version": "mine 1",
    "principles": [
        {
            "id": "names_the_sea",
            "dimension": "Worldview Consistency",
            "polarity": "negative",
            "level": "sentence",
            "definition": "The turn names the sea – which nobody on this coast does.",
        }
    ],
}
PAIR = Pair("p", [Turn("user", "Knock.")], "Maren: Go to the sea.", "Maren: Come.", "A")
# By the built-in principles, which lack the name, two winners outweigh one; by the user's, the violation decides.
REPLY = reply("A", "B", "A", "A", names=["Names the sea", "x", "y"])


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(MINE, allow_unicode=True), encoding="utf-8")
    return file


@pytest.fixture
def evaluate(tmp_path):
    """Evaluates one pair in both orders, with a judge whose reply is always the same: function, server and folder."""
    server = FaultyServer()
    server.default = completion(REPLY)
    write_jsonl(tmp_path / "pairs.jsonl", [PAIR.to_dict()])

    def run(*options, out="run"):
        data = ("--data.source", "jsonl", "--data.path", tmp_path / "pairs.jsonl", "--ledger", "null")
        backend = ("--model.name", "m", "--backend.kind", "openai", "--backend.base_url", server.url)
        return main(["evaluate", *map(str, (*data, *backend, "--out", tmp_path / out, *options))])

    yield run, server, tmp_path / "run"
    server.close()


def test_a_file_is_written_and_read_back_equal(mine, tmp_path):
    found = load_principles(mine)
    (tmp_path / "again.yaml").write_text(found.yaml, encoding="utf-8")
    assert load_principles(tmp_path / "again.yaml") == found
    assert found.find("Names the sea").polarity == "negative"
    assert found.hash != library().hash


def test_the_users_principles_take_the_place_of_ours_in_the_teachers_prompt(mine):
    ours, theirs = (get_format("her_rm_teacher", principles=file) for file in (None, str(mine)))
    prompt = theirs.render(PAIR)[0]["content"]
    assert "- Worldview Consistency / Names the sea (negative, sentence): The turn names the sea – which" in prompt
    assert not [p.name for p in library().principles if f"/ {p.name} (" in prompt]
    assert ours.prompt_hash != theirs.prompt_hash
    assert get_format("her_rm", principles=str(mine)).render(PAIR) == get_format("her_rm").render(PAIR)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"her_rm", "her_rm_teacher"}))
def test_a_format_without_principles_refuses_a_file_of_them(name, mine):
    with pytest.raises(UserError, match=f"format '{name}' judges by no list of principles"):
        get_format(name, principles=str(mine))


def figures(folder):
    return {figure.title: figure.text for figure in further_figures(load_run(folder, resamples=0))}


@pytest.mark.parametrize("format", ["her_rm", "her_rm_teacher"])
def test_an_evaluation_holds_replies_against_the_users_principles_and_keeps_them(format, mine, evaluate):
    run, server, folder = evaluate
    assert run("--format", format, "--principles", mine) == 0
    assert ("Names the sea" in server.bodies[0]["messages"][0]["content"]) == (format == "her_rm_teacher")
    found = load_principles(mine)
    assert read_json(folder / "manifest.json")["judge"]["principles"] == {"version": "mine 1", "hash": found.hash}
    mine.unlink()  # the folder stands alone
    assert load_principles(folder / "principles.yaml") == found
    assert figures(folder)["Verdict contradicted"].startswith("100.0 %")
    assert figures(folder)["Principles of the library"].startswith("33.3 %")


def test_without_a_file_the_built_in_principles_count_and_are_kept(evaluate):
    run, _, folder = evaluate
    assert run("--format", "her_rm") == 0
    assert load_principles(folder / "principles.yaml") == library()
    assert figures(folder)["Verdict entailed"].startswith("100.0 %")


def test_a_run_is_not_resumed_after_the_principles_have_changed(mine, evaluate, capsys):
    run, _, folder = evaluate
    options = ("--format", "her_rm", "--principles", mine)
    assert run(*options) == 0
    mine.write_text(mine.read_text(encoding="utf-8").replace("negative", "positive"), encoding="utf-8")
    assert run(*options, "--resume", "true") == 2
    assert "the judge's prompt or format changed" in capsys.readouterr().err
    assert load_principles(folder / "principles.yaml").find("Names the sea").polarity == "negative"


def test_a_bad_file_ends_an_evaluation_before_it_begins(mine, evaluate, capsys):
    run, server, folder = evaluate
    mine.write_text(mine.read_text(encoding="utf-8").replace("negative", "bad"), encoding="utf-8")
    assert run("--format", "her_rm_teacher", "--principles", mine) == 2
    assert f"{mine}, principle 1: field 'polarity' must be one of negative, positive" in capsys.readouterr().err
    assert not folder.exists()
    assert not server.bodies


def test_the_verb_judge_puts_the_users_principles_to_the_teacher(mine, tmp_path):
    server = FaultyServer()
    server.default = completion(REPLY)
    write_jsonl(tmp_path / "pairs.jsonl", [PAIR.to_dict()])
    options = ("--input", tmp_path / "pairs.jsonl", "--output", tmp_path / "out.jsonl", "--format", "her_rm_teacher")
    backend = ("--model.name", "m", "--backend.kind", "openai", "--backend.base_url", server.url)
    command = ["judge", *map(str, (*options, *backend))]
    try:
        assert main([*command, "--principles", str(mine)]) == 0
        assert "Names the sea" in server.bodies[0]["messages"][0]["content"]
        assert main(command) == 2  # the file holds verdicts by other principles
    finally:
        server.close()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        pytest.param("file", 0, id="a-file"),
        pytest.param("folder", 0, id="those-in-the-evaluation"),
        pytest.param(None, 1, id="the-built-in-ones"),
    ],
)
def test_a_lesson_must_not_contradict_the_principles_of_the_teacher(given, written, mine, tmp_path, capsys):
    write_jsonl(tmp_path / "pairs.jsonl", [PAIR.to_dict()])
    write_jsonl(tmp_path / "judgements.jsonl", [{"pair_id": "p", "order": "AB", "reply": REPLY}])
    if given == "folder":
        mine.rename(tmp_path / "principles.yaml")
    options = ("--data.source", "jsonl", "--data.path", tmp_path / "pairs.jsonl", "--judgements", tmp_path)
    options += ("--principles", mine) if given == "file" else ()
    code = main(["roleplay", "teach", *map(str, (*options, "--out", tmp_path / "taught.jsonl"))])
    if written:
        assert code == 0
        assert len(list(read_jsonl(tmp_path / "taught.jsonl"))) == written
    else:
        assert code == 2
        assert "the principles contradict the verdict: 1" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- nlhf roleplay principles


def test_the_verb_prints_every_principle_and_the_counts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["roleplay", "principles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for principle in library().principles:
        assert [line for line in lines if f"{principle.id} " in line and principle.definition in line], principle.id
    rows = {
        line.split("  ")[0].strip(): line.split()[-5:]
        for line in lines[lines.index(next(x for x in lines if x.strip() == "Counts")) :]
    }
    kinds = {
        name: sum(name in (p.polarity, p.level) for p in library().principles)
        for name in ("negative", "positive", "sentence", "session")
    }
    assert rows["all"] == [*map(str, kinds.values()), str(len(library().principles))]
    assert set(DIMENSIONS) <= set(rows)
    assert lines[-1] == f"built in: version 1.0, hash {library().hash}, {len(library().principles)} principles"


@pytest.mark.parametrize("option", [(), ("--principles",)], ids=["bare", "option"])
def test_the_verb_checks_a_file(option, mine, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["roleplay", "principles", *option, str(mine)]) == 0
    printed = capsys.readouterr().out
    assert "names_the_sea" in printed
    assert "anachronism" not in printed
    assert printed.endswith(f"{mine}: version mine 1, hash {load_principles(mine).hash}, 1 principle\n")
    mine.write_text(json.dumps(MINE | {"principles": [MINE["principles"][0] | {"level": "turn"}]}), encoding="utf-8")
    assert main(["roleplay", "principles", *option, str(mine)]) == 2
    assert f"{mine}, principle 1: field 'level' must be one of sentence, session, got 'turn'" in capsys.readouterr().err
