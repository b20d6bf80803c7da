"""The equations of the package docstring in the dtype of the arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rwkv7_inputs_reference(
    r: Tensor,
    k: Tensor,
    w: Tensor,
    a: Tensor,
    w_0: Tensor,
    a_0: Tensor,
    xi: Tensor,
    alpha: Tensor,
    rho: Tensor,
    *,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, write, plain and log_decay of `delta_rule`, and the strength; arguments and results as in the package."""

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, head_dim)

    log_decay = heads(-math.exp(-0.5) / (1 + torch.exp(-(w_0 + w))))
    rate = heads(1 / (1 + torch.exp(-(a_0 + a))))
    k, r, xi, alpha, rho = (heads(x) for x in (k, r, xi, alpha, rho))
    c = k * xi
    c = c / torch.sqrt(c.square().sum(-1, keepdim=True) + 1e-24)
    key = k * (1 + (rate - 1) * alpha)
    return r, c * torch.exp(-log_decay), rate * c, key, log_decay, (r * rho * key).sum(-1)
