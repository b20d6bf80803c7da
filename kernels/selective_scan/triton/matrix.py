"""Building blocks of the kernels for bfloat16: pairs of channels, and sums on the matrix units (tensor cores).

A warp owns 16 channels and 16 states. Its lane e has the four states 4 q .. 4 q + 3, q = e % 4, of two neighbouring
channels, 2 (e // 4) and the next, which are one 32-bit word of x, dt, z and y. This is how the matrix units lay out a
product of 16 rows (channels) and 8 columns: one of them gives every lane two of its states, for both channels. Three
kinds of products take the place of shuffles:

    u_t B_t        [16 channels, 16 states], to be added to the decayed states                `outer_each`
    h_t C_t        [16 channels], sums over the states, which are spread over four lanes      `dot_steps`
    1 (u_t g_t)    [16 states], sums over the channels of the warp                            `channel_sums.py`

Precision: u_t is split into two tf32 numbers of 11 bits each and B_t is bfloat16, so the outer product is that of
float32 up to 2^-22. h_t is cut to tf32 (11 bits), and the terms of the sums over channels are rounded to bfloat16; both
only where the result becomes a bfloat16 number.

The functions hold for PTX only: the interpreter and other GPUs take the kernels of `forward.py` and `backward.py`.
Tuples have an element for each channel c of a thread, or for each state n of each channel, in the order 4 c + n.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from subquad.kernels.selective_scan.triton.memory import at_step, load

ROW = tl.constexpr(40)
"""Floats from one row [B_t, C_t] in shared memory to the next: 32 and a gap that keeps rows in different banks."""

_OUTER = tl.constexpr(
    "{ .reg .f32 z; mov.f32 z, 0f00000000; "
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $8}, {z, z, z, z}; }"
)
_DOT = tl.constexpr(
    "{ .reg .f32 z, a, b, c, d; mov.f32 z, 0f00000000; "
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {a, b, c, d}, {$4, $8, $5, $9}, {$12, $13}, {z, z, z, z}; "
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
    "{$0, $1, $2, $3}, {$6, $10, $7, $11}, {$14, $15}, {a, b, c, d}; }"
)


@triton.jit
def _bits(b_x):
    return b_x.to(tl.int32, bitcast=True)


@triton.jit
def unpack(b_word):
    """The two bfloat16 numbers of a word as float32: a bfloat16 is the upper half of the float32 of the same value."""
    b_bits = _bits(b_word)
    return (b_bits << 16).to(tl.float32, bitcast=True), (b_bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def words_of(p):
    """A pointer to bfloat16 numbers as one to words of two of them."""
    return p.to(tl.pointer_type(tl.float32))


@triton.jit
def load_pairs(p_word, stride_t, o_t, t_last, STEPS: tl.constexpr):
    """The words of a pair of channels at the steps o_t, o_t + 4, ... of a lane; stride_t in words."""
    words = ()
    for k in tl.static_range(STEPS // 4):
        words += (load(at_step(p_word, tl.minimum(o_t + k * 4, t_last - 1), stride_t, True), True),)
    return words


@triton.jit
def store_pair(p_word, b_first, b_second, m):
    """Stores two channels as one word of bfloat16 where m holds."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 w; setp.ne.b32 p, $4, 0; cvt.rn.bf16x2.f32 w, $3, $2; "
        "@p st.global.b32 [$1], w; mov.b32 $0, 0; }",
        "=r,l,f,f,r",
        [p_word.to(tl.int64), b_first, b_second, m.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_state_pairs(p, stride_n, o_n, m_d, N: tl.constexpr):
    """Four states of two channels from p[n stride_n + d], zeros for missing states and channels."""
    first = ()
    second = ()
    for n in tl.static_range(4):
        two = tl.inline_asm_elementwise(
            "ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l",
            [(p + tl.minimum(o_n + n, N - 1) * stride_n).to(tl.int64)],
            dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        m = m_d & (o_n + n < N)
        first += (tl.where(m, two[0], 0.0),)
        second += (tl.where(m, two[1], 0.0),)
    return first + second


@triton.jit
def store_state_pairs(p, stride_n, states, o_n, m_d, N: tl.constexpr):
    """Stores the states that `load_state_pairs` would load."""
    for n in tl.static_range(4):
        m = m_d & (o_n + n < N)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,f,f,r",
            [(p + (o_n + n) * stride_n).to(tl.int64), states[n], states[4 + n], m.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def store_fours(p, values, E: tl.constexpr):
    """Stores the values of a thread, four by four; p has one address a thread, 4 floats apart."""
    for i in tl.static_range(len(values) // 4):
        tl.inline_asm_elementwise(
            "st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;", "=r,l,f,f,f,f",
            [(p + i * 4 * E).to(tl.int64), values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_fours(p, NUM: tl.constexpr, E: tl.constexpr):
    """The NUM values that the same thread stored with `store_fours`."""
    values = ()
    for i in tl.static_range(NUM // 4):
        values += tl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [(p + i * 4 * E).to(tl.int64)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    return values


@triton.jit
def load_outer_words(p_map, o_e, t, t_last, STEPS: tl.constexpr):
    """Words of a map [batch row, T, 8] for `outer_each`: lane q of four gets those of its own steps, q, q + 4, ..."""
    p_word = p_map[0] + o_e // 4 % 8
    return load_pairs(p_word, p_map[1] + 0 * o_e, t + o_e % 4, t_last, STEPS)


@triton.jit
def dot_step(o_e):
    """The step of a block of eight whose row of C this lane gives to `dot_steps`.

    Column n of the product belongs to lane n // 2 of four, as the first or second of its two steps.
    """
    o_n = o_e // 4 % 8
    return o_n % 2 * 4 + o_n // 2


@triton.jit
def remainder_each(values):
    """values[i] minus its leading 11 bits, which are what the matrix units read of it."""
    rest = ()
    for i in tl.static_range(len(values)):
        rest += (values[i] - (_bits(values[i]) & -8192).to(tl.float32, bitcast=True),)
    return rest


@triton.jit
def outer_each(b_u, b_rest, row, o_q, q: tl.constexpr):
    """u[c] B[n] at the step of lane q, for both channels c and the four states n of each lane.

    b_u, b_rest: u of the own step of each lane, and its remainder.
    row: states 2 (e // 4 % 8) and the next of the row of the own step of each lane.
    """
    even = ()
    odd = ()
    m_q = o_q == q
    for i in tl.static_range(2):
        b_row = tl.where(m_q, row[i], 0.0)
        four = tl.inline_asm_elementwise(
            _OUTER, "=f,=f,=f,=f,r,r,r,r,r",
            [_bits(b_u[0]), _bits(b_u[1]), _bits(b_rest[0]), _bits(b_rest[1]), _bits(b_row)],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        if i == 0:
            even = four
        else:
            odd = four
    # a product gives every other state of a lane
    return even[0], odd[0], even[1], odd[1], even[2], odd[2], even[3], odd[3]


@triton.jit
def dot_steps(h, row, sums, o_q, j: tl.constexpr):
    """Puts sum_n h[c, n] C[n] of step j < 8 of a block into `sums`: lane j % 4 gets it as sums[j // 4 * 2 + c].

    row: the states of this lane in row `dot_step` of the block.
    """
    found = tl.inline_asm_elementwise(
        _DOT, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r",
        [_bits(h[0]), _bits(h[1]), _bits(h[2]), _bits(h[3]), _bits(h[4]), _bits(h[5]), _bits(h[6]), _bits(h[7]),
         _bits(row[0]), _bits(row[1]), _bits(row[2]), _bits(row[3])],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    m_q = o_q == j % 4
    SLOT: tl.constexpr = j // 4
    b_first = tl.where(m_q, found[SLOT], sums[2 * SLOT])
    b_second = tl.where(m_q, found[2 + SLOT], sums[2 * SLOT + 1])
    return (b_first, b_second, sums[2], sums[3]) if SLOT == 0 else (sums[0], sums[1], b_first, b_second)


@triton.jit
def shared_rows(o_e):
    """Address in shared memory of two buffers of eight rows [B_t, C_t] of ROW floats."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 rows[2560]; mov.u32 $0, rows; }", "=r,r", [o_e],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_row_word(p_b, p_c, o_e, t, t_last):
    """The word of eight rows that this thread puts into shared memory, see `store_row_word`."""
    o_t = tl.minimum(t + o_e // 16 % 8, t_last - 1)
    o_w = o_e % 8
    m_b = o_e % 16 < 8
    p = at_step(tl.where(m_b, p_b[0], p_c[0]) + o_w, o_t, tl.where(m_b, p_b[1], p_c[1]), True)
    return load(p, True)


@triton.jit
def store_row_word(p_rows, o_e, b_word):
    """Puts two states of a row into the buffer of shared memory at p_rows; 16 threads a row."""
    two = unpack(b_word)
    tl.inline_asm_elementwise(
        "st.shared.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0;", "=r,r,f,f",
        [p_rows + (o_e // 16 % 8) * (ROW * 4) + o_e % 16 * 8, two[0], two[1]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def shared_four(p):
    """Four floats of shared memory."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [p],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def shared_two(p):
    """Two floats of shared memory."""
    return tl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [p],
        dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip
