"""The rotation as written, one position after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Arguments and results as in the public operator, computed in the dtypes of the arguments."""
    rows = time.expand(q.shape[:2])
    return _rotated(q, cos, sin, rows), _rotated(k, cos, sin, rows)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor) -> Tensor:
    half = x.shape[3] // 2
    outputs = []
    for t in range(x.shape[1]):
        c, s = cos[rows[:, t]].unsqueeze(1), sin[rows[:, t]].unsqueeze(1)
        a, b = x[:, t, :, :half], x[:, t, :, half:]
        outputs.append(torch.cat([a * c - b * s, b * c + a * s], -1))
    return torch.stack(outputs, 1).to(x.dtype)
