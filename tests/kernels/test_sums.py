"""Sums over the rows of a matrix, also over more rows than are loaded at once."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
sums = pytest.importorskip("subquad.kernels.sums")
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


@pytest.mark.parametrize("size", [(1, 1), (70, 3), (700, 200), (5000, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rows_are_added_in_float32(size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size[0])).to(DEVICE, dtype)
    exact = x.double().sum(0)
    # the last bit of a float32 sum of random terms, and one rounding to the dtype
    atol = 1e-6 * size[0] ** 0.5 + torch.finfo(dtype).eps * exact.abs()
    # the alignment of rows decides how wide a load is, and so which terms a thread adds: not the same bits
    strided = torch.cat([x, x + 1], 1)[:, : size[1]]
    for y in (sums.row_sums(x), sums.row_sums(strided)):
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= atol).all()
    assert torch.equal(sums.row_sums(x), sums.row_sums(x.clone()))
