"""The selective scan in Triton: one pass over time, or two where there are too few channels to fill the chip.

    h_t[n] = exp(dt_t A[n]) h_{t-1}[n] + dt_t x_t B_t[n];   y_t = (sum_n C_t[n] h_t[n] + D x_t) silu(z_t)

LANES neighbouring threads own one channel d, N / LANES states each, and go through time; decays and states never
leave their registers. What a step needs once for a channel (softplus, gate, loads, store) is done by one of the
threads, each for another of LANES steps, and handed round. x, dt, z, y are channel-last, so a warp reads 32 / LANES
neighbouring channels of a step, a group of steps ahead of their use. B and C are the same for all channels: a lane
holds one 32-bit word of a row [B_t, C_t], two states of bfloat16 or one of float32, and hands it to the others when its
step comes. They are read where they lie; what does not lie in such words is copied first (`_words_of`).

Long sequences on few channels are cut into segments. Their ends from a zero start come first (`y=None`), with the sum
of dt, from which follows the decay of a whole segment, exp(A sum dt); `_pass_kernel` turns the ends into starts; then
all segments run side by side. That computes every exponential twice.

Backward, with g_t the gradient of h_t and r_t that of h_{t-1} through the decay (README),

    g_t = C_t dp_t + r_{t+1};   r_t = exp(dt_t A) g_t;   dp_t = dy_t silu(z_t)

goes through time in reverse, segments as before. Forward keeps the state every CHUNK steps; a chunk is first swept for
the states before each of its groups of steps, kept in scratch memory, then a group at a time is computed again and
taken back. dB and dC are sums over channels: over a warp by a butterfly in which each lane ends with the sum of one
number of the row, over the warps of a program through shared memory, and over programs in `_add_parts_kernel`;
those of dA, dbias and dskip over programs in `_add_totals_kernel`.

float32: states, decays, step sizes, sums. Deterministic: every sum has a fixed order, and what is added to in memory
has one writer. Limits: real A, N <= 64.
Kept for backward besides the inputs: 4 N / CHUNK bytes for each x.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels.launch import cdiv, launch, num_processors, power_of_2, save, saved, speaks_ptx
from kernels.sums import COLUMNS, ROWS, column_sums


class Tile(NamedTuple):
    """Work of one thread and the size of a program."""

    states: int
    """Maximum number of states of a channel that one thread holds."""
    channels: int
    """Channels of a thread."""
    steps: int
    """Steps of time in one unrolled group; a group is loaded while the one before it is computed."""
    num_warps: int
    registers: int | None = None
    """Maximum number of registers of a thread, so that more warps fit; the compiler spills the rest to local memory."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """Choices that change speed and memory and, apart from rounding, no result.

    Two tunings are equal only if they are the same object, so a tuning is a cheap key of a cache.
    """

    forward: Tile
    """Forward with a gate. Without one, this many registers make the compiler wait for loads too early."""
    forward_narrow: Tile
    """Forward where two channels a thread leave the chip half empty and one channel does not."""
    forward_segments: Tile
    """Forward without a gate or over many segments of time: few registers, so that more warps run side by side."""
    backward_ends: Tile
    backward: Tile
    backward_portable: Tile
    """Backward on GPUs without PTX, where Triton takes minutes to compile a larger tile."""
    chunk: int
    """Steps between two states saved for backward."""
    enough_warps: int
    """Warps for each multiprocessor below which time is cut into segments."""
    busy_warps: int
    """Warps for each multiprocessor that the segments aim at."""
    min_segment: int
    """Minimum length of a segment."""
    short: int
    """Maximum length that is never cut, since cutting takes two more launches each way."""


TUNING = Tuning(
    forward=Tile(states=4, channels=2, steps=16, num_warps=1, registers=200),
    forward_narrow=Tile(states=4, channels=1, steps=32, num_warps=1, registers=255),
    forward_segments=Tile(states=4, channels=2, steps=16, num_warps=1, registers=128),
    backward_ends=Tile(states=4, channels=2, steps=16, num_warps=1, registers=128),
    backward=Tile(states=4, channels=2, steps=8, num_warps=8),
    backward_portable=Tile(states=4, channels=1, steps=4, num_warps=4),
    chunk=64,
    enough_warps=5,
    busy_warps=16,
    min_segment=64,
    short=256,
)
STEP_BLOCK = 1024
"""State elements of one program of the single step."""
LOG2E = tl.constexpr(1.4426950408889634)


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
def _in_time(p, stride_b, stride_t, i_b):
    """(start of a batch row, stride of a step) of what depends on time, else nothing."""
    return (p + i_b * stride_b, stride_t) if stride_t is not None else ()


@triton.jit
def _hold(p_b, p_c, o_e, B_WORDS: tl.constexpr, C_WORDS: tl.constexpr):
    """Which words of a row [B_t, C_t] a lane holds: (pointer at step 0, stride of a step) of each."""
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    held = ()
    for i in tl.static_range(WORDS // 32 if WORDS > 32 else 1):
        o_w = o_e % (WORDS if WORDS < 32 else 32) + i * 32
        if C_WORDS == 0:
            held += (p_b[0] + o_w, p_b[1] + 0 * o_w)
        elif B_WORDS == 0:
            held += (p_c[0] + o_w, p_c[1] + 0 * o_w)
        else:
            m_b = o_w < B_WORDS
            held += (tl.where(m_b, p_b[0] + o_w, p_c[0] + (o_w - B_WORDS)), tl.where(m_b, p_b[1], p_c[1]))
    return held


@triton.jit
def _load_held(p_held, o_e, t, t_last, WORDS: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr):
    """The rows of STEPS steps from t on, a word in each lane of a warp: of one row, or of 32 / WORDS rows together."""
    held = ()
    TOGETHER: tl.constexpr = (32 // WORDS if 32 // WORDS < STEPS else STEPS) if WORDS < 32 else 1
    for j in tl.static_range(0, STEPS, TOGETHER):
        o_t = tl.minimum(t + j + o_e % 32 // WORDS % TOGETHER, t_last - 1)
        for i in tl.static_range(len(p_held) // 2):
            held += (_load1(_at(p_held[2 * i], o_t, p_held[2 * i + 1], PTX), PTX),)
    return held


@triton.jit
def _decay(b_x, PRECISE: tl.constexpr):
    """exp(x) if PRECISE, else 2^x: one special function, with twice the error, which a thousand steps add up."""
    return libdevice.exp(b_x) if PRECISE else tl.exp2(b_x)


@triton.jit
def _sigmoid(b_x, PRECISE: tl.constexpr):
    if PRECISE:
        b_sigmoid = 1.0 / (1.0 + libdevice.exp(-b_x))
    else:
        # one special function and one product: a division would bring the handling of subnormal numbers
        b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -LOG2E))
        b_sigmoid = b_root * b_root
    return b_sigmoid


@triton.jit
def _softplus(b_x, PRECISE: tl.constexpr):
    """max(x, 0) + log(1 + w), w = exp(-|x|), by a polynomial log(1 + w) / w of relative error 3e-8."""
    b_w = _decay(-tl.abs(b_x) if PRECISE else tl.abs(b_x) * -LOG2E, PRECISE)
    b_p = 0.00523269069 * b_w - 0.0295052289
    b_p = b_p * b_w + 0.0782259443
    b_p = b_p * b_w - 0.13663246
    b_p = b_p * b_w + 0.191060074
    b_p = b_p * b_w - 0.248429826
    b_p = b_p * b_w + 0.333190969
    b_p = b_p * b_w - 0.499994931
    b_p = b_p * b_w + 0.99999997
    return tl.maximum(b_x, 0.0) + b_p * b_w


@triton.jit
def _step_size(b_dt, b_bias, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    b_dt = b_dt.to(tl.float32) + b_bias
    return _softplus(b_dt, PRECISE) if SOFTPLUS else b_dt


@triton.jit
def _step_sizes(steps, b_bias, m_t, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    """Of each channel; a step size of zero leaves the state as it is."""
    sizes = ()
    for c in tl.static_range(len(steps)):
        sizes += (tl.where(m_t, _step_size(steps[c], b_bias[c], SOFTPLUS, PRECISE), 0.0),)
    return sizes


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
def _add_states(p, stride_n, states, m_more, o_d, m_d, o_n, N: tl.constexpr, NT: tl.constexpr, PTX: tl.constexpr):
    """Adds to what this lane has stored before, if it has (m_more)."""
    for c in tl.static_range(len(o_d)):
        for n in tl.static_range(NT):
            _add1(p + o_d[c] + (o_n + n) * stride_n, states[c * NT + n], m_more, m_d[c] & (o_n + n < N), PTX)


@triton.jit
def _zeros(NUM: tl.constexpr, E: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(NUM):
        zeros += (tl.zeros([E], tl.float32),)
    return zeros


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


@triton.jit
def _advance(h, a, b_dt, b_u, row_b, NT: tl.constexpr, PRECISE: tl.constexpr):
    new_h = ()
    for i in tl.static_range(len(h)):
        new_h += (_decay(b_dt[i // NT] * a[i], PRECISE) * h[i] + b_u[i // NT] * row_b[i],)
    return new_h


@triton.jit
def _from_lane(b_x, o_lane, NUM_LANES: tl.constexpr, PTX: tl.constexpr):
    """The number of lane o_lane of the NUM_LANES neighbours to which a lane belongs."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, $3, 0xffffffff;",
            "=f,f,r,r",
            [b_x, o_lane, (32 - NUM_LANES) * 256 + 31],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505
        E: tl.constexpr = b_x.shape[0]
        b_lanes = tl.reshape(b_x, [E // NUM_LANES, NUM_LANES])
        o_lanes = tl.reshape(tl.zeros([E], tl.int32) + o_lane, [E // NUM_LANES, NUM_LANES])
        return tl.reshape(tl.gather(b_lanes, o_lanes, 1), [E])


@triton.jit
def _of_step(values, Q: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """What lane Q of a channel has, in all of its lanes."""
    if LANES > 1:
        of_step = ()
        for c in tl.static_range(len(values)):
            of_step += (_from_lane(values[c], Q, LANES, PTX),)
        values = of_step
    return values


@triton.jit
def _words(
    held, p_map, t, t_last, j: tl.constexpr, o_w, FIRST: tl.constexpr,
    WORDS: tl.constexpr, STEPS: tl.constexpr, NUM: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words o_w .. o_w + NUM - 1 of a map at step t + j: from lanes that hold them behind FIRST, or from memory."""
    words = ()
    if SHUFFLE:
        TOGETHER: tl.constexpr = (32 // WORDS if 32 // WORDS < STEPS else STEPS) if WORDS < 32 else 1
        PER_ROW: tl.constexpr = WORDS // 32 if WORDS > 32 else 1
        for n in tl.static_range(NUM):
            o_lane = j % TOGETHER * WORDS + FIRST % 32 + o_w + n
            words += (_from_lane(held[j // TOGETHER * PER_ROW + FIRST // 32], o_lane, 32, PTX),)
    else:
        p_row = _at(p_map[0], tl.minimum(t + j, t_last - 1), p_map[1], False) + o_w
        for n in tl.static_range(NUM):
            words += (_load1(p_row + n, PTX),)
    return words


@triton.jit
def _row(
    held, p_map, t, t_last, j: tl.constexpr, o_n, FIRST: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
    STEPS: tl.constexpr, NT: tl.constexpr, CHANNELS: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The numbers of a map at step t + j that belong to this lane's states, once for each channel."""
    row = ()
    if PACKED:
        words = _words(held, p_map, t, t_last, j, o_n // 2, FIRST, WORDS, STEPS, NT // 2, SHUFFLE, PTX)
        for i in tl.static_range(NT // 2):
            # a bfloat16 is the upper half of its float32
            b_word = words[i].to(tl.int32, bitcast=True)
            row += ((b_word << 16).to(tl.float32, bitcast=True), (b_word & -65536).to(tl.float32, bitcast=True))
    else:
        row = _words(held, p_map, t, t_last, j, o_n, FIRST, WORDS, STEPS, NT, SHUFFLE, PTX)
    rows = ()
    for _ in tl.static_range(CHANNELS):
        rows += row
    return rows


@triton.jit
def _other_lane(b_x, MASK: tl.constexpr, PTX: tl.constexpr):
    """The number of element e ^ MASK."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;",
            "=f,f,r",
            [b_x, MASK],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505
        E: tl.constexpr = b_x.shape[0]
        first, second = tl.split(tl.permute(tl.reshape(b_x, [E // (2 * MASK), 2, MASK]), [0, 2, 1]))
        return tl.reshape(tl.permute(tl.join(second, first), [0, 2, 1]), [E])


@triton.jit
def _sum_lanes(b_x, LANES: tl.constexpr, PTX: tl.constexpr):
    """The sum over the lanes of a channel, in each of them."""
    if LANES > 1:
        b_x += _other_lane(b_x, 1, PTX)
    if LANES > 2:
        b_x += _other_lane(b_x, 2, PTX)
    if LANES > 4:
        b_x += _other_lane(b_x, 4, PTX)
    return b_x


@triton.jit
def _fold(values, o_e, NUM: tl.constexpr, MASK: tl.constexpr, PTX: tl.constexpr):
    """Sums with element e ^ MASK; of NUM values, each of the two goes on with one half."""
    folded = ()
    if NUM <= 1:
        folded += (values[0] + _other_lane(values[0], MASK, PTX),)
    else:
        m_upper = (o_e & MASK) != 0
        for i in tl.static_range(NUM // 2):
            b_given = tl.where(m_upper, values[i], values[i + NUM // 2])
            b_kept = tl.where(m_upper, values[i + NUM // 2], values[i])
            folded += (b_kept + _other_lane(b_given, MASK, PTX),)
    return folded


@triton.jit
def _to_lanes(values, c: tl.constexpr, CHANNELS: tl.constexpr, o_e, LANES: tl.constexpr, PTX: tl.constexpr):
    """Sums over the lanes of channel c, of LANES steps; lane q is left with that of step q."""
    sums = ()
    for q in tl.static_range(LANES):
        sums += (values[q * CHANNELS + c],)
    if LANES > 4:
        sums = _fold(sums, o_e, 8, 4, PTX)
    if LANES > 2:
        sums = _fold(sums, o_e, 4, 2, PTX)
    if LANES > 1:
        sums = _fold(sums, o_e, 2, 1, PTX)
    return sums[0]


@triton.jit
def _sum_channels(values, o_e, NUM: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Sums of NUM values over the 32 / LANES channels of a warp, spread over its lanes (`_column`)."""
    values = _fold(values, o_e, NUM, 16, PTX)
    values = _fold(values, o_e, NUM // 2, 8, PTX)
    if LANES <= 4:
        values = _fold(values, o_e, NUM // 4, 4, PTX)
    if LANES <= 2:
        values = _fold(values, o_e, NUM // 8, 2, PTX)
    if LANES <= 1:
        values = _fold(values, o_e, NUM // 16, 1, PTX)
    return values


@triton.constexpr_function
def _over_warps_asm(steps, warps):
    """Inputs: a number for each step, the thread, which of two buffers. Outputs: of some steps the sums over warps."""
    outputs = max(1, steps // warps)
    first, last = outputs, outputs + steps
    lines = [
        f".shared .align 16 .b8 all[{2 * warps * steps * 128}];",
        ".reg .b32 p, w, l; .reg .f32 s, x;",
        f"mov.u32 p, all; mad.lo.u32 p, ${last + 1}, {warps * steps * 128}, p;",
        f"shr.u32 w, ${last}, 5; and.b32 l, ${last}, 31; mad.lo.u32 p, l, 4, p;",
        f"mad.lo.u32 l, w, {steps * 128}, p;",
        *(f"st.shared.f32 [l+{j * 128}], ${first + j};" for j in range(steps)),
        "bar.sync 0;",
        # more warps than steps: several do the same
        f"rem.u32 w, w, {steps // outputs}; mad.lo.u32 p, w, {outputs * 128}, p;",
    ]
    for j in range(outputs):
        lines.append(f"ld.shared.f32 s, [p+{j * 128}];")
        for i in range(1, warps):
            lines.append(f"ld.shared.f32 x, [p+{i * steps * 128 + j * 128}]; add.f32 s, s, x;")
        lines.append(f"mov.f32 ${j}, s;")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _over_warps(values, o_e, i_buffer, WARPS: tl.constexpr):
    """Sums over the warps of a program, in a fixed order: of STEPS / WARPS steps in each warp, one at least.

    The two buffers are used in turns, so that one barrier is enough.
    """
    if WARPS > 1:
        STEPS: tl.constexpr = len(values)
        EACH: tl.constexpr = STEPS // WARPS if STEPS > WARPS else 1
        arguments = values + (o_e, i_buffer + 0 * o_e)  # noqa: RUF005
        asm: tl.constexpr = _over_warps_asm(STEPS, WARPS)
        if EACH == 1:
            values = (
                tl.inline_asm_elementwise(
                    asm, "=f," + "f," * STEPS + "r,r", arguments, dtype=tl.float32, is_pure=False, pack=1
                ),
            )
        elif EACH == 2:
            values = tl.inline_asm_elementwise(
                asm, "=f,=f," + "f," * STEPS + "r,r", arguments, dtype=(tl.float32,) * 2, is_pure=False, pack=1
            )
        else:
            values = tl.inline_asm_elementwise(
                asm, "=f,=f,=f,=f," + "f," * STEPS + "r,r", arguments, dtype=(tl.float32,) * 4, is_pure=False, pack=1
            )
    return values


@triton.jit
def _hidden(values, PTX: tl.constexpr):
    """The values, but the compiler does not know: what follows is computed again instead of kept in registers."""
    if PTX:
        hidden = ()
        for i in tl.static_range(len(values)):
            hidden += (
                tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=f,f", [values[i]], dtype=tl.float32, is_pure=False, pack=1
                ),
            )
        values = hidden
    return values


@triton.jit
def _hidden_offsets(offsets, PTX: tl.constexpr):
    """`_hidden` for integers: addresses made of them are not kept in registers from one chunk to the next."""
    hidden = ()
    for i in tl.static_range(len(offsets)):
        hidden += (offsets[i].to(tl.float32, bitcast=True),)
    hidden = _hidden(hidden, PTX)
    shown = ()
    for i in tl.static_range(len(offsets)):
        shown += (hidden[i].to(tl.int32, bitcast=True),)
    return shown


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
def _store_totals(p, sums, o_d, m_d, o_q, LANES: tl.constexpr, PTX: tl.constexpr):
    """Of each channel the sum over its lanes."""
    for c in tl.static_range(len(o_d)):
        tl.store(p + o_d[c], _sum_lanes(sums[c], LANES, PTX), mask=m_d[c] & (o_q == 0))


@triton.jit
def _scaled(values, factor):
    scaled = ()
    for i in tl.static_range(len(values)):
        scaled += (values[i] * factor,)
    return scaled


@triton.jit
def _in_float32(values):
    wide = ()
    for i in tl.static_range(len(values)):
        wide += (values[i].to(tl.float32),)
    return wide


@triton.jit
def _sums(left, right):
    sums = ()
    for i in tl.static_range(len(left)):
        sums += (left[i] + right[i],)
    return sums


@triton.jit
def _products(left, right):
    products = ()
    for i in tl.static_range(len(left)):
        products += (left[i] * right[i],)
    return products


@triton.jit
def _both(masks, m):
    both = ()
    for i in tl.static_range(len(masks)):
        both += (masks[i] & m,)
    return both


@triton.jit
def _column(o_l, i, NUM: tl.constexpr, LEFT: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr):
    """Where in a row [B_t, C_t] the i-th of the LEFT sums belongs that lane o_l holds after `_sum_channels`."""
    o_value = o_l // LANES * NUM * LANES // 32
    if LEFT > 1:
        o_value = o_l // LANES * LEFT + i
    return o_value // NT * (NT * LANES) + o_l % LANES * NT + o_value % NT


@triton.jit
def _side_by_side(steps, STEPS: tl.constexpr):
    """STEPS (4 or 8) tensors [E] as one [E, STEPS]."""
    E: tl.constexpr = steps[0].shape[0]
    quads = ()
    for q in tl.static_range(STEPS // 4):
        # steps q, q + STEPS / 4, ...
        even = tl.join(steps[q], steps[q + STEPS // 2])
        odd = tl.join(steps[q + STEPS // 4], steps[q + 3 * STEPS // 4])
        quads += (tl.reshape(tl.join(even, odd), [E, 4]),)
    b_all = quads[0]
    if STEPS == 8:
        b_all = tl.reshape(tl.join(quads[0], quads[1]), [E, 8])
    return b_all


@triton.jit
def _dots(row, h, NT: tl.constexpr):
    """sum_n row[n] h[n] of each channel, in two chains."""
    dots = ()
    for c in tl.static_range(len(h) // NT):
        b_even = row[c * NT] * h[c * NT]
        b_odd = row[c * NT + 1] * h[c * NT + 1]
        for n in tl.static_range(2, NT, 2):
            b_even += row[c * NT + n] * h[c * NT + n]
            b_odd += row[c * NT + n + 1] * h[c * NT + n + 1]
        dots += (b_even + b_odd,)
    return dots


@triton.jit
def _add(sums, states, factors, NT: tl.constexpr):
    added = ()
    for i in tl.static_range(len(sums)):
        added += (sums[i] + states[i] * factors[i // NT],)
    return added


@triton.jit
def _over_channels(states, factors, NT: tl.constexpr):
    """sum_c states[c, n] factors[c], the channels of a thread."""
    sums = ()
    for n in tl.static_range(NT):
        b_sum = states[n] * factors[0]
        for c in tl.static_range(1, len(factors)):
            b_sum += states[c * NT + n] * factors[c]
        sums += (b_sum,)
    return sums


@triton.jit(do_not_specialize=["splits"])
def _pass_kernel(
    A, total_dt, ends, first_state, D, splits, N: tl.constexpr, BLOCK_D: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """ends [B, splits, N, D]: from the end of each segment but the last after a zero start to each's true start.

    In place. first_state: [B, D, N] or None. In reverse, starts are at later times, and the last is at the beginning.
    """
    num_d = tl.cdiv(D, BLOCK_D)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    i_n = tl.program_id(0) // num_d % N
    i_b = (tl.program_id(0) // num_d // N).to(tl.int64)
    m_d = o_d < D
    b_a = tl.load(A + o_d * N + i_n, mask=m_d, other=0.0).to(tl.float32) * LOG2E
    b_h = tl.zeros([BLOCK_D], tl.float32)
    if first_state is not None:
        b_h = tl.load(first_state + (i_b * D + o_d) * N + i_n, mask=m_d, other=0.0).to(tl.float32)
    for i in range(splits - 1):
        i_s = i_b * splits + (splits - 1 - i if REVERSE else i)
        p_end = ends + (i_s * N + i_n) * D + o_d
        b_end = tl.load(p_end, mask=m_d, other=0.0)
        b_dt = tl.load(total_dt + i_s * D + o_d, mask=m_d, other=0.0)
        tl.store(p_end, b_h, mask=m_d)
        b_h = tl.exp2(b_dt * b_a) * b_h + b_end
    i_last = i_b * splits + (0 if REVERSE else splits - 1)
    tl.store(ends + (i_last * N + i_n) * D + o_d, b_h, mask=m_d)


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


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t", "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _bwd_ends_kernel(
    dt, A, B, C, z, bias, dy, ends, total_dt,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    dt_stride_b, dt_stride_t, z_stride_b, z_stride_t, dy_stride_b, dy_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, SHUFFLE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """ends [B, splits, N, D]: r_t = exp(dt_t A) (C_t dp_t + r_{t+1}) at the first step of a segment, from zero.

    Of all segments but the first, behind which nothing comes.
    total_dt [B, splits, D].
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
    if i_s == 0:
        return
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_dt = _at_channels(dt + i_b * dt_stride_b, o_d)
    p_dy = _at_channels(dy + i_b * dy_stride_b, o_d)
    p_z = p_dy
    if z is not None:
        p_z = _at_channels(z + i_b * z_stride_b, o_d)
    p_b = _in_time(B, b_stride_b, b_stride_t, i_b)
    p_c = _in_time(C, c_stride_b, c_stride_t, i_b)
    p_held = _hold(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()
    a = _scaled(_load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    r = _zeros(CHANNELS * NT, E)
    row_c = a
    if c_stride_t is None:
        row_c = _load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = _load_channels(bias, o_d, E)
    b_total = _zeros(CHANNELS, E)

    t = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    next_dt = _load_steps(p_dt, dt_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_dy = _load_steps(p_dy, dy_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_dy
    if z is not None:
        next_z = _load_steps(p_z, z_stride_t, t, t_last, o_q, STEPS, LANES, PTX)
    next_held = next_dy
    if HELD:
        next_held = _load_held(p_held, o_e, t, t_last, WORDS, STEPS, PTX)
    for _ in range(tl.cdiv(t_last - t_first, STEPS)):
        steps_dt, steps_dy, steps_z, held = next_dt, next_dy, next_z, next_held
        t_next = tl.maximum(t - STEPS, t_first)
        next_dt = _load_steps(p_dt, dt_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        next_dy = _load_steps(p_dy, dy_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        if z is not None:
            next_z = _load_steps(p_z, z_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
        if HELD:
            next_held = _load_held(p_held, o_e, t_next, t_last, WORDS, STEPS, PTX)
        for k in tl.static_range(STEPS // LANES - 1, -1, -1):
            m_t = t + k * LANES + o_q < t_last
            b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
            b_total = _sums(b_total, b_dt)
            b_dp = ()
            for c in tl.static_range(CHANNELS):
                b_dp_c = tl.where(m_t, steps_dy[k * CHANNELS + c].to(tl.float32), 0.0)
                if z is not None:
                    b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                    b_dp_c *= b_z * _sigmoid(b_z, PRECISE)
                b_dp += (b_dp_c,)
            for q in tl.static_range(LANES - 1, -1, -1):
                if c_stride_t is not None:
                    row_c = _row(
                        held, p_c, t, t_last, k * LANES + q, o_n, B_WORDS,
                        PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                    )  # fmt: skip
                dt_q, dp_q = _of_step(b_dt, q, LANES, PTX), _of_step(b_dp, q, LANES, PTX)
                new_r = ()
                for i in tl.static_range(CHANNELS * NT):
                    new_r += (_decay(dt_q[i // NT] * a[i], PRECISE) * (row_c[i] * dp_q[i // NT] + r[i]),)
                r = new_r
        t = t_next

    _store_states(ends + (i_b * splits + i_s) * N * D, 1, D, r, o_d, m_d, o_n, N, NT, PTX)
    _store_totals(total_dt + (i_b * splits + i_s) * D, b_total, o_d, m_d, o_q, LANES, PTX)


@triton.jit(
    do_not_specialize=[
        "T", "segment", "splits", "b_stride_b", "b_stride_t", "c_stride_b", "c_stride_t",
        "x_stride_b", "x_stride_t", "dt_stride_b", "dt_stride_t", "z_stride_b", "z_stride_t",
        "dy_stride_b", "dy_stride_t",
    ]
)  # fmt: skip
def _scan_bwd_kernel(
    x, dt, A, B, C, skip, z, bias, chunks, dy, after,
    dx, ddt, dz, totals, dB, dC, partial, dinitial, scratch,
    T, D, segment, splits, b_stride_b, b_stride_t, c_stride_b, c_stride_t,
    x_stride_b, x_stride_t, dt_stride_b, dt_stride_t, z_stride_b, z_stride_t, dy_stride_b, dy_stride_t,
    N: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, CHUNK: tl.constexpr, SOFTPLUS: tl.constexpr, PACKED: tl.constexpr, SHUFFLE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Gradients over one segment, in reverse, with g_t and r_t as in the module's docstring:

        dB_t[n] = sum_d dt_t x_t g_t[n];   dC_t[n] = sum_d dp_t h_t[n];   du_t = sum_n B_t[n] g_t[n],   u = dt x
        dx_t = dt_t du_t + D dp_t;   dz_t = dy_t silu'(z_t) y_t;   dA[n] = sum_t dt_t r_t[n] h_{t-1}[n]
        ddt_t = x_t du_t + sum_n A[n] r_t[n] h_{t-1}[n], through softplus

    after:      r behind the segment; with several segments [B, splits, N, D], with one [B, D, N]; None is zero.
    totals:     [B, splits, N + 2, D], dA and the gradients of bias and skip.
    dB, dC:     [B, splits, N, D] where B and C do not depend on time, else None.
    partial:    [D / BLOCK_D, B T, NP or 2 NP], sums over BLOCK_D channels of dB_t and dC_t.
    scratch:    [programs, CHUNK / STEPS - 1, NT CHANNELS, E].
    """
    E: tl.constexpr = BLOCK_D // CHANNELS * LANES
    PRECISE: tl.constexpr = PTX and dt.dtype.element_ty == tl.float32
    SCALE: tl.constexpr = 1.0 if PRECISE else LOG2E
    NP: tl.constexpr = NT * LANES
    B_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (b_stride_t is not None)
    C_WORDS: tl.constexpr = NP // (2 if PACKED else 1) * (c_stride_t is not None)
    WORDS: tl.constexpr = B_WORDS + C_WORDS
    HELD: tl.constexpr = SHUFFLE and WORDS > 0
    WIDTH: tl.constexpr = NP * ((b_stride_t is not None) + (c_stride_t is not None))
    STATES: tl.constexpr = CHANNELS * NT
    SLOTS: tl.constexpr = CHUNK // STEPS - 1
    NUM: tl.constexpr = WIDTH // LANES
    LEFT: tl.constexpr = NUM * LANES // 32 if NUM * LANES > 32 else 1
    i_d, i_s, i_b, o_e, o_q, o_n, o_d, m_d = _place(D, splits, BLOCK_D, NT, LANES, CHANNELS)
    num_rows = tl.num_programs(0) // tl.cdiv(D, BLOCK_D)
    o_segment = (i_b * splits + i_s) * N * D
    t_first = i_s * segment
    t_last = tl.minimum(t_first + segment, T)
    p_x = _at_channels(x + i_b * x_stride_b, o_d)
    p_dt = _at_channels(dt + i_b * dt_stride_b, o_d)
    p_dy = _at_channels(dy + i_b * dy_stride_b, o_d)
    p_z = p_dy
    if z is not None:
        p_z = _at_channels(z + i_b * z_stride_b, o_d)
    p_b = _in_time(B, b_stride_b, b_stride_t, i_b)
    p_c = _in_time(C, c_stride_b, c_stride_t, i_b)
    p_held = _hold(p_b, p_c, o_e, B_WORDS, C_WORDS) if HELD else ()

    a = _scaled(_load_states(A, N, 1, o_d, m_d, o_n, N, NT, PTX), SCALE)
    r = _zeros(STATES, E)
    if after is not None:
        if splits > 1:
            r = _load_states(after + o_segment, 1, D, o_d, m_d, o_n, N, NT, PTX)
        else:
            r = _load_states(after + i_b * D * N, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_b = a
    if b_stride_t is None:
        row_b = _load_states(B, N, 1, o_d, m_d, o_n, N, NT, PTX)
    row_c = a
    if c_stride_t is None:
        row_c = _load_states(C, N, 1, o_d, m_d, o_n, N, NT, PTX)
    b_bias = _load_channels(bias, o_d, E)
    b_skip = _load_channels(skip, o_d, E)

    # the states before the groups of a chunk, but for the last; each lane reads what it wrote
    p_scratch = scratch + tl.program_id(0).to(tl.int64) * (SLOTS * STATES * E) + o_e
    t_group = t_first + (t_last - 1 - t_first) // STEPS * STEPS
    sum_bias = _zeros(CHANNELS, E)
    sum_skip = _zeros(CHANNELS, E)
    next_dy = _load_steps(p_dy, dy_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
    next_z = next_dy
    if z is not None:
        next_z = _load_steps(p_z, z_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
    num_chunks = tl.cdiv(t_last - t_first, CHUNK)
    for i_c in range(num_chunks):
        t_chunk = t_first + (num_chunks - 1 - i_c) * CHUNK
        p_chunk = chunks + (i_b * tl.cdiv(T, CHUNK) + t_chunk // CHUNK) * N * D
        h = _load_states(p_chunk, 1, D, _hidden_offsets(o_d, PTX), m_d, o_n, N, NT, PTX)
        num_groups = tl.cdiv(tl.minimum(t_last - t_chunk, CHUNK), STEPS)
        sum_a = _zeros(STATES, E)
        sum_b = _zeros(STATES if b_stride_t is None else 0, E)
        sum_c = _zeros(STATES if c_stride_t is None else 0, E)

        next_x = _load_steps(p_x, x_stride_t, t_chunk, t_last, o_q, STEPS, LANES, PTX)
        next_dt = _load_steps(p_dt, dt_stride_t, t_chunk, t_last, o_q, STEPS, LANES, PTX)
        next_held = next_x
        if HELD:
            next_held = _load_held(p_held, o_e, t_chunk, t_last, WORDS, STEPS, PTX)
        for t in range(t_chunk, t_chunk + (num_groups - 1) * STEPS, STEPS):
            steps_x, steps_dt, held = next_x, next_dt, next_held
            next_x = _load_steps(p_x, x_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
            next_dt = _load_steps(p_dt, dt_stride_t, t + STEPS, t_last, o_q, STEPS, LANES, PTX)
            if HELD:
                next_held = _load_held(p_held, o_e, t + STEPS, t_last, WORDS, STEPS, PTX)
            _keep(p_scratch + (t - t_chunk) // STEPS * (STATES * E), h, E, PTX)
            for k in tl.static_range(STEPS // LANES):
                b_x = _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
                m_t = t + k * LANES + o_q < t_last
                b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
                b_u = _products(b_dt, b_x)
                for q in tl.static_range(LANES):
                    if b_stride_t is not None:
                        row_b = _row(
                            held, p_b, t, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    h = _advance(h, a, _of_step(b_dt, q, LANES, PTX), _of_step(b_u, q, LANES, PTX), row_b, NT, PRECISE)

        if not PTX:
            tl.debug_barrier()
        for i_g in range(num_groups):
            # the state before the next group, wanted after this one
            p_before = p_scratch + tl.maximum(num_groups - 2 - i_g, 0) * (STATES * E)
            next_h = _kept(p_before, STATES, E, PTX)
            steps_x = _load_steps(p_x, x_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
            steps_dt = _load_steps(p_dt, dt_stride_t, t_group, t_last, o_q, STEPS, LANES, PTX)
            steps_dy, steps_z = next_dy, next_z
            t_next = tl.maximum(t_group - STEPS, t_first)
            next_dy = _load_steps(p_dy, dy_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
            if z is not None:
                next_z = _load_steps(p_z, z_stride_t, t_next, t_last, o_q, STEPS, LANES, PTX)
            held = steps_x
            if HELD:
                held = _load_held(p_held, o_e, t_group, t_last, WORDS, STEPS, PTX)
            states = h
            sizes = ()
            for k in tl.static_range(STEPS // LANES):
                m_t = t_group + k * LANES + o_q < t_last
                b_dt = _step_sizes(steps_dt[k * CHANNELS : (k + 1) * CHANNELS], b_bias, m_t, SOFTPLUS, PRECISE)
                b_u = _products(b_dt, _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS]))
                sizes += b_dt
                for q in tl.static_range(LANES):
                    if b_stride_t is not None:
                        row_b = _row(
                            held, p_b, t_group, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    h = _advance(h, a, _of_step(b_dt, q, LANES, PTX), _of_step(b_u, q, LANES, PTX), row_b, NT, PRECISE)
                    states += h

            sizes = _hidden(sizes, PTX)
            if HELD:
                held = _hidden(held, PTX)
            reversed_sums = ()
            for k in tl.static_range(STEPS // LANES - 1, -1, -1):
                m_t = t_group + k * LANES + o_q < t_last
                b_dt = sizes[k * CHANNELS : (k + 1) * CHANNELS]
                b_x = _in_float32(steps_x[k * CHANNELS : (k + 1) * CHANNELS])
                b_u = _products(b_dt, b_x)
                b_dp = ()
                b_gate = ()
                for c in tl.static_range(CHANNELS):
                    b_dy = tl.where(m_d[c] & m_t, steps_dy[k * CHANNELS + c].to(tl.float32), 0.0)
                    if z is not None:
                        b_z = steps_z[k * CHANNELS + c].to(tl.float32)
                        b_sigmoid = _sigmoid(b_z, PRECISE)
                        b_gate += (b_dy * (b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))),)
                        b_dy *= b_z * b_sigmoid
                    b_dp += (b_dy,)
                # the latest step is added in front; Triton knows no unpacking
                outputs = ()
                of_u = ()
                of_dt = ()
                for q in tl.static_range(LANES - 1, -1, -1):
                    if b_stride_t is not None:
                        row_b = _row(
                            held, p_b, t_group, t_last, k * LANES + q, o_n, 0,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    if c_stride_t is not None:
                        row_c = _row(
                            held, p_c, t_group, t_last, k * LANES + q, o_n, B_WORDS,
                            PACKED, WORDS, STEPS, NT, CHANNELS, HELD, PTX,
                        )  # fmt: skip
                    before = states[(k * LANES + q) * STATES : (k * LANES + q + 1) * STATES]
                    h = states[(k * LANES + q + 1) * STATES : (k * LANES + q + 2) * STATES]
                    dt_q = _of_step(b_dt, q, LANES, PTX)
                    u_q = _of_step(b_u, q, LANES, PTX)
                    dp_q = _of_step(b_dp, q, LANES, PTX)
                    g = ()
                    new_r = ()
                    products = ()
                    for i in tl.static_range(STATES):
                        b_g = row_c[i] * dp_q[i // NT] + r[i]
                        b_r = _decay(dt_q[i // NT] * a[i], PRECISE) * b_g
                        g += (b_g,)
                        new_r += (b_r,)
                        products += (b_r * before[i],)
                    r = new_r
                    outputs = _dots(row_c, h, NT) + outputs
                    of_u = _dots(row_b, g, NT) + of_u
                    of_dt = _dots(a, products, NT) + of_dt
                    sum_a = _add(sum_a, products, dt_q, NT)
                    values = ()
                    if b_stride_t is not None:
                        values += _over_channels(g, u_q, NT)
                    else:
                        sum_b = _add(sum_b, g, u_q, NT)
                    if c_stride_t is not None:
                        values += _over_channels(h, dp_q, NT)
                    else:
                        sum_c = _add(sum_c, h, dp_q, NT)
                    if NUM > 0:
                        reversed_sums += _sum_channels(values, o_e, NUM, LANES, PTX)
                o_t = t_group + k * LANES + o_q
                new_bias = ()
                new_skip = ()
                for c in tl.static_range(CHANNELS):
                    o_out = i_b * T * D + o_d[c]
                    if z is not None:
                        b_y = _to_lanes(outputs, c, CHANNELS, o_e, LANES, PTX) + b_skip[c] * b_x[c]
                        _store1(_at(dz + o_out, o_t, D, PTX), b_gate[c] * b_y, m_d[c] & m_t, PTX)
                    b_du = _to_lanes(of_u, c, CHANNELS, o_e, LANES, PTX)
                    b_ddt = _to_lanes(of_dt, c, CHANNELS, o_e, LANES, PTX) / SCALE + b_du * b_x[c]
                    if SOFTPLUS:
                        b_ddt *= _sigmoid(steps_dt[k * CHANNELS + c].to(tl.float32) + b_bias[c], PRECISE)
                    b_ddt = tl.where(m_t, b_ddt, 0.0)
                    new_bias += (sum_bias[c] + b_ddt,)
                    new_skip += (sum_skip[c] + b_dp[c] * b_x[c],)
                    _store1(_at(ddt + o_out, o_t, D, PTX), b_ddt, m_d[c] & m_t, PTX)
                    _store1(_at(dx + o_out, o_t, D, PTX), b_du * b_dt[c] + b_skip[c] * b_dp[c], m_d[c] & m_t, PTX)
                sum_bias, sum_skip = new_bias, new_skip
            if NUM > 0 and PTX:
                p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * WIDTH
                for i in tl.static_range(LEFT):
                    of_steps = ()
                    for j in tl.static_range(STEPS):
                        of_steps += (reversed_sums[(STEPS - 1 - j) * LEFT + i],)
                    # of one warp all steps, of several each another
                    of_steps = _over_warps(of_steps, o_e, t_group // STEPS % 2, E // 32)
                    o_w = o_e // 32 % (STEPS // len(of_steps)) * len(of_steps)
                    for j in tl.static_range(len(of_steps)):
                        p_sum = p_sums + (o_w + j) * WIDTH + _column(o_e % 32, i, NUM, LEFT, NT, LANES)
                        _store1(p_sum, of_steps[j], t_group + o_w + j < t_last, PTX)
            elif NUM > 0:
                p_sums = partial + ((i_d * (num_rows // splits) + i_b) * T + t_group) * WIDTH
                o_l = tl.arange(0, 32)
                o_k = tl.arange(0, STEPS)
                for i in tl.static_range(LEFT):
                    of_steps = ()
                    for j in tl.static_range(STEPS):
                        of_steps += (reversed_sums[(STEPS - 1 - j) * LEFT + i],)
                    b_sums = tl.sum(tl.reshape(_side_by_side(of_steps, STEPS), [E // 32, 32, STEPS]), 0)
                    p_sum = p_sums + o_k[None, :] * WIDTH + _column(o_l, i, NUM, LEFT, NT, LANES)[:, None]
                    tl.store(p_sum, b_sums, mask=(t_group + o_k < t_last)[None, :])
            h = next_h
            t_group = t_next

        # sums of chunks are added in memory: fewer terms in a row, and no registers
        m_more = i_c + 0 * o_e > 0
        o_c = _hidden_offsets(o_d, PTX)
        p_totals = totals + (i_b * splits + i_s) * (N + 2) * D
        _add_states(p_totals, D, sum_a, m_more, o_c, m_d, o_n, N, NT, PTX)
        if b_stride_t is None:
            _add_states(dB + o_segment, D, sum_b, m_more, o_c, m_d, o_n, N, NT, PTX)
        if c_stride_t is None:
            _add_states(dC + o_segment, D, sum_c, m_more, o_c, m_d, o_n, N, NT, PTX)

    p_sum = totals + (i_b * splits + i_s) * (N + 2) * D + N * D
    _store_totals(p_sum, sum_bias, o_d, m_d, o_q, LANES, PTX)
    _store_totals(p_sum + D, sum_skip, o_d, m_d, o_q, LANES, PTX)
    if dinitial is not None:
        m_first = _both(m_d, i_s + 0 * o_e == 0)
        _store_states(dinitial + i_b * D * N, N, 1, r, o_d, m_first, o_n, N, NT, PTX)


@triton.jit(do_not_specialize=["rows", "num_d"])
def _add_parts_kernel(
    partial, dB, dC, rows, num_d, N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):
    """dB, dC [rows, N] from the num_d parts of their sums, TOGETHER of them in flight; None is left out."""
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    o_n = tl.arange(0, NP)
    m = (o_r < rows)[:, None] & (o_n < N)[None, :]
    WIDTH: tl.constexpr = NP * ((dB is not None) + (dC is not None))
    p = partial + o_r[:, None] * WIDTH + o_n[None, :]
    b_first = tl.zeros([BLOCK, NP], tl.float32)
    b_second = tl.zeros([BLOCK, NP], tl.float32)
    for i in range(0, num_d, TOGETHER):
        for j in tl.static_range(TOGETHER):
            m_j = m & (i + j + 0 * o_n < num_d)[None, :]
            b_first += tl.load(p, mask=m_j, other=0.0)
            if WIDTH > NP:
                b_second += tl.load(p + NP, mask=m_j, other=0.0)
            p += rows.to(tl.int64) * WIDTH
    o_out = o_r[:, None] * N + o_n[None, :]
    if dB is not None:
        tl.store(dB + o_out, b_first.to(dB.dtype.element_ty), mask=m)
    if dC is not None:
        b_last = b_second if WIDTH > NP else b_first
        tl.store(dC + o_out, b_last.to(dC.dtype.element_ty), mask=m)


@triton.jit
def _step_kernel(
    x, dt, A, B, C, skip, z, bias, state, y,
    D, x_stride_b, dt_stride_b, z_stride_b, b_stride_b, c_stride_b, b_stride_d, c_stride_d,
    b_stride_n, c_stride_n, s_stride_b, s_stride_d, s_stride_n,
    N: tl.constexpr, NP: tl.constexpr, BLOCK_D: tl.constexpr, SOFTPLUS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One step of this module's recurrence for BLOCK_D channels of one row; the state is updated in place."""
    num_d = tl.cdiv(D, BLOCK_D)
    i_b = (tl.program_id(0) // num_d).to(tl.int64)
    o_d = tl.program_id(0) % num_d * BLOCK_D + tl.arange(0, BLOCK_D)
    o_n = tl.arange(0, NP)
    m_d = o_d < D
    m = m_d[:, None] & (o_n < N)[None, :]
    p_state = state + i_b * s_stride_b + o_d.to(tl.int64)[:, None] * s_stride_d + o_n[None, :] * s_stride_n
    b_h = tl.load(p_state, mask=m, other=0.0).to(tl.float32)
    b_a = tl.load(A + o_d[:, None] * N + o_n[None, :], mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(B + i_b * b_stride_b + o_d[:, None] * b_stride_d + o_n[None, :] * b_stride_n, mask=m, other=0.0)
    b_c = tl.load(C + i_b * c_stride_b + o_d[:, None] * c_stride_d + o_n[None, :] * c_stride_n, mask=m, other=0.0)
    b_x = tl.load(x + i_b * x_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_bias = 0.0
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    # memory decides, so the precise exponentials are free
    b_dt = _step_size(tl.load(dt + i_b * dt_stride_b + o_d, mask=m_d, other=0.0), b_bias, SOFTPLUS, PTX)
    b_h = _decay(b_dt[:, None] * b_a * (1.0 if PTX else LOG2E), PTX) * b_h + (b_dt * b_x)[:, None] * b_b.to(tl.float32)
    tl.store(p_state, b_h.to(state.dtype.element_ty), mask=m)
    b_y = tl.sum(b_c.to(tl.float32) * b_h, 1)
    if skip is not None:
        b_y += tl.load(skip + o_d, mask=m_d, other=0.0).to(tl.float32) * b_x
    if z is not None:
        b_z = tl.load(z + i_b * z_stride_b + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y *= b_z * _sigmoid(b_z, PTX)
    tl.store(y + i_b * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


@triton.jit
def _add_totals_kernel(
    totals, dA, dbias, dskip, rows, D, N: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """dA [D, N], dbias and dskip [D] from totals [rows, N + 2, D]."""
    i_n = tl.program_id(0) % (N + 2)
    o_d = tl.program_id(0) // (N + 2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    b_sum = column_sums(totals, i_n * D + o_d, m_d, rows, (N + 2) * D, ROWS)
    if i_n < N:
        tl.store(dA + o_d * N + i_n, b_sum.to(dA.dtype.element_ty), mask=m_d)
    elif i_n == N:
        if dbias is not None:
            tl.store(dbias + o_d, b_sum.to(dbias.dtype.element_ty), mask=m_d)
    else:
        if dskip is not None:
            tl.store(dskip + o_d, b_sum.to(dskip.dtype.element_ty), mask=m_d)


class Plan(NamedTuple):
    """How a kernel covers [B, T, D]: `splits` segments of `segment` steps, a multiple of the chunk length."""

    segment: int
    splits: int
    block_d: int
    programs: int
    constants: dict[str, Any]
    """Of the kernel, as far as they follow from the plan."""

    @property
    def warps(self) -> int:
        return self.programs * int(self.constants["num_warps"])


def _padded(state: int) -> int:
    """States of a row of maps."""
    return max(4, power_of_2(state))


def _plan(x: Tensor, state: int, *tiles: Tile, tuning: Tuning, splits: int | None = None) -> Plan:
    """The first tile that fills the chip over whole sequences, or if none does, the last tile over segments of time."""
    return _choose(x.shape, state, tiles, tuning, splits, num_processors(x.device), speaks_ptx())


@functools.lru_cache(1024)
def _choose(
    shape: tuple[int, ...],
    state: int,
    tiles: tuple[Tile, ...],
    tuning: Tuning,
    splits: int | None,
    processors: int,
    ptx: bool,
) -> Plan:
    if splits is None:
        whole = [_cover(shape, state, tile, 1, tuning.chunk, ptx) for tile in tiles]
        for plan in whole:
            if plan.warps >= tuning.enough_warps * processors:
                return plan
        most = 1 if shape[1] <= tuning.short else shape[1] // tuning.min_segment
        splits = max(1, min(round(tuning.busy_warps * processors / whole[-1].warps), most))
    return _cover(shape, state, tiles[-1], splits, tuning.chunk, ptx)


def _cover(shape: tuple[int, ...], state: int, tile: Tile, splits: int, chunk: int, ptx: bool) -> Plan:
    assert chunk % tile.steps == 0
    batch, length, width = shape
    padded = _padded(state)
    # a lane of a channel has at least a step of each group
    lanes = min(cdiv(padded, tile.states), tile.steps, 8)
    # the sums over the warps of a program share 48 KiB
    num_warps = min(tile.num_warps, power_of_2(cdiv(width * lanes, 32 * tile.channels)), 256 // padded)
    block_d = 32 * num_warps // lanes * tile.channels
    num_d = cdiv(width, block_d)
    segment = cdiv(cdiv(length, splits), chunk) * chunk
    splits = cdiv(length, segment)
    constants = {
        "N": state, "NT": padded // lanes, "LANES": lanes, "CHANNELS": tile.channels, "BLOCK_D": block_d,
        "STEPS": tile.steps, "num_warps": num_warps,
    }  # fmt: skip
    if tile.registers and ptx:
        constants["maxnreg"] = tile.registers
    return Plan(segment, splits, block_d, batch * splits * num_d, constants)


class Maps(NamedTuple):
    """B and C as the kernels read them."""

    B: Tensor
    C: Tensor
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of B and C as they were given."""
    strides: tuple[int | None, ...]
    """Of a batch row and of a step, in words, of B and of C; None where they do not depend on time."""
    constants: dict[str, bool]

    @property
    def in_time(self) -> tuple[bool, bool]:
        return self.strides[1] is not None, self.strides[3] is not None


def _maps(B: Tensor, C: Tensor, padded: int) -> Maps:
    ptx = speaks_ptx()
    packed = all(m.ndim == 2 or m.dtype == torch.bfloat16 for m in (B, C)) and not B.ndim == C.ndim == 2
    b, c = (m if m.ndim == 2 else _words_of(m, padded, packed) for m in (B, C))
    b_strides, c_strides = ((None, None) if m.ndim == 2 else _strides(m) for m in (b, c))
    # up to 32 a lane finds its words of a map in one register; the interpreter, which has no lanes, plays along
    shuffle = (ptx or triton.knobs.runtime.interpret) and padded // (2 if packed else 1) <= 32
    return Maps(b, c, (B.dtype, C.dtype), (*b_strides, *c_strides), {"PACKED": packed, "SHUFFLE": shuffle, "PTX": ptx})


def _words_of(m: Tensor, padded: int, packed: bool) -> Tensor:
    """[B, T, N] as 32-bit words behind each other, without a copy where it can be."""
    dtype = torch.bfloat16 if packed else torch.float32
    fits = m.dtype == dtype and m.shape[2] == padded and m.stride(2) == 1 and m.stride(1) * m.element_size() < 2**31
    if not fits or (packed and any(i % 2 for i in (m.storage_offset(), m.stride(0), m.stride(1)))):
        rows = torch.zeros((*m.shape[:2], padded), dtype=dtype, device=m.device)
        rows[..., : m.shape[2]] = m
        m = rows
    return m.view(torch.float32)


def _pass(A: Tensor, total_dt: Tensor, ends: Tensor, first: Tensor | None, *, reverse: bool) -> None:
    batch, splits, state, width = ends.shape
    block = min(128, power_of_2(width))
    launch(
        _pass_kernel, batch * state * cdiv(width, block),
        A, total_dt, ends, first, width, splits, N=state, BLOCK_D=block, REVERSE=reverse, num_warps=4,
    )  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return 0, 0
    in_batch, in_time, _ = tensor.stride()
    # what the stride of a single step is does not matter, and it may be anything
    return in_batch, in_time if tensor.shape[1] > 1 else 0


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


def scan_bwd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    maps: Maps,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    chunks: Tensor,
    dy: Tensor,
    dfinal: Tensor | None,
    initial_dtype: torch.dtype | None,
    tuning: Tuning,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, dt, A, B, C, skip, z, bias and initial state."""
    batch, length, width = x.shape
    state, padded = A.shape[1], _padded(A.shape[1])
    plan = _plan(x, state, tuning.backward if speaks_ptx() else tuning.backward_portable, tuning=tuning)
    new = partial(torch.empty, dtype=torch.float32, device=x.device)

    after = dfinal
    if plan.splits > 1:
        after = new((batch, plan.splits, state, width))
        total_dt = new((batch, plan.splits, width))
        ends = _plan(x, state, tuning.backward_ends, tuning=tuning, splits=plan.splits)
        launch(
            _bwd_ends_kernel, ends.programs,
            dt, A, maps.B, maps.C, z, bias, dy, after, total_dt,
            length, width, ends.segment, ends.splits, *maps.strides, *_strides(dt), *_strides(z), *_strides(dy),
            **ends.constants, **maps.constants, SOFTPLUS=softplus,
        )  # fmt: skip
        _pass(A, total_dt, after, dfinal, reverse=True)
        del total_dt

    dx = torch.empty((batch, length, width), dtype=x.dtype, device=x.device)
    ddt = torch.empty((batch, length, width), dtype=dt.dtype, device=x.device)
    dz = None if z is None else torch.empty((batch, length, width), dtype=z.dtype, device=x.device)
    totals = new((batch * plan.splits, state + 2, width))
    dB, dC = (None if in_time else new((batch, plan.splits, state, width)) for in_time in maps.in_time)
    dinitial = (
        None if initial_dtype is None else torch.empty((batch, width, state), dtype=initial_dtype, device=x.device)
    )
    num_d = cdiv(width, plan.block_d)
    new_b, new_c = (
        torch.empty((batch, length, state), dtype=dtype, device=x.device) if in_time else None
        for dtype, in_time in zip(maps.dtypes, maps.in_time, strict=True)
    )
    parts = new((num_d, batch * length, padded * sum(maps.in_time))) if any(maps.in_time) else None
    scratch = new((plan.programs, tuning.chunk // plan.constants["STEPS"] - 1, padded * plan.block_d))
    launch(
        _scan_bwd_kernel, plan.programs,
        x, dt, A, maps.B, maps.C, skip, z, bias, chunks, dy, after,
        dx, ddt, dz, totals, dB, dC, parts, dinitial, scratch,
        length, width, plan.segment, plan.splits, *maps.strides,
        *_strides(x), *_strides(dt), *_strides(z), *_strides(dy),
        **plan.constants, **maps.constants, CHUNK=tuning.chunk, SOFTPLUS=softplus,
    )  # fmt: skip
    del scratch

    if parts is not None:
        block = max(4, 512 // padded)
        launch(
            _add_parts_kernel, cdiv(batch * length, block),
            parts, new_b, new_c, batch * length, num_d,
            N=state, NP=padded, BLOCK=block, TOGETHER=4, num_warps=4,
        )  # fmt: skip
    if dB is not None:
        new_b = dB.sum((0, 1)).t().to(maps.dtypes[0])
    if dC is not None:
        new_c = dC.sum((0, 1)).t().to(maps.dtypes[1])
    dA, dskip, dbias = (None if m is None else torch.empty_like(m) for m in (A, skip, bias))
    launch(
        _add_totals_kernel, (state + 2) * cdiv(width, COLUMNS),
        totals, dA, dbias, dskip, batch * plan.splits, width, N=state, ROWS=ROWS, BLOCK_D=COLUMNS, num_warps=4,
    )  # fmt: skip
    return dx, ddt, dA, new_b, new_c, dskip, dz, dbias, dinitial


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        skip: Tensor | None,
        z: Tensor | None,
        bias: Tensor | None,
        initial_state: Tensor | None,
        softplus: bool,
        return_final_state: bool,
        tuning: Tuning,
    ) -> tuple[Tensor, Tensor | None]:
        maps = _maps(B, C, _padded(A.shape[1]))
        inputs = (skip, z, bias, softplus, initial_state, return_final_state)
        y, final_state, chunks = scan_fwd(x, dt, A, maps, *inputs, save=True, tuning=tuning)
        # words are views of B and C, or what would have to be made again
        save(ctx, x, dt, A, maps.B, maps.C, skip, z, bias, chunks)
        ctx.softplus, ctx.tuning, ctx.maps = softplus, tuning, maps[2:]
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, skip, z, bias, chunks = saved(ctx)
        maps = Maps(B, C, *ctx.maps)
        dy = torch.zeros_like(x) if dy is None else _channel_last(dy)
        dfinal = None if dfinal is None else dfinal.contiguous()
        gradients = scan_bwd(
            x, dt, A, maps, skip, z, bias, ctx.softplus, chunks, dy, dfinal, ctx.initial_dtype, ctx.tuning
        )
        return *gradients, None, None, None


def _channel_last(tensor: Tensor) -> Tensor:
    # the kernels count a stride in bytes of 32 bits
    _, in_time, in_width = tensor.stride()
    fits = in_width == 1 and in_time * tensor.element_size() < 2**31
    return tensor if fits else tensor.contiguous()


def selective_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    tuning: Tuning = TUNING,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan` for arguments that it has checked; y in the dtype of x, the final state in float32."""
    wide = (None if m is None else _channel_last(m) for m in (x, dt, z))
    small = (m if m is None or m.ndim == 3 else m.contiguous() for m in (A, B, C, D, dt_bias))
    (x, dt, z), (A, B, C, skip, bias) = wide, small
    initial_state = None if initial_state is None else initial_state.contiguous()
    tensors = (x, dt, A, B, C, skip, z, bias, initial_state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        y, state = SelectiveScan.apply(*tensors, dt_softplus, return_final_state, tuning)
    else:
        maps = _maps(B, C, _padded(A.shape[1]))
        options = (dt_softplus, initial_state, return_final_state)
        y, state, _ = scan_fwd(x, dt, A, maps, skip, z, bias, *options, save=False, tuning=tuning)
    return (y, state) if return_final_state else y


def selective_scan_step_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """`selective_scan_step` for arguments that it has checked, without gradients; the state is updated in place."""
    batch, width = x.shape
    num_states = A.shape[1]
    padded = power_of_2(num_states)
    block_d = max(1, STEP_BLOCK // padded)
    y = torch.empty((batch, width), dtype=x.dtype, device=x.device)
    x, dt, z = (m if m is None or m.stride(1) == 1 else m.contiguous() for m in (x, dt, z))
    A, skip, bias = (m if m is None else m.contiguous() for m in (A, D, dt_bias))
    # [B, N] or [1, D, N]
    b_b, b_d, b_n = (B.stride(0), 0, B.stride(1)) if B.ndim == 2 else (0, *B.stride()[1:])
    c_b, c_d, c_n = (C.stride(0), 0, C.stride(1)) if C.ndim == 2 else (0, *C.stride()[1:])
    launch(
        _step_kernel, batch * cdiv(width, block_d),
        x, dt, A, B, C, skip, z, bias, state, y,
        width, x.stride(0), dt.stride(0), 0 if z is None else z.stride(0), b_b, c_b, b_d, c_d, b_n, c_n,
        *state.stride(), N=num_states, NP=padded, BLOCK_D=block_d, SOFTPLUS=dt_softplus, PTX=speaks_ptx(), num_warps=4,
    )  # fmt: skip
    return y
