"""Given-circumstance acting: one model speaks for every character of a scene, turn after turn.

Station of the path: source -> **simulation** -> judge, for the evaluation of role-play (`nlhf.roleplay.coser`); after
CoSER (arXiv 2502.09082). Three parts share the work: the *actor* is what is evaluated and speaks for all characters,
each from its own view (`nlhf.roleplay.turns.history_view`); the *director* speaks for the environment and names who is
next. Several conversations go on side by side, a round of all at once.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nlhf.errors import UserError
from nlhf.files import check_fields
from nlhf.formats.base import Message
from nlhf.generation.backends import GenerationFailed
from nlhf.generation.limits import PromptTooLong, says_too_long, too_long
from nlhf.judge import Generator, Reply, prompt_hash
from nlhf.roleplay.coser_scenes import ENVIRONMENT, Scene
from nlhf.roleplay.prompts import template
from nlhf.roleplay.turns import DualTurn, Segment, history_view, parse, pieces, reader_view
from nlhf.verdict import strip_thinking

END = "<END CHAT>"
"""How a director ends a conversation."""
EARLIEST_END = 6
"""Rounds before a director may end a conversation, as upstream has it."""

NextBy = Literal["director", "coin", "order"]
_SILENCE = Segment("role_action", "is silent")
_OPENING = DualTurn(None, (Segment("role_speech", "The scene begins."),))


@dataclass
class SimulationConfig:
    """How a scene is acted."""

    rounds: int = 20
    """Turns of a conversation, those of the environment among them; 20 upstream, 10 in HER's fork."""

    next_speaker: Literal["model", "round_robin"] = "model"
    """model: the director names who is next and may end the conversation after six rounds; round_robin: all in turn."""

    environment: bool = True
    """Whether the environment has turns, which the director writes."""

    notation: Literal["coser", "tags"] = "coser"
    """How the actor is asked to write: coser, [thought] and (action); tags, the dual-layer turn of HER."""

    def __post_init__(self):
        if self.rounds < 1:
            raise UserError(f"simulation.rounds must be at least 1, got {self.rounds}")
        for name, known in (("next_speaker", ("model", "round_robin")), ("notation", ("coser", "tags"))):
            if getattr(self, name) not in known:
                raise UserError(f"simulation.{name} must be {' or '.join(known)}, got {getattr(self, name)!r}")

    @property
    def directed(self) -> bool:
        """Whether a director has anything to do."""
        return self.environment or self.next_speaker == "model"


@dataclass(frozen=True)
class PlayedTurn:
    """One round of a conversation.

    Attributes:
        speaker: Whose turn it was.
        text: The whole reply, thoughts and plans included.
        truncated: The token limit cut it off.
        tokens: Its length in tokens.
        prompt_hash: Of the prompt that it answers, see `nlhf.judge.prompt_hash`.
        next: Who is next; `END` after the last turn; None where the rounds are used up.
        next_by: Who said so: the director, a coin where the director named nobody who can be next, or the order.
        director: The director's reply; None where it was not asked.
        broke_off: Why the conversation breaks off here: what was to be read next, by who has this turn or by the
            director, does not fit into the model's context. None where it goes on.
    """

    speaker: str
    text: str
    truncated: bool = False
    tokens: int = 0
    prompt_hash: str = ""
    next: str | None = None
    next_by: NextBy | None = None
    director: str | None = None
    broke_off: str | None = None

    @property
    def turn(self) -> DualTurn:
        """The turn as it is read: without its plan, and who speaks is not the reply's to say.

        Speech is read for CoSER's brackets beside tags too: a model that plans in ``<think>`` and then writes
        ``[a thought]`` would else say its thought aloud.
        """
        found = parse(self.text, characters=[self.speaker])
        segments = [
            part
            for segment in found.segments
            for part in (parse(segment.text, "coser", ()).segments if segment.layer == "role_speech" else [segment])
        ]
        return DualTurn(self.speaker, tuple(segments))

    @property
    def silent(self) -> bool:
        """Nothing is said or done that others can see."""
        return not self.turn.visible and self.broke_off is None


