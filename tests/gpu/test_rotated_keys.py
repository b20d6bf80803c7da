"""Rotated keys on a GPU, at sizes of real use."""

from functools import partial

import pytest
import torch

from subquad.suite.laws.accuracy import assert_close
from tests.gpu.real_sizes import assert_equals_plain_pytorch
from tests.kernels.test_rotated_keys import TORCH, TRITON, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_mamba_3_equals_plain_pytorch_in_double_precision(dtype):
    """B and C are float32 there, whatever the dtype of keys and queries; angles grow to some hundred."""
    inputs = {name: x.to("cuda", torch.float32) for name, x in make_inputs(2, 2048, 32, 128, 32).items()}
    inputs["dt"] = inputs["dt"].abs().div(300)
    # in float64 keys and queries are exact, too
    ops = (partial(op, dtype=dtype) for op in (TRITON, TORCH))
    assert_equals_plain_pytorch(*ops, inputs, exact=partial(TORCH, dtype=torch.float64))


@pytest.mark.large
def test_more_than_two_to_the_31_elements():
    """Offsets of the last keys do not fit 32 bits; the last positions are those of a short call."""
    if torch.cuda.get_device_properties(0).total_memory < 60e9:
        pytest.skip("needs 60 GB")
    rows, heads, states, pairs = (1 << 18) + 8, 64, 128, 32
    g = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, device="cuda")

    inputs = {name: randn(1, rows, states) for name in "BC"} | {f"{name}_bias": randn(heads, states) for name in "BC"}
    inputs |= {f"{name}_weight": randn(states) for name in "BC"}
    inputs |= {"dt": randn(1, rows, heads), "w": randn(1, rows, pairs)}
    # the last positions alone start from angles of zero
    inputs["dt"][:, :-40] = 0
    end = {name: x if name.endswith(("bias", "weight")) else x[:, -40:] for name, x in inputs.items()}
    wholes = {name: x.requires_grad_() for name, x in inputs.items()}
    made = TRITON(**wholes, dtype=torch.bfloat16)
    drawn = [torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).bfloat16().to(y) for y in made]
    whole = [*made, *torch.autograd.grad(made, list(wholes.values()), drawn)]
    for found, expected in zip(made, TORCH(**end, dtype=torch.bfloat16), strict=True):
        torch.testing.assert_close(found[:, -40:], expected, rtol=2**-7, atol=1e-4)
    # gradients of steps, against those of the same cotangents on the last rows. They are sums of some hundred terms of
    # either sign, so they err in proportion to the size of most of them, and plain PyTorch's as well
    found = whole[2 + list(inputs).index("dt")][:, -40:]
    plain, exact = (_step_gradients(end, [dy[:, -40:] for dy in drawn], dtype) for dtype in (None, torch.float64))
    assert_close(found, exact, torch.float32, plain=plain, what="gradient of dt")


def _step_gradients(inputs, cotangents, dtype):
    """The gradient of dt in plain PyTorch, in float64 or as a network of bfloat16 has it (None)."""
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    outputs = TORCH(**leaves, dtype=dtype or torch.bfloat16)
    (gradient,) = torch.autograd.grad(
        outputs, [leaves["dt"]], [dy.to(y) for dy, y in zip(cotangents, outputs, strict=True)]
    )
    return gradient
