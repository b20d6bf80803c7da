"""Computes all of RWKV-7 that lies between its linear maps and `delta_rule`, which takes two steps a position.

    L = -exp(-1/2) sigmoid(w_0 + w),   e = sigmoid(a_0 + a)            log-decay and rate
    c = k xi / |k xi|,                 k~ = k (1 + (e - 1) alpha)      what is removed, and the key
    own = (sum_i rho_i r_i k~_i) v                                     what a position adds to its own output

with |k xi| and the sum over the K channels of every head.

A position of the recurrence S_t = diag(exp L_t) S_{t-1} - (e_t c_t)^T (c_t S_{t-1}) + k~_t^T v_t becomes two of
`delta_rule` (`kernels.delta_rule.generalised`):

    position | q | k             | v | write | log_decay
    2 t      | 0 | c_t exp(-L_t) | 0 | e c   | L_t
    2 t + 1  | r | 0             | v | k~    | 0

Source: Peng et al. 2025 (arXiv 2503.14456), section 4; w and a are the outputs of its low-rank maps, and k, r and v
those of its linear maps. It is one operator because each of its parts passes over all of [B, T, D] once or twice.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernels.backend import on_device_of, use_triton
from kernels.delta_rule.generalised import two_steps
from kernels.norm import norm

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
    own: Tensor
    """The position adds this vector to its output o_t."""


class DeltaRuleInputs(NamedTuple):
    """The inputs of `delta_rule` for two steps a position, [B, 2 T, H, K], and `own`."""

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    log_decay: Tensor
    """In float32 or wider, where q, k, v and write have the dtype of v."""
    own: Tensor
    """Every position adds its vector to its output o_t, [B, T, H, K] in float32 or wider."""


def rwkv7_inputs(
    r: Tensor,
    k: Tensor,
    v: Tensor,
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
    """q, k, v, write and log_decay of `delta_rule`, and own, by the equations of this module.

    r, k, v, w, a:           [B, T, D] with D = H K and K = head_dim.
    w_0, a_0, xi, alpha, rho: [D].
    backend: the Triton path takes K up to 256 in float32, bfloat16 and float16. It computes in float32, rounds once,
             and keeps nothing but its inputs for the backward pass. It copies what is not contiguous. `auto` takes it
             wherever it can. Both paths are deterministic.

    Everything is computed in float32 at least, also under autocast. Raises ValueError for shapes that do not fit.
    """
    _check("rwkv7_inputs", ("B", "T >= 1"), (r, k, v, w, a), (w_0, a_0, xi, alpha, rho), head_dim)
    tensors = (r, k, v, w, a, w_0, a_0, xi, alpha, rho)
    obstacle = f"takes K up to {MAX_KEYS}, got K={head_dim}" if head_dim > MAX_KEYS else None
    if use_triton("rwkv7_inputs", backend, *tensors, obstacle=obstacle):
        from kernels.rwkv7_inputs.triton import rwkv7_inputs_triton

        with on_device_of(r):
            return DeltaRuleInputs(*rwkv7_inputs_triton(tensors, head_dim))
    at = _position(tensors, head_dim, "auto" if backend == "auto" else "torch")
    r, v = r.unflatten(-1, (-1, head_dim)), v.unflatten(-1, (-1, head_dim))
    q, key, value, log_decay, write = two_steps(r, at.k, v, at.remove, at.add, at.log_decay)
    return DeltaRuleInputs(q, key, value, write, log_decay, at.own)


def rwkv7_position(
    r: Tensor,
    k: Tensor,
    v: Tensor,
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
    """The same without the two steps, for decoding: r, k, v, w, a are [..., D]. It is plain PyTorch.

    Raises ValueError for shapes that do not fit.
    """
    _check("rwkv7_position", ("...",), (r, k, v, w, a), (w_0, a_0, xi, alpha, rho), head_dim)
    return _position((r, k, v, w, a, w_0, a_0, xi, alpha, rho), head_dim, "auto")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _position(tensors: tuple[Tensor, ...], head_dim: int, backend: Literal["auto", "torch"]) -> Position:
    r, k, v, w, a, w_0, a_0, xi, alpha, rho = tensors
    heads = (-1, head_dim)
    log_decay = -math.exp(-0.5) * torch.sigmoid(_wide(w_0) + _wide(w))
    rate = torch.sigmoid(_wide(a_0) + _wide(a))
    wide = _wide(k)
    key = wide * (1 + (rate - 1) * _wide(alpha))
    c = norm((wide * _wide(xi)).unflatten(-1, heads), None, kind="l2", eps=EPS, backend=backend)
    r, key, v, rate, log_decay = (x.unflatten(-1, heads) for x in (r, key, v, rate, log_decay))
    own = (_wide(r) * _wide(rho).view(heads) * key).sum(-1, keepdim=True) * _wide(v)
    return Position(key, -c, rate * c, log_decay, own)


def _check(
    op: str, axes: tuple[str, ...], inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...], head_dim: int
) -> None:
    first = inputs[0]
    wanted = f"[{', '.join(axes)}, D]"
    if first.ndim == 0 or (axes != ("...",) and first.ndim != len(axes) + 1) or first.numel() == 0:
        raise ValueError(f"{op}: r must be {wanted} with at least one element, got {list(first.shape)}.")
    width = first.shape[-1]
    if head_dim < 1 or width % head_dim:
        raise ValueError(f"{op}: head_dim must divide D={width}, got {head_dim}.")
    for name, x in zip("kvwa", inputs[1:], strict=True):
        if x.shape != first.shape:
            raise ValueError(f"{op}: {name} must be {list(first.shape)} as r, got {list(x.shape)}.")
    for name, x in zip(("w_0", "a_0", "xi", "alpha", "rho"), parameters, strict=True):
        if x.shape != (width,):
            raise ValueError(f"{op}: {name} must be [{width}], got {list(x.shape)}.")