@dataclass
class Simulation:
    """A scene as it is acted, up to now."""

    scene: Scene
    turns: list[PlayedTurn] = field(default_factory=list)

    def finished(self, config: SimulationConfig) -> bool:
        """Whether it is over."""
        return len(self.turns) >= config.rounds or (bool(self.turns) and self.turns[-1].next == END)

    def next_speaker(self, config: SimulationConfig) -> str:
        """Whose turn it is."""
        return self.turns[-1].next if self.turns else speakers(self.scene, config)[0]

    @property
    def broke_off(self) -> str | None:
        """Why it ended before its end: nobody can judge it then. None where it did not."""
        return self.turns[-1].broke_off if self.turns else None

    def take_up(self, turn: PlayedTurn, config: SimulationConfig, where: str) -> None:
        """Add a turn that a run has kept.

        Raises:
            UserError: it does not follow on those before, or nothing can follow on it.
        """
        due = None if self.finished(config) else self.next_speaker(config)
        self.turns.append(turn)
        known = speakers(self.scene, config)
        if turn.speaker != due or not (self.finished(config) or turn.next in known):
            raise UserError(
                f"{where}: {turn.speaker!r} speaks and {turn.next!r} is next, where it is the turn of {due!r} and the "
                f"speakers are {', '.join(known)}; was the file edited?"
            )

    @property
    def dialogue(self) -> list[DualTurn]:
        """The turns, where others see that somebody says and does nothing: a view would leave such a turn out."""
        return [audible(turn.turn) for turn in self.turns]

    @property
    def actor_rounds(self) -> int:
        """Turns of characters, not of the environment."""
        return sum(turn.speaker != ENVIRONMENT for turn in self.turns)

    def to_dict(self) -> dict[str, Any]:
        """One line of ``simulations.jsonl``."""
        turns = [vars(turn) for turn in self.turns]
        return {"scene": self.scene.id, "tag": self.scene.tag, "actor_rounds": self.actor_rounds, "turns": turns}


def audible(turn: DualTurn) -> DualTurn:
    """The turn, with an action that says so where nothing in it can be seen."""
    return turn if turn.visible else replace(turn, segments=(*turn.segments, _SILENCE))


def read_turn(row: Any, where: str) -> PlayedTurn:
    """Read what a run has kept of a turn.

    Raises:
        UserError: it is not what this version writes.
    """
    try:
        turn = PlayedTurn(**row)
    except TypeError as error:
        raise UserError(f"{where}: not a turn written by this version ({error})") from None
    kinds = {"speaker": str, "text": str, "truncated": bool, "tokens": int, "next": str | None}
    kinds |= {"broke_off": str | None}
    check_fields(row, kinds, where)
    return turn


def speakers(scene: Scene, config: SimulationConfig) -> tuple[str, ...]:
    """Who has turns, the first to speak first.

    Raises:
        UserError: there is one alone, who would answer itself.
    """
    found = tuple(dict.fromkeys((*scene.speakers, ENVIRONMENT))) if config.environment else scene.characters
    if len(found) < 2:
        raise UserError(f"scene {scene.id!r} has one speaker alone; set simulation.environment true, or leave it out")
    return found


# ------------------------------------------------------------------------------------------------------------- acting


def simulate(
    simulations: Sequence[Simulation],
    actor: Generator,
    director: Generator | None,
    config: SimulationConfig,
    seed: int = 0,
    keep: Callable[[Simulation], None] = lambda simulation: None,
) -> list[GenerationFailed]:
    """Play conversations to their end, a round of all of them at once.

    Args:
        simulations: What to play, from where it stands; turns are added to them.
        actor: Speaks for the characters.
        director: Speaks for the environment and names the next speaker; None where the configuration needs none.
        config: How.
        seed: Of the coin that falls where the director names nobody who can be next.
        keep: Called with a conversation after each of its rounds.

    Returns:
        What failed, where a server left prompts without a reply: those conversations stand still, the others are
        played on. Nothing where all are over.
    """
    failures: list[GenerationFailed] = []
    active = [s for s in simulations if not s.finished(config)]
    while active and not any(failure.lost for failure in failures):
        active = _round(active, actor, director, config, seed, failures)
        for simulation in active:
            keep(simulation)
        active = [s for s in active if not s.finished(config)]
    return failures


