"""Causal softmax attention against its loop."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import attention, attention_reference
from suite.accuracy import assert_close, assert_matches_reference

B, H, K = 2, 3, 8


def make_inputs(length: int) -> dict:
    generator = torch.Generator().manual_seed(length)
    return {name: torch.randn(B, length, H, K, generator=generator, dtype=torch.float64) for name in "qkv"}


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_equals_the_loop(length, scale, dtype):
    inputs = make_inputs(length) | {"scale": scale}
    assert_matches_reference(attention, attention_reference, inputs, dtype=dtype)


def test_gradients_of_the_loop_are_those_of_finite_differences():
    leaves = [x[:1, :, :1, :2].clone().requires_grad_() for x in make_inputs(4).values()]
    assert torch.autograd.gradcheck(attention_reference, leaves)


@pytest.mark.parametrize("op", [attention, attention_reference])
def test_the_future_cannot_change_the_past(op):
    inputs = make_inputs(30)
    changed = {name: x.clone() for name, x in inputs.items()}
    for x in changed.values():
        x[:, 20:] += 1
    before, after = op(**inputs), op(**changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax((0, 2, 3)).min() > 0


def test_non_contiguous_inputs_are_read_as_they_are():
    inputs = make_inputs(40)
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert_close(attention(**strided), attention(**inputs), torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "triton"}, "no Triton path"),
        ({"backend": "cuda"}, "backend='cuda'"),
        ({"k": torch.zeros(B, 4, H, K + 1)}, r"all of one shape and T >= 1, got .*\[2, 4, 3, 9\]"),
        ({"q": torch.zeros(B, 4, H)}, r"must be \[B, T, H, K\]"),
    ],
)
def test_a_misfit_is_an_error_that_says_what_fits(change, message):
    with pytest.raises(ValueError, match=message):
        attention(**(make_inputs(4) | change))
