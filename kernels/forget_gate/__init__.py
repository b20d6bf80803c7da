"""Forget gates of linear recurrences in log space, with their complements, in one pass.

    damped:   log a = log(sigmoid(x)) / damping,             1 - a = -(exp(log a) - 1)
    bounded:  log a = log(b + (1 - b) sigmoid(x)),           1 - a = (1 - b) sigmoid(-x)
              b = sum over 1 <= i <= layer of softmax_i(logits), one bound for each channel

Neither a nor 1 - a is computed from the other, so that none rounds to zero. Source: GSA paper (Zhang et al. 2024),
section 3.3 between equations 8 and 9, and Yang et al. 2023, section 4.4 (damped); Qin et al. 2023 (HGRN), section 3.3
(bounded).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_ELEMENT, NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import check_number
from subquad.kernels.positions import at_least_float32

__all__ = ["forget_gate"]


def forget_gate(
    x: Tensor,
    logits: Tensor | None = None,
    *,
    layer: int = 0,
    damping: float = 1.0,
    complement: bool = True,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor | None]:
    """(log a, 1 - a), both [..., D] in float32 or wider, of x [..., D]; None as the second without `complement`.

    logits:  [layers, D], for a bounded gate of a layer >= 1; then damping is 1.
    damping: the gate is the sigmoid to the power 1 / damping.
    backend: the Triton path has no gradient. `auto` takes it on a GPU where none is recorded.
    """
    if logits is not None and (logits.ndim != 2 or logits.shape[1] != x.shape[-1] or not 1 <= layer < len(logits)):
        raise ValueError(
            f"forget_gate: logits must be [layers, {x.shape[-1]}] with layers > layer >= 1, got {list(logits.shape)} "
            f"and layer={layer}."
        )
    check_number("forget_gate", "damping", damping, above=0)
    if damping != 1 and logits is not None:
        raise ValueError(f"forget_gate: damping must be 1 with logits, got {damping}.")
    obstacle = NO_GRADIENT if needs_gradient(x, logits) else None if x.numel() else NO_ELEMENT
    if (backend != "auto" or not torch.compiler.is_compiling()) and use_triton(
        "forget_gate", backend, x, logits, obstacle=obstacle
    ):
        from subquad.kernels.forget_gate.triton import forget_gate_triton

        with on_device_of(x):
            return forget_gate_triton(x, logits, layer, damping, complement)
    x = at_least_float32(x)
    if logits is None:
        log_a = F.logsigmoid(x) / damping
        return log_a, -torch.expm1(log_a) if complement else None
    closed = torch.sigmoid(-x)
    bound = logits.softmax(0)[1 : layer + 1].sum(0)
    log_a = torch.log(bound + (1 - bound) * torch.sigmoid(x))
    return log_a, (1 - bound) * closed if complement else None
