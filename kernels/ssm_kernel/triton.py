"""The filter in Triton: both tables of powers are made where they are multiplied, nothing of them reaches memory.

With l = i J + j, a = Abar and w = s C Bbar, for one channel and a tile of I values of i (equation: package docstring)

    K[i J + j] = Re(sum_n P[i, n] Q[n, j]);    P[i, n] = w_n a_n^{i J},    Q[n, j] = a_n^j

Both tables are products of two short ones, k = i FINE + j again: those come from float64 by squaring, so that the phase
of a^k is exact, and are rounded to float32 once. Backward, with g the gradient of K,

    dw_n = sum_l g_l conj(a_n^l);    dlog(a_n) = conj(w_n) sum_l l g_l conj(a_n^l)

where the sums over j are products with conj(Q) and j conj(Q), those over i are taken at their end. A program writes
four numbers a state for its tile; one more kernel adds the tiles and goes on to A, B, C and dt.

float64: Abar, Bbar, w, powers of the short tables, all of the last kernel. float32: tables, products in tf32x3, sums
over a tile. Deterministic. Any N; real systems are taken as complex ones. dss-softmax is two filters of powers.
Bytes: 4 D L forward and backward. Multiply-adds: 2 N D L forward, 4 N D L backward.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch, power_of_2, save, saved
from kernels.ssm_kernel.chunked import widen
from kernels.ssm_kernel.discretize import split_softmax
from kernels.ssm_kernel.system import (
    abar,
    as_pairs,
    channel_stride,
    entry,
    entry_gradient,
    load_sum,
    load_wide,
    power,
    store_narrow,
    times,
)

ROWS = 64
"""I, values of i of a program."""
BLOCK_N = 32
"""States at once."""
FINE = 8
"""Entries of the finer of two short tables."""


@triton.jit
def _table(a_re, a_im, f_re, f_im, SIZE: tl.constexpr, FINE: tl.constexpr):
    """f a^k for k < SIZE in float32, [SIZE, N], from float64 a and f [1, N]."""
    COARSE: tl.constexpr = SIZE // FINE
    # no power is as high as these bits reach
    near_re, near_im = power(a_re, a_im, tl.arange(0, FINE)[:, None], 3)
    far_re, far_im = power(a_re, a_im, FINE * tl.arange(0, COARSE)[:, None], 7)
    far_re, far_im = times(far_re, far_im, f_re, f_im)
    near_re, near_im = near_re.to(tl.float32)[None, :, :], near_im.to(tl.float32)[None, :, :]
    far_re, far_im = far_re.to(tl.float32)[:, None, :], far_im.to(tl.float32)[:, None, :]
    b_re, b_im = times(far_re, far_im, near_re, near_im)
    return tl.reshape(b_re, [SIZE, a_re.shape[1]]), tl.reshape(b_im, [SIZE, a_re.shape[1]])


@triton.jit(do_not_specialize=["A_stride_d", "num_bits"])
def _ssm_kernel_fwd_kernel(
    A,
    B,
    C,
    dt,
    kernel,
    N,
    L,
    A_stride_d,
    num_tiles,
    num_bits,
    factor,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    B_COMPLEX: tl.constexpr,
    C_COMPLEX: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """K [D, L] at l = (i_tile I + i) J + j, one channel."""
    i_d, i_tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    b_dt = tl.load(dt + i_d).to(tl.float64)
    b_k = tl.zeros([I, J], tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)[None, :]
        m_n = o_n < N
        z_re, z_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
        z_re, z_im = b_dt * z_re, b_dt * z_im
        a_re, a_im = abar(z_re, z_im, RULE)
        w_re, w_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
        w_re, w_im = factor * w_re, factor * w_im
        if RULE != "dss-exp-no-scale":
            g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
            w_re, w_im = times(w_re, w_im, b_dt * g_re, b_dt * g_im)
        if B is not None:
            x_re, x_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
            w_re, w_im = times(w_re, w_im, x_re, x_im)
        q_re, q_im = _table(a_re, a_im, 1.0 + 0 * a_re, 0 * a_re, J, FINE)
        x_re, x_im = power(a_re, a_im, i_tile * (I * J) + 0 * o_n, num_bits)
        w_re, w_im = times(w_re, w_im, x_re, x_im)
        a_re, a_im = power(a_re, a_im, J + 0 * o_n, 8)
        p_re, p_im = _table(a_re, a_im, w_re, w_im, I, FINE)
        b_k = tl.dot(p_re, tl.trans(q_re), b_k, input_precision=PRECISION)
        b_k = tl.dot(p_im, tl.trans(-q_im), b_k, input_precision=PRECISION)
    o_l = (i_tile * I + tl.arange(0, I)[:, None]) * J + tl.arange(0, J)[None, :]
    tl.store(kernel + i_d * L + o_l, b_k, mask=o_l < L)


@triton.jit(do_not_specialize=["A_stride_d", "num_bits"])
def _ssm_kernel_bwd_kernel(
    A,
    dt,
    dkernel,
    partial,
    D,
    N,
    L,
    A_stride_d,
    num_tiles,
    num_bits,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    I: tl.constexpr,
    J: tl.constexpr,
    FINE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sum g_l conj(a^l) and sum l g_l conj(a^l) over the l of one tile, in partial [tiles, D, 4, N] part by part."""
    i_d, i_tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    o_i, o_j = tl.arange(0, I)[:, None], tl.arange(0, J)[None, :]
    o_l = (i_tile * I + o_i) * J + o_j
    b_g = tl.load(dkernel + i_d * L + o_l, mask=o_l < L, other=0.0)
    b_dt = tl.load(dt + i_d).to(tl.float64)
    p_partial = partial + (i_tile.to(tl.int64) * D + i_d) * 4 * N
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n[None, :] < N
        z_re, z_im = load_wide(A, i_d * A_stride_d + o_n[None, :], m_n, A_COMPLEX)
        a_re, a_im = abar(b_dt * z_re, b_dt * z_im, RULE)
        q_re, q_im = _table(a_re, a_im, 1.0 + 0 * a_re, 0 * a_re, J, FINE)
        # real and imaginary parts by turns: one product of 64 columns, both parts of a number in one thread
        q = tl.reshape(tl.join(q_re, -q_im), [J, 2 * BLOCK_N])
        b_sum = tl.dot(b_g, q, input_precision=PRECISION)
        b_later = tl.dot(b_g * o_j.to(tl.float32), q, input_precision=PRECISION)
        x_re, x_im = power(a_re, a_im, i_tile * (I * J) + 0 * o_n[None, :], num_bits)
        a_re, a_im = power(a_re, a_im, J + 0 * o_n[None, :], 8)
        p_re, p_im = _table(a_re, a_im, x_re, x_im, I, FINE)
        s_re, s_im = tl.split(tl.reshape(b_sum, [I, BLOCK_N, 2]))
        t_re, t_im = tl.split(tl.reshape(b_later, [I, BLOCK_N, 2]))
        o_first = ((i_tile * I + o_i) * J).to(tl.float32)
        t_re, t_im = t_re + o_first * s_re, t_im + o_first * s_im
        s_re, s_im = times(s_re, s_im, p_re, -p_im)
        t_re, t_im = times(t_re, t_im, p_re, -p_im)
        tl.store(p_partial + o_n, tl.sum(s_re, 0), mask=o_n < N)
        tl.store(p_partial + N + o_n, tl.sum(s_im, 0), mask=o_n < N)
        tl.store(p_partial + 2 * N + o_n, tl.sum(t_re, 0), mask=o_n < N)
        tl.store(p_partial + 3 * N + o_n, tl.sum(t_im, 0), mask=o_n < N)


