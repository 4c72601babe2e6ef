"""CoSER's protocol: scenes, acting and who sees what, flaws, scores, and the verb against a scripted server."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from nlhf.cli import main
from nlhf.errors import UserError
from nlhf.generation import SamplingConfig
from nlhf.generation.backends import GenerationFailed
from nlhf.judge import Reply
from nlhf.roleplay.coser import markdown, summarise
from nlhf.roleplay.coser_scenes import BUILT_IN, ENVIRONMENT, load_scenes
from nlhf.roleplay.flaws import (
    DIMENSIONS,
    IMPUTED,
    Flaw,
    FlawList,
    UnreadableError,
    figures,
    judge_prompt,
    list_flaws,
    read_flaws,
    retrying,
    score,
)
from nlhf.roleplay.simulation import (
    END,
    PlayedTurn,
    Simulation,
    SimulationConfig,
    choose_next,
    named_speaker,
    next_speaker_prompt,
    simulate,
    turn_prompt,
)
from tests.generation.faulty_server import FaultyServer, completion

SCENE = load_scenes()[0]
ROUND_ROBIN = SimulationConfig(rounds=4, next_speaker="round_robin")


class Scripted:
    """A generator whose replies are a function of the prompt's last message and the sample."""

    def __init__(self, answer):
        self.answer, self.prompts, self.config = answer, [], SamplingConfig()

    def generate(self, prompts, samples=1, progress=None):
        self.prompts += prompts
        return [[self.reply(p, k) for k in range(samples)] for p in prompts]

    def reply(self, prompt, sample):
        answer = self.answer(prompt, sample)
        return answer if isinstance(answer, Reply) else Reply(answer, truncated=False, tokens=len(answer))


def text_of(prompt):
    return "\n".join(message["content"] for message in prompt)


def played(*turns, scene=SCENE):
    return Simulation(scene, [PlayedTurn(speaker, text) for speaker, text in turns])


def flaws(dimension, *severities):
    rows = [{"instance": "Jo laughs", "type": "out of place", "severity": s} for s in severities]
    return json.dumps({dimension: {"flaws": rows}})


# ------------------------------------------------------------------------------------------------------------- scenes


def rows():
    return json.loads(BUILT_IN.read_text(encoding="utf-8"))


def write(path, *changed):
    path.write_text(json.dumps(list(changed)), encoding="utf-8")
    return path


def test_scenes_on_board_are_whole():
    scenes = load_scenes()
    assert [scene.tag for scene in scenes] == ["id", "id", "ood", "ood"]
    for scene in scenes:
        assert len(scene.dialogue) in (8, 9)
        assert set(scene.profiles) == set(scene.motives) == set(scene.characters)
        assert {turn.character for turn in scene.dialogue} <= set(scene.speakers)
        assert any(s.layer == "role_thinking" for turn in scene.dialogue for s in turn.segments)


def test_a_profile_begins_with_what_the_plot_says_and_a_motive_may_be_called_motivation(tmp_path):
    row = rows()[0]
    row["plot"]["key_characters"] = [{"name": "Jo", "description": "A sailor."}, {"name": "The sea"}]
    row["character_profiles"] = {"Jo": "He jokes.", "The sea": "Wide."}
    row["key_characters"] = [{"name": "Jo", "motivation": "First the oil."}, {"name": "Maren"}]
    [scene] = load_scenes(write(tmp_path / "scenes.json", row))
    assert scene.profiles == {"Jo": "A sailor.\n\nHe jokes."}
    assert scene.motives == {"Jo": "First the oil.", "Maren": ""}


def test_names_that_cannot_stand_before_a_colon_are_the_same_everywhere(tmp_path):
    text = json.dumps(rows()[0]).replace('"Jo"', '"Jo (the: sailor)"')
    [scene] = load_scenes(write(tmp_path / "scenes.json", json.loads(text)))
    name = "Jo the sailor"
    assert scene.speakers[0] == name
    assert name in scene.major
    assert name in scene.profiles
    assert name in scene.motives
    assert scene.dialogue[0].character == name


