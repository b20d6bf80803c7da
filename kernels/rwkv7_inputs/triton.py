"""The inputs of RWKV-7's delta rule in Triton: one pass over memory in each direction.

With sigma the logistic function, M = exp(-1/2), and sums over the K channels of a head (letters: package docstring):

    L = -M sigma(w_0 + w),   e = sigma(a_0 + a),   g = 1 + (e - 1) alpha,   k~ = k g
    c = k xi s,  s = (sum (k xi)^2 + eps)^(-1/2),   b = sum rho r k~

The backward pass reads the same inputs again. With dX the gradient of a result X, and reading = c exp(-L):

    dr = dq + db rho k~,                            drho = db r k~
    dk~ = dplain + db rho r,                        dalpha = dk~ k (e - 1)
    dc = dreading exp(-L) + dwrite e,               du = s (dc - c sum c dc),   dxi = du k
    de = dwrite c + dk~ k alpha,                    da = de e (1 - e)
    dw = (dL - dreading c exp(-L)) L (1 - sigma),   dk = dk~ g + du xi

dw_0, da_0, dxi, dalpha and drho are sums over the positions. Each program adds those of its own in float32, and torch
adds these partial sums in float64, always in the same order. The tiles of a program are spread over all positions:
neighbours often have gradients of one sign, so the sum of a run of them can be many times larger than that of all, and
its rounding errors as well.

Layout:  inputs and results [R, D] dense, with R = B T positions and D = H K channels. A program takes one head.
float32: everything between a load and a store; log_decay and b are stored so.
Bytes:   with n for the size of an element of k, R D (7 n + 4) forward, of which 4 n are read, and R D (12 n + 4)
         backward, of which 8 n + 4 are read, and little for b and its gradient. The result q is r itself.
FLOPs:   about 25 R D forward and 65 R D backward, with three exponentials each. Deterministic.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense
from subquad.kernels.rwkv7_inputs import EPS

ELEMENTS, NUM_WARPS = 512, 4
"""Elements of a tile: four for each thread, because the backward pass holds more than twenty tiles at once."""
TILES = 16
"""Tiles of a program of the backward pass, which adds the gradients of parameters over all of them."""
FASTEST_DECAY = math.exp(-0.5)
INPUTS = ("r", "k", "w", "a", "w_0", "a_0", "xi", "alpha", "rho")


@triton.jit
def _load(x, o, m):
    return tl.load(x + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _store(x, o, b_x, m):
    tl.store(x + o, b_x.to(x.dtype.element_ty), mask=m)


@triton.jit
def _vectors(b_k, b_w, b_a, b_xi, b_alpha, EPS: tl.constexpr, FASTEST: tl.constexpr):
    """L, e, g, c and s of a tile [ROWS, BLOCK_K], with w_0 + w as w and a_0 + a as a; s is [ROWS, 1]."""
    b_e = tl.sigmoid(b_a)
    b_u = b_k * b_xi
    b_s = tl.rsqrt(tl.sum(b_u * b_u, 1) + EPS)[:, None]
    return -FASTEST * tl.sigmoid(b_w), b_e, 1.0 + (b_e - 1.0) * b_alpha, b_u * b_s, b_s


@triton.jit
def _rwkv7_fwd_kernel(
    r, k, w, a, w_0, a_0, xi, alpha, rho, reading, write, plain, log_decay, strength,
    R, H, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EPS: tl.constexpr, FASTEST: tl.constexpr,
):  # fmt: skip
    """ROWS positions of one head."""
    i_h, i_r = tl.program_id(0) % H, tl.program_id(0) // H
    D = H * K
    o_k = tl.arange(0, BLOCK_K)[None, :]
    o_d = i_h * K + o_k
    o_r = (i_r.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    m_k = o_k < K
    m = (o_r < R) & m_k
    o = o_r * D + o_d
    b_r, b_k = _load(r, o, m), _load(k, o, m)
    b_w = _load(w, o, m) + _load(w_0, o_d, m_k)
    b_a = _load(a, o, m) + _load(a_0, o_d, m_k)
    b_xi, b_alpha = _load(xi, o_d, m_k), _load(alpha, o_d, m_k)
    b_log, b_e, b_g, b_c, _ = _vectors(b_k, b_w, b_a, b_xi, b_alpha, EPS, FASTEST)
    b_key = b_k * b_g
    b_strength = tl.sum(b_r * _load(rho, o_d, m_k) * b_key, 1)[:, None]
    _store(reading, o, b_c * tl.exp(-b_log), m)
    _store(write, o, b_e * b_c, m)
    _store(plain, o, b_key, m)
    _store(log_decay, o, b_log, m)
    _store(strength, o_r * H + i_h, b_strength, o_r < R)


@triton.jit
def _rwkv7_bwd_kernel(
    r, k, w, a, w_0, a_0, xi, alpha, rho, dq, dreading, dwrite, dplain, dlog, dstrength, dr, dk, dw, da, partial,
    R, H, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TILES: tl.constexpr, EPS: tl.constexpr,
    FASTEST: tl.constexpr,
):  # fmt: skip
    """TILES tiles of ROWS positions of one head, and their terms of the gradients of parameters.

    With P programs for a head, the tiles of program p are p, p + P, p + 2 P and so on.

    partial: [programs of a head, 5, D], for w_0, a_0, xi, alpha and rho.
    """
    i_h, i_r, num_programs = tl.program_id(0) % H, tl.program_id(0) // H, tl.num_programs(0) // H
    D = H * K
    o_k = tl.arange(0, BLOCK_K)[None, :]
    o_d = i_h * K + o_k
    m_k = o_k < K
    b_w_0, b_a_0 = _load(w_0, o_d, m_k), _load(a_0, o_d, m_k)
    b_xi, b_alpha, b_rho = _load(xi, o_d, m_k), _load(alpha, o_d, m_k), _load(rho, o_d, m_k)
    b_dw_0 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    b_da_0 = tl.zeros([ROWS, BLOCK_K], tl.float32)
    b_dxi = tl.zeros([ROWS, BLOCK_K], tl.float32)
    b_dalpha = tl.zeros([ROWS, BLOCK_K], tl.float32)
    b_drho = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for i in range(TILES):
        o_r = ((i_r.to(tl.int64) + i * num_programs) * ROWS + tl.arange(0, ROWS))[:, None]
        m = (o_r < R) & m_k
        o = o_r * D + o_d
        b_r, b_k = _load(r, o, m), _load(k, o, m)
        b_w, b_a = _load(w, o, m) + b_w_0, _load(a, o, m) + b_a_0
        b_log, b_e, b_g, b_c, b_s = _vectors(b_k, b_w, b_a, b_xi, b_alpha, EPS, FASTEST)
        b_key = b_k * b_g
        b_db = _load(dstrength, o_r * H + i_h, o_r < R)
        _store(dr, o, _load(dq, o, m) + b_db * b_rho * b_key, m)
        b_drho += b_db * b_r * b_key
        b_dkey = _load(dplain, o, m) + b_db * b_rho * b_r
        b_dalpha += b_dkey * b_k * (b_e - 1.0)
        b_dwrite = _load(dwrite, o, m)
        b_dgrown = _load(dreading, o, m) * tl.exp(-b_log)
        b_dw = (_load(dlog, o, m) - b_dgrown * b_c) * b_log * (1.0 - tl.sigmoid(b_w))
        _store(dw, o, b_dw, m)
        b_dw_0 += b_dw
        b_da = (b_dwrite * b_c + b_dkey * b_k * b_alpha) * b_e * (1.0 - b_e)
        _store(da, o, b_da, m)
        b_da_0 += b_da
        b_dc = b_dgrown + b_dwrite * b_e
        b_du = b_s * (b_dc - b_c * tl.sum(b_c * b_dc, 1)[:, None])
        b_dxi += b_du * b_k
        _store(dk, o, b_dkey * b_g + b_du * b_xi, m)
    o_p = i_r.to(tl.int64) * 5 * D + i_h * K + tl.arange(0, BLOCK_K)
    m_p = tl.arange(0, BLOCK_K) < K
    tl.store(partial + o_p, tl.sum(b_dw_0, 0), mask=m_p)
    tl.store(partial + o_p + D, tl.sum(b_da_0, 0), mask=m_p)
    tl.store(partial + o_p + 2 * D, tl.sum(b_dxi, 0), mask=m_p)
    tl.store(partial + o_p + 3 * D, tl.sum(b_dalpha, 0), mask=m_p)
    tl.store(partial + o_p + 4 * D, tl.sum(b_drho, 0), mask=m_p)


def _sizes(r: Tensor, head_dim: int) -> tuple[int, int, dict[str, Any]]:
    """Positions, heads, and the constexprs that the kernels share, for r [B, T, D]."""
    block_k = power_of_2(head_dim)
    shared = {"K": head_dim, "ROWS": ELEMENTS // block_k, "BLOCK_K": block_k}
    return r.numel() // r.shape[-1], r.shape[-1] // head_dim, shared


def rwkv7_inputs_fwd(inputs: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """k, write, plain, log_decay and strength of the nine inputs, which are contiguous."""
    r, k, *_ = inputs
    rows, heads, shared = _sizes(r, head_dim)
    reading, write, plain, log_decay = (
        torch.empty(*r.shape[:2], heads, head_dim, dtype=dtype, device=r.device)
        for dtype in (k.dtype,) * 3 + (torch.float32,)
    )
    strength = torch.empty(*r.shape[:2], heads, dtype=torch.float32, device=r.device)
    launch(
        _rwkv7_fwd_kernel, heads * cdiv(rows, shared["ROWS"]), **dict(zip(INPUTS, inputs, strict=True)),
        reading=reading, write=write, plain=plain, log_decay=log_decay, strength=strength, R=rows, H=heads, **shared,
        EPS=EPS, FASTEST=FASTEST_DECAY, num_warps=NUM_WARPS,
    )  # fmt: skip
    return reading, write, plain, log_decay, strength


def rwkv7_inputs_bwd(
    inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...], head_dim: int
) -> tuple[Tensor | None, ...]:
    """The gradients of the nine inputs, from those of the six results."""
    r, k, w, a, *_ = inputs
    dq, dreading, dwrite, dplain, dlog, dstrength = (dense(x) for x in gradients)
    dr, dk, dw, da = (torch.empty_like(x) for x in (r, k, w, a))
    rows, heads, shared = _sizes(r, head_dim)
    programs = cdiv(rows, TILES * shared["ROWS"])
    partial = torch.empty(programs, 5, r.shape[-1], dtype=torch.float32, device=r.device)
    launch(
        _rwkv7_bwd_kernel, heads * programs, **dict(zip(INPUTS, inputs, strict=True)), dq=dq, dreading=dreading,
        dwrite=dwrite, dplain=dplain, dlog=dlog, dstrength=dstrength, dr=dr, dk=dk, dw=dw, da=da, partial=partial,
        R=rows, H=heads, **shared, TILES=TILES, EPS=EPS, FASTEST=FASTEST_DECAY, num_warps=NUM_WARPS,
    )  # fmt: skip
    dtypes = [x.dtype for x in inputs[4:]]
    # one cast where all are of one dtype
    of_parameters = partial.sum(0, dtype=torch.float64).to(reduce(torch.promote_types, dtypes)).unbind(0)
    return dr, dk, dw, da, *(d.to(dtype) for d, dtype in zip(of_parameters, dtypes, strict=True))


class RWKV7Inputs(OnceDifferentiable):
    """The nine inputs and head_dim to q, k, write, plain, log_decay and strength. q is [B, T, D]."""

    @staticmethod
    def forward(ctx: Any, head_dim: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        save(ctx, *inputs)
        ctx.head_dim = head_dim
        # autograd returns a view of the input r, whose gradient arrives in `backward`
        return inputs[0], *rwkv7_inputs_fwd(inputs, head_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *rwkv7_inputs_bwd(tuple(saved(ctx)), gradients, ctx.head_dim)


def rwkv7_inputs_triton(tensors: tuple[Tensor, ...], head_dim: int) -> tuple[Tensor, ...]:
    """`rwkv7_inputs` for arguments that were checked."""
    inputs = tuple(dense(x) for x in tensors)
    if needs_gradient(*inputs):
        q, *others = RWKV7Inputs.apply(head_dim, *inputs)
    else:
        q, *others = inputs[0], *rwkv7_inputs_fwd(inputs, head_dim)
    return q.unflatten(-1, (-1, head_dim)), *others
