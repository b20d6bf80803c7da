"""Transforms of whole sequences, outer stage: between T steps and M rows of SIZE elements, which lie in memory.

A sequence is cut into M pieces of SIZE = R N steps, t = SIZE p + q, and frequencies into F = j + M f. With
e(z) = exp(2 pi i z) and a quarter added to each frequency, as in `tables.py`,

    X[j + M f] = sum_t e(-(F + 1/4) t / M SIZE) x[t] = sum_q e(-(f + 1/4) q / SIZE) V[j, q]
    V[j, q] = e(-(j + 1/4 - M / 4) q / M SIZE) sum_p e(-(j + 1/4) p / M) x[SIZE p + q]

`_outer_kernel` makes V, a product with an M x M matrix and a twiddle factor for each element. Row j of V then takes the
transform of a block, and there convolves alone (`inner_stage.py`). `_inverse_outer_kernel` goes back from the rows Z:

    y[SIZE p + q] = Re sum_j e((j + 1/4) p / M) e((j + 1/4 - M / 4) q / M SIZE) Z[j, q] / M

What goes around a sequence once comes back times i, so its real part is the convolution and needs no padding.

Rows are float16, sums float32. V of TILE neighbouring q has a scale of its own, a power of two from the sum of its
inputs' magnitudes; Z has one for each row. Bytes: 6 for each step of each sequence, in either direction. Multiply-adds:
2 M for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.triton.epilogue import Epilogue, Outputs, finish, stride_arguments, tensor_arguments
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.fft_conv.triton.plan import LongPlan
from subquad.kernels.fft_conv.triton.spectra import LARGEST, LEAST_PROGRAMS, times_at_most
from subquad.kernels.fft_conv.triton.tables import LONG_TABLES
from subquad.kernels.launch import cdiv, launch

SEQUENCES_PER_PROGRAM = 8
"""Number of sequences that one program transforms one after the other; fewer if there would be too few programs."""


@triton.jit(do_not_specialize=["B", "num_sequences", "per_group", "M"])
def _outer_kernel(
    x, matrix, turns, waves, sums,
    B, num_sequences, per_group, M, x_T,
    x_stride_b, x_stride_d, x_stride_t,
    PADDED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """waves [D, B, M, 2, SIZE]: both parts of V, divided by the scales of their tiles; sums [D, B, SIZE / TILE]: the
    sums of magnitudes that the scales come from."""
    NUM_TILES: tl.constexpr = SIZE // TILE
    i_q, i_group = tl.program_id(0) % NUM_TILES, tl.program_id(0) // NUM_TILES
    o_j, o_p = tl.arange(0, PADDED), tl.arange(0, PADDED)
    o_q = i_q * TILE + tl.arange(0, TILE)
    p_matrix = matrix + (o_j[:, None] * PADDED + o_p[None, :])
    b_re, b_im = tl.load(p_matrix), tl.load(p_matrix + PADDED * PADDED)
    p_turns = turns + (o_j[:, None] * SIZE + o_q[None, :])
    b_cos, b_sin = tl.load(p_turns), tl.load(p_turns + PADDED * SIZE)
    o_t = o_p[:, None] * SIZE + o_q[None, :]
    o_wave = o_j[:, None] * (2 * SIZE) + o_q[None, :]
    m_wave = (o_j < M)[:, None] & (o_q >= 0)[None, :]
    first = (i_group * per_group).to(tl.int64)
    for i in range(tl.minimum(per_group, num_sequences - first)):
        i_s = first + i
        p_x = x + ((i_s % B) * x_stride_b + (i_s // B) * x_stride_d)
        b_x = tl.load(p_x + o_t.to(tl.int64) * x_stride_t, mask=o_t < x_T, other=0.0).to(tl.float32)
        total = tl.sum(tl.sum(tl.abs(b_x), 1), 0)
        b_x = (b_x * times_at_most(total, LARGEST)).to(tl.float16)
        b_r, b_i = tl.dot(b_re, b_x).to(tl.float16), tl.dot(b_im, b_x).to(tl.float16)
        p_wave = waves + i_s * M * (2 * SIZE) + o_wave
        tl.store(p_wave, b_r * b_cos - b_i * b_sin, mask=m_wave)
        tl.store(p_wave + SIZE, b_r * b_sin + b_i * b_cos, mask=m_wave)
        tl.store(sums + i_s * NUM_TILES + i_q, total)


@triton.jit(do_not_specialize=["B", "num_sequences", "per_group", "M"])
def _inverse_outer_kernel(
    waves, scales, matrix, turns, skip, direct, direct_gate, scale, other, y, plain, product,
    B, num_sequences, per_group, M, D, T,
    direct_stride_b, direct_stride_d, direct_gate_stride_b, direct_gate_stride_d, scale_stride_b, scale_stride_d,
    other_stride_b, other_stride_d,
    PADDED: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The outputs of `epilogue.py` from waves [D, B, M, 2, SIZE] and scales [D, B, M], whose product is Z."""
    NUM_TILES: tl.constexpr = SIZE // TILE
    i_q, i_group = tl.program_id(0) % NUM_TILES, tl.program_id(0) // NUM_TILES
    o_j, o_p = tl.arange(0, PADDED), tl.arange(0, PADDED)
    o_q = i_q * TILE + tl.arange(0, TILE)
    p_matrix = matrix + (o_j[None, :] * PADDED + o_p[:, None])
    b_re, b_im = tl.load(p_matrix), tl.load(p_matrix + PADDED * PADDED)
    p_turns = turns + (o_j[:, None] * SIZE + o_q[None, :])
    b_cos, b_sin = tl.load(p_turns), tl.load(p_turns + PADDED * SIZE)
    o_t = o_p[:, None] * SIZE + o_q[None, :]
    o_wave = o_j[:, None] * (2 * SIZE) + o_q[None, :]
    m_wave = (o_j < M)[:, None] & (o_q >= 0)[None, :]
    first = (i_group * per_group).to(tl.int64)
    tensors = skip, direct, direct_gate, scale, other, y, plain, product
    strides_b = direct_stride_b, direct_gate_stride_b, scale_stride_b, other_stride_b
    strides_d = direct_stride_d, direct_gate_stride_d, scale_stride_d, other_stride_d
    for i in range(tl.minimum(per_group, num_sequences - first)):
        i_s = first + i
        p_wave = waves + i_s * M * (2 * SIZE) + o_wave
        b_r, b_i = tl.load(p_wave, mask=m_wave, other=0.0), tl.load(p_wave + SIZE, mask=m_wave, other=0.0)
        b_scales = tl.load(scales + i_s * M + o_j, mask=o_j < M, other=0.0)
        largest = tl.max(b_scales, 0)
        # powers of two, of which none exceeds one
        b_scales = (b_scales / largest).to(tl.float16)[:, None]
        b_r, b_i = b_r * b_scales, b_i * b_scales
        b_y = tl.dot(b_re, b_r * b_cos + b_i * b_sin)
        b_y = tl.dot(b_im, b_i * b_cos - b_r * b_sin, b_y)
        finish(b_y * (largest / M), i_s % B + o_p * 0, o_t, o_t < T, i_s // B, D, T, tensors, strides_b, strides_d)


class Rows(NamedTuple):
    """Results of the outer stage for x [B, T, D], see `_outer_kernel`."""

    waves: Tensor
    """[D, B, M, 2, SIZE], float16."""
    sums: Tensor
    """[D, B, SIZE / TILE], float32."""


def _per_group(num_sequences: int, plan: LongPlan, device: torch.device) -> int:
    most = num_sequences * (plan.size // plan.tile) // (LEAST_PROGRAMS * num_processors(device))
    return max(1, min(SEQUENCES_PER_PROGRAM, most))


def outer_stage(x: Tensor, length: int, plan: LongPlan) -> Rows:
    """The rows V of x [B, at least `length`, D]."""
    batch, _, width = x.shape
    num_tiles, tables = plan.size // plan.tile, LONG_TABLES.get(plan.num_rows, x.device)
    waves = torch.empty(width, batch, plan.num_rows, 2, plan.size, dtype=torch.float16, device=x.device)
    sums = torch.empty(width, batch, num_tiles, dtype=torch.float32, device=x.device)
    per_group = _per_group(batch * width, plan, x.device)
    stride_b, stride_t, stride_d = x.stride()
    launch(
        _outer_kernel, num_tiles * cdiv(batch * width, per_group), x=x, matrix=tables.matrix, turns=tables.turns,
        waves=waves, sums=sums, B=batch, num_sequences=batch * width, per_group=per_group, M=plan.num_rows, x_T=length,
        x_stride_b=stride_b, x_stride_d=stride_d, x_stride_t=stride_t, PADDED=plan.padded, SIZE=plan.size,
        TILE=plan.tile, LARGEST=LARGEST, **plan.outer_options.keywords(),
    )  # fmt: skip
    return Rows(waves, sums)


def inverse_outer_stage(
    waves: Tensor, scales: Tensor, source: Gated, epilogue: Epilogue, outputs: Outputs, plan: LongPlan
) -> None:
    """Writes `outputs`; waves and scales as in `_inverse_outer_kernel`."""
    batch, length, width = outputs.y.shape
    tables, per_group = LONG_TABLES.get(plan.num_rows, waves.device), _per_group(batch * width, plan, waves.device)
    named = stride_arguments(source, epilogue)
    launch(
        _inverse_outer_kernel, plan.size // plan.tile * cdiv(batch * width, per_group), waves=waves, scales=scales,
        matrix=tables.matrix, turns=tables.turns, **tensor_arguments(source, epilogue, outputs), B=batch,
        num_sequences=batch * width, per_group=per_group, M=plan.num_rows, D=width, T=length,
        **{name: stride for name, stride in named.items() if not name.startswith("x_")}, PADDED=plan.padded,
        SIZE=plan.size, TILE=plan.tile, **plan.outer_options.keywords(),
    )  # fmt: skip
