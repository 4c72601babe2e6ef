"""The judgements that a report's browser shows, as data within the page.

Station of the path: Verdict -> Record -> **report**. What a judge, a human or a data set wrote is untrusted. Here it
becomes JSON that cannot end its own element; ``report.js`` puts it on the page as text nodes only, and the page's
content security policy runs that one script by its hash and nothing else.
"""

import base64
import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from nlhf.critique.arguments import Argument, reference_sets
from nlhf.evaluation.figures import flipped, lucky, with_twins
from nlhf.evaluation.records import Record
from nlhf.evaluation.results import Run
from nlhf.judge import ORDERS, as_shown
from nlhf.pairs import Pair

MAX_JUDGEMENTS = 10_000
MAX_CHARACTERS = 12_000

OUTCOMES = {"right": "right", "wrong": "wrong", "unparsed": "no verdict"}
FLAGS = {"flipped": "flipped by the order", "lucky": "right label, wrong critique", "truncated": "truncated"}

# "<" could end the script element or open a comment in it; U+2028 and U+2029 end a line in older JavaScript; half a
# surrogate is no UTF-8.
_ESCAPES = {code: f"\\u{code:04x}" for code in (*map(ord, "<>&\u2028\u2029"), *range(0xD800, 0xE000))}


def choose_pairs(runs: Sequence[Run], limit: int, seed: int) -> list[str]:
    """Pairs to show, in the data's order: all of them if their judgements fit in the limit, else a seeded choice."""
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        for record in run.records:
            counts[record.pair_id] += 1
    order = list(counts)
    random.Random(seed).shuffle(order)
    chosen, total = set(), 0
    for pair_id in order:
        total += counts[pair_id]
        if total > limit and chosen:
            break
        chosen.add(pair_id)
    return [pair_id for pair_id in counts if pair_id in chosen]


def browser_data(names: Sequence[str], runs: Sequence[Run], chosen: Sequence[str]) -> dict[str, Any]:
    """The judgements on the chosen pairs, pair by pair, with each text of a pair once.

    Args:
        names: What the runs are called.
        runs: At least one.
        chosen: Ids of pairs.

    Returns:
        ``runs`` and ``subsets`` (names), ``flags`` (titles of tags), ``pairs``, and ``judgements`` that refer to runs
        and pairs by index.
    """
    by_pair: dict[str, list[tuple[int, Record, Record | None]]] = {pair_id: [] for pair_id in chosen}
    for k, run in enumerate(runs):
        for record, twin in with_twins(run.records):
            if record.pair_id in by_pair:
                by_pair[record.pair_id].append((k, record, twin))
    pairs: dict[str, int] = {}  # by their JSON, for the runs need not agree on what a pair holds
    judgements = []
    for rows in by_pair.values():
        for k, record, twin in rows:
            pair = json.dumps(_pair(runs[k].pairs[record.pair_id]))
            index = pairs.setdefault(pair, len(pairs))
            judgements.append({"run": k, "pair": index} | _judgement(record, twin, runs[k]))
    rows = [json.loads(pair) for pair in pairs]
    subsets = list(dict.fromkeys(row["subset"] for row in rows))
    return {"runs": list(names), "subsets": subsets, "flags": FLAGS, "pairs": rows, "judgements": judgements}


def _pair(pair: Pair) -> dict[str, Any]:
    """A pair in the data's order; what humans wrote, for both orders, for they call the responses by name."""
    humans = {order: reference_sets(as_shown(pair, order)) for order in ORDERS} if pair.critiques else {}
    return {
        "id": pair.id,
        "subset": pair.subset,
        "label": pair.label,
        "context": [[turn.role, _clip(turn.content)] for turn in pair.context],
        "responses": [_clip(pair.response_a), _clip(pair.response_b)],
        "humans": {order: [numbered(arguments) for arguments in found] for order, found in humans.items()},
    }


def _judgement(record: Record, twin: Record | None, run: Run) -> dict[str, Any]:
    match = record.match
    generated, reference = zip(*match.matched, strict=True) if match and match.matched else ((), ())
    row = {
        "order": record.order,
        "sample": record.sample,
        "verdict": record.verdict,
        "tags": tags(record, twin, run.config["wrong_critique_threshold"]),
        "facts": _facts(record),
        "reply": _clip(record.reply),
    }
    if match and match.generated:
        row["generated"] = numbered(match.generated, generated)
    elif record.critique:
        row["critique"] = _clip(record.critique)
    if match and match.reference:
        row["reference"] = numbered(match.reference, reference)
    return row


def tags(record: Record, twin: Record | None, threshold: float) -> list[str]:
    """What a judgement can be filtered by: at most one of `OUTCOMES`, and any of `FLAGS`."""
    found = {
        "right": record.label is not None and record.correct,
        "wrong": record.label is not None and record.verdict is not None and not record.correct,
        "unparsed": record.verdict is None,
        "flipped": flipped(record, twin),
        "lucky": lucky(record, threshold),
        "truncated": record.truncated,
    }
    return [tag for tag, holds in found.items() if holds]


def _facts(record: Record) -> list[tuple[str, str]]:
    """Numbers of a judgement as the page shows them, in the order shown."""
    facts = []
    if record.probability is not None:
        facts.append(("P(A is better)", f"{100 * record.probability:.1f} %"))
    if record.tie_probability is not None:
        facts.append(("P(tie)", f"{100 * record.tie_probability:.1f} %"))
    if record.mass is not None:
        facts.append(("Mass of the verdicts", f"{100 * record.mass:.1f} %"))
    if record.strength is not None:
        facts.append(("Strength", f"{record.strength:+g}"))
    if record.scores is not None:
        facts.append(("Scores", ", ".join(f"{score:g}" for score in record.scores)))
    if (match := record.match) and match.failure:
        facts.append(("Critique", f"not scored: {match.failure}"))
    elif match:
        repeated = "; a point is made twice, which scores 0" if match.repeated else ""
        text = f"F1 {match.f1:.2f} (precision {match.precision:.2f}, recall {match.recall:.2f}){repeated}"
        facts.append(("Critique", text))
    return [*facts, ("Reply", f"{record.tokens} tokens"), ("Prompt", record.prompt_hash)]


def numbered(arguments: Sequence[Argument], matched: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Arguments with the number of their match, from 1, the same on both sides of it; None where nothing matches."""
    numbers = {i: n for n, i in enumerate(matched, start=1)}
    return [{"text": _clip(str(argument)), "match": numbers.get(i)} for i, argument in enumerate(arguments)]


def _clip(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}\n… ({len(text) - MAX_CHARACTERS} more characters)"


def script_json(value: Any) -> Markup:
    """JSON for a ``<script type="application/json">``: no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(_ESCAPES))


def script_hash(script: str) -> str:
    """The source expression by which a content security policy lets this inline script run, and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
