"""The equations of the package docstring, position by position, in the dtype of the arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rwkv7_inputs_reference(
    r: Tensor,
    k: Tensor,
    v: Tensor,
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
    """q, k, v, write and log_decay of two steps a position, and own; arguments and results as in the package."""

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], -1, head_dim)

    log_decay = heads(-math.exp(-0.5) / (1 + torch.exp(-(w_0 + w))))
    rate = heads(1 / (1 + torch.exp(-(a_0 + a))))
    k, r, v, xi, alpha, rho = (heads(x) for x in (k, r, v, xi, alpha, rho))
    c = k * xi
    c = c / torch.sqrt(c.square().sum(-1, keepdim=True) + 1e-24)
    key = k * (1 + (rate - 1) * alpha)
    own = (r * rho * key).sum(-1, keepdim=True) * v
    nothing = torch.zeros_like(v)
    results: list[list[Tensor]] = [[], [], [], [], []]
    for t in range(r.shape[1]):
        removing = (nothing[:, t], c[:, t] * torch.exp(-log_decay[:, t]), nothing[:, t], rate[:, t] * c[:, t])
        writing = (r[:, t], nothing[:, t], v[:, t], key[:, t])
        for steps, first, second in zip(
            results, (*removing, log_decay[:, t]), (*writing, torch.zeros_like(log_decay[:, t])), strict=True
        ):
            steps.extend((first, second))
    q, reading, value, write, decays = (torch.stack(steps, 1) for steps in results)
    return q, reading, value, write, decays, own
