"""The gated linear unit on a GPU: the laws of `tests/kernels/test_swiglu.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.swiglu import swiglu
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(16384, 2736), (4099, 77), (1, 8192), (70000, 3)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(rows, width, dtype):
    x = torch.randn(rows, 2 * width, device="cuda", generator=torch.Generator("cuda").manual_seed(width)).to(dtype)
    ops = (partial(swiglu, backend=backend) for backend in ("triton", "torch"))
    assert_equals_plain_pytorch(*ops, {"x": x}, dtype)


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    x = torch.randn(2**18 + 1, 2**13, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(swiglu(x)[-3:], swiglu(x[-3:].clone()))
