"""From hidden states to logits, as the model's configuration says: a detail of the **trainer**'s loss.

The products keep fp32 sums whatever the type of the weights, because logits rounded to bf16 blur the small differences
between student and teacher that SDRM learns from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nlhf.errors import UserError


@dataclass(frozen=True)
class Head:
    """The way from hidden states to logits: softcap(scale (h W^T + b)) / temperature.

    Attributes:
        weight: ``[V, H]``.
        bias: ``[V]`` or None.
        scale: Factor of the logits.
        softcap: ``c`` of ``c tanh(z / c)``, or None.
        temperature: That of the rollouts; divides the logits last.
    """

    weight: Tensor = field(repr=False)
    bias: Tensor | None = field(default=None, repr=False)
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: Any, temperature: float = 1.0) -> "Head":
        """The head of a transformers model, as its configuration says (PEFT models included).

        Weights sharded as DTensor are gathered here, with gradient; under ZeRO-3 the caller gathers them.

        Raises:
            UserError: the model has no head, or an adapter sits on it, which reading its weight would pass over.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(f"{type(model).__name__} has no language-model head: SDRM needs a causal language model")
        if hasattr(head, "base_layer"):
            raise UserError("an adapter on lm_head cannot be trained by SDRM: take lm_head out of target_modules")
        config = model.config.get_text_config()
        return cls(
            weight=_whole(head.weight),
            bias=None if getattr(head, "bias", None) is None else _whole(head.bias),
            scale=_logit_scale(config),
            softcap=getattr(config, "final_logit_softcapping", None),
            temperature=temperature,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, H] -> [n, V]``, in fp32 at least, differentiable; for a few positions only."""
        work = work_dtype(hidden)
        z = torch.nn.functional.linear(hidden.to(work), self.weight.to(work))
        return self.finish(z if self.bias is None else z + self.bias.to(work))

    def finish(self, z: Tensor) -> Tensor:
        """Logits from h W^T + b, of any shape."""
        if self.softcap:
            return torch.tanh(z * (self.scale / self.softcap)) * (self.softcap / self.temperature)
        return z * (self.scale / self.temperature)

    def finish_(self, z: Tensor) -> None:
        """`finish` in place, without the passes that would multiply by one."""
        if self.softcap:
            z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.scale != self.temperature:
            z.mul_(self.scale / self.temperature)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _logit_scale(config: Any) -> float:
    """Cohere, Muse Glimmer and Falcon-H1 name a factor; Granite and MiniCPM3 a divisor, HyperCLOVA X as a factor."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / scaling


def for_products(head: Head) -> Head:
    """The head without gradient, its weight in the type of autocast where that is on (made once, not per chunk)."""
    weight, device = head.weight.detach(), head.weight.device.type
    if torch.is_autocast_enabled(device):
        weight = weight.to(torch.get_autocast_dtype(device))
    return replace(head, weight=weight, bias=None if head.bias is None else head.bias.detach())


def project(hidden: Tensor, head: Head, buffer: Tensor) -> Tensor:
    """Write h W^T + b into the first rows of the buffer; ``[n, H] -> [n, V]``."""
    z = buffer[: len(hidden)]
    matmul(hidden, head.weight.t(), z)
    return z if head.bias is None else z.add_(head.bias)


def matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out = a b``, or ``out += a b``, summed and stored in out's precision whatever that of the factors."""
    beta = 1 if accumulate else 0
    if b.dtype == out.dtype:
        torch.addmm(out, a.to(out.dtype), b, beta=beta, out=out)
    elif out.is_cuda:
        torch.addmm(out, a.to(b.dtype), b, beta=beta, out_dtype=out.dtype, out=out)
    else:  # no such product on a CPU: b is widened a few columns at a time, never as a whole
        a = a.to(out.dtype)
        for columns in slices(b.shape[1], max(1, 2**23 // b.shape[0])):
            part = out[:, columns]
            torch.addmm(part, a, b[:, columns].to(out.dtype), beta=beta, out=part)


def work_dtype(hidden: Tensor) -> torch.dtype:
    """The type of logits and all that follows: fp32, or fp64 for hidden states in fp64."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def slices(n: int, size: int) -> Iterator[slice]:
    """Consecutive slices of ``size`` that cover ``n`` rows."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))
