"""Device functions that load, store and round tiles of time by channels.

A pointer points at the first step of one head; `o_t` are offsets in time and `o_x` offsets of channels.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_operand(b_x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """b_x in the dtype in which matrix products take it.

    A tf32 product ignores the last 13 bits of a float32 operand. Rounding to tf32 beforehand halves that error.
    """
    if dtype == tl.float32 and PRECISION == "tf32":
        b_bits = (b_x.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        b_operand = tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)
    else:
        b_operand = b_x.to(dtype)
    return b_operand


@triton.jit
def load_tile(p, stride_t, o_t, o_x, end, X):
    """Rows o_t and columns o_x of [end, X], zero outside of it."""
    m_x = (o_t < end)[:, None] & (o_x < X)[None, :]
    return tl.load(p + o_t.to(tl.int64)[:, None] * stride_t + o_x[None, :], mask=m_x, other=0.0)


@triton.jit
def load_transposed(p, stride_t, o_t, o_x, end, X):
    """The transpose of `load_tile`."""
    m_x = (o_x < X)[:, None] & (o_t < end)[None, :]
    return tl.load(p + o_t.to(tl.int64)[None, :] * stride_t + o_x[:, None], mask=m_x, other=0.0)


@triton.jit
def store_tile(p, stride_t, o_t, o_x, end, X, b_x):
    """Writes b_x to rows o_t and columns o_x of [end, X], in the dtype of the pointer."""
    m_x = (o_t < end)[:, None] & (o_x < X)[None, :]
    tl.store(p + o_t.to(tl.int64)[:, None] * stride_t + o_x[None, :], b_x.to(p.dtype.element_ty), mask=m_x)


@triton.jit
def load_state(p, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """Rows o_k and columns o_v of a contiguous state [K, V], zero outside of it."""
    m_s = (o_k < K)[:, None] & (o_v < V)[None, :]
    return tl.load(p + o_k[:, None] * V + o_v[None, :], mask=m_s, other=0.0)


@triton.jit
def chunk_span(table, i_t, T, C: tl.constexpr):
    """Start of chunk i_t, and end of the sequence that it belongs to; see `Plan.table`."""
    if table is None:
        start, end = i_t * C, T
    else:
        start, end = tl.load(table + 2 * i_t), tl.load(table + 2 * i_t + 1)
    return start, end
