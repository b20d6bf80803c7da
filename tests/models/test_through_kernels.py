"""Whole models through their kernels in Triton's interpreter. A model chooses them on a GPU alone, which CI lacks."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels import backend
from subquad.kernels.layout import whole_rows
from subquad.models import MODELS
from subquad.models.parts import linear as linear_maps
from subquad.suite.contracts import TaskSpec

LENGTH, VOCAB = 40, 31
SPEC = TaskSpec("tokens", num_classes=VOCAB, readout="token", max_length=LENGTH, vocab_size=VOCAB)


def taken_where_possible(op, choice, x, *others, obstacle=None, is_faster=True):
    """`chooses_triton` as if the tensors were on a GPU and every kernel were faster there."""
    return choice != "torch" and not (obstacle or backend._general_obstacle(x, *others))


@pytest.fixture
def choose_kernels(monkeypatch):
    """A function after whose call every operator runs in its kernels."""
    pytest.importorskip("triton")
    plain = backend.chooses_triton

    def choose():
        for module in list(sys.modules.values()):
            if getattr(module, "chooses_triton", None) is plain:
                monkeypatch.setattr(module, "chooses_triton", taken_where_possible)

    return choose


def trained(model, tokens):
    """The loss of one step, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_kernels_give_the_loss_and_the_gradients_of_pytorch(name, choose_kernels):
    torch.manual_seed(0)
    # SaShiMi has layers at three rates
    width = 8 if name == "sashimi" else 32
    model = MODELS.load(name)(d_model=width, num_layers=1).build(SPEC)
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    loss, gradients = trained(model, tokens)
    choose_kernels()
    with backend.record_operators() as used:
        found, through = trained(model, tokens)
    assert any("triton" in use["backend"] for use in used.values())
    assert found == pytest.approx(loss, rel=1e-5)
    assert through.keys() == gradients.keys()
    whole = sum(g.square().sum() for g in gradients.values()).sqrt()
    for parameter, exact in gradients.items():
        error = (through[parameter] - exact).norm()
        assert error <= 1e-5 * exact.norm() + 1e-6 * whole, parameter


@pytest.mark.parametrize(
    "name", ["gated-deltanet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deltanet", "kda"))]
)
def test_the_convolution_leaves_room_for_gradients_of_narrow_maps(name, choose_kernels, monkeypatch):
    choose_kernels()
    joined, results = [], []
    monkeypatch.setattr(linear_maps, "whole_rows", lambda x: joined.append(whole_rows(x)) or joined[-1])
    for narrow in (32, 0):
        monkeypatch.setattr(linear_maps, "NARROW", narrow)
        torch.manual_seed(0)
        model = MODELS.load(name)(d_model=64, num_heads=4, num_layers=1).build(SPEC)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logits = model(torch.arange(12)[None])
        logits.float().square().mean().backward()
        results.append({key: parameter.grad for key, parameter in model.named_parameters()})
    assert [x is None for x in joined] == [False]
    for key, apart in results[1].items():
        assert (results[0][key] - apart).norm() <= 2e-2 * apart.norm(), key


@pytest.mark.parametrize("name", ["transformer++", "mamba3", "rwkv"])
def test_a_layer_that_is_computed_again_in_bfloat16_has_the_same_bits(name, choose_kernels):
    """Its weights are in bfloat16 in the forward pass (`cast_once`) and in float32 when it is computed again."""
    tokens, results = torch.arange(24).view(2, 12), []
    for recompute in ("never", "layer"):
        torch.manual_seed(0)
        model = MODELS.load(name)(d_model=16, num_layers=1, recompute=recompute).build(SPEC)
        choose_kernels()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logits = model(tokens)
        logits.float().square().mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
