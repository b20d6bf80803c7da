"""Rotary positions: pairs of channels of queries and keys turned by angles that grow with the position.

    (x_i, x_{i+K/2}) -> (x_i cos - x_{i+K/2} sin, x_{i+K/2} cos + x_i sin),   cos = cos(t theta_i), sin = sin(t theta_i)

Source: Su et al. 2021 (RoFormer), equation 34. Channel i is paired with i + K/2 instead of its neighbour, which is a
permutation of channels.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_integers

__all__ = ["rotary", "rotate"]


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    time: Tensor,
    *,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """q and k [B, T, H, K] at the positions time [T] or [B, T], rotated; each keeps its dtype.

    cos, sin: tables [positions, K / 2], of which the Triton path has no gradient.
    time:     integers from 0 to positions - 1. They are not checked, because that would wait for the GPU: beyond the
              tables, the Triton path reads memory that is not theirs.
    backend:  the Triton path takes queries and keys of one shape, computes in float32 and rounds once. `auto` takes it
        on a GPU, but not inside `torch.compile`, which fuses the plain form.
    """
    _check(q, k, cos, sin, time)
    obstacle = None if q.shape == k.shape and q.numel() else "takes queries and keys of one shape, not empty"
    if needs_gradient(cos, sin):
        obstacle = "has no gradient of cos and sin"
    pays = not torch.compiler.is_compiling()
    if use_triton("rotary", backend, q, k, cos, sin, beside=(time,), obstacle=obstacle, is_faster=pays):
        from subquad.kernels.rotary.triton import rotary_triton

        with on_device_of(q):
            return rotary_triton(q, k, cos, sin, time)
    cos, sin = (F.embedding(time, table).unsqueeze(-2) for table in (cos, sin))
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [..., K] by the angles whose cosines and sines broadcast to [..., K / 2], in plain PyTorch."""
    x_1, x_2 = x.chunk(2, dim=-1)
    return torch.cat([x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin], dim=-1).to(x.dtype)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[3] % 2:
        raise ValueError(f"rotary: q and k are [B, T, H, K] with an even K, got {list(q.shape)} and {list(k.shape)}.")
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != q.shape[3] // 2:
        raise ValueError(
            f"rotary: cos and sin are [positions, {q.shape[3] // 2}], got {list(cos.shape)} and {list(sin.shape)}."
        )
    check_integers("rotary", "time", time)
    if time.shape not in (q.shape[1:2], q.shape[:2]):
        raise ValueError(f"rotary: time is [T] or [B, T] with T={q.shape[1]}, got {list(time.shape)}.")
