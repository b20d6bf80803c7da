"""Causal softmax attention as written: one loop over the queries (equation and source: the package docstring)."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """q, k, v [B, T, H, K] to o [B, T, H, K], computed in the dtypes of the arguments."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for t in range(q.shape[1]):
        logits = scale * (q[:, t, None] * k[:, : t + 1]).sum(-1, keepdim=True)
        outputs.append((logits.softmax(1) * v[:, : t + 1]).sum(1))
    return torch.stack(outputs, dim=1)
