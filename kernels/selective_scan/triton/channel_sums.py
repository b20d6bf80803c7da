"""Sums over channels for dB and dC on the matrix units, for the kernels of `matrix.py`.

dB_t[n] and dC_t[n] are sums over all channels. Each lane of a warp has their terms for two channels, added up, and four
states. The matrix units add along the columns of a matrix, so the lanes of a warp give each other the terms through
shared memory, which hands them back transposed (`ldmatrix`); a product with ones in one column adds those of a step.
The warps of a program then add their sums through shared memory (`sum_warps`).

The terms are rounded to bfloat16, their sums are float32. Letters as in `matrix.py`.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

_SUM = tl.constexpr(
    "{ .reg .b32 a, b, c, d; ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a, b, c, d}, [$8]; "
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a, b}, {$9}, {$10, $11, $12, $13}; "
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$4, $5, $6, $7}, {c, d}, {$9}, {$14, $15, $16, $17}; }"
)


@triton.constexpr_function
def _terms_ptx(warps):
    """PTX that gives a thread its two addresses in shared memory, see `shared_terms`.

    A row of 64 bytes has the terms of the four lanes of a pair of channels, 16 bytes a lane. The lanes of every second
    pair are in another order, so that neither writing nor reading meets two rows in the same banks.
    """
    return (
        f"{{ .shared .align 16 .b8 terms[{warps * 2048}]; .reg .b32 w, r, q, x; mov.u32 $0, terms; "
        "shr.u32 w, $2, 5; mad.lo.u32 $0, w, 2048, $0; mov.b32 $1, $0; "
        # the row of the pair of channels and the piece of the lane
        "bfe.u32 r, $2, 2, 3; and.b32 q, $2, 3; shr.u32 x, r, 1; xor.b32 q, q, x; "
        "mad.lo.u32 $0, r, 64, $0; mad.lo.u32 $0, q, 16, $0; "
        # lane e reads row e % 8 of piece e / 8
        "and.b32 r, $2, 7; bfe.u32 q, $2, 3, 2; shr.u32 x, r, 1; xor.b32 q, q, x; "
        "mad.lo.u32 $1, r, 64, $1; mad.lo.u32 $1, q, 16, $1; }"
    )


@triton.jit
def shared_terms(o_e, WARPS: tl.constexpr):
    """Addresses at which a thread puts its terms of four steps, and from which it reads those of its warp."""
    asm: tl.constexpr = _terms_ptx(WARPS)
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [o_e], dtype=(tl.int32, tl.int32), is_pure=False, pack=1)


@triton.jit
def warp_barrier(o_e):
    """Waits for the lanes of the warp, and makes visible what they have put into shared memory."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [o_e], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put_terms(p, b, c, j: tl.constexpr):
    """Puts the terms b of dB and c of dC, for four states each, into the buffer as those of step j of four."""
    tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, d; cvt.rn.bf16x2.f32 a, $3, $2; cvt.rn.bf16x2.f32 b, $5, $4; "
        "cvt.rn.bf16x2.f32 c, $7, $6; cvt.rn.bf16x2.f32 d, $9, $8; "
        "st.shared.v4.b32 [$1], {a, b, c, d}; mov.b32 $0, 0; }",
        "=r,r,f,f,f,f,f,f,f,f", [p + j * 512, b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_channel_sums(p, sums, o_e, j: tl.constexpr):
    """Adds to `sums` the sums of eight terms over the 8 lanes with channels, as those of step j < 8.

    After eight steps lane e has in sums[i] that of column `column_of_sum(e, i)` and the step `step_of_sum(e, i)`.
    """
    b_one = tl.where(o_e // 4 % 8 == j, 0x3F803F80, 0)
    return tl.inline_asm_elementwise(
        _SUM, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,f,f,f,f,f,f,f,f",
        [p + j % 4 * 512, b_one, sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]],
        dtype=(tl.float32,) * 8, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def column_of_sum(o_lane, i):
    """The column in [B_t, C_t] of the i-th sum of a lane, see `add_channel_sums`."""
    o_row = o_lane // 4
    return o_row // 4 * 16 + i // 2 * 4 + o_row % 4


@triton.jit
def step_of_sum(o_lane, i):
    """The step of the i-th sum of a lane, see `add_channel_sums`."""
    return o_lane % 4 * 2 + i % 2
