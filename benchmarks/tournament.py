"""What it costs to reward groups of 8 responses by pairwise verdicts: tournament against reference, in one run.

The judge is the sandbox's (or ``--judge`` a folder with a trained one), the responses are drawn by seed from the
sandbox world, so that it is known which are better on the aspect that decides. All ways judge the same groups in both
orders:

- ``reference``: each response against one more response to the same task.
- ``tournament``: double elimination, the matches of a round of all groups in one batch.
- ``tournament, match by match``: the same matches, one call of the judge each.
- ``round robin``: all pairs, the mean margin; what verdicts can tell at most.

``right order`` is the share of a group's pairs of responses, one better than the other on the decisive aspect, that the
rewards put in this order, ties counting half; chance is 50 %.

    python benchmarks/tournament.py --out experiments/policy/tournament.json

Times are processor seconds: set OMP_NUM_THREADS=1 to compare work, not threads.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from nlhf.comparer import Comparer, Comparison, JudgeConfig
from nlhf.files import write_json
from nlhf.generation import SamplingConfig
from nlhf.judging import PairJudge
from nlhf.models import ModelConfig
from nlhf.pairs import Turn
from nlhf.policy_reward import tournament_scores
from nlhf.sandbox.world import draw_case, response_text

Group = tuple[str, list[str], list[int]]
"""A task, responses to it, the last of them the reference, and how good each is on the decisive aspect: 1, 0 or -1."""


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--judge", default="package:nlhf", help="the sandbox's judge, or a folder with a trained one")
    parser.add_argument("--groups", type=int, default=32, help="tasks, each with n responses")
    parser.add_argument("--n", type=int, default=8, help="responses to each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file for the figures")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(table(result))
    if arguments.out:
        write_json(arguments.out, result)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way's calls, seconds and how often its rewards are in the right order."""
    import torch

    sampling = SamplingConfig(max_new_tokens=26, batch_size=128)
    judge = JudgeConfig(ModelConfig(arguments.judge), format="sandbox", sampling=sampling).load()
    rng = random.Random(f"tournament/{arguments.seed}")
    groups = [draw_group(rng, arguments.n + 1) for _ in range(arguments.groups)]
    ways = {"reference": reference, "tournament": tournament, "round robin": round_robin}
    ways["tournament, match by match"] = match_by_match
    tournament(Counted(judge), groups[:1], arguments.seed)  # loads what is loaded at first use
    return {
        "judge": arguments.judge,
        "groups": arguments.groups,
        "n": arguments.n,
        "seed": arguments.seed,
        "threads": torch.get_num_threads(),
        "ways": {name: timed(way, judge, groups, arguments.seed) for name, way in ways.items()},
    }


class Counted(Comparer):
    """A comparer that counts how often the judge was called, and with how many prompts."""

    def __init__(self, judge: PairJudge):
        super().__init__(judge)
        self.batches: list[int] = []

    def _ask(self, pairs: Sequence[Any]) -> None:
        self.batches.append(len(pairs) * len(self.judge.orders))
        super()._ask(pairs)


def timed(way: Callable[..., list[list[float]]], judge: PairJudge, groups: list[Group], seed: int) -> dict[str, float]:
    """Calls and seconds a group."""
    comparer = Counted(judge)
    cpu, wall = time.process_time(), time.perf_counter()
    rewards = way(comparer, groups, seed)
    return {
        "prompts": sum(comparer.batches) / len(groups),
        "batches": len(comparer.batches),
        "cpu": (time.process_time() - cpu) / len(groups),
        "wall": (time.perf_counter() - wall) / len(groups),
        "right_order": right_order(rewards, [qualities for _, _, qualities in groups]),
    }


def draw_group(rng: random.Random, n: int) -> Group:
    """A task and n different responses to it."""
    first = draw_case(rng)
    responses: dict[str, int] = {}
    while len(responses) < n:
        case = draw_case(rng)
        if case.decisive == first.decisive:
            responses.setdefault(response_text(rng, case, "A"), case.quality["A"][case.decisive])
    return " ".join(first.task), list(responses), list(responses.values())


def reference(comparer: Comparer, groups: list[Group], seed: int) -> list[list[float]]:
    """Each response against the last of its group."""
    return margins_of(
        comparer, groups, [[(i, len(texts) - 1) for i in range(len(texts) - 1)] for _, texts, _ in groups]
    )


def tournament(comparer: Comparer, groups: list[Group], seed: int) -> list[list[float]]:
    """Tournaments of all groups together."""
    entrants = [((Turn("user", task),), texts[:-1]) for task, texts, _ in groups]
    return [scores for scores, _ in tournament_scores(comparer, entrants, seed)]


def match_by_match(comparer: Comparer, groups: list[Group], seed: int) -> list[list[float]]:
    """The same tournaments, one after the other, each match a call."""

    class OneByOne(Comparer):
        def margins(self, comparisons: Sequence[Comparison]) -> list[float | None]:
            return [comparer.margins([comparison])[0] for comparison in comparisons]

    return [tournament(OneByOne(comparer.judge), [group], seed)[0] for group in groups]


def round_robin(comparer: Comparer, groups: list[Group], seed: int) -> list[list[float]]:
    """The mean margin over all others of the group."""
    sizes = [len(texts) - 1 for _, texts, _ in groups]
    found = margins_of(comparer, groups, [list(itertools.permutations(range(n), 2)) for n in sizes])
    return [
        [fmean(margins[i : i + n - 1]) for i in range(0, len(margins), n - 1)]
        for margins, n in zip(found, sizes, strict=True)
    ]


def margins_of(comparer: Comparer, groups: list[Group], matches: list[list[tuple[int, int]]]) -> list[list[float]]:
    """Margins of the first of each match, by group; 0 where the judge has no verdict."""
    asked = [
        Comparison((Turn("user", task),), texts[i], texts[j])
        for (task, texts, _), found in zip(groups, matches, strict=True)
        for i, j in found
    ]
    margins = iter(comparer.margins(asked))
    return [[next(margins) or 0.0 for _ in found] for found in matches]


def right_order(rewards: Sequence[Sequence[float]], qualities: Sequence[Sequence[int]]) -> float:
    """Share of pairs of a better and a worse response that are rewarded in this order; a tie counts half."""
    found = [
        0.5 if a == b else float(a > b)
        for group, truth in zip(rewards, qualities, strict=True)
        for (a, good), (b, bad) in itertools.permutations(zip(group, truth), 2)  # noqa: B905 - the reference is last
        if good > bad
    ]
    return fmean(found)


def table(result: dict[str, Any]) -> str:
    """The figures in markdown."""
    n, groups, threads = result["n"], result["groups"], result["threads"]
    lines = [
        f"{result['judge']}, {groups} groups of {n} responses, both orders, {threads} thread.",
        "",
        "| way | judge prompts a group | calls of the judge in all | CPU s a group | right order |",
        "|---|---|---|---|---|",
    ]
    for name, way in result["ways"].items():
        cells = [name, f"{way['prompts']:.1f}", f"{way['batches']}", f"{way['cpu']:.3f}", f"{way['right_order']:.1%}"]
        lines.append("| " + " | ".join(cells).replace("%", " %") + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
