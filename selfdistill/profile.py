"""Where the divergence of a judge from its teacher lies, in numbers: what to look at before the **trainer** is started.

mask70 (arXiv 2609.38792) learns from the 30 % of positions with the lowest entropy gap dH = H_S - H_T. That pays where
the divergence is U-shaped in dH: large where feedback makes the teacher less certain than the student (dH < 0), and
large where it makes it more certain (dH > 0). Where all of it lies at high dH, mask70 keeps positions at which there is
nothing to learn. Pure functions on numbers; `selfdistill.measure` gets the numbers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlhf.errors import UserError

BINS = 10
TAIL = 3
"""Deciles in a tail: the paper compares the outer 30 % on each side with the 40 % between them."""

TAIL_RATIO = 3.0
"""A tail of a U has at least this many times the divergence per position of the middle (20 to 28 in the paper)."""

LEAST_SHARE = 0.05
"""Of the divergence: each tail of a U holds at least this share, and so should the positions that are trained on."""

LEAST_GAIN = 0.25
"""What the positions kept should hold of the divergence, as a multiple of what as many random ones would hold."""

NOTHING = 1e-6
"""Nats per position that are no divergence, but the rounding of two equal models."""


@dataclass(frozen=True)
class Bin:
    """Positions taken together.

    Attributes:
        low: Lower end: of dH in nats, or of the place in the reply, 0 to 1; None when the bin is empty.
        high: Upper end.
        n: Positions.
        kept: How many of them are kept; positions with equal dH at the edge of a decile count in part.
        kl: The sum of their divergence, nats.
    """

    low: float | None
    high: float | None
    n: int
    kept: float
    kl: float

    @property
    def mean_kl(self) -> float | None:
        """Divergence per position, nats; None when the bin is empty."""
        return _ratio(self.kl, self.n)

    @property
    def kept_share(self) -> float | None:
        """Share of the bin's positions that is kept; None when it is empty."""
        return _ratio(self.kept, self.n)


