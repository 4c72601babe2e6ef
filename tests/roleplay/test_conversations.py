"""Conversations of dual-layer turns: the file's schema, the split, and what policy and judge read of them."""

import json
from pathlib import Path

import pytest

from nlhf.cold_start import ColdStartConfig, _fitting, lesson_row
from nlhf.errors import UserError
from nlhf.models import ModelConfig, load_tokenizer
from nlhf.roleplay.conversations import (
    Conversation,
    ConversationConfig,
    held_out_groups,
    read_conversations,
    split,
)

LAST = (
    "<system_thinking>He should be kind: she is tired.</system_thinking>\n\n"
    "Tom: <role_thinking>She is pale.</role_thinking> <role_action>nods</role_action> Rest, Ada."
)
ROW = {
    "id": "c",
    "group": "house",
    "characters": ["Ada", "Tom", "Eve"],
    "system": "You are Tom.",
    "scene": "A house.",
    "turns": [
        "<system_thinking>Plan of Tom.</system_thinking>\n\nTom: <role_thinking>Own thought.</role_thinking> Hello.",
        "Ada: <role_thinking>Her thought.</role_thinking> Note: it is late.",
        "Eve: <role_action>yawns</role_action>",
        LAST,
    ],
}


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def conversation(**fields) -> Conversation:
    return Conversation.from_dict({**ROW, **fields}, "here")


# -------------------------------------------------------------------------------------------------------------- reading


def test_a_file_is_read_as_it_was_written(tmp_path):
    found = read_conversations(write(tmp_path / "c.jsonl", ROW))
    assert [item.to_dict() for item in found] == [
        {**ROW, "characters": (*ROW["characters"],), "turns": (*ROW["turns"],)}
    ]
    assert found[0].speaker == "Tom"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": None}, "missing field 'turns'; found"),
        ({"turns": []}, "field 'turns' must be a list of one text or more"),
        ({"turns": "Tom: Hi."}, "field 'turns' must be a list"),
        ({"turns": [LAST, 3]}, "field 'turns' must be a list"),
        ({"turns": ["Ada: Hm?", "Tom: Hi."]}, "field 'turns[1]': not a dual-layer turn: no <system_thinking>"),
        ({"turns": [LAST + "</role_thinking>"]}, "field 'turns[0]': not a dual-layer turn: a closing tag"),
        ({"characters": ["Ada", "Tim"]}, "field 'turns[3]': 'Tom' is not among the characters ['Ada', 'Tim']. Did you"),
        ({"characters": []}, "field 'characters' must be a list"),
        ({"system": 3}, "field 'system' must be a text, got int"),
        ({"group": None}, "field 'group' must be a text"),
        ({"id": ""}, "field 'id' must not be empty"),
        ({"speakers": []}, "unknown field 'speakers'; known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_row_that_is_no_conversation_is_named(tmp_path, change, message):
    row = {k: v for k, v in {**ROW, **change}.items() if v is not None or k == "group"}
    path = write(tmp_path / "c.jsonl", {**ROW, "id": "first", "turns": [LAST]}, row)
    with pytest.raises(UserError) as error:
        read_conversations(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)


@pytest.mark.parametrize(("change", "field"), [({"turns": [LAST]}, "id"), ({"id": "d"}, "turns")])
def test_a_conversation_that_is_there_twice_is_named(tmp_path, change, field):
    path = write(tmp_path / "c.jsonl", ROW, {**ROW, **change})
    with pytest.raises(UserError, match=rf"c\.jsonl:2: field '{field}' is that of .*c\.jsonl:1"):
        read_conversations(path)


# ---------------------------------------------------------------------------------------------------------------- views


def test_the_lesson_is_the_last_turn_with_its_plan_and_no_other():
    messages = conversation().lesson()
    assert [m["role"] for m in messages] == ["system", "assistant", "user", "assistant"]
    assert messages[1]["content"] == "Tom: <role_thinking>Own thought.</role_thinking> Hello."
    assert messages[2]["content"] == "Ada: Note: it is late.\n\nEve: <role_action>yawns</role_action>"
    assert messages[3]["content"] == LAST


def test_only_names_of_the_conversation_are_names():
    """``Note:`` begins a sentence; without the list of characters it would be who speaks."""
    found = conversation(turns=["Note: rain.", "Ada: Hm?", LAST]).read
    assert [turn.character for turn in found] == [None, "Ada", "Tom"]


def test_policy_and_judge_read_a_prompt_each_in_its_own_view():
    prompt = conversation().prompt()
    assert [(t.role, t.content) for t in prompt.context] == [
        ("system", "You are Tom."),
        ("assistant", "Tom: <role_thinking>Own thought.</role_thinking> Hello."),
        ("user", "Ada: Note: it is late.\n\nEve: <role_action>yawns</role_action>"),
    ]
    assert [(t.role, t.content) for t in prompt.scene] == [
        ("system", "A house."),
        ("Tom(assistant)", "<role_thinking>Own thought.</role_thinking> Hello."),
        ("Ada(user)", "<role_thinking>Her thought.</role_thinking> Note: it is late."),
        ("Eve(user)", "<role_action>yawns</role_action>"),
    ]
    assert (prompt.character, prompt.group, prompt.response_a) == ("Tom", "house", "")


@pytest.mark.parametrize("turns", [[LAST], [ROW["turns"][0], LAST]], ids=["alone", "after the speaker's own"])
def test_a_prompt_needs_something_to_answer(turns):
    with pytest.raises(UserError, match="nothing to answer"):
        conversation(turns=turns).prompt()


# --------------------------------------------------------------------------------------------------------------- labels


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig("random:qwen3-tiny"))


