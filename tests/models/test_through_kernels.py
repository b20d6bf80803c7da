"""Whole models through their kernels in Triton's interpreter. A model chooses them on a GPU alone, which CI lacks."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels import backend
from subquad.models import MODELS
from subquad.suite.bench.config import SpeedConfig

LENGTH, VOCAB = 40, 31


def taken_where_possible(op, choice, x, *others, obstacle=None, is_faster=True):
    """`chooses_triton` as if the tensors were on a GPU and every kernel were faster there."""
    return choice != "torch" and not (obstacle or backend._general_obstacle(x, *others))


def trained(model, tokens):
    """The loss of one step, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_kernels_give_the_loss_and_the_gradients_of_pytorch(name, monkeypatch):
    pytest.importorskip("triton")
    speed = SpeedConfig(measure="train", lengths=(LENGTH,), batch_size=2, vocab_size=VOCAB)
    torch.manual_seed(0)
    # SaShiMi has layers at three rates
    width = 8 if name == "sashimi" else 32
    model = MODELS.load(name)(d_model=width, num_layers=1).build(speed.spec(LENGTH))
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    loss, gradients = trained(model, tokens)
    plain = backend.chooses_triton
    for module in list(sys.modules.values()):
        if getattr(module, "chooses_triton", None) is plain:
            monkeypatch.setattr(module, "chooses_triton", taken_where_possible)
    with backend.record_operators() as used:
        found, through = trained(model, tokens)
    assert any("triton" in use["backend"] for use in used.values())
    assert found == pytest.approx(loss, rel=1e-5)
    assert through.keys() == gradients.keys()
    whole = sum(g.square().sum() for g in gradients.values()).sqrt()
    for parameter, exact in gradients.items():
        error = (through[parameter] - exact).norm()
        assert error <= 1e-5 * exact.norm() + 1e-6 * whole, parameter
