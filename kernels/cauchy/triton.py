"""The sums in Triton; no tensor of size [D, N, F] exists, forward or backward.

U depends on dt and Lambda through z = dt Lambda alone. With c = cosh(s), a = w - c z, b = w - c conj(z), x = 1 / a and
y = 1 / b, the sum of a pair's two fractions is

    v x + conj(v) y = Re(v) (x + y) + i Im(v) (x - y)

Forward, a program owns a tile of points f of one channel and goes through n with its sums in registers. Backward, with
g the gradient of U, A the sum of conj(g) Re(v) over the residues of a pole, and B that of conj(g) Im(v),

    dRe(v) = sum_f Re(conj(g) (x + y)),                  dIm(v) = -sum_f Im(conj(g) (x - y)),
    dRe(z) = sum_f Re(c (x^2 (A + i B) + y^2 (A - i B))),    dIm(z) = -sum_f Im(c (x^2 (A + i B) - y^2 (A - i B)))

A program owns a tile of n and a segment of the points. Its tile is [BLOCK_F, BLOCK_N] with n along the threads, so that
sums over f stay within a thread until the end. Programs write partial sums, which PyTorch adds. z = dt Lambda, and with
it the gradients of dt and Lambda, is left to PyTorch, too: it has D N elements.

Complex64; all arithmetic is that of float32, without matrix units. |a| and |b| have to be between 1e-18 and 1e18, so
that their squares are normal numbers. Deterministic, any sizes. A program takes up to six of the M residues of a pole;
more are cut into groups. Bytes: 8 M D F written forward, read backward. Arithmetic instructions for one (d, n, f):
4 M + 24 forward and 8 M + 56 backward, and two reciprocals each.
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
from subquad.kernels.ssm_kernel.system import times

MOST_RESIDUES = 6
"""Largest number of residues of a pole in a program, which has two (backward four) registers for each and point."""
POINTS = 128
"""Number of points of a program forward, four for each thread of a warp. F is odd for filters of even length, so larger
tiles would compute more beyond F."""
MOST_POLES = 32
"""Largest number of poles of a program backward, one for each thread of a warp."""
TILE = 256
"""Number of (f, n) in a tile backward, two for each thread of four warps."""
SEGMENT = 256
"""Number of points of a program backward."""


@triton.jit
def _inverse(b_re, b_im):
    b_scale = 1.0 / (b_re * b_re + b_im * b_im)
    return b_re * b_scale, -b_im * b_scale


@triton.jit
def _fractions(w_re, w_im, c_re, c_im, z_re, z_im):
    """x = 1 / (w - c z) and y = 1 / (w - c conj(z)), as (Re x, Im x, Re y, Im y)."""
    e_re, e_im = w_re - c_re * z_re, w_im - c_im * z_re
    h_re, h_im = c_re * z_im, c_im * z_im
    x_re, x_im = _inverse(e_re + h_im, e_im - h_re)
    y_re, y_im = _inverse(e_re - h_im, e_im + h_re)
    return x_re, x_im, y_re, y_im


@triton.jit
def _cauchy_fwd_kernel(
    residues, z, w, c, U, D, N, F, num_tiles, GROUP: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """U [M, D, F] from residues [M, D, N], z [D, N], w [F] and c [F], all dense and with a last axis (real, imaginary).

    A program computes GROUP of the M sums.
    """
    i_f, i_row = tl.program_id(0) % num_tiles, (tl.program_id(0) // num_tiles).to(tl.int64)
    i_d, i_m = i_row % D, i_row // D * GROUP
    o_f = i_f.to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    m_f = o_f < F
    # beyond F, a = b = 1
    w_re, w_im = tl.load(w + 2 * o_f, mask=m_f, other=1.0), tl.load(w + 2 * o_f + 1, mask=m_f, other=0.0)
    c_re, c_im = tl.load(c + 2 * o_f, mask=m_f, other=0.0), tl.load(c + 2 * o_f + 1, mask=m_f, other=0.0)
    U_re, U_im = (), ()
    for _ in tl.static_range(GROUP):
        U_re += (tl.zeros([BLOCK_F], tl.float32),)
        U_im += (tl.zeros([BLOCK_F], tl.float32),)
    # in int64; a size of one is a constant, which has no method to convert it
    stride_m, stride_d = (0 * i_d + D) * N * 2, (0 * i_d + F) * 2
    p_z, p_v = z + i_d * N * 2, residues + i_m * stride_m + i_d * N * 2
    for i_n in range(N):
        x_re, x_im, y_re, y_im = _fractions(w_re, w_im, c_re, c_im, tl.load(p_z + 2 * i_n), tl.load(p_z + 2 * i_n + 1))
        plus_re, plus_im, minus_re, minus_im = x_re + y_re, x_im + y_im, x_re - y_re, x_im - y_im
        next_re, next_im = (), ()
        for i in tl.static_range(GROUP):
            v_re, v_im = tl.load(p_v + i * stride_m + 2 * i_n), tl.load(p_v + i * stride_m + 2 * i_n + 1)
            next_re += (U_re[i] + v_re * plus_re - v_im * minus_im,)
            next_im += (U_im[i] + v_re * plus_im + v_im * minus_re,)
        U_re, U_im = next_re, next_im
    o_pair = i_f.to(tl.int64) * (2 * BLOCK_F) + tl.arange(0, 2 * BLOCK_F)
    for i in tl.static_range(GROUP):
        p_u = U + ((i_m + i) * D + i_d) * stride_d
        tl.store(p_u + o_pair, tl.interleave(U_re[i], U_im[i]), mask=o_pair < stride_d)


@triton.jit
def _cauchy_bwd_kernel(
    residues, z, w, c, dU, dresidues, dz, D, N, F, num_blocks, num_segments,
    GROUP: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Sums over a segment of the points: dresidues [num_segments, M, D, N] and dz [num_segments, M / GROUP, D, N].

    All tensors are dense, with a last axis (real, imaginary); those that are read are as in `_cauchy_fwd_kernel`.
    """
    i_n, i_row = tl.program_id(0) % num_blocks, (tl.program_id(0) // num_blocks).to(tl.int64)
    i_segment, i_row = i_row % num_segments, i_row // num_segments
    i_d, i_group = i_row % D, i_row // D
    num_groups = tl.num_programs(0) // num_blocks // num_segments // D
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    p_z, stride_m = z + i_d * N * 2 + 2 * o_n, (0 * i_d + D) * N * 2
    z_re = tl.load(p_z, mask=m_n, other=0.0)[None, :]
    z_im = tl.load(p_z + 1, mask=m_n, other=0.0)[None, :]
    dz_re, dz_im = tl.zeros([BLOCK_F, BLOCK_N], tl.float32), tl.zeros([BLOCK_F, BLOCK_N], tl.float32)
    v_re, v_im, dv_re, dv_im = (), (), (), ()
    for i in tl.static_range(GROUP):
        p_v = residues + (i_group * GROUP + i) * stride_m + i_d * N * 2 + 2 * o_n
        v_re += (tl.load(p_v, mask=m_n, other=0.0)[None, :],)
        v_im += (tl.load(p_v + 1, mask=m_n, other=0.0)[None, :],)
        dv_re += (tl.zeros([BLOCK_F, BLOCK_N], tl.float32),)
        dv_im += (tl.zeros([BLOCK_F, BLOCK_N], tl.float32),)
    p_du, stride_u = dU + (i_group * GROUP * D + i_d) * F * 2, (0 * i_d + D) * F * 2
    i_first = i_segment * SEGMENT
    for start in range(0, tl.minimum(SEGMENT, F - i_first).to(tl.int32), BLOCK_F):
        o_f = i_first + start + tl.arange(0, BLOCK_F)[:, None]
        m_f = o_f < F
        w_re, w_im = tl.load(w + 2 * o_f, mask=m_f, other=1.0), tl.load(w + 2 * o_f + 1, mask=m_f, other=0.0)
        c_re, c_im = tl.load(c + 2 * o_f, mask=m_f, other=0.0), tl.load(c + 2 * o_f + 1, mask=m_f, other=0.0)
        x_re, x_im, y_re, y_im = _fractions(w_re, w_im, c_re, c_im, z_re, z_im)
        plus_re, plus_im, minus_re, minus_im = x_re + y_re, x_im + y_im, x_re - y_re, x_im - y_im
        b_zero = tl.zeros([BLOCK_F, BLOCK_N], tl.float32)
        A_re, A_im, B_re, B_im = b_zero, b_zero, b_zero, b_zero
        next_re, next_im = (), ()
        for i in tl.static_range(GROUP):
            g_re = tl.load(p_du + i * stride_u + 2 * o_f, mask=m_f, other=0.0)
            g_im = tl.load(p_du + i * stride_u + 2 * o_f + 1, mask=m_f, other=0.0)
            A_re, A_im = A_re + g_re * v_re[i], A_im - g_im * v_re[i]
            B_re, B_im = B_re + g_re * v_im[i], B_im - g_im * v_im[i]
            next_re += (dv_re[i] + g_re * plus_re + g_im * plus_im,)
            next_im += (dv_im[i] + g_im * minus_re - g_re * minus_im,)
        dv_re, dv_im = next_re, next_im
        # x^2 (A + i B) and y^2 (A - i B)
        xx_re, xx_im = times(x_re, x_im, x_re, x_im)
        xx_re, xx_im = times(xx_re, xx_im, A_re - B_im, A_im + B_re)
        yy_re, yy_im = times(y_re, y_im, y_re, y_im)
        yy_re, yy_im = times(yy_re, yy_im, A_re + B_im, A_im - B_re)
        dz_re += c_re * (xx_re + yy_re) - c_im * (xx_im + yy_im)
        dz_im -= c_re * (xx_im - yy_im) + c_im * (xx_re - yy_re)
    p_dz = dz + ((i_segment * num_groups + i_group) * D + i_d) * N * 2 + 2 * o_n
    tl.store(p_dz, tl.sum(dz_re, 0), mask=m_n)
    tl.store(p_dz + 1, tl.sum(dz_im, 0), mask=m_n)
    for i in tl.static_range(GROUP):
        p_dv = dresidues + (((i_segment * num_groups + i_group) * GROUP + i) * D + i_d) * N * 2 + 2 * o_n
        tl.store(p_dv, tl.sum(dv_re[i], 0), mask=m_n)
        tl.store(p_dv + 1, tl.sum(dv_im[i], 0), mask=m_n)


def _group(num_residues: int) -> int:
    """The number of residues of a pole in a program, which divides that of all of them."""
    return max(size for size in range(1, MOST_RESIDUES + 1) if num_residues % size == 0)


def _forward(residues: Tensor, z: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """U [M, D, F] of dense tensors."""
    sums, width, poles = residues.shape
    U = torch.empty(sums, width, len(w), dtype=residues.dtype, device=residues.device)
    group, tiles = _group(sums), cdiv(len(w), POINTS)
    launch(
        _cauchy_fwd_kernel, tiles * width * (sums // group), residues=residues, z=z,
        w=w, c=c, U=U, D=width, N=poles, F=len(w), num_tiles=tiles,
        GROUP=group, BLOCK_F=POINTS, num_warps=1,
    )  # fmt: skip
    return U


def _backward(residues: Tensor, z: Tensor, w: Tensor, c: Tensor, dU: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of residues [M, D, N] and z [D, N] from dense tensors."""
    sums, width, poles = residues.shape
    group, block_n, segments = _group(sums), min(MOST_POLES, power_of_2(poles)), cdiv(len(w), SEGMENT)
    blocks, groups = cdiv(poles, block_n), sums // group
    options: dict[str, Any] = {"dtype": residues.dtype, "device": residues.device}
    dresidues = torch.empty(segments, sums, width, poles, **options)
    dz = torch.empty(segments, groups, width, poles, **options)
    launch(
        _cauchy_bwd_kernel, blocks * segments * width * groups, residues=residues, z=z,
        w=w, c=c, dU=dU, dresidues=dresidues, dz=dz,
        D=width, N=poles, F=len(w), num_blocks=blocks, num_segments=segments,
        GROUP=group, BLOCK_F=TILE // block_n, BLOCK_N=block_n, SEGMENT=SEGMENT, num_warps=4,
    )  # fmt: skip
    return dresidues.sum(0), dz.sum((0, 1))


class Cauchy(OnceDifferentiable):
    """U [M, D, F] from dense residues [M, D, N], z [D, N], w [F] and c [F]; gradients of the first two."""

    @staticmethod
    def forward(ctx: Any, residues: Tensor, z: Tensor, w: Tensor, c: Tensor) -> Tensor:
        save(ctx, residues, z, w, c)
        return _forward(residues, z, w, c)

    @staticmethod
    def backward(ctx: Any, dU: Tensor) -> tuple[Tensor | None, ...]:
        residues, z, w, c = saved(ctx)
        return *_backward(residues, z, w, c, dense(dU)), None, None


def cauchy_triton(residues: Tensor, Lambda: Tensor, dt: Tensor, s: Tensor) -> Tensor:
    """U [.., D, F] of arguments that were checked."""
    s = s.detach().to(torch.complex128)
    w, c = dense((2 * s.sinh()).to(Lambda.dtype)), dense(s.cosh().to(Lambda.dtype))
    v, z = dense(residues.reshape(-1, *Lambda.shape)), dense(dt[:, None] * Lambda)
    U = Cauchy.apply(v, z, w, c) if needs_gradient(v, z) else _forward(v, z, w, c)
    return U.view(*residues.shape[:-1], len(s))
