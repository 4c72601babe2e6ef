"""What a loaded data set holds: the record written beside every run, and the checks for duplicates and leaks.

Station of the path: source -> **Pair**, looked at as a whole.
"""

import dataclasses
import hashlib
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nlhf.pairs import Pair
from nlhf.sources import DataConfig
from nlhf.sources.rows import REWRITTEN


@dataclass(frozen=True)
class Lengths:
    """How long the texts are, in characters."""

    minimum: int
    median: float
    mean: float
    p95: float
    maximum: int

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Lengths | None":
        """The statistics of some texts; None when there are none."""
        sizes = sorted(len(text) for text in texts)
        if not sizes:
            return None
        p95 = statistics.quantiles(sizes, n=20, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
        return cls(sizes[0], statistics.median(sizes), round(statistics.fmean(sizes), 1), round(p95, 1), sizes[-1])


@dataclass(frozen=True)
class Manifest:
    """A loaded data set in figures.

    Attributes:
        source: Name of the data set.
        split: Part of the data set.
        path: File or folder read; None for a hub or a built-in data set.
        pairs: Pairs loaded.
        labelled: Pairs with at least one human critique that is not empty.
        labels: Pairs by label: A, B, tie, and none where nobody said.
        subsets: Pairs by subset.
        groups: Clusters that resampling keeps together.
        drops: Rows left out, by reason.
        rewritten: Rows of which something was changed, by reason.
        data_hash: See `data_hash`.
        duplicates: Pairs that repeat an earlier one, in either order.
        contradictions: Those of them that name another winner than the first.
        empty_responses: Responses that hold nothing but white space.
        longer_wins: Share of the decided pairs of unequal length whose longer response wins; None without such pairs.
        lengths: Characters of a conversation, a response and a critique; None where there is no text.
    """

    source: str
    split: str
    path: str | None
    pairs: int
    labelled: int
    labels: dict[str, int]
    subsets: dict[str, int]
    groups: int
    drops: dict[str, int]
    rewritten: dict[str, int]
    data_hash: str
    duplicates: int
    contradictions: int
    empty_responses: int
    longer_wins: float | None
    lengths: dict[str, Lengths | None]

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON-ready values."""
        return dataclasses.asdict(self)


def build_manifest(config: DataConfig, pairs: Sequence[Pair], drops: Mapping[str, int]) -> Manifest:
    """Count what was loaded by ``config``."""
    labels = Counter(pair.label or "none" for pair in pairs)
    repeated = duplicates(pairs)
    responses = [text for pair in pairs for text in (pair.response_a, pair.response_b)]
    return Manifest(
        source=config.source,
        split=config.split,
        path=config.path,
        pairs=len(pairs),
        labelled=sum(pair.has_critique for pair in pairs),
        labels={name: labels[name] for name in ("A", "B", "tie", "none")},
        subsets=dict(sorted(Counter(pair.subset for pair in pairs).items())),
        groups=len({pair.cluster for pair in pairs}),
        drops=dict(drops),
        rewritten=dict(Counter(str(pair.meta[REWRITTEN]) for pair in pairs if pair.meta.get(REWRITTEN))),
        data_hash=data_hash(pairs),
        duplicates=len(repeated),
        contradictions=sum(_winner(first) != _winner(later) for first, later in repeated),
        empty_responses=sum(not text.strip() for text in responses),
        longer_wins=_longer_wins(pairs),
        lengths={
            "context": Lengths.of("\n".join(turn.content for turn in pair.context) for pair in pairs),
            "response": Lengths.of(responses),
            "critique": Lengths.of(_critique_texts(pairs)),
        },
    )


def data_hash(pairs: Iterable[Pair]) -> str:
    """SHA-256 over each pair's key and label, in order: equal only for the same questions with the same answers.

    Critiques are left out, so that hiding some of them keeps the hash.
    """
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(f"{pair.key} {pair.label}\n".encode())
    return digest.hexdigest()


def duplicates(pairs: Iterable[Pair]) -> list[tuple[Pair, Pair]]:
    """The pairs that repeat an earlier one (equal context and responses, in either order), each behind the first."""
    first: dict[str, Pair] = {}
    repeated = []
    for pair in pairs:
        key = _unordered_key(pair)
        if key in first:
            repeated.append((first[key], pair))
        first.setdefault(key, pair)
    return repeated


@dataclass(frozen=True)
class Overlap:
    """How much of one data set occurs in another.

    Attributes:
        pairs: Pairs that occur there, in either order.
        contexts: Pairs whose conversation occurs there (all of them, where a data set asks one question throughout).
        groups: Pairs whose group occurs there.
    """

    pairs: int
    contexts: int
    groups: int


def overlap(pairs: Sequence[Pair], others: Iterable[Pair]) -> Overlap:
    """Count the pairs that leak from ``others``: from a train split into the split it is tested on."""
    keys, contexts, groups = set(), set(), set()
    for other in others:
        keys.add(_unordered_key(other))
        contexts.add(tuple(other.context))
        groups.add(other.group)
    groups.discard("")
    return Overlap(
        pairs=sum(_unordered_key(pair) in keys for pair in pairs),
        contexts=sum(tuple(pair.context) in contexts for pair in pairs),
        groups=sum(pair.group in groups for pair in pairs),
    )


def _unordered_key(pair: Pair) -> str:
    """The same for a pair and its swap."""
    exchanged = dataclasses.replace(
        pair, response_a=pair.response_b, response_b=pair.response_a, label=None, strength=None, critiques=[]
    )
    return min(pair.key, exchanged.key)


def _winner(pair: Pair) -> str | None:
    """What won, whatever its slot: the text of the better response, or the label when there is none."""
    return {"A": pair.response_a, "B": pair.response_b}.get(pair.label, pair.label)


def _longer_wins(pairs: Iterable[Pair]) -> float | None:
    wins = [
        (len(pair.response_a) > len(pair.response_b)) == (pair.label == "A")
        for pair in pairs
        if pair.label in ("A", "B") and len(pair.response_a) != len(pair.response_b)
    ]
    return round(statistics.fmean(wins), 4) if wins else None


def _critique_texts(pairs: Iterable[Pair]) -> Iterable[str]:
    """The text of each critique, its fields joined."""
    for pair in pairs:
        for critique in pair.critiques:
            fields = dataclasses.replace(critique, annotator="")
            if text := "\n".join(value for value in vars(fields).values() if value.strip()):
                yield text
