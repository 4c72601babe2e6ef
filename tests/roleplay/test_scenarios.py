import copy

import pytest
import yaml

from nlhf.errors import UserError
from nlhf.roleplay.scenarios import BUILT_IN, find_scenario, load_scenarios
from nlhf.roleplay.turns import DualTurn, Segment, parse, render

ROWS = yaml.safe_load(BUILT_IN.read_text(encoding="utf-8"))
SCENARIOS = load_scenarios()


def test_the_scenes_on_board():
    assert len(SCENARIOS) >= 10
    assert len({s.id for s in SCENARIOS}) == len({s.title for s in SCENARIOS}) == len(SCENARIOS)
    assert sum(s.first_message is not None for s in SCENARIOS) >= 3


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.id)
def test_a_scene_on_board_says_where_it_is_from_and_is_in_the_public_domain(scenario):
    assert scenario.work
    assert scenario.author
    assert 1500 < scenario.year <= 1929
    assert 2 <= scenario.setting.count(". ") + 1 <= 4
    texts = [c.goal for c in scenario.characters] + [c.description for c in scenario.characters]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", [n for s in SCENARIOS for n in s.names])
@pytest.mark.parametrize("segment", ["role_speech", "role_action", "role_thinking"])
def test_a_characters_name_is_a_name_of_a_turn(name, segment):
    turn = DualTurn(name, (Segment(segment, "Well: so it is."), Segment("role_speech", "Yes.")), "A plan.")
    assert parse(render(turn)) == turn


def test_nobody_on_board_is_in_two_scenes_under_one_name():
    names = [n for s in SCENARIOS for n in s.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("choice", "found"), [("1", 0), (" 2 ", 1), (SCENARIOS[2].id, 2), (SCENARIOS[3].id.upper(), 3), (5, 4)]
)
def test_a_scene_is_found_by_place_and_by_id(choice, found):
    assert find_scenario(SCENARIOS, choice) is SCENARIOS[found]


@pytest.mark.parametrize(
    ("choice", "message"), [("0", "1 to 12"), ("13", "1 to"), ("drakula", "mean 'dracula'"), ("", "no sc")]
)
def test_a_scene_that_is_not_there_is_refused_with_the_list(choice, message):
    with pytest.raises(UserError, match=message):
        find_scenario(SCENARIOS, choice)


def test_a_character_is_found_by_place_and_by_name():
    [scene] = [s for s in SCENARIOS if s.id == "pride_and_prejudice"]
    assert scene.character("2").name == scene.character("mr. darcy").name == "Mr. Darcy"
    with pytest.raises(UserError, match=r"Did you mean 'Mr\. Darcy'"):
        scene.character("Mr Darcy")


def scene(**values):
    def change(rows):
        for name, value in values.items():
            rows["scenarios"][0][name] = value

    return change


def person(**values):
    return lambda rows: rows["scenarios"][0]["characters"][0].update(values)


def without(name):
    return lambda rows: rows["scenarios"][0].pop(name)


WRONG = [
    pytest.param(without("setting"), "scenario 1: field 'setting' is missing", id="missing"),
    pytest.param(scene(charcters=[]), "unknown field 'charcters'.*Did you mean 'characters'", id="unknown"),
    pytest.param(scene(id="Two Words"), "scenario 1: field 'id' must be lower-case words", id="id"),
    pytest.param(scene(id="7"), "must have a letter", id="id-is-a-number"),
    pytest.param(scene(id=7), "field 'id' must be one line of text", id="id-no-text"),
    pytest.param(scene(year="1813"), "field 'year' must be a whole number, got '1813'", id="year"),
    pytest.param(scene(opening="One.\u2028Two."), "field 'opening' must be one line of text", id="two-lines-unicode"),
    pytest.param(scene(year=True), "field 'year' must be a whole number", id="year-true"),
    pytest.param(scene(setting=" "), "field 'setting' must be one line of text", id="blank"),
    pytest.param(scene(opening="One.\nTwo."), "field 'opening' must be one line of text", id="two-lines"),
    pytest.param(scene(setting="x" * 4001), "up to 4,000 characters", id="long"),
    pytest.param(scene(title=None), "field 'title' must be one line of text.*got None", id="null"),
    pytest.param(scene(characters="Ada"), "field 'characters' must be a list, got 'Ada'", id="no-list"),
    pytest.param(
        scene(characters=["Ada", "Ben"]), "character 1: expected the fields name, .*got str", id="names-alone"
    ),
    pytest.param(lambda r: r["scenarios"][0]["characters"].__delitem__(slice(1, None)), "two or more, got 1", id="one"),
    pytest.param(person(name="MR. DARCY"), "two have the name 'MR. DARCY'", id="same-name"),
    pytest.param(person(name="Ada: the first"), "character 1: field 'name': .* before the colon", id="colon"),
    pytest.param(person(name="x" * 61), "1 to 60 letters", id="long-name"),
    pytest.param(person(name="<think>"), "before the colon", id="tag-as-name"),
    pytest.param(person(name="narrator"), "who tells the scene", id="narrator"),
    pytest.param(person(goal=3), "character 1: field 'goal' must be one line of text", id="goal"),
    pytest.param(person(motive="x"), "character 1: unknown field 'motive'", id="unknown-of-a-character"),
    pytest.param(scene(first_message="Ada: Hello."), "'first_message': 'Ada' is nobody in this scene", id="nobody"),
    pytest.param(scene(first_message="Hello."), "no character's name", id="nobody-speaks"),
    pytest.param(scene(first_message="Mr. Darcy: <role_action>rises"), "a tag is never closed", id="open-tag"),
    pytest.param(
        scene(first_message="<system_thinking>He waits.</system_thinking> Mr. Darcy: Yes."),
        "it has system thinking",
        id="plan",
    ),
    pytest.param(lambda r: r["scenarios"].append(r["scenarios"][0]), "two scenarios have the id", id="twice"),
    pytest.param(lambda r: r.update(scenarios=[]), "a list of one or more", id="none"),
    pytest.param(lambda r: r.update(version=1), "expected the field scenarios", id="unknown-at-the-top"),
    pytest.param(lambda r: r.update(scenarios=["Ada"]), "scenario 1: expected the fields id, .*got str", id="text"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_file_that_is_wrong_is_refused_by_file_scene_and_field(tmp_path, change, message):
    rows = copy.deepcopy(ROWS)
    change(rows)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(rows, sort_keys=False, allow_unicode=True), encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load_scenarios(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(
    "text", ["scenarios: [", "", "[]", "a: b", "&a [*a]", "\0", "scenarios: []\nscenarios: []", '"\\ud800": x']
)
def test_a_file_that_holds_no_scenes_is_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match="mine"):
        load_scenarios(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: .*o such file"):
        load_scenarios(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("scenarios: [é]".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml"):
        load_scenarios(tmp_path / "latin.yaml")


def test_a_scene_of_ones_own_needs_no_work(tmp_path):
    rows = {"scenarios": [copy.deepcopy(ROWS["scenarios"][-1])]}
    for name in ("work", "author", "year"):
        del rows["scenarios"][0][name]
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(rows))
    [mine] = load_scenarios(file)
    assert (mine.work, mine.author, mine.year) == (None, None, None)
    assert mine.characters == SCENARIOS[-1].characters
