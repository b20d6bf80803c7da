"""Claims about the readout with its cross entropy; the accuracy rule is that of `suite.laws.accuracy`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from subquad.kernels.backend import record_operators
from subquad.kernels.linear_cross_entropy import aligned_linear, linear_cross_entropy
from subquad.kernels.linear_cross_entropy.chunked import chunk_rows, linear_cross_entropy_chunked
from subquad.kernels.linear_cross_entropy.padding import padded
from subquad.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from subquad.kernels.linear_cross_entropy.triton import Tuning, linear_cross_entropy_triton, softmax_gradient
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
slow = partial(pytest.param, marks=pytest.mark.slow)

SMALL_TILES = Tuning(whole=32, block=16)
TRITON = partial(linear_cross_entropy, backend="triton")


def in_chunks(x, weight, targets, bias=None, ignore_index=-100, *, op=linear_cross_entropy_chunked, **options):
    return op(x.flatten(0, -2), weight, targets.flatten(), bias, ignore_index, **options)


CHUNKED = partial(in_chunks, rows=7)
# a chunk has at least 256 tokens, so tests of several chunks have more
IN_TILES = partial(in_chunks, op=linear_cross_entropy_triton, chunk_bytes=1, tuning=SMALL_TILES)
BY_PARTS = partial(in_chunks, op=linear_cross_entropy_triton, chunk_bytes=1, by_parts=True)


def make_inputs(tokens, classes, width=8, *, bias=True, unlabelled=0.2, seed=0):
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (tokens,), generator=g)
    targets[torch.rand(tokens, generator=g) < unlabelled] = -100
    inputs = {
        "x": torch.randn(tokens, width, generator=g, dtype=torch.float64),
        "weight": torch.randn(classes, width, generator=g, dtype=torch.float64) * 2 * width**-0.5,
        "targets": targets,
    }
    if bias:
        inputs["bias"] = torch.randn(classes, generator=g, dtype=torch.float64)
    return inputs


def gradients(op, inputs, **options):
    """The loss and the gradients of x, weight and bias."""
    leaves = {key: x.clone().requires_grad_(x.is_floating_point()) for key, x in inputs.items()}
    loss = op(**leaves, **options)
    return loss, *torch.autograd.grad(loss, [x for x in leaves.values() if x.requires_grad])


def test_the_reference_is_that_of_torch():
    inputs = make_inputs(40, 13)
    expected = F.cross_entropy(F.linear(inputs["x"], inputs["weight"], inputs["bias"]), inputs["targets"])
    assert torch.allclose(linear_cross_entropy_reference(**inputs), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "classes"), [(1, 2), (7, 64), (20, 13), (65, 100)])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_equal_the_whole(tokens, classes, bias, dtype):
    inputs = make_inputs(tokens, classes, bias=bias, unlabelled=0.0 if tokens == 1 else 0.2)
    assert_matches_reference(CHUNKED, linear_cross_entropy_reference, inputs, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("tokens", "classes", "dtype"),
    [
        (300, 13, torch.bfloat16),
        (20, 32, torch.float32),
        (20, 33, torch.bfloat16),
        (20, 100, torch.float32),
        (1, 100, torch.float16),
        slow(520, 100, torch.bfloat16),
        slow(520, 48, torch.float16),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_the_kernel_equals_the_reference(tokens, classes, bias, dtype):
    inputs = make_inputs(tokens, classes, bias=bias, unlabelled=0.0 if tokens == 1 else 0.2)
    assert_matches_reference(IN_TILES, linear_cross_entropy_reference, inputs, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("tokens", "classes"), [(20, 33), (300, 100), (1, 128)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_parts_equal_the_reference(tokens, classes, bias):
    inputs = make_inputs(tokens, classes, width=20, bias=bias, unlabelled=0.0 if tokens == 1 else 0.2)
    assert_matches_reference(BY_PARTS, linear_cross_entropy_reference, inputs, device=DEVICE)


@pytest.mark.parametrize("op", [CHUNKED, IN_TILES, BY_PARTS, linear_cross_entropy])
def test_without_any_label_the_loss_is_nan_and_gradients_are_zero(op):
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in make_inputs(20, 33).items()}
    inputs["targets"].fill_(-100)
    loss, *rest = gradients(op, inputs)
    assert math.isnan(loss.item())
    assert not any(gradient.any() for gradient in rest)


@pytest.mark.parametrize("op", [CHUNKED, IN_TILES, BY_PARTS])
def test_large_logits_and_minus_infinity_do_not_overflow(op):
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in make_inputs(20, 100).items()}
    inputs["x"] *= 100
    inputs["bias"][:40] = -math.inf
    inputs["targets"] = inputs["targets"].clamp(min=40)
    plain = gradients(linear_cross_entropy_reference, inputs)
    for actual, expected in zip(gradients(op, inputs), plain, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-5)


def test_the_backward_pass_may_run_twice_and_scales_by_the_gradient_of_the_loss():
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in make_inputs(20, 33).items()}
    weight = inputs["weight"].requires_grad_()
    loss = IN_TILES(**inputs)
    (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (twice,) = torch.autograd.grad(2 * loss, weight)
    assert torch.equal(twice, 2 * once)


@pytest.mark.parametrize("op", [CHUNKED, IN_TILES, linear_cross_entropy])
def test_autocast_multiplies_in_bf16_and_gives_gradients_of_the_parameters_dtype(op):
    inputs = {
        key: x.to(DEVICE).float() if x.is_floating_point() else x.to(DEVICE) for key, x in make_inputs(40, 33).items()
    }
    with torch.autocast(DEVICE, torch.bfloat16):
        rounded = gradients(op, inputs)
        expected = gradients(linear_cross_entropy_reference, inputs)
    assert not torch.equal(rounded[0], op(**inputs))
    for actual, plain in zip(rounded, expected, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - plain).norm() < 2e-2 * plain.norm()


def test_on_a_cpu_the_operator_is_bitwise_what_torch_computes():
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in make_inputs(40, 33).items()}

    def plain(x, weight, targets, bias):
        return F.cross_entropy(F.linear(x, weight, bias).float(), targets)

    with record_operators() as used:
        ours = gradients(partial(linear_cross_entropy, backend="torch"), inputs)
    assert used == {"linear_cross_entropy": {"version": 1, "backend": "torch"}}
    assert all(torch.equal(a, b) for a, b in zip(ours, gradients(plain, inputs), strict=True))


def test_no_call_reads_a_tensor_value():
    """A fake tensor has no values, so `.item()` or a branch on a tensor would raise; a CUDA graph allows neither."""
    with FakeTensorMode():
        x, weight = torch.zeros(20, 4, requires_grad=True), torch.zeros(33, 4, requires_grad=True)
        CHUNKED(x, weight, torch.zeros(20, dtype=torch.long)).backward()
    assert weight.grad.shape == weight.shape


@pytest.mark.slow
def test_torch_compile_takes_the_plain_computation():
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in make_inputs(40, 33).items()}
    compiled = torch.compile(TRITON, backend="eager", dynamic=False, fullgraph=True)
    assert torch.equal(compiled(**inputs), linear_cross_entropy(**inputs, backend="torch"))


def test_losses_of_the_kernel_do_not_depend_on_the_gradient():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(5, 128, generator=g).to(DEVICE), torch.tensor([3, -100, 0, 69, 17], device=DEVICE)
    for tuning in (SMALL_TILES, Tuning()):
        before = logits.clone()
        losses, again = torch.empty(2, 5, device=DEVICE)
        softmax_gradient(before, targets, losses, 70, -100, False, tuning)
        assert torch.equal(before, logits)
        softmax_gradient(before, targets, again, 70, -100, True, tuning)
        assert torch.equal(losses, again)
        assert not torch.equal(before, logits)


def test_a_target_beyond_the_classes_makes_the_loss_nan():
    inputs = {key: x.float() if x.is_floating_point() else x for key, x in make_inputs(20, 33).items()}
    inputs["targets"][3] = 33
    assert math.isnan(IN_TILES(**inputs).item())


def test_chunks_are_even_multiples_within_the_limit():
    assert chunk_rows(16384, 50277, 2, 256 << 20) == 2560
    assert chunk_rows(16384, 32000, 2, 256 << 20) == 4096
    assert chunk_rows(8192, 8192, 4, 256 << 20) == 8192
    assert chunk_rows(100, 1 << 30, 2, 1) == 100
    for rows in (257, 1000, 16384):
        chunk = chunk_rows(rows, 50277, 2, 64 << 20)
        assert chunk % 256 == 0 or chunk == rows
        assert chunk * 50304 * 2 <= 64 << 20


def test_padding_adds_rows_of_zeros_and_leaves_aligned_weights_alone():
    weight = torch.randn(50, 3)
    assert padded(weight, torch.bfloat16).shape == (64, 3)
    assert torch.equal(padded(weight, torch.float32)[:50], weight)
    assert not padded(weight, torch.float32)[50:].any()
    aligned = torch.randn(128, 3)
    assert padded(aligned, torch.float32) is aligned


def test_an_aligned_readout_equals_the_plain_one():
    x, weight, bias = (
        torch.randn(300, 8, device=DEVICE),
        torch.randn(50, 8, device=DEVICE),
        torch.randn(50, device=DEVICE),
    )
    assert torch.allclose(aligned_linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
