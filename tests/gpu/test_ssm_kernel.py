"""The filter of a state space model on a GPU: the claims of `tests/kernels/test_ssm_kernel.py` at realistic sizes."""

from functools import partial

import pytest
import torch

from subquad.kernels.ssm_kernel import ssm_kernel
from subquad.kernels.ssm_kernel import workloads as described
from subquad.suite.laws.accuracy import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TORCH = partial(ssm_kernel, backend="torch")
TRITON = partial(ssm_kernel, backend="triton")


def make_inputs(length, width, state=32):
    g = torch.Generator("cuda").manual_seed(length)
    return described.make_inputs({"T": length, "D": width, "N": state}, torch.float32, g)


def wide(inputs):
    def double(x):
        return x.to(torch.complex128 if x.is_complex() else torch.float64)

    return {name: double(x) if torch.is_tensor(x) else x for name, x in inputs.items()}


def results(op, inputs):
    """K and the gradient of every input tensor, from a gradient of K that is the same in every dtype."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if torch.is_tensor(x)}
    kernel = op(**(inputs | leaves))
    cotangent = torch.randn(kernel.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda")
    return [kernel, *torch.autograd.grad(kernel, list(leaves.values()), cotangent.to(kernel))]


@pytest.mark.parametrize(
    ("length", "width", "state"), [(1, 7, 32), (4097, 70, 32), (16384, 256, 32), (9000, 24, 100), (2**20, 3, 32)]
)
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_a_long_filter_equals_plain_pytorch_in_double_precision(length, width, state, discretization):
    inputs = make_inputs(length, width, state) | {"discretization": discretization}
    exact, plain, actual = results(TORCH, wide(inputs)), results(TORCH, inputs), results(TRITON, inputs)
    names = ["K", *(name for name, x in inputs.items() if torch.is_tensor(x))]
    for name, a, e, p in zip(names, actual, exact, plain, strict=True):
        assert_close(a, e, torch.float32, plain=p, what=name)


def test_real_systems_and_input_maps():
    g = torch.Generator("cuda").manual_seed(0)
    A = -torch.rand(40, 16, generator=g, device="cuda")
    B, C = (torch.randn(40, 16, generator=g, device="cuda") for _ in range(2))
    dt = 0.01 + 0.1 * torch.rand(40, generator=g, device="cuda")
    inputs = {"A": A, "B": B, "C": C, "dt": dt, "length": 3000, "conj_pairs": False}
    exact, plain, actual = results(TORCH, wide(inputs)), results(TORCH, inputs), results(TRITON, inputs)
    for name, a, e, p in zip(["K", "A", "B", "C", "dt"], actual, exact, plain, strict=True):
        assert_close(a, e, torch.float32, plain=p, what=name)


def test_memory_is_that_of_the_filter():
    inputs = make_inputs(2**18, 16)
    results(TRITON, inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(TRITON, inputs)
    # the filter, its cotangent, and a copy of that
    assert torch.cuda.max_memory_allocated() - before < 4 * (4 * 2**18 * 16)
