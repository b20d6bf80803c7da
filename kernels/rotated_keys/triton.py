"""Rotated keys and queries in Triton: one pass over their memory in each direction.

With b = B_t s g_B + b_B, where s = 1 / rms(B_t), and c of C_t, and with the gradients of k and q rotated back,
g = R(-theta_t) dk_t and h = R(-theta_t) dq_t:

    db = g,   dc = h,   dtheta_i = g_{i+R} b_i - g_i b_{i+R} + h_{i+R} c_i - h_i c_{i+R}
    n = sum over heads of db,   dB = s (n g_B - B_t s mean(n g_B B_t s)),   dg_B = sum over batch and time of n B_t s
    db_B = sum over batch and time of db,   and so with C
    e_t = sum of dtheta from t on,   ddt_t = e_t . turn_t for each head,   dturn_t = sum over heads of dt_t e_t
    dw = dturn (pi - turn^2 / pi)

No k, q, theta or dtheta is kept or written, but theta before every tile, and the sum of dtheta over each tile. The part
of e from within a tile enters ddt and dturn where dtheta is computed, and the part from behind it in one more pass over
what is [batch, T, H] and [batch, T, R], which also takes the gradients of both norms.

Layout:  B, C and w are rows at any distance, all else is dense. One kernel writes norms and turns, which are kept. A
         program of a large kernel is one warp: it takes a tile of BLOCK_T positions of a sequence and goes through a
         group of heads, so that it reads its rows of B and C once and adds their gradients up in registers. Gradients
         of biases and weights are summed over the positions of a program there, and over programs by `row_sums`.
Angles:  quarters of a circle, so that what is left of a whole number of them is exact.
float32: everything between a load and a store.
Limits:  none; offsets are int64.
Cost:    writes k and q, 2 H N s bytes a position for results of s bytes; backward reads their gradients, and writes
         H N 16 / BLOCK_T bytes for biases; angles are 12 H R / BLOCK_T bytes.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import num_processors
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense, dense_rows
from subquad.kernels.sums import row_sums


class Tuning(NamedTuple):
    """Tile of a program."""

    num_warps: int
    programs: int
    """Programs for each multiprocessor, below which heads are split into more groups."""


BLOCK_T = 8
"""Positions of a tile."""
# one warp waits for no other where it adds up along time
FORWARD, BACKWARD = Tuning(1, 16), Tuning(1, 8)
TILES, COLUMNS, HEADS = 64, 32, 32
"""Tiles that a sum along time takes at once, and columns of them; heads whose angles a program adds up in a tile."""
QUARTERS, HALF_CIRCLE = tl.constexpr(2 / math.pi), tl.constexpr(math.pi)
"""Quarters of a circle in a radian, and radians of half a circle."""


@triton.jit
def _load(p, o, m):
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _turn(b_w):
    """pi tanh(w), in radians."""
    b_s = b_w * b_w
    # near zero the quotient would lose digits; the polynomial is that of the Cephes library
    b_near = -0.0537397155531 + b_s * (0.0206390887954 - b_s * 0.00570498872745)
    b_near = b_w + b_w * b_s * (-0.333332819422 + b_s * (0.133314422036 + b_s * b_near))
    b_far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(b_w)) + 1.0)
    return HALF_CIRCLE * tl.where(b_s < 0.390625, b_near, tl.where(b_w < 0.0, -b_far, b_far))


@triton.jit
def _scale(b_sum, N, eps):
    """1 / rms of rows with these sums of squares."""
    return 1.0 / tl.sqrt(b_sum / N + eps)


@triton.jit
def _cos_sin(b_x):
    """Cosine and sine of angles in quarters of a circle, to the last bit or two of float32; NaN for infinite ones.

    What is left of a whole number of quarters is exact. The functions of the GPU's library take three times as many
    instructions, and each has a path for angles that a multiple of pi in float32 cannot reduce.
    """
    b_whole = tl.floor(b_x + 0.5)
    b_x -= b_whole
    i_quarter = b_whole.to(tl.int32)
    b_s = b_x * b_x
    # polynomials of least error for |x| up to a half
    b_sin = b_x * (1.57079632197 + b_s * (-0.645963478642 + b_s * (0.0796802280687 + b_s * -0.00460217700036)))
    b_cos = -1.23370054484 + b_s * (0.253669275379 + b_s * (-0.0208604868321 + b_s * 0.000904410717367))
    b_cos = 1.0 + b_s * b_cos
    m_odd = (i_quarter & 1) != 0
    b_first, b_second = tl.where(m_odd, b_sin, b_cos), tl.where(m_odd, b_cos, b_sin)
    b_first = tl.where(((i_quarter + 1) & 2) != 0, -b_first, b_first)
    return b_first, tl.where((i_quarter & 2) != 0, -b_second, b_second)


@triton.jit
def _norm(x, weight, y, row, end, x_stride, eps, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """y, a tile of rows of x over their rms, times the weight."""
    o_n, o_t = tl.arange(0, BLOCK_N), row + tl.arange(0, BLOCK_T)
    m = (o_t < end)[:, None] & (o_n < N)[None, :]
    b_x = _load(x, o_t[:, None] * x_stride + o_n[None, :], m)
    b_x *= _scale(tl.sum(b_x * b_x, 1), N, eps)[:, None] * _load(weight, o_n, o_n < N)[None, :]
    tl.store(y + o_t[:, None] * N + o_n[None, :], b_x, mask=m)


@triton.jit
def _inputs_kernel(
    B, C, B_weight, C_weight, dt, w, B_normed, C_normed, turn, sums,
    T, H, num_t, B_stride, C_stride, w_stride, eps,
    R: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Norms and turns of a tile, and sums [batch, tiles, H, R]: by what it turns heads, in quarters of a circle.

    The first program of a tile does all but sums of other heads.
    """
    num_h = tl.cdiv(H, BLOCK_H)
    i_h, i_t = tl.program_id(0) % num_h, (tl.program_id(0) // num_h).to(tl.int64)
    o_h, o_r = i_h * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R)
    first = i_t % num_t * BLOCK_T
    row = i_t // num_t * T + first
    end = row - first + T
    o_t = row + tl.arange(0, BLOCK_T)
    m_t = o_t < end
    m_r = m_t[:, None] & (o_r < R)[None, :]
    b_turn = _turn(_load(w, o_t[:, None] * w_stride + o_r[None, :], m_r))
    b_dt = _load(dt, o_t[:, None] * H + o_h[None, :], m_t[:, None] & (o_h < H)[None, :]) * QUARTERS
    if i_h == 0:
        _norm(B, B_weight, B_normed, row, end, B_stride, eps, N, BLOCK_N, BLOCK_T)
        _norm(C, C_weight, C_normed, row, end, C_stride, eps, N, BLOCK_N, BLOCK_T)
        tl.store(turn + o_t[:, None] * R + o_r[None, :], b_turn, mask=m_r)
    b_sums = tl.sum(b_dt[:, :, None] * b_turn[:, None, :], 0)
    o_sums = (i_t * H + o_h[:, None]) * R + o_r[None, :]
    tl.store(sums + o_sums, b_sums, mask=(o_h < H)[:, None] & (o_r < R)[None, :])


