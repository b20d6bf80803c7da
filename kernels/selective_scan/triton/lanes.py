"""Exchange of values between threads.

Every tensor of the scan kernels has one element a thread, E elements in all. LANES neighbouring threads work on one
channel; they are the lanes of the channel, and 32 neighbouring threads are the lanes of a warp. With PTX the exchange
is done by shuffle instructions, else by operations on the whole tensor, which Triton's interpreter knows too.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_lane(b_x, o_lane, NUM_LANES: tl.constexpr, PTX: tl.constexpr):
    """The element of lane o_lane, counted among the NUM_LANES neighbours to which a thread belongs."""
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
def from_lane_each(values, Q: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Each tensor of `values` with the element of lane Q of a channel in all lanes of that channel."""
    if LANES > 1:
        received = ()
        for c in tl.static_range(len(values)):
            received += (from_lane(values[c], Q, LANES, PTX),)
        values = received
    return values


@triton.jit
def from_partner(b_x, MASK: tl.constexpr, PTX: tl.constexpr):
    """For thread e the element of thread e xor MASK, its partner."""
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
def sum_lanes(b_x, LANES: tl.constexpr, PTX: tl.constexpr):
    """The sum over the lanes of a channel, in all of these lanes."""
    if LANES > 1:
        b_x += from_partner(b_x, 1, PTX)
    if LANES > 2:
        b_x += from_partner(b_x, 2, PTX)
    if LANES > 4:
        b_x += from_partner(b_x, 4, PTX)
    return b_x


@triton.jit
def fold(values, o_e, NUM: tl.constexpr, MASK: tl.constexpr, PTX: tl.constexpr):
    """One stage of a butterfly: adds the NUM values of two partners and leaves half of the sums with each of them.

    A thread whose bit MASK is not set keeps the first half of the sums, its partner the second half. One value is added
    and kept by both.
    """
    folded = ()
    if NUM <= 1:
        folded += (values[0] + from_partner(values[0], MASK, PTX),)
    else:
        m_upper = (o_e & MASK) != 0
        for i in tl.static_range(NUM // 2):
            b_given = tl.where(m_upper, values[i], values[i + NUM // 2])
            b_kept = tl.where(m_upper, values[i + NUM // 2], values[i])
            folded += (b_kept + from_partner(b_given, MASK, PTX),)
    return folded


@triton.jit
def sum_lanes_of_steps(values, c: tl.constexpr, CHANNELS: tl.constexpr, o_e, LANES: tl.constexpr, PTX: tl.constexpr):
    """Sums over the lanes of channel c for LANES steps at once; lane q ends up with the sum of step q.

    values: the terms of a thread, CHANNELS of them for each of the LANES steps.
    """
    sums = ()
    for q in tl.static_range(LANES):
        sums += (values[q * CHANNELS + c],)
    if LANES > 4:
        sums = fold(sums, o_e, 8, 4, PTX)
    if LANES > 2:
        sums = fold(sums, o_e, 4, 2, PTX)
    if LANES > 1:
        sums = fold(sums, o_e, 2, 1, PTX)
    return sums[0]


@triton.jit
def sum_channels_of_warp(values, o_e, NUM: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr):
    """Sums of NUM values over the 32 / LANES channels of a warp, spread over its lanes as `column_of_sum` says."""
    values = fold(values, o_e, NUM, 16, PTX)
    values = fold(values, o_e, NUM // 2, 8, PTX)
    if LANES <= 4:
        values = fold(values, o_e, NUM // 4, 4, PTX)
    if LANES <= 2:
        values = fold(values, o_e, NUM // 8, 2, PTX)
    if LANES <= 1:
        values = fold(values, o_e, NUM // 16, 1, PTX)
    return values


@triton.jit
def column_of_sum(o_lane, i, NUM: tl.constexpr, LEFT: tl.constexpr, NT: tl.constexpr, LANES: tl.constexpr):
    """The column in [B_t, C_t] of the i-th of the LEFT sums that a lane of a warp holds after `sum_channels_of_warp`.

    The NUM values of a thread were NT columns of B, NT of C or both.
    """
    o_value = o_lane // LANES * NUM * LANES // 32
    if LEFT > 1:
        o_value = o_lane // LANES * LEFT + i
    return o_value // NT * (NT * LANES) + o_lane % LANES * NT + o_value % NT


@triton.jit
def join_steps(steps, STEPS: tl.constexpr):
    """STEPS (4 or 8) tensors [E] as one tensor [E, STEPS]."""
    E: tl.constexpr = steps[0].shape[0]
    quads = ()
    for q in tl.static_range(STEPS // 4):
        # a quad holds the steps q, q + STEPS / 4, q + STEPS / 2 and q + 3 STEPS / 4
        even = tl.join(steps[q], steps[q + STEPS // 2])
        odd = tl.join(steps[q + STEPS // 4], steps[q + 3 * STEPS // 4])
        quads += (tl.reshape(tl.join(even, odd), [E, 4]),)
    b_all = quads[0]
    if STEPS == 8:
        b_all = tl.reshape(tl.join(quads[0], quads[1]), [E, 8])
    return b_all


@triton.constexpr_function
def _sum_warps_ptx(steps, warps):
    """PTX that sums over the warps of a program through shared memory.

    Inputs of a thread: its term of each step, its index in the program, and which of two buffers to use.
    Outputs: the sums of max(1, steps / warps) steps, other steps in each warp.
    """
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
        # with more warps than steps, several warps compute the same sums
        f"rem.u32 w, w, {steps // outputs}; mad.lo.u32 p, w, {outputs * 128}, p;",
    ]
    for j in range(outputs):
        lines.append(f"ld.shared.f32 s, [p+{j * 128}];")
        for i in range(1, warps):
            lines.append(f"ld.shared.f32 x, [p+{i * steps * 128 + j * 128}]; add.f32 s, s, x;")
        lines.append(f"mov.f32 ${j}, s;")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def sum_warps(values, o_e, i_buffer, WARPS: tl.constexpr):
    """Sums over the warps of a program in a fixed order, by PTX. Each warp is left with the sums of some of the steps.

    values: one term for each of STEPS steps. Warp w returns the sums of EACH = max(1, STEPS / WARPS) steps, from step
    EACH (w mod (STEPS / EACH)) on. Calls alternate between i_buffer 0 and 1, so that one barrier a call is enough.
    """
    if WARPS > 1:
        STEPS: tl.constexpr = len(values)
        EACH: tl.constexpr = STEPS // WARPS if STEPS > WARPS else 1
        arguments = values + (o_e, i_buffer + 0 * o_e)  # noqa: RUF005
        asm: tl.constexpr = _sum_warps_ptx(STEPS, WARPS)
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
def opaque_each(values, PTX: tl.constexpr):
    """Identity that the compiler cannot see through, so that it recomputes instead of keeping registers."""
    if PTX:
        opaque = ()
        for i in tl.static_range(len(values)):
            opaque += (
                tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=f,f", [values[i]], dtype=tl.float32, is_pure=False, pack=1
                ),
            )
        values = opaque
    return values


@triton.jit
def opaque_int32_each(offsets, PTX: tl.constexpr):
    """`opaque_each` for integers: addresses computed from them are not kept in registers from chunk to chunk."""
    as_floats = ()
    for i in tl.static_range(len(offsets)):
        as_floats += (offsets[i].to(tl.float32, bitcast=True),)
    as_floats = opaque_each(as_floats, PTX)
    opaque = ()
    for i in tl.static_range(len(offsets)):
        opaque += (as_floats[i].to(tl.int32, bitcast=True),)
    return opaque
