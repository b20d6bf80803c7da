"""Whole networks on a GPU: their gradients in float32 and under bfloat16 are those of float64 on a CPU."""

from __future__ import annotations

import pytest
import torch

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec
from subquad.suite.training.capture import record
from subquad.suite.training.numerics import autocast, numerics

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SPEC = TaskSpec(input="tokens", num_classes=64, readout="token", max_length=192, vocab_size=64)
CASES = {
    "mamba": {"num_layers": 2, "d_model": 64},
    "gsa": {"num_layers": 2, "d_model": 64},
    "gla": {"num_layers": 2, "d_model": 64},
    "retnet": {"num_layers": 2, "d_model": 64},
    "h3": {"num_layers": 2, "d_model": 64, "head_dim": 2},
    "hyena": {"num_layers": 2, "d_model": 64},
    "attention": {"num_layers": 2, "d_model": 64},
    "transformer++": {"num_layers": 2, "d_model": 64},
    "gated-attention": {"num_layers": 2, "d_model": 64},
    "comba": {"num_layers": 2, "d_model": 64, "num_heads": 4},
    "gated-deltanet2": {"num_layers": 2, "d_model": 64},
    # where a first query is almost orthogonal to its key, the head reads little but their rounding, and its norm
    # divides by that: with eps=1e-6 one such head of one position had 0.4 of the squared gradient, wrong by chance
    "mesanet": {"num_layers": 2, "d_model": 64, "norm_eps": 1e-3},
    "s4": {"num_layers": 2, "d_model": 64},
    "s4, legt": {"num_layers": 2, "d_model": 64, "init": "legt", "bidirectional": True},
    "s4d, real": {"num_layers": 2, "d_model": 64, "init": "real"},
    "hybrid": {"num_layers": 3, "d_model": 64, "layers": ["mamba", "attention", "base-conv"]},
    "mamba, complex": {"num_layers": 2, "d_model": 64, "A_init": "complex"},
    "mamba, groups": {"num_layers": 2, "d_model": 64, "groups": 4},
    "rwkv": {"num_layers": 2, "d_model": 64},
    "h3, bidirectional": {"num_layers": 2, "d_model": 64, "bidirectional": True},
    "mamba, nothing selective": {"num_layers": 2, "d_model": 64, "fixed": ["dt", "B", "C"]},
    "h3, short filters": {"num_layers": 2, "d_model": 64, "head_dim": 8, "short_filter": 3},
    "gsa, relu": {"num_layers": 2, "d_model": 64, "readout": "relu"},
    "gsa, constant": {"num_layers": 2, "d_model": 64, "gate": "constant"},
    "attention, hard alibi": {"num_layers": 2, "d_model": 64, "num_heads": 4, "masked_heads": 3, "position": "none"},
    "attention, window": {"num_layers": 2, "d_model": 64, "window": 20, "position": "rope"},
    "based": {"num_layers": 2, "d_model": 64},
    "pythia": {"num_layers": 2, "d_model": 64},
    "slstm": {"num_layers": 2, "d_model": 64},
    "rwkv7": {"num_layers": 2, "d_model": 64, "head_dim": 32},
    "dss-softmax, truncated": {"num_layers": 2, "d_model": 64, "kernel_length": 32},
}
"""Options by the name of a model and, behind a comma, what is special about them."""
LIMITS = {"fp32": 2e-4, "bf16": 3e-2}
"""Largest root mean square error of all gradients together, relative to that of the gradients."""


def tokens():
    return torch.randint(64, (4, 192), generator=torch.Generator().manual_seed(1))


def build(name, **options):
    torch.manual_seed(0)
    return MODELS.load(name.partition(",")[0])(**CASES[name], **options).build(SPEC)


def gradients(model, precision, positions=None):
    """Gradients of all parameters, one after another, in float64."""
    device = next(model.parameters()).device
    at = None if positions is None else positions.to(device)
    with numerics("fp32" if precision == "fp64" else precision):
        with autocast("fp32" if precision == "fp64" else precision, device):
            logits = model(tokens().to(device), at)
        logits.double().square().mean().backward()
    return torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("labels", ["everywhere", "some"])
def test_gradients_are_those_of_float64(name, labels):
    positions = None if labels == "everywhere" else torch.arange(0, 192, 7).expand(4, -1)
    exact = gradients(build(name).double(), "fp64", positions)
    for precision, limit in LIMITS.items():
        found = gradients(build(name).cuda(), precision, positions)
        error = (found - exact).norm() / exact.norm()
        # rounding flips the sign of some inputs of ReLU, whose gradients then differ in plain PyTorch as well
        plain = gradients(build(name), precision, positions)
        bound = max(limit, 1.5 * float((plain - exact).norm() / exact.norm()))
        assert error < bound, f"{precision}: {error:.1e} > {bound:.1e}"


@pytest.mark.parametrize("recompute", ["auto", "layer"])
@pytest.mark.parametrize("name", ["mamba", "gsa"])
def test_what_is_computed_again_has_the_same_bits(name, recompute):
    kept = gradients(build(name, recompute="never").cuda(), "bf16")
    model = build(name, recompute=recompute).cuda()
    for mixer in model.mixers:
        # as many as would fill the memory, so that `auto` does not keep what it can compute again
        mixer.num_layers = 10**9
    assert torch.equal(gradients(model, "bf16"), kept)


@pytest.mark.parametrize("recompute", ["never", "layer"])
def test_a_recorded_step_has_the_same_gradients(recompute):
    model, device = build("mamba", recompute=recompute).cuda(), torch.device("cuda")
    inputs = tokens().cuda()
    grads = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def step():
        with autocast("bf16", device):
            loss = model(inputs).float().square().mean()
        for kept, grad in zip(grads, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            kept.copy_(grad)

    replay = record(step, lambda: (), device, None)
    replay()
    with autocast("bf16", device):
        loss = model(inputs).float().square().mean()
    for kept, grad in zip(grads, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert torch.equal(kept, grad)
