"""What a run of SDRM can be told: the settings of the **trainer**.

Names of alternatives live here, where nothing heavy is imported, so that a mistake in a configuration answers at once.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from nlhf.config import OptimizationConfig
from nlhf.errors import UserError
from nlhf.training import RolloutSettings

Kind = Literal["reverse", "forward", "jsd"]
Support = Literal["teacher_topk", "full"]
Selector = Literal["low_dh", "high_dh", "abs_dh", "student_entropy", "teacher_entropy", "kl", "random"]
SELECTORS: tuple[Selector, ...] = get_args(Selector)
Mode = Literal["ema", "live", "frozen"]
Normalizer = Literal["kept_tokens", "per_rollout"]
NORMALIZERS: tuple[Normalizer, ...] = get_args(Normalizer)


def masked_fraction(rho: float | str | Fraction) -> Fraction:
    """Rho, the fraction of positions MASKED, as the fraction that was meant: 0.7 is 7/10.

    Raises:
        UserError: it does not lie in [0, 1).
    """
    try:
        exact = Fraction(rho).limit_denominator(10_000)
    except (ValueError, TypeError, OverflowError):
        exact = Fraction(-1)
    if not 0 <= exact < 1:
        raise UserError(f"rho, the fraction of positions masked, must lie in [0, 1), got {rho!r}; 0 trains on all")
    return exact


def check_samples(samples: int, temperature: float) -> None:
    """Raise `UserError` unless so many rollouts of a pair can be drawn, and differ."""
    from nlhf.generation import SamplingConfig

    if problems := SamplingConfig(temperature=temperature).problems(samples):
        raise UserError("; ".join(problems))


@dataclass(frozen=True)
class Objective:
    """Which divergence, over which tokens.

    With the student's probabilities p and the teacher's q, over the categories of the support:

    - ``reverse``: KL(p || q), what SDRM minimises.
    - ``forward``: KL(q || p).
    - ``jsd``: beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p, the generalised
      Jensen-Shannon divergence of GKD (arXiv 2306.13649).

    The support is the teacher's k likeliest tokens and one bucket for all others, or the vocabulary. With the bucket
    it is a true divergence of k + 1 categories: never negative and never above that over the vocabulary.

    Raises:
        UserError: a value is out of its range.
    """

    kind: Kind = "reverse"
    """reverse, forward or jsd."""

    support: Support = "teacher_topk"
    """teacher_topk (its top_k tokens and a tail bucket) or full."""

    top_k: int = 100
    """Tokens of the teacher that keep a category of their own."""

    beta: float = 0.5
    """The teacher's share of the mixture; jsd only."""

    def __post_init__(self):
        if self.kind not in ("reverse", "forward", "jsd"):
            raise UserError(f"kind of divergence must be reverse, forward or jsd, got {self.kind!r}")
        if self.support not in ("teacher_topk", "full"):
            raise UserError(f"support must be teacher_topk or full, got {self.support!r}")
        if self.top_k < 1:
            raise UserError(f"top_k must be at least 1, got {self.top_k}")
        if not 0 < self.beta < 1:
            raise UserError(f"beta must lie between 0 and 1, got {self.beta}; its ends are kind forward and reverse")


@dataclass
class SDRMSettings(RolloutSettings):
    """Settings of SDRM; the values are those of arXiv 2609.38792 for mask70 with a model of 4B parameters."""

    section: ClassVar[str] = "sdrm"

    learning_rate: float = 5e-6
    """Peak learning rate of AdamW."""

    num_train_epochs: float = 3.0
    """Passes over the data, when max_steps is not set."""

    num_generations: int = 4
    """Rollouts of each prompt."""

    temperature: float = 1.0
    """Sampling temperature of rollouts; the logits of student and teacher are divided by it in the loss."""

    max_prompt_length: int = 4096
    """Longest prompt in tokens; longer ones are left out and counted, never cut."""

    max_teacher_prompt_length: int = 4608
    """Longest prompt of the teacher in tokens; feedback is shortened to fit, nothing else is."""

    divergence: Kind = "reverse"
    """reverse: KL(student || teacher); forward: KL(teacher || student); jsd: generalised Jensen-Shannon."""

    jsd_beta: float = 0.5
    """The teacher's share of the mixture; jsd only."""

    support: Support = "teacher_topk"
    """teacher_topk: the teacher's likeliest tokens and one bucket for all others; full: the vocabulary."""

    support_size: int = 100
    """How many of the teacher's likeliest tokens keep a category of their own."""

    rho: float = 0.7
    """Fraction of each rollout's positions that is MASKED; 0 trains on all (naive self-distillation)."""

    selector: Selector = "low_dh"
    """Which positions are kept: low_dh, high_dh (entropy gap H_S - H_T), abs_dh, student_entropy, teacher_entropy, kl
    (the highest), random."""

    normalizer: Normalizer = "kept_tokens"
    """kept_tokens: every kept position of the step counts the same; per_rollout: every rollout does (Eq. 4)."""

    ratio_clip: float = 2.0
    """Largest importance ratio of a token; it matters with vLLM only, whose probabilities differ a little."""

    teacher: Mode = "ema"
    """ema: the average of the student's weights over the steps; live: the student itself; frozen: the start."""

    teacher_rate: float = 0.01
    """How far the ema teacher moves towards the student after every optimiser step."""

    exchange: bool = True
    """Exchange A and B in odd epochs; label and feedback follow."""

    profile_prompts: int = 16
    """Prompts whose rollouts show, before training, where the divergence lies and how much is kept of it."""

    def __post_init__(self):
        super().__post_init__()
        masked_fraction(self.rho)
        problems = []
        for name in ("max_teacher_prompt_length", "support_size", "profile_prompts"):
            if getattr(self, name) < 1:
                problems.append(f"sdrm.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.jsd_beta < 1:
            problems.append(
                f"sdrm.jsd_beta must lie between 0 and 1, got {self.jsd_beta}; its ends are the divergences "
                "forward and reverse"
            )
        if not self.ratio_clip > 0:
            problems.append(f"sdrm.ratio_clip must be positive, got {self.ratio_clip}")
        if not 0 < self.teacher_rate <= 1:
            problems.append(f"sdrm.teacher_rate must lie in (0, 1], got {self.teacher_rate}")
        if "beta" in self.extra:
            problems.append("sdrm.extra: set sdrm.divergence and sdrm.jsd_beta instead of 'beta'")
        if "shuffle_dataset" in self.extra:
            problems.append("sdrm.extra: 'shuffle_dataset' does nothing here; prompts are shuffled by the run's seed")
        if problems:
            raise UserError("; ".join(problems))

    @property
    def objective(self) -> Objective:
        """Which divergence, over which tokens."""
        return Objective(self.divergence, self.support, self.support_size, self.jsd_beta)

    def trl_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those of all settings that trl's DistillationConfig knows."""
        shared = {f.name for f in fields(OptimizationConfig)} | {"temperature", "top_p", "max_completion_length"}
        own = {f.name for f in fields(self)} - shared
        return {name: value for name, value in arguments.items() if name not in own}