@dataclass(frozen=True)
class Profile:
    """Divergence by entropy gap and by place in the reply, and what the positions kept have of it.

    Attributes:
        rollouts: Rollouts with at least one position.
        deciles: Tenths of all positions, lowest dH first.
        places: Tenths of the replies, first tokens first: position i (from 0) of N lies at (i + 1/2) / N.
        kept_kl: The sum of the divergence at the positions kept, nats.
    """

    rollouts: int
    deciles: tuple[Bin, ...]
    places: tuple[Bin, ...]
    kept_kl: float

    @property
    def n(self) -> int:
        """Positions."""
        return sum(b.n for b in self.places)

    @property
    def kept(self) -> int:
        """Positions kept."""
        return round(sum(b.kept for b in self.places))

    @property
    def kl(self) -> float:
        """The sum of the divergence, nats."""
        return sum(b.kl for b in self.deciles)

    @property
    def differs(self) -> bool:
        """Whether student and teacher differ at all."""
        return self.kl > NOTHING * self.n

    @property
    def kept_share(self) -> float:
        """Share of the positions that is kept."""
        return self.kept / self.n

    @property
    def kept_kl_share(self) -> float | None:
        """Share of the divergence that lies at positions kept; None when there is no divergence."""
        return _ratio(self.kept_kl, self.kl)

    @property
    def low_tail(self) -> Bin:
        """The 30 % of positions with the lowest dH."""
        return _joined(self.deciles[:TAIL])

    @property
    def middle(self) -> Bin:
        """The 40 % between the tails."""
        return _joined(self.deciles[TAIL:-TAIL])

    @property
    def high_tail(self) -> Bin:
        """The 30 % of positions with the highest dH."""
        return _joined(self.deciles[-TAIL:])

    def times_middle(self, tail: Bin) -> float | None:
        """Divergence per position of a tail as a multiple of the middle's; infinite over a middle without any.

        None where neither has any.
        """
        if not tail.n or not self.middle.n or not tail.kl + self.middle.kl:
            return None
        return tail.mean_kl / self.middle.mean_kl if self.middle.kl else float("inf")

    @property
    def is_u_shaped(self) -> bool:
        """Both tails have `TAIL_RATIO` times the divergence per position of the middle, and `LEAST_SHARE` of it all.

        The ratio tells a U from a plateau; the share tells it from a profile with one high tail, beside which a little
        divergence at the other end is also many times that of an empty middle.
        """
        return self.differs and all(
            (self.times_middle(tail) or 0) >= TAIL_RATIO and tail.kl >= LEAST_SHARE * self.kl
            for tail in (self.low_tail, self.high_tail)
        )

    @property
    def shape(self) -> str:
        """The shape in words."""
        if not self.differs:
            return "no divergence at all"
        if self.is_u_shaped:
            return "U-shaped in dH"
        low, high = (tail.kl / self.kl for tail in (self.low_tail, self.high_tail))
        if max(low, high) < 0.5:
            return "not U-shaped: spread over dH"
        return f"not U-shaped: one-sided, at {'high' if high > low else 'low'} dH"

    def warning(self) -> str | None:
        """What is wrong with training on the positions kept, and the remedy; None when they hold enough.

        Enough is `LEAST_SHARE` of the divergence, and `LEAST_GAIN` of what as many random positions would hold.
        """
        if not self.differs:
            return (
                "student and teacher agree at every position, so there is nothing to learn; "
                "does the feedback reach the teacher's prompt?"
            )
        if self.kept_kl_share >= max(LEAST_SHARE, LEAST_GAIN * self.kept_share):
            return None
        where = {"lowest": self.low_tail, "highest": self.high_tail}
        end = max(where, key=lambda name: where[name].kl)
        share = where[end].kl / self.kl
        # A tail is 30 % of the positions: with half of the divergence it is the place to be.
        selector = "kl" if share < 0.5 else "high_dh" if end == "highest" else "low_dh"
        return (
            f"the positions kept ({_percent(self.kept_share)} of all) hold only {_percent(self.kept_kl_share)} of the "
            "divergence: training would learn from where student and teacher agree, and may ruin the judge. "
            f"The {TAIL}0 % of positions with the {end} dH hold {_percent(share)}. "
            f"Set rho to 0 (train on all positions) or selector to {selector}"
        )

    def table(self) -> str:
        """The profile as plain text: deciles of dH, places, both tails against the middle, what is kept."""
        columns = f"{'positions':>11}{'mean KL':>10}{'of the KL':>11}{'kept':>9}"
        lines = [
            f"Divergence KL by entropy gap dH = H_S - H_T (nats): {self.n} positions of {self.rollouts} rollouts",
            "",
            f"{'decile':<8}{'dH from':>10}{'to':>10}{columns}",
        ]
        for number, b in enumerate(self.deciles, start=1):
            lines.append(f"{number:<8}{_number(b.low, '+.4f'):>10}{_number(b.high, '+.4f'):>10}{self._cells(b)}")
        lines += ["", f"{'tenth of the reply':<28}{columns}"]
        lines += [f"{f'{100 * b.low:.0f} to {100 * b.high:.0f} %':<28}{self._cells(b)}" for b in self.places]
        lines += ["", f"KL per position in the middle {10 - 2 * TAIL}0 % of dH: {_number(self.middle.mean_kl, '.4f')}"]
        for name, tail in (("lowest", self.low_tail), ("highest", self.high_tail)):
            mean, times = _number(tail.mean_kl, ".4f"), _number(self.times_middle(tail), ".1f")
            lines.append(f"KL per position in the {name} {TAIL}0 %: {mean} ({times} times the middle)")
        lines.append(f"Shape: {self.shape}")
        share, kl_share = _percent(self.kept_share), _percent(self.kept_kl_share)
        lines.append(f"Kept: {self.kept} positions, {share} of all, with {kl_share} of the KL")
        return "\n".join(lines)

    def _cells(self, b: Bin) -> str:
        share = _percent(_ratio(b.kl, self.kl))
        return f"{b.n:>11}{_number(b.mean_kl, '.4f'):>10}{share:>11}{_percent(b.kept_share):>9}"

    def to_dict(self) -> dict[str, Any]:
        """Everything above by name, for JSON (where an infinite ratio becomes null)."""
        return {
            "rollouts": self.rollouts,
            "positions": self.n,
            "kept": self.kept,
            "kept_share": self.kept_share,
            "mean_kl": self.kl / self.n,
            "kept_kl_share": self.kept_kl_share,
            "low_tail_ratio": self.times_middle(self.low_tail),
            "high_tail_ratio": self.times_middle(self.high_tail),
            "is_u_shaped": self.is_u_shaped,
            "shape": self.shape,
            "warning": self.warning(),
            "deciles": [self._row(b) for b in self.deciles],
            "places": [self._row(b) for b in self.places],
        }

    def _row(self, b: Bin) -> dict[str, Any]:
        ends = {"low": b.low, "high": b.high}
        shares = {"kl_share": _ratio(b.kl, self.kl), "kept_share": b.kept_share}
        return {**ends, "positions": b.n, "mean_kl": b.mean_kl, **shares}


