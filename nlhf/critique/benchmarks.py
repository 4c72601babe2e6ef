"""Human labels that a critique scorer can be held against, each turned into comparisons of argument lists.

MetaCritique (Sun et al., 2024): people marked each unit of a reference critique as covered by a critique or not.
ArgKP-2021 (Bar-Haim et al., 2020): people marked whether an argument makes a key point of its topic and stance.
ComVE and DeFacto are sources of pairs; here their human texts are compared with one another.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair
from nlhf.sources import comve, defacto
from nlhf.sources.rows import next_existing, read_rows, require

Metric = Literal["auc", "spearman"]


@dataclass(frozen=True)
class Comparison:
    """One question to a scorer: how far do these arguments make those points?

    Attributes:
        generated: Arguments of the text in question.
        reference: Points that it may make.
        label: What people say: 1 or 0, or a score.
        cluster: What resampling keeps together.
        stratum: AUC counts only couples of one stratum.
    """

    generated: tuple[str, ...]
    reference: tuple[str, ...]
    label: float
    cluster: str
    stratum: str = ""


@dataclass(frozen=True)
class Benchmark:
    """A set of comparisons and the figure that sums them up.

    Attributes:
        name: Short and unique.
        title: Column head.
        metric: ``auc``: does a positive score above a negative of its stratum; ``spearman``: rank correlation.
        comparisons: The questions.
        control: What the figure should be if the scorer compares (0.5) and does not judge one text alone.
    """

    name: str
    title: str
    metric: Metric
    comparisons: list[Comparison]
    control: bool = False


@dataclass(frozen=True)
class CritiqueUnits:
    """One critique of MetaCritique with people's marks.

    Attributes:
        item: The question that was answered.
        author: human_critique, llm1_critique or llm2_critique.
        units: What the critique says, one point each.
        reference: Points of the reference critique.
        covered: For each of them, whether the critique makes it.
        f1: Harmonic mean of people's precision (units that are right) and recall (points covered).
    """

    item: str
    author: str
    units: tuple[str, ...]
    reference: tuple[str, ...]
    covered: tuple[bool, ...]
    f1: float


_AUTHORS = ("human_critique", "llm1_critique", "llm2_critique")


def load_metacritique(folder: str | Path) -> list[CritiqueUnits]:
    """Read the human annotation of MetaCritique, three critiques an item.

    Args:
        folder: Holds ``annotation_data.json`` (itself or in its folder ``data``).

    Raises:
        UserError: the file is missing or malformed.
    """
    folder = _folder(folder, "MetaCritique", "https://github.com/GAIR-NLP/MetaCritique")
    file = next_existing(folder, ("annotation_data.json", "data/annotation_data.json"), "the annotation")
    return [critique for where, row in read_rows(file) for critique in _annotated(row, where)]


def _annotated(row: dict[str, Any], where: str) -> Iterator[CritiqueUnits]:
    require(row, ("index", "gpt4_critique", *_AUTHORS), where)
    require(row["gpt4_critique"], ("aius",), f"{where}: field 'gpt4_critique'")
    reference = tuple(row["gpt4_critique"]["aius"])
    for author in _AUTHORS:
        critique = row[author]
        require(critique, ("aius", "recall_labels", "f1_score"), f"{where}: field {author!r}")
        if len(critique["recall_labels"]) != len(reference):
            raise UserError(
                f"{where}: field {author!r}: {len(critique['recall_labels'])} recall_labels for {len(reference)} units"
            )
        yield CritiqueUnits(
            str(row["index"]),
            author,
            tuple(critique["aius"]),
            reference,
            tuple(map(bool, critique["recall_labels"])),
            float(critique["f1_score"]),
        )


@dataclass(frozen=True)
class KeyPointPair:
    """An argument and a key point of its topic and stance; people say whether the one makes the other."""

    argument_id: str
    argument: str
    key_point: str
    topic: str
    stance: str
    match: bool


_ARGKP = {"train": "kpm_data", "dev": "kpm_data", "test": "test_data"}


def load_argkp(folder: str | Path, split: str) -> list[KeyPointPair]:
    """Read one split (train, dev, test) of ArgKP-2021; couples that people were undecided on are not in it.

    Args:
        folder: Holds ``kpm_data`` and ``test_data``.
        split: Which.

    Raises:
        UserError: a file is missing or malformed.
    """
    published = "https://github.com/IBM/KPA_2021_shared_task"
    folder = _folder(folder, "ArgKP-2021", published) / _ARGKP[split]
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for name, key, columns in (
        ("arguments", "arg_id", ("argument", "topic", "stance")),
        ("key_points", "key_point_id", ("key_point",)),
    ):
        file = next_existing(folder, (f"{name}_{split}.csv",), f"ArgKP-2021 ({published})")
        tables[name] = {}
        for where, row in read_rows(file):
            require(row, (key, *columns), where)
            tables[name][row[key]] = row
    pairs = []
    for where, row in read_rows(next_existing(folder, (f"labels_{split}.csv",), f"ArgKP-2021 ({published})")):
        require(row, ("arg_id", "key_point_id", "label"), where)
        argument, key_point = tables["arguments"].get(row["arg_id"]), tables["key_points"].get(row["key_point_id"])
        if argument is None or key_point is None or row["label"] not in ("0", "1"):
            raise UserError(f"{where}: an unknown argument or key point, or a label other than 0 and 1: {row}")
        pairs.append(
            KeyPointPair(
                row["arg_id"],
                argument["argument"],
                key_point["key_point"],
                argument["topic"],
                argument["stance"],
                row["label"] == "1",
            )
        )
    return pairs


@dataclass(frozen=True)
class Reasons:
    """Reasons of one ComVE item: three that people gave, and two texts that do not explain the error."""

    item: str
    right: tuple[str, ...]
    confusing: tuple[str, ...]


def load_reasons(folder: str | Path, split: str) -> list[Reasons]:
    """Read the reasons of one split (train, validation, test) of ComVE; see `nlhf.sources.comve`.

    Raises:
        UserError: a file is missing or malformed.
    """
    pairs = comve.load(str(folder), split, Counter())
    return [Reasons(p.id, tuple(_texts(p)), tuple(p.meta["confusing_reasons"])) for p in pairs]


def _texts(pair: Pair) -> list[str]:
    return [_text(critique) for critique in pair.critiques]


def _text(critique: HumanCritique) -> str:
    return critique.weaknesses_a or critique.weaknesses_b


def standard_benchmarks(
    folder: str | Path, limit: int | None = None, rotations: int = 5, seed: int = 0
) -> list[Benchmark]:
    """All benchmarks, from a folder that holds metacritique, argkp2021, comve and defacto.

    Args:
        folder: The folder.
        limit: Keep this many items of each data set.
        rotations: How many times the controls pair each item with another one.
        seed: Of these pairings.

    Raises:
        UserError: a data set is missing or malformed.
    """
    folder, rng = Path(folder), random.Random(seed)
    critiques = load_metacritique(folder / "metacritique")[: None if limit is None else 3 * limit]
    key_points = load_argkp(folder / "argkp2021", "test")[:limit]
    reasons = load_reasons(folder / "comve", "test")[:limit]
    feedback = _defacto_feedback(folder / "defacto")[:limit]
    return [
        Benchmark("metacritique_units", "MetaCritique: unit covered, AUC", "auc", units_covered(critiques)),
        Benchmark("metacritique_same", "MetaCritique: unit covered, within one unit, AUC", "auc",
                  units_covered(critiques, within=True)),
        Benchmark("metacritique_f1", "MetaCritique: human F1, Spearman", "spearman", human_f1(critiques)),
        Benchmark("argkp_pooled", "ArgKP test: pooled, AUC", "auc", key_points_made(key_points, within=False)),
        Benchmark("argkp_within", "ArgKP test: within topic and stance, AUC", "auc", key_points_made(key_points)),
        Benchmark("comve_confusing", "ComVE test: right against confusing, AUC", "auc", right_or_confusing(reasons)),
        Benchmark("comve_other", "ComVE test: same against other item, AUC", "auc", same_or_other(
            [(r.item, r.right) for r in reasons], rng)),
        Benchmark("defacto_other", "DeFacto test: same against other item, AUC", "auc", same_or_other(feedback, rng)),
        Benchmark("metacritique_control", "control, MetaCritique: references shuffled, AUC", "auc", [
            c for k in _rotations(len(critiques) // 3, rotations, rng)
            for c in references_shuffled(critiques, 3 * k, rng)
        ], control=True),
        Benchmark("metacritique_general", "control, MetaCritique: critiques shuffled (general points), AUC", "auc", [
            c for k in _rotations(len(critiques) // 3, rotations, rng) for c in units_covered(critiques, 3 * k)
        ], control=True),
        Benchmark("comve_control", "control, ComVE: references shuffled, AUC", "auc", [
            c for k in _rotations(len(reasons), rotations, rng) for c in right_or_confusing(reasons, k)
        ], control=True),
    ]  # fmt: skip


def units_covered(critiques: Sequence[CritiqueUnits], rotation: int = 0, within: bool = False) -> list[Comparison]:
    """Each point of a reference against the critique that covers it or not.

    ``within`` makes each point a stratum, so that only the critiques of one item are compared, on the same point.

    With a rotation, against the critique by the same author of the item so much further on. Labels stay with the
    points, so what still agrees with them is how general a point is: "the answer is wrong" is covered more often, and
    is more like any other item's critique, than a point about that one answer.
    """
    return [
        Comparison(
            critiques[(i + rotation) % len(critiques)].units,
            (point,),
            float(covered),
            critique.item,
            f"{critique.item} {k}" if within else "",
        )
        for i, critique in enumerate(critiques)
        for k, (point, covered) in enumerate(zip(critique.reference, critique.covered, strict=True))
    ]


def references_shuffled(critiques: Sequence[CritiqueUnits], rotation: int, rng: random.Random) -> list[Comparison]:
    """Each critique against points, in random order, of the item so much further on; labels stay with the critique.

    What still agrees with the labels is the critique's own looks: its style, its length, how much it lists.
    """
    comparisons = []
    for i, critique in enumerate(critiques):
        points = critiques[(i + rotation) % len(critiques)].reference
        comparisons += [
            Comparison(critique.units, (rng.choice(points),), float(covered), critique.item)
            for covered in critique.covered
        ]
    return comparisons


def human_f1(critiques: Sequence[CritiqueUnits]) -> list[Comparison]:
    """Each critique against its whole reference, with people's F1."""
    return [Comparison(c.units, c.reference, c.f1, c.item) for c in critiques]


