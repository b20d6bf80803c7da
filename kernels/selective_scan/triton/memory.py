"""Loads and stores of the scan kernels, and where a program stands in [batch, time, width]."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.selective_scan.triton.lanes import _sum_lanes


@triton.jit
def _load1(p, PTX: tl.constexpr):
    """tl.load(p), hidden from Triton's coalescing pass: for kernels like these it takes a minute instead of seconds."""
    if PTX:
        if p.dtype.element_ty == tl.float32:
            return tl.inline_asm_elementwise(
                "ld.global.b32 $0, [$1];", "=f,l", [p.to(tl.int64)], dtype=tl.float32, is_pure=False, pack=1
            )
        else:  # noqa: RET505
            b_x = tl.inline_asm_elementwise(
                "ld.global.b16 $0, [$1];", "=h,l", [p.to(tl.int64)], dtype=tl.int16, is_pure=False, pack=1
            )
            return b_x.to(p.dtype.element_ty, bitcast=True)
    else:
        return tl.load(p)


@triton.jit
def _store1(p, b_x, m, PTX: tl.constexpr):
    """tl.store(p, b_x, mask=m), hidden for the same reason."""
    b_x = b_x.to(p.dtype.element_ty)
    if PTX:
        if m is None:
            tl.inline_asm_elementwise(
                "st.global.b32 [$1], $2; mov.b32 $0, 0;",
                "=r,l,f",
                [p.to(tl.int64), b_x],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        elif p.dtype.element_ty == tl.float32:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
                "=r,l,f,r",
                [p.to(tl.int64), b_x, m.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b16 [$1], $2; mov.b32 $0, 0; }",
                "=r,l,h,r",
                [p.to(tl.int64), b_x.to(tl.int16, bitcast=True), m.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    else:
        tl.store(p, b_x, mask=m)


@triton.jit
def _add1(p, b_x, m_more, m, PTX: tl.constexpr):
    """*p = b_x, or where m_more *p += b_x; nobody else writes there, so the order is that of the program."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p, q; setp.ne.b32 p, $4, 0; setp.ne.and.b32 q, $3, 0, p; setp.eq.and.b32 p, $3, 0, p;"
            " @p st.global.b32 [$1], $2; @q red.global.add.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r,r",
            [p.to(tl.int64), b_x, m_more.to(tl.int32), m.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p, b_x + tl.load(p, mask=m & m_more, other=0.0), mask=m)


@triton.jit
def _at(p, o_t, stride_t, PTX: tl.constexpr):
    """p + o_t stride_t, in one instruction; a stride has less than 2^31 bytes."""
    if PTX:
        p_t = tl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, $2, $3;",
            "=l,r,r,l",
            [o_t, stride_t * (p.dtype.element_ty.primitive_bitwidth // 8), p.to(tl.int64)],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
        p_t = p_t.to(p.dtype)
    else:
        p_t = p + o_t.to(tl.int64) * stride_t
    return p_t


@triton.jit
def _place(D, splits, BLOCK_D: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr):
    """Channel block, segment, batch row of a program; element, lane of a channel, first state, channels and masks."""
    APART: tl.constexpr = BLOCK_D // CHANNELS
    num_d = tl.cdiv(D, BLOCK_D)
    i_d = tl.program_id(0) % num_d
    i_s = tl.program_id(0) // num_d % splits
    i_b = (tl.program_id(0) // num_d // splits).to(tl.int64)
    o_e = tl.arange(0, APART * LANES)
    o_q = o_e % LANES
    channels = ()
    m_d = ()
    for c in tl.static_range(CHANNELS):
        o_d = i_d * BLOCK_D + c * APART + o_e // LANES
        # the last channel stands in for those that are missing
        channels += (tl.minimum(o_d, D - 1),)
        m_d += (o_d < D,)
    return i_d, i_s, i_b, o_e, o_q, o_q * NT, channels, m_d


@triton.jit
def _at_channels(p, o_d):
    pointers = ()
    for c in tl.static_range(len(o_d)):
        pointers += (p + o_d[c],)
    return pointers


@triton.jit
def _load_channels(p, o_d, E: tl.constexpr):
    """Of each channel a number, zero where p is None."""
    numbers = ()
    for c in tl.static_range(len(o_d)):
        if p is not None:
            numbers += (tl.load(p + o_d[c]).to(tl.float32),)
        else:
            numbers += (tl.zeros([E], tl.float32),)
    return numbers


@triton.jit
def _in_time(p, stride_b, stride_t, i_b):
    """(start of a batch row, stride of a step) of what depends on time, else nothing."""
    return (p + i_b * stride_b, stride_t) if stride_t is not None else ()


@triton.jit
def _load_steps(p, stride_t, t, t_last, o_q, STEPS: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Of STEPS steps from t on those of this lane: o_q, o_q + LANES, ...; from t_last on the step before it.

    p: one pointer a channel; the channels of a step stand together.
    """
    steps = ()
    for k in tl.static_range(STEPS // LANES):
        o_t = tl.minimum(t + k * LANES + o_q, t_last - 1)
        for c in tl.static_range(len(p)):
            steps += (_load1(_at(p[c], o_t, stride_t, PTX), PTX),)
    return steps


@triton.jit
def _load_states(p, stride_d, stride_n, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr):
    """States o_n .. o_n + NT - 1 of each channel in float32, zeros from N on; p is that of channel 0 and state 0."""
    states = ()
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            b_h = _load1(p + o_d[c] * stride_d + tl.minimum(o_n + n, N - 1) * stride_n, PTX).to(tl.float32)
            states += (tl.where(m_d[c] & (o_n + n < N), b_h, 0.0),)
    return states


@triton.jit
def _store_states(p, stride_d, stride_n, states, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr):
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            p_h = p + o_d[c] * stride_d + (o_n + n) * stride_n
            _store1(p_h, states[c * NT + n], m_d[c] & (o_n + n < N), PTX)


@triton.jit
def _add_states(p, stride_n, states, m_more, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr):
    """Adds to what this lane has stored before, if it has (m_more)."""
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            _add1(p + o_d[c] + (o_n + n) * stride_n, states[c * NT + n], m_more, m_d[c] & (o_n + n < N), PTX)


@triton.jit
def _store_totals(p, sums, o_d, m_d, o_q, LANES: tl.constexpr, PTX: tl.constexpr):
    """Of each channel the sum over its lanes."""
    for c in tl.static_range(len(o_d)):
        tl.store(p + o_d[c], _sum_lanes(sums[c], LANES, PTX), mask=m_d[c] & (o_q == 0))


@triton.jit
def _keep(p, values, E: tl.constexpr, PTX: tl.constexpr):
    for i in tl.static_range(len(values)):
        _store1(p + i * E, values[i], None, PTX)


@triton.jit
def _kept(p, NUM: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr):
    values = ()
    for i in tl.static_range(NUM):
        values += (_load1(p + i * E, PTX),)
    return values
