"""The filter in Triton: tables of powers are computed where they are multiplied and never written to memory.

The taps l = i COLUMNS + j of one channel are cut into tiles [ROWS, COLUMNS]. With a = Abar and w = s C Bbar (equation:
package docstring), a tile is a product over the state,

    K[i COLUMNS + j] = Re(sum_n P[i, n] Q[n, j]);    P[i, n] = w_n a_n^{i COLUMNS},    Q[n, j] = a_n^j

P and Q are themselves products of two short tables, a^k = a^{m FINE} a^r with k = m FINE + r. The short tables come
from float64 by repeated squaring, so that the phase of a^k is exact, and are rounded to float32 once.

Backward, with g the gradient of K,

    dw_n = sum_l g_l conj(a_n^l);    dlog(a_n) = conj(w_n) sum_l l g_l conj(a_n^l)

Sums over j are products with conj(Q) and j conj(Q); sums over i follow them. A program writes four real numbers for
each state of its tile (`_ssm_kernel_bwd_kernel`), and one more kernel adds the tiles and goes on to A, B, C and dt.

float64: Abar, Bbar, w, the short tables, all of the last kernel. float32: long tables, products (tf32x3), sums over a
tile. Deterministic. Any N; real systems are treated as complex ones. dss-softmax is the sum of two filters, of
the modes that decay and, in reversed time, of those that grow.
Bytes: 4 D L forward and backward. Multiply-adds: 2 N D L forward, 4 N D L backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import float32_products
from subquad.kernels.launch import cdiv, launch, power_of_2
from subquad.kernels.layout import dense
from subquad.kernels.ssm_kernel.system import (
    abar,
    entry,
    entry_gradient,
    falling,
    load_sum,
    load_wide,
    power,
    softmax_factor,
    softmax_gradient,
    store_narrow,
    times,
)

ROWS = 64
"""Number of rows in a tile."""
BLOCK_N = 32
"""Number of states that a program processes at once."""
FINE = 8
"""Number of entries in the finer one of the two short tables."""


@triton.jit
def _table(a_re, a_im, f_re, f_im, SIZE: tl.constexpr, FINE: tl.constexpr):
    """f a^k for k < SIZE in float32, [SIZE, N], from float64 a and f [1, N]."""
    COARSE: tl.constexpr = SIZE // FINE
    # 3 and 7 bits hold every exponent, as FINE is 8 and SIZE at most 128
    near_re, near_im = power(a_re, a_im, tl.arange(0, FINE)[:, None], 3)
    far_re, far_im = power(a_re, a_im, FINE * tl.arange(0, COARSE)[:, None], 7)
    far_re, far_im = times(far_re, far_im, f_re, f_im)
    near_re, near_im = near_re.to(tl.float32)[None, :, :], near_im.to(tl.float32)[None, :, :]
    far_re, far_im = far_re.to(tl.float32)[:, None, :], far_im.to(tl.float32)[:, None, :]
    b_re, b_im = times(far_re, far_im, near_re, near_im)
    return tl.reshape(b_re, [SIZE, a_re.shape[1]]), tl.reshape(b_im, [SIZE, a_re.shape[1]])


@triton.jit(do_not_specialize=["A_stride_d", "num_bits"])
def _ssm_kernel_fwd_kernel(
    A, B, C, dt, taps,
    D, N, L, A_stride_d, num_tiles, num_bits, factor, whole,
    RULE: tl.constexpr, A_COMPLEX: tl.constexpr, B_COMPLEX: tl.constexpr, C_COMPLEX: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FINE: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """taps [D, L] receives K at l = (i_tile ROWS + i) COLUMNS + j, of one channel.

    num_bits: bits of the first l of the last tile.   whole: length over which dss-softmax normalises, else None. Its
    taps [2 D, L] are the filters of the modes that decay and then, in reversed time, of those that grow.
    """
    i_row, i_tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    i_d = (i_row if whole is None else i_row % D).to(tl.int64)
    i_row = i_row.to(tl.int64)
    b_dt = tl.load(dt + i_d).to(tl.float64)
    b_k = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)[None, :]
        m_n = o_n < N
        lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
        z_re, z_im = b_dt * lam_re, b_dt * lam_im
        if whole is not None:
            grows, z_re, z_im = falling(z_re, z_im)
        a_re, a_im = abar(z_re, z_im, RULE)
        w_re, w_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
        w_re, w_im = factor * w_re, factor * w_im
        if whole is not None:
            x_re, x_im = softmax_factor(lam_re, lam_im, z_re, z_im, a_re, a_im, grows, whole, whole - L)
            w_re, w_im = times(w_re, w_im, x_re, x_im)
            w_re, w_im = tl.where(grows == (i_row >= D), w_re, 0.0), tl.where(grows == (i_row >= D), w_im, 0.0)
        elif RULE != "dss-exp-no-scale":
            g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
            w_re, w_im = times(w_re, w_im, b_dt * g_re, b_dt * g_im)
        if B is not None:
            x_re, x_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
            w_re, w_im = times(w_re, w_im, x_re, x_im)
        q_re, q_im = _table(a_re, a_im, 1.0 + 0 * a_re, 0 * a_re, COLUMNS, FINE)
        x_re, x_im = power(a_re, a_im, i_tile * (ROWS * COLUMNS) + 0 * o_n, num_bits)
        w_re, w_im = times(w_re, w_im, x_re, x_im)
        a_re, a_im = power(a_re, a_im, COLUMNS + 0 * o_n, 8)
        p_re, p_im = _table(a_re, a_im, w_re, w_im, ROWS, FINE)
        b_k = tl.dot(p_re, tl.trans(q_re), b_k, input_precision=PRECISION)
        b_k = tl.dot(p_im, tl.trans(-q_im), b_k, input_precision=PRECISION)
    o_l = (i_tile * ROWS + tl.arange(0, ROWS)[:, None]) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(taps + i_row * L + o_l, b_k, mask=o_l < L)


@triton.jit(do_not_specialize=["A_stride_d", "num_bits"])
def _ssm_kernel_bwd_kernel(
    A, dt, dtaps, partial,
    D, N, L, A_stride_d, num_tiles, num_bits, whole,
    RULE: tl.constexpr, A_COMPLEX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FINE: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of g_l conj(a^l) and l g_l conj(a^l) over the taps l of one tile of one channel, g = dtaps [D, L].

    partial [num_tiles, D, 4, N] receives real part, imaginary part of the first sum, then those of the second. With
    `whole`, as in the forward kernel, dtaps and partial have 2 D rows.
    """
    i_row, i_tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    i_d = (i_row if whole is None else i_row % D).to(tl.int64)
    i_row, num_rows = i_row.to(tl.int64), D if whole is None else 2 * D
    o_i, o_j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    o_l = (i_tile * ROWS + o_i) * COLUMNS + o_j
    b_g = tl.load(dtaps + i_row * L + o_l, mask=o_l < L, other=0.0)
    b_dt = tl.load(dt + i_d).to(tl.float64)
    p_partial = partial + (i_tile.to(tl.int64) * num_rows + i_row) * 4 * N
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n[None, :] < N
        z_re, z_im = load_wide(A, i_d * A_stride_d + o_n[None, :], m_n, A_COMPLEX)
        z_re, z_im = b_dt * z_re, b_dt * z_im
        if whole is not None:
            _, z_re, z_im = falling(z_re, z_im)
        a_re, a_im = abar(z_re, z_im, RULE)
        q_re, q_im = _table(a_re, a_im, 1.0 + 0 * a_re, 0 * a_re, COLUMNS, FINE)
        # interleaved: one product of 64 columns, and both parts of a complex number in one thread
        q = tl.reshape(tl.join(q_re, -q_im), [COLUMNS, 2 * BLOCK_N])
        b_sum = tl.dot(b_g, q, input_precision=PRECISION)
        b_later = tl.dot(b_g * o_j.to(tl.float32), q, input_precision=PRECISION)
        x_re, x_im = power(a_re, a_im, i_tile * (ROWS * COLUMNS) + 0 * o_n[None, :], num_bits)
        a_re, a_im = power(a_re, a_im, COLUMNS + 0 * o_n[None, :], 8)
        p_re, p_im = _table(a_re, a_im, x_re, x_im, ROWS, FINE)
        s_re, s_im = tl.split(tl.reshape(b_sum, [ROWS, BLOCK_N, 2]))
        t_re, t_im = tl.split(tl.reshape(b_later, [ROWS, BLOCK_N, 2]))
        o_first = ((i_tile * ROWS + o_i) * COLUMNS).to(tl.float32)
        t_re, t_im = t_re + o_first * s_re, t_im + o_first * s_im
        s_re, s_im = times(s_re, s_im, p_re, -p_im)
        t_re, t_im = times(t_re, t_im, p_re, -p_im)
        tl.store(p_partial + o_n, tl.sum(s_re, 0), mask=o_n < N)
        tl.store(p_partial + N + o_n, tl.sum(s_im, 0), mask=o_n < N)
        tl.store(p_partial + 2 * N + o_n, tl.sum(t_re, 0), mask=o_n < N)
        tl.store(p_partial + 3 * N + o_n, tl.sum(t_im, 0), mask=o_n < N)


