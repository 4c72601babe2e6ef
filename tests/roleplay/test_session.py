"""The conversation behind a chat: what the model reads, what is forgotten, what the record holds."""

import json
import os
import signal

import pytest

from nlhf.errors import UserError
from nlhf.generation.limits import PromptTooLong
from nlhf.judge import Reply
from nlhf.roleplay.live import LiveTurn
from nlhf.roleplay.scenarios import NARRATOR, find_scenario, load_scenarios
from nlhf.roleplay.session import ChatSession, MessageTooLong, Transcript, system_prompt

SCENES = load_scenarios()
DARCY = find_scenario(SCENES, "pride_and_prejudice")  # with a first message
GATSBY = find_scenario(SCENES, "great_gatsby")  # without
SPOKEN = "<system_thinking>A plan.</system_thinking>Jay Gatsby: <role_thinking>A thought.</role_thinking> Old sport."


class Scripted:
    """Streams the next entry of a script, letter by letter; an exception in it is raised where it stands.

    A prompt of more than ``room`` characters is too long.
    """

    def __init__(self, *script, room=10**6):
        self.script, self.room, self.asked = list(script), room, []

    def stream(self, messages, on_text, sample=0):
        if sum(len(m["content"]) for m in messages) > self.room:
            raise PromptTooLong(f"more than {self.room}")
        self.asked.append((messages, sample))
        entry = self.script.pop(0)
        parts = entry if isinstance(entry, list) else [entry]
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            for letter in part:
                on_text(letter)
        return Reply("".join(parts), truncated=False, tokens=5)


@pytest.fixture
def begin(tmp_path):
    def start(*script, scene=GATSBY, character="Jay Gatsby", user="Nick Carraway", **options):
        stream = Scripted(*script, **options)
        session = ChatSession(
            scene, scene.character(character), user, stream, Transcript(tmp_path / "t.jsonl"), model={"name": "m"}
        )
        return session, stream

    return start


def answer(session, **options):
    shown = []
    result = session.answer(LiveTurn(session.character.name, **options), shown.append)
    return result, "".join(shown)


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_model_reads_no_plan_of_its_own_and_no_thought_of_the_user(begin):
    session, stream = begin(SPOKEN, SPOKEN)
    for text in ("Who are you? [He lies.] (steps back)", "<role_thinking>Hm.</role_thinking> Go on."):
        session.say(text)
        assert answer(session)[1] == "Jay Gatsby: Old sport."
    messages = stream.asked[-1][0]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == session.system
    assert messages[1]["content"].startswith(f"{NARRATOR}: {GATSBY.opening}")
    assert messages[2]["content"] == "Jay Gatsby: <role_thinking>A thought.</role_thinking> Old sport."
    assert messages[3]["content"] == "Nick Carraway: Go on."
    written = json.dumps(messages[1:])
    assert "plan" not in written
    assert "lies" not in written


def test_the_system_prompt_holds_the_scene_and_no_goal_of_the_others():
    for scene in SCENES:
        for played in scene.characters:
            text = system_prompt(scene, played, "Somebody")
            assert scene.setting in text
            assert played.goal in text
            for other in scene.characters:
                assert other.description in text
                assert other == played or other.goal not in text
            assert "Somebody: somebody new to you" in text
            assert "somebody new to you" not in system_prompt(
                scene, played, next(n for n in scene.names if n != played.name)
            )


def test_braces_in_a_scene_are_text():
    from dataclasses import replace

    scene = replace(GATSBY, setting="A {{ garden }} {% if %}.")
    assert "A {{ garden }} {% if %}." in system_prompt(scene, scene.characters[0], "Ada")


@pytest.mark.parametrize(
    ("character", "user", "roles"),
    [
        ("Mr. Darcy", "Elizabeth Bennet", ["system", "user", "assistant", "user"]),
        ("Elizabeth Bennet", "Caroline Bingley", ["system", "user"]),  # Darcy is played by nobody, and still opens
        ("Elizabeth Bennet", "Mr. Darcy", ["system", "user"]),
    ],
)
def test_the_scenes_first_message_opens_unless_it_is_the_users(begin, character, user, roles):
    session, stream = begin("x", scene=DARCY, character=character, user=user)
    session.say("Good evening.")
    answer(session)
    messages = stream.asked[0][0]
    assert [m["role"] for m in messages] == roles
    opening = [m for m in messages if "Your sister" in m["content"] or "your sister" in m["content"]]
    assert bool([m for m in opening if m["role"] != "system"]) == (user != "Mr. Darcy")
    thought = "She will think that I have been waiting for her."
    assert (thought in json.dumps(messages)) == (character == "Mr. Darcy")


