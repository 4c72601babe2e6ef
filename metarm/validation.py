"""Validation during `metarm train`: how wrong is MetaRM on held-out pairs, and which of its states is the best?

Station of the path: **trainer**. A callback of transformers' Trainer.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from metarm.metrics import FIGURES, Data
from metarm.model import MetaRM
from metarm.rollouts import Example
from nlhf.callbacks import keep_best

logger = logging.getLogger(__name__)


class Best(TrainerCallback):
    """Measures MetaRM on held-out rollouts after every epoch, and keeps the one with the least error in ``best/``."""

    def __init__(
        self,
        trainer: Any,
        metarm: MetaRM,
        rows: Sequence[dict[str, Any]],
        examples: Sequence[Example],
        folder: Path,
        log: Any,
    ):
        self.trainer, self.metarm, self.folder, self.log = trainer, metarm, folder, log
        self.rows, self.examples = [row["ids"] for row in rows], examples

    def on_step_end(self, args, state, control, **_):
        """Measure at the end of an epoch, before its checkpoint is saved: what one resumes from has been measured."""
        if abs(state.epoch - round(state.epoch)) < 1e-6 or state.global_step == state.max_steps:
            self._measure(args, state)

    def _measure(self, args: Any, state: Any) -> None:
        training = self.metarm.model.training
        self.metarm.model.eval()
        scores = self.metarm.score_ids(self.rows, args.per_device_train_batch_size)
        self.metarm.model.train(training)
        data = Data(
            np.array(scores),
            np.array([e.target for e in self.examples]),
            np.array([e.correct for e in self.examples]),
            np.array([e.sound for e in self.examples]),
        )
        found = {name: function(data) for name, (_, function) in FIGURES.items()}
        found["constant_mse"] = float(data.targets.var())
        if state.is_world_process_zero:
            self.log.write(state.global_step, {f"validation/{k}": v for k, v in found.items() if v is not None})
            logger.info(
                "step %d: validation error %.4f (constant: %.4f)",
                state.global_step,
                found["mse"],
                found["constant_mse"],
            )
        keep_best(self.trainer, self.folder / "best", {"step": state.global_step, **found}, "mse", least=True)
