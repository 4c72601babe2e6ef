"""Judge pairs and score the critiques: what `nlhf.evaluate` does between its files, and training at each validation.

Station of the path: Pair -> ... -> Verdict -> **Record**.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer
from nlhf.evaluation.figures import WRONG_CRITIQUE_THRESHOLD
from nlhf.evaluation.intervals import RESAMPLES
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import Evaluation
from nlhf.generation.backends import GenerationFailed, judge_answered
from nlhf.judge import ORDERS, Judge, Judgement, Mode, Order, VoteRule, as_shown
from nlhf.pairs import Pair


def evaluate_judge(
    judge: Judge,
    pairs: Sequence[Pair],
    orders: Sequence[Order] = ORDERS,
    samples: int = 1,
    scorer: CritiqueScorer | None = None,
    wrong_critique_threshold: float = WRONG_CRITIQUE_THRESHOLD,
    resamples: int = RESAMPLES,
    seed: int = 0,
    mode: Mode = "generate",
    rule: VoteRule = "majority",
) -> Evaluation:
    """Judge pairs, score the critiques, and derive every figure.

    Args:
        judge: The judge.
        pairs: What to judge.
        orders: Orders in which each pair is shown.
        samples: Replies to each prompt.
        scorer: Compares critiques with the humans'; None leaves the critique figures out.
        wrong_critique_threshold: A critique with a lower F1 is a wrong one.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        seed: Of the bootstrap.
        mode: How a verdict comes about, see `nlhf.judge.Judge.judge`.
        rule: How several verdicts become one, see `nlhf.judge.vote`.
    """
    records = judge_and_score(judge, pairs, orders, samples, scorer, mode)
    return Evaluation.of(records, wrong_critique_threshold, resamples, seed, rule)


def judge_and_score(
    judge: Judge,
    pairs: Sequence[Pair],
    orders: Sequence[Order] = ORDERS,
    samples: int = 1,
    scorer: CritiqueScorer | None = None,
    mode: Mode = "generate",
    done: Iterable[Record] = (),
    keep: Callable[[list[Record], float], None] | None = None,
    chunk_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> list[Record]:
    """One record for each judgement, by pair, then order, then sample.

    Args:
        judge: The judge.
        pairs: What to judge.
        orders: Orders in which each pair is shown.
        samples: Replies to each prompt.
        scorer: Compares critiques with the humans'; None for none.
        mode: How a verdict comes about.
        done: Judgements from an interrupted run, which are not made again (failed scores are).
        keep: Called with the new records of each chunk and the seconds that judging took, as soon as it is done.
        chunk_size: Prompts that are judged before their records are kept.
        progress: Called with the number of further prompts done.
    """
    records = {r.key: r for r in done}
    by_id = {pair.id: pair for pair in pairs}
    if judge.format.pointwise:  # the verdicts of both orders rest on the same two ratings
        torn = {p.id for p in pairs for o in orders for k in range(samples) if (p.id, o, k) not in records}
        records = {key: record for key, record in records.items() if record.pair_id not in torn}
    failures: list[GenerationFailed] = []
    for chunk, chunk_orders in _owed(pairs, orders, samples, set(records), chunk_size):
        start = time.perf_counter()
        judgements, failed = judge_answered(judge, chunk, chunk_orders, samples, progress, mode)
        seconds = time.perf_counter() - start
        matches = _score(scorer, judgements, by_id)
        found = [Record.of(j, by_id[j.pair_id], match) for j, match in zip(judgements, matches, strict=True)]
        new = [r for r in found if r.key not in records]
        records |= {r.key: r for r in new}
        if keep:
            keep(new, seconds)
        failures += [failed] if failed else []
        if failed and (failed.lost or not judgements):
            break
    if failures:
        raise GenerationFailed.of(failures)
    complete = [records[p.id, order, k] for p in pairs for order in orders for k in range(samples)]
    return _score_again(scorer, complete, by_id)


def _owed(
    pairs: Sequence[Pair], orders: Sequence[Order], samples: int, done: set, chunk_size: int
) -> Iterator[tuple[list[Pair], tuple[Order, ...]]]:
    """What is still to be judged, in chunks of pairs that miss the same orders."""

    def missing(pair: Pair) -> tuple[Order, ...]:
        return tuple(o for o in orders if any((pair.id, o, k) not in done for k in range(samples)))

    for owed, group in itertools.groupby(pairs, key=missing):
        if owed:
            size = max(1, chunk_size // len(owed))
            group = list(group)
            for start in range(0, len(group), size):
                yield group[start : start + size], owed


def _score(
    scorer: CritiqueScorer | None, judgements: Sequence[Judgement | Record], by_id: dict[str, Pair]
) -> list[CritiqueMatch | None]:
    if scorer is None:
        return [None] * len(judgements)
    critiques = [j.critique if isinstance(j, Record) else j.verdict.critique for j in judgements]
    return scorer.score(critiques, [as_shown(by_id[j.pair_id], j.order) for j in judgements])


def _score_again(scorer: CritiqueScorer | None, records: list[Record], by_id: dict[str, Pair]) -> list[Record]:
    """Give every failed score one more chance: a busy server is no property of the judge."""
    failed = [i for i, r in enumerate(records) if r.match is not None and r.match.failure]
    if scorer is None or not failed:
        return records
    for i, match in zip(failed, _score(scorer, [records[i] for i in failed], by_id), strict=True):
        records[i] = replace(records[i], match=match)
    return records
