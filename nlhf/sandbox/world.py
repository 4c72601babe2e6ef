"""The sandbox world: pairs whose true reasons are known.

A response is a handful of words, each showing that one of six aspects is good or bad (or, unmentioned, neutral). The
words of the task fix ONE decisive aspect, and the better response is the one that is better on it. A human critique
names exactly the decisive reasons. All else is distraction: five other aspects, a mild correlation between them (so
that counting every reason works better than chance), and a flourish ("certainly") that goes along with the winner in
training and against it in the reversed test set.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nlhf.errors import UserError
from nlhf.pairs import HumanCritique, Pair, Side, Turn

WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "accuracy": (("correct", "precise", "verified", "exact"), ("mistaken", "invented", "bogus", "miscounted")),
    "tone": (("polite", "warm", "patient", "gracious"), ("rude", "curt", "mocking", "harsh")),
    "brevity": (("concise", "brief", "compact", "crisp"), ("rambling", "bloated", "wordy", "padded")),
    "safety": (("careful", "cautious", "guarded", "prudent"), ("risky", "reckless", "harmful", "hazardous")),
    "format": (("tabulated", "bulleted", "aligned", "labelled"), ("jumbled", "cramped", "unbroken", "scrambled")),
    "citations": (("sourced", "referenced", "quoted", "linked"), ("unsourced", "hearsay", "uncited", "anonymous")),
}
TASKS: dict[str, tuple[str, ...]] = {
    "accuracy": ("function", "bug", "sum", "proof"),
    "tone": ("refund", "complaint", "apology", "condolence"),
    "brevity": ("headline", "reminder", "slogan", "label"),
    "safety": ("dose", "symptom", "wiring", "solvent"),
    "format": ("invoice", "menu", "agenda", "roster"),
    "citations": ("study", "paper", "thesis", "survey"),
}
ASPECTS = tuple(WORDS)
FLOURISH = "certainly"
# The same aspects and judgements in words that occur in no response and in no critique of the judge's: what a
# colleague's note is written in.
NOTE_ASPECTS = dict(zip(ASPECTS, ("facts", "manners", "length", "risk", "layout", "sources"), strict=True))
NOTE_WORDS = {1: ("solid", "strong", "fine"), -1: ("weak", "poor", "lacking")}

# How often the flourish sits on the winner's side, unless an experiment sets it otherwise.
CUE_RATES = {
    "train": 0.87,
    "cold_start": 0.87,
    "validation": 0.87,
    "id": 0.87,
    "ood": 0.5,
    "reversed": 0.13,
    "contrary": 0.5,
}
SIZES = {"train": 2000, "cold_start": 384, "validation": 150, "id": 300, "ood": 300, "reversed": 300, "contrary": 300}

Reason = tuple[Side, int, str]
"""Side, polarity (+1 praise, -1 blame) and aspect."""


@dataclass(frozen=True)
class Case:
    """One situation of the world.

    Attributes:
        decisive: The aspect that decides.
        task: The words of the task, which say so.
        quality: For each side, +1, -1 or 0 for each aspect.
        flourish: The side that holds the flourish.
        winner: The side that is better on the decisive aspect.
    """

    decisive: str
    task: tuple[str, ...]
    quality: dict[Side, dict[str, int]]
    flourish: Side
    winner: Side

    @property
    def reasons(self) -> list[Reason]:
        """All that is true of the two responses."""
        return [(side, q, aspect) for side in ("A", "B") for aspect, q in self.quality[side].items() if q]

    @property
    def decisive_reasons(self) -> list[Reason]:
        """What a human says: praise of the winner and blame of the loser on the decisive aspect."""
        return [(s, q, a) for s, q, a in self.reasons if a == self.decisive and (q > 0) == (s == self.winner)]


def draw_case(rng: random.Random, cue_rate: float = 0.5, tilt: float = 0.10) -> Case:
    """Draw a situation.

    Args:
        rng: The source of chance.
        cue_rate: Probability that the flourish sits on the winner's side.
        tilt: How much a response is better (or worse) on every aspect at once.
    """
    decisive = rng.choice(ASPECTS)
    task = tuple(rng.sample(TASKS[decisive], 2))
    while True:
        quality = {side: _draw_quality(rng, rng.choice((tilt, -tilt))) for side in ("A", "B")}
        if quality["A"][decisive] != quality["B"][decisive]:
            break
    winner: Side = "A" if quality["A"][decisive] > quality["B"][decisive] else "B"
    loser: Side = "B" if winner == "A" else "A"
    return Case(decisive, task, quality, winner if rng.random() < cue_rate else loser, winner)


def _draw_quality(rng: random.Random, tilt: float) -> dict[str, int]:
    return {aspect: rng.choices((1, -1, 0), (0.4 + tilt, 0.4 - tilt, 0.2))[0] for aspect in ASPECTS}


def response_text(rng: random.Random, case: Case, side: Side) -> str:
    """The words of one response, in random order."""
    words = [rng.choice(WORDS[aspect][0 if q > 0 else 1]) for aspect, q in case.quality[side].items() if q]
    if case.flourish == side:
        words.append(FLOURISH)
    rng.shuffle(words)
    return " ".join(words)


def to_critique(reasons: Sequence[Reason], annotator: str) -> HumanCritique:
    """Reasons as the fields of a human critique, one aspect a line."""
    lines: dict[tuple[Side, int], list[str]] = {(s, q): [] for s in ("A", "B") for q in (1, -1)}
    for side, polarity, aspect in reasons:
        lines[side, polarity].append(aspect)
    return HumanCritique(
        strengths_a="\n".join(lines["A", 1]),
        weaknesses_a="\n".join(lines["A", -1]),
        strengths_b="\n".join(lines["B", 1]),
        weaknesses_b="\n".join(lines["B", -1]),
        annotator=annotator,
    )


def note_text(rng: random.Random, reasons: Sequence[Reason]) -> str:
    """Reasons in other words, as a colleague's note: ``A facts solid B manners poor``."""
    return " ".join(f"{side} {NOTE_ASPECTS[aspect]} {rng.choice(NOTE_WORDS[q])}" for side, q, aspect in reasons)