@triton.jit(do_not_specialize=["A_stride_d", "num_tiles"])
def _ssm_kernel_parameters_kernel(
    A, B, C, dt, partial, dA, dB, dC, ddt,
    D, N, A_stride_d, num_tiles, factor, whole, rest, slope,
    RULE: tl.constexpr, A_COMPLEX: tl.constexpr, B_COMPLEX: tl.constexpr, C_COMPLEX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of A, B, C and dt of one channel from the sums of `_ssm_kernel_bwd_kernel`.

    With Bbar = f B, f = dt g(z), z = dt A: w = s C f B, so dC = conj(s f B) dw, dB = conj(s f C) dw,
    df = conj(s C B) dw and dz = conj(dlog(a) / dz) dlog(a) + conj(dt dg / dz) df. whole, rest, slope: those of
    `softmax_gradient` for dss-softmax, else None.
    """
    i_d = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    b_dt = tl.load(dt + i_d).to(tl.float64)
    lam_re, lam_im = load_wide(A, i_d * A_stride_d + o_n, m_n, A_COMPLEX)
    c_re, c_im = load_wide(C, i_d * N + o_n, m_n, C_COMPLEX)
    z_re, z_im = b_dt * lam_re, b_dt * lam_im
    if whole is not None:
        grows, z_re, z_im = falling(z_re, z_im)
    a_re, a_im = abar(z_re, z_im, RULE)
    b_re, b_im = 1.0 + 0 * a_re, 0 * a_re
    if B is not None:
        b_re, b_im = load_wide(B, i_d * N + o_n, m_n, B_COMPLEX)
    f_re, f_im = 1.0 + 0 * a_re, 0 * a_re
    if whole is not None:
        f_re, f_im = softmax_factor(lam_re, lam_im, z_re, z_im, a_re, a_im, grows, whole, rest)
    elif RULE != "dss-exp-no-scale":
        g_re, g_im = entry(z_re, z_im, a_re, a_im, RULE)
        f_re, f_im = b_dt * g_re, b_dt * g_im

    partial += i_d * 4 * N
    stride = (0 * i_d + D) * 4 * N
    if whole is not None:
        # every mode is in one of the two filters
        stride *= 2
        partial += tl.where(grows, D * 4 * N, 0)
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
    da_re, da_im = 0 * dl_re, 0 * dl_re
    if whole is not None:
        df_re, df_im = times(b_re, -b_im, x_re, x_im)
        da_re, da_im, dz_re, dz_im = softmax_gradient(
            lam_re, lam_im, z_re, z_im, a_re, a_im, f_re, f_im, df_re, df_im, grows, whole, rest, slope
        )
        dz_re, dz_im = dz_re + dl_re, dz_im + dl_im
        dz_re, dz_im = tl.where(grows, -dz_re, dz_re), tl.where(grows, -dz_im, dz_im)
    elif RULE == "dss-exp-no-scale":
        dz_re, dz_im = dl_re, dl_im
    else:
        dg_re, dg_im, dlog_re, dlog_im = entry_gradient(z_re, z_im, a_re, a_im, g_re, g_im, RULE)
        df_re, df_im = times(b_re, -b_im, x_re, x_im)
        b_ddt += g_re * df_re + g_im * df_im
        dz_re, dz_im = times(dlog_re, -dlog_im, dl_re, dl_im)
        x_re, x_im = times(b_dt * dg_re, -b_dt * dg_im, df_re, df_im)
        dz_re, dz_im = dz_re + x_re, dz_im + x_im
    b_ddt += lam_re * dz_re + lam_im * dz_im
    # lanes beyond N add zero, because dw is zero there and no denominator is
    tl.store(ddt + i_d, tl.sum(b_ddt, 0).to(ddt.dtype.element_ty))
    store_narrow(dA, o_out, b_dt * dz_re + da_re, b_dt * dz_im + da_im, m_n, A_COMPLEX)


class Plan(NamedTuple):
    """Tiles [ROWS, columns] of a filter."""

    columns: int
    num_tiles: int

    @property
    def num_bits(self) -> int:
        """Number of bits of the index of the last tile's first tap."""
        return ((self.num_tiles - 1) * ROWS * self.columns).bit_length()


def _plan(length: int, backward: bool) -> Plan:
    # the backward pass would spill registers with wider tiles
    columns = 64 if backward or length <= ROWS * 64 else 128
    return Plan(columns, cdiv(length, ROWS * columns))


class System(NamedTuple):
    """A diagonal system in contiguous tensors, with its discretization and the factor of the filter."""

    A: Tensor
    B: Tensor | None
    C: Tensor
    dt: Tensor
    factor: float
    """s of the equation: 2 where A holds one of each conjugate pair, else 1."""
    rule: str
    """The discretization: zoh, bilinear, dss-exp-no-scale or dss-softmax."""
    whole: int | None = None
    """Length over which dss-softmax normalises, else None."""
    detach_maximum: bool = False
    """Whether the backward pass takes the maximum of a row of dss-softmax for a constant; see `ssm_kernel`."""

    @property
    def num_rows(self) -> int:
        """Filters of the kernels: dss-softmax has one of the modes that decay and one of those that grow."""
        return self.C.shape[0] * (1 if self.whole is None else 2)

    def pointers(self) -> dict[str, Tensor | None]:
        """The kernels' first arguments."""
        return {"A": self.A, "B": self.B, "C": self.C, "dt": self.dt}

    @property
    def A_stride_d(self) -> int:
        """Stride of A along channels, in elements."""
        return self.A.shape[-1] if self.A.ndim == 2 else 0

    def constants(self) -> dict[str, Any]:
        return {
            "RULE": self.rule,
            "A_COMPLEX": self.A.is_complex(),
            "B_COMPLEX": self.B is not None and self.B.is_complex(),
            "C_COMPLEX": self.C.is_complex(),
        }


def _tile_constants(plan: Plan) -> dict[str, Any]:
    return {
        "ROWS": ROWS,
        "COLUMNS": plan.columns,
        "FINE": FINE,
        "BLOCK_N": BLOCK_N,
        "PRECISION": float32_products(),
        "num_warps": 4,
    }


def ssm_kernel_fwd(system: System, length: int) -> Tensor:
    """K [D, length] in float32; for dss-softmax its two filters [2 D, length] of `_ssm_kernel_fwd_kernel`."""
    width, num_states = system.C.shape
    plan = _plan(length, False)
    taps = torch.empty(system.num_rows, length, dtype=torch.float32, device=system.C.device)
    launch(
        _ssm_kernel_fwd_kernel, system.num_rows * plan.num_tiles, **system.pointers(), taps=taps, D=width, N=num_states,
        L=length, A_stride_d=system.A_stride_d, num_tiles=plan.num_tiles, num_bits=plan.num_bits, factor=system.factor,
        whole=system.whole, **system.constants(), **_tile_constants(plan),
    )  # fmt: skip
    return taps


def ssm_kernel_bwd(system: System, dtaps: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of A, B, C and dt in their dtypes, from that of K."""
    A, B, C, dt = system[:4]
    width, num_states = C.shape
    plan = _plan(dtaps.shape[1], True)
    length, rows = dtaps.shape[1], system.num_rows
    partial = torch.empty(plan.num_tiles, rows, 4, num_states, dtype=torch.float32, device=C.device)
    launch(
        _ssm_kernel_bwd_kernel, rows * plan.num_tiles, A=A, dt=dt, dtaps=dtaps, partial=partial, D=width, N=num_states,
        L=length, A_stride_d=system.A_stride_d, num_tiles=plan.num_tiles, num_bits=plan.num_bits, whole=system.whole,
        RULE=system.rule, A_COMPLEX=A.is_complex(), **_tile_constants(plan),
    )  # fmt: skip
    dA = torch.empty(width, num_states, dtype=A.dtype, device=A.device)
    dB = None if B is None else torch.empty_like(B)
    dC, ddt = torch.empty_like(C), torch.empty_like(dt)
    rest = slope = None
    if system.whole is not None:
        rest = system.whole - length
        slope = rest - (system.whole - 1 if system.detach_maximum else 0)
    launch(
        _ssm_kernel_parameters_kernel, width, **system.pointers(), partial=partial, dA=dA, dB=dB, dC=dC, ddt=ddt,
        D=width, N=num_states, A_stride_d=system.A_stride_d, num_tiles=plan.num_tiles, factor=system.factor,
        whole=system.whole, rest=rest, slope=slope, **system.constants(), BLOCK_N=power_of_2(max(16, num_states)),
        num_warps=1,
    )  # fmt: skip
    return dA if A.ndim == 2 else dA.sum(0), dB, dC, ddt


class SsmKernel(OnceDifferentiable):
    """`ssm_kernel_fwd` of a length, the tensors and the other fields of a `System`."""

    @staticmethod
    def forward(ctx: Any, length: int, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, *options: Any) -> Tensor:
        save(ctx, A, B, C, dt)
        ctx.options = options
        return ssm_kernel_fwd(System(A, B, C, dt, *options), length)

    @staticmethod
    def backward(ctx: Any, dtaps: Tensor) -> tuple[Tensor | None, ...]:
        system = System(*saved(ctx), *ctx.options)
        return None, *ssm_kernel_bwd(system, dtaps.contiguous()), *[None] * len(ctx.options)


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
    detach_maximum: bool = False,
) -> Tensor:
    """K [D, length] in float32; arguments as those of `ssm_kernel`."""
    softmax = discretization == "dss-softmax"
    # dss-exp is another name of zoh
    rule = "zoh" if discretization == "dss-exp" else discretization
    tensors = dense(A), dense(B), dense(C), dense(dt)
    whole = (normalize_over or length) if softmax else None
    options: tuple[Any, ...] = (2.0 if conj_pairs else 1.0, rule, whole, detach_maximum)
    if needs_gradient(*tensors):
        taps = SsmKernel.apply(length, *tensors, *options)
    else:
        taps = ssm_kernel_fwd(System(*tensors, *options), length)
    if not softmax:
        return taps
    decaying, growing = taps.chunk(2)
    return decaying + growing.flip(-1)
