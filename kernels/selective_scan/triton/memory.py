"""Loads and stores of the scan kernels, and the channels, segment and batch row on which a program works.

Pointers are tensors with one address a thread. Tuples have one tensor for each channel of a thread (channels `o_d`,
masks `m_d`), or one for each of its NT states of each channel, from state `o_n` on.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.lanes import sum_lanes


@triton.jit
def load(p, PTX: tl.constexpr):
    """tl.load(p) as inline PTX, since Triton's coalescing pass takes a minute on these kernels if it sees the loads."""
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
def store(p, b_x, m, PTX: tl.constexpr):
    """tl.store(p, b_x, mask=m) as inline PTX, for the same reason as in `load`; m is None where every thread stores."""
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
def store_or_add(p, b_x, m_more, m, PTX: tl.constexpr):
    """Stores b_x, or adds it to what is stored where m_more holds.

    Nothing else writes to these addresses, so the sums have the order of the program.
    """
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
def at_step(p, o_t, stride_t, PTX: tl.constexpr):
    """p + o_t stride_t in one PTX instruction, which takes strides below 2^31 bytes."""
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
def locate(D, splits, BLOCK_D: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr):
    """Indices of the channels, states, segment and batch row on which a program and its threads work.

    i_d, i_s, i_b: block of BLOCK_D channels, segment of time and batch row of the program.
    o_e:           the thread, 0 .. E - 1 with E = BLOCK_D / CHANNELS LANES.
    o_q, o_n:      lane of a channel, and the first of its NT states.
    o_d, m_d:      channels of the thread, and whether they exist; the last channel stands in for those that do not.
    """
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
        channels += (tl.minimum(o_d, D - 1),)
        m_d += (o_d < D,)
    return i_d, i_s, i_b, o_e, o_q, o_q * NT, channels, m_d


@triton.jit
def channel_pointers(p, o_d):
    """p + o_d[c] for each channel."""
    pointers = ()
    for c in tl.static_range(len(o_d)):
        pointers += (p + o_d[c],)
    return pointers


@triton.jit
def load_channels(p, o_d, E: tl.constexpr):
    """One parameter for each channel, p[o_d[c]] in float32; zeros if p is None."""
    parameters = ()
    for c in tl.static_range(len(o_d)):
        if p is not None:
            parameters += (tl.load(p + o_d[c]).to(tl.float32),)
        else:
            parameters += (tl.zeros([E], tl.float32),)
    return parameters


@triton.jit
def batch_row(p, stride_b, stride_t, i_b):
    """(pointer to a batch row, stride of a step of time) for a tensor that depends on time, else an empty tuple."""
    return (p + i_b * stride_b, stride_t) if stride_t is not None else ()


@triton.jit
def load_steps(p, stride_t, t, t_last, o_q, STEPS: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Every LANES-th of STEPS steps from t + o_q on, so that the lanes of a channel share the steps among them.

    p has one pointer to time 0 for each channel. Returns the channels of the first step, then those of the next, and so
    on. Steps from t_last on are replaced by the last step before it; they are masked later.
    """
    steps = ()
    for k in tl.static_range(STEPS // LANES):
        o_t = tl.minimum(t + k * LANES + o_q, t_last - 1)
        for c in tl.static_range(len(p)):
            steps += (load(at_step(p[c], o_t, stride_t, PTX), PTX),)
    return steps


@triton.jit
def load_states(p, stride_d, stride_n, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr):
    """States o_n .. o_n + NT - 1 of each channel in float32, zeros for states from N on and for missing channels.

    p points to state 0 of channel 0; stride_d and stride_n lead to the next channel and the next state.
    """
    states = ()
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            b_h = load(p + o_d[c] * stride_d + tl.minimum(o_n + n, N - 1) * stride_n, PTX).to(tl.float32)
            states += (tl.where(m_d[c] & (o_n + n < N), b_h, 0.0),)
    return states


@triton.jit
def store_states(p, stride_d, stride_n, states, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr):
    """Stores the states that `load_states` would load."""
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            p_h = p + o_d[c] * stride_d + (o_n + n) * stride_n
            store(p_h, states[c * NT + n], m_d[c] & (o_n + n < N), PTX)


@triton.jit
def store_or_add_states(
    p, stride_n, states, m_more, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr
):
    """Stores states with neighbouring channels side by side, or adds them to those stored where m_more holds."""
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            store_or_add(p + o_d[c] + (o_n + n) * stride_n, states[c * NT + n], m_more, m_d[c] & (o_n + n < N), PTX)


@triton.jit
def store_channel_sums(p, sums, o_d, m_d, o_q, LANES: tl.constexpr, PTX: tl.constexpr):
    """Stores the sum over the lanes of each channel at p[o_d[c]]."""
    for c in tl.static_range(len(o_d)):
        tl.store(p + o_d[c], sum_lanes(sums[c], LANES, PTX), mask=m_d[c] & (o_q == 0))


@triton.jit
def store_scratch(p, values, E: tl.constexpr, PTX: tl.constexpr):
    """Stores values[i] at p + i E, where p has one address a thread."""
    for i in tl.static_range(len(values)):
        store(p + i * E, values[i], None, PTX)


@triton.jit
def load_scratch(p, NUM: tl.constexpr, E: tl.constexpr, PTX: tl.constexpr):
    """The NUM tensors that the same thread stored with `store_scratch`."""
    values = ()
    for i in tl.static_range(NUM):
        values += (load(p + i * E, PTX),)
    return values
