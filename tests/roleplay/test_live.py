"""A turn shown while it is written: the same as when it is whole, and never a word that may be private."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nlhf.roleplay.live import LiveTurn
from nlhf.roleplay.turns import DualTurn, Segment, parse, problems, reader_view, render

WHOLE = (
    "<system_thinking>She should tease him.</system_thinking>\n\n"
    "Ada: <role_thinking>He is late again.</role_thinking> <role_action>pours tea</role_action> You are on time, Sir."
)
TAGS = ("system_thinking", "role_thinking", "role_action", "role_speech", "think", "thought")
PARTS = [
    *(f"<{slash}{name}>" for name in TAGS for slash in ("", "/")),
    *("Ada: ", "Ada:", "Ben: ", "Hello.", "[what]", "(so)", " ", "\n", "<", "</", ">", "<b>", "x"),
]
BEGINNINGS = ["", "<system_thinking>plan</system_thinking>", "<think>plan</think> Ada: Yes. ", "plan</think>Ada: "]


@st.composite
def texts(draw):
    return draw(st.sampled_from(BEGINNINGS)) + "".join(draw(st.lists(st.sampled_from(PARTS), max_size=14)))


@st.composite
def cuts(draw, text):
    ends = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def streamed(pieces, **options):
    live = LiveTurn("Ada", **options)
    shown = [live.feed(piece) for piece in pieces]
    return [*shown, live.finish()], live


def read(text):
    return replace(parse(text, characters={"Ada"}), character="Ada")


def test_a_whole_turn_comes_block_by_block():
    shown, live = streamed(WHOLE)
    assert [s for s in shown if s] == ["Ada:", " (pours tea)", " You are on time, Sir."]
    assert live.turn == read(WHOLE)
    assert live.raw == WHOLE


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "Ada: (pours tea) You are on time, Sir."),
        ({"show_thinking": True}, "Ada: [He is late again.] (pours tea) You are on time, Sir."),
        ({"show_plan": True}, "[plan: She should tease him.]\nAda: (pours tea) You are on time, Sir."),
    ],
)
def test_the_layers_asked_for(options, expected):
    assert "".join(streamed(WHOLE, **options)[0]) == expected


@settings(max_examples=500, deadline=None)
@given(st.data(), texts(), st.booleans(), st.booleans())
def test_it_does_not_matter_how_a_text_is_cut(data, text, show_plan, show_thinking):
    options = {"show_plan": show_plan, "show_thinking": show_thinking}
    assert "".join(streamed(data.draw(cuts(text)), **options)[0]) == "".join(streamed([text], **options)[0])


@settings(max_examples=500, deadline=None)
@given(st.data(), texts(), st.booleans())
@example(None, "<think>p</think>Ada: Hm. <thought>a<thought></thought>b</system_thinking>c", False)
def test_what_was_shown_is_the_readers_view_of_the_turn(data, text, show_thinking):
    pieces = data.draw(cuts(text)) if data else [text]
    shown, live = streamed(pieces, show_thinking=show_thinking)
    assert "".join(shown) == reader_view(live.turn, show_thinking=show_thinking)


def segments():
    return st.builds(
        Segment,
        st.sampled_from(["role_thinking", "role_action", "role_speech"]),
        st.sampled_from(["Hm.", "a (b) c", "< x"]),
    )


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(segments(), min_size=1), st.sampled_from([None, "A plan."]), st.booleans(), st.booleans())
def test_a_well_formed_turn_is_shown_as_when_it_is_whole(data, parts, plan, show_plan, show_thinking):
    turn = DualTurn("Ada", tuple(parts), plan)
    text = render(turn)
    shown, live = streamed(data.draw(cuts(text)), show_plan=show_plan, show_thinking=show_thinking)
    assert live.turn == turn
    assert "".join(shown) == reader_view(turn, show_plan, show_thinking)


@settings(max_examples=500, deadline=None)
@given(st.data(), texts())
def test_what_is_private_in_the_text_so_far_is_never_shown(data, text):
    """However a text goes on, nothing is shown that the reader's view of the text until then would hide."""
    live, before, shown = LiveTurn("Ada"), "", ""
    for piece in data.draw(cuts(text)):
        before += piece
        shown += live.feed(piece)
        mended = live.turn
        assert reader_view(mended).startswith(shown)
        if not problems(before, needs_plan=False):
            assert reader_view(read(before)).startswith(shown)


@settings(max_examples=300, deadline=None)
@given(
    st.data(), texts(), st.sampled_from(["system_thinking", "role_thinking", "think", "thought", "long_role_thinking"])
)
def test_a_secret_within_a_private_block_is_never_shown(data, text, tag):
    """Whatever stands around it, and also where the turn is cut off within it."""
    text = f"{text}<{tag}>SECRET"
    for whole in (text, f"{text}</{tag}>", f"{text}</{tag}> Ada: Hello."):
        shown, live = streamed(data.draw(cuts(whole)))
        assert "SECRET" not in "".join(shown)
        assert "SECRET" not in reader_view(live.turn)


@pytest.mark.parametrize("end", range(0, len(WHOLE), 3))
def test_a_turn_that_is_cut_off_anywhere_shows_nothing_private(end):
    shown = "".join(streamed(WHOLE[:end])[0])
    assert not {"tease", "late"} & set(shown.split())
    assert "should" not in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("She plans. </think> Ada: Hello.", "Ada: Hello.", id="opening-tag-was-in-the-prompt"),
        pytest.param(
            "She plans <role_action>a bow</role_action> and more. </think> Ada: Hello.",
            "Ada: Hello.",
            id="a-plan-that-quotes-tags",
        ),
        pytest.param(
            "<think>a</think> b <think>c</think> d </think> Ada: Hello.", "Ada: Hello.", id="more-plans-before-the-name"
        ),
        pytest.param(
            "<think>a</think>Ada: Hello. <role_action>bows</role_action> A thought.</role_thinking> Bye.",
            "Ada: Hello. (bows) Bye.",
            id="lost-opening-tag-behind-the-plan",
        ),
        pytest.param("<think>a</think>Ada: Hello. <role_thinking>Hm", "Ada: Hello.", id="cut-off-in-a-thought"),
        pytest.param("[Hm.] (bows) Hello.", "Ada: (bows) Hello.", id="brackets"),
        pytest.param("<think>a</think>Ben: Hello.", "Ada: Ben: Hello.", id="another-name"),
        pytest.param("", "Ada:", id="nothing"),
        pytest.param("<think>all", "Ada:", id="plan-alone"),
    ],
)
def test_awkward_turns(text, shown):
    assert "".join(streamed(text)[0]) == shown
    assert "".join(streamed([text])[0]) == shown


def test_a_turn_without_a_plan_waits_for_its_end():
    """A closing tag may still come and declare all of it private."""
    shown, _ = streamed(["Ada: <role_action>bows</role_action> Hello. ", "How are you?"])
    assert shown == ["", "", "Ada: (bows) Hello. How are you?"]
    shown, _ = streamed(["Ada: <role_action>bows</role_action> Hello. ", "How are you?</think>"])
    assert shown == ["", "", "Ada:"]


def test_a_plan_that_comes_late_is_shown_behind_the_turn_if_asked_for():
    text = "<think>first</think>Ada: Hello. <role_action>bows</role_action> <think>second</think> Bye."
    assert "".join(streamed(text, show_plan=True)[0]) == "[plan: first]\nAda: Hello. (bows) Bye.\n[plan: second]"
    assert "".join(streamed(text)[0]) == "Ada: Hello. (bows) Bye."
