"""The generalised delta rule of RWKV-7 against its recurrence, in plain PyTorch and in Triton's kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.delta_rule.generalised import generalised_delta_rule, generalised_delta_rule_reference
from subquad.suite.laws.accuracy import assert_matches_reference
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


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@every_backend
@every_dtype
def test_with_steep_decays_it_equals_the_loop(dtype, backend):
    """Within 40 positions such decays reach exp(-240), so that a chunk is factored by a tree."""
    inputs = make_inputs(40)
    inputs["log_decay"] = 20 * inputs["log_decay"]
    inputs["remove"] = inputs["remove"] * inputs["log_decay"].exp()
    op, keep = partial(generalised_delta_rule, backend=backend), ("log_decay",)
    assert_matches_reference(op, generalised_delta_rule_reference, inputs, dtype=dtype, keep=keep, device=DEVICE)


def test_the_kernels_in_segments_equal_the_loop(monkeypatch):
    """A long sequence of few heads is cut into segments, whose matrices do not depend on what is added."""
    walk, back = (pytest.importorskip(f"subquad.kernels.delta_rule.triton.{name}") for name in ("walk", "back"))
    segments = pytest.importorskip("subquad.kernels.delta_rule.triton.segments").Segments(3, 3)
    for module in (walk, back):
        monkeypatch.setattr(module, "cut_time", lambda *args, **options: segments)
    op, inputs = partial(generalised_delta_rule, backend="triton"), make_inputs(130)
    assert_matches_reference(
        op, generalised_delta_rule_reference, inputs, dtype=torch.float32, keep=("log_decay",), device=DEVICE
    )


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


def test_a_float64_input_beside_others_in_float32_runs_in_the_kernels():
    tensors = {name: x.float().to(DEVICE) for name, x in make_inputs(5).items()}
    wide = tensors | {"remove": tensors["remove"].double()}
    outputs = [generalised_delta_rule(**each, backend="triton")[0] for each in (tensors, wide)]
    assert torch.equal(*outputs)


@every_backend
def test_a_decay_of_zero_has_no_gradient(backend):
    """The decay acts on two paths, whose gradients cancel up to rounding; in bfloat16 that rounding would be seen."""
    inputs = {name: x.bfloat16().to(DEVICE) for name, x in make_inputs(5).items()}
    inputs["log_decay"] = inputs["log_decay"].float().index_fill(1, torch.tensor([3], device=DEVICE), -1000.0)
    leaf = inputs["log_decay"].requires_grad_()
    generalised_delta_rule(**inputs, backend=backend)[0].square().sum().backward()
    assert not leaf.grad[:, 3].any()
    assert leaf.grad[:, 2].any()
