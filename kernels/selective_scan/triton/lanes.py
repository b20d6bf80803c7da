"""Exchange between the threads of a warp and between the warps of a program."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl


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