@triton.jit(do_not_specialize=["A_stride_d", "num_tiles"])
def _ssm_kernel_parameters_kernel(
    A,
    B,
    C,
    dt,
    partial,
    dA,
    dB,
    dC,
    ddt,
    D,
    N,
    A_stride_d,
    num_tiles,
    factor,
    RULE: tl.constexpr,
    A_COMPLEX: tl.constexpr,
    B_COMPLEX: tl.constexpr,
    C_COMPLEX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """From the sums of `_ssm_kernel_bwd_kernel` to the gradients of the system, one channel a program.

    With Bbar = f B, f = dt g(z), z = dt A: w = s C f B, so dC = conj(s f B) dw, dB = conj(s f C) dw,
    df = conj(s C B) dw and dz = conj(dlog(a) / dz) dlog(a) + conj(dt dg / dz) df.
    """
    i_d = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    z_re, z_im = b_dt * lam_re, b_dt * lam_im
    a_re, a_im = abar(z_re, z_im, RULE)
    b_re, b_im = 1.0 + 0 * a_re, 0 * a_re
    if B is not None:
        b_re, b_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    f_re, f_im = 1.0 + 0 * a_re, 0 * a_re
    if RULE != "dss-exp-no-scale":
        g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
        f_re, f_im = b_dt * g_re, b_dt * g_im

    partial += i_d * 4 * N
    stride = (0 * i_d + D) * 4 * N
    dw_re = factor * load_sum(partial, o_n, m_n, stride, num_tiles)
    dw_im = factor * load_sum(partial + N, o_n, m_n, stride, num_tiles)
    dl_re = factor * load_sum(partial + 2 * N, o_n, m_n, stride, num_tiles)
    dl_im = factor * load_sum(partial + 3 * N, o_n, m_n, stride, num_tiles)

    o_out = i_d * N + o_n
    x_re, x_im = times(f_re, f_im, b_re, b_im)
    y_re, y_im = times(x_re, -x_im, dw_re, dw_im)
    store_narrow(dC, o_out, y_re, y_im, m_n, C_COMPLEX)
    x_re, x_im = times(x_re, x_im, c_re, c_im)
    dl_re, dl_im = times(x_re, -x_im, dl_re, dl_im)
    x_re, x_im = times(c_re, -c_im, dw_re, dw_im)
    if dB is not None:
        y_re, y_im = times(f_re, -f_im, x_re, x_im)
        store_narrow(dB, o_out, y_re, y_im, m_n, B_COMPLEX)

    b_ddt = 0 * dl_re
    if RULE == "dss-exp-no-scale":
        dz_re, dz_im = dl_re, dl_im
    else:
        dg_re, dg_im, dlog_re, dlog_im = entry_gradient(z_re, z_im, a_re, a_im, g_re, g_im, RULE)
        df_re, df_im = times(b_re, -b_im, x_re, x_im)
        b_ddt += g_re * df_re + g_im * df_im
        dz_re, dz_im = times(dlog_re, -dlog_im, dl_re, dl_im)
        x_re, x_im = times(b_dt * dg_re, -b_dt * dg_im, df_re, df_im)
        dz_re, dz_im = dz_re + x_re, dz_im + x_im
    b_ddt += lam_re * dz_re + lam_im * dz_im
    # beyond N the denominators of g are one and dw is zero
    tl.store(ddt + i_d, tl.sum(b_ddt, 0).to(ddt.dtype.element_ty))
    store_narrow(dA, o_out, b_dt * dz_re, b_dt * dz_im, m_n, A_COMPLEX)


class Plan(NamedTuple):
    """Tiles [ROWS, J] of a filter."""

    inner: int
    tiles: int

    @property
    def num_bits(self) -> int:
        """Of the first l of a tile."""
        return ((self.tiles - 1) * ROWS * self.inner).bit_length()


def _plan(length: int, backward: bool) -> Plan:
    # backward, wider tiles do not fit into registers
    inner = 64 if backward or length <= ROWS * 64 else 128
    return Plan(inner, cdiv(length, ROWS * inner))


def float32_products() -> str:
    """How matrix units multiply float32."""
    return "tf32x3" if triton.knobs.runtime.interpret else _float32_products(triton.runtime.driver.active)


@functools.cache
def _float32_products(driver: Any) -> str:
    """Asking takes the host some microseconds."""
    return "tf32x3" if driver.get_current_target().backend == "cuda" else "ieee"


def ssm_kernel_fwd(A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, length: int, factor: float, rule: str) -> Tensor:
    """K [D, length] in float32; all tensors contiguous."""
    width, num_states = C.shape
    plan = _plan(length, False)
    kernel = torch.empty((width, length), dtype=torch.float32, device=C.device)
    launch(
        _ssm_kernel_fwd_kernel,
        width * plan.tiles,
        as_pairs(A),
        as_pairs(B),
        as_pairs(C),
        dt,
        kernel,
        num_states,
        length,
        channel_stride(A),
        plan.tiles,
        plan.num_bits,
        factor,
        RULE=rule,
        A_COMPLEX=A.is_complex(),
        B_COMPLEX=B is not None and B.is_complex(),
        C_COMPLEX=C.is_complex(),
        I=ROWS,
        J=plan.inner,
        FINE=FINE,
        BLOCK_N=BLOCK_N,
        PRECISION=float32_products(),
        num_warps=4,
    )
    return kernel


def ssm_kernel_bwd(
    A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, dkernel: Tensor, factor: float, rule: str
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of A, B, C and dt."""
    width, num_states = C.shape
    length = dkernel.shape[1]
    plan = _plan(length, True)
    partial = torch.empty((plan.tiles, width, 4, num_states), dtype=torch.float32, device=C.device)
    launch(
        _ssm_kernel_bwd_kernel,
        width * plan.tiles,
        as_pairs(A),
        dt,
        dkernel,
        partial,
        width,
        num_states,
        length,
        channel_stride(A),
        plan.tiles,
        plan.num_bits,
        RULE=rule,
        A_COMPLEX=A.is_complex(),
        I=ROWS,
        J=plan.inner,
        FINE=FINE,
        BLOCK_N=BLOCK_N,
        PRECISION=float32_products(),
        num_warps=4,
    )
    dA = torch.empty((width, num_states), dtype=A.dtype, device=A.device)
    dB = None if B is None else torch.empty_like(B)
    dC, ddt = torch.empty_like(C), torch.empty_like(dt)
    launch(
        _ssm_kernel_parameters_kernel,
        width,
        as_pairs(A),
        as_pairs(B),
        as_pairs(C),
        dt,
        partial,
        as_pairs(dA),
        as_pairs(dB),
        as_pairs(dC),
        ddt,
        width,
        num_states,
        channel_stride(A),
        plan.tiles,
        factor,
        RULE=rule,
        A_COMPLEX=A.is_complex(),
        B_COMPLEX=B is not None and B.is_complex(),
        C_COMPLEX=C.is_complex(),
        BLOCK_N=power_of_2(max(16, num_states)),
        num_warps=1,
    )
    return dA if A.ndim == 2 else dA.sum(0), dB, dC, ddt


class SsmKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, length: int, factor: float, rule: str
    ) -> Tensor:
        save(ctx, A, B, C, dt)
        ctx.options = factor, rule
        return ssm_kernel_fwd(A, B, C, dt, length, factor, rule)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dkernel: Tensor) -> tuple[Tensor | None, ...]:
        A, B, C, dt = saved(ctx)
        return *ssm_kernel_bwd(A, B, C, dt, dkernel.contiguous(), *ctx.options), None, None, None


def _dense(x: Tensor) -> Tensor:
    return x.resolve_conj().contiguous()


def ssm_kernel_triton(
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    length: int,
    *,
    conj_pairs: bool,
    discretization: str,
    normalize_over: int | None = None,
) -> Tensor:
    """K [D, length] in float32."""
    factor = 2.0 if conj_pairs else 1.0
    if discretization == "dss-softmax":
        return _softmax_kernel(A, B, C, dt, length, normalize_over or length, factor)
    # one rule has two names
    return _kernel(A, B, C, dt, length, factor, "zoh" if discretization == "dss-exp" else discretization)


def _kernel(A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, length: int, factor: float, rule: str) -> Tensor:
    A, B, C, dt = _dense(A), None if B is None else _dense(B), _dense(C), _dense(dt)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (A, B, C, dt)):
        return SsmKernel.apply(A, B, C, dt, length, factor, rule)
    return ssm_kernel_fwd(A, B, C, dt, length, factor, rule)


def _softmax_kernel(
    A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, length: int, whole: int, factor: float
) -> Tensor:
    """Modes that decay, and in reversed time those that grow: two filters of powers of the same decays.

    Their weights are [D, N] numbers, in PyTorch.
    """
    wide_A, wide_B, wide_C, wide_dt, _ = widen(A, B, C, dt)
    grows, z, scale = split_softmax(wide_A, wide_dt, whole)
    weight = (wide_C if wide_B is None else wide_C * wide_B) * scale
    zero = torch.zeros_like(weight)
    rising = torch.where(grows, weight * torch.exp(z * (whole - length)), zero)
    weights = torch.cat([torch.where(grows, zero, weight), rising])
    # exact, as dt A in float32 would not be
    decays = torch.where(A.real > 0, -A, A)
    decays = decays if A.ndim == 1 else torch.cat([decays, decays])
    kind = torch.complex64 if weights.is_complex() else torch.float32
    both = _kernel(decays, None, weights.to(kind), torch.cat([dt, dt]), length, factor, "dss-exp-no-scale")
    falling, rising = both.chunk(2)
    return falling + rising.flip(-1)
