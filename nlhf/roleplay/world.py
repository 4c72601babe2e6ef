"""The role-play world: conversations and pairs in which what is better is known by construction.

Station of the path: source -> **Pair**. In the scenarios of `nlhf.roleplay.scenarios` one character asks another about
one of sixteen matters, and gets a reply made of the sentences in ``nlhf/assets/roleplay/matters.yaml``. A reply may
have any of four faults (`FAULTS`); the better of two replies has fewer. `faults` finds them in any text by rules of its
own, so it can tell whether a policy got better or has only learned to please its judge.
"""

import functools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from nlhf.errors import UserError
from nlhf.files import read_yaml
from nlhf.pairs import HumanCritique, Pair
from nlhf.roleplay.conversations import Conversation, held_out_groups
from nlhf.roleplay.scenarios import Character, Scenario, load_scenarios
from nlhf.roleplay.turns import PLAN, DualTurn, Segment, hide, judge_view, parse, problems, render

FAULTS = {
    "evades": "does not answer what was said",
    "breaks": "steps out of the character",
    "reveals": "gives its own plan away",
    "unshaped": "writes thoughts and actions without their tags",
}
"""What can be wrong with a reply, by name."""

HELD_OUT = 0.4
"""Share of the scenarios that is held out from training, of policy and judge alike."""

# How often a reply of the cold start's conversations has a fault: the form is learned, what is good is not.
_RATES = {"evades": 0.4, "breaks": 0.25, "reveals": 0.25, "unshaped": 0.2}
_REVEALS = re.compile(r"\b(?:plan|planned|aim|aims|hide|hidden|pretend|secretly)\b", re.IGNORECASE)
_BREAKS = re.compile(r"\b(?:AI|artificial|assist|assistant|language model|user|story|i play|chatbot)\b", re.IGNORECASE)
_TRIES = 10_000


