"""Rotated keys and queries in Triton: one pass over their memory in each direction.

With b = B_t + b_B and c = C_t + b_C, and with the gradients of k and q rotated back, g = R(-theta_t) dk_t and
h = R(-theta_t) dq_t:

    db = g,   dc = h,   dtheta_i = g_{i+R} b_i - g_i b_{i+R} + h_{i+R} c_i - h_i c_{i+R}
    dB = sum over heads of db,   db_B = sum over batch and time of db,   and so with C

No k or q is kept.

Layout:  all tensors dense, with the B T positions of a batch as rows. A program takes BLOCK_T rows and goes through a
         group of heads, so that it reads its rows of B and C once and adds their gradients up in registers. Gradients
         of biases are summed over the rows of a program there, and over programs by `row_sums`.
float32: everything between a load and a store.
Limits:  none; offsets are int64.
Cost:    reads theta and writes k and q, H (4 R + 2 N s) bytes a position for results of s bytes; backward
         reads their gradients and theta, and writes that of theta, H (8 R + 2 N s), and H N 16 / BLOCK_T for biases.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import num_processors
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense
from subquad.kernels.sums import row_sums


class Tuning(NamedTuple):
    """Tile of a program."""

    block_t: int
    """Positions."""
    num_warps: int
    programs: int
    """Programs for each multiprocessor, below which heads are split into more groups."""


INPUTS = ("B", "C", "B_bias", "C_bias", "theta")
FORWARD, BACKWARD = Tuning(16, 4, 16), Tuning(16, 4, 4)


@triton.jit
def _load(p, o, m):
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _rotated_keys_fwd_kernel(
    B, C, B_bias, C_bias, theta, keys, queries,
    rows, H, heads,
    R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows of a group of heads."""
    N = 2 * R + REST
    groups = tl.cdiv(H, heads)
    first = tl.program_id(0) % groups * heads
    o_t = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_r, o_n = tl.arange(0, BLOCK_R), 2 * R + tl.arange(0, BLOCK_REST)
    m_t = o_t < rows
    m_r, m_n = m_t[:, None] & (o_r < R)[None, :], m_t[:, None] & (o_n < N)[None, :]
    o_x = o_t[:, None] * N
    element = keys.dtype.element_ty
    b_B1, b_B2 = _load(B, o_x + o_r[None, :], m_r), _load(B, o_x + R + o_r[None, :], m_r)
    b_C1, b_C2 = _load(C, o_x + o_r[None, :], m_r), _load(C, o_x + R + o_r[None, :], m_r)
    if REST > 0:
        b_B3, b_C3 = _load(B, o_x + o_n[None, :], m_n), _load(C, o_x + o_n[None, :], m_n)
    for i_h in range(first, tl.minimum(first + heads, H)):
        o_h = (o_t * H + i_h)[:, None]
        b_theta = _load(theta, o_h * R + o_r[None, :], m_r)
        b_cos, b_sin = tl.cos(b_theta), tl.sin(b_theta)
        o_b, m_b = i_h * N + o_r, o_r < R
        b_b1, b_b2 = b_B1 + _load(B_bias, o_b, m_b)[None, :], b_B2 + _load(B_bias, o_b + R, m_b)[None, :]
        b_c1, b_c2 = b_C1 + _load(C_bias, o_b, m_b)[None, :], b_C2 + _load(C_bias, o_b + R, m_b)[None, :]
        p_k, p_q = keys + o_h * N, queries + o_h * N
        tl.store(p_k + o_r[None, :], (b_b1 * b_cos - b_b2 * b_sin).to(element), mask=m_r)
        tl.store(p_k + R + o_r[None, :], (b_b1 * b_sin + b_b2 * b_cos).to(element), mask=m_r)
        tl.store(p_q + o_r[None, :], (b_c1 * b_cos - b_c2 * b_sin).to(element), mask=m_r)
        tl.store(p_q + R + o_r[None, :], (b_c1 * b_sin + b_c2 * b_cos).to(element), mask=m_r)
        if REST > 0:
            b_b3 = b_B3 + _load(B_bias, i_h * N + o_n, o_n < N)[None, :]
            b_c3 = b_C3 + _load(C_bias, i_h * N + o_n, o_n < N)[None, :]
            tl.store(p_k + o_n[None, :], b_b3.to(element), mask=m_n)
            tl.store(p_q + o_n[None, :], b_c3.to(element), mask=m_n)


