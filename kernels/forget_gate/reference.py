"""The gate as its equations say, in the dtype of its arguments; they are in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor


def forget_gate_reference(
    x: Tensor,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    log_rate: Tensor | None = None,
    *,
    layer: int = 0,
    damping: float = 1.0,
) -> tuple[Tensor, Tensor]:
    # -logaddexp(0, -x) is the logarithm of a sigmoid
    log_s, log_rest = -torch.logaddexp(torch.zeros_like(x), -x), -torch.logaddexp(torch.zeros_like(x), x)
    if log_rate is not None and bias is not None:
        softplus = torch.logaddexp(torch.zeros_like(x), x + bias)
        log_a = -(log_rate.exp().unsqueeze(-1) * softplus.unflatten(-1, (len(log_rate), -1))).flatten(-2)
        return log_a, -torch.expm1(log_a)
    if logits is None:
        return log_s / damping, -torch.expm1(log_s / damping)
    weights = torch.exp(logits - logits.amax(0))
    bound = (weights[1 : layer + 1] / weights.sum(0)).sum(0)
    return torch.log(bound + (1 - bound) * log_s.exp()), (1 - bound) * log_rest.exp()
