"""The gated linear unit on a GPU: the laws of `tests/kernels/test_swiglu.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.swiglu import swiglu
from subquad.suite.laws.accuracy import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def results(op, x):
    leaf = x.detach().requires_grad_()
    y = op(leaf)
    cotangent = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).bfloat16().to(y)
    return [y, *torch.autograd.grad(y, leaf, cotangent)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(16384, 2736), (4099, 77), (1, 8192), (70000, 3)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(rows, width, dtype):
    x = torch.randn(rows, 2 * width, device="cuda", generator=torch.Generator("cuda").manual_seed(width)).to(dtype)
    exact, plain = (results(partial(swiglu, backend="torch"), given) for given in (x.double(), x))
    for a, e, p in zip(results(partial(swiglu, backend="triton"), x), exact, plain, strict=True):
        assert_close(a, e, dtype, plain=p)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    x = torch.randn(2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(swiglu(x)[-3:], swiglu(x[-3:].clone()))


def test_automatic_choice_is_triton():
    x = torch.ones(3, 8, device="cuda")
    for given, backend in ((x, "triton"), (x.double(), "torch")):
        with record_operators() as used:
            swiglu(given)
        assert used["swiglu"]["backend"] == backend
