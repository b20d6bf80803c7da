"""Rotary positions on a GPU: the laws of `tests/kernels/test_rotary.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.rotary import rotary
from tests.gpu.real_sizes import assert_equals_plain_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "length", "heads", "size"), [(2, 2048, 16, 128), (1, 700, 4, 256), (130, 1, 3, 6)])
def test_large_inputs_equal_plain_pytorch_in_double_precision(batch, length, heads, size, dtype):
    g = torch.Generator("cuda").manual_seed(size)
    # queries and keys are parts of one projection
    q, k = torch.randn(batch, length, 2, heads, size, generator=g, device="cuda").to(dtype).unbind(2)
    angle = torch.arange(length + 3, device="cuda")[:, None] * 10.0 ** -torch.arange(size // 2, device="cuda")
    time = torch.randint(length + 3, (batch, length), generator=g, device="cuda")
    inputs = {"q": q, "k": k}
    tables = {torch.float64: (angle.cos().double(), angle.sin().double()), dtype: (angle.cos(), angle.sin())}

    def op(q, k, backend):
        return rotary(q, k, *tables[q.dtype], time, backend=backend)

    assert_equals_plain_pytorch(*(partial(op, backend=backend) for backend in ("triton", "torch")), inputs, dtype)
