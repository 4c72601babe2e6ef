"""MetaReward: rewards critiques that no human can vouch for, by a MetaRM that learns on while the judge is trained.

Station of the path: Verdict -> **rewards** -> trainer. Name it in a YAML of ``nlhf train``::

    process:
      class_path: metarm.MetaReward
      init_args: {model: runs/sandbox/metarm/best, scorer: {class_path: exact}}

The judge's critiques drift as it learns, so each step goes in this order (RM-NLHF, arXiv 2601.07349, section on online
MetaRM): rewards of the labelled rollouts from the human critiques; one step of MetaRM on these; scores of the
unlabelled rollouts by the updated MetaRM.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from metarm.metrics import auc
from metarm.model import LoraSettings, MetaRM, by_length, unique
from metarm.rollouts import target_of
from nlhf.critique.matching import CritiqueMatch
from nlhf.critique.scorers import CritiqueScorer
from nlhf.errors import UserError
from nlhf.models import ModelConfig
from nlhf.rewards import CritiqueReward, Rollout

logger = logging.getLogger(__name__)

LogMetric = Callable[[str, float], None]
_BONUSES: dict[str, Callable[[float], float]] = {
    "paper": lambda m: min(1.0, max(0.0, m - 1.0)),
    "matched": lambda m: min(1.0, max(0.0, 2.0 * (m - 1.0))),
}


@dataclass(frozen=True)
class _Labelled:
    """A labelled, well-formed rollout as MetaRM learns from it."""

    ids: list[int]
    target: float
    right: bool
    sound: bool


class MetaReward:
    """A process reward: the human critique's word where there is one, MetaRM's where there is none.

    With several processes, all of them learn from the labelled rollouts of all: each takes the gradient of its share,
    the sum is the gradient of the mean over all rows, and so every process takes the same step, also when some or all
    of them have no labelled row. A step is one optimiser step. There is no chance in it (dropout is off), so the state
    is the weights, the optimiser and the window of the gate.

    Attributes:
        gated: The bonus counts only where the label is right (see `nlhf.rewards.ProcessReward`).
        training: False during evaluation: then nothing is learned.
        metarm: The model, once it is loaded.
        updates: Steps taken so far.
    """

    def __init__(
        self,
        model: str | Mapping[str, Any],
        scorer: CritiqueScorer | None = None,
        form: Literal["hard", "soft"] = "hard",
        threshold: float = 0.5,
        online: bool = True,
        unlabelled_bonus: Literal["paper", "matched"] = "paper",
        outcome_gate: bool = True,
        gate_auc: float | None = None,
        gate_rows: int = 100,
        window: int = 500,
        learning_rate: float = 5e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        batch_size: int = 16,
        max_length: int | None = None,
        lora: LoraSettings | Mapping[str, Any] | None = None,
    ):
        """Check the settings; the model is loaded by `prepare`.

        Args:
            model: A trained MetaRM (``metarm train``): its name, or the fields of `nlhf.models.ModelConfig`.
            scorer: Compares critiques with the humans' on labelled pairs; None is `nlhf.rewards.DEFAULT_SCORER`.
            form: See `nlhf.rewards.CritiqueReward`.
            threshold: See `nlhf.rewards.CritiqueReward`.
            online: Learn on at every step; False keeps MetaRM as it is.
            unlabelled_bonus: From a score m: paper is max(0, m - 1), which a target of at most 1.5 keeps near 0.5 at
                most; matched is 2 (m - 1), kept in [0, 1], so that a sound critique earns what it earns on a labelled
                pair.
            outcome_gate: The label must be right for a bonus. False is the ablation without outcome: on unlabelled
                pairs the score is the reward, and the label is not used.
            gate_auc: No bonus on unlabelled pairs while MetaRM tells sound from unsound critiques worse than by this
                AUC, measured on rollouts with the right label before it learned from them; None is no such gate.
            gate_rows: The gate stays closed until so many rollouts have been measured.
            window: How many of the latest are measured.
            learning_rate: Of AdamW, constant.
            weight_decay: Of AdamW.
            max_grad_norm: Gradients are clipped to this norm.
            batch_size: Texts that go through MetaRM at once; it changes memory and speed only.
            max_length: Most tokens of a text; None takes what was saved with the model.
            lora: Learn adapters and head only.

        Raises:
            UserError: a setting makes no sense.
        """
        self.config = ModelConfig(**model) if isinstance(model, Mapping) else ModelConfig(model)
        self.lora = LoraSettings(**lora) if isinstance(lora, Mapping) else lora
        self.critique = CritiqueReward(scorer, form, threshold)
        self.online, self.gated, self.training = online, outcome_gate, True
        self.learning_rate, self.weight_decay, self.max_grad_norm = learning_rate, weight_decay, max_grad_norm
        self.gate_auc, self.gate_rows, self.batch_size, self.max_length = gate_auc, gate_rows, batch_size, max_length
        problems = []
        if unlabelled_bonus not in _BONUSES:
            problems.append(f"unlabelled_bonus must be one of {', '.join(_BONUSES)}, got {unlabelled_bonus!r}")
        if learning_rate <= 0 or max_grad_norm <= 0:
            problems.append("learning_rate and max_grad_norm must be positive")
        if batch_size < 1 or gate_rows < 1:
            problems.append("batch_size and gate_rows must be at least 1")
        if gate_auc is not None and not 0.5 <= gate_auc < 1:
            problems.append(f"gate_auc must lie in [0.5, 1), got {gate_auc}")
        if gate_rows > window:
            problems.append(f"gate_rows is {gate_rows} but the window holds only {window}: the gate would never open")
        if problems:
            raise UserError("metarm.MetaReward: " + "; ".join(problems))
        self._to_bonus = _BONUSES[unlabelled_bonus]
        self._window: deque[tuple[float, bool]] = deque(maxlen=window)
        self.metarm: MetaRM | None = None
        self.updates = 0

    def prepare(self) -> None:
        """Load MetaRM on this process's device.

        Raises:
            UserError: it cannot be loaded or is no trained MetaRM.
        """
        import torch
        from accelerate import PartialState

        from nlhf.training import training_dtype

        self.metarm = MetaRM.load(
            self.config,
            max_length=self.max_length,
            dtype=training_dtype(self.config)[0] if self.online else None,
            lora=self.lora,
            device=PartialState().device,
        )
        if not self.online:
            self.metarm.model.requires_grad_(False)
            return
        self._optimizer = torch.optim.AdamW(
            self._trainable().values(), lr=self.learning_rate, weight_decay=self.weight_decay
        )

    def __call__(self, rollouts: Sequence[Rollout], log_metric: LogMetric) -> list[float | None]:
        """See `nlhf.rewards.ProcessReward`."""
        if self.metarm is None:
            self.prepare()
        matches = self.critique.compare(rollouts)
        self.critique.log(matches, log_metric)
        targets = [target_of(r, m, self.critique) for r, m in zip(rollouts, matches, strict=True)]
        learned = [i for i, target in enumerate(targets) if target is not None]
        served = [i for i, r in enumerate(rollouts) if self._serves(r)]
        ids = self._encode([rollouts[i] for i in (*learned, *served)])
        rows = [
            _Labelled(text, targets[i], rollouts[i].correct, _is_sound(matches[i], self.critique.threshold))
            for i, text in zip(learned, ids, strict=False)
        ]
        scores = self._study(rows, ids[len(learned) :], log_metric)
        human = [self.critique.bonus(r, m) for r, m in zip(rollouts, matches, strict=True)]
        rewards = human if self.gated else list(targets)
        open_ = self._gate_is_open()
        log_metric("metarm/gate_open", float(open_))
        self._log_scores(scores, log_metric)
        for i, score in zip(served, scores, strict=True):
            if not math.isfinite(score):
                raise FloatingPointError(f"pair {rollouts[i].pair.id!r}: MetaRM's score is {score}")
            if open_:
                rewards[i] = self._to_bonus(score) if self.gated else score
        return rewards

    def _serves(self, rollout: Rollout) -> bool:
        """The rollout is unlabelled, and a score of its critique may count."""
        return not rollout.pair.has_critique and rollout.well_formed and (rollout.correct or not self.gated)

    def _study(self, own: Sequence[_Labelled], served: Sequence[list[int]], log_metric: LogMetric) -> list[float]:
        """Learn from the labelled rollouts of all processes, record how wrong MetaRM was and is, and score the others.

        Args:
            own: The labelled rollouts of this process.
            served: Ids of the texts of this process that are to be scored.
            log_metric: Receives the figures.

        Returns:
            Scores of ``served`` by the updated MetaRM.
        """
        from accelerate.utils import gather_object

        rows: list[_Labelled] = gather_object(list(own))
        log_metric("metarm/labelled", len(rows))
        if not rows:
            return self.metarm.score_ids(served, self.batch_size)
        before, after, scores = self._learn(rows, served)
        right = [i for i, row in enumerate(rows) if row.right]
        if self.training:
            self._window.extend((before[i], rows[i].sound) for i in right)
        log_metric("metarm/wrong_label_rate", 1 - len(right) / len(rows))
        log_metric("metarm/mse_before", _mse(before, rows))
        log_metric("metarm/mse_after", _mse(after, rows))
        area = self._window_auc()
        if area is not None:
            log_metric("metarm/auc", area)
        return scores

    def _learn(
        self, rows: Sequence[_Labelled], served: Sequence[list[int]]
    ) -> tuple[list[float], list[float], list[float]]:
        """One step on the mean squared error over the rows of all processes.

        Returns:
            Scores of the rows before and after it, and of ``served`` after it.
        """
        from accelerate import PartialState
        from accelerate.utils import gather_object

        state = PartialState()
        share = range(state.process_index, len(rows), state.num_processes)
        mine = [rows[i] for i in share]
        learns = self.online and self.training
        if learns:
            before = self._backward(mine, len(rows))
            self._step()
        # One pass over all texts: short batches cost more than their share.
        scores = self.metarm.score_ids([*(row.ids for row in mine), *served], self.batch_size)
        after, others = scores[: len(mine)], scores[len(mine) :]
        gathered = sorted(gather_object(list(zip(share, before if learns else after, after, strict=True))))
        return [b for _, b, _ in gathered], [a for _, _, a in gathered], others

    def _step(self) -> None:
        """Add up the gradients of all processes and take the step."""
        import torch
        from accelerate import PartialState

        parameters = self._trainable().values()
        for parameter in parameters:
            if parameter.grad is None:  # a share may be empty, but all processes must add up the same tensors
                parameter.grad = torch.zeros_like(parameter)
            if PartialState().num_processes > 1:
                torch.distributed.all_reduce(parameter.grad)
        torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1

    def _backward(self, rows: Sequence[_Labelled], total: int) -> list[float]:
        """Gradients of this process's part of the mean over ``total`` rows; the scores on the way.

        Rollouts of a group that wrote the same critique are one text, which goes through the model once.
        """
        import torch

        distinct, place = unique([row.ids for row in rows])
        targets: list[list[float]] = [[] for _ in distinct]
        for i, row in zip(place, rows, strict=True):
            targets[i].append(row.target)
        scores = [0.0] * len(distinct)
        for batch in by_length(distinct, self.batch_size):
            predicted = self.metarm.predict([distinct[i] for i in batch])
            counts = torch.tensor([len(targets[i]) for i in batch], device=predicted.device)
            wanted = torch.tensor([t for i in batch for t in targets[i]], device=predicted.device)
            (((predicted.repeat_interleave(counts) - wanted) ** 2).sum() / total).backward()
            for i, score in zip(batch, predicted.tolist(), strict=True):
                scores[i] = score
        return [scores[i] for i in place]

    def _log_scores(self, scores: Sequence[float], log_metric: LogMetric) -> None:
        log_metric("metarm/scored", len(scores))
        if scores:
            log_metric("metarm/score", sum(scores) / len(scores))
            log_metric("metarm/unlabelled_bonus", sum(map(self._to_bonus, scores)) / len(scores))
        for part, count in self.metarm.shortened.items():
            log_metric(f"metarm/shortened_{part}", count)

    def _encode(self, rollouts: Sequence[Rollout]) -> list[list[int]]:
        return self.metarm.encode([r.pair for r in rollouts], [r.verdict.critique for r in rollouts])

    def _gate_is_open(self) -> bool:
        if self.gate_auc is None:
            return True
        area = self._window_auc()
        return area is not None and len(self._window) >= self.gate_rows and area >= self.gate_auc

    def _window_auc(self) -> float | None:
        """AUC for "process reward = 1" among the latest labelled rollouts with the right label, scored unlearned."""
        return auc(*zip(*self._window, strict=True)) if self._window else None

    def _trainable(self) -> dict[str, Any]:
        return {name: p for name, p in self.metarm.model.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Any]:
        """See `nlhf.rewards.LearningReward`; weights are on the CPU."""
        state = {"updates": self.updates, "window": [[score, sound] for score, sound in self._window]}
        if self.online:
            state["model"] = {name: p.detach().cpu() for name, p in self._trainable().items()}
            state["optimizer"] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `nlhf.rewards.LearningReward`."""
        import torch

        if self.metarm is None:
            self.prepare()
        self.updates = state["updates"]
        self._window.clear()
        self._window.extend((score, sound) for score, sound in state["window"])
        if self.online:
            parameters = self._trainable()
            if parameters.keys() != state["model"].keys():
                raise ValueError("the saved MetaRM has other parameters than this one")
            with torch.no_grad():
                for name, value in state["model"].items():
                    parameters[name].copy_(value)
            self._optimizer.load_state_dict(state["optimizer"])


def _is_sound(match: CritiqueMatch | None, threshold: float) -> bool:
    return match is not None and match.f1 >= threshold


def _mse(scores: Sequence[float], rows: Sequence[_Labelled]) -> float:
    return sum((score - row.target) ** 2 for score, row in zip(scores, rows, strict=True)) / len(rows)
