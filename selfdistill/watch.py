"""Warns when self-distillation collapses: a callback beside the **trainer**.

A judge that teaches itself can collapse late: its replies lose their spread, shrink or swell, or lose the verdict,
while the loss looks well.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from nlhf.callbacks import Watch

EARLY = 5
"""Rows of metrics whose mean is what later ones are held against."""

# Key, what it is, and the range of its later value as a multiple of its early one.
_SIGNS = (
    ("entropy", "the entropy of the replies", 0.2, 4.0),
    ("completions/mean_length", "the length of the replies", 0.5, 2.0),
    ("verdict_rate", "the share of replies with a verdict", 0.8, None),
)


class CollapseWatch(Watch):
    """`Watch`, and a warning when entropy, length or verdict rate leave the range of the first steps.

    The first rows come from the trainer's history, which checkpoints hold: a resumed run compares with the same ones.
    """

    section = "sdrm"
    remedy = "sdrm.teacher_rate"

    def on_log(self, args, state, control, logs=None, **_):
        """Look at the newest metrics."""
        super().on_log(args, state, control, logs=logs)
        if not state.is_world_process_zero:
            return
        for name, what, low, high in _SIGNS:
            early = _early(state.log_history, name)
            value = (logs or {}).get(name)
            if early is None or value is None:
                continue
            if value < low * early or (high is not None and value > high * early):
                self._warn(
                    f"collapse ({name})",
                    f"{what} is {value:.3g}, {early:.3g} in the first steps; lower sdrm.learning_rate or "
                    "sdrm.teacher_rate, train on fewer steps, and use the best model rather than the last",
                )


def _early(history: Sequence[dict[str, Any]], name: str) -> float | None:
    """The mean of the first rows that have the figure; None before there are enough of them."""
    first = [row[name] for row in history if row.get(name) is not None][:EARLY]
    return fmean(first) if len(first) == EARLY else None
