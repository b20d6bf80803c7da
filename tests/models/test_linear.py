"""Linear maps with gradients of their own have those of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from subquad.kernels.autograd import Function
from subquad.kernels.layout import empty_in_rows, slices_of_one, whole_rows
from subquad.kernels.rotary import rotary
from subquad.kernels.swiglu.triton import SiluParts
from subquad.models.parts import linear as linear_maps
from subquad.models.parts.linear import (
    Linear,
    LinearMap,
    PartsMap,
    SharedInput,
    Split,
    SplitLinear,
    Unbind,
    split_linear,
)
from subquad.suite.laws.accuracy import assert_matches_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_gradients_of_a_split_linear_map_agree_with_finite_differences():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: SplitLinear.apply(x, w, (2, 4)), (x, weight))
    # a part without a gradient
    assert torch.autograd.gradcheck(lambda x, w: SplitLinear.apply(x, w, (2, 1, 3))[1], (x, weight))
    linear = nn.Linear(5, 6, bias=False, dtype=torch.float64)
    for part, other in zip(split_linear(linear, x, (2, 4)), SplitLinear.apply(x, linear.weight, (2, 4)), strict=True):
        assert torch.equal(part, other)


@pytest.mark.parametrize("join", [False, True])
def test_maps_of_one_input_have_the_gradients_of_torch(join, monkeypatch):
    """One wide map and three narrow ones, whose 11 outputs are padded, and one of which has no gradient."""
    monkeypatch.setattr(linear_maps, "NARROW", 8)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(size, 5, dtype=torch.float64, requires_grad=True) for size in (9, 6, 4, 1)]
    results = SharedInput.apply(x, join, *weights)
    cotangents = [torch.randn_like(y) for y in results]
    for found, weight in zip(results, weights, strict=True):
        torch.testing.assert_close(found, x @ weight.t(), rtol=1e-12, atol=1e-12)
    for chosen in ([0, 1, 2, 3], [0, 2], [1, 3], [0]):
        wanted = [x, *(weights[i] for i in chosen)]
        given = [cotangents[i] for i in chosen]
        found = torch.autograd.grad([results[i] for i in chosen], wanted, given, retain_graph=True)
        expected = torch.autograd.grad([x @ weights[i].t() for i in chosen], wanted, given)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class LeavesRoom(Function):
    """The identity, whose gradient has room for those of what stands behind its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return empty_in_rows(ctx.saved_tensors[0]).copy_(gradient)


def test_gradients_of_narrow_maps_are_written_behind_that_of_the_first(monkeypatch):
    monkeypatch.setattr(linear_maps, "NARROW", 8)
    found_rows = []
    monkeypatch.setattr(linear_maps, "whole_rows", lambda x: found_rows.append(whole_rows(x)) or found_rows[-1])
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(size, 5, dtype=torch.float64, requires_grad=True) for size in (40, 9, 3, 1)]
    for chosen in ([0, 1, 2, 3], [0, 3], [0]):
        results = SharedInput.apply(x, True, *weights)
        assert results[0].stride() == (3 * 48, 48, 1)
        given = [torch.randn_like(results[i]) for i in chosen]
        wanted = [x, *(weights[i] for i in chosen)]
        outputs = [LeavesRoom.apply(results[i]) if i == 0 else results[i] for i in chosen]
        found = torch.autograd.grad(outputs, wanted, given)
        expected = torch.autograd.grad([x @ weights[i].t() for i in chosen], wanted, given)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found_rows.pop().shape == (2, 3, 48)