def test_the_loss_is_on_the_last_turn_alone(tokenizer):
    row = lesson_row(tokenizer, conversation())
    learned = [i for i, weight in zip(row["input_ids"], row["weights"], strict=True) if weight]
    assert tokenizer.decode(learned[:-1]) == LAST
    assert learned[-1] == tokenizer.eos_token_id
    assert set(row["weights"]) == {0.0, 1.0}
    before = tokenizer.decode(row["input_ids"][: -len(learned)])
    assert "Own thought." in before
    assert "Plan of Tom." not in before
    assert "Her thought." not in before


def test_a_control_token_in_a_turn_does_not_end_it(tokenizer):
    end = tokenizer.eos_token
    row = lesson_row(tokenizer, conversation(turns=["Ada: Hm?", LAST + f" So {end} it is."]))
    learned = [i for i, weight in zip(row["input_ids"], row["weights"], strict=True) if weight]
    assert learned.count(tokenizer.eos_token_id) == 1


def test_rows_that_are_too_long_are_left_out_and_counted(tokenizer):
    rows = [lesson_row(tokenizer, conversation(turns=["Ada: " + "Hm? " * n, LAST])) for n in (1, 200)]
    kept, dropped = _fitting(rows, ColdStartConfig(max_length=len(rows[0]["input_ids"])), 1)
    assert (kept, dropped) == (rows[:1], 1)


# ---------------------------------------------------------------------------------------------------------------- split


def many(n: int, group: str = "") -> list[Conversation]:
    return [conversation(id=f"c{i}", group=group and f"{group}{i % 7}", turns=[f"Ada: {i}?", LAST]) for i in range(n)]


@pytest.mark.parametrize("group", ["", "scene "], ids=["by conversation", "by group"])
def test_nothing_is_on_both_sides_of_a_split(group):
    found = many(70, group)
    train, held_out = split(found, "train", 0.3), split(found, "held_out", 0.3)
    for side in ("cluster", "key", "id"):
        assert not {getattr(c, side) for c in train} & {getattr(c, side) for c in held_out}
    assert len(train) + len(held_out) == len(split(found, "all", 0.3)) == 70
    assert len(held_out) == (20 if group else 21)  # 2 groups of 7, or 21 conversations of 70


def test_what_is_held_out_hangs_on_the_names_alone():
    names = [f"scene {i}" for i in range(10)]
    assert held_out_groups(names, 0.3) == held_out_groups(names[::-1] * 2, 0.3)
    assert held_out_groups(names, 0.3) < held_out_groups(names, 0.5)
    assert held_out_groups(names, 0.0) == frozenset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "conversations.split must be train, held_out or all, got 'test'"),
        ({"held_out": 1.0}, "conversations.held_out must be at least 0 and less than 1"),
        ({"limit": 0}, "conversations.limit must be at least 1"),
        ({"n": 0}, "conversations.n must be at least 1"),
    ],
    ids=["split", "held_out", "limit", "n"],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(UserError) as error:
        ConversationConfig(**options)
    assert message in str(error.value)


def test_a_split_without_conversations_says_so(tmp_path):
    config = ConversationConfig(write(tmp_path / "c.jsonl", ROW), split="held_out", held_out=0.1)
    with pytest.raises(UserError, match="none of 1 conversations is in split 'held_out'"):
        config.load()


def test_the_documented_row_is_a_conversation():
    text = (Path(__file__).resolve().parents[2] / "docs/policy.md").read_text(encoding="utf-8")
    row = json.loads(text.partition("```json conversation\n")[2].partition("```")[0])
    found = Conversation.from_dict(row, "docs/policy.md")
    assert set(row) == set(Conversation.__dataclass_fields__)  # shows every field
    assert found.prompt().character == "Tom"
