"""The selective scan with complex states on a GPU, at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.selective_scan import selective_scan
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.gpu.test_selective_scan import APPROXIMATE
from tests.gpu.test_selective_scan import make_inputs as make_real_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDE = ("A", "D", "dt_bias", "B", "C", "initial_state")
TORCH = partial(selective_scan, return_final_state=True, backend="torch")
TRITON = partial(selective_scan, return_final_state=True, backend="triton")


def make_inputs(batch, length, width, state=8, dtype=torch.bfloat16, *, constant=False):
    """Step sizes as Mamba's, eigenvalues -1/2 + n i."""
    inputs = make_real_inputs(batch, length, width, 2 * state, dtype, constant=constant)
    imaginary = torch.arange(state, device="cuda", dtype=torch.float32)
    inputs["A"] = torch.complex(torch.tensor(-0.5, device="cuda"), imaginary).repeat(width, 1)
    return inputs | {
        name: torch.view_as_complex(inputs[name].float().unflatten(-1, (-1, 2)).contiguous())
        for name in ("B", "C", "initial_state")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "length", "width", "state", "constant"),
    [(4, 2048, 768, 8, False), (3, 1000, 77, 16, False), (1, 9001, 33, 5, False), (2, 600, 64, 8, True)],
)
def test_a_long_sequence_equals_plain_pytorch_in_double_precision(batch, length, width, state, constant, dtype):
    inputs = make_inputs(batch, length, width, state, dtype, constant=constant)
    floors = dict.fromkeys(("output 1", *WIDE), APPROXIMATE) if dtype != torch.float32 else {}
    assert_equals_plain_pytorch(TRITON, TORCH, inputs, floors=floors)