@dataclass(frozen=True)
class Matter:
    """Something that can be asked and answered.

    Attributes:
        name: One word.
        words: What gives it away: each question and answer has one of them, no other sentence has any.
        asks: Questions.
        answers: Answers.
    """

    name: str
    words: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]

    def is_spoken_of(self, text: str) -> bool:
        """Whether a text has one of the words."""
        return re.search(rf"\b(?:{'|'.join(self.words)})\b", text, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Phrases:
    """All sentences of the world; ``{me}``, ``{you}`` and ``{matter}`` stand for names."""

    matters: tuple[Matter, ...]
    plans: tuple[str, ...]
    thoughts: tuple[str, ...]
    actions: tuple[str, ...]
    fillers: tuple[str, ...]
    reveals: tuple[str, ...]
    breaks: tuple[str, ...]


@functools.cache
def phrases() -> Phrases:
    """The sentences on board."""
    found = read_yaml(Path(__file__).parents[1] / "assets" / "roleplay" / "matters.yaml")
    matters = tuple(
        Matter(row["name"], *(tuple(row[name]) for name in ("words", "asks", "answers"))) for row in found["matters"]
    )
    return Phrases(matters, **{name: tuple(rows) for name, rows in found.items() if name != "matters"})


@dataclass(frozen=True)
class Situation:
    """One character has asked another about a matter.

    Attributes:
        scenario: Where they are.
        me: Who is to reply.
        you: Who has asked.
        matter: What about.
        before: The turns so far; the last one is the question.
    """

    scenario: Scenario
    me: Character
    you: Character
    matter: Matter
    before: tuple[DualTurn, ...]

    @property
    def system(self) -> str:
        """What the policy is told; kept short, for small models on a CPU."""
        return f"{self.scenario.title}. You are {self.me.name}. Your secret: {self.me.goal}"

    @property
    def scene(self) -> str:
        """What the judge is told."""
        return f"{self.scenario.title}. {self.me.name} replies."


# ----------------------------------------------------------------------------------------------------------- situations


def draw_situation(rng: random.Random, scenario: Scenario) -> Situation:
    """A question after nothing, after the other's reply to an earlier one, or after a third person's remark."""
    me, you, *others = rng.sample(scenario.characters, len(scenario.characters))
    earlier, matter = rng.sample(phrases().matters, 2)
    before: list[DualTurn] = []
    if rng.random() < 0.25:  # an earlier question and a reply to it
        situation = Situation(scenario, me, you, earlier, (_question(rng, earlier, you, me),))
        before += [*situation.before, draw_reply(rng, situation, draw_faults(rng))]
    elif others and rng.random() < 0.35:  # two others speak in a row
        before.append(_said(others[0], "role_speech", _filled(rng.choice(phrases().fillers), others[0], me)))
    return Situation(scenario, me, you, matter, (*before, _question(rng, matter, you, me)))


def _question(rng: random.Random, matter: Matter, asker: Character, asked: Character) -> DualTurn:
    return _said(asker, "role_speech", _filled(rng.choice(matter.asks), asker, asked))


def _said(who: Character, layer: str, text: str) -> DualTurn:
    return DualTurn(who.name, (Segment(layer, text),))


def _filled(sentence: str, me: Character, you: Character, matter: str = "") -> str:
    return sentence.format(me=me.name, you=you.name, matter=matter)


# -------------------------------------------------------------------------------------------------------------- replies


def draw_faults(rng: random.Random) -> frozenset[str]:
    """Faults of a reply in a conversation of the cold start, at most one of ``breaks`` and ``reveals``."""
    found = {name for name in ("evades", "unshaped") if rng.random() < _RATES[name]}
    coin = rng.random()
    if coin < _RATES["breaks"]:
        found.add("breaks")
    elif coin < _RATES["breaks"] + _RATES["reveals"]:
        found.add("reveals")
    return frozenset(found)


def draw_reply(rng: random.Random, situation: Situation, wrong: frozenset[str]) -> DualTurn:
    """A reply that has these faults and no others."""
    me, you, all_of = situation.me, situation.you, phrases()
    spoken_of = situation.matter
    if "evades" in wrong:
        spoken_of = rng.choice([matter for matter in all_of.matters if matter != situation.matter])
    further = all_of.breaks if "breaks" in wrong else all_of.reveals if "reveals" in wrong else all_of.fillers
    speech = [rng.choice(spoken_of.answers), _filled(rng.choice(further), me, you)]
    plan = _filled(rng.choice(all_of.plans), me, you, spoken_of.name)
    # Tags take about as many characters as two thoughts with actions, so a reply without tags may have three.
    k = rng.randint(1, 3) if "unshaped" in wrong else 1
    thoughts = [_filled(thought, me, you) for thought in rng.sample(all_of.thoughts, k)]
    actions = rng.sample(all_of.actions, k)
    if "unshaped" in wrong:
        narrated = [f"*{action}* {thought}" for action, thought in zip(actions, thoughts, strict=True)]
        return DualTurn(me.name, (Segment("role_speech", " ".join(narrated + speech)),), plan)
    layers = (Segment("role_thinking", thoughts[0]), Segment("role_action", actions[0]))
    return DualTurn(me.name, (*layers, Segment("role_speech", " ".join(speech))), plan)


def faults(text: str, prompt: Sequence[str] | str, character: str) -> set[str]:
    """What is wrong with a reply, by rules that know the world's words and no judge.

    Args:
        text: The reply, with or without system thinking.
        prompt: What the reply is to: the last turn before it.
        character: Who replies.

    Returns:
        Names in `FAULTS`. A text that is no turn of the character at all has the fault ``unshaped`` at least.
    """
    turn = parse(text, "tags", [character])
    speech = " ".join(segment.text for segment in turn.segments if segment.layer == "role_speech")
    layers = {segment.layer for segment in turn.segments}
    asked = [matter for matter in phrases().matters if matter.is_spoken_of(str(prompt))]
    found = {
        "evades": not any(matter.is_spoken_of(speech) for matter in asked),
        "breaks": _BREAKS.search(speech) is not None,
        "reveals": _REVEALS.search(speech) is not None,
        "unshaped": not {"role_thinking", "role_action"} <= layers or bool(problems(text, character, needs_plan=False)),
    }
    return {name for name, wrong in found.items() if wrong}


# --------------------------------------------------------------------------------------------- conversations and pairs


def conversations(n: int = 600, seed: int = 0) -> list[Conversation]:
    """Conversations of all scenarios in turn, their replies good or bad by chance; none occurs twice.

    Args:
        n: How many.
        seed: Of the draw.

    Raises:
        UserError: there are not as many.
    """
    rng = random.Random(f"role-play conversations {seed}")
    found: dict[str, Conversation] = {}
    scenarios = load_scenarios()
    for i in count():
        if len(found) == n:
            return list(found.values())
        if i > n + _TRIES:
            raise UserError(f"the built-in world has no {n} different conversations; lower conversations.n")
        situation = draw_situation(rng, scenarios[len(found) % len(scenarios)])
        drawn = _conversation(f"world-{len(found)}", situation, draw_reply(rng, situation, draw_faults(rng)))
        found.setdefault(drawn.key, drawn)


def _conversation(name: str, situation: Situation, reply: DualTurn) -> Conversation:
    return Conversation(
        name,
        situation.scenario.names,
        tuple(render(turn) for turn in (*situation.before, reply)),
        situation.scenario.id,
        situation.system,
        situation.scene,
    )


def pairs(n: int, split: str, seed: int = 0) -> Iterator[Pair]:
    """Pairs of replies to one question of which one has one fault more; the label is known by construction.

    The faults take turns, the better reply stands in either slot equally often, and is the longer one equally often:
    neither place nor length says anything, for each fault.

    Args:
        n: How many.
        split: train or held_out: scenarios of `HELD_OUT`, which no conversation of the split train has either.
        seed: Of the draw.
    """
    every = load_scenarios()
    out = held_out_groups((scenario.id for scenario in every), HELD_OUT)
    scenarios = [scenario for scenario in every if (scenario.id in out) == (split == "held_out")]
    rng = random.Random(f"role-play pairs {split} {seed}")
    names = tuple(FAULTS)
    for i in range(n):
        fault, round_ = names[i % len(names)], i // len(names)
        situation = draw_situation(rng, scenarios[rng.randrange(len(scenarios))])
        good, bad = _drawn_pair(rng, situation, fault, longer=round_ % 2 == 0)
        pair = Pair(
            f"world-{split}-{i}",
            judge_view(situation.before, situation.me.name, situation.scene),
            good,
            bad,
            "A",
            critiques=[HumanCritique(weaknesses_b=f"{situation.me.name} {FAULTS[fault]}.")],
            source="roleplay",
            subset=fault,
            group=situation.scenario.id,
        )
        yield pair if round_ // 2 % 2 == 0 else pair.swap()


def _drawn_pair(rng: random.Random, situation: Situation, fault: str, longer: bool) -> tuple[str, str]:
    """The better and the worse reply, as a judge sees them; the better one is the longer one if asked for."""
    shared = frozenset({rng.choice([name for name in ("evades", "unshaped") if name != fault])})
    shared = shared if rng.random() < 0.25 else frozenset()
    while True:
        good, bad = (render(hide(draw_reply(rng, situation, wrong), PLAN)) for wrong in (shared, shared | {fault}))
        if len(good) != len(bad) and (len(good) > len(bad)) == longer:
            return good, bad