def _round(
    active: Sequence[Simulation],
    actor: Generator,
    director: Generator | None,
    config: SimulationConfig,
    seed: int,
    failures: list[GenerationFailed],
) -> list[Simulation]:
    """One turn of each; the conversations that got one."""
    played: dict[str, PlayedTurn] = {}
    for generator, for_environment in ((actor, False), (director, True)):
        group = [s for s in active if (s.next_speaker(config) == ENVIRONMENT) == for_environment]
        prompts = [turn_prompt(s, s.next_speaker(config), config) for s in group]
        replies = _one_each(generator, prompts, group, failures)
        for simulation, prompt, reply in zip(group, prompts, replies, strict=True):
            if isinstance(reply, PromptTooLong):
                turn = PlayedTurn(simulation.next_speaker(config), "", next=END, broke_off=str(reply))
                played[simulation.scene.id] = turn
            elif reply is not None:
                turn = PlayedTurn(simulation.next_speaker(config), reply.text, reply.truncated, reply.tokens)
                played[simulation.scene.id] = replace(turn, prompt_hash=prompt_hash(prompt))
    after = [Simulation(s.scene, [*s.turns, played[s.scene.id]]) for s in active if s.scene.id in played]
    named = _named(after, director, config, seed, failures)
    for simulation in active:
        if simulation.scene.id in named:
            simulation.turns.append(named[simulation.scene.id])
    return [s for s in active if s.scene.id in named]


def _named(
    after: Sequence[Simulation],
    director: Generator | None,
    config: SimulationConfig,
    seed: int,
    failures: list[GenerationFailed],
) -> dict[str, PlayedTurn]:
    """The last turn of each conversation, with who is next, by scene."""
    last = {s.scene.id: s.turns[-1] for s in after}
    open_ones = [s for s in after if not s.finished(config)]
    if config.next_speaker == "round_robin":
        for simulation in open_ones:
            order, turn = speakers(simulation.scene, config), simulation.turns[-1]
            following = order[(order.index(turn.speaker) + 1) % len(order)]
            last[simulation.scene.id] = replace(turn, next=following, next_by="order")
        return last
    prompts = [next_speaker_prompt(s, config) for s in open_ones]
    for simulation, reply in zip(open_ones, _one_each(director, prompts, open_ones, failures), strict=True):
        turn = simulation.turns[-1]
        if reply is None:
            del last[simulation.scene.id]
        elif isinstance(reply, PromptTooLong):
            last[simulation.scene.id] = replace(turn, next=END, broke_off=str(reply))
        else:
            following, by = choose_next(simulation, reply.text, config, seed)
            last[simulation.scene.id] = replace(turn, next=following, next_by=by, director=reply.text)
    return last


def ask(
    generator: Generator,
    prompts: Sequence[list[Message]],
    names: Sequence[str],
    failures: list[GenerationFailed],
    samples: int = 1,
) -> list[list[Reply] | PromptTooLong]:
    """Replies to each prompt, none where a server left one of them out: what failed is added to ``failures``, by name.

    A prompt that is too long is no such failure, since it would be too long again: what is wrong with it stands in the
    place of its replies.

    Args:
        generator: Whom to ask.
        prompts: What.
        names: What a message calls each prompt.
        failures: Receives what went wrong.
        samples: Replies to each prompt.
    """
    answers: dict[int, list[Reply] | PromptTooLong] = {**too_long(generator, prompts)}
    fitting = [i for i in range(len(prompts)) if i not in answers]
    try:
        found = generator.generate([prompts[i] for i in fitting], samples=samples) if fitting else []
        answers |= dict(zip(fitting, found, strict=True))
    except GenerationFailed as error:
        groups = [[] if None in group else list(group) for group in error.replies or [[]] * len(fitting)]
        answers |= dict(zip(fitting, groups, strict=True))
        reasons = {fitting[i]: reason for i, reason in error.reasons.items()}
        answers |= {i: PromptTooLong(reason) for i, reason in reasons.items() if says_too_long(reason)}
        if passing := {names[i]: reason for i, reason in reasons.items() if not says_too_long(reason)}:
            failures.append(GenerationFailed(error.source, [], passing, error.lost))
    return [answers[i] for i in range(len(prompts))]


