"""Triton's interpreter, in which kernels are tested without a GPU, rounds and multiplies as a GPU does."""

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