def key_points_made(pairs: Sequence[KeyPointPair], within: bool = True) -> list[Comparison]:
    """Each argument against each key point of its topic and stance."""
    return [
        Comparison(
            (p.argument,), (p.key_point,), float(p.match), p.argument_id, f"{p.topic} {p.stance}" if within else ""
        )
        for p in pairs
    ]


def right_or_confusing(items: Sequence[Reasons], rotation: int = 0) -> list[Comparison]:
    """Each right reason (1) and each confusing one (0) against the right reasons of its item, but not against itself.

    With a rotation, against the reasons of the item so much further on: what then tells right from confusing is style.
    """
    comparisons = []
    for i, item in enumerate(items):
        references = items[(i + rotation) % len(items)].right
        for label, texts in ((1.0, item.right), (0.0, item.confusing)):
            comparisons += [
                Comparison((text,), (reference,), label, item.item)
                for k, text in enumerate(texts)
                for j, reference in enumerate(references)
                if not (label and j == k)
            ]
    return comparisons


def same_or_other(items: Sequence[tuple[str, Sequence[str]]], rng: random.Random) -> list[Comparison]:
    """Couples of texts of one item (1), and of one of them with a text of another item, drawn by ``rng`` (0)."""
    comparisons = []
    [rotation] = _rotations(len(items), 1, rng)
    for i, (name, texts) in enumerate(items):
        others = items[(i + rotation) % len(items)][1]
        for j, text in enumerate(texts[1:], start=1):
            comparisons.append(Comparison((texts[0],), (text,), 1.0, name))
            comparisons.append(Comparison((texts[0],), (others[j % len(others)],), 0.0, name))
    return comparisons


def _rotations(length: int, count: int, rng: random.Random) -> list[int]:
    if length < 2:
        raise UserError("a benchmark needs at least two items, so that one can be compared with another; raise limit")
    return rng.sample(range(1, length), min(count, length - 1))


def _defacto_feedback(folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Explanation and instruction of each faulty summary whose annotator wrote both."""
    feedback = ((p.id, tuple(_text(p.critiques[0]).split("\n"))) for p in defacto.load(str(folder), "test", Counter()))
    return [(name, texts) for name, texts in feedback if len(texts) == 2]


def _folder(path: str | Path, name: str, published: str) -> Path:
    if not Path(path).is_dir():
        raise UserError(f"{path}: no such folder; {name} is published at {published}")
    return Path(path)