@pytest.mark.parametrize("text", ["[Only a thought.]", "<role_thinking>Hm.</role_thinking>", "<think>a plan"])
def test_what_nobody_can_see_or_hear_is_not_said(begin, tmp_path, text):
    session, _ = begin()
    with pytest.raises(UserError, match="Jay Gatsby can neither see nor hear"):
        session.say(text)
    assert session.turns == []
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Nick Carraway: Hello.", "Nick Carraway: Hello."),
        ("Well: it is late.", "Nick Carraway: Well: it is late."),
        ("Jay Gatsby: I am rich.", "Nick Carraway: Jay Gatsby: I am rich."),
    ],
)
def test_a_name_before_what_the_user_says(begin, text, read):
    session, stream = begin("x")
    session.say(text)
    answer(session)
    assert stream.asked[0][0][-1]["content"].endswith(f"\n\n{read}")


def test_a_turn_that_the_model_puts_into_anothers_mouth_is_its_own(begin):
    session, stream = begin("Nick Carraway: Hello.", "x")
    session.say("Good evening.")
    assert answer(session)[1] == "Jay Gatsby: Nick Carraway: Hello."
    session.say("Go on.")
    answer(session)
    assert [m["role"] for m in stream.asked[1][0]] == ["system", "user", "assistant", "user"]


# ------------------------------------------------------------------------------------------------------- full contexts


def room(session, turns):
    """Characters of a prompt with the last turns of a conversation of "x" * 100 each."""
    return len(session.system) + len(session.opening.segments[0].text) + 20 + turns * 125


def test_the_oldest_turns_are_forgotten_never_the_prompt_or_the_newest_message(begin, tmp_path):
    session, stream = begin(*(["y" * 100] * 6))
    stream.room = room(session, 4)
    for number in range(5):
        session.say(f"message {number} " + "x" * 90)
        result, _ = answer(session)
        messages = stream.asked[-1][0]
        text = json.dumps(messages)
        assert messages[0]["content"] == session.system
        assert GATSBY.opening in messages[1]["content"]
        assert f"message {number}" in text
        assert ("message 0" in text) == (result.forgotten == 0) == (number < 2)
    assert result.forgotten >= 4
    assert len(session.turns) == 10
    assert [r["forgotten"] for r in rows(tmp_path) if r.get("author") == "model"][-1] == result.forgotten


def test_no_more_is_forgotten_than_must_be(begin):
    session, stream = begin(*(["y" * 100] * 3))
    for _ in range(2):
        session.say("x" * 100)
        answer(session)
    stream.room = room(session, 4) + 40
    session.say("x" * 100)
    assert answer(session)[0].forgotten == 1


def test_a_message_that_is_too_long_alone_is_taken_back_and_nothing_forgotten(begin, tmp_path):
    session, stream = begin("one", "two")
    stream.room = room(session, 6)
    session.say("Hello.")
    answer(session)
    session.say("x" * 5000)
    with pytest.raises(MessageTooLong, match="too long for the model: more than"):
        answer(session)
    assert session.forgotten == 0
    session.say("Shorter.")
    assert answer(session)[1] == "Jay Gatsby: two"
    assert "x" * 50 not in json.dumps(stream.asked[-1][0])
    assert [r["kind"] for r in rows(tmp_path)] == ["header", "turn", "turn", "turn", "refused", "turn", "turn"]


# ----------------------------------------------------------------------------------- replies that do not come to an end


def test_a_reply_that_is_stopped_is_kept_as_far_as_it_came(begin, tmp_path):
    session, stream = begin(["<think>p</think>Jay Gatsby: Old sp", KeyboardInterrupt()], "x")
    session.say("Hello.")
    result, shown = answer(session)
    assert (result.ended, shown) == ("interrupted", "Jay Gatsby: Old sp")
    session.say("Go on.")
    answer(session)
    assert stream.asked[1][0][2] == {"role": "assistant", "content": "Jay Gatsby: Old sp"}
    assert rows(tmp_path)[2]["ended"] == "interrupted"


@pytest.mark.parametrize("start", ["<think>a secret", "<think>p</think>Jay Gatsby: <role_thinking>a secret", ""])
def test_a_reply_that_is_stopped_within_its_thoughts_shows_nothing_of_them(begin, start):
    session, stream = begin([start, KeyboardInterrupt()], "x")
    session.say("Hello.")
    result, shown = answer(session)
    assert "secret" not in shown
    assert not result.turn.visible
    session.say("Go on.")
    answer(session)
    assert stream.asked[1][0][-1]["content"].endswith("Nick Carraway: Go on.")