BAD_ROWS = {
    "a field is missing": (lambda r: r.pop("scenario"), "missing field 'scenario'"),
    "a field is misspelt": (lambda r: r.update(dialogue=r.pop("dialogues")), "Did you mean 'dialogue'"),
    "a text is a number": (lambda r: r.update(scenario=3), "field 'scenario' must be str"),
    "the tag is another": (lambda r: r.update(tag="train"), "field 'tag'"),
    "no summary": (lambda r: r["plot"].pop("summary"), "field 'plot.summary'"),
    "speakers are no list": (lambda r: r.update(speaking_characters_w_env="Jo"), "'speaking_characters_w_env'"),
    "only the environment speaks": (lambda r: r.update(speaking_characters_w_env=[ENVIRONMENT]), "needs a character"),
    "no original": (lambda r: r.update(dialogues=[]), "turns in 'dialogues'"),
    "a turn without speaker": (lambda r: r["dialogues"][2].pop("character"), "dialogues, turn 3: missing field"),
    "a turn that is no text": (lambda r: r["dialogues"][2].update(message=None), "dialogues, turn 3: field 'message'"),
    "a profile that is no text": (
        lambda r: r["character_profiles"].update({"M. Jo": 3}),
        "of 'M. Jo': field 'profile'",
    ),
    "a character without name": (lambda r: r["key_characters"][1].pop("name"), "key_characters, entry 2: missing"),
    "names that are one without brackets": (
        lambda r: r.update(speaking_characters_w_env=["Jo", "Jo (the sailor)", "Jo the sailor"]),
        "have one name of up to 60 letters",
    ),
    "a name of brackets": (lambda r: r.update(major_characters=["(:)"]), "'(:)' is no name"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_with_file_row_and_field(case, tmp_path):
    spoil, said = BAD_ROWS[case]
    good, bad = rows()[:2]
    spoil(bad)
    with pytest.raises(UserError, match=re.escape(said)) as error:
        load_scenes(write(tmp_path / "scenes.json", good, bad))
    assert str(error.value).startswith(f"{tmp_path / 'scenes.json'}:2: ")


def test_scenes_are_chosen_by_tag_and_two_with_one_id_are_refused(tmp_path):
    assert [s.tag for s in load_scenes(tag="ood", limit=1)] == ["ood"]
    with pytest.raises(UserError, match="Skerry Point-1-0"):
        load_scenes(write(tmp_path / "scenes.json", rows()[0], rows()[0]))
    with pytest.raises(UserError, match="no scene is left of 1"):
        load_scenes(write(tmp_path / "scenes.json", rows()[0]), tag="ood")


# ------------------------------------------------------------------------------------------------------------- acting


def test_round_robin_takes_turns_and_ends_with_the_rounds():
    actor, director = Scripted(lambda p, k: "Yes."), Scripted(lambda p, k: "It rains.")
    simulation = Simulation(SCENE)
    assert simulate([simulation], actor, director, ROUND_ROBIN) == []
    assert [t.speaker for t in simulation.turns] == ["Jo", "Maren", ENVIRONMENT, "Jo"]
    assert [t.next_by for t in simulation.turns] == ["order", "order", "order", None]
    assert (simulation.actor_rounds, len(actor.prompts), len(director.prompts)) == (3, 3, 1)


def test_without_environment_and_in_turn_no_director_is_asked():
    config = SimulationConfig(rounds=3, next_speaker="round_robin", environment=False)
    simulation = Simulation(SCENE)
    simulate([simulation], Scripted(lambda p, k: "Yes."), None, config)
    assert [t.speaker for t in simulation.turns] == ["Jo", "Maren", "Jo"]
    assert not config.directed


def test_the_director_ends_a_conversation_but_not_too_early():
    def direct(prompt, sample):
        return END if "Who can be next" in text_of(prompt) else "It rains."

    simulation = Simulation(SCENE)
    simulate([simulation], Scripted(lambda p, k: "Yes."), Scripted(direct), SimulationConfig())
    assert [t.next_by for t in simulation.turns] == [*["coin"] * 5, "director"]
    assert simulation.turns[-1].next == END
    speakers = [t.speaker for t in simulation.turns]
    assert all(a != b for a, b in itertools.pairwise(speakers))


def test_an_end_is_offered_only_where_it_counts():
    early, late = played(*[("Jo", "Yes.")] * 5), played(*[("Jo", "Yes.")] * 6)
    assert END not in text_of(next_speaker_prompt(early, SimulationConfig()))
    assert END in text_of(next_speaker_prompt(late, SimulationConfig()))


NAMED = {
    "the name": ("Maren", "Maren"),
    "in bold with a full stop": ("**Maren**.", "Maren"),
    "before what it would say": ("Maren: Come in.", "Maren"),
    "in other letters": ("maren", "Maren"),
    "in a sentence": ("I think that Maren should answer.", "Maren"),
    "after thinking of others": ("<think>Jo? Maren Lee?</think>Maren", "Maren"),
    "a longer name": ("Next is Maren Lee, of course.", "Maren Lee"),
    "two in a sentence": ("Maren or Jo", None),
    "within a word": ("Joyful", None),
    "the end": (END, END),
    "the end or a name": (f"{END} or Jo", None),
    "random": ("random", None),
    "nothing": ("", None),
    "thinking that is cut off": ("<think>Jo", None),
}


@pytest.mark.parametrize("case", NAMED)
def test_who_is_named(case):
    reply, name = NAMED[case]
    assert named_speaker(reply, ["Jo", "Maren", "Maren Lee", ENVIRONMENT]) == name


def test_the_coin_is_seeded_and_never_names_the_last_speaker_or_a_minor_one():
    scene = dataclasses.replace(SCENE, speakers=("Jo", "Maren", "Gull"))
    config = SimulationConfig()
    chosen = {seed: choose_next(played(("Jo", "Yes."), scene=scene), "Jo", config, seed) for seed in range(50)}
    assert set(chosen.values()) == {("Maren", "coin"), (ENVIRONMENT, "coin")}
    again = choose_next(played(("Jo", "Yes."), scene=scene), "nobody", config, 7)
    assert again == chosen[7]
    assert choose_next(played(("Jo", "Yes."), scene=scene), "Gull", config, 7) == ("Gull", "director")


def test_a_scene_of_one_speaker_alone_is_refused():
    scene = dataclasses.replace(SCENE, speakers=("Jo",))
    with pytest.raises(UserError, match=r"one speaker alone; set simulation\.environment true"):
        simulate([Simulation(scene)], Scripted(str), None, SimulationConfig(environment=False))


def test_conversations_side_by_side_are_as_one_by_one():
    def direct(prompt, sample):
        return "Environment" if len(text_of(prompt)) % 2 else "nobody"

    def act(scenes):
        simulations = [Simulation(scene) for scene in scenes]
        actor = Scripted(lambda p, k: f"({len(text_of(p))} steps) Yes.")
        simulate(simulations, actor, Scripted(direct), SimulationConfig(rounds=7), seed=3)
        return [s.to_dict() for s in simulations]

    scenes = load_scenes()
    assert act(scenes) == [row for scene in scenes for row in act([scene])]


def test_a_conversation_that_gets_no_reply_stands_still_and_is_named():
    class Broken(Scripted):
        def generate(self, prompts, samples=1, progress=None):
            replies = super().generate(prompts, samples)
            bad = [i for i, p in enumerate(prompts) if "lighthouse" in text_of(p)]
            if not bad:
                return replies
            for i in bad:
                replies[i] = [None]
            raise GenerationFailed("m", replies, dict.fromkeys(bad, "HTTP 500"))

    simulations = [Simulation(scene) for scene in load_scenes()[:2]]
    failures = simulate(simulations, Broken(lambda p, k: "Yes."), Scripted(lambda p, k: "It rains."), ROUND_ROBIN)
    assert [len(s.turns) for s in simulations] == [0, 4]
    assert "conversation 'The Lamp at Skerry Point-1-0': HTTP 500" in str(failures[0])


class Bounded(Scripted):
    """A server that refuses what is longer than it reads."""

    def __init__(self, answer, most):
        super().__init__(answer)
        self.most = most

    def generate(self, prompts, samples=1, progress=None):
        replies = super().generate(prompts, samples)
        reasons = {i: "HTTP 400: maximum context length" for i, p in enumerate(prompts) if len(text_of(p)) > self.most}
        if not reasons:
            return replies
        raise GenerationFailed("m", [[None] if i in reasons else r for i, r in enumerate(replies)], reasons)


def test_a_conversation_that_outgrows_the_actor_breaks_off_and_the_others_go_on():
    def speak(prompt, sample):
        return "Long. " * 1000 if "lighthouse" in text_of(prompt) else "Yes."

    simulations = [Simulation(scene) for scene in load_scenes()[:2]]
    director = Scripted(lambda p, k: "It rains.")
    assert simulate(simulations, Bounded(speak, 5000), director, ROUND_ROBIN) == []
    long, short = simulations
    assert (long.broke_off, short.broke_off) == ("HTTP 400: maximum context length", None)
    assert [t.text for t in long.turns][1:] == [""]
    assert long.finished(ROUND_ROBIN)
    assert long.turns[-1].next == END
    assert len(short.turns) == 4


def test_a_conversation_that_outgrows_the_director_breaks_off_behind_the_last_turn():
    simulation = Simulation(SCENE)
    director = Bounded(lambda p, k: "Maren", 0)
    assert simulate([simulation], Scripted(lambda p, k: "Yes."), director, SimulationConfig()) == []
    [turn] = simulation.turns
    assert (turn.text, turn.next, turn.broke_off is None) == ("Yes.", END, False)


def test_a_conversation_that_broke_off_is_a_failure_and_is_not_judged():
    broken = played(("Jo", "Open!"))
    broken.turns.append(PlayedTurn("Maren", "", next=END, broke_off="9 tokens, where 8 is the most"))
    judge = Scripted(lambda p, k: flaws(dimension_in(p)))
    found, failures = list_flaws([broken, played(("Jo", "Open!"), scene=load_scenes()[1])], judge)
    assert failures == []
    assert len(judge.prompts) == 4
    failed = [j for j in found if j.flaws is None]
    assert {j.key for j in failed} == {(SCENE.id, d) for d in DIMENSIONS}
    assert {j.failure for j in failed} == {"the conversation broke off: 9 tokens, where 8 is the most"}
    summary = summarise([broken], failed, SimulationConfig(), resamples=0)
    assert (summary["simulation"]["broke_off"], summary["simulation"]["silent_turns"]) == (1, 0)
    assert summary["scores"]["all"]["excluded"]["Average"].value is None
    assert "1 conversations, 1 of them broken off" in markdown(summary)


def test_a_conversation_that_is_too_long_for_the_judge_is_a_failure():
    found, failures = list_flaws([played(("Jo", "Open!"))], Bounded(lambda p, k: "", 0), retries=2)
    assert failures == []
    assert {j.failure for j in found} == {"too long for the judge: HTTP 400: maximum context length"}
    assert all(j.flaws is None and j.replies == () and j.prompt_hash for j in found)


# -------------------------------------------------------------------------------------------------------- who sees what

NOTATIONS = {
    "coser": "[{role}] (nods) Yes, {n}.",
    "a plan, then coser": "<think>{plan}</think>\n\n[{role}] (nods) Yes, {n}.",
    "the start of the plan is in the prompt": "{plan}</think> [{role}] Yes, {n}.",
    "tags": "<system_thinking>{plan}</system_thinking>\n\nJo: <role_thinking>{role}</role_thinking> Yes, {n}.",
    "tags and brackets": "<system_thinking>{plan}</system_thinking> <role_action>nods</role_action> [{role}] Yes, {n}.",
    "cut off in a thought": "Yes, {n}. [{role}",
    "cut off in a plan": "<system_thinking>{plan} {role}",
    "full width": "［{role}］ Yes, {n}.",
}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from(sorted(NOTATIONS)), min_size=1, max_size=5),
    st.sampled_from(["coser", "tags"]),
)
def test_nobody_reads_what_another_thinks_and_the_judge_reads_no_thought(forms, notation):
    config = SimulationConfig(rounds=len(forms) + 1, next_speaker="round_robin", notation=notation)
    left = iter(enumerate(forms))
    spoken = {}

    def speak(prompt, sample):
        n, form = next(left, (99, "coser"))
        spoken[n] = form
        return NOTATIONS[form].format(plan=f"PLAN{n}.", role=f"ROLE{n}.", n=f"SAID{n}")

    actor, director = Scripted(speak), Scripted(lambda p, k: "[SECRET] It rains. <think>SECRET</think>")
    simulation = Simulation(SCENE)
    simulate([simulation], actor, director, config)
    by_turn = {t.prompt_hash: t.speaker for t in simulation.turns}
    own = {f"ROLE{n}.": name for n, name in enumerate(t.speaker for t in simulation.turns if t.speaker != ENVIRONMENT)}
    for at, turn in enumerate(simulation.turns):
        before = Simulation(SCENE, simulation.turns[:at])
        read = text_of(turn_prompt(before, turn.speaker, config))
        assert "PLAN" not in read
        assert turn.speaker == ENVIRONMENT or "SECRET" not in read
        assert all(own[secret] == turn.speaker for secret in re.findall(r"ROLE\d+\.", read))
        others = [motive for name, motive in SCENE.motives.items() if name != turn.speaker]
        assert not any(motive in read for motive in others)
    assert by_turn
    directed = text_of(next_speaker_prompt(simulation, config))
    judged = "".join(text_of(judge_prompt(simulation, dimension)) for dimension in DIMENSIONS)
    assert not re.search(r"PLAN|ROLE|SECRET", directed + judged)
    thoughts = [s.text for turn in SCENE.dialogue for s in turn.segments if s.layer == "role_thinking"]
    assert thoughts
    assert not any(thought in judged for thought in thoughts)
    shown = text_of(judge_prompt(simulation, DIMENSIONS[0], show_thoughts=True))
    assert "PLAN" not in shown
    assert all(thought in shown for thought in thoughts)


