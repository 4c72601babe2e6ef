"""What CoSER's judge finds wrong with an acted scene, and the score that follows.

Station of the path: simulation -> **judge -> score -> metrics**, for the evaluation of role-play
(`nlhf.roleplay.coser`); after CoSER (arXiv 2502.09082). The judge reads the scene as it was acted beside the original,
and lists flaws, one dimension at a time. A reply that cannot be read is asked for again; what still cannot be read is a
failure, which is left out of the score and counted. So is a scene that broke off, or is too long to be judged.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from nlhf.errors import UserError
from nlhf.evaluation.intervals import RESAMPLES, percentile_interval, resample
from nlhf.evaluation.metrics import Metric
from nlhf.files import check_fields
from nlhf.formats.base import Message
from nlhf.formats.json_replies import json_objects, repair
from nlhf.generation.backends import GenerationFailed
from nlhf.generation.limits import PromptTooLong
from nlhf.judge import Generator, Reply, prompt_hash
from nlhf.roleplay.coser_scenes import Tag
from nlhf.roleplay.prompts import template
from nlhf.roleplay.simulation import Simulation, ask, in_brackets
from nlhf.roleplay.turns import PLAN, PRIVATE, DualTurn, judge_view
from nlhf.verdict import strip_thinking

Dimension = Literal["Storyline Consistency", "Anthropomorphism", "Character Fidelity", "Storyline Quality"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
SEVERITIES = range(1, 6)
IMPUTED = 50.0
"""What HER's fork scores a reply as that it cannot read."""


@dataclass(frozen=True)
class Flaw:
    """One flaw of an acted scene.

    Attributes:
        severity: 1 to 5.
        type: Of which kind, in the judge's words.
        instance: Where, in the judge's words.
    """

    severity: int
    type: str = ""
    instance: str = ""


