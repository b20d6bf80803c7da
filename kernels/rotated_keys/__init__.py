"""Rotated keys and queries of Mamba-3, of B and C that all heads share.

    theta_t = theta_{t-1} + dt_t turn_t,   k_t = R(theta_t) (B_t + b_B),   q_t = R(theta_t) (C_t + b_C)   for each head

R(theta) rotates R pairs of channels, i and i + R, by one angle a pair, and leaves the other N - 2 R as they are.

Source: Lahoti et al. 2026 (arXiv 2603.15569). Departure: a rotated pair is two channels R apart, not two neighbours,
which permutes channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from subquad.kernels.backend import TRITON_DTYPES, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_shapes
from subquad.kernels.positions import running_sum

__all__ = ["rotate_pairs", "rotated_keys"]


def rotated_keys(
    B: Tensor,
    C: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    dt: Tensor,
    turn: Tensor,
    *,
    dtype: torch.dtype | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(k, q), both [batch, T, H, N] in `dtype`, slices of one tensor where Triton computes them.

    B, C:           [batch, T, N], with T >= 1 and shared by all heads.
    B_bias, C_bias: [H, N], one vector a head.
    dt:             [batch, T, H], step sizes.
    turn:           [batch, T, R] with 1 <= R <= N / 2, radians in a step of one, shared by all heads.
    dtype:          that of k and q; None: that of B.
    backend:        triton takes float32, bfloat16 and float16 on a CUDA device, adds angles up in its kernels and keeps
                    nothing as large as the results. torch computes the equations term by term. auto takes triton
                    wherever it can.

    All is computed in float32 at least and rounded once. Results and gradients are deterministic on both. ValueError
    for shapes that do not fit together, and where backend="triton" cannot run.
    """
    _check(B, C, B_bias, C_bias, dt, turn)
    dtype = dtype or B.dtype
    tensors = (B, C, B_bias, C_bias, dt, turn)
    obstacle = None if dtype in TRITON_DTYPES else f"gives float32, bfloat16 and float16, not {dtype}"
    if use_triton("rotated_keys", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.rotated_keys.triton import rotated_keys_triton

        with on_device_of(B):
            return rotated_keys_triton(*tensors, dtype)
    B, C, B_bias, C_bias, dt, turn = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
    theta = running_sum(dt.unsqueeze(-1) * turn.unsqueeze(-2))
    k, q = rotate_pairs(theta, B.unsqueeze(-2) + B_bias, C.unsqueeze(-2) + C_bias)
    return k.to(dtype), q.to(dtype)


def rotate_pairs(theta: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Each tensor that is given, [..., H, N], with its first R pairs of channels rotated by theta [..., H, R]."""
    pairs, cos, sin = theta.shape[-1], theta.cos(), theta.sin()
    rotated = []
    for x in given:
        first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
        rotated.append(torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1))
    return tuple(rotated)


def _check(B: Tensor, C: Tensor, B_bias: Tensor, C_bias: Tensor, dt: Tensor, turn: Tensor) -> None:
    if B.ndim != 3 or 0 in B.shape:
        raise ValueError(f"rotated_keys: B must be [batch, T, N] with at least one element, got {list(B.shape)}.")
    batch, length, states = B.shape
    if B_bias.ndim != 2 or B_bias.shape[0] == 0 or B_bias.shape[1] != states:
        raise ValueError(f"rotated_keys: B_bias must be [H, {states}] with H >= 1, got {list(B_bias.shape)}.")
    heads = B_bias.shape[0]
    if turn.ndim != 3 or not 1 <= turn.shape[2] <= states // 2:
        raise ValueError(
            f"rotated_keys: turn must be [{batch}, {length}, R] with 1 <= R <= {states // 2}, half of N, "
            f"got {list(turn.shape)}."
        )
    wanted: dict[str, tuple[Tensor, Allowed]] = {
        "C": (C, tuple(B.shape)), "C_bias": (C_bias, tuple(B_bias.shape)),
        "dt": (dt, (batch, length, heads)), "turn": (turn, (batch, length, turn.shape[2])),
    }  # fmt: skip
    check_shapes("rotated_keys", wanted, to_go_with="B")