def test_a_character_reads_its_own_thoughts_in_the_notation_it_is_asked_for():
    simulation = played(("Jo", "<think>p</think>[wet feet] (knocks) Open!"), ("Maren", "[him] Who is there?"))
    coser, tags = (turn_prompt(simulation, "Jo", SimulationConfig(notation=n)) for n in ("coser", "tags"))
    assert [m["role"] for m in coser] == ["system", "user", "assistant", "user"]
    assert coser[2]["content"] == "Jo: [wet feet] (knocks) Open!"
    assert coser[3]["content"] == tags[3]["content"] == "Maren: Who is there?"
    assert tags[2]["content"] == ("Jo: <role_thinking>wet feet</role_thinking> <role_action>knocks</role_action> Open!")
    assert "square brackets" in coser[0]["content"]
    assert "<system_thinking>" in tags[0]["content"]


def test_the_judge_reads_thoughts_if_asked_to():
    simulation = played(("Jo", "[wet feet] Open!"))
    hidden, shown = (text_of(judge_prompt(simulation, DIMENSIONS[0], show)) for show in (False, True))
    assert "Jo: Open!" in hidden
    assert "wet feet" not in hidden
    assert "square brackets" not in hidden
    assert "Jo: [wet feet] Open!" in shown
    assert "square brackets" in shown


