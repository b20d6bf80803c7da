"""The squared rectified linear unit on a GPU: its laws at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.squared_relu import squared_relu
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(16384, 2736), (4099, 77), (1, 8192), (70000, 3)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(rows, width, dtype):
    x = torch.randn(rows, width, device="cuda", generator=torch.Generator("cuda").manual_seed(width)).to(dtype)
    ops = (partial(squared_relu, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, {"x": x}, dtype)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    x = torch.randn(2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(squared_relu(x)[-3:], squared_relu(x[-3:].clone()))
