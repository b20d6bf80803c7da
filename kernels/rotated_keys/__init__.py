"""Rotated keys and queries of Mamba-3, of B and C that all heads share; with what a position reads of itself.

    k_t = R(theta_t) (B_t + b_B),   q_t = R(theta_t) (C_t + b_C)                     for each head
    keys_t = (now_t + later_t) k_t,   queries_t = exp(log_decay_{t+1}) q_{t+1},   own_t = now_t (q_t . k_t)

R(theta) rotates R pairs of channels, i and i + R, by one angle a pair, and leaves the other N - 2 R as they are.
Queries stand one position early, because there a linear attention that reads its state after writing it gives what
q_t reads before position t is written. So q_1 goes unused, and the last position has a query of zeros.

Source: Lahoti et al. 2026 (arXiv 2603.15569), the rotated B and C and the trapezoidal rule, in the form of
models/mamba3.py. Departure: a rotated pair is two channels R apart, not two neighbours, which permutes channels.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import TRITON_DTYPES, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_shapes

__all__ = ["rotate_pairs", "rotated_keys"]


def rotated_keys(
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
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, queries, own), of which keys and queries are [batch, T, H, N] in `dtype` and own [batch, T, H].

    B, C:             [batch, T, N], with T >= 1 and shared by all heads.
    B_bias, C_bias:   [H, N], one vector a head.
    theta:            [batch, T, H, R] with 1 <= R <= N / 2: angles, in radians.
    now, later:       [batch, T, H]: weights of a key for its own position and for the next one.
    log_decay:        [batch, T, H].
    dtype:            that of keys and queries; None: that of B. own is float32, or wider where an input is.
    backend:          triton takes float32, bfloat16 and float16 on a CUDA device; it takes q . k before the rotation,
                      which does not change it, and keeps nothing as large as the results. torch computes the
                      equations term by term. auto takes triton wherever it can.

    All is computed in float32 at least and rounded once. Results and gradients are deterministic on both. ValueError
    for shapes that do not fit together, and where backend="triton" cannot run.
    """
    _check(B, C, B_bias, C_bias, theta, now, later, log_decay)
    dtype = dtype or B.dtype
    tensors = (B, C, B_bias, C_bias, theta, now, later, log_decay)
    obstacle = None if dtype in TRITON_DTYPES else f"gives float32, bfloat16 and float16, not {dtype}"
    if use_triton("rotated_keys", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.rotated_keys.triton import rotated_keys_triton

        with on_device_of(B):
            return rotated_keys_triton(*tensors, dtype)
    B, C, B_bias, C_bias, theta, now, later, log_decay = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors
    )
    k, q = rotate_pairs(theta, B.unsqueeze(-2) + B_bias, C.unsqueeze(-2) + C_bias)
    keys = (k * (now + later).unsqueeze(-1)).to(dtype)
    queries = (q * log_decay.exp().unsqueeze(-1)).to(dtype)
    own = now * (q * k).sum(-1)
    return keys, F.pad(queries[:, 1:], (0, 0, 0, 0, 0, 1)), own


def rotate_pairs(theta: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """Each tensor that is given, [..., H, N], with its first R pairs of channels rotated by theta [..., H, R]."""
    pairs, cos, sin = theta.shape[-1], theta.cos(), theta.sin()
    rotated = []
    for x in given:
        first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
        rotated.append(torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1))
    return tuple(rotated)


def _check(
    B: Tensor, C: Tensor, B_bias: Tensor, C_bias: Tensor, theta: Tensor, now: Tensor, later: Tensor, log_decay: Tensor
) -> None:
    if B.ndim != 3 or 0 in B.shape:
        raise ValueError(f"rotated_keys: B must be [batch, T, N] with at least one element, got {list(B.shape)}.")
    batch, length, states = B.shape
    if B_bias.ndim != 2 or B_bias.shape[0] == 0 or B_bias.shape[1] != states:
        raise ValueError(f"rotated_keys: B_bias must be [H, {states}] with H >= 1, got {list(B_bias.shape)}.")
    heads = B_bias.shape[0]
    if theta.shape[:3] != (batch, length, heads) or theta.ndim != 4 or not 1 <= theta.shape[3] <= states // 2:
        raise ValueError(
            f"rotated_keys: theta must be [{batch}, {length}, {heads}, R] with 1 <= R <= {states // 2}, half of N, "
            f"got {list(theta.shape)}."
        )
    of_heads = (batch, length, heads)
    wanted: dict[str, tuple[Tensor, Allowed]] = {
        "C": (C, tuple(B.shape)), "C_bias": (C_bias, tuple(B_bias.shape)), "now": (now, of_heads),
        "later": (later, of_heads), "log_decay": (log_decay, of_heads),
    }  # fmt: skip
    check_shapes("rotated_keys", wanted, to_go_with="B")
