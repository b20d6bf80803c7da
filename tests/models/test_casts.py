"""Casting all weights at once gives the bits that autocast gives, and leaves the parameters as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subquad.models import MODELS
from subquad.models.parts.casts import cast_once
from subquad.suite.contracts import TaskSpec

CPU = torch.device("cpu")
TOKENS = TaskSpec(input="tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)


def in_bfloat16():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def test_linear_maps_see_bfloat16_within_and_float32_after():
    network = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5, bias=False), nn.LayerNorm(5)))
    before = dict(network.named_parameters())
    with in_bfloat16(), cast_once([network], CPU):
        assert network[0].weight.dtype == network[0].bias.dtype == network[1][0].weight.dtype == torch.bfloat16
        assert network[1][1].weight.dtype == torch.float32
    assert all(parameter is before[name] for name, parameter in network.named_parameters())


def test_parameters_come_back_after_an_error():
    linear = nn.Linear(3, 4)
    weight = linear.weight
    with pytest.raises(RuntimeError, match="shapes"), in_bfloat16(), cast_once([linear], CPU):
        linear(torch.ones(2, 7))
    assert linear.weight is weight


def test_without_autocast_nothing_is_cast():
    linear = nn.Linear(3, 4)
    with cast_once([linear], CPU):
        assert linear.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["mamba", "gsa", "attention", "hyena", "h3", "rwkv6", "rwkv7"])
@pytest.mark.parametrize("recompute", ["never", "layer"])
def test_logits_and_gradients_are_those_of_autocast(name, recompute):
    tokens = torch.randint(16, (2, 40), generator=torch.Generator().manual_seed(0))
    results = []
    for once in (False, True):
        torch.manual_seed(0)
        model = MODELS.load(name)(num_layers=2, d_model=16, recompute=recompute).build(TOKENS)
        with in_bfloat16():
            if once:
                logits = model(tokens)
            else:
                positions = model._positions(torch.arange(40))
                x = model._encode(tokens)
                logits = model.readout(model._run_layers(x if positions is None else x + positions, None))
        logits.float().square().sum().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    for first, second in zip(*results, strict=True):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
