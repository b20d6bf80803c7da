"""Operators on more than 2^31 elements: the end, whose offsets do not fit 32 bits, is that of a short call."""

import pytest
import torch

from subquad.kernels.rwkv6_inputs import rwkv6_inputs
from subquad.kernels.rwkv7_inputs import rwkv7_inputs
from subquad.kernels.swiglu import swiglu
from subquad.kernels.token_shift import token_shift

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("poisoned_memory")]


def test_more_than_two_to_the_31_elements_of_the_inputs_of_rwkv6():
    if torch.cuda.mem_get_info()[0] < 70e9:
        pytest.skip("needs 70 GB that no other process uses")
    x = torch.randn(1, 2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters = [torch.ones(2**13, device="cuda") for _ in range(2)]
    q, k, v, log_decay, own = rwkv6_inputs(*[x] * 4, *parameters, head_dim=64, backend="triton")
    last = x[:, -4:].detach().requires_grad_()
    end = rwkv6_inputs(*[last] * 4, *parameters, head_dim=64, backend="triton")
    for a, b in zip((q, k, v, log_decay, own), end, strict=True):
        assert torch.equal(a[:, -4:], b)
    del q, k, v, log_decay, end
    (dx,) = torch.autograd.grad(own, x, torch.ones((), device="cuda").expand(own.shape))
    own = rwkv6_inputs(*[last] * 4, *parameters, head_dim=64, backend="triton").own
    assert torch.equal(dx[:, -4:], torch.autograd.grad(own, last, torch.ones_like(own))[0])


def test_more_than_two_to_the_31_elements_of_the_inputs_of_rwkv7():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB that no other process uses")
    x = torch.randn(1, 2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    parameters = [torch.ones(2**13, device="cuda") for _ in range(5)]
    whole = rwkv7_inputs(*[x] * 4, *parameters, head_dim=64, backend="triton")
    end = rwkv7_inputs(*[x[:, -3:].clone()] * 4, *parameters, head_dim=64, backend="triton")
    for x, y in zip(whole, end, strict=True):
        assert torch.equal(x[:, -y.shape[1] :], y)


def test_more_than_two_to_the_31_elements_of_shifted_tokens():
    x = torch.randn(1, 2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mu = torch.rand(1, 2**13, device="cuda")
    (y,) = token_shift(x, mu, backend="triton")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    end = x[:, -4:].detach().requires_grad_()
    (y_end,) = token_shift(end, mu, initial_state=x[:, -5].detach(), backend="triton")
    assert torch.equal(y[:, -4:], y_end)
    assert torch.equal(dx[:, -4:], torch.autograd.grad(y_end, end, y_end.detach())[0])


def test_more_than_two_to_the_31_elements_of_deltas_of_shifted_tokens():
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


def test_more_than_two_to_the_31_elements_of_gated_linear_units():
    x = torch.randn(2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(swiglu(x)[-3:], swiglu(x[-3:].clone()))
