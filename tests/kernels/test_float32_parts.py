"""Products of float32 matrices by parts that were made once: against float64, in every layout."""

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.float32_matmul.parts import SIDE, Parts, Tuning, parts_matmul, split
from subquad.kernels.launch import CompileOptions, cdiv
from subquad.suite.laws.accuracy import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tuning(32, 64, 32, CompileOptions(num_warps=4), min_span=32)
WIDE = Tuning(64, 256, 64, CompileOptions(num_warps=8), min_span=128)


def whole(parts):
    """The matrix in float64."""
    x = parts.values.double().sum(1)
    if parts.scale is None:
        x *= 2.0**-14
    else:
        scale = parts.scale.double().repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
        x *= scale[: x.shape[0], : x.shape[1]]
    return x.t() if parts.transposed else x


def randn(*size):
    g = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=g).to(DEVICE)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 70), (128, 128), (300, 129)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_parts_of_a_matrix_have_22_bits(rows, columns, size):
    x = randn(rows, columns) * size
    parts = split(x)
    assert parts.shape == (rows, columns)
    assert parts.scale.shape == (cdiv(rows, SIDE), cdiv(columns, SIDE))
    error = (whole(parts) - x.double()).abs()
    assert (error <= 2.0**-22 * x.double().abs() + 2.0**-39 * x.double().abs().max()).all()


def test_tiles_have_scales_of_their_own_and_rows_may_be_strided():
    x = randn(300, 280) * 1e-3
    x[:SIDE, SIDE : 2 * SIDE] *= 1e20
    x[SIDE : 2 * SIDE] = 0
    for given in (x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :280]):
        error = (whole(split(given)) - x.double()).abs()
        assert error[:SIDE, SIDE : 2 * SIDE].max() <= 2.0**-22 * 1e18
        assert not error[SIDE : 2 * SIDE].any()
        assert error[:, :SIDE].max() <= 2.0**-22 * 1e-2


@pytest.mark.parametrize("tile", [SMALL, WIDE])
@pytest.mark.parametrize("a_columns", [False, True])
@pytest.mark.parametrize("b_columns", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (150, 140, 128), (140, 17, 330)])
def test_products_of_parts_are_those_of_float32_in_every_layout(rows, columns, depth, a_columns, b_columns, tile):
    a, b, bias = randn(rows, depth), randn(depth, columns) * depth**-0.5, randn(columns)
    a_parts = split(a.t().contiguous()).t() if a_columns else split(a)
    b_parts = split(b.t().contiguous()).t() if b_columns else split(b)
    found = parts_matmul(a_parts, b_parts, bias, tile=tile)
    assert_close(found, a.double() @ b.double() + bias.double(), torch.float32, plain=a @ b + bias)
    assert torch.equal(found, parts_matmul(a_parts, b_parts, bias, tile=tile))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("add", [False, True])
def test_the_sum_may_be_split_and_added_to_a_given_tensor(splits, add):
    a, b, before = randn(20, 330), randn(330, 35) * 330**-0.5, randn(20, 35)
    out = before.clone() if add else torch.full_like(before, torch.nan)
    found = parts_matmul(split(a), split(b), out=out, add=add, tile=SMALL, splits=splits)
    assert found.data_ptr() == out.data_ptr()
    exact, plain = a.double() @ b.double(), a @ b
    assert_close(out, exact + before.double() if add else exact, torch.float32, plain=plain + before if add else plain)


def test_tiles_of_very_different_sizes_and_zeros_keep_their_digits():
    a, b = randn(300, 300), randn(300, 300)
    for i, size in enumerate((1e-12, 1e9, 1e-3)):
        a[i * SIDE : (i + 1) * SIDE] *= size
        b[:, i * SIDE : (i + 1) * SIDE] *= size**0.5
    a[SIDE : SIDE + 3] = 0
    b[:, :7] = 0
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (parts_matmul(split(a), split(b), tile=SMALL).double() - exact).abs()
    plain = ((a @ b).double() - exact).abs()
    assert not error[size == 0].any()
    here = size > 0
    assert (error[here] / size[here]).max() <= 2 * (plain[here] / size[here]).max() + 1e-7


def test_small_rows_beside_large_ones_err_by_a_share_of_the_tile():
    a, b = randn(128, 96) * torch.logspace(-15, 15, 128, device=DEVICE)[:, None], randn(96, 64)
    exact = a.double() @ b.double()
    found = parts_matmul(split(a), split(b), tile=SMALL)
    assert_close(found, exact, torch.float32, plain=a @ b)
    allowed = 2.0**-20 * (a.double().abs() @ b.double().abs()) + 96 * 2.0**-38 * a.abs().max() * b.abs().max()
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_infinities_and_nan_stay_in_their_row(value):
    a, b = randn(140, 96), randn(96, 64)
    a[3, 5] = value
    found = parts_matmul(split(a), split(b), tile=SMALL)
    assert not found[3].isfinite().any()
    finite = torch.ones(140, dtype=torch.bool)
    finite[3] = False
    assert_close(found[finite], a[finite].double() @ b.double(), torch.float32, plain=a[finite] @ b)


def test_parts_of_elements_within_one_need_no_scale():
    a, b = randn(300, 96).tanh(), randn(96, 64)
    scaled = a * 2.0**14
    first = scaled.half()
    parts = Parts(torch.stack([first, (scaled - first.float()).half()], 1), None)
    for rows in (slice(0, 300), slice(128, 300)):
        found = parts_matmul(parts.rows(rows.start, rows.stop), split(b), tile=SMALL)
        assert_close(found, a[rows].double() @ b.double(), torch.float32, plain=a[rows] @ b)
    c = randn(300, 40)
    found = parts_matmul(parts.t(), split(c), tile=WIDE)
    assert_close(found, a.t().double() @ c.double(), torch.float32, plain=a.t() @ c)
