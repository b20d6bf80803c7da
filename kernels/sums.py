"""Deterministic sums over programs: each program of a backward pass writes a row of partial sums, one more kernel adds
the rows with `column_sums`, in a fixed order and without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 32
"""Columns that one program adds: 128 bytes of a row in float32."""
ROWS = 64
"""Rows that are loaded at once."""


@triton.jit
def column_sums(partial, o, m, rows, stride, ROWS: tl.constexpr):
    """Sums of the columns o of partial [rows, stride] where the mask m holds, float32 [COLUMNS]."""
    o_r = tl.arange(0, ROWS)
    p = partial + o_r.to(tl.int64)[:, None] * stride + o[None, :]
    b_sums = tl.load(p, mask=(o_r < rows)[:, None] & m[None, :], other=0.0)
    for i in range(ROWS, rows, ROWS):
        p += ROWS * stride
        b_sums += tl.load(p, mask=(i + o_r < rows)[:, None] & m[None, :], other=0.0)
    return tl.sum(b_sums, 0)