def test_a_turn_in_which_nothing_can_be_seen_is_a_silent_turn_for_the_others():
    simulation = played(("Jo", "[only a thought]"), ("Maren", "Well?"))
    assert [t.silent for t in simulation.turns] == [True, False]
    messages = turn_prompt(simulation, "Maren", SimulationConfig())
    assert messages[1]["content"].endswith("Jo: (is silent)")
    assert "Jo: (is silent)" in text_of(judge_prompt(simulation, DIMENSIONS[0]))


def test_a_speaker_that_speaks_for_another_is_still_itself():
    turn = PlayedTurn("Jo", "Maren: I forgive you.").turn
    assert turn.character == "Jo"
    assert "Jo: Maren: I forgive you." in text_of(judge_prompt(played(("Jo", "Maren: I forgive you.")), DIMENSIONS[0]))


# -------------------------------------------------------------------------------------------------------------- flaws

SCORES = {
    "no flaw and no round": ([], 0, 100.0),
    "no flaw: the rounds give no more than 100": ([], 20, 100.0),
    "100 - (10 - 0) 5": ([5, 5], 0, 50.0),
    "100 - (10 - 0.3 x 10) 5": ([5, 5], 10, 65.0),
    "100 - (10 - 0.3 x 20) 5": ([5, 5], 20, 80.0),
    "made up for exactly: 100 - (6 - 0.3 x 20) 5": ([3, 3], 20, 100.0),
    "one more: 100 - (7 - 6) 5": ([3, 4], 20, 95.0),
    "not below 0: 100 - (30 - 6) 5 = -20": ([5] * 6, 20, 0.0),
    "100 - (4 - 0.3 x 7) 5": ([1, 1, 2], 7, 90.5),
}


@pytest.mark.parametrize("case", SCORES)
def test_scores_by_hand(case):
    severities, rounds, expected = SCORES[case]
    assert score([Flaw(s) for s in severities], rounds) == pytest.approx(expected)


@pytest.mark.parametrize("rounds", [0, 7, 20])
def test_a_further_flaw_never_raises_a_score(rounds):
    found = [score([Flaw(s) for s in (2, 1, 5, 3, 4, 5)[:n]], rounds) for n in range(7)]
    assert found == sorted(found, reverse=True)


