"""sLSTM on a GPU, at sizes of real use."""

import pytest
import torch

from subquad.kernels.slstm.reference import slstm_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.kernels.test_slstm import KEEP, TRITON, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(100, 39, 4, 32), (3, 300, 2, 64), (17, 20, 3, 21), (1, 5, 1, 5)])
def test_the_kernel_equals_the_recurrence_in_double_precision(sizes, dtype):
    for initial_state in (True, False):
        inputs = make_inputs(*sizes, initial_state=initial_state)
        assert_matches_reference(TRITON, slstm_reference, inputs, dtype=dtype, keep=KEEP, device="cuda")
