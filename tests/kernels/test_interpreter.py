"""Triton's interpreter, in which kernels are tested without a GPU, computes what a GPU does."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _cast_kernel(x, y, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(y + o, tl.load(x + o).to(tl.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cast_to_bfloat16_rounds_to_the_nearest(dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.cat([torch.randn(252), torch.tensor([0.0, -0.0, torch.inf, 3.3e38])]).to(device, dtype)
    y = torch.empty(256, dtype=torch.bfloat16, device=device)
    _cast_kernel[(1,)](x, y, SIZE=256)
    assert torch.equal(y, x.bfloat16())


@triton.jit
def _dot_kernel(x, y, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    b_x = tl.load(x + o)
    tl.store(y + o, tl.dot(b_x, b_x))


def test_a_product_of_bfloat16_matrices_multiplies_their_values():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(16, 16).to(device, torch.bfloat16)
    y = torch.empty(16, 16, device=device)
    _dot_kernel[(1,)](x, y, SIZE=16)
    torch.testing.assert_close(y, x.float() @ x.float())


@triton.jit
def _follow(a, x, b, y):
    """The map h -> a h + x followed by h -> b h + y, which do not commute."""
    return b * a, b * x + y


@triton.jit
def _combine_kernel(a, x, scanned, reduced, ROWS: tl.constexpr, N: tl.constexpr, REVERSE: tl.constexpr):
    o = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    b_a, b_x = tl.load(a + o), tl.load(x + o)
    _, b_y = tl.associative_scan((b_a, b_x), 0, _follow, reverse=REVERSE)
    tl.store(scanned + o, b_y)
    _, b_z = tl.reduce((b_a, b_x), 0, _follow)
    tl.store(reduced + tl.arange(0, N), b_z)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_and_reductions_call_a_function_of_the_kernel_in_the_order_of_the_rows(reverse):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, x = torch.rand(2, 8, 4, device=device)
    scanned, reduced = torch.full_like(x, torch.nan), torch.full_like(x[0], torch.nan)
    _combine_kernel[(1,)](a, x, scanned, reduced, ROWS=8, N=4, REVERSE=reverse)
    expected, h = torch.empty_like(x), torch.zeros_like(x[0])
    for t in reversed(range(8)) if reverse else range(8):
        h = expected[t] = a[t] * h + x[t]
    torch.testing.assert_close(scanned, expected)
    h = torch.zeros_like(h)
    for t in range(8):
        h = a[t] * h + x[t]
    torch.testing.assert_close(reduced, h)
