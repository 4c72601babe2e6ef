"""What the teacher is told beyond the student: feedback z made from a **Pair**, for JudgeFormat.render.

Each context is a function of the pair as it is shown; the table of names is `CONTEXTS`.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from nlhf.critique.arguments import Argument, human_arguments
from nlhf.errors import UserError, nearest
from nlhf.pairs import REFERENCE, HumanCritique, Pair

Context = Callable[[Pair], str]
"""What the teacher is told beyond the student, z, for the order in which the pair is shown; empty for no feedback."""

_NAMED = re.compile(rf"(?:\bthe\s+)?@?{REFERENCE.pattern}(?P<own>['’]s\s+(?:response|answer|reply)\b)?", re.IGNORECASE)
_RESPONSE_NOUNS = ("response", "assistant", "answer", "chatbot", "candidate")
_SIDES = {"A": "A", "B": "B", "1": "A", "2": "B"}


NAMING = "Assistant {}'s response"
"""What SDRM's prompt calls a response."""


def name_responses(text: str, naming: str = NAMING) -> str:
    """Re-word "Response 1", "Chatbot B's answer" and the like to "Assistant A's response" and "Assistant B's response".

    The text must already be in the order shown: `HumanCritique.swap` exchanges the names.

    Args:
        text: Free text.
        naming: The name to give, ``{}`` for A or B, ``{lower}`` for a or b, ``{number}`` for 1 or 2.
    """

    def rename(match: re.Match) -> str:
        names = [n for n in (match["name"], match["second"]) if n]
        if not match["noun"].lower().startswith(_RESPONSE_NOUNS) or not set(names) <= set(_SIDES):
            return match[0]
        return (match["joint"] or "").join(_name(_SIDES[n], naming) for n in names)

    return _NAMED.sub(rename, text)


def _name(side: str, naming: str) -> str:
    return naming.format(side, lower=side.lower(), number=1 + "AB".index(side))


def rationale(pair: Pair) -> str:
    """What the first human who wrote anything said about the pair: the teacher's context of the paper."""
    critique = _first_critique(pair)
    if critique is None:
        return ""
    parts = [critique.text.strip(), *(_sentence(a) for a in human_arguments(replace(critique, text="")))]
    return name_responses("\n".join(filter(None, parts)))


def per_response_feedback(pair: Pair) -> str:
    """What the first human said about each response, under a line that names the response.

    A critique in free text says itself which response it is about, and is given as it is.
    """
    critique = _first_critique(pair)
    if critique is None:
        return ""
    blocks = [critique.text.strip()]
    for side, praise, blame in (
        ("A", critique.strengths_a, critique.weaknesses_a),
        ("B", critique.strengths_b, critique.weaknesses_b),
    ):
        lines = [f"{name}: {t.strip()}" for name, t in (("Strengths", praise), ("Weaknesses", blame)) if t.strip()]
        if lines:
            blocks.append("\n".join([f"Feedback on Assistant {side}'s response:", *lines]))
    return name_responses("\n\n".join(filter(None, blocks)))


def rubric(pair: Pair) -> str:
    """What to look for in this pair, from ``meta["rubric"]``: a text, or a list of criteria; it names no winner.

    Raises:
        UserError: it is neither.
    """
    value = pair.meta.get("rubric") or ""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(f"- {item.strip()}" for item in value if item.strip())
    if not isinstance(value, str):
        raise UserError(f"pair {pair.id!r}: meta 'rubric' must be a text or a list of texts, got {value!r}")
    return value.strip()


def gold_verdict(pair: Pair) -> str:
    """The label, and no reason: what feedback in language is compared with."""
    if pair.label is None:
        return ""
    if pair.label == "tie":
        return "Neither response is better overall."
    return f"Assistant {pair.label}'s response is better overall."


def sandbox_note(pair: Pair) -> str:
    """The human critique of a sandbox pair as a colleague's note, in the words that its base judge understands.

    The choice of words hangs on the pair alone: a note is the same in every epoch.

    Raises:
        UserError: the critique is not of the sandbox world.
    """
    from nlhf.sandbox.world import ASPECTS, note_text

    critique = _first_critique(pair)
    if critique is None:
        return ""
    reasons = [(a.side, a.polarity, a.text) for a in human_arguments(critique)]
    unknown = [text for side, _, text in reasons if side is None or text not in ASPECTS]
    if unknown:
        raise UserError(f"pair {pair.id!r}: {unknown[0]!r} is no reason of the sandbox world; it has {list(ASPECTS)}")
    return note_text(random.Random(f"note/{pair.id}"), reasons)


CONTEXTS: dict[str, Context] = {
    "rationale": rationale,
    "per_response_feedback": per_response_feedback,
    "rubric": rubric,
    "gold_verdict": gold_verdict,
    "sandbox_note": sandbox_note,
}
"""The teacher's contexts by name. The control of those that read critiques: the same on `shuffle_critiques(pairs)`."""

_READ_CRITIQUES = ("rationale", "per_response_feedback", "sandbox_note")


def get_context(name: str, shuffled: bool = False) -> Context:
    """The context called ``name``.

    Args:
        name: A key of `CONTEXTS`.
        shuffled: It is to be given shuffled critiques, so it must be one that reads any.

    Raises:
        UserError: there is none, or shuffled critiques would change nothing for it.
    """
    if name not in CONTEXTS:
        raise UserError(f"unknown teacher context {name!r}; known: {', '.join(CONTEXTS)}.{nearest(name, CONTEXTS)}")
    if shuffled and name not in _READ_CRITIQUES:
        raise UserError(
            f"shuffled exchanges critiques, but context {name} reads none; contexts that do: "
            f"{', '.join(_READ_CRITIQUES)}"
        )
    return CONTEXTS[name]


def shuffle_critiques(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """Each pair that has critiques gets those of another one, of another group if at all possible: the control.

    Unrelated text in the teacher's prompt may help as well; only what the true critiques gain over these is owed to
    what they say. The critiques move as data, so that `Pair.swap` re-words the borrowed ones too.

    Raises:
        UserError: fewer than two pairs have critiques.
    """
    clusters: dict[str, list[int]] = {}
    for i, pair in enumerate(pairs):
        if pair.has_critique:
            clusters.setdefault(pair.cluster, []).append(i)
    order = list(clusters.values())
    random.Random(f"shuffled critiques/{seed}").shuffle(order)
    line = [i for cluster in order for i in cluster]
    if len(line) < 2:
        raise UserError(f"shuffled critiques need two pairs that have some, got {len(line)}")
    # Clusters lie side by side: a step as long as the longest leaves every one of them.
    step = max(map(len, order))
    step = step if step < len(line) else 1
    donors = dict(zip(line, line[step:] + line[:step], strict=True))
    return [replace(p, critiques=pairs[donors[i]].critiques) if i in donors else p for i, p in enumerate(pairs)]


def _first_critique(pair: Pair) -> HumanCritique | None:
    return next((c for c in pair.critiques if not c.empty), None)


def _sentence(argument: Argument) -> str:
    what = "is good because" if argument.polarity == 1 else "is worse because"
    return f"Assistant {argument.side}'s response {what}: {argument.text}"
