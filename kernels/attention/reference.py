"""Causal softmax attention as written: one loop over the queries (equation and source: the package docstring)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor | None = None,
    window: int | Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """q [B, P, H, K] and k, v [B, T, H, K] to o [B, P, H, K], computed in the dtypes of the arguments.

    positions: [B, P]; None: P = T, and query i stands at i.
    window: how many keys a query sees, the one at its own position included, in all heads or, as a tensor [H], in each;
        None: all up to there.
    """
    length = k.shape[1]
    window = length if window is None else window
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = torch.arange(length, device=k.device)
    outputs = []
    for i in range(q.shape[1]):
        now = torch.full_like(keys[:1], i) if positions is None else positions[:, i]
        behind = (now[:, None] - keys)[..., None]
        logits = scale * (q[:, i, None] * k).sum(-1)
        logits = logits.masked_fill((behind < 0) | (behind >= window), -math.inf)
        outputs.append((logits.softmax(1)[..., None] * v).sum(1))
    return torch.stack(outputs, dim=1)


def attention_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    window: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, H, K], and the keys and values with the new position, row by row; the arguments are left as they are.

    window: [H]: each head sees so many last positions, the new one included; with None it sees all.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outputs, caches = [], []
    for b, n in enumerate(count.tolist()):
        now = [q[b], k[b]]
        if cos is not None and sin is not None:
            halves = [x.chunk(2, dim=-1) for x in now]
            rotated = [torch.cat([x * cos[n] - y * sin[n], y * cos[n] + x * sin[n]], dim=-1) for x, y in halves]
            now = [x.to(q.dtype) for x in rotated]
        parts = ((keys[b], now[1]), (values[b], v[b]))
        filled = [torch.cat([cache[:n], x[None].to(cache.dtype), cache[n + 1 :]]) for cache, x in parts]
        logits = scale * (now[0] * filled[0][: n + 1]).sum(-1, keepdim=True)
        if window is not None:
            behind = n - torch.arange(n + 1, device=keys.device)
            logits = logits.masked_fill(behind[:, None, None] >= window[:, None], -math.inf)
        outputs.append((logits.softmax(0) * filled[1][: n + 1]).sum(0))
        caches.append(filled)
    return torch.stack(outputs), torch.stack([x for x, _ in caches]), torch.stack([x for _, x in caches])
