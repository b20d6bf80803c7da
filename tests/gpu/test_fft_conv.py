"""The long convolution on a GPU: the laws of `tests/kernels/test_fft_conv.py` at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.kernels.fft_conv import fft_conv
from subquad.kernels.fft_conv import workloads as described
from subquad.kernels.fft_conv.reference import fft_conv_reference
from subquad.suite.laws.accuracy import assert_matches_reference
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.test_fft_conv import make_inputs as make_small_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TORCH = partial(fft_conv, backend="torch")
TRITON = partial(fft_conv, backend="triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make_inputs(batch, length, width, dtype=BF16, gates="gated", skip=True):
    """Inputs with time contiguous and filters like Hyena's, in float32."""
    g = torch.Generator("cuda").manual_seed(length)
    inputs = described.make_inputs({"B": batch, "T": length, "D": width, "gates": gates}, dtype, g)
    inputs = described.time_contiguous(inputs)
    return inputs | ({"D": torch.randn(width, generator=g, device="cuda")} if skip else {})


@pytest.mark.parametrize(
    ("dtype", "gates", "shape"),
    [
        (BF16, "plain", (8, 1024, 96)),
        (BF16, "gated", (128, 32, 512)),
        (BF16, "gated", (70, 130, 48)),
        (BF16, "gated", (16, 500, 40)),
        (BF16, "gated", (8, 2048, 96)),
        (BF16, "plain", (8, 8192, 40)),
        (BF16, "gated", (3, 1001, 40)),
        (BF16, "plain", (50, 4097, 24)),
        (BF16, "plain", (1, 16384, 24)),
        (BF16, "plain", (2, 20000, 16)),
        (BF16, "gated", (2, 40000, 8)),
        (FP32, "gated", (3, 1001, 40)),
        (FP32, "plain", (8, 1024, 16)),
        (FP32, "plain", (128, 512, 32)),
        (FP32, "gated", (40, 2048, 8)),
        (FP16, "plain", (2, 1024, 33)),
    ],
)
def test_a_long_sequence_equals_the_transform_in_double_precision(dtype, gates, shape):
    assert_equals_plain_pytorch(TRITON, TORCH, make_inputs(*shape, dtype=dtype, gates=gates), dtype)


@pytest.mark.parametrize("lags", [1, 100, 511, 512, 777, 3000, 9000])
@pytest.mark.parametrize(("dtype", "length"), [(BF16, 3000), (FP32, 1500)])
def test_any_filter_length(lags, dtype, length):
    inputs = make_inputs(2, length, 24, dtype=dtype, gates="plain", skip=False)
    filters = torch.randn(24, lags, generator=torch.Generator("cuda").manual_seed(lags), device="cuda")
    assert_equals_plain_pytorch(TRITON, TORCH, inputs | {"filter": filters / min(lags, length) ** 0.5}, dtype)


@pytest.mark.parametrize("length", [1, 65, 500])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_the_kernel_equals_the_loop(length, dtype):
    inputs = make_small_inputs(length, length)
    assert_matches_reference(TRITON, fft_conv_reference, inputs, dtype=dtype, device="cuda")


@pytest.mark.parametrize(("batch", "length"), [(2, 1000), (1, 4096)])
def test_the_future_cannot_change_the_past_of_products(batch, length):
    inputs = make_inputs(batch, length, 64)
    whole = TRITON(**inputs)
    changed = inputs["u"].clone()
    changed[:, 700:] += 1
    y = TRITON(**(inputs | {"u": changed}))
    assert torch.equal(y[:, :700], whole[:, :700])
    assert (y[:, 700:] - whole[:, 700:]).abs().max() > 0.1
