"""The figures of acted and judged scenes: ``summary.json`` and ``summary.md`` of `nlhf roleplay coser`.

Station of the path: simulation -> judge -> **metrics -> report**, for the evaluation of role-play
(`nlhf.roleplay.coser`).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nlhf.evaluation.intervals import RESAMPLES
from nlhf.ledger import format_metric
from nlhf.roleplay.coser_scenes import SUBSETS
from nlhf.roleplay.flaws import DIMENSIONS, IMPUTED, FlawList, figures
from nlhf.roleplay.simulation import Simulation, SimulationConfig
from nlhf.runs import plain


def summarise(
    played: Sequence[Simulation],
    judged: Sequence[FlawList],
    config: SimulationConfig,
    show_thoughts: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """What ``summary.json`` holds: the protocol, how the scenes went, and the scores, over all and by subset.

    Args:
        played: The acted scenes.
        judged: All judgements on them.
        config: How they were acted.
        show_thoughts: Whether the judge read what characters think.
        resamples: Bootstrap resamples; 0 leaves the intervals out.
        seed: Of the resampling.
    """
    turns = [turn for simulation in played for turn in simulation.turns]
    chosen = Counter(turn.next_by for turn in turns)
    groups = {"all": judged}
    if len({j.tag for j in judged}) > 1:
        groups |= {tag: [j for j in judged if j.tag == tag] for tag in SUBSETS}
    return {
        "protocol": {**plain(config), "judge_reads_thoughts": show_thoughts},
        "simulation": {
            "conversations": len(played),
            "broke_off": sum(s.broke_off is not None for s in played),
            "turns": len(turns),
            "actor_turns": sum(s.actor_rounds for s in played),
            "silent_turns": sum(turn.silent for turn in turns),
            "truncated_turns": sum(turn.truncated for turn in turns),
            "speakers_by_director": chosen["director"],
            "speakers_by_coin": chosen["coin"],
        },
        "judge": {
            "judgements": len(judged),
            "failures": sum(j.flaws is None for j in judged),
            "asked_again": sum(len(j.replies) > 1 for j in judged),
            "truncated_replies": sum(j.truncated for j in judged),
        },
        "scores": {
            name: {
                "failures": {d: sum(j.flaws is None for j in group if j.dimension == d) for d in DIMENSIONS},
                "excluded": figures(group, None, resamples, seed),
                "compat_50": figures(group, IMPUTED, resamples, seed),
            }
            for name, group in groups.items()
        },
    }


_TITLES = {"all": "all", **SUBSETS}


def markdown(summary: dict[str, Any]) -> str:
    """The scores as a table; scores are points from 0 to 100."""
    played, judge = summary["simulation"], summary["judge"]
    thoughts = "reads" if summary["protocol"]["judge_reads_thoughts"] else "does not read"
    lines = [
        f"{played['conversations']} conversations, {played['broke_off']} of them broken off; {played['turns']} turns, "
        f"{played['actor_turns']} of them of characters, {played['silent_turns']} silent, {played['truncated_turns']} "
        f"cut off. The judge {thoughts} what characters think; {judge['failures']} of {judge['judgements']} judgements "
        "are failures.",
        "",
        "| Scenes | Dimension | Score | Failures | Compat: as HER's fork, failures as 50 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, scores in summary["scores"].items():
        for dimension, metric in scores["excluded"].items():
            failures = scores["failures"].get(dimension, sum(scores["failures"].values()))
            cells = [_TITLES[name], dimension, format_metric(metric, rate=False), str(failures)]
            cells.append(format_metric(scores["compat_50"][dimension], rate=False))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
