"""The adversarial probe: does a response that says nothing win against a real one?

Station of the path: source -> **Pair**, for a check beside an evaluation. A judge model may take an empty text, a lone
colon or the word that often opens an answer for the better response (Zhao et al., arXiv 2507.08794). The probe is
reported apart: its pairs are far easier than real ones and never count in the other figures.
"""

import dataclasses
import random
from collections.abc import Sequence

from nlhf.pairs import Pair, other_label

FILLERS = {"empty": "", "colon": ":", "solution": "Solution"}
PROBED_PAIRS = 20


def probe_pairs(pairs: Sequence[Pair], seed: int, n: int = PROBED_PAIRS) -> list[Pair]:
    """A small set of pairs whose one response is a filler, one of each kind for each of ``n`` pairs.

    The better response stays (A, where neither is better) and is the label; ``subset`` is the kind of the filler. Where
    what stays is itself no more than a filler, the pair is passed over.

    Args:
        pairs: The pairs to derive the probe from.
        seed: Of the choice among them.
        n: How many of them.
    """
    fit = [i for i, pair in enumerate(pairs) if _real(pair)[1].strip() not in FILLERS.values()]
    chosen = sorted(random.Random(seed).sample(fit, min(n, len(fit))))
    return [_with_filler(pairs[i], kind, filler) for i in chosen for kind, filler in FILLERS.items()]


def _real(pair: Pair) -> tuple[str, str]:
    side = "B" if pair.label == "B" else "A"
    return side, pair.response_b if side == "B" else pair.response_a


def _with_filler(pair: Pair, kind: str, filler: str) -> Pair:
    side, _ = _real(pair)
    return dataclasses.replace(
        pair,
        **{f"response_{other_label(side).lower()}": filler},
        id=f"{pair.id}/{kind}",
        label=side,
        strength=None,
        critiques=[],
        subset=kind,
        group=pair.cluster,
    )
