"""Rotated keys and queries of Mamba-3, of B and C that all heads share.

    theta_t = theta_{t-1} + dt_t pi tanh(w_t),  k_t = R(theta_t) (norm(B_t) + b_B),  q_t = R(theta_t) (norm(C_t) + b_C)

for each head, where norm(x) = x / rms(x) times a weight. R(theta) rotates R pairs of channels, i and i + R, by one
angle a pair, and leaves the other N - 2 R as they are.

Source: Lahoti et al. 2026 (arXiv 2603.15569). Departure: a rotated pair is two channels R apart, not two neighbours,
which permutes channels.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.backend import TRITON_DTYPES, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_number, check_shapes
from subquad.kernels.norm import norm
from subquad.kernels.positions import at_least_float32, running_sum

__all__ = ["rotate_pairs", "rotated_keys", "turns"]


def rotated_keys(
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
    kept: list[Any] | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor]:
    """(k, q), both [batch, T, H, N] in `dtype`, slices of one tensor where Triton computes them.

    B, C:               [batch, T, N], with T >= 1 and shared by all heads.
    B_weight, C_weight: [N], those of the norms.
    B_bias, C_bias:     [H, N], one vector a head.
    dt:                 [batch, T, H], step sizes.
    w:                  [batch, T, R] with 1 <= R <= N / 2, shared by all heads; a step of one turns by pi tanh(w).
    eps:                what the norms add to the mean square.
    dtype:              that of k and q; None: that of B.
    kept:               an empty list, for calls that are made again in a backward pass: it gets what Triton prepares
                        from these tensors and autograd keeps as well, and a call with the same tensors reads it.
    backend:            triton takes float32, bfloat16 and float16 on a CUDA device, reads B, C and w as parts of a
                        projection, and keeps nothing as large as the results. torch computes the equations term by
                        term. auto takes triton wherever it can.

    All is computed in float32 at least and rounded once. Results and gradients are deterministic on both. ValueError
    for shapes that do not fit together, and where backend="triton" cannot run.
    """
    _check(B, C, B_weight, C_weight, B_bias, C_bias, dt, w)
    check_number("rotated_keys", "eps", eps)
    dtype = dtype or B.dtype
    tensors = (B, C, B_weight, C_weight, B_bias, C_bias, dt, w)
    obstacle = None if dtype in TRITON_DTYPES else f"gives float32, bfloat16 and float16, not {dtype}"
    if use_triton("rotated_keys", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.rotated_keys.triton import rotated_keys_triton

        with on_device_of(B):
            return rotated_keys_triton(tensors, float(eps), dtype, kept)
    B, C, B_weight, C_weight, B_bias, C_bias, dt, w = (at_least_float32(x) for x in tensors)
    theta = running_sum(dt.unsqueeze(-1) * turns(w).unsqueeze(-2))
    B, C = (norm(x, weight, eps=eps, backend="torch") for x, weight in ((B, B_weight), (C, C_weight)))
    k, q = rotate_pairs(theta, B.unsqueeze(-2) + B_bias, C.unsqueeze(-2) + C_bias)
    return k.to(dtype), q.to(dtype)


def turns(w: Tensor) -> Tensor:
    """pi tanh(w), in radians and in float32 or wider."""
    return math.pi * torch.tanh(at_least_float32(w))


def rotate_pairs(theta: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Each tensor that is given, [..., H, N], with its first R pairs of channels rotated by theta [..., H, R]."""
    pairs, cos, sin = theta.shape[-1], theta.cos(), theta.sin()
    rotated = []
    for x in given:
        first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
        rotated.append(torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1))
    return tuple(rotated)


def _check(
    B: Tensor,
    C: Tensor,
    B_weight: Tensor,
    C_weight: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    dt: Tensor,
    w: Tensor,
) -> None:
    if B.ndim != 3 or 0 in B.shape:
        raise ValueError(f"rotated_keys: B must be [batch, T, N] with at least one element, got {list(B.shape)}.")
    batch, length, states = B.shape
    if B_bias.ndim != 2 or B_bias.shape[0] == 0 or B_bias.shape[1] != states:
        raise ValueError(f"rotated_keys: B_bias must be [H, {states}] with H >= 1, got {list(B_bias.shape)}.")
    heads = B_bias.shape[0]
    if w.ndim != 3 or not 1 <= w.shape[2] <= states // 2:
        raise ValueError(
            f"rotated_keys: w must be [{batch}, {length}, R] with 1 <= R <= {states // 2}, half of N, "
            f"got {list(w.shape)}."
        )
    wanted: dict[str, tuple[Tensor, Allowed]] = {
        "C": (C, tuple(B.shape)), "C_bias": (C_bias, tuple(B_bias.shape)),
        "dt": (dt, (batch, length, heads)), "w": (w, (batch, length, w.shape[2])),
        "B_weight": (B_weight, (states,)), "C_weight": (C_weight, (states,)),
    }  # fmt: skip
    check_shapes("rotated_keys", wanted, to_go_with="B")
