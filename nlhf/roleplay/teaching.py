"""A teacher's judgements as pairs to learn from: the verb ``nlhf roleplay teach``.

Station of the path: source -> **Pair** -> JudgeFormat.target. HER (arXiv 2601.21459) has a teacher label pairs with the
principles given (format ``her_rm_teacher``) and a judge learn to write principles and verdict without them (format
``her_rm``, by `nlhf cold-start`).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nlhf.errors import UserError
from nlhf.files import read_jsonl, write_jsonl
from nlhf.formats.her_rm import JUDGEMENTS, HERRMFormat
from nlhf.judge import ORDERS, Order
from nlhf.pairs import Label, Pair, other_label
from nlhf.roleplay.judgements import (
    ANALYSIS_FIELDS,
    COMPARISON_FIELDS,
    PRINCIPLE_FIELDS,
    Case,
    contract_problems,
    entailment,
    read_case,
)
from nlhf.roleplay.principles import Library, load_principles, run_principles
from nlhf.sources import DataConfig, load_pairs
from nlhf.terminal import shown


@dataclasses.dataclass(frozen=True)
class TeacherReply:
    """What a teacher wrote about a pair in one order."""

    pair_id: str
    order: Order
    text: str


def teach(data: DataConfig, judgements: str, out: str, principles: str | None = None, overwrite: bool = False) -> None:
    """Make pairs for a cold start of format her_rm from a teacher's judgements on them.

    A reply is kept when it is whole, its principles do not contradict its verdict, and the verdict is the data's label.
    A pair without a label takes the teacher's, unless the teacher names two winners for it.

    Args:
        data: The pairs that the teacher judged.
        judgements: Folder of an evaluation by nlhf evaluate, or its judgements.jsonl, or an output of nlhf judge; by a
            judge of format her_rm_teacher.
        out: File of pairs to write.
        principles: YAML file of the principles that the teacher was given; by default those in the evaluation's folder,
            else the built-in ones.
        overwrite: Replace the file if it exists.

    Raises:
        UserError: a file is missing or malformed, a judgement is on no pair of the data, or nothing can be kept.
    """
    if Path(out).suffix != ".jsonl":
        raise UserError(f"{out}: the file is JSON lines; name it .jsonl, so that it is read as such")
    if Path(out).exists() and not overwrite:
        raise UserError(f"{out} exists; choose another name or replace it with --overwrite true")
    if Path(out).resolve() in (_file(judgements).resolve(), data.path and Path(data.path).resolve()):
        raise UserError(f"--out {out} is read here; choose another file")
    given = load_principles(principles) if principles else run_principles(judgements)
    pairs = load_pairs(data)
    replies = list(read_replies(judgements))
    foreign = sorted({r.pair_id for r in replies} - {p.id for p in pairs})
    if foreign:
        raise UserError(
            f"{judgements}: {len(foreign)} pairs are not in the data, for example {foreign[0]!r}; name the data that "
            "the teacher judged"
        )
    drops: Counter[str] = Counter()
    taught = taught_pairs(pairs, replies, drops, given)
    reasons = "".join(f"\nleft out: {reason}: {count}" for reason, count in sorted(drops.items()))
    if not taught:
        raise UserError(f"{judgements}: none of {len(replies)} replies can be learned from{reasons}")
    write_jsonl(out, (pair.to_dict() for pair in taught))
    kept = sum(len(pair.meta[JUDGEMENTS]) for pair in taught)
    text = f"{len(taught)} of {len(pairs)} pairs with {kept} of {len(replies)} replies written to {out}{reasons}"
    Console(highlight=False).print(shown(text), soft_wrap=True)


def read_replies(path: str | Path) -> Iterator[TeacherReply]:
    """The replies in an evaluation's judgements, or in an output of `nlhf judge`.

    Raises:
        UserError: the file cannot be read, or a row is neither.
    """
    path = _file(path)
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: a row must be an object with named fields, got {type(row).__name__}")
        nested = row.get("judgements")
        for judgement in nested if isinstance(nested, list) else [row]:
            yield _reply(judgement, row.get("pair_id", row.get("id")), where)


def _file(judgements: str | Path) -> Path:
    return Path(judgements) / "judgements.jsonl" if Path(judgements).is_dir() else Path(judgements)


def _reply(row: Any, pair_id: Any, where: str) -> TeacherReply:
    if not isinstance(row, Mapping) or row.get("order") not in ORDERS or not isinstance(row.get("reply"), str):
        raise UserError(f"{where}: not a judgement of nlhf evaluate or nlhf judge: it needs fields order and reply")
    if not isinstance(pair_id, str):
        raise UserError(f"{where}: the judgement does not name its pair (field pair_id or id)")
    return TeacherReply(pair_id, row["order"], row["reply"])


def taught_pairs(
    pairs: Sequence[Pair], replies: Sequence[TeacherReply], drops: Counter[str], principles: Library | None = None
) -> list[Pair]:
    """The pairs that a teacher's replies teach, each with its results in ``meta`` under `JUDGEMENTS`.

    Args:
        pairs: What the teacher judged.
        replies: In both orders or in one; of several in one order the first that can be used counts.
        drops: Receives how many replies were left out, by reason.
        principles: What the teacher was given; the built-in library by default.

    Returns:
        Pairs with the verdict as their label, in the order of ``pairs``.
    """
    by_pair: dict[str, list[TeacherReply]] = {}
    for reply in replies:
        by_pair.setdefault(reply.pair_id, []).append(reply)
    taught = []
    for pair in pairs:
        found = _usable(pair, by_pair.get(pair.id, []), drops, principles)
        labels = {label for label, _ in found.values()}
        if len(labels) > 1:
            drops["the orders of a pair without a label have different verdicts"] += len(found)
        elif found:
            results = [result for _, result in found.values()]
            taught.append(dataclasses.replace(pair, label=labels.pop(), meta=pair.meta | {JUDGEMENTS: results}))
    return taught


def _usable(
    pair: Pair, replies: Sequence[TeacherReply], drops: Counter[str], principles: Library | None
) -> dict[Order, tuple[Label, dict[str, Any]]]:
    """Label in the data's order and whole result, by order."""
    found: dict[Order, tuple[Label, dict[str, Any]]] = {}
    for reply in replies:
        case = read_case(reply.text)
        label = None if case is None else case.verdict if reply.order == "AB" else other_label(case.verdict)
        if case is None or contract_problems(case):
            drops["the reply is not a whole result"] += 1
        elif entailment(case, principles) == "contradicted":
            drops["the principles contradict the verdict"] += 1
        elif pair.label not in (None, label):
            drops["the verdict is not the pair's label"] += 1
        elif reply.order in found:
            drops["another reply in the same order"] += 1
        else:
            found[reply.order] = label, _contract(case, pair if reply.order == "AB" else pair.swap())
    return found


def _contract(case: Case, shown: Pair) -> dict[str, Any]:
    """The result in exactly HER-RM's fields, in their order, with the candidates' texts as the judge is shown them."""
    texts = HERRMFormat().variables(shown)
    result, analysis = case.result, case.result["analysis"]
    principles = [_only(row, PRINCIPLE_FIELDS) for row in result["principle"].values()]
    comparisons = [_only(row, COMPARISON_FIELDS) for row in analysis["principle_comparisons"]]
    for row, comparison in zip(comparisons, case.comparisons, strict=True):
        row["winner"] = HERRMFormat.written[comparison.winner]
    return {
        "cand_1": texts["response_a"],
        "cand_2": texts["response_b"],
        "principle": {f"Principle {i}": row for i, row in enumerate(principles, start=1)},
        "analysis": {"principle_comparisons": comparisons, **_only(analysis, ANALYSIS_FIELDS)},
        "better_response": HERRMFormat.written[case.verdict],
    }


def _only(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}