D = DIMENSIONS[0]
READABLE = {
    "bare": (flaws(D, 2, 5), (2, 5)),
    "none": (flaws(D), ()),
    "in a fence, with prose": (f"Here:\n```json\n{flaws(D, 1)}\n```\nThat is all.", (1,)),
    "after thinking of another list": (f"<think>{flaws(D, 5)}</think>{flaws(D, 1)}", (1,)),
    "the last of two": (flaws(D, 5) + "\nOn reflection:\n" + flaws(D, 1), (1,)),
    "other letters in the name": (flaws(D.lower(), 3), (3,)),
    "severity as text": (flaws(D, "4"), (4,)),
    "severity as 3.0": (flaws(D, 3.0), (3,)),
    "without kind and place": (json.dumps({D: {"flaws": [{"severity": 2}]}}), (2,)),
    "LaTeX in a place": (flaws(D, 2).replace("Jo laughs", r"\alpha {x}"), (2,)),
    "all dimensions at once": (
        json.dumps({d: {"flaws": [{"severity": 1 + i}]} for i, d in enumerate(DIMENSIONS)}),
        (1,),
    ),
}
UNREADABLE = {
    "empty": "",
    "prose": "I find no flaws at all.",
    "another dimension": flaws(DIMENSIONS[1], 2),
    "without the dimension": '{"flaws": []}',
    "cut off after the first flaw": flaws(D, 2, 5)[:-20],
    "cut off before the end": flaws(D, 2)[:-1],
    "severity 0": flaws(D, 0),
    "severity 6": flaws(D, 1, 6),
    "severity 2.5": flaws(D, 2.5),
    "severity true": flaws(D, True),
    "severity in words": flaws(D, "high"),
    "no severity": json.dumps({D: {"flaws": [{"type": "x"}]}}),
    "severity null": flaws(D, None),
    "severity of thousands of digits": flaws(D, "9" * 5000),
    "NaN": json.dumps({D: {"flaws": [{"severity": float("nan")}]}}),
    "flaws are a text": json.dumps({D: {"flaws": "none"}}),
    "flaws are missing": json.dumps({D: {}}),
    "a flaw is a text": json.dumps({D: {"flaws": ["bad"]}}),
    "the last list is broken": flaws(D, 1) + flaws(D, 9),
    "only in thinking": f"<think>{flaws(D, 1)}</think>",
}


@pytest.mark.parametrize("case", READABLE)
def test_lists_of_flaws_that_are_read(case):
    reply, severities = READABLE[case]
    assert tuple(f.severity for f in read_flaws(reply, D)) == severities


@pytest.mark.parametrize("case", UNREADABLE)
def test_replies_that_are_no_list_of_flaws(case):
    with pytest.raises(UnreadableError):
        read_flaws(UNREADABLE[case], D)


def dimension_in(prompt):
    return next(d for d in DIMENSIONS if f"What to look for: {d}" in text_of(prompt))


def test_each_dimension_is_asked_for_with_its_own_criteria():
    prompts = [text_of(judge_prompt(played(("Jo", "Open!")), d)) for d in DIMENSIONS]
    assert [dimension_in([{"content": p}]) for p in prompts] == list(DIMENSIONS)
    assert len({p.split("What to look for")[1] for p in prompts}) == 4


def test_a_bad_reply_is_asked_for_again_and_the_first_that_can_be_read_counts():
    again = Scripted(lambda p, k: ["what?", flaws(dimension_in(p), 2), flaws(dimension_in(p), 5)][k])
    judge = Scripted(lambda p, k: "no" if dimension_in(p) == D else flaws(dimension_in(p)))
    found, failures = list_flaws([played(("Jo", "Open!"))], judge, retries=3, again=again)
    assert failures == []
    assert len(again.prompts) == 1
    assert [len(j.replies) for j in found] == [3, 1, 1, 1]
    assert found[0].replies[:2] == ("no", "what?")
    assert [f.severity for f in found[0].flaws] == [2]
    assert found[0].score == 100 - (2 - 0.3) * 5


def test_what_cannot_be_read_in_the_end_is_a_failure_and_no_score():
    judge = Scripted(lambda p, k: Reply("{", truncated=True, tokens=1))
    found, _ = list_flaws([played(("Jo", "Open!"))], judge, retries=2)
    assert all(j.flaws is None and j.score is None and len(j.replies) == 3 and j.truncated == 3 for j in found)
    assert "cut off by the token limit" in found[0].failure


def test_a_greedy_judge_is_asked_again_with_other_draws():
    judge = Scripted(str)
    assert (retrying(judge).config.temperature, retrying(judge).config.seed) == (1.0, 1)
    judge.config = SamplingConfig(temperature=0.6, seed=4)
    assert (retrying(judge).config.temperature, retrying(judge).config.seed) == (0.6, 5)
    assert judge.config.seed == 4


def test_a_judgement_without_a_reply_is_no_judgement():
    class Broken(Scripted):
        def generate(self, prompts, samples=1, progress=None):
            replies = [[Reply(flaws(dimension_in(p)), False, 1)] for p in prompts]
            replies[1] = [None]
            raise GenerationFailed("m", replies, {1: "HTTP 500"})

    found, failures = list_flaws([played(("Jo", "Open!"))], Broken(str))
    assert [j.dimension for j in found] == [DIMENSIONS[0], DIMENSIONS[2], DIMENSIONS[3]]
    assert f"Skerry Point-1-0', {DIMENSIONS[1]}: HTTP 500" in str(failures[0])


