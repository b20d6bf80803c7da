"""sLSTM on a GPU, at sizes of real use."""

import pytest
import torch

from subquad.kernels.backend import record_operators
from subquad.kernels.slstm import slstm
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


def test_auto_takes_the_kernels_with_a_gradient_and_without():
    inputs = {name: x.to("cuda", torch.float32) for name, x in make_inputs(20, 12, 3, 40).items()}
    for needed in (False, True):
        inputs["recurrent"].requires_grad_(needed)
        with record_operators() as used:
            slstm(**inputs)
        assert used["slstm"]["backend"] == "triton"