def _one_each(
    generator: Generator | None,
    prompts: Sequence[list[Message]],
    simulations: Sequence[Simulation],
    failures: list[GenerationFailed],
) -> list[Reply | PromptTooLong | None]:
    names = [f"conversation {s.scene.id!r}" for s in simulations]
    found = ask(generator, prompts, names, failures)
    return [group if isinstance(group, PromptTooLong) else next(iter(group), None) for group in found]


def choose_next(simulation: Simulation, reply: str, config: SimulationConfig, seed: int) -> tuple[str, NextBy]:
    """Who is next, by the director's reply, and who chose.

    A name counts if it is of another speaker than the last. The end counts after `EARLIEST_END` rounds. Anything else,
    also the word "random", is left to a seeded coin among the main characters and the environment, as upstream does.
    """
    last, known = simulation.turns[-1].speaker, speakers(simulation.scene, config)
    said = named_speaker(reply, known)
    if said == END and len(simulation.turns) >= EARLIEST_END:
        return END, "director"
    if said in known and said != last:
        return said, "director"
    first_choice = [name for name in known if name in (*simulation.scene.major, ENVIRONMENT) and name != last]
    candidates = first_choice or [name for name in known if name != last]
    coin = random.Random(f"next speaker {seed} {simulation.scene.id} {len(simulation.turns)}")
    return coin.choice(candidates), "coin"


def named_speaker(reply: str, known: Iterable[str]) -> str | None:
    """Which of the known names, or `END`, a reply gives; None where it gives none, or several in a sentence."""
    text = strip_thinking(reply).strip()
    by_name = {name.casefold(): name for name in (*known, END)}
    first = text.splitlines()[0].partition(":")[0] if text else ""
    if found := by_name.get(first.strip(" \t*\"'`.").casefold()):
        return found
    longest_first = sorted(by_name, key=len, reverse=True)  # "Ann Lee" is no mention of "Ann"
    mentioned = re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", text.casefold())
    return by_name[mentioned[0]] if len(set(mentioned)) == 1 else None


# ------------------------------------------------------------------------------------------------------------ prompts


def turn_prompt(simulation: Simulation, speaker: str, config: SimulationConfig) -> list[Message]:
    """What a speaker reads before its turn: its own part and secrets, and of the others what can be seen."""
    scene = simulation.scene
    if speaker == ENVIRONMENT:
        system = template("coser/environment.jinja").render(scene=scene)
    else:
        others = {name: text for name, text in scene.profiles.items() if name != speaker}
        known = {"scene": scene, "name": speaker, "others": others, "notation": config.notation}
        system = template("coser/actor.jinja").render(known)
    # Chat templates want a user's message first.
    messages = history_view([_OPENING, *simulation.dialogue], speaker, system)
    if config.notation == "tags":
        return messages
    return [{**m, "content": in_brackets(m["content"])} if m["role"] != "system" else m for m in messages]


def next_speaker_prompt(simulation: Simulation, config: SimulationConfig) -> list[Message]:
    """What the director reads before it names who is next."""
    content = template("coser/next_speaker.jinja").render(
        scene=simulation.scene,
        names=speakers(simulation.scene, config),
        dialogue=[reader_view(turn) for turn in simulation.dialogue],
        end=END,
        may_end=len(simulation.turns) >= EARLIEST_END,
    )
    return [{"role": "user", "content": content}]


_MARKS: Mapping[tuple[str, str], str] = {
    ("role_thinking", "open"): "[",
    ("role_thinking", "close"): "]",
    ("role_action", "open"): "(",
    ("role_action", "close"): ")",
    ("role_speech", "open"): "",
    ("role_speech", "close"): "",
}


def in_brackets(text: str) -> str:
    """Turns in our tags, as `nlhf.roleplay.turns.render` writes them, in CoSER's notation."""
    return "".join(_MARKS.get((piece.layer, piece.kind), piece.text) for piece in pieces(text, "tags"))
