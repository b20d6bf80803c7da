"""Rotary positions on a GPU: the laws of `tests/kernels/test_rotary.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.rotary import rotary
from subquad.suite.laws.accuracy import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def results(op, q, k, *tables):
    leaves = [q.detach().requires_grad_(), k.detach().requires_grad_()]
    outputs = op(*leaves, *tables)
    cotangents = [torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).bfloat16().to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, cotangents)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "length", "heads", "size"), [(2, 2048, 16, 128), (1, 700, 4, 256), (130, 1, 3, 6)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(batch, length, heads, size, dtype):
    g = torch.Generator("cuda").manual_seed(size)
    # queries and keys are parts of one projection
    q, k = torch.randn(batch, length, 2, heads, size, generator=g, device="cuda").to(dtype).unbind(2)
    angle = torch.arange(length + 3, device="cuda")[:, None] * 10.0 ** -torch.arange(size // 2, device="cuda")
    time = torch.randint(length + 3, (batch, length), generator=g, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    exact = results(partial(rotary, backend="torch"), q.double(), k.double(), cos.double(), sin.double(), time)
    plain = results(partial(rotary, backend="torch"), q, k, cos, sin, time)
    for a, e, p in zip(results(partial(rotary, backend="triton"), q, k, cos, sin, time), exact, plain, strict=True):
        assert a.dtype == dtype
        assert_close(a, e, dtype, plain=p)
