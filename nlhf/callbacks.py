"""What happens at steps of a training run: metrics, progress, warnings, and validation that keeps the best model.

Station of the path: **trainer**. All are callbacks of transformers' Trainer, from which trl's trainers descend.
"""

import logging
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from nlhf.evaluation.metrics import TRUNCATION_LIMIT, Record, compute
from nlhf.files import append_jsonl, read_json, write_json
from nlhf.formats.base import JudgeFormat
from nlhf.judge import Judge
from nlhf.pairs import Pair
from nlhf.training import ValidationConfig

logger = logging.getLogger(__name__)

_SHOWN = (
    "loss",
    "reward",
    "format_rate",
    "outcome",
    "accuracy",
    "process/bonus",
    "kl",
    "entropy",
    "completions/mean_length",
)
_SHOWN_OF_VALIDATION = ("accuracy", "parse_rate", "position_consistency", "critique_f1", "wrong_critique_rate")


def attach(trainer: Any, log: "MetricsLog", keeps_best: TrainerCallback | None, watch: "Watch | None" = None) -> None:
    """Let our callbacks speak for a run, in place of the trainer's own printing.

    Args:
        trainer: The trainer.
        log: Receives its metrics.
        keeps_best: Validates and keeps the best model; it comes first, so that its rows stand before the step's own.
        watch: Warns; by default of what ruins GRPO and cold start.
    """
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    for callback in (keeps_best, log, watch or Watch()):
        if callback is not None:
            trainer.add_callback(callback)


