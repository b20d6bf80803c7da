"""Computes all of RWKV-6 that lies between its linear maps and `gated_linear_attention`, and what the bonus adds.

    L_t = -exp(w_0 + w_t)                                log-decay, for every channel
    q_t = r_{t+1},   q_T = 0                             queries, which read the state before their position is written
    own_t = (sum_i r_t,i bonus_i k_t,i) v_t              what a position adds to its own output

with the sum over the K channels of every head. k and v are returned as they are. They are results because their
gradients from `gated_linear_attention` are then added to those from `own` in the pass that computes the latter.

Source: "Eagle and Finch" (Peng et al. 2024, arXiv 2404.05892), section 4.2, where w_0 is lambda and the bonus is u; w
is the output of its low-rank map, and r, k and v those of its linear maps. It is one operator because each of its parts
passes over all of [B, T, D] once or twice. The queries are moved because `gated_linear_attention` reads its state
behind the position that it writes: its output for q_{t-1} is r_t S_{t-1}, which is what position t needs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.positions import at_least_float32, check_positions

__all__ = ["LinearAttentionInputs", "Position", "rwkv6_inputs", "rwkv6_position"]

MAX_KEYS = 256
"""Maximum K of the Triton kernels, which hold whole heads in registers."""


class Position(NamedTuple):
    """The recurrence and its output need these besides r, k and v at each position. Both are [..., H, K] in float32 or
    wider."""

    log_decay: Tensor
    """L."""
    own: Tensor
    """The position adds this vector to its output o_t."""


class LinearAttentionInputs(NamedTuple):
    """The inputs of `gated_linear_attention`, and `own`. All are [B, T, H, K]."""

    q: Tensor
    """r, moved back by one position, with zeros at the last position."""
    k: Tensor
    v: Tensor
    log_decay: Tensor
    """The dtype is float32 or wider; q, k and v have the dtypes of r, k and v."""
    own: Tensor
    """Every position adds its vector to its output o_t, in float32 or wider."""


def rwkv6_inputs(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    w_0: Tensor,
    bonus: Tensor,
    *,
    head_dim: int,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> LinearAttentionInputs:
    """q, k, v and log_decay of `gated_linear_attention`, and own, by the equations of this module.

    r, k, v, w: [B, T, D] with D = H K and K = head_dim.
    w_0, bonus: [D].
    backend: the Triton path takes K up to 256 in float32, bfloat16 and float16. It computes in float32, rounds once,
             and keeps nothing but its inputs for the backward pass. It copies what is not contiguous. `auto` takes it
             wherever it can. Both paths are deterministic.

    log_decay and own are computed in float32 at least, also under autocast. Raises ValueError for shapes that do not
    fit.
    """
    check_positions(
        "rwkv6_inputs", {"r": r, "k": k, "v": v, "w": w}, {"w_0": w_0, "bonus": bonus}, head_dim, sequence=True
    )
    tensors = (r, k, v, w, w_0, bonus)
    obstacle = f"takes K up to {MAX_KEYS}, got K={head_dim}" if head_dim > MAX_KEYS else None
    if use_triton("rwkv6_inputs", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.rwkv6_inputs.triton import rwkv6_inputs_triton

        with on_device_of(r):
            return LinearAttentionInputs(*rwkv6_inputs_triton(tensors, head_dim))
    at = _position(tensors, head_dim)
    r, k, v = (x.unflatten(-1, (-1, head_dim)) for x in (r, k, v))
    return LinearAttentionInputs(F.pad(r[:, 1:], (0, 0, 0, 0, 0, 1)), k, v, at.log_decay, at.own)


def rwkv6_position(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, w_0: Tensor, bonus: Tensor, *, head_dim: int
) -> Position:
    """log_decay and own alone, for decoding: r, k, v, w are [..., D]. It is plain PyTorch.

    Raises ValueError for shapes that do not fit.
    """
    check_positions(
        "rwkv6_position", {"r": r, "k": k, "v": v, "w": w}, {"w_0": w_0, "bonus": bonus}, head_dim, sequence=False
    )
    return _position((r, k, v, w, w_0, bonus), head_dim)


def _position(tensors: tuple[Tensor, ...], head_dim: int) -> Position:
    r, k, v, w, w_0, bonus = tensors
    heads = (-1, head_dim)
    log_decay = -torch.exp(at_least_float32(w_0) + at_least_float32(w))
    r, k, v, log_decay = (x.unflatten(-1, heads) for x in (r, k, v, log_decay))
    own = (at_least_float32(r) * at_least_float32(bonus).view(heads) * at_least_float32(k)).sum(-1, keepdim=True)
    return Position(log_decay, own * at_least_float32(v))