@triton.jit
def _rotated_keys_bwd_kernel(
    B, C, B_bias, C_bias, theta, dkeys, dqueries,
    dB, dC, dB_bias, dC_bias, dtheta,
    rows, H, heads,
    R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows of a group of heads: dB, dC [groups, rows, N], and dB_bias, dC_bias [tiles of rows, H, N]."""
    N = 2 * R + REST
    groups = tl.cdiv(H, heads)
    i_g, i_t = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_r, o_n = tl.arange(0, BLOCK_R), 2 * R + tl.arange(0, BLOCK_REST)
    m_t, m_b, m_rest = o_t < rows, o_r < R, o_n < N
    m_r, m_n = m_t[:, None] & m_b[None, :], m_t[:, None] & m_rest[None, :]
    o_x = o_t[:, None] * N
    b_B1, b_B2 = _load(B, o_x + o_r[None, :], m_r), _load(B, o_x + R + o_r[None, :], m_r)
    b_C1, b_C2 = _load(C, o_x + o_r[None, :], m_r), _load(C, o_x + R + o_r[None, :], m_r)
    b_dB1, b_dB2 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32), tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    b_dC1, b_dC2 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32), tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if REST > 0:
        b_dB3, b_dC3 = tl.zeros([BLOCK_T, BLOCK_REST], tl.float32), tl.zeros([BLOCK_T, BLOCK_REST], tl.float32)
    for i_h in range(i_g * heads, tl.minimum(i_g * heads + heads, H)):
        o_h = (o_t * H + i_h)[:, None]
        p_k, p_q = dkeys + o_h * N, dqueries + o_h * N
        p_b, p_c = dB_bias + (i_t * H + i_h) * N, dC_bias + (i_t * H + i_h) * N
        if REST > 0:
            b_g, b_h = _load(p_k, o_n[None, :], m_n), _load(p_q, o_n[None, :], m_n)
            b_dB3, b_dC3 = b_dB3 + b_g, b_dC3 + b_h
            tl.store(p_b + o_n, tl.sum(b_g, 0), mask=m_rest)
            tl.store(p_c + o_n, tl.sum(b_h, 0), mask=m_rest)
        b_theta = _load(theta, o_h * R + o_r[None, :], m_r)
        b_cos, b_sin = tl.cos(b_theta), tl.sin(b_theta)
        o_b = i_h * N + o_r
        b_b1, b_b2 = b_B1 + _load(B_bias, o_b, m_b)[None, :], b_B2 + _load(B_bias, o_b + R, m_b)[None, :]
        b_c1, b_c2 = b_C1 + _load(C_bias, o_b, m_b)[None, :], b_C2 + _load(C_bias, o_b + R, m_b)[None, :]
        b_x, b_y = _load(p_k, o_r[None, :], m_r), _load(p_k, R + o_r[None, :], m_r)
        b_g1, b_g2 = b_x * b_cos + b_y * b_sin, b_y * b_cos - b_x * b_sin
        b_x, b_y = _load(p_q, o_r[None, :], m_r), _load(p_q, R + o_r[None, :], m_r)
        b_h1, b_h2 = b_x * b_cos + b_y * b_sin, b_y * b_cos - b_x * b_sin
        b_dtheta = b_g2 * b_b1 - b_g1 * b_b2 + b_h2 * b_c1 - b_h1 * b_c2
        tl.store(dtheta + o_h * R + o_r[None, :], b_dtheta, mask=m_r)
        b_dB1, b_dB2, b_dC1, b_dC2 = b_dB1 + b_g1, b_dB2 + b_g2, b_dC1 + b_h1, b_dC2 + b_h2
        tl.store(p_b + o_r, tl.sum(b_g1, 0), mask=m_b)
        tl.store(p_b + R + o_r, tl.sum(b_g2, 0), mask=m_b)
        tl.store(p_c + o_r, tl.sum(b_h1, 0), mask=m_b)
        tl.store(p_c + R + o_r, tl.sum(b_h2, 0), mask=m_b)
    p_B, p_C = dB + i_g.to(tl.int64) * rows * N + o_x, dC + i_g.to(tl.int64) * rows * N + o_x
    tl.store(p_B + o_r[None, :], b_dB1, mask=m_r)
    tl.store(p_B + R + o_r[None, :], b_dB2, mask=m_r)
    tl.store(p_C + o_r[None, :], b_dC1, mask=m_r)
    tl.store(p_C + R + o_r[None, :], b_dC2, mask=m_r)
    if REST > 0:
        tl.store(p_B + o_n[None, :], b_dB3, mask=m_n)
        tl.store(p_C + o_n[None, :], b_dC3, mask=m_n)


class Plan(NamedTuple):
    """The work of both kernels, and the arguments behind the tensors that they share."""

    tiles: int
    """Tiles of rows."""
    groups: int
    """Groups of heads."""
    sizes: dict[str, Any]


def _plan(B: Tensor, theta: Tensor, tuning: Tuning) -> Plan:
    (batch, length, states), (heads, pairs) = B.shape, theta.shape[2:]
    rows, rest = batch * length, states - 2 * pairs
    block = min(tuning.block_t, power_of_2(rows))
    tiles = cdiv(rows, block)
    wanted = min(heads, cdiv(tuning.programs * num_processors(B.device), tiles))
    in_group = cdiv(heads, wanted)
    sizes: dict[str, Any] = {"rows": rows, "H": heads, "heads": in_group, "R": pairs, "REST": rest}
    blocks = {"BLOCK_R": power_of_2(pairs), "BLOCK_REST": power_of_2(max(1, rest)), "BLOCK_T": block}
    return Plan(tiles, cdiv(heads, in_group), {**sizes, **blocks, "num_warps": tuning.num_warps})


def _forward(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """k and q, one behind the other."""
    B, *_, theta = tensors
    work = _plan(B, theta, FORWARD)
    both = torch.empty((2, *theta.shape[:3], B.shape[2]), dtype=dtype, device=B.device)
    keys, queries = both
    launch(
        _rotated_keys_fwd_kernel,
        work.tiles * work.groups,
        **dict(zip(INPUTS, tensors, strict=True)),
        keys=keys,
        queries=queries,
        **work.sizes,
    )
    return both


def _backward(tensors: list[Tensor], dkeys: Tensor, dqueries: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, _, B_bias, _, theta = tensors
    work = _plan(B, theta, BACKWARD)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=B.device)

    dB, dC = empty(work.groups, *B.shape), empty(work.groups, *B.shape)
    dB_bias, dC_bias = empty(work.tiles, B_bias.numel()), empty(work.tiles, B_bias.numel())
    dtheta = empty(*theta.shape)
    launch(
        _rotated_keys_bwd_kernel,
        work.tiles * work.groups,
        **dict(zip(INPUTS, tensors, strict=True)),
        dkeys=dense(dkeys),
        dqueries=dense(dqueries),
        dB=dB,
        dC=dC,
        dB_bias=dB_bias,
        dC_bias=dC_bias,
        dtheta=dtheta,
        **work.sizes,
    )
    dB, dC = (x[0] if work.groups == 1 else x.sum(0) for x in (dB, dC))
    dB_bias, dC_bias = (row_sums(x).view(B_bias.shape) for x in (dB_bias, dC_bias))
    return dB, dC, dB_bias, dC_bias, dtheta


class RotatedKeys(OnceDifferentiable):
    """A dtype and the five tensors of the operator to k and q. Only the tensors are kept."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        save(ctx, *tensors)
        return _forward(tensors, dtype).unbind()

    @staticmethod
    def backward(ctx: Any, dkeys: Tensor, dqueries: Tensor) -> tuple[Tensor | None, ...]:
        tensors = saved(ctx)
        gradients = _backward(tensors, dkeys, dqueries)
        return None, *(g.to(x.dtype) for g, x in zip(gradients, tensors, strict=True))


def rotated_keys_triton(
    B: Tensor,
    C: Tensor,
    B_bias: Tensor,
    C_bias: Tensor,
    theta: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """`rotated_keys` for arguments that were checked."""
    tensors = tuple(dense(x) for x in (B, C, B_bias, C_bias, theta))
    if needs_gradient(*tensors):
        return RotatedKeys.apply(dtype, *tensors)
    return _forward(tensors, dtype).unbind()
