"""The inputs of RWKV-6's linear attention in Triton: one pass over memory in each direction.

With sums over the K channels of a head (letters: package docstring):

    L = -exp(w_0 + w),   q_t = r_{t+1},   b = sum r bonus k,   own = b v

The backward pass reads the same inputs again. With dX the gradient of a result X, where k and v are results as well as
inputs, dX' the gradient of an input X, and db = sum down v:

    dr'_t = dq_{t-1} + db bonus k,       dk' = dk + db bonus r,       dv' = dv + b down,       dw' = dL L
    dw_0 = sum over all positions of dL L,                            dbonus = sum over all positions of db r k

dq_0 is zero at the first position of every sequence. Each program adds its terms of the two sums in float32, and torch
adds these partial sums in float64, always in the same order. The tiles of a program are spread over all positions:
neighbours often have gradients of one sign, so the sum of a run of them can be many times larger than that of all, and
its rounding errors as well.

Layout:  inputs, results and gradients [R, D] dense with R = B T positions and D = H K channels. A program takes one
         head.
float32: everything between a load and a store; log_decay and own are stored so.
Bytes:   with n for the size of an element of r, R D (5 n + 8) forward, of which 4 n are read, and R D (11 n + 8)
         backward, of which 7 n + 8 are read.
FLOPs:   about 6 R D forward and 16 R D backward, with one exponential each. Deterministic.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense

ELEMENTS, NUM_WARPS = 1024, 4
"""Elements of a tile: eight for each thread, so that a thread loads 16 bytes of half-precision values at once."""
TILES = 16
"""Tiles of a program of the backward pass, which adds the gradients of parameters over all of them."""
INPUTS = ("r", "k", "v", "w", "w_0", "bonus")


@triton.jit
def _load(x, o, m):
    return tl.load(x + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _store(x, o, b_x, m):
    tl.store(x + o, b_x.to(x.dtype.element_ty), mask=m)


@triton.jit
def _rwkv6_fwd_kernel(
    r, k, v, w, w_0, bonus, q, log_decay, own,
    R, T, H, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ROWS positions of one head."""
    i_h, i_r = tl.program_id(0) % H, tl.program_id(0) // H
    D = H * K
    o_k = tl.arange(0, BLOCK_K)[None, :]
    o_d = i_h * K + o_k
    first = i_r.to(tl.int64) * ROWS
    o_r = (first + tl.arange(0, ROWS))[:, None]
    # a tile may begin in one sequence and end in another
    o_t = ((first % T).to(tl.int32) + tl.arange(0, ROWS))[:, None] % T
    m_k = o_k < K
    m = (o_r < R) & m_k
    o = o_r * D + o_d
    b_r, b_k, b_v = _load(r, o, m), _load(k, o, m), _load(v, o, m)
    b_own = tl.sum(b_r * _load(bonus, o_d, m_k) * b_k, 1)[:, None] * b_v
    _store(q, o - D, b_r, m & (o_t > 0))
    _store(q, o, tl.zeros([ROWS, BLOCK_K], tl.float32), m & (o_t == T - 1))
    _store(log_decay, o, -tl.exp(_load(w, o, m) + _load(w_0, o_d, m_k)), m)
    _store(own, o, b_own, m)


