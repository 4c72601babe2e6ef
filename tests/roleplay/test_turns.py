import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nlhf.errors import UserError
from nlhf.pairs import Turn
from nlhf.roleplay.turns import (
    LEGACY,
    PLAN,
    PRIVATE,
    DualTurn,
    Segment,
    check,
    hide,
    history_view,
    judge_view,
    parse,
    pieces,
    problems,
    reader_view,
    render,
    scrub,
    training_view,
)

WHOLE = (
    "<system_thinking>She should tease him.</system_thinking>\n\n"
    "Ada: <role_thinking>He is late again.</role_thinking> <role_action>pours tea</role_action> You are on time, Sir."
)


def thought(text):
    return Segment("role_thinking", text)


def action(text):
    return Segment("role_action", text)


def speech(text):
    return Segment("role_speech", text)


ADA = DualTurn(
    "Ada", (thought("He is late again."), action("pours tea"), speech("You are on time, Sir.")), "She should tease him."
)


def test_a_whole_turn():
    assert parse(WHOLE) == ADA
    assert render(ADA) == WHOLE
    assert problems(WHOLE) == []


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        pytest.param("Ada: Hello.", DualTurn("Ada", (speech("Hello."),)), id="speech"),
        pytest.param("Hello.", DualTurn(None, (speech("Hello."),)), id="no-name"),
        pytest.param("", DualTurn(None), id="empty"),
        pytest.param("Ada:", DualTurn("Ada"), id="name-alone"),
        pytest.param("At 10:30 then.", DualTurn(None, (speech("At 10:30 then."),)), id="a-time-is-no-name"),
        pytest.param("艾达：你好。", DualTurn("艾达", (speech("你好。"),)), id="full-width-colon"),
        pytest.param(
            "Ada: a <role_action>nods</role_action> b <role_thinking>c</role_thinking>",
            DualTurn("Ada", (speech("a"), action("nods"), speech("b"), thought("c"))),
            id="any-order",
        ),
        pytest.param("<THINK>p</Think>Ada: Hi", DualTurn("Ada", (speech("Hi"),), "p"), id="letter-case"),
        pytest.param("<think>p</think><think>q</think>Ada: Hi", DualTurn("Ada", (speech("Hi"),), "p\n\nq"), id="two"),
        pytest.param("<system_think>p</system_think>Ada: Hi", DualTurn("Ada", (speech("Hi"),), "p"), id="system_think"),
        pytest.param("<thought>p</thought>Ada: Hi", DualTurn("Ada", (speech("Hi"),), "p"), id="thought-first"),
        pytest.param(
            "Ada: <thought>t</thought> Hi", DualTurn("Ada", (thought("t"), speech("Hi"))), id="thought-in-the-turn"
        ),
        pytest.param("Ada: <role_think>t</role_think>", DualTurn("Ada", (thought("t"),)), id="role_think"),
        pytest.param(
            "Ada: <long_role_thinking>t</long_role_thinking>", DualTurn("Ada", (thought("t"),)), id="long_role_thinking"
        ),
        pytest.param("Ada: <role_speech>Hi</role_speech>", DualTurn("Ada", (speech("Hi"),)), id="role_speech"),
        pytest.param(
            "Ada: [late] (pours tea) Hi.",
            DualTurn("Ada", (thought("late"), action("pours tea"), speech("Hi."))),
            id="coser",
        ),
        pytest.param(
            "Ada: (sits [tired] (slowly) down) Hi",
            DualTurn("Ada", (action("sits"), thought("tired"), action("(slowly) down"), speech("Hi"))),
            id="coser-nested",
        ),
        pytest.param("Ada: [a [b] (c)", DualTurn("Ada", (thought("a [b] (c)"),)), id="coser-cut-off-thought"),
        pytest.param(
            "Ada: 1) late, 2) sorry ]", DualTurn("Ada", (speech("1) late, 2) sorry ]"),)), id="coser-closing-alone"
        ),
        pytest.param("Ada: sad :( he", DualTurn("Ada", (speech("sad :( he"),)), id="coser-open-parenthesis"),
        pytest.param(
            "Ada：［想］（笑）好", DualTurn("Ada", (thought("想"), action("笑"), speech("好"))), id="coser-full-width"
        ),
        pytest.param(
            "Ada: <role_action>nods</role_action> He wrote [sic] (twice).",
            DualTurn("Ada", (action("nods"), speech("He wrote [sic] (twice)."))),
            id="brackets-beside-tags-are-text",
        ),
    ],
)
def test_reading(text, turn):
    assert parse(text) == turn
    assert parse(render(turn)) == turn


