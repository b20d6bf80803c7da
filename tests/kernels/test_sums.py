"""Sums over the rows of a matrix, also over more rows than are loaded at once."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
sums = pytest.importorskip("kernels.sums")
column_sums, COLUMNS, ROWS = sums.column_sums, sums.COLUMNS, sums.ROWS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _sums_kernel(x, y, rows, total, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, column_sums(x, o, o < total, rows, total, ROWS), mask=o < total)


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 5])
def test_every_row_counts_once(rows):
    # whole numbers, whose sums are exact
    x = torch.randint(1, 9, (rows, COLUMNS + 7), generator=torch.Generator().manual_seed(rows)).float().to(DEVICE)
    y = torch.empty(COLUMNS + 7, device=DEVICE)
    _sums_kernel[(2,)](x, y, rows, COLUMNS + 7, ROWS=ROWS, BLOCK=COLUMNS)
    assert torch.equal(y, x.sum(0))