@triton.jit
def _rwkv6_bwd_kernel(
    r, k, v, w, w_0, bonus, dq, dk, dv, dlog, down, dr_in, dk_in, dv_in, dw_in, partial,
    R, T, H, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """TILES tiles of ROWS positions of one head, and their terms of the gradients of parameters.

    With P programs for a head, the tiles of program p are p, p + P, p + 2 P and so on. dr_in and the like are the
    gradients of the inputs.

    partial: [programs of a head, 2, D], for w_0 and bonus.
    """
    i_h, i_r, num_programs = tl.program_id(0) % H, tl.program_id(0) // H, tl.num_programs(0) // H
    D = H * K
    o_k = tl.arange(0, BLOCK_K)[None, :]
    o_d = i_h * K + o_k
    m_k = o_k < K
    b_w_0, b_bonus = _load(w_0, o_d, m_k), _load(bonus, o_d, m_k)
    b_dw_0 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    b_dbonus = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for i in range(TILES):
        first = (i_r.to(tl.int64) + i * num_programs) * ROWS
        o_r = (first + tl.arange(0, ROWS))[:, None]
        o_t = ((first % T).to(tl.int32) + tl.arange(0, ROWS))[:, None] % T
        m = (o_r < R) & m_k
        o = o_r * D + o_d
        b_r, b_k, b_v, b_down = _load(r, o, m), _load(k, o, m), _load(v, o, m), _load(down, o, m)
        b_rk = b_r * b_k
        b_sum = tl.sum(b_rk * b_bonus, 1)[:, None]
        b_dsum = tl.sum(b_down * b_v, 1)[:, None]
        b_dbonus += b_dsum * b_rk
        b_scale = b_dsum * b_bonus
        _store(dr_in, o, _load(dq, o - D, m & (o_t > 0)) + b_scale * b_k, m)
        _store(dk_in, o, _load(dk, o, m) + b_scale * b_r, m)
        _store(dv_in, o, _load(dv, o, m) + b_sum * b_down, m)
        b_dw = -_load(dlog, o, m) * tl.exp(_load(w, o, m) + b_w_0)
        _store(dw_in, o, b_dw, m)
        b_dw_0 += b_dw
    o_p = i_r.to(tl.int64) * 2 * D + i_h * K + tl.arange(0, BLOCK_K)
    m_p = tl.arange(0, BLOCK_K) < K
    tl.store(partial + o_p, tl.sum(b_dw_0, 0), mask=m_p)
    tl.store(partial + o_p + D, tl.sum(b_dbonus, 0), mask=m_p)


def _sizes(r: Tensor, head_dim: int) -> dict[str, Any]:
    """The sizes that the kernels share, for r [B, T, D]."""
    batch, length, width = r.shape
    block_k = power_of_2(head_dim)
    return {
        "R": batch * length,
        "T": length,
        "H": width // head_dim,
        "K": head_dim,
        "ROWS": ELEMENTS // block_k,
        "BLOCK_K": block_k,
    }


def rwkv6_inputs_fwd(inputs: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, log_decay and own [B, T, D] of the six inputs, which are contiguous."""
    r = inputs[0]
    sizes = _sizes(r, head_dim)
    q = torch.empty_like(r)
    log_decay, own = (torch.empty(r.shape, dtype=torch.float32, device=r.device) for _ in range(2))
    launch(
        _rwkv6_fwd_kernel, sizes["H"] * cdiv(sizes["R"], sizes["ROWS"]), **dict(zip(INPUTS, inputs, strict=True)), q=q,
        log_decay=log_decay, own=own, **sizes, num_warps=NUM_WARPS,
    )  # fmt: skip
    return q, log_decay, own


def rwkv6_inputs_bwd(inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """The gradients of the six inputs, from those of the five results."""
    *positions, w_0, bonus = inputs
    dq, dk, dv, dlog, down = (dense(x) for x in gradients)
    dr_in, dk_in, dv_in, dw_in = (torch.empty_like(x) for x in positions)
    sizes = _sizes(positions[0], head_dim)
    programs = cdiv(sizes["R"], TILES * sizes["ROWS"])
    partial = torch.empty(programs, 2, w_0.numel(), dtype=torch.float32, device=w_0.device)
    launch(
        _rwkv6_bwd_kernel, sizes["H"] * programs, **dict(zip(INPUTS, inputs, strict=True)), dq=dq, dk=dk, dv=dv,
        dlog=dlog, down=down, dr_in=dr_in, dk_in=dk_in, dv_in=dv_in, dw_in=dw_in, partial=partial, **sizes, TILES=TILES,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    dw_0, dbonus = partial.sum(0, dtype=torch.float64).unbind(0)
    return dr_in, dk_in, dv_in, dw_in, dw_0.to(w_0.dtype), dbonus.to(bonus.dtype)


class RWKV6Inputs(OnceDifferentiable):
    """The six inputs and head_dim to q, k, v, log_decay and own, each [B, T, D]."""

    @staticmethod
    def forward(ctx: Any, head_dim: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        save(ctx, *inputs)
        ctx.head_dim = head_dim
        q, log_decay, own = rwkv6_inputs_fwd(inputs, head_dim)
        # autograd returns views of the inputs k and v, whose gradients arrive in `backward`
        return q, inputs[1], inputs[2], log_decay, own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *rwkv6_inputs_bwd(tuple(saved(ctx)), gradients, ctx.head_dim)


def rwkv6_inputs_triton(tensors: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """`rwkv6_inputs` for arguments that were checked."""
    inputs = tuple(dense(x) for x in tensors)
    if needs_gradient(*inputs):
        results = RWKV6Inputs.apply(head_dim, *inputs)
    else:
        q, log_decay, own = rwkv6_inputs_fwd(inputs, head_dim)
        results = q, inputs[1], inputs[2], log_decay, own
    return tuple(x.unflatten(-1, (-1, head_dim)) for x in results)
