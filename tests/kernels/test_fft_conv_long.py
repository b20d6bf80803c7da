"""Claims about gradients of the long convolution by transforms of whole sequences (`suite.laws.accuracy`).

`test_fft_conv_spectra.py` has those about its results.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from subquad.kernels.fft_conv.triton.epilogue import Epilogue
from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.fft_conv.triton.inner_stage import conv_long_backward, long_taps
from subquad.kernels.fft_conv.triton.plan import TUNING, has_kernels, takes_long
from subquad.suite.laws.accuracy import assert_close
from tests.kernels.test_fft_conv_spectra import draw, exact_conv

slow = partial(pytest.param, marks=pytest.mark.slow)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITHOUT_ROUNDING = 1.4e-3
"""Relative error, root mean square, that transforms in float16 may make; rounding y to bfloat16 adds 1.7e-3."""


def gradients(x, dy, taps):
    """The gradients of x, before it is rounded, and of the taps."""
    length, lags = x.shape[1], min(x.shape[1], taps.shape[1])
    x, dy = x.to(DEVICE), dy.to(DEVICE)
    spectra = long_taps(taps.to(DEVICE), length, lags)
    outputs, dtaps = conv_long_backward(x, Gated(dy, dy, None), spectra, Epilogue(with_plain=True), lags)
    return outputs.plain.cpu(), dtaps.cpu()


def exact_taps_gradient(x, dy, lags):
    size = 2 * x.shape[1]
    x_hat, g_hat = (torch.fft.rfft(v.double().transpose(1, 2), n=size) for v in (x, dy))
    return torch.fft.irfft((x_hat.conj() * g_hat).sum(0), n=size)[:, :lags]


@pytest.mark.parametrize(
    ("batch", "length", "lags"), [(2, 16, 1), (1, 2512, 2100), slow(3, 4096, 4096), slow(2, 34000, 34000)]
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_lose_a_tenth_of_a_percent(batch, length, lags):
    (x, taps), (dy, _) = draw(batch, length, 2, lags), draw(batch, length, 2, lags + 1)
    dx, dtaps = gradients(x, dy, taps)
    assert_close(dx, exact_conv(dy, taps, True), torch.bfloat16, floor=WITHOUT_ROUNDING)
    assert_close(dtaps, exact_taps_gradient(x, dy, lags), torch.bfloat16, floor=WITHOUT_ROUNDING)


@pytest.mark.parametrize(("first", "second"), [(17, 4090), slow(0, 0), slow(2047, 2048), slow(3000, 100)])
def test_a_pair_of_impulses_reaches_its_lag_and_no_other(first, second):
    x, dy = torch.zeros(2, 1, 1, 4096)
    x[0, 0, first], dy[0, 0, second] = 1.0, 1.0
    _, dtaps = gradients(x.bfloat16().transpose(1, 2), dy.bfloat16().transpose(1, 2), torch.ones(1, 4096))
    expected = torch.zeros(1, 4096)
    if second >= first:
        expected[0, second - first] = 1.0
    torch.testing.assert_close(dtaps, expected, rtol=0, atol=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-18, 1e6])
def test_the_size_of_nothing_matters(scale):
    """Beyond the range of float16 (6e-8 to 7e4), and for sequences and channels that differ in size."""
    (x, taps), (dy, _) = draw(2, 2512, 2, 2512), draw(2, 2512, 2, 2511)
    x, dy, taps = (x.float() * scale).bfloat16(), (dy.float() * scale).bfloat16(), taps.clone()
    x[1] *= 1e-6
    dy[1] *= 1e6
    taps[1] *= 1e8
    dx, dtaps = gradients(x, dy, taps)
    exact_dx = exact_conv(dy, taps, True)
    for i in range(2):
        for j in range(2):
            assert_close(dx[i, :, j], exact_dx[i, :, j], torch.bfloat16, floor=WITHOUT_ROUNDING)
    assert_close(dtaps, exact_taps_gradient(x, dy, 2512), torch.bfloat16, floor=WITHOUT_ROUNDING)


def test_zeros_have_gradients_of_zero():
    x, taps = draw(1, 2512, 1, 2512)
    assert not any(result.any() for result in gradients(x, 0 * x, taps))


@pytest.mark.parametrize(
    ("length", "lags", "dtype", "expected"),
    [
        (16384, 16384, torch.bfloat16, False),
        (16385, 16385, torch.bfloat16, True),
        (16385, 100, torch.bfloat16, False),
        (2**18, 2**18, torch.bfloat16, True),
        (2**18 + 1, 2**18, torch.bfloat16, False),
        (40000, 40000, torch.float32, False),
    ],
)
def test_what_transforms_of_whole_sequences_take(length, lags, dtype, expected):
    assert takes_long(length, dtype, lags, TUNING) is expected
    assert has_kernels(length, dtype, lags) is (expected or lags == 100 or length == 16384)