@pytest.mark.parametrize(
    ("text", "private"),
    [
        pytest.param("SECRET</system_thinking>Ada: Hi", PLAN, id="opening-tag-was-in-the-prompt"),
        pytest.param("Ada: Hi <system_thinking>SECRET", PLAN, id="cut-off"),
        pytest.param("<think>SECRET <role_thinking>SECRET</think>Ada: Hi", PLAN, id="a-tag-in-a-plan"),
        pytest.param("<think>a</role_thinking>SECRET</think>Ada: Hi", PLAN, id="a-plan-is-not-ended-by-less"),
        pytest.param("Ada: <role_thinking>a<think>SECRET</think>b</role_thinking> Hi", PLAN, id="plan-in-a-thought"),
        pytest.param("<think>SECRET<think>x</think>SECRET</think>Ada: Hi", PLAN, id="nested"),
        pytest.param("Ada: SECRET</role_thinking> Hi", PRIVATE, id="thought-without-opening"),
        pytest.param("Ada: <role_thinking>SECRET <role_action>nods</role_action>", PRIVATE, id="thought-cut-off"),
        pytest.param("Ada: <role_thinking>SECRET</role_action> SECRET</role_thinking> Hi", PRIVATE, id="wrong-closing"),
        pytest.param(
            "Ada: <role_action>sits <role_thinking>SECRET</role_thinking> down</role_action>", PRIVATE, id="in"
        ),
        pytest.param("Ada: Hi [SECRET", PRIVATE, id="bracket-cut-off"),
        pytest.param("Ada: Hi [a [b] SECRET] bye", PRIVATE, id="brackets-nested"),
    ],
)
def test_what_may_be_private_is_private(text, private):
    assert "SECRET" not in scrub(text, private)
    assert "SECRET" not in render(hide(parse(text), private))


def test_a_tag_that_is_made_by_taking_one_out_is_a_tag():
    assert scrub("Ada: <role_<think>x</think>thinking>SECRET", PRIVATE) == "Ada: "


def test_known_names_alone_stand_before_the_colon():
    assert parse("Listen: I am late.", characters=["Ada"]) == DualTurn(None, (speech("Listen: I am late."),))
    assert parse("Ada: I am late.", characters=["Ada"]).character == "Ada"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>p</think>Ada: Hi", ["tags of another format: </think>, <think>"]),
        ("Ada: Hi", ["no <system_thinking>"]),
        (WHOLE.replace("Ada: ", ""), ["no character's name with a colon"]),
        (WHOLE + "<system_thinking>p</system_thinking>", ["more than one <system_thinking>"]),
        ("Ada: Hi <system_thinking>p</system_thinking>", ["<system_thinking> is not first"]),
        (WHOLE + " <role_action>nods", ["a tag is never closed"]),
        (WHOLE + "</role_action>", ["a closing tag has no opening tag"]),
        (WHOLE + "<role_action>a<role_thinking>b</role_thinking></role_action>", ["a block stands within another"]),
        (WHOLE + "<role_thinking>a<role_action>b</role_thinking>", ["a block stands within another"]),
        ("<system_thinking>p</system_thinking>Ada: <role_thinking>t</role_thinking>", ["nothing is said or done"]),
        (WHOLE.replace("Ada", "Bo"), ["Bo speaks"]),
    ],
)
def test_problems_are_named(text, found):
    assert problems(text, "Ada") == found
    with pytest.raises(UserError, match=r"file\.jsonl:3: not a dual-layer turn: "):
        check(text, "file.jsonl:3", "Ada")


def test_a_turn_without_a_plan_is_whole_where_none_is_needed():
    assert problems("Ada: Hi", needs_plan=False) == []
    assert check("Ada: Hi", "x", needs_plan=False) == DualTurn("Ada", (speech("Hi"),))


@pytest.mark.parametrize("name", sorted(LEGACY))
def test_every_legacy_tag_is_read_and_none_stays(name):
    text = f"Ada: <{name}>inside</{name}> Hi"
    turn = parse(text)
    assert turn.plan == "inside" or "inside" in [s.text for s in turn.segments] or "inside Hi" in turn.segments[0].text
    assert f"<{name}>" not in render(turn)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Segment("role_speech", " "),
        lambda: Segment("role_speech", "a <think>b"),
        lambda: Segment("system_thinking", "a"),
        lambda: DualTurn("a: b"),
        lambda: DualTurn(""),
        lambda: DualTurn("Ada", plan=""),
    ],
    ids=["empty", "tag", "plan-is-no-segment", "colon", "no-name", "empty-plan"],
)
def test_a_turn_that_could_not_be_read_back_is_refused(build):
    with pytest.raises(UserError):
        build()


# --------------------------------------------------------------------------------------------------------------- views

BO = DualTurn("Bo", (thought("I must hide the letter."), action("bows"), speech("My train was late.")), "Bo evades.")
CY = DualTurn("Cy", (thought("They quarrel again."),))
SCENE = [ADA, BO, CY, DualTurn("Bo", (speech("Forgive me."),)), ADA]


def test_history_keeps_no_plan_and_of_others_no_thought():
    assert history_view(SCENE[:-1], "Ada", "A parlour.") == [
        {"role": "system", "content": "A parlour."},
        {"role": "assistant", "content": render(hide(ADA, PLAN))},
        {"role": "user", "content": "Bo: <role_action>bows</role_action> My train was late.\n\nBo: Forgive me."},
    ]


