"""The forward kernel and its launcher."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, launch
from kernels.selective_scan.triton.arithmetic import (
    LOG2E,
    _advance,
    _both,
    _dots,
    _in_float32,
    _products,
    _scaled,
    _sigmoid,
    _step_sizes,
    _sums,
    _zeros,
)
from kernels.selective_scan.triton.lanes import _of_step, _to_lanes
from kernels.selective_scan.triton.memory import (
    _at,
    _at_channels,
    _in_time,
    _load_channels,
    _load_states,
    _load_steps,
    _place,
    _store1,
    _store_states,
    _store_totals,
)
from kernels.selective_scan.triton.plan import Tuning, _plan, _strides
from kernels.selective_scan.triton.rows import Maps, _hold, _load_held, _row
from kernels.selective_scan.triton.segments import _pass


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
    ]
)  # fmt: skip
def _scan_fwd_kernel(
    x, dt, A, B, C, skip, z, bias, start, y, end, total_dt, chunks,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, SHUFFLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The recurrence of this module over one segment of time, for BLOCK_D channels of one batch row.

    B, C:   [B, T, NP] in float32, or in bfloat16 (PACKED) as words of two; strides in words, NP = NT LANES, zeros
            from N on. Or [D, N], strides None.
    start:  the state before; with several segments [B, splits, N, D], with one [B, D, N]; None is zero.
    y:      None to leave only the ends of all segments but the last; else `end` is the final state [B, D, N].
    end:    [B, splits, N, D], total_dt [B, splits, D] (y None).
    chunks: [B, T / CHUNK, N, D], the states before every CHUNK steps, or None.
    """
    E: tl.constexpr = BLOCK_D // CHANNELS * LANES
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    SCALE: tl.constexpr = 1.0 if PRECISE else LOG2E
    NP: tl.constexpr = NT * LANES
    B_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (b_stride_t is not None)
    C_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (c_stride_t is not None)
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    HELD: tl.constexpr = SHUFFLE and WORDS > 0
    _, i_s, i_b, o_e, o_q, o_n, o_d, m_d = _place(D, splits, BLOCK_D, NT, LANES, CHANNELS)
    # nothing starts from the end of the last segment
    if y is None:  # noqa: SIM102
        if i_s == splits - 1:
            return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = _at_channels(x + i_b * x_stride_b, o_d)
    p_dt = _at_channels(dt + i_b * dt_stride_b, o_d)
    p_y = p_x
    p_z = p_x
    if y is not None:
        p_y = _at_channels(y + i_b * T * D, o_d)
        if z is not None:
            p_z = _at_channels(z + i_b * z_stride_b, o_d)
    p_b = _in_time(B, b_stride_b, b_stride_t, i_b)
    p_c = _in_time(C, c_stride_b, c_stride_t, i_b)
    p_held = _hold(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()
    o_segment = (i_b * splits + i_s) * N * D

    a = _scaled(_load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    h = _zeros(CHANNELS * NT, E)
    if start is not None:
        if splits > 1:
            h = _load_states(start + o_segment, 1, D, o_d, m_d, o_n, N, NT, PTX)
        else:
            h = _load_states(start + i_b * D * N, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_b = a
    if b_stride_t is None:
        row_b = _load_states(B, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_c = a
    if c_stride_t is None:
        row_c = _load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = _load_channels(bias, o_d, E)
    b_skip = _load_channels(skip, o_d, E)
    b_total = _zeros(CHANNELS, E)

    next_x = _load_steps(p_x, x_stride_t, t_first, t_last, o_q, STEPS, LANES, PTX)
    next_dt = _load_steps(p_dt, dt_stride_t, t_first, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_x
    if y is not None and z is not None:
        next_z = _load_steps(p_z, z_stride_t, t_first, t_last, o_q, STEPS, LANES, PTX)
    next_held = next_x
    if HELD:
        next_held = _load_held(p_held, o_e, t_first, t_last, WORDS, STEPS, PTX)
    for t in range(t_first, t_last, STEPS):
        if chunks is not None:  # noqa: SIM102
            if t % CHUNK == 0:
                p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t // CHUNK) * N * D
                _store_states(p_chunk, 1, D, h, o_d, m_d, o_n, N, NT, PTX)
        steps_x, steps_dt, steps_z, held = next_x, next_dt, next_z, next_held
        # loaded while this group is computed
        next_x = _load_steps(p_x, x_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
        next_dt = _load_steps(p_dt, dt_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
        if y is not None and z is not None:
            next_z = _load_steps(p_z, z_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
        if HELD:
            next_held = _load_held(p_held, o_e, t + STEPS, t_last, WORDS, STEPS, PTX)
        for k in tl.static_range(STEPS // LANES):
            m_t = t + k * LANES + o_q < t_last
            b_x = _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
            b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
            b_u = _products(b_dt, b_x)
            b_total = _sums(b_total, b_dt)
            outputs = ()
            for q in tl.static_range(LANES):
                if b_stride_t is not None:
                    row_b = _row(
                        held, p_b, t, t_last, k * LANES + q, o_n, 0,
                        PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                    )  # fmt: skip
                h = _advance(h, a, _of_step(b_dt, q, LANES, PTX), _of_step(b_u, q, LANES, PTX), row_b, NT, PRECISE)
                if y is not None:
                    if c_stride_t is not None:
                        row_c = _row(
                            held, p_c, t, t_last, k * LANES + q, o_n, B_WORDS,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    outputs += _dots(row_c, h, NT)
            if y is not None:
                for c in tl.static_range(CHANNELS):
                    b_y = _to_lanes(outputs, c, CHANNELS, o_e, LANES, PTX) + b_skip[c] * b_x[c]
                    if z is not None:
                        b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                        b_y *= b_z * _sigmoid(b_z, PRECISE)
                    _store1(_at(p_y[c], t + k * LANES + o_q, D, PTX), b_y, m_d[c] & m_t, PTX)

    if end is not None:
        if y is None:
            _store_states(end + o_segment, 1, D, h, o_d, m_d, o_n, N, NT, PTX)
        else:
            m_last = _both(m_d, i_s + 0 * o_e == splits - 1)
            _store_states(end + i_b * D * N, N, 1, h, o_d, m_last, o_n, N, NT, PTX)
    if y is None:
        _store_totals(total_dt + (i_b * splits + i_s) * D, b_total, o_d, m_d, o_q, LANES, PTX)


def scan_fwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    maps: Maps,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    initial_state: Tensor | None,
    return_final_state: bool,
    save: bool,
    tuning: Tuning,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, the final state, the states before every chunk."""
    batch, length, width = x.shape
    state = A.shape[1]
    wide = tuning.forward if z is not None else tuning.forward_segments
    plan = _plan(x, state, wide, tuning.forward_narrow, tuning.forward_segments, tuning=tuning)
    new = partial(torch.empty, dtype=torch.float32, device=x.device)
    y = torch.empty((batch, length, width), dtype=x.dtype, device=x.device)
    final_state = new((batch, width, state)) if return_final_state else None
    chunks = new((batch, cdiv(length, tuning.chunk), state, width)) if save else None
    inputs = (x, dt, A, maps.B, maps.C, skip, z, bias)
    sizes = (length, width, plan.segment, plan.splits, *maps.strides, *_strides(x), *_strides(dt), *_strides(z))
    constants = {**plan.constants, **maps.constants, "CHUNK": tuning.chunk, "SOFTPLUS": softplus}
    start = initial_state
    if plan.splits > 1:
        start = new((batch, plan.splits, state, width))
        total_dt = new((batch, plan.splits, width))
        launch(_scan_fwd_kernel, plan.programs, *inputs, None, None, start, total_dt, None, *sizes, **constants)
        _pass(A, total_dt, start, initial_state, reverse=False)
    launch(_scan_fwd_kernel, plan.programs, *inputs, start, y, final_state, None, chunks, *sizes, **constants)
    return y, final_state, chunks