def judged(scene, *severities, tag="id", rounds=0):
    """One judgement a dimension; None for a failure."""
    return [
        FlawList(scene, tag, d, rounds, None if s is None else (Flaw(s),), None if s else "no JSON", ("",), 0, 0, "")
        for d, s in zip(DIMENSIONS, severities, strict=True)
    ]


def test_figures_by_hand():
    """Scene a: 95, 90, failure, 75; scene b: 85, failure, failure, 75. Means 90, 90, none, 75."""
    found = figures(judged("a", 1, 2, None, 5) + judged("b", 3, None, None, 5), resamples=0)
    assert [found[d].value for d in DIMENSIONS] == [90.0, 90.0, None, 75.0]
    assert [found[d].n for d in DIMENSIONS] == [2, 1, 0, 2]
    assert [found[d].k for d in DIMENSIONS] == [180.0, 90.0, 0.0, 150.0]
    assert found["Average"].value is None  # of three dimensions it would be another figure
    compat = figures(judged("a", 1, 2, None, 5) + judged("b", 3, None, None, 5), IMPUTED, resamples=0)
    assert [compat[d].value for d in DIMENSIONS] == [90.0, 70.0, 50.0, 75.0]
    assert compat["Average"].value == 71.25
    assert {compat[d].n for d in DIMENSIONS} == {2}


def test_the_average_is_the_mean_of_the_dimensions_means():
    found = figures(judged("a", 1, 2, 3, 4) + judged("b", 1, None, 3, 4), resamples=0)
    assert found["Average"].value == pytest.approx((95 + 90 + 85 + 80) / 4)
    assert (found["Average"].k, found["Average"].n) == (pytest.approx(350), 4)


def test_intervals_resample_conversations():
    """One of two conversations is bad in all dimensions: a resample has it twice, once or never."""
    found = figures(judged("a", 1, 1, 1, 1) + judged("b", 5, 5, 5, 5), resamples=2000)
    assert [(found[d].low, found[d].high) for d in found] == [(75.0, 95.0)] * 5
    alone = figures(judged("a", 1, 2, 3, 4), resamples=200)
    assert (alone["Average"].low, alone["Average"].high) == (None, None)


def test_a_summary_has_both_ways_of_counting_side_by_side_and_both_subsets():
    scenes = load_scenes()
    simulations = [played(("Jo", "[x]"), ("Maren", "Well?"), scene=scene) for scene in scenes]
    judgements = judged(scenes[0].id, 1, 1, 1, 1) + judged(scenes[2].id, None, 5, 5, 5, tag="ood")
    summary = summarise(simulations, judgements, SimulationConfig(), resamples=0)
    assert list(summary["scores"]) == ["all", "id", "ood"]
    assert summary["scores"]["ood"]["excluded"][D].value is None
    assert summary["scores"]["ood"]["compat_50"][D].value == 50.0
    assert summary["scores"]["ood"]["failures"] == {d: int(d == D) for d in DIMENSIONS}
    assert summary["judge"] == {"judgements": 8, "failures": 1, "asked_again": 0, "truncated_replies": 0}
    assert (summary["simulation"]["silent_turns"], summary["simulation"]["actor_turns"]) == (4, 8)
    table = markdown(summary)
    assert "does not read what characters think; 1 of 8 judgements are failures" in table
    assert f"| out-of-domain | {D} | – | 1 | 50.0 (50.0/1) |" in table
    alone = summarise(simulations[:1], judgements[:4], SimulationConfig(), resamples=0)
    assert list(alone["scores"]) == ["all"]


# ----------------------------------------------------------------------------------------------------------- the verb


def answer(body):
    """The server's replies, a function of the request alone: it judges, directs, tells the surroundings, or acts."""
    text = "\n".join(message["content"] for message in body["messages"])
    if "critic of acted scenes" in text:
        dimension = dimension_in([{"content": text}])
        if dimension == D and body["temperature"] == 0:
            return completion("no JSON today")
        if dimension == DIMENSIONS[3] and "Tollhouse" in text:
            return completion('{"a": ')
        return completion(flaws(dimension, *[2] * (len(text) % 3)))
    if "Who can be next" in text:
        return completion(re.findall(r"^- (.+)$", text, re.MULTILINE)[len(text) % 3])
    if "the surroundings of a scene" in text:
        return completion("A door slams.")
    return completion(f"<think>a plan</think>[a thought] (takes {len(text)} steps) Yes.")


@pytest.fixture
def server():
    server = FaultyServer()
    server.default = answer
    yield server
    server.close()


@pytest.fixture
def run(server, tmp_path, monkeypatch):
    """Runs the verb with the server as actor, judge and director."""
    monkeypatch.chdir(tmp_path)
    backend = {"kind": "openai", "base_url": server.url, "concurrency": 4, "retries": 2, "backoff": 0.01}
    backend = json.dumps(backend)

    def run(out, *options):
        models = ["--model.name", "actor", "--judge.model.name", "judge", "--judge.backend", backend]
        common = ["--backend", backend, "--simulation.rounds", "7", "--resamples", "50", "--run_name", "r"]
        return main(["roleplay", "coser", *models, *common, "--out", out, *map(str, options)])

    return run


def lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