def test_ctrl_c_while_a_piece_is_shown_waits_for_its_end(begin):
    session, _ = begin(SPOKEN + "<role_action>bows</role_action> Never shown.")
    session.say("Hello.")
    shown = []

    def show(text):
        if text.startswith("Jay"):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the signal is handled within
                pass
        shown.append(text)

    before = signal.getsignal(signal.SIGINT)
    result = session.answer(LiveTurn("Jay Gatsby"), show)
    assert result.ended == "interrupted"
    assert "".join(shown) == "Jay Gatsby:"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_model_that_fails_costs_the_reply_and_not_the_chat(begin, tmp_path):
    session, stream = begin(UserError("no line"), ["Jay Gatsby: Half", UserError("it broke off")], "x")
    session.say("Hello.")
    result, shown = answer(session)
    assert (result.ended, result.problem, shown) == ("failed", "no line", "")
    assert len(session.turns) == 1
    assert session.retract()
    result, shown = answer(session)
    assert (result.ended, result.problem, shown) == ("failed", "it broke off", "Jay Gatsby: Half")
    assert session.retract()
    answer(session)
    assert [m["role"] for m in stream.asked[-1][0]] == ["system", "user"]
    kinds = [(r["kind"], r.get("problem")) for r in rows(tmp_path)[2:]]
    assert kinds == [("turn", "no line"), ("retry", None), ("turn", "it broke off"), ("retry", None), ("turn", None)]


def test_an_error_of_ours_is_not_taken_for_a_failed_reply(begin):
    session, _ = begin([ZeroDivisionError()])
    session.say("Hello.")
    with pytest.raises(ZeroDivisionError):
        answer(session)


# ------------------------------------------------------------------------------------------------- retry, clear, record


def test_retry_draws_another_sample_of_the_same_prompt(begin):
    session, stream = begin("one", "two", "three", "four")
    assert not session.retract()
    session.say("Hello.")
    answer(session)
    for _ in range(2):
        assert session.retract()
        answer(session)
    session.say("Go on.")
    answer(session)
    (first, _), (second, _), (third, _), (last, _) = stream.asked
    assert first == second == third
    assert [sample for _, sample in stream.asked] == [0, 1, 2, 0]
    assert last[2]["content"] == "Jay Gatsby: three"


def test_the_scenes_first_message_cannot_be_drawn_again(begin):
    session, _ = begin(scene=DARCY, character="Mr. Darcy", user="Ada")
    assert not session.retract()
    assert len(session.turns) == 1


def test_clear_begins_anew_and_the_record_goes_on(begin, tmp_path):
    session, stream = begin("one", "two", scene=DARCY, character="Mr. Darcy", user="Ada")
    session.say("Hello.")
    answer(session)
    session.clear()
    session.say("Again.")
    answer(session)
    assert "Hello." not in json.dumps(stream.asked[1][0])
    assert [m["role"] for m in stream.asked[1][0]] == ["system", "user", "assistant", "user"]
    kinds = [r["kind"] for r in rows(tmp_path)]
    assert kinds == ["header", "turn", "turn", "turn", "clear", "turn", "turn", "turn"]


def test_the_record_says_what_is_needed_to_understand_the_chat(begin, tmp_path):
    session, _ = begin(SPOKEN)
    session.say("Hello. [Hm.]")
    answer(session)
    session.end("quit")
    header, said, reply, end = rows(tmp_path)
    assert header["scenario"]["id"] == "great_gatsby"
    assert (header["character"], header["user"], header["model"]) == ("Jay Gatsby", "Nick Carraway", {"name": "m"})
    assert header["system"] == session.system
    assert (said["author"], said["speaker"], said["text"]) == ("user", "Nick Carraway", "Hello. [Hm.]")
    assert (reply["author"], reply["speaker"], reply["text"]) == ("model", "Jay Gatsby", SPOKEN)
    assert reply["view"] == "Jay Gatsby: Old sport."
    assert (reply["ended"], reply["tokens"], reply["sample"], reply["forgotten"]) == ("stop", 5, 0, 0)
    assert (end["kind"], end["reason"], end["turns"]) == ("end", "quit", 2)


def test_a_record_is_never_overwritten(tmp_path):
    Transcript(tmp_path / "a" / "t.jsonl").add("header")
    with pytest.raises(UserError, match="exists already"):
        Transcript(tmp_path / "a" / "t.jsonl")
    with pytest.raises(UserError, match="cannot write"):
        Transcript(tmp_path / "a" / "t.jsonl" / "below.jsonl")
    assert len((tmp_path / "a" / "t.jsonl").read_text().splitlines()) == 1
