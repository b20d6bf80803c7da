"""`column_sums`: what the programs of a backward pass leave for one more kernel to add, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 32
"""Of a program: 128 bytes of a row."""
ROWS = 64
"""Loaded at once."""


@triton.jit
def column_sums(partial, o, m, rows, stride, ROWS: tl.constexpr):
    """Sums over rows [COLUMNS] of the columns o of partial [rows, stride] where m, float32."""
    o_r = tl.arange(0, ROWS)
    p = partial + o_r.to(tl.int64)[:, None] * stride + o[None, :]
    b_sums = tl.load(p, mask=(o_r < rows)[:, None] & m[None, :], other=0.0)
    for i in range(ROWS, rows, ROWS):
        p += ROWS * stride
        b_sums += tl.load(p, mask=(i + o_r < rows)[:, None] & m[None, :], other=0.0)
    return tl.sum(b_sums, 0)
