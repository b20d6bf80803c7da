"""The equations as written, one position after the other; they are in the package docstring."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rotated_keys_reference(
    B: Tensor,
    C: Tensor,
    B_weight: Tensor,
    C_weight: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    dt: Tensor,
    w: Tensor,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator, computed in the dtypes of the arguments."""
    keys, queries, theta = [], [], torch.zeros_like(dt[:, 0, :, None] * w[:, 0, None])
    for t in range(B.shape[1]):
        theta = theta + dt[:, t, :, None] * math.pi * torch.tanh(w[:, t, None])
        keys.append(_rotated(_normed(B[:, t, None], eps) * B_weight + B_bias, theta))
        queries.append(_rotated(_normed(C[:, t, None], eps) * C_weight + C_bias, theta))
    dtype = dtype or B.dtype
    return torch.stack(keys, 1).to(dtype), torch.stack(queries, 1).to(dtype)


def _normed(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _rotated(x: Tensor, theta: Tensor) -> Tensor:
    """x [batch, H, N] with its first R pairs of channels rotated by theta [batch, H, R]."""
    pairs = theta.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    c, s = torch.cos(theta), torch.sin(theta)
    return torch.cat([a * c - b * s, a * s + b * c, rest], -1)