def profile_of(
    kl: Any, dh: Any, mask: Any = None, kept: Any = None, *, lengths: Sequence[int] | None = None
) -> Profile:
    """The profile of rollouts: padded ones ``[B, T]`` with a mask, or flat ones ``[N]`` with their lengths.

    Positions with equal dH share their divergence evenly, so that the order of rollouts does not matter.

    Args:
        kl: Divergence at each position, nats.
        dh: Entropy gap H_S - H_T, nats, of the same shape.
        mask: True at the positions of the reply; other values may be anything. None: everywhere.
        kept: True at the positions to train on, of the same shape. None: everywhere.
        lengths: Of the rollouts in flat arrays; None: it is one rollout.

    Raises:
        UserError: a value is not a number: the model's logits are broken.
        ValueError: shapes differ, or there is no position.
    """
    kl, dh = (np.asarray(values, dtype=np.float64) for values in (kl, dh))
    mask, kept = (np.ones(kl.shape, bool) if m is None else np.asarray(m).astype(bool) for m in (mask, kept))
    if not kl.shape == dh.shape == mask.shape == kept.shape:
        raise ValueError(f"shapes differ: kl {kl.shape}, dh {dh.shape}, mask {mask.shape}, kept {kept.shape}")
    counts = np.asarray(lengths) if lengths is not None else np.atleast_2d(mask).sum(-1)
    kl, dh, kept = kl[mask], dh[mask], kept[mask]
    if not len(kl) or counts.sum() != len(kl):
        raise ValueError(f"rollouts of {counts.sum()} positions, {len(kl)} values")
    if broken := int((~np.isfinite(kl) | ~np.isfinite(dh)).sum()):
        raise UserError(
            f"divergence or entropy is not a finite number at {broken} of {len(kl)} positions; the model's weights "
            "may be damaged, or its logits too large for its number format: try dtype float32"
        )
    places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
    return Profile(
        rollouts=int((counts > 0).sum()),
        deciles=_deciles(kl, dh, kept),
        places=_places(kl, places, kept),
        kept_kl=float(kl[kept].sum()),
    )


def _deciles(kl: np.ndarray, dh: np.ndarray, kept: np.ndarray) -> tuple[Bin, ...]:
    values, group, sizes = np.unique(dh, return_inverse=True, return_counts=True)
    kl, kept = (np.repeat(np.bincount(group, weights=v) / sizes, sizes) for v in (kl, kept))  # sorted by dh
    dh = np.repeat(values, sizes)
    edges = [len(dh) * k // BINS for k in range(BINS + 1)]
    return tuple(
        Bin(
            low=float(dh[start]) if end > start else None,
            high=float(dh[end - 1]) if end > start else None,
            n=end - start,
            kept=float(kept[start:end].sum()),
            kl=float(kl[start:end].sum()),
        )
        for start, end in itertools.pairwise(edges)
    )


def _places(kl: np.ndarray, places: np.ndarray, kept: np.ndarray) -> tuple[Bin, ...]:
    which = (places * BINS).astype(int)
    n, kept, kl = (np.bincount(which, weights=w, minlength=BINS) for w in (None, kept, kl))
    return tuple(Bin(k / BINS, (k + 1) / BINS, int(n[k]), float(kept[k]), float(kl[k])) for k in range(BINS))


def _joined(bins: Sequence[Bin]) -> Bin:
    return Bin(
        low=next((b.low for b in bins if b.n), None),
        high=next((b.high for b in reversed(bins) if b.n), None),
        n=sum(b.n for b in bins),
        kept=sum(b.kept for b in bins),
        kl=sum(b.kl for b in bins),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(round(value, 4) + 0.0, spec)  # no negative zero
