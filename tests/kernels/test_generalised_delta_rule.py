"""The generalised delta rule of RWKV-7 against its recurrence, in plain PyTorch and in Triton's kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.delta_rule.generalised import generalised_delta_rule, generalised_delta_rule_reference
from suite.laws.accuracy import assert_matches_reference
from tests.kernels.gated import DEVICE

BACKENDS = ["torch", "triton"]


def make_inputs(length: int, *, K: int = 16, V: int = 8) -> dict:
    """Inputs as RWKV-7 has them: decays of at least 0.54, a unit vector that is removed, and a share of it added."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    shape = (1, length, 2, K)
    unit, share = F.normalize(normal(*shape), dim=-1), torch.sigmoid(normal(*shape))
    return {
        "q": normal(*shape),
        "k": normal(*shape) / K**0.5,
        "v": normal(1, length, 2, V),
        "remove": -unit,
        "add": share * unit,
        "log_decay": -0.606 * torch.sigmoid(normal(*shape)),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length", [3, 40])
def test_two_steps_of_the_delta_rule_equal_the_loop(length, dtype, backend):
    op = partial(generalised_delta_rule, backend=backend)
    inputs, keep = make_inputs(length), ("log_decay",)
    assert_matches_reference(op, generalised_delta_rule_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


def test_it_equals_the_loop_exactly_in_float64():
    inputs = make_inputs(150)
    for actual, exact in zip(generalised_delta_rule(**inputs), generalised_delta_rule_reference(**inputs), strict=True):
        assert actual.dtype == torch.float64
        assert (actual - exact).abs().max() < 1e-12 * exact.abs().max()


def test_without_removal_it_is_linear_attention_with_decays():
    inputs = make_inputs(20)
    inputs["remove"] = torch.zeros_like(inputs["remove"])
    o, _ = generalised_delta_rule(**inputs)
    total = inputs["log_decay"].cumsum(1)
    weights = torch.einsum("bthk,bshk->bhts", inputs["q"] * total.exp(), inputs["k"] * (-total).exp()).tril()
    assert (o - torch.einsum("bhts,bshv->bthv", weights, inputs["v"])).abs().max() < 1e-10
