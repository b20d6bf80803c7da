"""The equations as written, one position after the other; they are in the package docstring."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated_keys_reference(
    B: Tensor,
    C: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    theta: Tensor,
    now: Tensor,
    later: Tensor,
    log_decay: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as in the public operator, computed in the dtypes of the arguments."""
    keys, queries, own = [], [], []
    for t in range(B.shape[1]):
        k = _rotated(B[:, t, None] + B_bias, theta[:, t])
        q = _rotated(C[:, t, None] + C_bias, theta[:, t])
        keys.append((now[:, t] + later[:, t])[..., None] * k)
        own.append(now[:, t] * (q * k).sum(-1))
        queries.append(torch.exp(log_decay[:, t])[..., None] * q)
    queries = [*queries[1:], torch.zeros_like(queries[0])]
    dtype = dtype or B.dtype
    return torch.stack(keys, 1).to(dtype), torch.stack(queries, 1).to(dtype), torch.stack(own, 1)


def _rotated(x: Tensor, theta: Tensor) -> Tensor:
    """x [batch, H, N] with its first R pairs of channels rotated by theta [batch, H, R]."""
    pairs = theta.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    c, s = torch.cos(theta), torch.sin(theta)
    return torch.cat([a * c - b * s, a * s + b * c, rest], -1)
