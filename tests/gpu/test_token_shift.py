"""The token shift on a GPU: its equation at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.token_shift import token_shift
from subquad.kernels.token_shift.reference import token_shift_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.test_token_shift import make_inputs

KEEP = ("mu",)


def cast(inputs, dtype):
    return {name: x.to("cuda", dtype) if torch.is_tensor(x) else x for name, x in inputs.items()}


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("size", [(2, 300, 2048, 5), (3, 77, 185, 6), (1, 1, 64, 1), (40, 1, 520, 2), (2, 70, 8, 3)])
def test_the_kernels_equal_the_equation_in_double_precision(size, delta, dtype):
    inputs = make_inputs(*size, delta=delta, initial=delta)
    op = partial(token_shift, backend="triton")
    assert_matches_reference(op, token_shift_reference, inputs, dtype=dtype, keep=KEEP, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("uses", "delta"), [(5, True), (6, False), (1, False)])
def test_a_layer_equals_plain_pytorch_in_double_precision(uses, delta, dtype):
    inputs = cast(make_inputs(8, 2048, 1024, uses, delta=delta, initial=False), dtype)
    inputs["mu"] = inputs["mu"].float()
    ops = (partial(token_shift, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, inputs, dtype)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    x = torch.randn(1, 2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mu = torch.rand(1, 2**13, device="cuda")
    (y,) = token_shift(x, mu, backend="triton")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    end = x[:, -4:].detach().requires_grad_()
    (y_end,) = token_shift(end, mu, initial_state=x[:, -5].detach(), backend="triton")
    assert torch.equal(y[:, -4:], y_end)
    assert torch.equal(dx[:, -4:], torch.autograd.grad(y_end, end, y_end.detach())[0])


@pytest.mark.large
def test_more_than_two_to_the_31_elements_of_delta():
    x = torch.randn(1, 2**17 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    mu = torch.rand(2, 2**13, device="cuda")
    delta = torch.randn(2, *x.shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ys = token_shift(x, mu, delta, backend="triton")
    (ddelta,) = torch.autograd.grad(ys[1].sum(), delta)
    end = delta[:, :, -4:].detach().requires_grad_()
    ys_end = token_shift(x[:, -4:], mu, end, initial_state=x[:, -5], backend="triton")
    for y, y_end in zip(ys, ys_end, strict=True):
        assert torch.equal(y[:, -4:], y_end)
    assert torch.equal(ddelta[:, :, -4:], torch.autograd.grad(ys_end[1].sum(), end)[0])
