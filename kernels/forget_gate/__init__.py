"""Forget gates of linear recurrences in log space, with their complements, in one pass.

    damped:   log a = log(sigmoid(x)) / damping,             1 - a = -(exp(log a) - 1)
    rated:    log a = -exp(log_rate) softplus(x + bias),     1 - a = -(exp(log a) - 1)
    bounded:  log a = log(b + (1 - b) sigmoid(x)),           1 - a = (1 - b) sigmoid(-x)
              b = sum over 1 <= i <= layer of softmax_i(logits), one bound for each channel

Neither a nor 1 - a is computed from the other, so that none rounds to zero. Source: GSA paper (Zhang et al. 2024),
section 3.3 between equations 8 and 9, and Yang et al. 2023, section 4.4 (damped); Yang et al. 2024b (Gated DeltaNet,
arXiv 2412.06464) and Kimi Team 2025 (KDA, arXiv 2510.26692), whose A is log_rate (rated); Qin et al. 2023 (HGRN),
section 3.3 (bounded).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import NO_ELEMENT, on_device_of, use_triton
from subquad.kernels.checks import check_number, check_shapes
from subquad.kernels.positions import at_least_float32, bounded_exp

__all__ = ["forget_gate"]


def forget_gate(
    x: Tensor,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    log_rate: Tensor | None = None,
    *,
    layer: int = 0,
    damping: float = 1.0,
    complement: bool = True,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor | None]:
    """(log a, 1 - a), both [..., D] in float32 or wider, of x [..., D]; None as the second without `complement`.

    logits:  [layers, D], for a bounded gate of a layer >= 1; then damping is 1. Where bound and sigmoid(x) are both
             below e^-70, gradients in float32 are infinite, and below e^-87 log a is: it is computed from a.
    bias:    [D] with log_rate [H], of which each is that of D / H neighbouring channels: a rated gate, without logits
             and with damping 1. Rates are at most e^80, which leave nothing of a state and have finite gradients.
    damping: the gate is the sigmoid to the power 1 / damping.
    backend: `auto` takes the Triton path on a GPU, but not inside `torch.compile`, which fuses the plain form. It is
             one pass in each direction and keeps nothing but its inputs. Both paths are deterministic.

    Everything is computed in float32 at least. Raises ValueError for shapes or options that do not fit.
    """
    if logits is not None and (logits.ndim != 2 or logits.shape[1] != x.shape[-1] or not 1 <= layer < len(logits)):
        raise ValueError(
            f"forget_gate: logits must be [layers, {x.shape[-1]}] with layers > layer >= 1, got {list(logits.shape)} "
            f"and layer={layer}."
        )
    check_number("forget_gate", "damping", damping, above=0)
    if damping != 1 and (logits is not None or log_rate is not None):
        raise ValueError(f"forget_gate: damping must be 1 with logits or a rate, got {damping}.")
    _check_rate(x, logits, bias, log_rate)
    obstacle = None if x.numel() else NO_ELEMENT
    pays = not torch.compiler.is_compiling()
    if use_triton("forget_gate", backend, x, logits, bias, log_rate, obstacle=obstacle, is_faster=pays):
        from subquad.kernels.forget_gate.triton import forget_gate_triton

        with on_device_of(x):
            return forget_gate_triton(x, logits, bias, log_rate, layer, damping, complement)
    x = at_least_float32(x)
    if logits is None:
        if log_rate is None or bias is None:
            log_a = F.logsigmoid(x) / damping
        else:
            dt = F.softplus(x + at_least_float32(bias)).unflatten(-1, (len(log_rate), -1))
            log_a = (-bounded_exp(log_rate).unsqueeze(-1) * dt).flatten(-2)
        return log_a, -torch.expm1(log_a) if complement else None
    closed = torch.sigmoid(-x)
    bound = at_least_float32(logits).softmax(0)[1 : layer + 1].sum(0)
    log_a = torch.log(bound + (1 - bound) * torch.sigmoid(x))
    return log_a, (1 - bound) * closed if complement else None


def _check_rate(x: Tensor, logits: Tensor | None, bias: Tensor | None, log_rate: Tensor | None) -> None:
    if (bias is None) != (log_rate is None) or (log_rate is not None and logits is not None):
        raise ValueError("forget_gate: bias and log_rate go together, and without logits; give both or none of them.")
    check_shapes("forget_gate", {"bias": (bias, tuple(x.shape[-1:]))}, to_go_with="x")
    if log_rate is not None and (log_rate.ndim != 1 or len(log_rate) == 0 or x.shape[-1] % len(log_rate)):
        width, shape = x.shape[-1], list(log_rate.shape)
        raise ValueError(f"forget_gate: log_rate must be [H] with H a divisor of {width}, got {shape}.")