class MetricsLog(TrainerCallback):
    """Writes every row of metrics to ``metrics.jsonl``, where nothing else writes, and shows a line of each."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"
        self.started = time.perf_counter()
        self._first_step = 0

    def write(self, step: int, row: dict[str, Any]) -> None:
        """Append a row."""
        append_jsonl(self.path, {"step": step, "seconds": round(time.perf_counter() - self.started, 2), **row})

    def on_train_begin(self, args, state, control, **_):
        """The clock for the time that is left starts here, also in a resumed run."""
        self.started, self._first_step = time.perf_counter(), state.global_step

    def on_log(self, args, state, control, logs=None, **_):
        """Called by the trainer with its metrics."""
        if not (state.is_world_process_zero and logs):
            return
        self.write(state.global_step, logs)
        if "train_runtime" in logs:
            logger.info("trained %d steps in %.0f s", state.global_step, logs["train_runtime"])
        else:
            left = f" ({self._time_left(state)} left)" if state.global_step < state.max_steps else ""
            logger.info("step %d/%d%s: %s", state.global_step, state.max_steps, left, _brief(logs, _SHOWN))

    def _time_left(self, state: Any) -> timedelta:
        elapsed = time.perf_counter() - self.started
        done = max(1, state.global_step - self._first_step)
        return timedelta(seconds=round(elapsed / done * (state.max_steps - state.global_step)))


def _brief(figures: dict[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{n} {figures[n]:.3g}" for n in names if isinstance(figures.get(n), int | float))


class Watch(TrainerCallback):
    """Warns of what ruins a run silently, at most once in ``patience`` rows of metrics for each kind.

    Attributes:
        section: Name of the trainer's settings, for advice.
        remedy: What to change when the judge loses its format, beside the learning rate.
        cut_off: What becomes of replies that hit the token limit.
        rows: What is trained on.
        format_rate: The figure that is the share of well-formed replies.

    Raises:
        FloatingPointError: the loss or the gradient is NaN or infinite (on_log).
    """

    section = "grpo"
    remedy = "raise grpo.beta"
    cut_off = "most of them lose their verdict"
    rows = "pairs"
    format_rate = "format_rate"

    def __init__(self, patience: int = 25):
        self.patience = patience
        self._quiet_until: Counter = Counter()
        self._rows = 0
        self._best_format_rate = 0.0

    def on_log(self, args, state, control, logs=None, **_):
        """Look at the newest metrics."""
        logs = logs or {}
        self._rows += 1
        for name in ("loss", "grad_norm"):
            value = logs.get(name)
            if isinstance(value, float) and not math.isfinite(value):
                raise FloatingPointError(f"step {state.global_step}: {name} is {value}; lower the learning rate")
        if not state.is_world_process_zero:
            return
        truncated = logs.get("completions/clipped_ratio")
        if truncated is not None and truncated > TRUNCATION_LIMIT:
            self._warn(
                "truncation",
                f"{truncated:.0%} of the replies hit the token limit and {self.cut_off}; raise "
                f"{self.section}.max_completion_length",
            )
        idle = logs.get("frac_reward_zero_std")
        if idle is not None and idle > 0.8:
            self._warn(
                "zero variance",
                f"in {idle:.0%} of the groups all rewards are equal, so they teach nothing (a loss near 0 is then "
                f"expected); use harder {self.rows}, a higher temperature or more rollouts a prompt",
            )
        rate = logs.get(self.format_rate)
        if rate is not None:
            self._best_format_rate = max(self._best_format_rate, rate)
            if rate < 0.5 * self._best_format_rate:
                self._warn(
                    "format collapse",
                    f"only {rate:.0%} of the replies are well-formed, down from {self._best_format_rate:.0%}; lower "
                    f"the learning rate or {self.remedy}, and use the best model rather than the last",
                )

    def _warn(self, kind: str, message: str) -> None:
        if self._rows >= self._quiet_until[kind]:
            self._quiet_until[kind] = self._rows + self.patience
            logger.warning("%s: %s", kind, message)


class Validation(TrainerCallback):
    """Judges held-out pairs greedily in both orders now and then, and keeps the best model in ``best/``.

    Chance is not touched, so a run trains the same with and without it.
    """

    def __init__(
        self,
        config: ValidationConfig,
        trainer: Any,
        folder: Path,
        judge_format: JudgeFormat,
        pairs: Sequence[Pair],
        tokenizer: Any,
        max_new_tokens: int,
        log: MetricsLog,
    ):
        from nlhf.generation import SamplingConfig

        self.config, self.trainer, self.folder = config, trainer, folder
        self.format, self.pairs, self.tokenizer, self.log = judge_format, list(pairs), tokenizer, log
        self.sampling = SamplingConfig(max_new_tokens=max_new_tokens, batch_size=config.batch_size)
        self.scorer = config.scorer.build() if config.scorer else None

    def on_train_begin(self, args, state, control, **_):
        """The judge before training, unless it was judged before an interruption."""
        if state.global_step == 0:
            self._validate(0)

    def on_step_end(self, args, state, control, **_):
        """Validate every so many steps and after the last."""
        if state.global_step % self.config.every == 0 or state.global_step == state.max_steps:
            self._validate(state.global_step)

    def _validate(self, step: int) -> None:
        metrics = {name: metric.value for name, metric in compute(self._records(), resamples=0).items()}
        if self.trainer.accelerator.is_main_process:
            self.log.write(step, {f"validation/{k}": v for k, v in metrics.items() if v is not None})
            logger.info("step %d: validation %s", step, _brief(metrics, _SHOWN_OF_VALIDATION))
        keep_best(self.trainer, self.folder / "best", {"step": step, **metrics}, self.config.metric)

    def _records(self) -> list[Record]:
        """Records of all pairs; each process judges its share."""
        from accelerate.utils import DistributedType, gather_object
        from trl.models import unwrap_model_for_generation

        from nlhf.evaluation.measure import judge_and_score
        from nlhf.generation import TransformersGenerator

        accelerator = self.trainer.accelerator
        # Weights that are split over processes come together layer by layer, so all must take the same steps: each
        # judges everything. Otherwise each has the whole model and judges its share.
        sharded = accelerator.distributed_type == DistributedType.FSDP
        share = self.pairs if sharded else self.pairs[accelerator.process_index :: accelerator.num_processes]
        with unwrap_model_for_generation(self.trainer.model_wrapped, accelerator) as model:
            judge = Judge(self.format, TransformersGenerator(model, self.tokenizer, self.sampling))
            records = judge_and_score(judge, share, scorer=self.scorer)
        return records if sharded else gather_object(records)


def save_whole(trainer: Any, folder: Path, documents: dict[str, Any] | None = None) -> None:
    """Save the trainer's model so that the folder is the old one or the new one, whenever the process is killed.

    Args:
        trainer: The trainer; all its processes must call this.
        folder: The folder to make or to replace.
        documents: JSON documents to put beside the weights, by file name.
    """
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    trainer.save_model(str(new))
    if trainer.accelerator.is_main_process:
        put_back(folder)
        for name, document in (documents or {}).items():
            write_json(new / name, document)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()


def keep_best(trainer: Any, folder: Path, figures: dict[str, Any], name: str, least: bool = False) -> None:
    """Save the trainer's model in ``folder`` if it is better than the one there; the earlier of equals stays.

    Args:
        trainer: The trainer; all its processes must call this.
        folder: Holds the best model so far, with its figures in validation.json; or nothing yet.
        figures: Of the model as it is now.
        name: The figure that decides; None there is no improvement.
        least: The smaller is the better.
    """
    from accelerate.utils import broadcast_object_list

    better, value = False, figures[name]
    if trainer.accelerator.is_main_process:  # it has the files, and decides for all
        put_back(folder)
        path = folder / "validation.json"
        best = read_json(path)[name] if path.is_file() else None
        better = value is not None and (best is None or (value < best if least else value > best))
    if broadcast_object_list([better])[0]:
        save_whole(trainer, folder, {"validation.json": figures})


def put_back(folder: Path) -> None:
    """Undo the half of `save_whole` that a kill between its renames leaves: the old folder takes its place again."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def sample_writer(trainer: Any, folder: Path, every: int, count: int) -> Callable[[int, list[dict[str, Any]]], None]:
    """A function that writes the first rollouts of every so many steps to ``samples.jsonl``.

    Args:
        trainer: The trainer; its first process writes.
        folder: The run's folder.
        every: Steps between samples.
        count: Rollouts of such a step.
    """

    def record(step: int, rows: list[dict[str, Any]]) -> None:
        if trainer.accelerator.is_main_process and step % every == 0:
            for row in rows[:count]:
                append_jsonl(folder / "samples.jsonl", {"step": step, **row})

    return record