@dataclass(frozen=True)
class FlawList:
    """What the judge said of one scene in one dimension: one line of ``judgements.jsonl``.

    Attributes:
        scene: Id of the scene.
        tag: Its subset.
        dimension: One of `DIMENSIONS`.
        actor_rounds: Turns of characters in the acted scene.
        flaws: What was found; None for a failure.
        failure: Why the last reply could not be read, or why none was asked for; None where one could be read.
        replies: All that the judge wrote, up to the reply that could be read.
        truncated: How many of them the token limit cut off.
        tokens: Length of them together.
        prompt_hash: See `nlhf.judge.prompt_hash`; empty where nothing was asked.
    """

    scene: str
    tag: Tag
    dimension: str
    actor_rounds: int
    flaws: tuple[Flaw, ...] | None
    failure: str | None
    replies: tuple[str, ...]
    truncated: int
    tokens: int
    prompt_hash: str

    @property
    def score(self) -> float | None:
        """See `score`; None for a failure."""
        return None if self.flaws is None else score(self.flaws, self.actor_rounds)

    @property
    def key(self) -> tuple[str, str]:
        """What makes it one of its kind: scene and dimension."""
        return self.scene, self.dimension

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, with the score for whoever reads the file."""
        return asdict(self) | {"score": self.score}

    @classmethod
    def from_dict(cls, row: Any, where: str) -> "FlawList":
        """Read what `to_dict` wrote.

        Raises:
            UserError: it is not what this version writes.
        """
        try:
            values = {name: value for name, value in row.items() if name != "score"}
            flaws = values["flaws"]
            values["flaws"] = None if flaws is None else tuple(Flaw(**flaw) for flaw in flaws)
            found = cls(**values | {"replies": tuple(values["replies"])})
        except (AttributeError, TypeError, KeyError) as error:
            raise UserError(f"{where}: not a judgement written by this version ({error})") from None
        check_fields(row, {"scene": str, "tag": Tag, "dimension": Dimension, "actor_rounds": int}, where)
        for flaw in row["flaws"] or ():
            check_fields(flaw, {"severity": int}, where)
        return found


def score(flaws: Sequence[Flaw], actor_rounds: int) -> float:
    """The score of one scene in one dimension, from 0 to 100 (CoSER's public evaluation code).

    max(0, min(100 - 5 (sum of severities - 0.3 rounds), 100)): each turn of a character makes up for 1.5 points of
    flaws, since longer scenes have more of them; no scene has more than 100.

    Args:
        flaws: What was found.
        actor_rounds: Turns of characters in the acted scene; those of the environment do not count.
    """
    return float(max(0.0, min(100 - (sum(flaw.severity for flaw in flaws) - 0.3 * actor_rounds) * 5, 100.0)))


# ------------------------------------------------------------------------------------------------------------ judging


def judge_prompt(simulation: Simulation, dimension: str, show_thoughts: bool = False) -> list[Message]:
    """What the judge reads: the circumstance, the original, the scene as acted, and what to look for.

    Args:
        simulation: The acted scene.
        dimension: One of `DIMENSIONS`.
        show_thoughts: Show what characters think, as HER's fork does; upstream hides it. A plan is never shown.
    """
    content = template("coser/judge.jinja").render(
        scene=simulation.scene,
        reference=_transcript(simulation.scene.dialogue, show_thoughts),
        acted=_transcript(simulation.dialogue, show_thoughts),
        dimension=dimension,
        thoughts=show_thoughts,
    )
    return [{"role": "user", "content": content}]


def _transcript(turns: Sequence[DualTurn], show_thoughts: bool) -> str:
    shown = judge_view(turns, "", hidden=PLAN if show_thoughts else PRIVATE)  # nobody is "the assistant"
    return "\n\n".join(f"{turn.role.removesuffix('(user)')}: {in_brackets(turn.content)}" for turn in shown)


class UnreadableError(ValueError):
    """A judge's reply that is no list of flaws; says why."""


def read_flaws(reply: str, dimension: str) -> tuple[Flaw, ...]:
    """The flaws in a judge's reply: ``{dimension: {"flaws": [{"instance", "type", "severity"}]}}``.

    The JSON may stand in a fence and in prose; of several lists for the dimension the last counts. A list that is cut
    off is none: what is missing from it would count as no flaw.

    Raises:
        UnreadableError: there is no such list, or a severity is no whole number from 1 to 5.
    """
    found = [
        value
        for _, whole in json_objects(repair(strip_thinking(reply)))
        for name, value in whole.items()
        if name.strip().casefold() == dimension.casefold()
    ]
    if not found:
        raise UnreadableError(f"no JSON object with {dimension!r}")
    rows = found[-1].get("flaws") if isinstance(found[-1], Mapping) else None
    if not isinstance(rows, list):
        raise UnreadableError("no list of flaws")
    return tuple(_flaw(row) for row in rows)


def _flaw(row: Any) -> Flaw:
    if not isinstance(row, Mapping):
        raise UnreadableError(f"a flaw that is no object: {row!r:.80}")
    severity = row.get("severity")
    if isinstance(severity, str) and severity.strip().isdecimal() and len(severity) < 9:
        severity = int(severity)
    if isinstance(severity, bool) or not isinstance(severity, int | float) or severity not in SEVERITIES:
        raise UnreadableError(f"severity {severity!r:.40} is no whole number from 1 to 5")
    return Flaw(int(severity), str(row.get("type", "")), str(row.get("instance", "")))


def list_flaws(
    simulations: Sequence[Simulation],
    judge: Generator,
    retries: int = 0,
    show_thoughts: bool = False,
    again: Generator | None = None,
) -> tuple[list[FlawList], list[GenerationFailed]]:
    """Ask the judge about scenes in every dimension.

    Args:
        simulations: The acted scenes.
        judge: The judge.
        retries: Further replies to a prompt whose reply cannot be read; the first that can be counts.
        show_thoughts: See `judge_prompt`.
        again: Who writes them, where ``judge`` would repeat itself, see `retrying`.

    Returns:
        The judgements, and what failed: where a server left a prompt without a reply, there is no judgement.
    """
    failures: list[GenerationFailed] = []
    asked = [(s, dimension) for s in simulations if not s.broke_off for dimension in DIMENSIONS]
    names = [f"conversation {s.scene.id!r}, {dimension}" for s, dimension in asked]
    prompts = [judge_prompt(s, dimension, show_thoughts) for s, dimension in asked]
    replies = ask(judge, prompts, names, failures)
    long = {i: group for i, group in enumerate(replies) if isinstance(group, PromptTooLong)}
    unread = [i for i, group in enumerate(replies) if i not in long and group and _unreadable(group[0], asked[i][1])]
    if retries and not any(failure.lost for failure in failures):
        more = ask(again or judge, [prompts[i] for i in unread], [names[i] for i in unread], failures, retries)
        for i, group in zip(unread, more, strict=True):
            came = not isinstance(group, PromptTooLong) and group
            replies[i] = [*replies[i], *_up_to_readable(group, asked[i][1])] if came else []
    hashes = [prompt_hash(prompt) for prompt in prompts]
    found = [_judged(*asked[i], hashes[i], group) for i, group in enumerate(replies) if i not in long and group]
    found += [_unjudged(*asked[i], f"too long for the judge: {problem}", hashes[i]) for i, problem in long.items()]
    broken = [s for s in simulations if s.broke_off]
    found += [_unjudged(s, d, f"the conversation broke off: {s.broke_off}") for s in broken for d in DIMENSIONS]
    return found, failures


def retrying(judge: Generator) -> Generator:
    """The same model with other draws, for replies to be had again: at temperature 1 where it is greedy, as upstream.

    Args:
        judge: A generator of ours, which reads its ``config`` whenever it is asked.
    """
    other = copy.copy(judge)
    other.config = replace(judge.config, temperature=judge.config.temperature or 1.0, seed=judge.config.seed + 1)
    return other


def _unreadable(reply: Reply, dimension: str) -> str | None:
    """Why a reply cannot be read; None where it can."""
    try:
        read_flaws(reply.text, dimension)
    except UnreadableError as error:
        return f"{error} (cut off by the token limit)" if reply.truncated else str(error)
    return None


def _up_to_readable(replies: Sequence[Reply], dimension: str) -> Sequence[Reply]:
    first = next((i for i, reply in enumerate(replies) if not _unreadable(reply, dimension)), len(replies))
    return replies[: first + 1]


def _unjudged(simulation: Simulation, dimension: str, failure: str, hashed: str = "") -> FlawList:
    """A failure without a reply."""
    scene = simulation.scene
    return FlawList(scene.id, scene.tag, dimension, simulation.actor_rounds, None, failure, (), 0, 0, hashed)


def _judged(simulation: Simulation, dimension: str, hashed: str, replies: Sequence[Reply]) -> FlawList:
    failure = _unreadable(replies[-1], dimension)
    return FlawList(
        scene=simulation.scene.id,
        tag=simulation.scene.tag,
        dimension=dimension,
        actor_rounds=simulation.actor_rounds,
        flaws=None if failure else read_flaws(replies[-1].text, dimension),
        failure=failure,
        replies=tuple(reply.text for reply in replies),
        truncated=sum(reply.truncated for reply in replies),
        tokens=sum(reply.tokens for reply in replies),
        prompt_hash=hashed,
    )


# ------------------------------------------------------------------------------------------------------------ figures


def figures(
    judged: Sequence[FlawList], imputed: float | None = None, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Metric]:
    """Mean score of each dimension, and ``Average``, the mean of these means, as upstream reports them.

    Intervals resample conversations: the four judgements of one are not independent.

    Args:
        judged: No two of one scene and dimension.
        imputed: Score of a failure (`IMPUTED` in HER's fork); None leaves failures out.
        resamples: Bootstrap resamples; 0 leaves the intervals out.
        seed: Of the resampling.
    """
    by_key = {j.key: imputed if j.score is None else j.score for j in judged}
    scenes = list(dict.fromkeys(j.scene for j in judged))
    table = np.array([[by_key.get((scene, d)) for d in DIMENSIONS] for scene in scenes], dtype=float)
    table = table.reshape(-1, len(DIMENSIONS))
    sums, counts = np.nan_to_num(table), (~np.isnan(table)).astype(float)
    totals, n = sums.sum(axis=0), counts.sum(axis=0)
    means = _means(totals, n)
    drawn = resample(_means, sums, counts, resamples, seed)
    low, high = percentile_interval(drawn, len(scenes), len(means))
    dimensions = int((n > 0).sum())
    ks, ns = [*totals, np.nansum(means[:-1])], [*n, dimensions]
    return {
        name: Metric(*map(_number, (means[i], ks[i])), int(ns[i]), *map(_number, (low[i], high[i])))
        for i, name in enumerate((*DIMENSIONS, "Average"))
    }


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    return np.concatenate([means, means.mean(axis=-1, keepdims=True)], axis=-1)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
