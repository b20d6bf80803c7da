"""The inner decoding step of a Mamba block: kernels and plain PyTorch against the step as written."""

import pytest
import torch

from subquad.kernels.mamba_inner import mamba_inner_step
from subquad.kernels.mamba_inner.reference import mamba_inner_step_reference
from subquad.kernels.mamba_inner.workloads import KEEP, make_inputs, with_state
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(rows, width, states, rank, *, dtype=torch.float64, seed=3):
    shape = {"B": rows, "D": width, "N": states, "R": rank}
    return make_inputs(shape, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("taps", [2, 3])
def test_shorter_filters_and_no_gate(taps):
    given = inputs(2, 24, 4, 3)
    given |= {"conv_weight": given["conv_weight"][:, :taps], "window": given["window"][..., : taps - 1], "z": None}
    step = with_state(lambda **more: mamba_inner_step(**more, backend="triton"))
    assert_matches_reference(
        step, mamba_inner_step_reference, given, dtype=torch.bfloat16, keep=KEEP, device=DEVICE, grad=False
    )


@pytest.mark.parametrize(("width", "rank"), [(300, 3), (24, 260)])
def test_one_row_takes_parts_of_the_channels_or_many_outputs(width, rank):
    """The first has three parts, of which the last is not whole; the second is too wide for them."""
    step = with_state(lambda **more: mamba_inner_step(**more, backend="triton"))
    assert_matches_reference(
        step, mamba_inner_step_reference, inputs(1, width, 4, rank), dtype=torch.bfloat16, keep=KEEP, device=DEVICE,
        grad=False,
    )  # fmt: skip
