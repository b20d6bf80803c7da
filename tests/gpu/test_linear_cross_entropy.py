"""The readout with its cross entropy on the device: accuracy, memory, CUDA graphs, determinism."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.linear_cross_entropy import aligned_linear, linear_cross_entropy
from subquad.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from subquad.kernels.linear_cross_entropy.triton import linear_cross_entropy_triton
from subquad.suite.laws.accuracy import assert_close, assert_matches_reference, run
from tests.kernels.test_linear_cross_entropy import make_inputs

SHAPES = [(300, 64, 32), (700, 8192, 64), (600, 16385, 32), (300, 50277, 32), (2000, 256, 96)]


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory):
    pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_equal_the_reference(shape, dtype):
    def op(x, weight, targets, bias):
        return linear_cross_entropy_triton(x, weight, targets, bias, -100, chunk_bytes=1 << 24)

    assert_matches_reference(
        op,
        linear_cross_entropy_reference,
        make_inputs(*shape),
        dtype=dtype,
        device="cuda",
        reference_device="cuda",
    )


def on_device(inputs, dtype=torch.float32):
    return {key: x.to("cuda", dtype) if x.is_floating_point() else x.cuda() for key, x in inputs.items()}


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_autocast_errs_at_most_twice_as_much_as_torch(shape):
    inputs = on_device(make_inputs(*shape, bias=False))
    exact_inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}

    def plain(x, weight, targets):
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def results(op, values):
        losses, gradients = run(op, values, [torch.ones((), device="cuda")])
        return [losses[0], *gradients.values()]

    exact = results(plain, exact_inputs)
    with torch.autocast("cuda", torch.bfloat16):
        plains, ours = results(plain, inputs), results(partial(linear_cross_entropy, backend="triton"), inputs)
    for actual, other, expected in zip(ours, plains, exact, strict=True):
        assert actual.dtype == torch.float32
        assert_close(actual, expected, torch.bfloat16, plain=other)


def test_the_logits_of_all_tokens_are_never_in_memory():
    x = torch.randn(16384, 64, device="cuda", requires_grad=True)
    weight = torch.randn(50277, 64, device="cuda", requires_grad=True)
    targets = torch.randint(50277, (16384,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        linear_cross_entropy(x, weight, targets).backward()
    assert torch.cuda.max_memory_allocated() - before < 400 << 20


@pytest.mark.parametrize("rows", [600, 64, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_aligned_readout_equals_the_plain_one(dtype, rows):
    x, weight = torch.randn(rows, 64, device="cuda", dtype=dtype), torch.randn(50277, 64, device="cuda", dtype=dtype)
    bias = torch.randn(50277, device="cuda", dtype=dtype)
    for b in (None, bias):
        logits = aligned_linear(x, weight, b)
        assert logits.shape == (rows, 50277)
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert_close(logits, exact, dtype, plain=F.linear(x, weight, b))
