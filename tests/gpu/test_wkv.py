"""WKV on a GPU, at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.wkv import wkv
from subquad.kernels.wkv.workloads import WORKLOAD
from subquad.suite.laws.accuracy import FLOOR
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.test_wkv import KEEP, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TORCH = partial(wkv, return_final_state=True, backend="torch")
TRITON = partial(wkv, return_final_state=True, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "length", "width"), [(4, 1000, 768), (1, 9001, 77), (2, 64, 33), (8, 500, 1)])
def test_the_kernel_equals_plain_pytorch_in_double_precision(batch, length, width, dtype):
    inputs = {
        name: x.to("cuda", torch.float32 if name in KEEP else dtype)
        for name, x in make_inputs(batch, length, width).items()
    }
    # forward keeps the denominator as a logarithm in float32 (README)
    floors = {n: FLOOR[torch.float32 if n in KEEP else dtype] * times for n, times in WORKLOAD.floors.items()}
    assert_equals_plain_pytorch(TRITON, TORCH, inputs, floors=floors)
