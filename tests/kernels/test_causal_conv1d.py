"""Claims about the short causal convolution; the accuracy rule is that of `suite.accuracy`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.causal_conv1d.reference import causal_conv1d_reference
from suite.accuracy import assert_matches_reference


def make_inputs(length, taps, *, bias=True, initial_state=True, activation="silu"):
    g = torch.Generator().manual_seed(length)
    inputs = {
        "x": torch.randn(2, length, 6, generator=g, dtype=torch.float64),
        "weight": torch.randn(6, taps, generator=g, dtype=torch.float64),
        "activation": activation,
    }
    if bias:
        inputs["bias"] = torch.randn(6, generator=g, dtype=torch.float64)
    if initial_state:
        inputs["initial_state"] = torch.randn(2, 6, taps - 1, generator=g, dtype=torch.float64)
    return inputs


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shifted_products_equal_the_loop(length, taps, dtype):
    op = partial(causal_conv1d, return_final_state=True)
    assert_matches_reference(op, causal_conv1d_reference, make_inputs(length, taps), dtype=dtype)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_without_bias_and_state_equals_torch_conv1d(activation):
    inputs = make_inputs(30, 4, bias=False, initial_state=False, activation=activation)
    assert_matches_reference(partial(causal_conv1d, return_final_state=True), causal_conv1d_reference, inputs)
    x = F.pad(inputs["x"].transpose(1, 2), (3, 0))
    expected = F.conv1d(x, inputs["weight"].unsqueeze(1), groups=6).transpose(1, 2)
    expected = F.silu(expected) if activation else expected
    torch.testing.assert_close(causal_conv1d(**inputs), expected, rtol=1e-12, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    inputs = make_inputs(5, 3)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight", "bias", "initial_state")]
    for function in (partial(causal_conv1d, return_final_state=True), causal_conv1d_reference):
        assert torch.autograd.gradcheck(
            lambda x, w, b, s, f=function: f(x, w, b, activation="silu", initial_state=s), leaves
        )


@pytest.mark.parametrize("split", [1, 2, 20])
def test_passing_the_state_equals_the_whole(split):
    inputs = make_inputs(21, 4)
    whole, final = causal_conv1d(**inputs, return_final_state=True)
    first, state = causal_conv1d(**(inputs | {"x": inputs["x"][:, :split]}), return_final_state=True)
    second, state = causal_conv1d(
        **(inputs | {"x": inputs["x"][:, split:], "initial_state": state}), return_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(state, final)


def test_steps_equal_the_whole():
    inputs = make_inputs(12, 4)
    whole, final = causal_conv1d(**inputs, return_final_state=True)
    state = inputs["initial_state"].clone()
    for t in range(12):
        y = causal_conv1d_step(inputs["x"][:, t], inputs["weight"], inputs["bias"], state, activation="silu")
        torch.testing.assert_close(y, whole[:, t], rtol=1e-12, atol=1e-12)
    assert torch.equal(state, final)


def test_future_inputs_cannot_change_the_past():
    inputs = make_inputs(30, 4)
    changed = inputs["x"].clone()
    changed[:, 20:] += 1
    whole, y = causal_conv1d(**inputs), causal_conv1d(**(inputs | {"x": changed}))
    assert torch.equal(y[:, :20], whole[:, :20])
    assert not torch.equal(y[:, 20], whole[:, 20])


def test_wrong_arguments_are_named():
    inputs = make_inputs(8, 4)
    with pytest.raises(ValueError, match=r"W in 2..4, got \[6, 9\]; use fft_conv"):
        causal_conv1d(inputs["x"], torch.zeros(6, 9))
    with pytest.raises(ValueError, match="no Triton path yet"):
        causal_conv1d(**inputs, backend="triton")
