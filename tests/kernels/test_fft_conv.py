"""Claims about the long convolution; the accuracy rule is that of `suite.accuracy`."""

from __future__ import annotations

import pytest
import torch

from kernels.fft_conv import fft_conv
from kernels.fft_conv.chunked import fast_length
from kernels.fft_conv.reference import fft_conv_reference
from suite.accuracy import assert_matches_reference


def make_inputs(length, filter_length, *, gates=True, skip=True):
    g = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    inputs = {"u": randn(2, length, 6), "filter": randn(6, filter_length) / min(length, filter_length) ** 0.5}
    if skip:
        inputs["D"] = randn(6)
    if gates:
        inputs |= {"gate_in": randn(2, length, 6), "gate_out": randn(2, length, 6)}
    return inputs


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transform_equals_the_loop(length, dtype):
    assert_matches_reference(fft_conv, fft_conv_reference, make_inputs(length, length), dtype=dtype)


@pytest.mark.parametrize("filter_length", [1, 7, 100])
def test_any_filter_length_without_options_equals_the_loop(filter_length):
    inputs = make_inputs(40, filter_length, gates=False, skip=False)
    assert_matches_reference(fft_conv, fft_conv_reference, inputs)


def test_gradients_agree_with_finite_differences():
    inputs = make_inputs(5, 4)
    leaves = [value.requires_grad_() for value in inputs.values()]
    for function in (fft_conv, fft_conv_reference):
        assert torch.autograd.gradcheck(lambda u, k, D, a, b, f=function: f(u, k, D=D, gate_in=a, gate_out=b), leaves)


def test_future_inputs_change_the_past_by_rounding_only():
    inputs = make_inputs(60, 60)
    whole = fft_conv(**inputs)
    for name in ("u", "gate_in", "gate_out"):
        changed = inputs[name].clone()
        changed[:, 40:] += 1
        y = fft_conv(**(inputs | {name: changed}))
        torch.testing.assert_close(y[:, :40], whole[:, :40], rtol=0, atol=1e-12)
        assert (y[:, 40:] - whole[:, 40:]).abs().max() > 0.1


def test_fast_lengths_are_the_smallest_even_smooth_ones():
    def smooth(n):
        for p in (2, 3, 5):
            while n % p == 0:
                n //= p
        return n == 1

    for minimum in [*range(1, 700), 4095, 16385, 2**20 + 1]:
        expected = next(n for n in range(minimum + minimum % 2, 2 * minimum + 3) if n % 2 == 0 and n and smooth(n))
        assert fast_length(minimum) == expected


def test_wrong_arguments_are_named():
    inputs = make_inputs(8, 8)
    with pytest.raises(ValueError, match=r"filter must be \[D, L\] with D=6"):
        fft_conv(inputs["u"], torch.zeros(5, 8))
    with pytest.raises(ValueError, match="no Triton path yet"):
        fft_conv(**inputs, backend="triton")