def test_a_linear_map_with_a_bias_has_the_gradients_of_torch():
    x, linear = torch.randn(2, 3, 5, device=DEVICE, requires_grad=True), Linear(5, 4).to(DEVICE)
    wanted = [x, linear.weight, linear.bias]
    cotangent = torch.randn(2, 3, 4, device=DEVICE)
    expected = torch.autograd.grad(nn.Linear.forward(linear, x), wanted, cotangent)
    y = LinearMap.apply(x, linear.weight, linear.bias)
    assert torch.equal(y, linear(x))
    torch.testing.assert_close(torch.autograd.grad(y, wanted, cotangent), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_map_of_parts_errs_at_most_twice_as_much_as_torch(bias):
    g = torch.Generator().manual_seed(5)

    def randn(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    inputs = {"x": randn(2, 70, 40), "weight": randn(33, 40) * 40**-0.5, "bias": randn(33) if bias else None}

    def op(x, weight, bias):
        return PartsMap.apply(x, weight, bias)

    assert_matches_reference(op, nn.functional.linear, inputs, device=DEVICE)


def test_a_linear_map_of_parts_computes_only_wanted_gradients():
    x, weight, bias = torch.randn(9, 5), torch.randn(4, 5), torch.randn(4)
    cotangent = torch.randn(4, 9).t()
    leaves = [tensor.to(DEVICE).requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(PartsMap.apply(*leaves), leaves, cotangent.to(DEVICE))
    for index in range(3):
        some = [leaf.detach().requires_grad_(i == index) for i, leaf in enumerate(leaves)]
        (gradient,) = torch.autograd.grad(PartsMap.apply(*some), some[index], cotangent.to(DEVICE))
        assert torch.equal(gradient, expected[index])


def test_gradients_of_slices_are_stacked_only_where_they_lie_apart():
    g = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 5, 3, 4, generator=g)

    def gradient_of(parts):
        x = torch.zeros(2, 5, 3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(Unbind.apply(x, 2), x, parts)
        return gradient

    together = gradient_of(whole.unbind(2))
    assert together.data_ptr() == whole.data_ptr()
    assert torch.equal(together, whole)
    for parts in (
        [part.clone() for part in whole.unbind(2)],
        [whole[:, :, 0], whole[:, :, 1], whole[:, :, 2].clone()],
        [whole[:, :, 0], whole[:, :, 2], whole[:, :, 1]],
        [whole[:, :, 0], whole[:, :, 0], whole[:, :, 0]],
        [*whole[:, :, :2].unbind(2), torch.zeros(())[None, None, None].expand(2, 5, 4)],
    ):
        assert torch.equal(gradient_of(parts), torch.stack(list(parts), 2))


def test_gradients_of_a_split_that_lie_in_one_tensor_are_not_copied():
    x = torch.randn(2, 5, 7, requires_grad=True)
    whole = torch.randn(2, 5, 7)

    def gradient_of(parts):
        (gradient,) = torch.autograd.grad(Split.apply(x, (3, 2, 2)), x, parts)
        return gradient

    assert gradient_of(whole.split((3, 2, 2), -1)).data_ptr() == whole.data_ptr()
    others = (
        [part.clone() for part in whole.split((3, 2, 2), -1)],
        [whole[..., :3], whole[..., 5:], whole[..., 3:5]],
        [whole[..., :3], whole[..., 3:5], whole[..., 4:6]],
    )
    for parts in others:
        assert torch.equal(gradient_of(parts), torch.cat(list(parts), -1))


@pytest.mark.parametrize("shape", [(2, 5, 21), (3, 600)])
def test_parts_of_a_silu_have_the_gradients_of_torch(shape):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(shape, generator=g).to(DEVICE).requires_grad_()
    parts = SiluParts.apply(x, 3)
    expected = nn.functional.silu(x).chunk(3, -1)
    assert all(torch.equal(part, other) for part, other in zip(parts, expected, strict=True))
    # the third is not contiguous
    cotangents = [torch.randn(part.shape, generator=g).to(DEVICE) for part in parts]
    cotangents[2] = cotangents[2].transpose(0, 1).contiguous().transpose(0, 1)
    found, wanted = (torch.autograd.grad(results, x, cotangents) for results in (parts, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_gradients_of_rotated_queries_and_keys_lie_in_one_tensor():
    q, k = (torch.randn(2, 3, 2, 4, device=DEVICE, requires_grad=True) for _ in "qk")
    rotated = rotary(q, k, *torch.randn(2, 3, 2, device=DEVICE), torch.arange(3, device=DEVICE), backend="triton")
    gradients = torch.autograd.grad(rotated, (q, k), rotated)
    assert slices_of_one(gradients, 2) is not None
