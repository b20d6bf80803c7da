"""Transforms of whole sequences, inner stage: each row of `outer_stage.py` takes the transform of a block by itself.

With V_j, G_j and H_j the rows of a sequence, of its gradient and of the taps, and the transform of `tables.py`,

    Z_j = IFFT(FFT(H_j) FFT(V_j)),    of the gradient: IFFT(conj(FFT(H_j)) FFT(G_j))
    of the gradient of the taps: IFFT(sum over sequences of conj(FFT(V_j)) FFT(G_j))

A program has one channel and one row, so it reads the taps and makes the sum over sequences without another program.
Z is written where V or G was.

Between products elements are float16, sums over sequences float32. A sequence has one scale from the sum of its
magnitudes, a channel of taps likewise: no spectrum of taps exceeds LARGEST_TAPS and none of a sequence LARGEST /
LARGEST_TAPS, and each half of the inverse transform divides by its own length. Bytes: 8 for each step of each sequence,
in the backward pass 12. Multiply-adds for each of them: 4 (R + N) a transform.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.device import num_processors
from subquad.kernels.fft_conv.triton.epilogue import Epilogue, Outputs, empty_outputs
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.fft_conv.triton.outer_stage import inverse_outer_stage, outer_stage
from subquad.kernels.fft_conv.triton.plan import LONG_COLUMNS, RADIX, LongPlan, long_plan
from subquad.kernels.fft_conv.triton.spectra import (
    LARGEST,
    LEAST_PROGRAMS,
    SEQUENCES_PER_PROGRAM,
    load_part,
    store_part,
    times_at_most,
)
from subquad.kernels.fft_conv.triton.tables import TABLES
from subquad.kernels.launch import cdiv, launch
from subquad.kernels.transpose import empty_time_last

LARGEST_TAPS = 32.0
"""Upper bound of the magnitude of a spectrum of taps. That of a sequence is such that the product fits LARGEST."""


@triton.jit
def _load_row(p_wave, p_sums, limit, R: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr):
    """Both parts of a row [R, N] times one factor for the whole sequence, which keeps its spectrum below `limit`; and
    that factor."""
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    total = tl.sum(tl.load(p_sums + tl.arange(0, R * N // TILE)), 0)
    times = times_at_most(total, limit)
    # a row of the tile lies in one tile of the outer stage, whose scale it has
    b_scale = times / times_at_most(tl.load(p_sums + o_r * N // TILE), LARGEST)
    b_scale = b_scale.to(tl.float16)[:, None]
    p_wave += o_r[:, None] * N + o_n[None, :]
    return tl.load(p_wave) * b_scale, tl.load(p_wave + R * N) * b_scale, times


@triton.jit
def _transform(b_vr, b_vi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi):
    """Both parts of the spectrum of a complex block [R, N], which float16 must be able to hold."""
    b_yr = tl.dot(b_im, -b_vi, tl.dot(b_re, b_vr)).to(tl.float16)
    b_yi = tl.dot(b_im, b_vr, tl.dot(b_re, b_vi)).to(tl.float16)
    b_yr, b_yi = b_yr * b_cos - b_yi * b_sin, b_yr * b_sin + b_yi * b_cos
    b_xr = tl.dot(b_yi, b_minus_wi, tl.dot(b_yr, b_wr))
    b_xi = tl.dot(b_yi, b_wr, tl.dot(b_yr, b_wi))
    return b_xr.to(tl.float16), b_xi.to(tl.float16)


@triton.jit
def _store_inverse(
    p_wave, b_pr, b_pi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi, R: tl.constexpr, N: tl.constexpr
):
    """Stores both parts of the inverse transform of a spectrum [R, N]."""
    b_ur = (tl.dot(b_pi, b_wi, tl.dot(b_pr, b_wr)) * (1.0 / N)).to(tl.float16)
    b_ui = (tl.dot(b_pr, b_minus_wi, tl.dot(b_pi, b_wr)) * (1.0 / N)).to(tl.float16)
    b_ur, b_ui = b_ur * b_cos + b_ui * b_sin, b_ui * b_cos - b_ur * b_sin
    b_zr = tl.dot(tl.trans(b_im), b_ui, tl.dot(tl.trans(b_re), b_ur))
    b_zi = tl.dot(tl.trans(b_im), -b_ur, tl.dot(tl.trans(b_re), b_ui))
    p_wave += tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(p_wave, (b_zr * (1.0 / R)).to(tl.float16))
    tl.store(p_wave + R * N, (b_zi * (1.0 / R)).to(tl.float16))


@triton.jit
def _load_tables(inner, turns, outer, R: tl.constexpr, N: tl.constexpr):
    """The matrices and twiddle factors of the transform of a block, see `Tables`."""
    o_r, o_n = tl.arange(0, R), tl.arange(0, N)
    p_inner = inner + (o_r[:, None] * R + o_r[None, :])
    p_turns = turns + (o_r[:, None] * N + o_n[None, :])
    p_outer = outer + (o_n[:, None] * N + o_n[None, :])
    b_re, b_im = tl.load(p_inner), tl.load(p_inner + R * R)
    b_cos, b_sin = tl.load(p_turns), tl.load(p_turns + R * N)
    return b_re, b_im, b_cos, b_sin, tl.load(p_outer), tl.load(p_outer + N * N), tl.load(p_outer + 2 * N * N)


@triton.jit(do_not_specialize=["M"])
def _long_taps_kernel(
    waves, sums, inner, turns, outer, spectra,
    M,
    R: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr, LARGEST_TAPS: tl.constexpr,
):  # fmt: skip
    """spectra [D, M, 2, R N]: both parts of the spectra of waves [D, M, 2, R N], in the order of `store_part`."""
    SIZE: tl.constexpr = R * N
    i_row = tl.program_id(0).to(tl.int64)
    b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi = _load_tables(inner, turns, outer, R, N)
    p_wave, p_sums = waves + i_row * (2 * SIZE), sums + i_row // M * (SIZE // TILE)
    b_vr, b_vi, _ = _load_row(p_wave, p_sums, LARGEST_TAPS, R, N, TILE, LARGEST)
    b_hr, b_hi = _transform(b_vr, b_vi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
    store_part(spectra + i_row * (2 * SIZE), b_hr, R, N)
    store_part(spectra + (i_row * (2 * SIZE) + SIZE), b_hi, R, N)


@triton.jit(do_not_specialize=["B", "M", "num_groups", "per_group"])
def _inner_kernel(
    waves, sums, spectra, taps_sums, inner, turns, outer, scales,
    B, M, num_groups, per_group,
    REVERSE: tl.constexpr, R: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_TAPS: tl.constexpr,
):  # fmt: skip
    """waves [D, B, M, 2, R N]: Z instead of V, over scales [D, B, M]; REVERSE: with conjugate spectra of the taps."""
    SIZE: tl.constexpr = R * N
    NUM_TILES: tl.constexpr = SIZE // TILE
    i_j, i_group = tl.program_id(0) % M, tl.program_id(0) // M % num_groups
    i_d = (tl.program_id(0) // M // num_groups).to(tl.int64)
    b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi = _load_tables(inner, turns, outer, R, N)
    p_spectra = spectra + (i_d * M + i_j) * (2 * SIZE)
    b_hr, b_hi = load_part(p_spectra, R, N), load_part(p_spectra + SIZE, R, N)
    if REVERSE:
        b_hi = -b_hi
    taps_total = tl.sum(tl.load(taps_sums + i_d * NUM_TILES + tl.arange(0, NUM_TILES)), 0)
    taps_times = times_at_most(taps_total, LARGEST_TAPS)
    first = i_group * per_group
    for i in range(tl.minimum(per_group, B - first)):
        i_s = i_d * B + (first + i)
        p_wave = waves + (i_s * M + i_j) * (2 * SIZE)
        b_vr, b_vi, times = _load_row(p_wave, sums + i_s * NUM_TILES, LARGEST / LARGEST_TAPS, R, N, TILE, LARGEST)
        b_xr, b_xi = _transform(b_vr, b_vi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
        b_pr, b_pi = b_hr * b_xr - b_hi * b_xi, b_hr * b_xi + b_hi * b_xr
        _store_inverse(p_wave, b_pr, b_pi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi, R, N)
        tl.store(scales + i_s * M + i_j, 1.0 / (times * taps_times))


@triton.jit(do_not_specialize=["B", "M"])
def _inner_backward_kernel(
    waves, sums, g_waves, g_sums, spectra, taps_sums, inner, turns, outer, scales, taps_waves, taps_scales,
    B, M,
    R: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr, LARGEST_TAPS: tl.constexpr,
):  # fmt: skip
    """g_waves [D, B, M, 2, R N] and scales: as of `_inner_kernel` with REVERSE; taps_waves [D, M, 2, R N] over
    taps_scales [D, M]: those of the gradient of the taps, from waves and g_waves."""
    SIZE: tl.constexpr = R * N
    NUM_TILES: tl.constexpr = SIZE // TILE
    i_j, i_d = tl.program_id(0) % M, (tl.program_id(0) // M).to(tl.int64)
    b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi = _load_tables(inner, turns, outer, R, N)
    p_spectra = spectra + (i_d * M + i_j) * (2 * SIZE)
    b_hr, b_hi = load_part(p_spectra, R, N), load_part(p_spectra + SIZE, R, N)
    taps_total = tl.sum(tl.load(taps_sums + i_d * NUM_TILES + tl.arange(0, NUM_TILES)), 0)
    taps_times = times_at_most(taps_total, LARGEST_TAPS)
    b_sr, b_si = tl.zeros([R, N], tl.float32), tl.zeros([R, N], tl.float32)
    for i_b in range(B):
        i_s = i_d * B + i_b
        o_wave = (i_s * M + i_j) * (2 * SIZE)
        b_vr, b_vi, times = _load_row(
            waves + o_wave, sums + i_s * NUM_TILES, LARGEST / LARGEST_TAPS, R, N, TILE, LARGEST
        )
        b_xr, b_xi = _transform(b_vr, b_vi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
        b_vr, b_vi, g_times = _load_row(
            g_waves + o_wave, g_sums + i_s * NUM_TILES, LARGEST / LARGEST_TAPS, R, N, TILE, LARGEST
        )
        b_gr, b_gi = _transform(b_vr, b_vi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi)
        # one factor after the other, because their product may exceed the range of float32
        b_ar, b_ai = b_xr.to(tl.float32) / times, b_xi.to(tl.float32) / times
        b_cr, b_ci = b_gr.to(tl.float32) / g_times, b_gi.to(tl.float32) / g_times
        b_sr += b_ar * b_cr + b_ai * b_ci
        b_si += b_ar * b_ci - b_ai * b_cr
        b_pr, b_pi = b_hr * b_gr + b_hi * b_gi, b_hr * b_gi - b_hi * b_gr
        _store_inverse(g_waves + o_wave, b_pr, b_pi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi, R, N)
        tl.store(scales + i_s * M + i_j, 1.0 / (g_times * taps_times))
    most = tl.max(tl.max(tl.maximum(tl.abs(b_sr), tl.abs(b_si)), 1), 0)
    times = times_at_most(most, LARGEST / 2)
    b_pr, b_pi = (b_sr * times).to(tl.float16), (b_si * times).to(tl.float16)
    p_wave = taps_waves + (i_d * M + i_j) * (2 * SIZE)
    _store_inverse(p_wave, b_pr, b_pi, b_re, b_im, b_cos, b_sin, b_wr, b_wi, b_minus_wi, R, N)
    tl.store(taps_scales + i_d * M + i_j, 1.0 / times)


class LongTaps(NamedTuple):
    """Spectra [D, M, 2, SIZE] of the taps, the sums [D, SIZE / TILE] that their scales come from, and the plan."""

    spectra: Tensor
    sums: Tensor
    plan: LongPlan


def _tables(device: torch.device) -> dict[str, Tensor]:
    tables = TABLES.get(LONG_COLUMNS, device)
    return {"inner": tables.half_inner, "turns": tables.turns, "outer": tables.outer}


def _sizes(plan: LongPlan) -> dict[str, int | float]:
    return {"R": RADIX, "N": LONG_COLUMNS, "TILE": plan.tile, "LARGEST": LARGEST, "LARGEST_TAPS": LARGEST_TAPS}


def long_taps(filter: Tensor, length: int, lags: int) -> LongTaps:
    """The spectra of the first `lags` taps of filter [D, L], for sequences of some length."""
    plan = long_plan(length)
    waves, sums = outer_stage(filter.t()[None], lags, plan)
    spectra = torch.empty(filter.shape[0], plan.num_rows, 2, plan.size, dtype=torch.float16, device=filter.device)
    launch(
        _long_taps_kernel, filter.shape[0] * plan.num_rows, waves=waves, sums=sums, **_tables(filter.device),
        spectra=spectra, M=plan.num_rows, **_sizes(plan), **plan.inner_options.keywords(),
    )  # fmt: skip
    return LongTaps(spectra, sums[:, 0], plan)


def conv_long(source: Gated, taps: LongTaps, epilogue: Epilogue, reverse: bool) -> Outputs:
    """The convolution of `source` with the taps, or with `reverse` the correlation, and the outputs of `epilogue`."""
    plan, (batch, length, width) = taps.plan, source.x.shape
    waves, sums = outer_stage(source.product, length, plan)
    scales = torch.empty(width, batch, plan.num_rows, dtype=torch.float32, device=waves.device)
    most = width * plan.num_rows * batch // (LEAST_PROGRAMS * num_processors(waves.device))
    per_group = max(1, min(SEQUENCES_PER_PROGRAM, most))
    num_groups = cdiv(batch, per_group)
    launch(
        _inner_kernel, width * plan.num_rows * num_groups, waves=waves, sums=sums, spectra=taps.spectra,
        taps_sums=taps.sums, **_tables(waves.device), scales=scales, B=batch, M=plan.num_rows, num_groups=num_groups,
        per_group=per_group, REVERSE=reverse, **_sizes(plan), **plan.inner_options.keywords(),
    )  # fmt: skip
    outputs = empty_outputs(source.x, epilogue)
    inverse_outer_stage(waves, scales, source, epilogue, outputs, plan)
    return outputs


def conv_long_backward(x: Tensor, g: Gated, taps: LongTaps, epilogue: Epilogue, lags: int) -> tuple[Outputs, Tensor]:
    """The correlation of g with the taps, with the outputs of `epilogue`; and the gradient of the taps [D, lags] in
    float32, from x [B, >= T, D] and g."""
    plan, (batch, length, width) = taps.plan, g.x.shape
    rows = outer_stage(x, length, plan)
    g_rows = outer_stage(g.product, length, plan)
    scales = torch.empty(width, batch, plan.num_rows, dtype=torch.float32, device=x.device)
    taps_waves = torch.empty_like(taps.spectra)
    taps_scales = torch.empty(width, plan.num_rows, dtype=torch.float32, device=x.device)
    launch(
        _inner_backward_kernel, width * plan.num_rows, waves=rows.waves, sums=rows.sums, g_waves=g_rows.waves,
        g_sums=g_rows.sums, spectra=taps.spectra, taps_sums=taps.sums, **_tables(x.device), scales=scales,
        taps_waves=taps_waves, taps_scales=taps_scales, B=batch, M=plan.num_rows, **_sizes(plan),
        **plan.inner_options.keywords(),
    )  # fmt: skip
    outputs = empty_outputs(g.x, epilogue)
    inverse_outer_stage(g_rows.waves, scales, g, epilogue, outputs, plan)
    dtaps = empty_time_last(x.new_empty((1, lags, width)), torch.float32)
    empty = Gated(dtaps, dtaps, None)
    inverse_outer_stage(taps_waves, taps_scales, empty, Epilogue(), Outputs(dtaps, None, None), plan)
    return outputs, dtaps[0].t()
