"""Layouts and device functions that the kernels for Hopper share."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from subquad.kernels.gated_linear_attention.triton.decays import LOWEST as _LOWEST

# Triton 3.9 has other names for these than Triton 3.6
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier_of_warps = getattr(gl, "thread_barrier", None) or gl.barrier
seen_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

LONG = gl.constexpr(2)
"""Chunks of the walks that are one chunk of the gradients, before and behind which the states are kept."""
COPY_WARPS = gl.constexpr(4)
"""Warps that copy inputs to shared memory."""
FLOATS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""The layout of numbers that are no operands of products, each of them behind the one before."""
NOTHING = gl.constexpr(-1e30)
"""A log-decay whose exponential is zero."""
LOWEST = gl.constexpr(_LOWEST.value)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def at_least_lowest(b_g):
    """Log-decays in float32, at least LOWEST. NaN stays."""
    b_g = b_g.to(gl.float32)
    return gl.where(b_g < LOWEST, LOWEST, b_g)


@gluon.constexpr_function
def row_layout(chunk, values):
    """For what is stored by positions, as a transpose [values, chunk]: a thread has eight values of a position.

    Values stay in the warp that computes them.
    """
    registers, lanes, warps = [[1, 0], [2, 0], [4, 0]], [[8, 0], [0, 1], [0, 2], [0, 4], [0, 8]], []
    c = 16
    while c < chunk:
        registers.append([0, c])
        c *= 2
    v = 16
    while v < values:
        warps.append([v, 0])
        v *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [values, chunk])


@gluon.constexpr_function
def state_layout(values, keys):
    """For transposed states [values, keys]: a thread has eight keys of a value; values stay in their warp."""
    registers, lanes = [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = []
    k = 32
    while k < keys:
        registers.append([0, k])
        k *= 2
    v = 16
    while v < values:
        warps.append([v, 0])
        v *= 2
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [values, keys])


@gluon.jit
def cut_to_bfloat16(b_x):
    """Clears the bits of b_x that bfloat16 does not hold; the result is still in float32 (see `tiles.py` above)."""
    return (b_x.to(gl.int32, bitcast=True) & -0x10000).to(gl.float32, bitcast=True)


@gluon.jit
def two_terms(b_x, layout: gl.constexpr):
    """The two bfloat16 terms of b_x, as left operands of products."""
    b_high = cut_to_bfloat16(b_x)
    b_low = (b_x - b_high).to(gl.bfloat16)
    return gl.convert_layout(b_high.to(gl.bfloat16), layout), gl.convert_layout(b_low, layout)


@gluon.jit
def first_state(
    first, ends, i_v, i_bh, i_segment, num_bh, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, WIDE: gl.constexpr
):
    """The transposed state [BV, K] from which a walk over a segment starts: zeros, or what is given.

    first: states [B, H, K, V] for the first segment, or None.
    ends:  the states behind all segments but the last, [segments - 1, B, H, V, K], or None.
    """
    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, WIDE))
    o_k = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    # true everywhere: it gives the masks below their shape
    m_state = (o_v[:, None] < V) & (o_k[None, :] < K)
    b_state = gl.zeros([BV, K], gl.float32, WIDE)
    if first is not None:
        p_first = first + i_bh * K * V + o_k[None, :] * V + o_v[:, None]
        b_state += gl.load(p_first, mask=m_state & (i_segment == 0), other=0.0).to(gl.float32)
    if ends is not None:
        p_end = ends + ((i_segment - 1) * num_bh + i_bh) * K * V + o_v[:, None] * K + o_k[None, :]
        b_state += gl.load(p_end, mask=m_state & (i_segment > 0), other=0.0)
    return b_state


@gluon.jit
def store_last(
    last, b_state, i_v, i_bh, i_segment, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, WIDE: gl.constexpr
):
    """The last segment writes the state behind it to `last` [B, H, K, V]."""
    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, WIDE))
    o_k = gl.arange(0, K, gl.SliceLayout(0, WIDE))
    m_last = (o_v[:, None] < V) & (o_k[None, :] < K) & (i_segment + 1 == gl.num_programs(1))
    p_last = last + i_bh * K * V + o_k[None, :] * V + o_v[:, None]
    gl.store(p_last, b_state.to(last.dtype.element_ty), mask=m_last)


@gluon.jit
def copy_rows(s_x, p, stride_t):
    """Begins to copy the rows [C, X] behind p to s_x, 16 bytes at a time."""
    C: gl.constexpr = s_x.shape[0]
    X: gl.constexpr = s_x.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // X, X // 8], [COPY_WARPS, 1], [1, 0])
    o_c = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    o_x = gl.arange(0, X, gl.SliceLayout(0, LAYOUT))
    copy_to_shared(s_x, p + ((o_c * stride_t)[:, None] + o_x[None, :]))