@triton.jit
def _along_tiles_kernel(sums, found, columns, num_t, REVERSE: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over all tiles in front of each, less whole circles, or with REVERSE over all tiles behind it.

    sums and found are [batch, tiles, columns].
    """
    num_x = tl.cdiv(columns, COLUMNS)
    o_x, o_i = tl.program_id(0) % num_x * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILES)
    o_b = (tl.program_id(0) // num_x).to(tl.int64) * num_t
    m_x = (o_x < columns)[None, :]
    b_before = tl.zeros([COLUMNS], tl.float32)
    for j in range(0, num_t, TILES):
        i = (tl.cdiv(num_t, TILES) - 1) * TILES - j if REVERSE else j
        # sums of the tile beside each: a sum up to a tile is not one from which its own, maybe a large one, is taken
        o_beside = i + o_i + 1 if REVERSE else i + o_i - 1
        m = ((o_beside >= 0) & (o_beside < num_t))[:, None] & m_x
        b_sums = _load(sums, (o_b + o_beside)[:, None] * columns + o_x[None, :], m)
        b_found = b_before[None, :] + tl.cumsum(b_sums, 0, reverse=REVERSE)
        b_before += tl.sum(b_sums, 0)
        if not REVERSE:
            # angles in quarters of a circle: none grows with the sequence
            b_found -= 4.0 * tl.floor(b_found * 0.25 + 0.5)
            b_before -= 4.0 * tl.floor(b_before * 0.25 + 0.5)
        o_found = (o_b + i + o_i)[:, None] * columns + o_x[None, :]
        tl.store(found + o_found, b_found, mask=(i + o_i < num_t)[:, None] & m_x)


@triton.jit
def _norm_gradient(
    x, weight, gradients, dx, partial, row, end, x_stride, rows, groups, eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dx of a tile of rows, and its part of the weight's gradient, from gradients [groups, rows, N] of the norm."""
    o_n, o_t = tl.arange(0, BLOCK_N), row + tl.arange(0, BLOCK_T)
    m = (o_t < end)[:, None] & (o_n < N)[None, :]
    o = o_t[:, None] * N + o_n[None, :]
    b_d = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for i_g in range(groups):
        b_d += _load(gradients, i_g * rows * N + o, m)
    b_x = _load(x, o_t[:, None] * x_stride + o_n[None, :], m)
    b_scale = _scale(tl.sum(b_x * b_x, 1), N, eps)[:, None]
    b_x *= b_scale
    tl.store(partial + o_n, tl.sum(b_d * b_x, 0), mask=o_n < N)
    b_d *= _load(weight, o_n, o_n < N)[None, :]
    b_dx = (b_d - b_x * (tl.sum(b_d * b_x, 1) / N)[:, None]) * b_scale
    tl.store(dx + o, b_dx.to(dx.dtype.element_ty), mask=m)


@triton.jit
def _input_gradients_kernel(
    B, C, B_weight, C_weight, dt, turn, after, B_part, C_part, ddt_part, dturn_part, dB, dC, ddt, dw, partial,
    rows, T, H, num_t, B_stride, C_stride, groups, partial_stride, eps,
    R: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """ddt, dw, dB and dC of a tile, from parts: of ddt [rows, H], of dturn and both norms [groups, rows, R or N].

    after are the sums of dtheta behind every tile, [batch, tiles, H, R], and partial [tiles, ...] are parts of the
    gradients of both weights.
    """
    i_t = tl.program_id(0).to(tl.int64)
    o_h, o_r = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_R)
    m_h, m_r = o_h < H, o_r < R
    first = i_t % num_t * BLOCK_T
    row = i_t // num_t * T + first
    end = row - first + T
    partial += i_t * partial_stride
    _norm_gradient(B, B_weight, B_part, dB, partial, row, end, B_stride, rows, groups, eps, N, BLOCK_N, BLOCK_T)
    _norm_gradient(C, C_weight, C_part, dC, partial + N, row, end, C_stride, rows, groups, eps, N, BLOCK_N, BLOCK_T)
    o_after = (i_t * H + o_h[:, None]) * R + o_r[None, :]
    b_after = _load(after, o_after, m_h[:, None] & m_r[None, :])
    for i in tl.static_range(BLOCK_T):
        # a position behind the end has neither pairs nor heads
        m_x, m_y = o_r < tl.where(first + i < T, R, 0), o_h < tl.where(first + i < T, H, 0)
        o_x, o_y = (row + i) * R + o_r, (row + i) * H + o_h
        b_dturn = tl.sum(_load(dt, o_y, m_y)[:, None] * b_after, 0)
        for i_g in range(groups):
            b_dturn += _load(dturn_part, i_g * rows * R + o_x, m_x)
        b_turn = _load(turn, o_x, m_x)
        b_dw = b_dturn * (HALF_CIRCLE - b_turn * b_turn / HALF_CIRCLE)
        tl.store(dw + o_x, b_dw.to(dw.dtype.element_ty), mask=m_x)
        b_ddt = tl.sum(b_turn[None, :] * b_after, 1)
        tl.store(ddt + o_y, b_ddt + _load(ddt_part, o_y, m_y), mask=m_y)


@triton.jit
def _second_half(b_x, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr):
    """Blocks of 2 HALF positions: for those of a first half the sum over the second one, for the others zero."""
    SHAPE: tl.constexpr = [BLOCK_T // (2 * HALF), 2 * HALF, BLOCK_R]
    m_second = ((tl.arange(0, BLOCK_T) & HALF) != 0)[:, None]
    b_sum = tl.sum(tl.reshape(tl.where(m_second, b_x, 0.0), SHAPE), 1, keep_dims=True)
    return tl.where(m_second, 0.0, tl.reshape(tl.broadcast_to(b_sum, SHAPE), [BLOCK_T, BLOCK_R]))


@triton.jit
def _from_each_on(b_x, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sums over the positions of a tile from each of them on.

    A reversed scan of Triton would send every number ten times through the warp.
    """
    b_sum = b_x
    for i in tl.static_range(5):
        if 1 << i < BLOCK_T:
            b_sum += _second_half(b_x, 1 << i, BLOCK_T, BLOCK_R)
    return b_sum


@triton.jit
def _load_head(before, dt, B_bias, C_bias, i_h, o_s, o_r, m_t, R: tl.constexpr, N):
    """The pairs of a head read these besides rows: theta before the tile, steps, and biases of both halves of pairs."""
    m_b = o_r < R
    b_before, b_dt = _load(before + i_h * R, o_r, m_b), _load(dt + i_h, o_s, m_t)
    p_b, p_c = B_bias + i_h * N, C_bias + i_h * N
    b_b1, b_b2 = _load(p_b, o_r, m_b), _load(p_b, o_r + R, m_b)
    return b_before, b_dt, b_b1, b_b2, _load(p_c, o_r, m_b), _load(p_c, o_r + R, m_b)


@triton.jit
def _rotated_keys_fwd_kernel(
    B, C, B_bias, C_bias, dt, turn, before, keys, queries,
    T, H, num_t, heads,
    R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A tile of a group of heads; B and C are norms, and before is theta before every tile, [batch, tiles, H, R]."""
    N = 2 * R + REST
    groups = tl.cdiv(H, heads)
    first = tl.program_id(0) % groups * heads
    i_t = (tl.program_id(0) // groups).to(tl.int64)
    o_i, o_r, o_n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R), 2 * R + tl.arange(0, BLOCK_REST)
    m_t, m_rest = i_t % num_t * BLOCK_T + o_i < T, o_n < N
    m_r, m_n = m_t[:, None] & (o_r < R)[None, :], m_t[:, None] & m_rest[None, :]
    # pointers to the first row of the tile, behind which offsets are int32
    row = i_t // num_t * T + i_t % num_t * BLOCK_T
    B, C, turn, before, dt = B + row * N, C + row * N, turn + row * R, before + i_t * H * R, dt + row * H
    keys, queries = keys + row * H * N, queries + row * H * N
    o_s, o_x = o_i * H, o_i[:, None] * N
    o_y, o_z = o_s[:, None] * N + o_r[None, :], o_s[:, None] * N + o_n[None, :]
    b_turn = _load(turn, o_i[:, None] * R + o_r[None, :], m_r)
    element = keys.dtype.element_ty
    b_B1, b_B2 = _load(B, o_x + o_r[None, :], m_r), _load(B, o_x + R + o_r[None, :], m_r)
    b_C1, b_C2 = _load(C, o_x + o_r[None, :], m_r), _load(C, o_x + R + o_r[None, :], m_r)
    if REST > 0:
        b_B3, b_C3 = _load(B, o_x + o_n[None, :], m_n), _load(C, o_x + o_n[None, :], m_n)
    for i_h in range(first, tl.minimum(first + heads, H)):
        # all loads of a head come before the first use, since a vector passes a barrier on its way into a tile
        b_before, b_dt, b_b1, b_b2, b_c1, b_c2 = _load_head(before, dt, B_bias, C_bias, i_h, o_s, o_r, m_t, R, N)
        if REST > 0:
            b_b3, b_c3 = _load(B_bias + i_h * N, o_n, m_rest), _load(C_bias + i_h * N, o_n, m_rest)
        b_cos, b_sin = _cos_sin(tl.cumsum(b_dt[:, None] * QUARTERS * b_turn, 0) + b_before[None, :])
        b_b1, b_b2 = b_B1 + b_b1[None, :], b_B2 + b_b2[None, :]
        b_c1, b_c2 = b_C1 + b_c1[None, :], b_C2 + b_c2[None, :]
        p_k, p_q = keys + i_h * N, queries + i_h * N
        tl.store(p_k + o_y, (b_b1 * b_cos - b_b2 * b_sin).to(element), mask=m_r)
        tl.store(p_k + (o_y + R), (b_b1 * b_sin + b_b2 * b_cos).to(element), mask=m_r)
        tl.store(p_q + o_y, (b_c1 * b_cos - b_c2 * b_sin).to(element), mask=m_r)
        tl.store(p_q + (o_y + R), (b_c1 * b_sin + b_c2 * b_cos).to(element), mask=m_r)
        if REST > 0:
            tl.store(p_k + o_z, (b_B3 + b_b3[None, :]).to(element), mask=m_n)
            tl.store(p_q + o_z, (b_C3 + b_c3[None, :]).to(element), mask=m_n)


@triton.jit
def _load_both(keys, queries, i_h, o, m, N):
    """A tile of a head from gradients of keys and queries, as they are in memory."""
    return tl.load(keys + i_h * N + o, mask=m, other=0.0), tl.load(queries + i_h * N + o, mask=m, other=0.0)


@triton.jit
def _rotated_keys_bwd_kernel(
    B, C, B_bias, C_bias, dt, turn, before, dkeys, dqueries,
    dB, dC, partial, sums, ddt, dturn,
    rows, T, H, num_t, partial_stride, heads,
    R: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A tile of a group of heads: dB, dC [groups, rows, N] of norms, and partial [tiles, 2 H N + ...] of biases.

    Rows and tiles are those of all sequences. Of the sums of dtheta from a position on, ddt [rows, H] and dturn
    [groups, rows, R] get what lies in the tile. Channels that do not turn have a loop of their own, so that fewer
    registers are taken at a time. What a head reads is loaded while the one before it is computed, the last one twice.
    """
    N = 2 * R + REST
    groups = tl.cdiv(H, heads)
    i_g, i_t = (tl.program_id(0) % groups).to(tl.int64), (tl.program_id(0) // groups).to(tl.int64)
    first = tl.program_id(0) % groups * heads
    last = tl.minimum(first + heads, H)
    # a thread that loaded more than two channels of a position would share sums over positions with as many threads
    o_i, o_r = tl.arange(0, BLOCK_T), tl.max_contiguous(tl.arange(0, BLOCK_R), 2)
    m_t, m_b = i_t % num_t * BLOCK_T + o_i < T, o_r < R
    m_r = m_t[:, None] & m_b[None, :]
    # pointers to the first row of the tile, behind which offsets are int32
    row = i_t // num_t * T + i_t % num_t * BLOCK_T
    B, C, turn, before, dt = B + row * N, C + row * N, turn + row * R, before + i_t * H * R, dt + row * H
    dkeys, dqueries, sums, ddt = dkeys + row * H * N, dqueries + row * H * N, sums + i_t * H * R, ddt + row * H
    dB, dC, dturn = dB + (i_g * rows + row) * N, dC + (i_g * rows + row) * N, dturn + (i_g * rows + row) * R
    partial += i_t * partial_stride
    o_s = o_i * H
    o_x, o_y = o_i[:, None] * N + o_r[None, :], o_s[:, None] * N + o_r[None, :]
    if REST > 0:
        o_n = tl.max_contiguous(2 * R + tl.arange(0, BLOCK_REST), 2)
        m_rest, m_n = o_n < N, m_t[:, None] & (o_n < N)[None, :]
        b_dB, b_dC = tl.zeros([BLOCK_T, BLOCK_REST], tl.float32), tl.zeros([BLOCK_T, BLOCK_REST], tl.float32)
        o_z = o_s[:, None] * N + o_n[None, :]
        b_k, b_q = _load_both(dkeys, dqueries, first, o_z, m_n, N)
        for i_h in range(first, last):
            b_g, b_h = b_k.to(tl.float32), b_q.to(tl.float32)
            b_k, b_q = _load_both(dkeys, dqueries, tl.minimum(i_h + 1, last - 1), o_z, m_n, N)
            b_dB, b_dC = b_dB + b_g, b_dC + b_h
            tl.store(partial + i_h * N + o_n, tl.sum(b_g, 0), mask=m_rest)
            tl.store(partial + (H + i_h) * N + o_n, tl.sum(b_h, 0), mask=m_rest)
        tl.store(dB + (o_i[:, None] * N + o_n[None, :]), b_dB, mask=m_n)
        tl.store(dC + (o_i[:, None] * N + o_n[None, :]), b_dC, mask=m_n)
    b_B1, b_B2, b_C1, b_C2 = _load(B, o_x, m_r), _load(B, o_x + R, m_r), _load(C, o_x, m_r), _load(C, o_x + R, m_r)
    b_turn = _load(turn, o_i[:, None] * R + o_r[None, :], m_r)
    b_dturn = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    b_dB1, b_dB2 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32), tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    b_dC1, b_dC2 = tl.zeros([BLOCK_T, BLOCK_R], tl.float32), tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    b_before, b_dt, b_b1, b_b2, b_c1, b_c2 = _load_head(before, dt, B_bias, C_bias, first, o_s, o_r, m_t, R, N)
    b_x1, b_y1 = _load_both(dkeys, dqueries, first, o_y, m_r, N)
    b_x2, b_y2 = _load_both(dkeys, dqueries, first, o_y + R, m_r, N)
    for i_h in range(first, last):
        i_n = tl.minimum(i_h + 1, last - 1)
        n_before, n_dt, n_b1, n_b2, n_c1, n_c2 = _load_head(before, dt, B_bias, C_bias, i_n, o_s, o_r, m_t, R, N)
        n_x1, n_y1 = _load_both(dkeys, dqueries, i_n, o_y, m_r, N)
        n_x2, n_y2 = _load_both(dkeys, dqueries, i_n, o_y + R, m_r, N)
        b_cos, b_sin = _cos_sin(tl.cumsum(b_dt[:, None] * QUARTERS * b_turn, 0) + b_before[None, :])
        b_g1, b_g2 = b_x1 * b_cos + b_x2 * b_sin, b_x2 * b_cos - b_x1 * b_sin
        b_h1, b_h2 = b_y1 * b_cos + b_y2 * b_sin, b_y2 * b_cos - b_y1 * b_sin
        b_dtheta = b_g2 * (b_B1 + b_b1[None, :]) - b_g1 * (b_B2 + b_b2[None, :])
        b_dtheta += b_h2 * (b_C1 + b_c1[None, :]) - b_h1 * (b_C2 + b_c2[None, :])
        tl.store(sums + i_h * R + o_r, tl.sum(b_dtheta, 0), mask=m_b)
        b_dtheta = _from_each_on(b_dtheta, BLOCK_T, BLOCK_R)
        tl.store(ddt + i_h + o_s, tl.sum(b_dtheta * b_turn, 1), mask=m_t)
        b_dturn += b_dt[:, None] * b_dtheta
        b_dB1, b_dB2, b_dC1, b_dC2 = b_dB1 + b_g1, b_dB2 + b_g2, b_dC1 + b_h1, b_dC2 + b_h2
        p_b, p_c = partial + i_h * N, partial + (H + i_h) * N
        tl.store(p_b + o_r, tl.sum(b_g1, 0), mask=m_b)
        tl.store(p_b + R + o_r, tl.sum(b_g2, 0), mask=m_b)
        tl.store(p_c + o_r, tl.sum(b_h1, 0), mask=m_b)
        tl.store(p_c + R + o_r, tl.sum(b_h2, 0), mask=m_b)
        b_before, b_dt, b_b1, b_b2, b_c1, b_c2 = n_before, n_dt, n_b1, n_b2, n_c1, n_c2
        b_x1, b_x2, b_y1, b_y2 = n_x1, n_x2, n_y1, n_y2
    tl.store(dturn + (o_i[:, None] * R + o_r[None, :]), b_dturn, mask=m_r)
    tl.store(dB + o_x, b_dB1, mask=m_r)
    tl.store(dB + (o_x + R), b_dB2, mask=m_r)
    tl.store(dC + o_x, b_dC1, mask=m_r)
    tl.store(dC + (o_x + R), b_dC2, mask=m_r)


class Inputs(NamedTuple):
    """The tensors of the operator, B, C and w as rows."""

    B: Tensor
    C: Tensor
    B_weight: Tensor
    C_weight: Tensor
    B_bias: Tensor
    C_bias: Tensor
    dt: Tensor
    w: Tensor


class Prepared(NamedTuple):
    """Both large kernels read these tensors beside biases and steps; all are float32."""

    B: Tensor
    C: Tensor
    """Norms, [rows, N]."""
    turn: Tensor
    """[rows, R]."""
    before: Tensor
    """theta before every tile, [tiles of all sequences, H, R]."""


class Plan(NamedTuple):
    """The work of both large kernels, and the arguments of all kernels behind their tensors."""

    tiles: int
    """Tiles of all sequences."""
    groups: int
    """Groups of heads."""
    numbers: dict[str, int]
    blocks: dict[str, Any]
    channels: dict[str, int]
    """Sizes for whole rows of B and C."""
    rest: dict[str, Any]
    """Arguments of the large kernels alone."""


def _plan(inputs: Inputs, tuning: Tuning) -> Plan:
    (batch, length, heads), states, pairs = inputs.dt.shape, inputs.B.shape[1], inputs.w.shape[1]
    block, rest = min(BLOCK_T, power_of_2(length)), states - 2 * pairs
    num_t = cdiv(length, block)
    wanted = min(heads, cdiv(tuning.programs * num_processors(inputs.dt.device), batch * num_t))
    in_group = cdiv(heads, wanted)
    numbers = {"T": length, "H": heads, "num_t": num_t}
    blocks = {"R": pairs, "BLOCK_R": power_of_2(pairs), "BLOCK_T": block}
    channels = {"N": states, "BLOCK_N": power_of_2(states)}
    more = {"REST": rest, "BLOCK_REST": power_of_2(max(1, rest)), "num_warps": tuning.num_warps}
    return Plan(batch * num_t, cdiv(heads, in_group), numbers, blocks, channels, {"heads": in_group, **blocks, **more})


def _along_tiles(sums: Tensor, batch: int, *, reverse: bool) -> Tensor:
    """The sums over all tiles of a sequence in front of or behind each, [tiles of all sequences, H, R]."""
    found, num_t, columns = torch.empty_like(sums), len(sums) // batch, sums[0].numel()
    launch(
        _along_tiles_kernel, batch * cdiv(columns, COLUMNS), sums=sums, found=found, columns=columns, num_t=num_t,
        REVERSE=reverse, TILES=min(TILES, power_of_2(num_t)), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return found


def _prepare(inputs: Inputs, eps: float) -> Prepared:
    B, C, B_weight, C_weight, _, _, dt, w = inputs
    work, (batch, _, heads) = _plan(inputs, FORWARD), dt.shape
    B_normed, C_normed, turn = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (B, C, w))
    sums = torch.empty(work.tiles, heads, w.shape[1], dtype=torch.float32, device=dt.device)
    block = min(HEADS, power_of_2(heads))
    launch(
        _inputs_kernel, work.tiles * cdiv(heads, block), B=B, C=C, B_weight=B_weight, C_weight=C_weight, dt=dt, w=w,
        B_normed=B_normed, C_normed=C_normed, turn=turn, sums=sums, **work.numbers, B_stride=B.stride(0),
        C_stride=C.stride(0), w_stride=w.stride(0), eps=eps, **work.blocks, **work.channels, BLOCK_H=block, num_warps=4,
    )  # fmt: skip
    return Prepared(B_normed, C_normed, turn, _along_tiles(sums, batch, reverse=False))


def _read(inputs: Inputs, prepared: Prepared) -> dict[str, Tensor]:
    """Returns the arguments that both large kernels read, in their order."""
    B, C, turn, before = prepared
    of_heads = {"B_bias": inputs.B_bias, "C_bias": inputs.C_bias, "dt": inputs.dt}
    return {"B": B, "C": C, **of_heads, "turn": turn, "before": before}


def _forward(inputs: Inputs, prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """k and q, one behind the other."""
    work, dt = _plan(inputs, FORWARD), inputs.dt
    both = torch.empty(2, *dt.shape, inputs.B.shape[1], dtype=dtype, device=dt.device)
    keys, queries = both
    launch(
        _rotated_keys_fwd_kernel, work.tiles * work.groups, **_read(inputs, prepared), keys=keys, queries=queries,
        **work.numbers, **work.rest,
    )  # fmt: skip
    return both


def _backward(inputs: Inputs, prepared: Prepared, eps: float, dkeys: Tensor, dqueries: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the inputs, those of B, C and w in their dtypes."""
    B, C, B_weight, C_weight, B_bias, _, dt, w = inputs
    work = _plan(inputs, BACKWARD)
    (rows, states), pairs, heads, of_bias = B.shape, w.shape[1], dt.shape[2], B_bias.numel()

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=B.device)

    B_part, C_part, dturn_part = (empty(work.groups, rows, size) for size in (states, states, pairs))
    sums, ddt_part, ddt = empty(work.tiles, heads, pairs), empty(*dt.shape), empty(*dt.shape)
    # its columns have the gradients of both biases, then those of both weights
    partial = empty(work.tiles, 2 * of_bias + 2 * states)
    dB, dC, dw = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (B, C, w))
    launch(
        _rotated_keys_bwd_kernel, work.tiles * work.groups, **_read(inputs, prepared), dkeys=dense(dkeys),
        dqueries=dense(dqueries), dB=B_part, dC=C_part, partial=partial, sums=sums, ddt=ddt_part, dturn=dturn_part,
        rows=rows, **work.numbers, partial_stride=partial.shape[1], **work.rest,
    )  # fmt: skip
    after, block = _along_tiles(sums, len(dt), reverse=True), power_of_2(heads)
    launch(
        _input_gradients_kernel, work.tiles, B=B, C=C, B_weight=B_weight, C_weight=C_weight, dt=dt, turn=prepared.turn,
        after=after, B_part=B_part, C_part=C_part, ddt_part=ddt_part, dturn_part=dturn_part, dB=dB, dC=dC, ddt=ddt,
        dw=dw, partial=partial[:, 2 * of_bias :], rows=rows, **work.numbers, B_stride=B.stride(0), C_stride=C.stride(0),
        groups=work.groups, partial_stride=partial.shape[1], eps=eps, **work.blocks, **work.channels, BLOCK_H=block,
        num_warps=max(1, min(8, block // 32)),
    )  # fmt: skip
    dB_bias, dC_bias, dB_weight, dC_weight = row_sums(partial).split((of_bias, of_bias, states, states))
    return dB, dC, dB_weight, dC_weight, dB_bias.view(B_bias.shape), dC_bias.view(B_bias.shape), ddt, dw


class RotatedKeys(OnceDifferentiable):
    """A dtype, eps, `Prepared` and `Inputs` to k and q. All inputs are kept, and what was prepared from them."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, eps: float, prepared: Prepared, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(*tensors)
        save(ctx, *inputs, *prepared)
        ctx.eps = eps
        k, q = _forward(inputs, prepared, dtype)
        return k, q

    @staticmethod
    def backward(ctx: Any, dkeys: Tensor, dqueries: Tensor) -> tuple[Tensor | None, ...]:
        tensors = saved(ctx)
        inputs, prepared = Inputs(*tensors[:8]), Prepared(*tensors[8:])
        gradients = _backward(inputs, prepared, ctx.eps, dkeys, dqueries)
        return None, None, None, *(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))


def rotated_keys_triton(
    tensors: tuple[Tensor, ...], eps: float, dtype: torch.dtype, kept: list[Any] | None = None
) -> tuple[Tensor, Tensor]:
    """`rotated_keys` for arguments that were checked, in the order of `Inputs`."""
    B, C, *factors, w = tensors
    inputs = Inputs(*[dense_rows(B), dense_rows(C), *map(dense, factors), dense_rows(w)])
    if kept and all(x is y for x, y in zip(kept[0], tensors, strict=True)):
        prepared = kept[1]
    else:
        prepared = _prepare(inputs, eps)
        if kept is not None:
            kept[:] = tensors, prepared
    if needs_gradient(*inputs):
        return RotatedKeys.apply(dtype, eps, prepared, *inputs)
    k, q = _forward(inputs, prepared, dtype)
    return k, q
