"""The convolution at few positions, as sums over the inputs before each of them.

    y_p[d]     = sum_{s <= t_p} k[t_p - s, d] u_s[d]
    du_s[d]    = sum_p k[t_p - s, d] dy_p[d]
    dk_l[d]    = sum over sequences and p of u_{t_p - l}[d] dy_p[d]

Each kernel keeps a tile of steps (or lags) and channels in registers and goes through the positions of a sequence, one
after the other. Tiles of neighbouring positions are shifted by little, so most of what it loads is in the first cache.

Layout:  u [B, T, D] in any layout, fastest with channels contiguous; taps [L, D], contiguous; positions [B, P] below T.
float32: taps, dy, and all products and sums.
Limits:  none; offsets are int64. No atomics: two calls give the same bits.
Cost:    reads u once forward and once backward, writes du; 2 B P T D FLOPs a kernel, and as many bytes of cached loads
         as float32 operands of these products.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient
from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.chunked import with_skip
from subquad.kernels.launch import CompileOptions, cdiv, launch, power_of_2

CHUNK, BLOCK_D, OPTIONS = 64, 64, CompileOptions(num_warps=4)
"""Steps or lags, and at most channels, of a program."""
PROGRAMS_PER_PROCESSOR = 12
"""Programs for each multiprocessor among which the sequences are divided for the gradient of the taps."""


@triton.jit
def _taps_at(taps, position, o_t, o_d, m_d, T, D, L):
    """k[position - t] [CHUNK, BLOCK_D], zeros where a step comes later or there is no such tap."""
    lag = position - o_t
    mask = (lag >= 0) & (lag < L) & (o_t < T)
    return tl.load(taps + lag[:, None] * D + o_d[None, :], mask=mask[:, None] & m_d[None, :], other=0.0)


@triton.jit
def _at_fwd_kernel(
    u, taps, positions, parts,
    T, D, L, P, num_chunks,
    stride_b, stride_t, stride_d,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """parts [B, num_chunks, P, D]: the sums over one chunk of steps. Grid: chunks of all sequences, channels."""
    i_b, i_c = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    o_t = i_c.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    p_u = u + i_b.to(tl.int64) * stride_b + o_t[:, None] * stride_t + o_d.to(tl.int64)[None, :] * stride_d
    b_u = tl.load(p_u, mask=(o_t < T)[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * P
    for i_p in range(P):
        position = tl.load(positions + i_b.to(tl.int64) * P + i_p)
        b_k = _taps_at(taps, position, o_t, o_d, m_d, T, D, L)
        tl.store(parts + (row + i_p) * D + o_d, tl.sum(b_u * b_k, 0), mask=m_d)


@triton.jit
def _at_du_kernel(
    dy, taps, positions, du,
    T, D, L, P, num_chunks,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """du [B, T, D] of dy [B, P, D], both with channels contiguous. Grid: as that of `_at_fwd_kernel`."""
    i_b, i_c = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    o_t = i_c.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_du = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for i_p in range(P):
        row = i_b.to(tl.int64) * P + i_p
        b_dy = tl.load(dy + row * D + o_d, mask=m_d, other=0.0)
        b_du += _taps_at(taps, tl.load(positions + row), o_t, o_d, m_d, T, D, L) * b_dy[None, :]
    p_du = du + (i_b.to(tl.int64) * T + o_t)[:, None] * D + o_d[None, :]
    tl.store(p_du, b_du.to(du.dtype.element_ty), mask=(o_t < T)[:, None] & m_d[None, :])


@triton.jit
def _at_dtaps_kernel(
    u, dy, positions, parts,
    B, D, L, P, num_chunks,
    stride_b, stride_t, stride_d,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """parts [splits, L, D]: the gradient of the taps from some sequences. Grid: chunks of lags and splits, channels."""
    i_s, i_c = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    num_splits = tl.num_programs(0) // num_chunks
    o_l = i_c * CHUNK + tl.arange(0, CHUNK)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    part = tl.cdiv(B, num_splits)
    b_dk = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    first = (i_s * part).to(tl.int64)
    p_u, row = u + first * stride_b + o_d.to(tl.int64)[None, :] * stride_d, first * P
    for _ in range(i_s * part, tl.minimum(B, (i_s + 1) * part)):
        for i_p in range(P):
            b_dy = tl.load(dy + (row + i_p) * D + o_d, mask=m_d, other=0.0)
            o_t = tl.load(positions + row + i_p).to(tl.int64) - o_l
            b_u = tl.load(p_u + o_t[:, None] * stride_t, mask=(o_t >= 0)[:, None] & m_d[None, :], other=0.0)
            b_dk += b_u.to(tl.float32) * b_dy[None, :]
        row += P
        p_u += stride_b
    p_parts = parts + (i_s.to(tl.int64) * L + o_l)[:, None] * D + o_d[None, :]
    tl.store(p_parts, b_dk, mask=(o_l < L)[:, None] & m_d[None, :])


def _launch(kernel: Any, steps: int, rows: int, width: int, **named: Any) -> None:
    """Launches programs for `rows` times all chunks of so many steps, and all channels."""
    chunks, block = cdiv(steps, CHUNK), min(BLOCK_D, power_of_2(width))
    grid = chunks * rows, cdiv(width, block)
    launch(kernel, grid, **named, CHUNK=CHUNK, BLOCK_D=block, **OPTIONS.keywords())


def _forward(u: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
    (batch, steps, width), count = u.shape, positions.shape[1]
    chunks = cdiv(steps, CHUNK)
    parts = taps.new_empty(batch, chunks, count, width)
    stride_b, stride_t, stride_d = u.stride()
    _launch(
        _at_fwd_kernel, steps, batch, width, u=u, taps=taps, positions=positions, parts=parts, T=steps, D=width,
        L=len(taps), P=count, num_chunks=chunks, stride_b=stride_b, stride_t=stride_t, stride_d=stride_d,
    )  # fmt: skip
    return parts.sum(1).to(u.dtype)


class _ConvAt(OnceDifferentiable):
    @staticmethod
    def forward(ctx: Any, u: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(u, taps, positions)
        return _forward(u, taps, positions)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, taps, positions = ctx.saved_tensors
        (batch, steps, width), lags, count = u.shape, len(taps), positions.shape[1]
        dy, du, dtaps = dy.float().contiguous(), None, None
        if ctx.needs_input_grad[0]:
            du = u.new_empty(batch, steps, width)
            _launch(
                _at_du_kernel, steps, batch, width, dy=dy, taps=taps, positions=positions, du=du, T=steps, D=width,
                L=lags, P=count, num_chunks=cdiv(steps, CHUNK),
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            chunks = cdiv(lags, CHUNK)
            wanted = PROGRAMS_PER_PROCESSOR * num_processors(u.device)
            splits = min(batch, cdiv(wanted, chunks * cdiv(width, BLOCK_D)))
            parts = taps.new_empty(splits, lags, width)
            stride_b, stride_t, stride_d = u.stride()
            _launch(
                _at_dtaps_kernel, lags, splits, width, u=u, dy=dy, positions=positions, parts=parts, B=batch, D=width,
                L=lags, P=count, num_chunks=chunks, stride_b=stride_b, stride_t=stride_t, stride_d=stride_d,
            )  # fmt: skip
            dtaps = parts.sum(0)
        return du, dtaps, None


def fft_conv_at_triton(u: Tensor, filter: Tensor, positions: Tensor, D: Tensor | None) -> Tensor:
    """`fft_conv_at` for arguments that were checked."""
    taps = (filter if filter.shape[1] <= u.shape[1] else filter[:, : u.shape[1]]).float()
    taps = (taps if D is None else with_skip(taps, D.float())).t().contiguous()
    positions = positions.contiguous()
    return _ConvAt.apply(u, taps, positions) if needs_gradient(u, taps) else _forward(u, taps, positions)
