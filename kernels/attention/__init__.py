"""Causal softmax attention, the quadratic yardstick of every other operator.

    o_t = sum_{j <= t} softmax_j(scale q_t k_j) v_j

Source: Vaswani et al. 2017, section 3.2.1, equation 1, with the mask of section 3.2.3.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.reference import attention_reference
from kernels.autograd import needs_gradient
from kernels.backend import NO_GRADIENT, on_device_of, record, use_triton

__all__ = ["attention", "attention_reference", "attention_step"]

MAX_HEAD_TRITON = 256
"""Maximum K of the Triton kernels."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """o [B, T, H, K] in the dtype of v, from q, k, v [B, T, H, K], any T >= 1; scale: K^-0.5 where None.

    Runs torch's own fused kernels, which take half precision without forming the T by T matrix.
    Raises ValueError for shapes or options that do not fit.
    """
    if q.dim() != 4 or q.shape[1] < 1 or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"attention: q, k and v must be [B, T, H, K], all of one shape and T >= 1, got {shapes}.")
    if backend == "triton":
        raise ValueError("attention: no Triton path, torch has a fused one; use backend='auto' or 'torch'.")
    if backend not in ("auto", "torch"):
        raise ValueError(f"attention: backend={backend!r} is not one of 'auto', 'torch', 'triton'.")
    record("attention", "torch")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)


def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scale: float | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One position, for decoding: o [B, H, K] in the dtype of v; keys, values and count are updated in place.

    q, k, v:      [B, H, K], of the new position.
    keys, values: [B, capacity, H, K], of which the first count[b] positions of row b are read. What lies behind them
                  is finite. The new key (rotated) and value are written there, and the count grows by one.
    count:        [B], int64. In a cache that is full, the last position is overwritten.
    cos, sin:     [positions, K / 2]. Where they are given, q and k are rotated: channels i and i + K / 2 by the angle i
                  of their position.
    scale:        K^-0.5 where None.
    backend:      the Triton kernels take K up to 256 and have no gradient; auto takes plain PyTorch where one is
                  recorded. Neither reads the count on the host.

    Raises ValueError for shapes that do not fit.
    """
    _check_step(q, k, v, keys, values, count, cos, sin)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, keys, values, cos, sin)
    obstacle = None
    if needs_gradient(*tensors):
        obstacle = NO_GRADIENT
    elif q.shape[-1] > MAX_HEAD_TRITON:
        obstacle = f"takes K up to {MAX_HEAD_TRITON}, got {q.shape[-1]}"
    elif keys.stride() != values.stride() or keys.stride(3) != 1:
        obstacle = "takes keys and values of equal strides with contiguous channels"
    if use_triton("attention_step", backend, *tensors, obstacle=obstacle):
        from kernels.attention.triton import attention_step_triton

        with on_device_of(q):
            return attention_step_triton(q, k, v, keys, values, count, cos=cos, sin=sin, scale=scale)
    now = count.clamp(max=keys.shape[1] - 1)
    if cos is not None and sin is not None:
        q, k = (_rotate(x, cos, sin, now) for x in (q, k))
    rows = torch.arange(len(count), device=count.device)
    keys[rows, now], values[rows, now] = k.to(keys.dtype), v.to(values.dtype)
    seen = torch.arange(keys.shape[1], device=count.device) <= now[:, None, None, None]
    count += 1
    past_keys, past_values = (x.to(q.dtype).transpose(1, 2) for x in (keys, values))
    scores = q.unsqueeze(2) @ past_keys.mT * scale
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ past_values).squeeze(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, time: Tensor) -> Tensor:
    """x [B, H, K] at the positions time [B], rotated, in the dtype of x."""
    c, s = (F.embedding(time, table).unsqueeze(1) for table in (cos, sin))
    x_1, x_2 = x.chunk(2, dim=-1)
    return torch.cat([x_1 * c - x_2 * s, x_2 * c + x_1 * s], dim=-1).to(x.dtype)


def _check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    if q.dim() != 3 or k.shape != q.shape or v.shape != q.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"attention_step: q, k and v must be [B, H, K], all of one shape, got {shapes}.")
    batch, heads, size = q.shape
    capacity = keys.shape[1] if keys.dim() == 4 else 0
    wanted = {"keys": (keys, (batch, capacity, heads, size)), "values": (values, (batch, capacity, heads, size))}
    for name, (tensor, shape) in {**wanted, "count": (count, (batch,))}.items():
        if tuple(tensor.shape) != shape or capacity < 1:
            raise ValueError(f"attention_step: {name} must be {list(shape)}, got {list(tensor.shape)}.")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (table.dim() != 2 or table.shape[1] * 2 != size or table.shape[0] < capacity):
            raise ValueError(
                f"attention_step: {name} must be [positions, {size // 2}] with at least {capacity} positions, "
                f"got {list(table.shape)}."
            )
    if (cos is None) != (sin is None):
        raise ValueError("attention_step: cos and sin are given together or not at all.")