def vote(rng: random.Random, reasons: Sequence[Reason]) -> Side:
    """The side that the reasons favour, each counting one; a coin decides a tie."""
    for_a = balance(reasons, "A")
    return "A" if for_a > 0 else "B" if for_a < 0 else rng.choice(("A", "B"))


def balance(reasons: Sequence[Reason], side: Side) -> int:
    """How many reasons speak for ``side``, less those that speak against it."""
    return sum(polarity if about == side else -polarity for about, polarity, _ in reasons)


def draw_pairs(
    split: str,
    n: int | None = None,
    seed: int = 0,
    cue_rate: float | None = None,
    swayed: float = 0.35,
    habit: float = 0.0,
    vague: float = 0.0,
) -> list[Pair]:
    """Pairs of one split.

    ``train``, ``validation`` and the test sets ``id``, ``ood`` and ``reversed`` carry the true label and critique and
    differ only in where the flourish sits. In the test set ``contrary`` counting every reason misleads: most of what is
    true speaks for the worse response. ``cold_start`` carries what a careless annotator would have written.

    Args:
        split: A key of `CUE_RATES`.
        n: Number of pairs; None for the split's usual size.
        seed: Splits and seeds never share a stream of chance.
        cue_rate: How often the flourish sits on the winner's side; None for the split's usual rate.
        swayed: Share of the cold start's demonstrations that look for reasons to favour the flourished side.
        habit: Share of the cold start's demonstrations that judge a task by one and the same wrong aspect (`habitual`).
        vague: Share of critiques that name the decisive aspect and praise both sides for it: they say what matters,
            not who is better.
    """
    if split not in CUE_RATES:
        raise UserError(f"the sandbox has no split {split!r}; known: {', '.join(CUE_RATES)}")
    rng = random.Random(f"sandbox/{split}/{seed}")
    cue_rate = CUE_RATES[split] if cue_rate is None else cue_rate
    pairs = []
    for i in range(SIZES[split] if n is None else n):
        case = draw_case(rng, cue_rate)
        while split == "contrary" and balance(case.reasons, case.winner) >= 0:
            case = draw_case(rng, cue_rate)
        if split == "cold_start":
            label, critique = _careless(rng, case, swayed, habit)
        else:
            label, critique = _truthful(rng, case, vague)
        pairs.append(
            Pair(
                id=f"sandbox-{split}-{seed}-{i:05d}",
                context=[Turn("user", " ".join(case.task))],
                response_a=response_text(rng, case, "A"),
                response_b=response_text(rng, case, "B"),
                label=label,
                critiques=[critique],
                source="sandbox",
                subset=split,
                meta={"decisive": case.decisive, "flourish": case.flourish},
            )
        )
    return pairs


def _truthful(rng: random.Random, case: Case, vague: float) -> tuple[Side, HumanCritique]:
    if vague and rng.random() < vague:  # no draw otherwise: the usual world stays as it is
        return case.winner, to_critique([("A", 1, case.decisive), ("B", 1, case.decisive)], "vague")
    return case.winner, to_critique(case.decisive_reasons, "truth")


def habitual(decisive: str) -> str:
    """The wrong aspect by which a judge with a habit judges the tasks of one decisive aspect: always the same."""
    return ASPECTS[(ASPECTS.index(decisive) + 1) % len(ASPECTS)]


def _careless(rng: random.Random, case: Case, swayed: float, habit: float) -> tuple[Side, HumanCritique]:
    """A demonstration for the cold start: right in form, often beside the point, drawn to the flourish."""
    if habit and rng.random() < habit:
        reasons = [reason for reason in case.reasons if reason[2] == habitual(case.decisive)] or case.reasons[:1]
        return vote(rng, reasons), to_critique(reasons, "habit")
    if rng.random() < 0.30:
        reasons = case.decisive_reasons
    else:
        reasons = rng.sample(case.reasons, min(rng.randint(1, 3), len(case.reasons)))
    choice = vote(rng, reasons)
    if rng.random() < swayed:  # taken in by the flourish: looks for reasons to favour that side
        choice = case.flourish
        favourable = [r for r in case.reasons if (r[1] > 0) == (r[0] == choice)]
        reasons = rng.sample(favourable, min(len(reasons), len(favourable))) or reasons
    reasons = [(side, -q if rng.random() < 0.10 else q, aspect) for side, q, aspect in reasons]
    if rng.random() < 0.10:
        choice = "B" if choice == "A" else "A"
    return choice, to_critique(reasons, "careless")
