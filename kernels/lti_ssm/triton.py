"""The state space model in Triton: Toeplitz products inside chunks, states between them, all on matrix units.

With chunks of C steps, v_r the inputs of chunk r, h_r the state before it and a = Abar^C, for one channel

    y_r = v_r K + Re(h_r O);   h_{r+1} = a h_r + v_r E
    K[i, j] = taps[j - i],     E[i, n] = Bbar_n Abar_n^{C-1-i},     O[n, i] = c_n Abar_n^i,     c = s C Abar

No power but 0 .. C (and that of a segment) is ever formed, so nothing overflows where |Abar| <= 1. A program holds
one channel. A row of its tiles is a segment of a sequence, and it goes through ROWS of them at once, chunk by chunk:
products [ROWS, C] x [C, C], [ROWS, C] x [C, N] and [ROWS, N] x [N, C], states that are accumulators, nothing that
crosses rows. Where rows are segments of one sequence, a first pass over all but the last gives the states they end in
from zero, and one scan over rows where they start; that part of u is read twice. The filter, and matrices for a
channel, exist in shared memory only: K is read from C taps, E and O are made from two short tables of powers
(k = i J + j). `_prepare_kernel` computes taps, powers, Bbar and c from the parameters in float64, `_prepare_bwd_kernel`
takes their gradients back. Where there are few sequences they are cut into pieces first: a launch (y=None) gives their
ends from a zero start, PyTorch passes them on.

Backward, with g_r the gradient of y_r and H_r that of h_r (real part: of Re h, imaginary part: of Im h),

    H_r = g_r conj(O) + conj(a) H_{r+1};   dv_r = g_r K^T + Re(H_{r+1} conj(E))
    dK = sum v_r^T g_r;   dE = sum v_r^T H_{r+1};   dO = sum g_r^T conj(h_r);   da = sum H_{r+1} conj(h_r)

is the same in reverse; forward kept the state before each chunk (in bfloat16 as many bytes as u, at N = 32). At its end
a program contracts dK to C taps, and dE, dO, da to the gradients of Bbar, c and z = log Abar (d Abar^k / dz =
k Abar^k), one row of partial sums for each program.

Layout: time contiguous; u and the gates may be any view of that kind, others are copied into it. y and du have it too.
float32: v, gates, sums, states, scans (of float32 inputs in float64). Decays are in two terms for float32 inputs, as
rounding would add up from chunk to chunk. bfloat16 inputs meet bfloat16 matrices, as one or two terms (Config); float32
and float16 inputs multiply in tf32x3. Deterministic: partial sums, no atomics. Limits: N <= 64; not dss-softmax, not
two-sided. Numbers of B T D read or written: forward 3 (2 where a sequence is a row), one more to keep states;
backward 5. Multiply-adds a step at N complex states: forward C + 6 N, backward 2 C + 10 N + 4 N^2 / C, and C more in
each for the second term of taps (C + 4 N more in the backward pass with gate_out).
"""

# a tuple of tiles that grows has no type of its own
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Form, Launch, cdiv, form, num_processors, power_of_2, save, saved, speaks_ptx
from kernels.lti_ssm.chunked import _powers_sum
from kernels.ssm_kernel.chunked import widen
from kernels.ssm_kernel.discretize import discretize
from kernels.ssm_kernel.system import (
    abar,
    entry,
    entry_gradient,
    load_wide,
    power,
    power_table,
    store_narrow,
    times,
)
from kernels.transpose import time_last


class Config(NamedTuple):
    """What a program takes at once.

    chunk, rows:  C and ROWS.
    gated, taps, maps, states: bfloat16 terms of gated v and g, of K, of E and O, of h and H.
    store: the cache modifier of what is written.
    warps, stages: forward, backward. A tile is asked for stages - 1 steps before it is needed.
    """

    chunk: int
    rows: int
    gated: int
    taps: int
    maps: int
    states: int
    store: str
    warps: tuple[int, int]
    stages: tuple[int, int]


class Tuning(NamedTuple):
    """Every choice of the launchers that comes from a measurement; tests pass others in through a `Planner`."""

    narrow: Config = Config(64, 64, 1, 2, 1, 1, ".cs", (4, 4), (6, 3))
    """For bfloat16 inputs."""
    wide: Config = Config(32, 64, 1, 1, 1, 1, ".cs", (8, 8), (2, 2))
    """For float32 and float16 inputs."""
    averaging_length: int = 512
    """Sequences shorter than this get two bfloat16 terms of every factor: their outputs may be sums of a few products,
    in which the rounding errors of the factors do not average out."""
    programs_per_processor: int = 3
    """Programs that run at the same time on a multiprocessor."""
    programs: int | None = None
    """Programs that run at the same time on the device; None: `programs_per_processor` for each multiprocessor."""
    sequences: int | None = None
    """Sequences that share a tile, a power of two; None: the cheapest number."""
    pieces: int | None = None
    """Pieces that a sequence is cut into; None: as many as fill the device."""
    setup_steps: int = 5
    """Cost of the setup of a program, in steps (one chunk of every row of a tile)."""
    max_pairs: int = 32
    """Complex modes for which a backward pass in float32, or with states in two terms, has shared memory."""
    short_steps: int = 2
    """Longest forward loop that is compiled with two pipeline stages: in a loop this short, tiles that are loaded
    further ahead only take shared memory, and without them four programs fit on a multiprocessor."""
    short_registers: int = 128
    """Registers that a thread of such a program may use, so that four programs fit."""
    tall_steps: int = 8
    """Shortest backward loop that is halved: twice the rows and warps, each row a segment of half the length."""
    wide_offsets: int = 2**31
    """Number of elements of a tensor from which on offsets are computed in 64 bits."""


