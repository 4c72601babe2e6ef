import copy

import pytest
import yaml

from nlhf.errors import UserError
from nlhf.formats import get_format
from nlhf.pairs import Pair, Turn
from nlhf.roleplay.principles import BUILT_IN, DIMENSIONS, library, load_principles

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
        pytest.param(
            lambda rows: rows.update(principles=[r for r in rows["principles"] if r["polarity"] == "negative"]),
            "Character Development has no positive principle",
            id="a-side-is-missing",
        ),
        pytest.param(lambda rows: rows.update(version=1), "version must be a text", id="version"),
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


@pytest.mark.parametrize("text", ["version: '1'\nprinciples: [", "[]", "", "a: b"])
def test_a_file_that_is_no_library_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="mine"):
        load_principles(file)
    with pytest.raises(UserError, match="cannot read"):
        load_principles(tmp_path / "none.yaml")


def test_a_teacher_reads_every_principle_and_a_judge_none():
    pair = Pair("p", [Turn("user", "Knock.")], "Maren: Go.", "Maren: Come.", "A")
    taught, judged = (get_format(name).render(pair)[0]["content"] for name in ("her_rm_teacher", "her_rm"))
    for principle in library().principles:
        assert f"/ {principle.name} ({principle.polarity}, {principle.level}): {principle.definition}" in taught
        assert principle.definition not in judged


def test_the_hash_of_the_teachers_prompt_changes_with_the_principles(monkeypatch):
    from nlhf.formats import her_rm

    before = get_format("her_rm_teacher").prompt_hash
    less = type(library())("2.0", library().principles[1:])
    monkeypatch.setattr(her_rm, "library", lambda: less)
    assert get_format("her_rm_teacher").prompt_hash != before
