"""Computes all of RWKV-7 that lies between its linear maps and `delta_rule`, and the weight of a position's own value.

    L = -exp(-1/2) sigmoid(w_0 + w),   e = sigmoid(a_0 + a)            log-decay and rate
    c = k xi / |k xi|,                 k~ = k (1 + (e - 1) alpha)      what is removed, and the key
    b = sum_i rho_i r_i k~_i                                           how much of its v a position adds to its output

with |k xi| and the sum over the K channels of every head.

The recurrence S_t = diag(exp L_t) S_{t-1} - (e_t c_t)^T (c_t S_{t-1}) + k~_t^T v_t is that of `delta_rule` for

    q = r,   k = c exp(-L),   write = e c,   plain = k~,   log_decay = L

with factors of one (`kernels.delta_rule.generalised`). r is not copied. It is a result because its gradient from
`delta_rule` is then added to that from b in the pass that computes the latter.

Source: Peng et al. 2025 (arXiv 2503.14456), section 4; w and a are the outputs of its low-rank maps, and k and r
those of its linear maps. It is one operator because each of its parts passes over all of [B, T, D] once or twice.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.norm import norm
from subquad.kernels.positions import at_least_float32, check_positions

__all__ = ["DeltaRuleInputs", "Position", "rwkv7_inputs", "rwkv7_position"]

MAX_KEYS = 256
"""Maximum K of the Triton kernels, which hold whole heads in registers."""
EPS = 1e-24
"""Is added to the square of |k xi|, so that a key of zeros removes nothing."""


class Position(NamedTuple):
    """The recurrence reads these vectors at each position. All are [..., H, K] in float32 or wider."""

    k: Tensor
    """k~."""
    remove: Tensor
    """-c."""
    add: Tensor
    """e c."""
    log_decay: Tensor
    """L."""
    strength: Tensor
    """b, [..., H]: the position adds b v to the norm of its output o_t."""


class DeltaRuleInputs(NamedTuple):
    """The inputs of `delta_rule` by the names of its arguments, [B, T, H, K], and b.

    k, write and plain have the dtype of k.
    """

    q: Tensor
    """r, which is not copied where it is dense."""
    k: Tensor
    """c exp(-L): the state decays by exp(L) before it is read, and what is removed was held before that."""
    write: Tensor
    """e c."""
    plain: Tensor
    """k~."""
    log_decay: Tensor
    """L, in float32 or wider."""
    strength: Tensor
    """b [B, T, H], in float32 or wider: every position adds b v to the norm of its output."""


def rwkv7_inputs(
    r: Tensor,
    k: Tensor,
    w: Tensor,
    a: Tensor,
    w_0: Tensor,
    a_0: Tensor,
    xi: Tensor,
    alpha: Tensor,
    rho: Tensor,
    *,
    head_dim: int,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> DeltaRuleInputs:
    """q, k, write, plain and log_decay of `delta_rule`, and the strength, by the equations of this module.

    r, k, w, a:              [B, T, D] with D = H K and K = head_dim.
    w_0, a_0, xi, alpha, rho: [D].
    backend: the Triton path takes K up to 256 in float32, bfloat16 and float16. It computes in float32, rounds once,
             and keeps nothing but its inputs for the backward pass. It copies what is not contiguous. `auto` takes it
             wherever it can. Both paths are deterministic.

    Everything is computed in float32 at least, also under autocast. Raises ValueError for shapes that do not fit.
    """
    check_positions(
        "rwkv7_inputs",
        {"r": r, "k": k, "w": w, "a": a},
        {"w_0": w_0, "a_0": a_0, "xi": xi, "alpha": alpha, "rho": rho},
        head_dim,
        sequence=True,
    )
    tensors = (r, k, w, a, w_0, a_0, xi, alpha, rho)
    obstacle = f"takes K up to {MAX_KEYS}, got K={head_dim}" if head_dim > MAX_KEYS else None
    if use_triton("rwkv7_inputs", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.rwkv7_inputs.triton import rwkv7_inputs_triton

        with on_device_of(r):
            return DeltaRuleInputs(*rwkv7_inputs_triton(tensors, head_dim))
    at = _position(tensors, head_dim, "auto" if backend == "auto" else "torch")
    reading = -at.remove * torch.exp(-at.log_decay)
    reading, write, plain = (x.to(k.dtype) for x in (reading, at.add, at.k))
    return DeltaRuleInputs(r.unflatten(-1, (-1, head_dim)), reading, write, plain, at.log_decay, at.strength)


def rwkv7_position(
    r: Tensor,
    k: Tensor,
    w: Tensor,
    a: Tensor,
    w_0: Tensor,
    a_0: Tensor,
    xi: Tensor,
    alpha: Tensor,
    rho: Tensor,
    *,
    head_dim: int,
) -> Position:
    """Computes what the recurrence reads at single positions, for decoding, in plain PyTorch. r, k, w, a: [..., D].

    Raises ValueError for shapes that do not fit.
    """
    check_positions(
        "rwkv7_position",
        {"r": r, "k": k, "w": w, "a": a},
        {"w_0": w_0, "a_0": a_0, "xi": xi, "alpha": alpha, "rho": rho},
        head_dim,
        sequence=False,
    )
    return _position((r, k, w, a, w_0, a_0, xi, alpha, rho), head_dim, "auto")


def _position(tensors: tuple[Tensor, ...], head_dim: int, backend: Literal["auto", "torch"]) -> Position:
    r, k, w, a, w_0, a_0, xi, alpha, rho = tensors
    heads = (-1, head_dim)
    log_decay = -math.exp(-0.5) * torch.sigmoid(at_least_float32(w_0) + at_least_float32(w))
    rate = torch.sigmoid(at_least_float32(a_0) + at_least_float32(a))
    wide = at_least_float32(k)
    key = wide * (1 + (rate - 1) * at_least_float32(alpha))
    c = norm((wide * at_least_float32(xi)).unflatten(-1, heads), None, kind="l2", eps=EPS, backend=backend)
    r, key, rate, log_decay = (x.unflatten(-1, heads) for x in (r, key, rate, log_decay))
    strength = (at_least_float32(r) * at_least_float32(rho).view(heads) * key).sum(-1)
    return Position(key, -c, rate * c, log_decay, strength)
