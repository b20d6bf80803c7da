"""The inputs of RWKV-7's delta rule on a GPU: the laws of `tests/kernels/test_rwkv7_inputs.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.rwkv7_inputs import rwkv7_inputs
from subquad.kernels.rwkv7_inputs.reference import rwkv7_inputs_reference
from subquad.kernels.rwkv7_inputs.workloads import PARAMETERS as KEEP
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.gated import on_device
from tests.kernels.test_rwkv7_inputs import POSITIONS, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 300, 32, 64), (3, 77, 5, 37), (1, 1, 1, 64), (1, 129, 2, 256), (2, 70, 3, 8)])
def test_the_kernels_equal_the_equations_in_double_precision(sizes, dtype):
    op = partial(rwkv7_inputs, backend="triton")
    assert_matches_reference(op, rwkv7_inputs_reference, make_inputs(*sizes), dtype=dtype, keep=KEEP, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_plain_pytorch_in_double_precision(dtype):
    inputs = on_device(make_inputs(8, 2048, 32, 64))
    inputs |= {name: inputs[name].to(dtype) for name in POSITIONS}
    ops = (partial(rwkv7_inputs, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, inputs, dtype)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB that no other process uses")
    x = torch.randn(1, 2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    parameters = [torch.ones(2**13, device="cuda") for _ in KEEP]
    whole = rwkv7_inputs(*[x] * 4, *parameters, head_dim=64, backend="triton")
    end = rwkv7_inputs(*[x[:, -3:].clone()] * 4, *parameters, head_dim=64, backend="triton")
    for x, y in zip(whole, end, strict=True):
        assert torch.equal(x[:, -y.shape[1] :], y)