RESULTS = ("simulations.jsonl", "judgements.jsonl", "summary.json", "summary.md")


def contents(folder):
    return {name: Path(folder, name).read_bytes() for name in RESULTS}


def test_the_verb_end_to_end(run, server, capsys):
    assert run("out") == 0
    assert {p.name for p in Path("out").iterdir()} == {
        *RESULTS, "config.yaml", "environment.json", "manifest.json", "usage.jsonl",
    }  # fmt: skip
    simulations, judgements = lines("out/simulations.jsonl"), lines("out/judgements.jsonl")
    assert [row["scene"] for row in simulations] == [scene.id for scene in load_scenes()]
    assert all(len(row["turns"]) == 7 for row in simulations)
    assert len(judgements) == 16
    asked = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert not any("a plan" in text for texts in asked for text in texts)
    assert not any("a thought" in text for texts in asked if "critic of acted scenes" in texts[0] for text in texts)

    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["judge"] == {"judgements": 16, "failures": 1, "asked_again": 5, "truncated_replies": 0}
    for j in judgements:
        rounds = next(s["actor_rounds"] for s in simulations if s["scene"] == j["scene"])
        expected = None if j["flaws"] is None else max(0, min(100, 100 - 5 * (2 * len(j["flaws"]) - 0.3 * rounds)))
        assert j["score"] == (expected if expected is None else pytest.approx(expected))
    quality = [j["score"] for j in judgements if j["dimension"] == DIMENSIONS[3]]
    assert quality.count(None) == 1
    kept = [s for s in quality if s is not None]
    scores = summary["scores"]["all"]
    assert scores["excluded"][DIMENSIONS[3]]["value"] == pytest.approx(sum(kept) / 3)
    assert scores["compat_50"][DIMENSIONS[3]]["value"] == pytest.approx((sum(kept) + 50) / 4)
    assert "| all | Average |" in capsys.readouterr().out

    [row] = lines("runs/ledger.jsonl")
    assert (row["source"], row["model"], row["n"], row["data_n"]) == ("coser", "actor", 16, 4)
    assert row["scorer"]["judge"]["backend"]["model"] == "judge"
    assert row["metrics"]["coser/Average"] == scores["excluded"]["Average"]


def cut(path, rows, torn=""):
    text = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(path).write_text("".join(text[:rows]) + torn, encoding="utf-8")


def journal(folder, upto):
    """A run killed while it acted: its turns as they were written, round by round, and nothing later."""
    rows = [
        {"scene": s["scene"], "round": n + 1, **s["turns"][n]}
        for n in range(7)
        for s in lines(f"{folder}/simulations.jsonl")
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows[:upto])
    Path(folder, "turns.jsonl").write_text(text + '{"scene": "The La', encoding="utf-8")
    for name in RESULTS:
        Path(folder, name).unlink()


KILLED = {
    "before the first turn": lambda: journal("out", 0),
    "amid a round": lambda: journal("out", 10),
    "as the scenes end": lambda: journal("out", 26),
    "with some scenes done": lambda: (journal_of_two(), None),
    "amid the judging": lambda: (Path("out/summary.json").unlink(), cut("out/judgements.jsonl", 6, '{"scene": "T')),
    "before the summary": lambda: Path("out/summary.json").unlink(),
    "never": lambda: None,
}


def journal_of_two():
    done = Path("out/simulations.jsonl").read_text(encoding="utf-8")
    journal("out", 28)
    Path("out/simulations.jsonl").write_text(done, encoding="utf-8")
    cut("out/simulations.jsonl", 2, '{"scene": "Minu')


@pytest.mark.parametrize("case", KILLED)
def test_a_run_that_was_killed_ends_as_if_nothing_had_been(case, run, server):
    assert run("out") == 0
    whole, asked = contents("out"), len(server.bodies)
    KILLED[case]()
    assert run("out", "--resume", "true", "--parallel", "3") == 0
    assert contents("out") == whole
    assert not Path("out/turns.jsonl").exists()
    saved = {"before the first turn": 0, "amid a round": 19, "as the scenes end": 45, "with some scenes done": 45}
    if case in saved:
        assert len(server.bodies) <= 2 * asked - saved[case]
    if case in ("never", "before the summary"):
        assert len(server.bodies) == asked
    assert len(lines("runs/ledger.jsonl")) == (1 if case == "never" else 2)


def test_a_server_that_fails_costs_its_conversation_alone_and_resume_mends_it(run, server, capsys):
    assert run("whole") == 0
    server.default = lambda body: 500 if "lunar" in json.dumps(body).lower() else answer(body)
    assert run("out") == 2
    said = capsys.readouterr().err
    assert "conversation 'Minutes of the Lunar Garden-2-0': HTTP 500" in said
    assert "--resume true" in said
    assert len(lines("out/simulations.jsonl")) == 3
    assert not Path("out/summary.json").exists()
    server.default = answer
    assert run("out", "--resume", "true") == 0
    assert contents("out") == contents("whole")


