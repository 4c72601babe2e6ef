"""What HER-RM's replies say principle by principle, and whether that entails their verdict.

Station of the path: Verdict -> **metrics** -> report, for what only this format can be asked. HER (arXiv 2601.21459):
negative principles first, whose violation loses outright; positive ones where they separate the two; then one verdict.
The verdict alone is read by `nlhf.formats.her_rm.HERRMFormat`.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nlhf.evaluation.figures import Definition
from nlhf.evaluation.metrics import Metric, compute
from nlhf.evaluation.records import Record
from nlhf.formats.her_rm import HERRMFormat
from nlhf.pairs import Label
from nlhf.roleplay.principles import DIMENSIONS, Library, library

PRINCIPLE_FIELDS = ("principle_name", "dimension_name", "principle_level", "main_content", "reason_for_choosing")
COMPARISON_FIELDS = (
    "principle_name",
    "principle_level",
    "cand_1_performance",
    "cand_2_performance",
    "comparison_reason",
    "winner",
)
ANALYSIS_FIELDS = ("overall_analysis", "principle_summary")

Entailment = Literal["entailed", "open", "contradicted"]

_FORMAT = HERRMFormat()


@dataclass(frozen=True)
class Comparison:
    """One principle held against both responses.

    Attributes:
        principle: Its name, as the judge writes it.
        level: ``sentence`` or ``session``, as the judge writes it.
        winner: In the order shown; None when it is none of ``cand_1``, ``cand_2`` and ``tie``.
        reason: Why.
    """

    principle: str
    level: str
    winner: Label | None
    reason: str


@dataclass(frozen=True)
class Case:
    """What a reply says.

    Attributes:
        verdict: In the order shown; None when it cannot be read.
        comparisons: One a principle; empty when there are none to be read.
        result: The judge's whole result.
    """

    verdict: Label | None
    comparisons: tuple[Comparison, ...]
    result: dict[str, Any]

    @property
    def winners(self) -> list[Label]:
        """Who wins by each principle, ties included, without what cannot be read."""
        return [c.winner for c in self.comparisons if c.winner is not None]


def read_case(reply: str) -> Case | None:
    """Read a reply of HER-RM; None when it holds no whole result (cut off, say, though a verdict may be there)."""
    result = _FORMAT.result(reply)
    if not result:
        return None
    rows = [row for row in _comparisons(result) if isinstance(row, dict)]
    comparisons = tuple(
        Comparison(
            principle=str(row.get("principle_name") or ""),
            level=str(row.get("principle_level") or ""),
            winner=_FORMAT.read_label(row.get("winner")),
            reason=str(row.get("comparison_reason") or ""),
        )
        for row in rows
    )
    return Case(_FORMAT.read_label(result.get("better_response")), comparisons, result)


def _comparisons(result: dict[str, Any]) -> list[Any]:
    analysis = result.get("analysis")
    rows = analysis.get("principle_comparisons") if isinstance(analysis, dict) else None
    return rows if isinstance(rows, list) else []


def mixed_selection(case: Case) -> bool | None:
    """The principles do not all point one way: each response wins by one at least.

    None with fewer than two winners to be read. A judge that never mixes has made up its mind before it compares.
    """
    return {"A", "B"} <= set(case.winners) if len(case.winners) > 1 else None


def entailment(case: Case, principles: Library | None = None) -> Entailment | None:
    """Whether the winners by principle entail the verdict.

    A negative principle of ours that one response alone wins decides by itself. Otherwise the response that wins by
    more principles is entailed, and a tie where neither does. A verdict against the majority is ``open`` while at
    least one principle speaks for it, since principles may weigh differently, and ``contradicted`` when none does. A
    tie is ``contradicted`` when one response alone wins.

    Args:
        case: A reply.
        principles: Which principles are negative; the built-in library by default. Names that it does not have count
            as positive.

    Returns:
        None without a verdict or without winners.
    """
    if case.verdict is None or not case.winners:
        return None
    principles = principles or library()
    violated = {
        c.winner
        for c in case.comparisons
        if (known := principles.find(c.principle)) and known.polarity == "negative" and c.winner in ("A", "B")
    }
    if len(violated) == 1:
        return "entailed" if case.verdict in violated else "contradicted"
    wins = Counter(case.winners)
    majority = "tie" if wins["A"] == wins["B"] else "A" if wins["A"] > wins["B"] else "B"
    if case.verdict == majority:
        return "entailed"
    supported = wins["A"] and wins["B"] if case.verdict == "tie" else wins[case.verdict]
    return "open" if supported else "contradicted"


def contract_problems(case: Case) -> list[str]:
    """What of HER-RM's contract is missing or malformed in a result; empty for a whole one."""
    result, problems = case.result, []
    principles = result.get("principle")
    rows = list(principles.values()) if isinstance(principles, dict) else []
    if not rows:
        problems.append("no principle")
    for i, row in enumerate(rows, 1):
        problems += [f"principle {i}: {p}" for p in _missing(row, PRINCIPLE_FIELDS)]
    comparisons = _comparisons(result)
    if not comparisons:
        problems.append("no comparison")
    problems += [
        f"comparison {i}: {p}" for i, row in enumerate(comparisons, 1) for p in _missing(row, COMPARISON_FIELDS)
    ]
    problems += _missing(result.get("analysis"), ANALYSIS_FIELDS)
    if problems:
        return problems
    for i, row in enumerate(rows, 1):
        if row["dimension_name"] not in DIMENSIONS:
            problems.append(f"principle {i}: no dimension {row['dimension_name']!r}")
        if row["principle_level"] not in ("sentence", "session"):
            problems.append(f"principle {i}: no level {row['principle_level']!r}")
    named, compared = ([row["principle_name"] for row in of] for of in (rows, comparisons))
    if sorted(named) != sorted(compared):
        problems.append("the principles compared are not those that are named")
    if len(case.winners) < len(comparisons):
        problems.append("a winner is none of cand_1, cand_2 and tie")
    if case.verdict is None:
        problems.append("no verdict")
    return problems


