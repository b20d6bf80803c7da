"""Triton's interpreter, in which kernels are tested without a GPU, computes what a GPU does."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _cast_kernel(x, y, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(y + o, tl.load(x + o).to(tl.bfloat16))


def test_a_cast_to_bfloat16_rounds_to_the_nearest():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.cat([torch.randn(252), torch.tensor([0.0, -0.0, torch.inf, 3.3e38])]).to(device)
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


SCALE = tl.constexpr(0.5)


@triton.jit
def _half(b_x):
    # the product is a constexpr of a tensor in the interpreter
    return SCALE * b_x


@triton.jit
def _branch_kernel(x, y):
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + i) + 1.0)
    b_y = _half(tl.load(x + i))
    for j in range(i % 3):
        b_y += _half(tl.load(x + i) * (j + 1))
    if b_y > 2.0:
        b_y = -b_y
    tl.store(y + i, b_y)


def test_programs_that_branch_by_other_values_compute_their_own_and_store_once():
    """What a program did is repeated for others, and for later launches, with their own values."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for start in (0.0, 2.0):
        x, y = start + torch.arange(8.0, device=device) / 4, torch.full((8,), torch.nan, device=device)
        wanted = x + 1
        _branch_kernel[(8,)](x, y)
        assert torch.equal(x, wanted)
        # (1 + the sum of 1 to i % 3) / 2
        wanted = wanted * torch.tensor([0.5, 1.0, 2.0], device=device)[torch.arange(8, device=device) % 3]
        assert torch.equal(y, torch.where(wanted > 2, -wanted, wanted))