def test_the_training_view_has_one_plan_and_it_is_last():
    messages = training_view(SCENE)
    assert messages[-1] == {"role": "assistant", "content": WHOLE}
    assert sum("<system_thinking>" in m["content"] for m in messages) == 1
    assert [m["role"] for m in messages] == ["assistant", "user", "assistant"]
    with pytest.raises(UserError, match="ends with the turn of a character"):
        training_view([])


def test_judges_views():
    context = judge_view(SCENE[:2], "Bo", "A parlour.")
    assert context == [
        Turn("system", "A parlour."),
        Turn("Ada(user)", WHOLE.split("Ada: ")[1]),
        Turn("Bo(assistant)", render(DualTurn(None, BO.segments))),
    ]
    assert "letter" not in str(judge_view(SCENE, "Bo", hidden=PRIVATE))


def test_readers_views():
    assert reader_view(ADA) == "Ada: (pours tea) You are on time, Sir."
    assert reader_view(ADA, show_thinking=True) == "Ada: [He is late again.] (pours tea) You are on time, Sir."
    assert reader_view(ADA, show_plan=True).splitlines() == [
        "[plan: She should tease him.]",
        "Ada: (pours tea) You are on time, Sir.",
    ]


# ---------------------------------------------------------------------------------------------------------- properties

_TAGS = [
    f"<{slash}{name}>" for name in (*LEGACY, "system_thinking", "role_thinking", "role_action") for slash in ("", "/")
]
anything = st.lists(
    st.sampled_from([*_TAGS, "[", "]", "(", ")", "Ada: ", "：", "（", "］", " ", "\n", "<", ">", "role_thinking", "ſ"])
    | st.text(max_size=8),
    max_size=10,
).map("".join)
plain = st.text(min_size=1, max_size=12).filter(str.strip) | st.sampled_from(
    ["(a)", "[b", "Ada: c", "]", "1) d", ": e"]
)
segments = st.builds(Segment, st.sampled_from(["role_thinking", "role_action", "role_speech"]), plain)
turns = st.builds(
    DualTurn,
    st.sampled_from([None, "Ada", "Mr. Bo", "艾达", "O'Neil the 2nd"]),
    st.lists(segments, max_size=5).map(tuple),
    st.none() | plain,
)
many = settings(max_examples=300, deadline=None)


@many
@given(turns)
def test_what_is_written_is_read_back(turn):
    assert parse(render(turn)) == turn
    if turn.character and turn.plan and turn.visible:
        assert problems(render(turn), turn.character) == []


@many
@given(anything)
def test_whatever_is_read_can_be_written_and_read_again(text):
    turn = parse(text)
    assert parse(render(turn)) == turn


@many
@given(anything, st.sampled_from(["auto", "tags", "coser"]))
def test_the_pieces_of_a_text_are_the_text(text, notation):
    assert "".join(piece.text for piece in pieces(text, notation)) == text


@many
@given(anything, st.sampled_from([PLAN, PRIVATE]))
def test_scrubbing_once_is_scrubbing_twice(text, hidden):
    once = scrub(text, hidden)
    assert scrub(once, hidden) == once
    assert parse(once).plan is None
    if hidden == PRIVATE:
        assert all(s.layer not in PRIVATE for s in parse(once).segments)


@many
@given(st.text())
def test_a_text_without_layers_stays_byte_for_byte(text):
    assert scrub(text, PLAN) == text


@many
@given(anything, anything, st.sampled_from(["system_thinking", "system_think", "think"]))
def test_no_other_reader_sees_a_plan(before, after, name):
    """Whatever stands around a plan, it is in no view but that of the last turn's author."""
    turn = parse(f"{before}<{name}>SECRET</{name}>{after}")
    ended = parse(f"Bo: well {after}")
    assert "SECRET" not in str(history_view([turn, ended], turn.character or "Ada"))
    assert "SECRET" not in str(history_view([turn, ended], "Cy"))
    assert "SECRET" not in str(judge_view([turn], "Ada"))
    assert "SECRET" not in reader_view(turn, show_thinking=True)
    assert "SECRET" not in scrub(f"{before}<{name}>SECRET</{name}>{after}", PLAN)


@many
@given(turns, st.sampled_from(["system_thinking", "role_thinking"]))
def test_each_reader_sees_what_the_table_of_views_says(turn, layer):
    marked = DualTurn(turn.character, (*turn.segments, thought("SECRET")), turn.plan)
    if layer == "system_thinking":
        marked = DualTurn(turn.character, (*turn.segments, speech("end")), "SECRET")
    seen = layer == "role_thinking"
    assert "SECRET" not in str(history_view([marked], "Somebody Else"))
    assert "SECRET" not in str(judge_view([marked], "Ada", hidden=PRIVATE))
    assert ("SECRET" in str(judge_view([marked], "Ada"))) == seen
    assert ("SECRET" in str(history_view([marked], marked.character))) == seen
    if marked.character:
        assert "SECRET" in training_view([marked])[-1]["content"]