def _missing(row: Any, names: Sequence[str]) -> list[str]:
    if not isinstance(row, dict):
        return [f"expected an object with {', '.join(names)}"]
    return [f"no {name}" for name in names if not isinstance(row.get(name), str) or not row[name].strip()]


# ------------------------------------------------------------------------------------------------------------- figures


@functools.lru_cache(maxsize=1024)
def _case(reply: str) -> Case | None:
    return read_case(reply)


def _compared(record: Record) -> Case | None:
    case = _case(record.reply)
    return case if case and case.winners else None


def principle_definitions(principles: Library | None = None) -> dict[str, Definition]:
    """Figures of HER-RM's replies, each as those of `nlhf.evaluation.figures.definitions`.

    Args:
        principles: What the winners are held against; the built-in library by default.
    """
    principles = principles or library()

    def entailed(record: Record, kind: Entailment) -> float | None:
        case = _compared(record)
        found = entailment(case, principles) if case else None
        return None if found is None else float(found == kind)

    def known(record: Record) -> float | None:
        case = _compared(record)
        names = [c.principle for c in case.comparisons] if case else []
        return sum(principles.find(name) is not None for name in names) / len(names) if names else None

    return {
        "principles_read": Definition(
            "Principles read",
            "replies whose winners by principle can be read, among all judgements",
            lambda r, _: float(_compared(r) is not None),
            +1,
        ),
        "principles_compared": Definition(
            "Principles compared",
            "mean number of principles that a reply compares by, where they can be read",
            lambda r, _: float(len(case.comparisons)) if (case := _compared(r)) else None,
            rate=False,
        ),
        "principles_known": Definition(
            "Principles of the library",
            "share of a reply's principles that the library has by name, mean",
            lambda r, _: known(r),
        ),
        "mixed_selection_rate": Definition(
            "Mixed selection",
            "replies whose principles name both responses as winners, among those with two winners or more (ties "
            "included)",
            lambda r, _: _mixed(r),
        ),
        "entailed_rate": Definition(
            "Verdict entailed",
            "verdicts that the winners by principle entail, among those with a verdict and winners",
            lambda r, _: entailed(r, "entailed"),
            +1,
        ),
        "contradicted_rate": Definition(
            "Verdict contradicted",
            "verdicts that no principle speaks for, or against which a negative principle decides, among the same",
            lambda r, _: entailed(r, "contradicted"),
            -1,
        ),
    }


def _mixed(record: Record) -> float | None:
    case = _compared(record)
    mixed = mixed_selection(case) if case else None
    return None if mixed is None else float(mixed)


def principle_figures(
    records: Sequence[Record], principles: Library | None = None, **options: Any
) -> dict[str, Metric]:
    """Every figure of `principle_definitions`, with counts and intervals; options as of `metrics.compute`."""
    return compute(records, figures=principle_definitions(principles), **options)