@triton.jit
def _multiply(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    if COMPLEX:
        return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re
    else:  # noqa: RET505
        return a_re * b_re, a_im


@triton.jit
def _interleave(b_re, b_im, COMPLEX: tl.constexpr):
    """[.., 2 N] of real and imaginary parts by turns: both then lie in one thread, and a product is 64 wide."""
    if COMPLEX:
        return tl.reshape(tl.join(b_re, b_im), [b_re.shape[0], 2 * b_re.shape[1]])
    else:  # noqa: RET505
        return b_re


@triton.jit
def _store_rows(p, o_row, row, o_w, b_re, b_im, COMPLEX: tl.constexpr):
    b_x = _interleave(b_re.to(tl.float32), b_im.to(tl.float32), COMPLEX)
    tl.store(p + (o_row * row + o_w), b_x, mask=(o_w < row) & (o_row >= 0))


@triton.jit
def _store_with_rest(p, row, o_w, b_re, b_im, COMPLEX: tl.constexpr):
    """What rounding takes goes to the next row."""
    _store_rows(p, 0, row, o_w, b_re, b_im, COMPLEX)
    b_re, b_im = b_re - b_re.to(tl.float32).to(tl.float64), b_im - b_im.to(tl.float32).to(tl.float64)
    _store_rows(p, 1, row, o_w, b_re, b_im, COMPLEX)


@triton.jit(do_not_specialize=["steps", "half_steps", "step_bits", "segment_bits", "A_stride_d"])
def _prepare_kernel(
    A,
    B,
    C,
    dt,
    skip,
    small,
    N,
    A_stride_d,
    steps,
    half_steps,
    step_bits,
    segment_bits,
    factor,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    B_COMPLEX: tl.constexpr,
    C_COMPLEX: tl.constexpr,
    COMPLEX: tl.constexpr,
    NEAR_BITS: tl.constexpr,
    FAR_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the other kernels take of one channel, from float64: a row of `small`.

    It holds the taps with the skip [CHUNK], Bbar, c = factor C Abar, and powers of Abar: those below J, multiples of J
    below CHUNK, then of CHUNK, a segment (steps chunks), half a segment and a piece (2^segment_bits segments), each
    with what rounding took of it; each [N]. With J = 2^NEAR_BITS, CHUNK = J 2^FAR_BITS.
    """
    i_d = tl.program_id(0)
    pair: tl.constexpr = 2 if COMPLEX else 1
    J: tl.constexpr = 2**NEAR_BITS
    FAR: tl.constexpr = 2**FAR_BITS
    row = N * pair
    small += i_d * (J * FAR + (2 + J + FAR + 8) * row)
    o_n, o_w = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N * pair)[None, :]
    o_near, o_far = tl.arange(0, J)[:, None], tl.arange(0, FAR)[:, None]
    m_n = o_n < N
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    # all that is read is asked for before the first wait
    if B is not None:
        b_re, b_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    if skip is not None:
        b_skip = tl.load(skip + i_d).to(tl.float32)
    c_re, c_im = factor * c_re, factor * c_im
    z_re, z_im = b_dt * lam_re, b_dt * lam_im
    a_re, a_im = abar(z_re, z_im, RULE)
    g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
    if RULE == "dss-exp-no-scale":
        g_re, g_im = 1.0 + 0 * g_re, 0 * g_im
    else:
        g_re, g_im = b_dt * g_re, b_dt * g_im
    if B is not None:
        g_re, g_im = times(g_re, g_im, b_re, b_im)
    w_re, w_im = times(c_re, c_im, a_re, a_im)
    p_re, p_im, far_re, far_im = power_table(a_re, a_im, NEAR_BITS)
    q_re, q_im, chunk_re, chunk_im = power_table(far_re, far_im, FAR_BITS)

    # taps: a power below CHUNK is a product of two; beyond N there is no C
    c_re, c_im = times(c_re, c_im, g_re, g_im)
    f_re, f_im = times(c_re, c_im, q_re, q_im)
    f_re, f_im = f_re.to(tl.float32)[:, None, :], f_im.to(tl.float32)[:, None, :]
    b_taps = f_re * p_re.to(tl.float32)[None, :, :] - f_im * p_im.to(tl.float32)[None, :, :]
    # turned: so that a sum is within a thread
    b_taps = tl.sum(tl.trans(tl.reshape(b_taps, [FAR * J, BLOCK_N])), 0)
    o_k = tl.arange(0, FAR * J)
    if skip is not None:
        b_taps += tl.where(o_k == 0, b_skip, 0.0)
    tl.store(small + o_k, b_taps)

    small += J * FAR
    _store_rows(small, 0, row, o_w, g_re, g_im, COMPLEX)
    _store_rows(small, 1, row, o_w, w_re, w_im, COMPLEX)
    _store_rows(small, 2 + o_near, row, o_w, p_re, p_im, COMPLEX)
    _store_rows(small, 2 + J + o_far, row, o_w, q_re, q_im, COMPLEX)
    small += (2 + J + FAR) * row
    _store_with_rest(small, row, o_w, chunk_re, chunk_im, COMPLEX)
    x_re, x_im = power(chunk_re, chunk_im, half_steps, step_bits)
    _store_with_rest(small + 4 * row, row, o_w, x_re, x_im, COMPLEX)
    x_re, x_im = power(chunk_re, chunk_im, steps, step_bits)
    _store_with_rest(small + 2 * row, row, o_w, x_re, x_im, COMPLEX)
    for _ in range(segment_bits):
        x_re, x_im = times(x_re, x_im, x_re, x_im)
    _store_with_rest(small + 6 * row, row, o_w, x_re, x_im, COMPLEX)


@triton.jit(do_not_specialize=["count", "A_stride_d"])
def _prepare_bwd_kernel(
    A,
    B,
    C,
    dt,
    partial,
    dA,
    dB,
    dC,
    ddt,
    dskip,
    D,
    N,
    A_stride_d,
    count,
    factor,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    B_COMPLEX: tl.constexpr,
    C_COMPLEX: tl.constexpr,
    COMPLEX: tl.constexpr,
    NEAR_BITS: tl.constexpr,
    FAR_BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From `count` rows of partial gradients (see `_lti_bwd_kernel`) to those of the system, one channel a program.

    With c = factor C: taps_k = Re(sum q Abar^k), q = c Bbar, and l = log Abar,
    dl = dz + conj(q) sum k conj(Abar^k) dtaps_k + conj(c Abar) dweight, then through the discretization to A, B,
    C and dt.
    """
    i_d = tl.program_id(0)
    o_n = tl.arange(0, BLOCK_N)[None, :]
    m_n = o_n < N
    pair: tl.constexpr = 2 if COMPLEX else 1
    J: tl.constexpr = 2**NEAR_BITS
    CHUNK: tl.constexpr = 2 ** (NEAR_BITS + FAR_BITS)
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    b_re, b_im = 1.0 + 0 * c_re, 0 * c_re
    if B is not None:
        b_re, b_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    # all that is read is asked for before the first wait
    o_k = tl.arange(0, CHUNK)
    size = CHUNK + 3 * N * pair
    partial += i_d * size
    b_dtaps = tl.zeros([CHUNK], tl.float64)
    dbbar_re, dbbar_im = tl.zeros([1, BLOCK_N], tl.float64), tl.zeros([1, BLOCK_N], tl.float64)
    dw_re, dw_im, dl_re, dl_im = dbbar_re, dbbar_im, dbbar_re, dbbar_im
    for _ in range(count):
        p_sums = partial + CHUNK
        x_re, x_im = load_wide(p_sums, o_n, m_n, COMPLEX)
        y_re, y_im = load_wide(p_sums + N * pair, o_n, m_n, COMPLEX)
        s_re, s_im = load_wide(p_sums + 2 * N * pair, o_n, m_n, COMPLEX)
        b_dtaps += tl.load(partial + o_k).to(tl.float64)
        dbbar_re, dbbar_im = dbbar_re + x_re, dbbar_im + x_im
        dw_re, dw_im = dw_re + y_re, dw_im + y_im
        dl_re, dl_im = dl_re + s_re, dl_im + s_im
        partial += D * size
    c_re, c_im = factor * c_re, factor * c_im
    z_re, z_im = b_dt * lam_re, b_dt * lam_im
    a_re, a_im = abar(z_re, z_im, RULE)
    g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
    dg_re, dg_im, dlog_re, dlog_im = entry_gradient(z_re, z_im, a_re, a_im, g_re, g_im, RULE)
    # Bbar = f B
    f_re, f_im = b_dt * g_re, b_dt * g_im
    if RULE == "dss-exp-no-scale":
        f_re, f_im = 1.0 + 0 * a_re, 0 * a_im
    bbar_re, bbar_im = times(f_re, f_im, b_re, b_im)
    q_re, q_im = times(c_re, c_im, bbar_re, bbar_im)

    if dskip is not None:
        tl.store(dskip + i_d, tl.sum(tl.where(o_k == 0, b_dtaps, 0.0), 0).to(dskip.dtype.element_ty))

    # the sums over k = i J + j, first over j
    p_re, p_im, far_re, far_im = power_table(a_re, -a_im, NEAR_BITS)
    s_re, s_im, _, _ = power_table(far_re, far_im, FAR_BITS)
    b_dtaps = tl.reshape(b_dtaps, [2**FAR_BITS, J])[:, :, None]
    x_re, x_im = b_dtaps * p_re[None, :, :], b_dtaps * p_im[None, :, :]
    b_k = tl.arange(0, J)[None, :, None].to(tl.float64)
    y_re, y_im = tl.sum(b_k * x_re, 1), tl.sum(b_k * x_im, 1)
    x_re, x_im = times(s_re, s_im, tl.sum(x_re, 1), tl.sum(x_im, 1))
    dq_re, dq_im = tl.sum(x_re, 0)[None, :], tl.sum(x_im, 0)[None, :]
    y_re, y_im = times(s_re, s_im, y_re, y_im)
    b_k = J * tl.arange(0, 2**FAR_BITS)[:, None].to(tl.float64)
    x_re, x_im = tl.sum(b_k * x_re + y_re, 0)[None, :], tl.sum(b_k * x_im + y_im, 0)[None, :]
    x_re, x_im = times(q_re, -q_im, x_re, x_im)
    dl_re, dl_im = dl_re + x_re, dl_im + x_im
    w_re, w_im = times(c_re, c_im, a_re, a_im)
    x_re, x_im = times(w_re, -w_im, dw_re, dw_im)
    dl_re, dl_im = dl_re + x_re, dl_im + x_im
    x_re, x_im = times(bbar_re, -bbar_im, dq_re, dq_im)
    y_re, y_im = times(a_re, -a_im, dw_re, dw_im)
    o_out = i_d * N + o_n
    dtype: tl.constexpr = dC.dtype.element_ty
    store_narrow(dC, o_out, (factor * (x_re + y_re)).to(dtype), (factor * (x_im + y_im)).to(dtype), m_n, C_COMPLEX)
    x_re, x_im = times(c_re, -c_im, dq_re, dq_im)
    dbbar_re, dbbar_im = dbbar_re + x_re, dbbar_im + x_im
    if dB is not None:
        x_re, x_im = times(f_re, -f_im, dbbar_re, dbbar_im)
        dtype_B: tl.constexpr = dB.dtype.element_ty
        store_narrow(dB, o_out, x_re.to(dtype_B), x_im.to(dtype_B), m_n, B_COMPLEX)

    dz_re, dz_im = times(dlog_re, -dlog_im, dl_re, dl_im)
    b_ddt = 0 * dz_re
    if RULE != "dss-exp-no-scale":
        x_re, x_im = times(dg_re, dg_im, b_re, b_im)
        x_re, x_im = times(b_dt * x_re, -b_dt * x_im, dbbar_re, dbbar_im)
        dz_re, dz_im = dz_re + x_re, dz_im + x_im
        x_re, x_im = times(g_re, g_im, b_re, b_im)
        b_ddt += x_re * dbbar_re + x_im * dbbar_im
    b_ddt += lam_re * dz_re + lam_im * dz_im
    tl.store(ddt + i_d, tl.sum(tl.sum(b_ddt, 1), 0).to(ddt.dtype.element_ty))
    dtype_A: tl.constexpr = dA.dtype.element_ty
    store_narrow(dA, o_out, (b_dt * dz_re).to(dtype_A), (b_dt * dz_im).to(dtype_A), m_n, A_COMPLEX)


@triton.jit
def _toeplitz(taps, C: tl.constexpr):
    """K[i, j] = taps[j - i], zero where j < i."""
    o_lag = tl.arange(0, C)[None, :] - tl.arange(0, C)[:, None]
    return tl.load(taps + o_lag, mask=o_lag >= 0, other=0.0)


@triton.jit
def _tap_sums(b_x):
    """The sum of each diagonal: the gradient of taps from that of K."""
    C: tl.constexpr = b_x.shape[0]
    o_l = tl.arange(0, C)[None, :]
    o_j = o_l + tl.arange(0, C)[:, None]
    return tl.sum(tl.where(o_j < C, tl.gather(b_x, tl.minimum(o_j, C - 1), 1), 0.0), 0)


@triton.jit
def _terms(b_x, NUM: tl.constexpr, HALF: tl.constexpr):
    """What matrix units multiply: NUM bfloat16 tiles that add up to b_x, or b_x in float32."""
    if HALF:
        b_high = b_x.to(tl.bfloat16)
        terms = (b_high,)
        if NUM == 2:
            terms += ((b_x - b_high.to(tl.float32)).to(tl.bfloat16),)
    else:
        terms = (b_x,)
    return terms


@triton.jit
def _transposed(terms):
    turned = ()
    for i in tl.static_range(len(terms)):
        turned += (tl.trans(terms[i]),)
    return turned


@triton.jit
def _add_product(b_sum, a, b, HALF: tl.constexpr):
    """b_sum + a b, the products of two second terms left out."""
    for i in tl.static_range(len(a)):
        for j in tl.static_range(len(b)):
            if i + j <= 1:
                # bfloat16 terms have no such choice
                b_sum = tl.dot(a[i], b[j], b_sum, input_precision="ieee" if HALF else "tf32x3")
    return b_sum


@triton.jit
def _parts(b_x, COMPLEX: tl.constexpr):
    """The inverse of `_interleave`."""
    if COMPLEX:
        return tl.split(tl.reshape(b_x, [b_x.shape[0], b_x.shape[1] // 2, 2]))
    else:  # noqa: RET505
        return b_x, b_x


@triton.jit
def _decayed(b_x, a_re, a_im, r_re, r_im, COMPLEX: tl.constexpr, HALF: tl.constexpr):
    """(a + r) x for interleaved x, r what rounding took of a: over many chunks it adds up."""
    x_re, x_im = _parts(b_x, COMPLEX)
    y_re, y_im = _multiply(a_re, a_im, x_re, x_im, COMPLEX)
    if not HALF:
        x_re, x_im = _multiply(r_re, r_im, x_re, x_im, COMPLEX)
        y_re, y_im = y_re + x_re, y_im + x_im
    return _interleave(y_re, y_im, COMPLEX)


@triton.jit
def _compose(a_re, a_im, x_re, x_im, b_re, b_im, y_re, y_im):
    """First h -> a h + x, then h -> b h + y."""
    return (
        b_re * a_re - b_im * a_im,
        b_re * a_im + b_im * a_re,
        b_re * x_re - b_im * x_im + y_re,
        b_re * x_im + b_im * x_re + y_im,
    )


@triton.jit
def _compose_real(a, x, b, y):
    return b * a, b * x + y


@triton.jit
def _scan(b_x, a_re, a_im, r_re, r_im, SEGMENTS: tl.constexpr, COMPLEX: tl.constexpr, HALF: tl.constexpr):
    """s_r = (a + r) s_{r-1} + x_r over the rows of interleaved x, of SEGMENTS rows each."""
    x_re, x_im = _parts(b_x, COMPLEX)
    if not HALF:
        # powers of a rounded a err as often as there are rows
        a_re, a_im = a_re.to(tl.float64) + r_re.to(tl.float64), a_im.to(tl.float64) + r_im.to(tl.float64)
        x_re, x_im = x_re.to(tl.float64), x_im.to(tl.float64)
    ROWS: tl.constexpr = x_re.shape[0]
    N: tl.constexpr = x_re.shape[1]
    x_re = tl.reshape(x_re, [ROWS // SEGMENTS, SEGMENTS, N])
    a_re = a_re[None, :, :] + tl.zeros_like(x_re)
    if COMPLEX:
        x_im = tl.reshape(x_im, [ROWS // SEGMENTS, SEGMENTS, N])
        a_im = a_im[None, :, :] + tl.zeros_like(x_re)
        _, _, x_re, x_im = tl.associative_scan((a_re, a_im, x_re, x_im), 1, _compose)
        x_im = tl.reshape(x_im, [ROWS, N])
    else:
        _, x_re = tl.associative_scan((a_re, x_re), 1, _compose_real)
    return _interleave(tl.reshape(x_re, [ROWS, N]).to(tl.float32), x_im.to(tl.float32), COMPLEX)


@triton.jit
def _load_parts(p, o, m, COMPLEX: tl.constexpr):
    """Real and imaginary part; read as they lie, so that neighbours are read together."""
    return _parts(tl.load(p + o, mask=m, other=0.0), COMPLEX)


@triton.jit
def _powers(powers, o_k, o_w, m_w, row, J: tl.constexpr, COMPLEX: tl.constexpr):
    """Abar^k of one channel [k, N], from the powers below J and the multiples of J; `row` numbers are a power."""
    o_k = o_k[:, None]
    near_re, near_im = _load_parts(powers, o_k % J * row + o_w, m_w, COMPLEX)
    far_re, far_im = _load_parts(powers, (J + o_k // J) * row + o_w, m_w, COMPLEX)
    return _multiply(near_re, near_im, far_re, far_im, COMPLEX)


@triton.jit
def _map(powers, factor, o_k, o_w, m_w, row, J: tl.constexpr, COMPLEX: tl.constexpr):
    """factor Abar^k."""
    p_re, p_im = _powers(powers, o_k, o_w, m_w, row, J, COMPLEX)
    f_re, f_im = _load_parts(factor, o_w, m_w, COMPLEX)
    return _multiply(p_re, p_im, f_re, f_im, COMPLEX)


@triton.jit
def _add2(a, b, x, y):
    return a + x, b + y


@triton.jit
def _add4(a, b, c, d, x, y, z, w):
    return a + x, b + y, c + z, d + w


@triton.jit
def _contract(
    b_x, powers, o_k, f_re, f_im, p_sum, o_w, m_w, row, J: tl.constexpr, SIGN: tl.constexpr, COMPLEX: tl.constexpr
):
    """Stores sum_k conj(Abar^k) x_k; returns conj(f) sum_k k conj(Abar^k) x_k. x has SIGN times the imaginary part."""
    p_re, p_im = _powers(powers, o_k, o_w, m_w, row, J, COMPLEX)
    d_re, d_im = _parts(b_x, COMPLEX)
    d_re, d_im = _multiply(p_re, -p_im, d_re, SIGN * d_im, COMPLEX)
    b_k = o_k[:, None].to(tl.float32)
    # together: a sum over rows waits for all warps
    if COMPLEX:
        d_re, d_im, k_re, k_im = tl.reduce((d_re, d_im, b_k * d_re, b_k * d_im), 0, _add4)
        d_im, k_im = d_im[None, :], k_im[None, :]
    else:
        d_re, k_re = tl.reduce((d_re, b_k * d_re), 0, _add2)
        k_im = f_im
    d_re, k_re = d_re[None, :], k_re[None, :]
    tl.store(p_sum + o_w, _interleave(d_re, d_im, COMPLEX), mask=m_w)
    return _multiply(f_re, -f_im, k_re, k_im, COMPLEX)


@triton.jit
def _diagonals(b_x, COMPLEX: tl.constexpr):
    """sum conj(h) H, from the products of interleaved h and H."""
    W: tl.constexpr = b_x.shape[0]
    o_i, o_j = tl.arange(0, W)[:, None], tl.arange(0, W)[None, :]
    b_same = tl.where(o_i == o_j, b_x, 0.0)
    if COMPLEX:
        b_cross = tl.where(o_i == (o_j ^ 1), tl.where(o_j % 2 == 0, -b_x, b_x), 0.0)
        d_re, d_im = tl.reduce((b_same, b_cross), 0, _add2)
        d_re = tl.sum(tl.reshape(d_re, [W // 2, 2]), 1)[None, :]
        d_im = tl.sum(tl.reshape(d_im, [W // 2, 2]), 1)[None, :]
    else:
        d_re = tl.sum(b_same, 0)[None, :]
        d_im = d_re
    return d_re, d_im


@triton.jit
def _load_tile(p, o_row, o_t, m_t):
    return tl.load(p + (o_row + o_t), mask=m_t, other=0.0)


@triton.jit
def _factors(b_x, NUM: tl.constexpr, HALF: tl.constexpr):
    """`_terms` of a tile as it was loaded, or of a float32 one."""
    if HALF and b_x.dtype == tl.bfloat16:  # noqa: SIM108
        terms = (b_x,)
    else:
        terms = _terms(b_x.to(tl.float32), NUM, HALF)
    return terms


@triton.jit(do_not_specialize=["num_pieces", "num_steps", "num_chunks"])
def _lti_fwd_kernel(
    u,
    gate_in,
    gate_out,
    small,
    start,
    y,
    saved,
    end,
    B,
    T,
    D,
    N,
    num_pieces,
    num_steps,
    num_chunks,
    u_stride_b,
    u_stride_d,
    in_stride_b,
    in_stride_d,
    out_stride_b,
    out_stride_d,
    COMPLEX: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr,
    MAP_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    STORE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """y of a piece of ROWS / SEGMENTS sequences of one channel; y None: only the state after the piece.

    A row of a tile is a segment of num_steps chunks. start [pieces, B, D, N] or None (zeros): the state before each
    piece. saved [B, D, num_chunks, interleaved BLOCK_N] or None: the state before each chunk. end [pieces, B, D, N]:
    after each piece (y None), or [B, D, N]: before chunk T // C.
    """
    i_d, i_gp = tl.program_id(0) % D, tl.program_id(0) // D
    i_p, i_g = i_gp % num_pieces, i_gp // num_pieces
    pair: tl.constexpr = 2 if COMPLEX else 1
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, C)
    o_w = tl.arange(0, BLOCK_N * pair)[None, :]
    row = N * pair
    m_w = o_w < row
    o_b, o_s = i_g * (ROWS // SEGMENTS) + o_r // SEGMENTS, o_r % SEGMENTS
    i_wide = i_d
    if WIDE:
        o_b, i_wide = o_b.to(tl.int64), i_d.to(tl.int64)
    m_b, m_first = o_b < B, o_s == 0
    o_chunk = (i_p * SEGMENTS + o_s) * num_steps
    o_state = ((i_p * B + o_b) * D + i_d) * row + o_w
    o_u = o_b * u_stride_b + i_wide * u_stride_d
    o_in = o_b * in_stride_b + i_wide * in_stride_d
    NUM_POWERS: tl.constexpr = J + C // J + 8
    taps = small + i_d * (C + (2 + NUM_POWERS) * row)
    bbar, weight, powers = taps + C, taps + C + row, taps + C + 2 * row
    decays = powers + (J + C // J) * row
    a_re, a_im = _load_parts(decays, o_w, m_w, COMPLEX)
    r_re, r_im = _load_parts(decays + row, o_w, m_w, COMPLEX)
    e_re, e_im = _map(powers, bbar, C - 1 - o_c, o_w, m_w, row, J, COMPLEX)
    e = _terms(_interleave(e_re, e_im, COMPLEX), MAP_TERMS, HALF)
    if y is not None:
        # here too, so that all that is loaded from the tables is waited for once
        k = _terms(_toeplitz(taps, C), TAP_TERMS, HALF)
        w_re, w_im = _map(powers, weight, o_c, o_w, m_w, row, J, COMPLEX)
        w = _transposed(_terms(_interleave(w_re, -w_im, COMPLEX), MAP_TERMS, HALF))

    b_h = tl.zeros([ROWS, BLOCK_N * pair], tl.float32)
    if SEGMENTS > 1 or y is None:
        # states that the segment before, or for the end its own, reaches from zero
        shift: tl.constexpr = 0 if y is None else 1
        o_before = o_chunk - shift * num_steps
        m_before = m_b & (o_s >= shift)
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            o_t = (o_before + i) * C + o_c[None, :]
            m_t = m_before & (o_t < T)
            b_v = _load_tile(u, o_u, o_t, m_t)
            if gate_in is not None:
                b_v = b_v.to(tl.float32) * _load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
            v = _factors(b_v, GATED_TERMS, HALF)
            b_h = _add_product(_decayed(b_h, a_re, a_im, r_re, r_im, COMPLEX, HALF), v, e, HALF)
    if start is not None:
        b_h += tl.load(start + o_state, mask=m_b & m_first & m_w, other=0.0)
    if SEGMENTS > 1:
        x_re, x_im = _load_parts(decays + 2 * row, o_w, m_w, COMPLEX)
        s_re, s_im = _load_parts(decays + 3 * row, o_w, m_w, COMPLEX)
        b_h = _scan(b_h, x_re, x_im, s_re, s_im, SEGMENTS, COMPLEX, HALF)
    if y is None:
        tl.store(end + o_state, b_h, mask=m_b & (o_s == SEGMENTS - 1) & m_w)
    else:
        o_out = o_b * out_stride_b + i_wide * out_stride_d
        o_row = o_b * D + i_d
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            o_t = (o_chunk + i) * C + o_c[None, :]
            m_t = m_b & (o_t < T)
            b_v = _load_tile(u, o_u, o_t, m_t)
            if gate_in is not None:
                b_v = b_v.to(tl.float32) * _load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
            v = _factors(b_v, GATED_TERMS, HALF)
            h = _terms(b_h, STATE_TERMS, HALF)
            if saved is not None:
                o_saved = (o_row * num_chunks + o_chunk + i) * (BLOCK_N * pair) + o_w
                m_saved = m_b & (o_chunk + i < num_chunks)
                tl.store(saved + o_saved, b_h.to(saved.dtype.element_ty), mask=m_saved, cache_modifier=STORE)
            if end is not None:
                tl.store(end + o_row * row + o_w, b_h, mask=m_b & m_w & (o_chunk + i == T // C))
            b_h = _add_product(_decayed(b_h, a_re, a_im, r_re, r_im, COMPLEX, HALF), v, e, HALF)
            b_y = _add_product(tl.zeros([ROWS, C], tl.float32), v, k, HALF)
            b_y = _add_product(b_y, h, w, HALF)
            if gate_out is not None:
                b_y *= _load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
            tl.store(y + (o_row * T + o_t), b_y.to(y.dtype.element_ty), mask=m_t, cache_modifier=STORE)


@triton.jit(do_not_specialize=["num_pieces", "num_steps", "num_chunks"])
def _lti_bwd_kernel(
    u,
    gate_in,
    gate_out,
    dy,
    small,
    saved,
    after,
    dend,
    du,
    dgate_in,
    dgate_out,
    dstart,
    partial,
    B,
    T,
    D,
    N,
    num_pieces,
    num_steps,
    num_chunks,
    u_stride_b,
    u_stride_d,
    in_stride_b,
    in_stride_d,
    out_stride_b,
    out_stride_d,
    dy_stride_b,
    dy_stride_d,
    COMPLEX: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HALVED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATED_TERMS: tl.constexpr,
    TAP_TERMS: tl.constexpr,
    MAP_TERMS: tl.constexpr,
    STATE_TERMS: tl.constexpr,
    STORE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The gradient recurrence of this module; du None: only dstart, the gradient H of the state before each piece.

    after [pieces, B, D, N] or None: H after each piece. dend [B, D, N] or None: of the state before chunk T // C.
    dstart [pieces, B, D, N] (du None), else [B, D, N] or None. partial [*, D, taps C, then Bbar, c, z each N].
    HALVED: segments are half as long as those of the forward pass.
    """
    i_d, i_gp = tl.program_id(0) % D, tl.program_id(0) // D
    i_p, i_g = i_gp % num_pieces, i_gp // num_pieces
    pair: tl.constexpr = 2 if COMPLEX else 1
    o_r, o_c = tl.arange(0, ROWS)[:, None], tl.arange(0, C)
    o_w = tl.arange(0, BLOCK_N * pair)[None, :]
    row = N * pair
    m_w = o_w < row
    # segments from the last to the first, as H goes
    o_b, o_s = i_g * (ROWS // SEGMENTS) + o_r // SEGMENTS, SEGMENTS - 1 - o_r % SEGMENTS
    i_wide = i_d
    if WIDE:
        o_b, i_wide = o_b.to(tl.int64), i_d.to(tl.int64)
    m_b, m_first = o_b < B, o_r % SEGMENTS == 0
    o_chunk = (i_p * SEGMENTS + o_s) * num_steps
    o_row = o_b * D + i_d
    o_state = ((i_p * B + o_b) * D + i_d) * row + o_w
    o_dy = o_b * dy_stride_b + i_wide * dy_stride_d
    o_out = o_b * out_stride_b + i_wide * out_stride_d
    NUM_POWERS: tl.constexpr = J + C // J + 8
    taps = small + i_d * (C + (2 + NUM_POWERS) * row)
    bbar, weight, powers = taps + C, taps + C + row, taps + C + 2 * row
    decays = powers + (J + C // J) * row
    a_re, a_im = _load_parts(decays, o_w, m_w, COMPLEX)
    r_re, r_im = _load_parts(decays + row, o_w, m_w, COMPLEX)
    w_re, w_im = _map(powers, weight, o_c, o_w, m_w, row, J, COMPLEX)
    w = _terms(_interleave(w_re, -w_im, COMPLEX), MAP_TERMS, HALF)
    if du is not None:
        e_re, e_im = _map(powers, bbar, C - 1 - o_c, o_w, m_w, row, J, COMPLEX)
        e = _transposed(_terms(_interleave(e_re, e_im, COMPLEX), MAP_TERMS, HALF))
        k = _terms(_toeplitz(taps, C), TAP_TERMS, HALF)

    # H, interleaved
    b_x = tl.zeros([ROWS, BLOCK_N * pair], tl.float32)
    if SEGMENTS > 1 or du is None:
        shift: tl.constexpr = 0 if du is None else 1
        o_behind = o_chunk + shift * num_steps
        m_behind = m_b & (o_s < SEGMENTS - shift)
        # one tile a step, where there is room for three
        stages: tl.constexpr = 2 * NUM_STAGES if gate_out is None else NUM_STAGES
        for i in tl.range(0, num_steps, num_stages=stages):
            i_chunk = o_behind + (num_steps - 1 - i)
            o_t = i_chunk * C + o_c[None, :]
            m_t = m_behind & (o_t < T)
            b_g = _load_tile(dy, o_dy, o_t, m_t)
            if gate_out is not None:
                b_g = b_g.to(tl.float32) * _load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
            g = _factors(b_g, GATED_TERMS, HALF)
            b_x = _add_product(_decayed(b_x, a_re, -a_im, r_re, -r_im, COMPLEX, HALF), g, w, HALF)
            if dend is not None:
                m_end = m_behind & m_w & (i_chunk == T // C)
                b_x += tl.load(dend + o_row * row + o_w, mask=m_end, other=0.0)
    if after is not None:
        b_x += tl.load(after + o_state, mask=m_b & m_first & m_w, other=0.0)
    if SEGMENTS > 1:
        segment = decays + (4 if HALVED else 2) * row
        x_re, x_im = _load_parts(segment, o_w, m_w, COMPLEX)
        s_re, s_im = _load_parts(segment + row, o_w, m_w, COMPLEX)
        b_x = _scan(b_x, x_re, -x_im, s_re, -s_im, SEGMENTS, COMPLEX, HALF)
    if du is None:
        tl.store(dstart + o_state, b_x, mask=m_b & (o_s == 0) & m_w)
    else:
        o_u = o_b * u_stride_b + i_wide * u_stride_d
        o_in = o_b * in_stride_b + i_wide * in_stride_d
        dk = tl.zeros([C, C], tl.float32)
        de = tl.zeros([C, BLOCK_N * pair], tl.float32)
        dw = tl.zeros([C, BLOCK_N * pair], tl.float32)
        # sums of h_r H_{r+1}, of which da is the part near the diagonal: cheaper than leaving the matrix units
        dd = tl.zeros([BLOCK_N * pair, BLOCK_N * pair], tl.float32)
        dtap = tl.zeros([ROWS], tl.float32)
        for i in tl.range(0, num_steps, num_stages=NUM_STAGES):
            i_chunk = o_chunk + (num_steps - 1 - i)
            o_t = i_chunk * C + o_c[None, :]
            m_t = m_b & (o_t < T)
            b_dy = _load_tile(dy, o_dy, o_t, m_t)
            b_u = _load_tile(u, o_u, o_t, m_t)
            o_saved = (o_row * num_chunks + i_chunk) * (BLOCK_N * pair) + o_w
            b_h = tl.load(saved + o_saved, mask=m_b & (i_chunk < num_chunks), other=0.0)
            b_g, b_v = b_dy, b_u
            if gate_out is not None:
                b_gate_out = _load_tile(gate_out, o_out, o_t, m_t).to(tl.float32)
                b_g = b_dy.to(tl.float32) * b_gate_out
            if gate_in is not None:
                b_gate_in = _load_tile(gate_in, o_in, o_t, m_t).to(tl.float32)
                b_v = b_u.to(tl.float32) * b_gate_in
            if gate_in is not None or gate_out is not None:
                # the gradient of D is this alone, and rounded v or g would lose more than the products do
                dtap += tl.sum(b_v.to(tl.float32) * b_g.to(tl.float32), 1)
            g, v = _factors(b_g, GATED_TERMS, HALF), _factors(b_v, GATED_TERMS, HALF)
            h, x = _factors(b_h, STATE_TERMS, HALF), _terms(b_x, STATE_TERMS, HALF)
            b_x = _add_product(_decayed(b_x, a_re, -a_im, r_re, -r_im, COMPLEX, HALF), g, w, HALF)
            if dend is not None:
                m_end = m_b & m_w & (i_chunk == T // C)
                b_x += tl.load(dend + o_row * row + o_w, mask=m_end, other=0.0)

            b_dv = _add_product(tl.zeros([ROWS, C], tl.float32), g, _transposed(k), HALF)
            b_dv = _add_product(b_dv, x, e, HALF)
            o_y = o_row * T + o_t
            if gate_in is not None:
                b_dgate = (b_dv * b_u.to(tl.float32)).to(dgate_in.dtype.element_ty)
                tl.store(dgate_in + o_y, b_dgate, mask=m_t, cache_modifier=STORE)
                b_dv *= b_gate_in
            b_du = b_dv.to(du.dtype.element_ty)
            if gate_out is not None:
                b_y = _add_product(tl.zeros([ROWS, C], tl.float32), v, k, HALF)
                b_y = _add_product(b_y, h, _transposed(w), HALF)
                b_dgate = (b_y * b_dy.to(tl.float32)).to(dgate_out.dtype.element_ty)
                tl.store(dgate_out + o_y, b_dgate, mask=m_t, cache_modifier=STORE)

            turned = _transposed(v)
            dk = _add_product(dk, turned, g, HALF)
            de = _add_product(de, turned, x, HALF)
            dw = _add_product(dw, _transposed(g), h, HALF)
            dd = _add_product(dd, _transposed(h), x, HALF)
            # last: products wait for what was stored before them, and x has left its shared memory
            tl.store(du + o_y, b_du, mask=m_t, cache_modifier=STORE)

        if dstart is not None:
            tl.store(dstart + o_row * row + o_w, b_x, mask=m_b & m_w & (i_p + o_s == 0))
        p_partial = partial + (i_gp.to(tl.int64) * D + i_d) * (C + 3 * row)
        b_taps = _tap_sums(dk)
        if gate_in is not None or gate_out is not None:
            b_taps = tl.where(o_c == 0, tl.sum(dtap, 0), b_taps)
        tl.store(p_partial + o_c, b_taps)
        p_partial += C
        # dBbar = sum conj(Abar^k) dE, and the share of dz is k conj(E) dE
        f_re, f_im = _load_parts(bbar, o_w, m_w, COMPLEX)
        dz_re, dz_im = _contract(de, powers, C - 1 - o_c, f_re, f_im, p_partial, o_w, m_w, row, J, 1, COMPLEX)
        # the same for c and dO, of which the imaginary part came negative
        f_re, f_im = _load_parts(weight, o_w, m_w, COMPLEX)
        x_re, x_im = _contract(dw, powers, o_c, f_re, f_im, p_partial + row, o_w, m_w, row, J, -1, COMPLEX)
        # and of the chunk decay: C conj(a) da
        d_re, d_im = _diagonals(dd, COMPLEX)
        f_re, f_im = _load_parts(decays, o_w, m_w, COMPLEX)
        d_re, d_im = _multiply(f_re, -f_im, d_re, d_im, COMPLEX)
        dz_re, dz_im = dz_re + x_re + C * d_re, dz_im + x_im + C * d_im
        tl.store(p_partial + 2 * row + o_w, _interleave(dz_re, dz_im, COMPLEX), mask=m_w)


class Plan(NamedTuple):
    """How the kernels cover [B, D, T]: a tile of `rows` rows holds `segments` segments, `steps` chunks each, of some
    sequences of one channel; longer sequences have several `pieces` of segments."""

    chunk: int
    chunks: int
    rows: int
    segments: int
    steps: int
    pieces: int
    groups: int
    """Of sequences, that share a tile."""
    config: Config

    @property
    def programs(self) -> int:
        """For one channel."""
        return self.groups * self.pieces


def _padded(num_states: int, is_complex: bool) -> int:
    """Tiles 64 wide: narrower ones are slower, and one of their kinds the compiler gets wrong."""
    return max(32 if is_complex else 64, power_of_2(num_states))


def _config(dtype: torch.dtype, length: int, is_complex: bool, tuning: Tuning) -> Config:
    config = tuning.narrow if dtype == torch.bfloat16 else tuning.wide
    if length < tuning.averaging_length:
        return config._replace(gated=2, taps=2, maps=2, states=2)
    # the gradient of dt of slow modes is a small difference of large sums
    return config if is_complex else config._replace(gated=2)


def cheapest_plan(
    batch: int, length: int, width: int, with_end: bool, programs: int, config: Config, tuning: Tuning
) -> Plan:
    """The cheapest of all ways to share a tile, counted in steps of a program; `programs` run at the same time."""
    # the state after the last whole chunk stands before a chunk that may be empty
    chunks = length // config.chunk + 1 if with_end else cdiv(length, config.chunk)

    def shared_by(sequences: int) -> tuple[int, Plan]:
        segments, groups = config.rows // sequences, cdiv(batch, sequences)
        # a piece costs a launch and another reading, so only where half of the chip would be idle
        pieces = tuning.pieces or max(1, programs // (groups * width))
        steps = cdiv(chunks, segments * pieces)
        pieces = cdiv(chunks, segments * steps)
        plan = Plan(config.chunk, chunks, config.rows, segments, steps, pieces, groups, config)
        # states come first, at about half the cost of outputs
        cost = 2 * tuning.setup_steps + steps * (2 + (segments > 1) + (pieces > 1))
        return cdiv(plan.programs * width, programs) * cost, plan

    if tuning.sequences is not None:
        return shared_by(tuning.sequences)[1]
    sizes = [2**i for i in range(config.rows.bit_length())]
    return min((shared_by(size) for size in sizes if size < 2 * batch), key=lambda pair: pair[0])[1]


def backward_plan(plan: Plan, fits: bool, tall_steps: int) -> Plan:
    """Long loops are halved where twice the rows fit into shared memory; the same sequences share a tile."""
    single, whole = plan.config.maps == plan.config.states == 1, plan.steps % 2 == 0 or plan.pieces == 1
    if not (fits and single and whole) or plan.steps < tall_steps or plan.segments == 1:
        return plan
    return plan._replace(rows=2 * plan.rows, segments=2 * plan.segments, steps=cdiv(plan.steps, 2))


@overload
def _dense(x: Tensor) -> Tensor: ...
@overload
def _dense(x: Tensor | None) -> Tensor | None: ...
def _dense(x: Tensor | None) -> Tensor | None:
    return x if x is None or (x.is_contiguous() and not x.is_conj()) else x.resolve_conj().contiguous()


def _inner(chunk: int) -> int:
    return int(2 ** (chunk.bit_length() // 2))


def _constants(
    plan: Plan,
    is_complex: bool,
    num_states: int,
    dtype: torch.dtype,
    gated: bool,
    wide: bool,
    backward: bool,
    ptx: bool,
    tuning: Tuning,
) -> dict[str, Any]:
    block = _padded(num_states, is_complex)
    warps, stages = plan.config.warps[backward], plan.config.stages[backward]
    halved = plan.rows > plan.config.rows
    if gated:
        # three to five tiles a step
        stages = min(stages, 3)
    wide_state = block * (2 if is_complex else 1) > 64
    short = dtype == torch.bfloat16 and not (backward or gated or wide_state) and plan.steps <= tuning.short_steps
    if short:
        stages = min(stages, 2)
    if backward and (gated or halved or wide_state):
        # four have no room for so many sums, or rows
        warps = 8
    constants = {
        "COMPLEX": is_complex,
        "HALF": dtype == torch.bfloat16,
        "C": plan.chunk,
        "J": _inner(plan.chunk),
        "ROWS": plan.rows,
        "SEGMENTS": plan.segments,
        "WIDE": wide,
        "BLOCK_N": block,
        "GATED_TERMS": plan.config.gated,
        "TAP_TERMS": plan.config.taps,
        "MAP_TERMS": plan.config.maps,
        "STATE_TERMS": plan.config.states,
        "STORE": plan.config.store,
        "NUM_STAGES": stages,
        "num_warps": warps,
    }
    if backward:
        constants["HALVED"] = halved
    return constants | {"maxnreg": tuning.short_registers} if short and ptx else constants


class CallPlan:
    """What calls with equal shapes, strides, dtypes and device share: plans, sizes to allocate, launches; no tensors.

    trained: whether a backward pass may follow.
    forms: shape, stride, dtype and device of u, both gates, the initial state, A, B, C, dt and D.
    launch_type: makes a launch from kernel, grid, numbers and constants.
    """

    def __init__(
        self,
        factor: float,
        rule: str,
        with_end: bool,
        trained: bool,
        *forms: Form,
        tuning: Tuning,
        launch_type: Callable[..., Launch] = Launch,
    ) -> None:
        self.tuning, self.launch_type = tuning, launch_type
        u, gate_in, gate_out, _, A, B, C, _, _ = forms
        assert u is not None
        assert A is not None
        (self.batch, self.length, self.width), _, self.dtype, device = u
        self.factor, self.rule, self.with_end, self.trained = factor, rule, with_end, trained
        # from sequence to sequence and from channel to channel
        self.strides = [(0, 0) if x is None else x[1][::2] for x in (u, gate_in, gate_out)]
        self.gated = gate_in is not None or gate_out is not None
        self.time_last = (self.width * self.length, 1, self.length)
        self.A_dtype, self.A_shared, self.num_states = A[2], len(A[0]) == 1, A[0][-1]
        self.kinds = [x is not None and x[2].is_complex for x in (A, B, C)]
        self.complex = any(self.kinds)
        # numbers of a channel's states
        self.row = self.num_states * (2 if self.complex else 1)
        self.state_dtype = torch.complex64 if self.complex else torch.float32
        config = _config(self.dtype, self.length, self.complex, tuning)
        programs = tuning.programs or tuning.programs_per_processor * num_processors(device)
        self.plan = plan = cheapest_plan(self.batch, self.length, self.width, with_end, programs, config, tuning)
        inner = _inner(plan.chunk)
        self.tables = (self.width, plan.chunk + (2 + inner + plan.chunk // inner + 8) * self.row)
        self.states = (self.batch, self.width, self.num_states)
        size = _padded(self.num_states, self.complex) * (2 if self.complex else 1)
        self.saved = (self.batch, self.width, plan.chunks, size)
        # as the products of the backward pass take them
        self.saved_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 and config.states == 1 else torch.float32
        self.launches: dict[Any, Launch] = {}

    @functools.cached_property
    def backward_plan(self) -> Plan:
        plain = self.dtype == torch.bfloat16 and not self.gated
        return backward_plan(self.plan, plain and self.num_states <= 32, self.tuning.tall_steps)

    @functools.cached_property
    def partial(self) -> tuple[int, int, int]:
        """Size of the partial sums of gradients of taps, Bbar, c and log Abar."""
        return self.backward_plan.programs, self.width, self.plan.chunk + 3 * self.row

    @functools.cached_property
    def prepare(self) -> Launch:
        plan = self.plan
        numbers = self.num_states, 0 if self.A_shared else self.num_states, plan.steps, cdiv(plan.steps, 2)
        numbers = *numbers, plan.steps.bit_length(), plan.segments.bit_length() - 1, self.factor
        return self.launch_type(_prepare_kernel, self.width, *numbers, **self._system_constants())

    @functools.cached_property
    def prepare_bwd(self) -> Launch:
        numbers = self.width, self.num_states, 0 if self.A_shared else self.num_states, self.partial[0], self.factor
        return self.launch_type(_prepare_bwd_kernel, self.width, *numbers, **self._system_constants())

    def _system_constants(self) -> dict[str, Any]:
        bits, (a, b, c) = self.plan.chunk.bit_length(), self.kinds
        return {
            # one rule has two names
            "RULE": "zoh" if self.rule == "dss-exp" else self.rule,
            "A_COMPLEX": a,
            "B_COMPLEX": b,
            "C_COMPLEX": c,
            "COMPLEX": self.complex,
            "NEAR_BITS": bits // 2,
            "FAR_BITS": (bits - 1) // 2,
            # a state a thread, so that sums over powers stay in it; narrower tiles would compute exp, sin, cos twice
            "BLOCK_N": max(32, power_of_2(self.num_states)),
            "num_warps": 1,
        }

    def launch(self, dy: tuple[int, ...] | None, *tensors: Tensor | None) -> None:
        """The kernel of a pass; dy: in the backward pass, the strides of that gradient."""
        # a launch is of the same tensors or None
        key = dy, *[x is None for x in tensors]
        ready = self.launches.get(key)
        if ready is None:
            ready = self.launches[key] = self._make(dy)
        ready(*tensors)

    def _make(self, dy: tuple[int, ...] | None) -> Launch:
        kernel, plan = (_lti_fwd_kernel, self.plan) if dy is None else (_lti_bwd_kernel, self.backward_plan)
        strides = self.strides if dy is None else [*self.strides, dy[::2]]
        # numbers of kept states, and how far the last of the inputs lies
        most = self.batch * self.width * plan.chunks * self.saved[-1]
        for stride_b, stride_d in strides:
            most = max(most, self.batch * stride_b + self.width * stride_d + self.length)
        options = self.dtype, self.gated, most >= self.tuning.wide_offsets, dy is not None, speaks_ptx()
        constants = _constants(plan, self.complex, self.num_states, *options, self.tuning)
        numbers = self.batch, self.length, self.width, self.num_states, plan.pieces, plan.steps, plan.chunks
        return self.launch_type(kernel, plan.programs * self.width, *numbers, *itertools.chain(*strides), **constants)

    def pass_on(self, reached: Tensor, small: Tensor, first: Tensor | None, backward: bool) -> Tensor:
        """The states at which pieces start, from those they reach from zero; in float64, for powers add errors up."""
        kind = torch.complex128 if self.complex else torch.float64
        last = small[:, -2 * self.row :]
        decay = (torch.view_as_complex(last.unflatten(1, (-1, 2))) if self.complex else last).to(kind)
        decay = decay[:, : self.num_states] + decay[:, self.num_states :]
        if backward:
            reached, decay = reached.flip(0), decay.conj()
        starts = [torch.zeros_like(reached[0], dtype=kind) if first is None else first.to(kind)]
        for state in reached[:-1]:
            starts.append(torch.addcmul(state.to(kind), decay, starts[-1]))
        return torch.stack(starts[::-1] if backward else starts).to(reached.dtype)


TUNING = Tuning()


class Planner:
    """Makes the `CallPlan` of a call; on a GPU it keeps plans, as making one takes longer than a short kernel runs."""

    def __init__(self, tuning: Tuning = TUNING, launch_type: Callable[..., Launch] = Launch) -> None:
        self.tuning = tuning
        self.make = functools.partial(CallPlan, tuning=tuning, launch_type=launch_type)
        self.kept = functools.lru_cache(256)(self.make)

    def __call__(self, on_gpu: bool, *key: Any) -> CallPlan:
        return (self.kept if on_gpu else self.make)(*key)


PLANNER = Planner()


def prepare(call: CallPlan, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, skip: Tensor | None) -> Tensor:
    """The tables of `_prepare_kernel`, one row a channel."""
    small = C.new_empty(call.tables, dtype=torch.float32)
    call.prepare(A, B, C, dt, skip, small)
    return small


def prepare_bwd(
    call: CallPlan, partial: Tensor, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of A, B, C, dt and the skip."""
    size = C.shape
    dA, dC, ddt = C.new_empty(size, dtype=call.A_dtype), C.new_empty(size), dt.new_empty(dt.shape)
    dB = None if B is None else B.new_empty(size)
    dskip = None if skip is None else skip.new_empty(skip.shape)
    call.prepare_bwd(A, B, C, dt, partial, dA, dB, dC, ddt, dskip)
    return dA.sum(0) if call.A_shared else dA, dB, dC, ddt, dskip


def lti_fwd(
    call: CallPlan,
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    small: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, on request the state before chunk T // C and, where trained, the states before each chunk."""
    given, start = (u, gate_in, gate_out, small), initial_state
    if call.plan.pieces > 1:
        ends = u.new_empty((call.plan.pieces, *call.states), dtype=call.state_dtype)
        call.launch(None, *given, None, None, None, ends)
        start = call.pass_on(ends, small, initial_state, False)
    # not the transpose of something else: a view that a custom function returns may not be changed in place
    y = u.new_empty_strided(u.shape, call.time_last)
    saved = u.new_empty(call.saved, dtype=call.saved_dtype) if call.trained else None
    end = u.new_empty(call.states, dtype=call.state_dtype) if call.with_end else None
    call.launch(None, *given, start, y, saved, end)
    return y, end, saved


def lti_bwd(
    call: CallPlan,
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    dy: Tensor,
    small: Tensor,
    saved: Tensor,
    dend: Tensor | None,
    with_start: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Gradients of u, the gates, partial ones of taps, Bbar, c and log Abar [*, D, *], and of the initial state."""
    given, strides, after, pieces = (u, gate_in, gate_out, dy, small, saved), dy.stride(), None, call.plan.pieces
    if pieces > 1:
        starts = u.new_empty((pieces, *call.states), dtype=call.state_dtype)
        call.launch(strides, *given, None, dend, None, None, None, starts, None)
        after = call.pass_on(starts, small, None, True)
    size, order = u.shape, call.time_last
    du = u.new_empty_strided(size, order)
    dgate_in = None if gate_in is None else gate_in.new_empty_strided(size, order)
    dgate_out = None if gate_out is None else gate_out.new_empty_strided(size, order)
    dstart = u.new_empty(call.states, dtype=call.state_dtype) if with_start else None
    partial = u.new_empty(call.partial, dtype=torch.float32)
    call.launch(strides, *given, after, dend, du, dgate_in, dgate_out, dstart, partial)
    return du, dgate_in, dgate_out, partial, dstart


class LtiSsm(torch.autograd.Function):
    """(u, both gates, initial state, A, B, C, dt, D) and their `CallPlan` to y and the state before chunk T // C."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        gate_in: Tensor | None,
        gate_out: Tensor | None,
        initial_state: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, Tensor | None]:
        *system, ctx.call = rest
        small = prepare(ctx.call, *system)
        y, end, states = lti_fwd(ctx.call, u, gate_in, gate_out, small, initial_state)
        save(ctx, u, gate_in, gate_out, states, small, *system)
        ctx.set_materialize_grads(False)
        return y, end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dend: Tensor | None) -> tuple[Tensor | None, ...]:
        u, gate_in, gate_out, states, small, *system = saved(ctx)
        call, with_start = ctx.call, ctx.needs_input_grad[3]
        dy = u.new_empty_strided(u.shape, call.time_last).zero_() if dy is None else time_last(dy)
        du, dgate_in, dgate_out, partial, dstart = lti_bwd(
            call, u, gate_in, gate_out, dy, small, states, _dense(dend), with_start
        )
        return du, dgate_in, dgate_out, dstart, *prepare_bwd(call, partial, *system), None


def lti_ssm_triton(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: str = "zoh",
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    planner: Planner = PLANNER,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] as u, time contiguous, and on request the final state [B, D, N] in float32 or complex64."""
    u = time_last(u)
    gate_in, gate_out = (None if gate is None else time_last(gate) for gate in (gate_in, gate_out))
    is_complex = A.is_complex() or C.is_complex() or (B is not None and B.is_complex())
    if initial_state is not None:
        initial_state = _dense(initial_state.to(torch.complex64 if is_complex else torch.float32))
    system = A, B, C, dt, D = _dense(A), _dense(B), _dense(C), _dense(dt), _dense(D)
    tensors = (u, gate_in, gate_out, initial_state, *system)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    max_pairs = planner.tuning.max_pairs
    single = u.dtype == torch.bfloat16 and u.shape[1] >= planner.tuning.averaging_length
    if trained and is_complex and A.shape[-1] > max_pairs and not single:
        # a backward pass of all modes would take more shared memory than there is; y is a sum over modes
        run = functools.partial(
            lti_ssm_triton,
            dt=dt,
            conj_pairs=conj_pairs,
            discretization=discretization,
            gate_in=gate_in,
            gate_out=gate_out,
            return_final_state=return_final_state,
            planner=planner,
        )
        (y, state), (others, state_of_others) = (
            run(
                u,
                A[..., modes],
                None if B is None else B[..., modes],
                C[..., modes],
                D=skip,
                initial_state=None if initial_state is None else initial_state[..., modes],
            )
            for modes, skip in ((slice(max_pairs), D), (slice(max_pairs, None), None))
        )
        if state is not None and state_of_others is not None:
            state = torch.cat([state, state_of_others], -1)
        return y + others, state
    options = 2.0 if conj_pairs else 1.0, discretization, return_final_state, trained
    call = planner(u.is_cuda, *options, *map(form, tensors))
    if trained:
        y, state = LtiSsm.apply(*tensors, call)
    else:
        y, state, _ = lti_fwd(call, u, gate_in, gate_out, prepare(call, *system), initial_state)
    if state is None:
        return y, None
    rest = u.shape[1] % call.plan.chunk
    if not rest:
        return y, state
    # the last steps that are no whole chunk
    A, B, _, dt, _ = widen(A, B, C, dt)
    z, bbar = discretize(A, dt, discretization)
    v = u[:, -rest:].float() if gate_in is None else gate_in[:, -rest:].float() * u[:, -rest:].float()
    added = _powers_sum(v, z)
    for factor in (bbar, B):
        added = added if factor is None else added * factor
    state = torch.exp(z * rest) * state + added
    # the logarithm of a negative Abar makes a real system complex on the way only
    return y, (state if call.complex else state.real).to(call.state_dtype)


def lti_ssm_triton_bidirectional(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: str = "zoh",
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    planner: Planner = PLANNER,
) -> Tensor:
    """y [B, T, D]: C[0] reads inputs up to t, C[1] those after it, as a causal run through reversed time."""
    same: dict[str, Any] = {"conj_pairs": conj_pairs, "discretization": discretization, "planner": planner}
    same |= {"initial_state": None, "return_final_state": False}
    past, _ = lti_ssm_triton(u, A, B, C[0], dt, D=D, gate_in=gate_in, gate_out=gate_out, **same)
    if u.shape[1] == 1:
        return past
    # without the first input the reversed run ends where the first output, which does not see its own input, begins
    reverse = (None if x is None else x.transpose(1, 2)[..., 1:].flip(-1).transpose(1, 2) for x in (u, gate_in))
    later, gate_later = reverse
    gate = None if gate_out is None else gate_out.transpose(1, 2)[..., :-1].flip(-1).transpose(1, 2)
    assert later is not None
    future, _ = lti_ssm_triton(later, A, B, C[1], dt, D=None, gate_in=gate_later, gate_out=gate, **same)
    future = future.transpose(1, 2).flip(-1)
    return past + torch.nn.functional.pad(future, (0, 1)).transpose(1, 2)
