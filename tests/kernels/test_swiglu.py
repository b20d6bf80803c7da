"""Claims about the gated linear unit; the accuracy rule is that of `suite.laws.accuracy`."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from kernels.swiglu import swiglu
from kernels.swiglu.reference import swiglu_reference
from suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_inputs(*size):
    return {"x": torch.randn(*size, generator=torch.Generator().manual_seed(size[-1]), dtype=torch.float64)}


@pytest.mark.parametrize("size", [(2, 3, 2), (5, 64), (300, 34), (9, 700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_results_and_gradients_are_those_of_the_equation(backend, dtype, size):
    op = partial(swiglu, backend=backend)
    assert_matches_reference(op, swiglu_reference, make_inputs(*size), dtype=dtype, device=DEVICE)
