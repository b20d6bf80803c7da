"""Pythia equals its equations, with the weights in the order in which GPT-NeoX has them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from subquad.models import MODELS
from subquad.models.checkpoints import LAYOUTS, load, unload
from subquad.suite.laws.models import build, make_inputs


def rotated(x, fraction):
    """x [T, K] with its first channels rotated as GPT-NeoX does, i with i + r / 2."""
    size = int(fraction * x.shape[1])
    half = size // 2
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-2 * torch.arange(half, dtype=x.dtype) / size)
    one, other = x[:, :half], x[:, half:size]
    return torch.cat(
        [one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin(), x[:, size:]], dim=1
    )


def written_out(weights, tokens, heads, fraction, eps):
    """Logits [T, V] of one sequence, from weights with the names of transformers."""
    x = weights["gpt_neox.embed_in.weight"][tokens]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    for i in range(layers):
        at = f"gpt_neox.layers.{i}"
        by_head = linear(norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value").unflatten(1, (heads, -1))
        outputs = []
        for h in range(heads):
            q, k, v = by_head[:, h].chunk(3, dim=-1)
            q, k = rotated(q, fraction), rotated(k, fraction)
            scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -math.inf)
            outputs.append(scores.softmax(-1) @ v)
        inner = linear(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h")
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        x = x + linear(torch.cat(outputs, 1), f"{at}.attention.dense") + linear(inner, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "gpt_neox.final_layer_norm") @ weights["embed_out.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_the_network_is_that_of_the_equations(fraction):
    model = build(MODELS.load("pythia"), d_model=32, num_heads=2, rotary_fraction=fraction)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) / 5)
    weights = unload(model, LAYOUTS["gpt_neox"])
    tokens = make_inputs(model.spec, 40, 1)
    wanted = written_out(weights, tokens[0].long(), 2, fraction, model.config.norm_eps)
    torch.testing.assert_close(model(tokens)[0], wanted, rtol=1e-10, atol=1e-12)
    again = build(MODELS.load("pythia"), d_model=32, num_heads=2, rotary_fraction=fraction)
    load(again, LAYOUTS["gpt_neox"], weights)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