REFUSED = {
    "a folder with a run": ([], "already holds a run"),
    "another configuration": (["--resume", "true", "--show_thoughts", "true"], "show_thoughts: False -> True"),
    "other scenes": (["--resume", "true", "--limit", "2"], "limit: None -> 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_is_not_overwritten(case, run, capsys):
    assert run("out") == 0
    before = contents("out")
    options, said = REFUSED[case]
    assert run("out", *options) == 2
    assert said in capsys.readouterr().err
    assert contents("out") == before


BAD_OPTIONS = {
    "no rounds": (["--simulation.rounds", "0"], "simulation.rounds must be at least 1"),
    "an unknown rule": (["--simulation.next_speaker", "loudest"], "next_speaker"),
    "fewer retries than none": (["--retries", "-1", "--parallel", "0"], "retries must be at least 0, got -1; parallel"),
    "no such file": (["--scenes", "nowhere.json"], "nowhere.json"),
    "an unknown tag": (["--tag", "train"], "tag"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_before_anything_is_written(case, run, server, capsys):
    options, said = BAD_OPTIONS[case]
    assert run("out", *options) == 2
    assert said in capsys.readouterr().err
    assert not Path("out").exists()
    assert not server.bodies


def edited(path, change):
    """The file with one row changed by hand."""
    rows = lines(path)
    change(rows)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


EDITED = {
    "a speaker who is nobody": ("simulations", lambda r: r[0]["turns"][1].update(speaker="Gull"), "'Gull' speaks"),
    "a next one who is nobody": ("simulations", lambda r: r[1]["turns"][2].update(next="Gull"), "'Gull' is next"),
    "nobody is next": ("simulations", lambda r: r[1]["turns"][2].update(next=None), "None is next"),
    "a turn too many": ("simulations", lambda r: r[0]["turns"].append(r[0]["turns"][0]), "the turn of None"),
    "another text": ("simulations", lambda r: r[0]["turns"][0].update(text="No."), "on another conversation"),
    "a field of another version": ("simulations", lambda r: r[0]["turns"][0].update(mood=1), "not a turn written by"),
    "a judgement on no scene": ("judgements", lambda r: r[0].update(scene="X"), "no scene has the id 'X'"),
    "another dimension": ("judgements", lambda r: r[0].update(dimension="Style"), "field 'dimension'"),
    "a severity in words": ("judgements", lambda r: r[-1].update(flaws=[{"severity": "bad"}]), "field 'severity'"),
    "a row that is a list": ("judgements", lambda r: r.append([]), "not a judgement written by"),
}


def test_files_of_a_run_that_were_edited_are_refused_with_their_row(run, capsys):
    assert run("out") == 0
    for name, change, said in EDITED.values():
        before = contents("out")
        edited(f"out/{name}.jsonl", change)
        changed = contents("out")
        assert run("out", "--resume", "true") == 2
        message = capsys.readouterr().err
        assert said in message
        assert re.search(r"out/(simulations|judgements)\.jsonl:\d+: ", message)
        assert contents("out") == changed
        Path(f"out/{name}.jsonl").write_bytes(before[f"{name}.jsonl"])


def test_two_processes_do_not_work_on_one_run(run, capsys):
    assert run("out") == 0
    before = contents("out")
    with FileLock("out/.lock"):
        assert run("out", "--resume", "true") == 2
    assert "out: another process is at work on this run" in capsys.readouterr().err
    assert contents("out") == before
    assert run("out", "--resume", "true") == 0


def test_a_run_with_a_conversation_that_breaks_off_ends_and_is_resumed(run, server):
    def limited(body):
        long = "lunar" in json.dumps(body).lower() and len(body["messages"]) > 2
        return (400, {}, {"error": {"message": "context length"}}) if long else answer(body)

    server.default = limited
    assert run("out") == 0
    whole, asked = contents("out"), len(server.bodies)
    [broken] = [row["turns"] for row in lines("out/simulations.jsonl") if "Lunar" in row["scene"]]
    assert "context length" in broken[-1]["broke_off"]
    assert len(broken) < 7
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["simulation"]["broke_off"], summary["judge"]["judgements"]) == (1, 16)
    assert sum("broke off" in (j["failure"] or "") for j in lines("out/judgements.jsonl")) == 4
    Path("out/summary.json").unlink()
    assert run("out", "--resume", "true") == 0
    assert contents("out") == whole
    assert len(server.bodies) == asked


def test_scenes_that_changed_are_not_resumed(run, capsys):
    write(Path("scenes.json"), *rows()[:2])
    assert run("out", "--scenes", "scenes.json") == 0
    changed = rows()[:2]
    changed[1]["scenario"] += " It is cold."
    write(Path("scenes.json"), *changed)
    assert run("out", "--scenes", "scenes.json", "--resume", "true") == 2
    assert "its scenes changed since it began" in capsys.readouterr().err


def test_a_model_in_this_process_is_loaded_once_for_all_parts(tmp_path, model_cache, caplog):
    tiny = ["--model.name", "random:qwen3-tiny", "--judge.model.name", "random:qwen3-tiny"]
    short = ["--sampling.max_new_tokens", "8", "--judge.sampling.max_new_tokens", "4", "--simulation.rounds", "2"]
    options = ["--limit", "1", "--retries", "1", "--ledger", "null", "--out", str(tmp_path / "out")]
    with caplog.at_level("INFO"):
        assert main(["roleplay", "coser", *tiny, *short, *options]) == 0
    assert sum("M parameters" in message for message in caplog.messages) == 1
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["judge"]["failures"] == 4
    assert summary["scores"]["all"]["excluded"]["Average"]["value"] is None
    [row] = lines(tmp_path / "out/simulations.jsonl")
    assert all(turn["tokens"] <= 8 for turn in row["turns"])
    assert all(j["tokens"] <= 2 * 4 for j in lines(tmp_path / "out/judgements.jsonl"))
