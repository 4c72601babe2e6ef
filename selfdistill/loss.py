"""The loss of SDRM on a batch of rollouts in two passes, at the **trainer** (arXiv 2609.38792).

`look` scores every position without gradient and chooses those to train on; `loss_at` projects only the chosen hidden
states to the vocabulary again, with gradient. Both work on padded batches ``[B, T]`` and never on padding.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfdistill.divergence import Scores, score, weighted_divergence
from selfdistill.head import Head
from selfdistill.selection import importance_ratio, loss_weights, select, to_grid

if TYPE_CHECKING:
    from selfdistill.settings import SDRMSettings


@dataclass(frozen=True)
class States:
    """What a model makes of B rollouts.

    Attributes:
        hidden: ``[B, T, H]``, the states from which the T tokens of the response are predicted.
        head: The way from there to the vocabulary.
    """

    hidden: Tensor
    head: Head


@dataclass(frozen=True)
class Positions:
    """What the first pass knows; nothing carries a gradient.

    Attributes:
        mask: bool ``[B, T]``, true at the N positions of the responses.
        keep: bool ``[B, T]``, true at the positions chosen, whether their rollout has feedback or not.
        scores: Of the N positions, row by row.
    """

    mask: Tensor
    keep: Tensor
    scores: Scores


@torch.no_grad()
def look(
    student: States, teacher: States, tokens: Tensor, mask: Tensor, settings: "SDRMSettings", seed: int = 0
) -> Positions:
    """The first pass: entropies, divergence, the teacher's top-k, and the positions to train on.

    Args:
        student: Its states.
        teacher: The teacher's, at the same tokens after its own prompt.
        tokens: The tokens sampled, int64 ``[B, T]``.
        mask: Truth ``[B, T]`` of the positions of the response, its end included.
        settings: Objective, selector and rho.
        seed: Of the selector random; to draw anew at each step, put the step into it.
    """
    mask = mask.bool()
    scores = score(
        student.hidden.detach()[mask],
        student.head,
        teacher.hidden[mask],
        teacher.head,
        tokens=tokens[mask],
        objective=settings.objective,
    )
    keep = select(
        settings.selector,
        settings.rho,
        mask,
        student_entropy=to_grid(scores.student_entropy, mask),
        teacher_entropy=to_grid(scores.teacher_entropy, mask),
        divergence=to_grid(scores.divergence, mask),
        tokens=tokens,
        seed=seed,
    )
    return Positions(mask, keep, scores)


def loss_at(
    positions: Positions,
    student: States,
    feedback: Tensor,
    total: int | Tensor,
    settings: "SDRMSettings",
    sampled_log_probs: Tensor | None = None,
) -> Tensor:
    """The second pass: the weighted divergence at the positions chosen, a scalar.

    Without any such position it is a zero that hangs on the graph, so that all processes have a backward pass.

    Args:
        positions: Of `look`.
        student: Its states, with gradient.
        feedback: Truth per rollout whether its teacher had feedback, ``[B]``; one without gives no loss.
        total: The sum of `selfdistill.selection.loss_total` over all micro-batches and processes of the step.
        settings: Objective, normaliser and clip of the ratio.
        sampled_log_probs: Log-probabilities ``[B, T]`` under the model that sampled, where that is not exactly the
            student; NaN, or None for all, is a ratio of 1.
    """
    mask, keep = positions.mask, positions.keep
    ratio = None
    if sampled_log_probs is not None:
        now = to_grid(positions.scores.token_log_probs, mask)
        ratio = importance_ratio(now, sampled_log_probs.to(now), settings.ratio_clip)
    weights = loss_weights(keep, feedback, total, settings.normalizer, ratio)
    chosen = keep & feedback.bool().unsqueeze(-1)
    loss, _ = weighted_divergence(
        student.hidden[chosen],
        student.head,
        positions.scores.teacher[chosen[mask]],
        weights[chosen],
        settings.objective,
    )
    return loss
