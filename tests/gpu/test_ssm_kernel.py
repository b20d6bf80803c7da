"""The filter of a state space model on a GPU: the claims of `tests/kernels/test_ssm_kernel.py` at realistic sizes."""

from functools import partial

import pytest
import torch

from subquad.kernels.ssm_kernel import ssm_kernel
from subquad.kernels.ssm_kernel import workloads as described
from tests.gpu.real_sizes import assert_equals_plain_pytorch, memory_taken

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TORCH = partial(ssm_kernel, backend="torch")
TRITON = partial(ssm_kernel, backend="triton")


def make_inputs(length, width, state=32):
    g = torch.Generator("cuda").manual_seed(length)
    return described.make_inputs({"T": length, "D": width, "N": state}, torch.float32, g)


@pytest.mark.parametrize(
    ("length", "width", "state"), [(1, 7, 32), (4097, 70, 32), (16384, 256, 32), (9000, 24, 100), (2**20, 3, 32)]
)
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_a_long_filter_equals_plain_pytorch_in_double_precision(length, width, state, discretization):
    inputs = make_inputs(length, width, state) | {"discretization": discretization}
    assert_equals_plain_pytorch(TRITON, TORCH, inputs, torch.float32)


def test_real_systems_and_input_maps():
    g = torch.Generator("cuda").manual_seed(0)
    A = -torch.rand(40, 16, generator=g, device="cuda")
    B, C = (torch.randn(40, 16, generator=g, device="cuda") for _ in range(2))
    dt = 0.01 + 0.1 * torch.rand(40, generator=g, device="cuda")
    inputs = {"A": A, "B": B, "C": C, "dt": dt, "length": 3000, "conj_pairs": False}
    assert_equals_plain_pytorch(TRITON, TORCH, inputs, torch.float32)


def test_memory_is_that_of_the_filter():
    # the filter, its cotangent, and a copy of that
    assert memory_taken(TRITON, make_inputs(2**18, 16)) < 4 * (4 * 2**18 * 16)
