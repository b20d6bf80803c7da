"""Whole networks of GLA, RetNet, HGRN2 and GSA, written out under the names that flash-linear-attention gives weights.

From fla/layers and fla/models of flash-linear-attention 0.6.0, whose own networks give the same logits. So a checkpoint
of fla-hub is read right if its names are those of `models.checkpoints`, whatever our names are.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from subquad.models import MODELS
from subquad.models.checkpoints import LAYOUTS, unload
from subquad.suite.laws.models import build, make_inputs

HEADS = 2
EPS = 1e-3
"""`norm_eps` in config.json."""
OUTPUT_EPS = 1e-5
"""Default of `rms_norm_linear`, which the layers of HGRN2 and GSA call without an epsilon."""
SETTINGS = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": HEADS, "norm_eps": EPS, "intermediate_size": 88}
"""Those of config.json that all four layouts have."""
OWN = {
    "gla": {"num_kv_heads": HEADS},
    "retnet": {"num_kv_heads": HEADS},
    "hgrn2": {"expand_ratio": 16},
    "gsa": {"num_kv_heads": HEADS, "num_slots": 8},
}


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def heads(x):
    return x.unflatten(-1, (HEADS, -1))


def recurrence(q, k, v, log_decay):
    """o [T, H, V] of S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t, o_t = q_t S_t."""
    memory, outputs = q.new_zeros(HEADS, k.shape[-1], v.shape[-1]), []
    for t in range(len(q)):
        memory = log_decay[t].exp()[..., None] * memory + k[t][..., None] * v[t][:, None]
        outputs.append((q[t][:, None] @ memory).squeeze(1))
    return torch.stack(outputs)


def gated(o, x, w):
    """The norm of every head times swish of the gate, and the output map."""
    return (rms(o, w("g_norm_swish_gate"), EPS) * F.silu(heads(x @ w("g_proj").T))).flatten(1) @ w("o_proj").T


def gla(x, w, weights, layer):
    q, k, v = (heads(x @ w(f"{part}_proj").T) for part in "qkv")
    decay = x @ w("gk_proj.0").T @ w("gk_proj.1").T + weights[f"model.layers.{layer}.attn.gk_proj.1.bias"]
    o = recurrence(q * q.shape[-1] ** -0.5, k, v, heads(F.logsigmoid(decay) / 16))
    return gated(o, x, w)


def retnet(x, w, weights, layer):
    q, k, v = (heads(x @ w(f"{part}_proj").T) for part in "qkv")
    half = q.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    q, k = (
        torch.cat([z[..., :half] * cos - z[..., half:] * sin, z[..., half:] * cos + z[..., :half] * sin], -1)
        for z in (q, k)
    )
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=x.dtype)))
    o = recurrence(q * q.shape[-1] ** -0.5, k, v, decay[:, None].expand_as(k))
    return gated(o, x, w)


def hgrn2(x, w, weights, layer):
    q, forget, v = (x @ w(f"{part}_proj").T for part in "qfi")
    log_f = F.logsigmoid(forget)
    if layer:
        bounds = weights["model.lower_bounds"].softmax(0).cumsum(0)
        bound = bounds[layer] - bounds[0]
        log_f = torch.log(bound + (1 - bound) * log_f.exp())
    k = 1 - log_f.exp()
    q, k, v, log_f = (heads(z) for z in (F.silu(q), k, v, log_f))
    o = recurrence(q * q.shape[-1] ** -0.5, k, v, log_f)
    return rms(o.flatten(1), w("g_norm"), OUTPUT_EPS) @ w("o_proj").T


def gsa(x, w, weights, layer):
    q, k, v = (heads(F.silu(x @ w(f"{part}_proj").T)) for part in "qkv")
    log_f = heads(F.logsigmoid(x @ w("f_proj").T) / 8)
    s = 1 - log_f.exp()
    keys, values = (x.new_zeros(HEADS, s.shape[-1], z.shape[-1]) for z in (k, v))
    outputs = []
    for t in range(len(x)):
        keep, write = log_f[t].exp()[..., None], s[t][..., None]
        keys, values = keep * keys + write * k[t][:, None], keep * values + write * v[t][:, None]
        slots = (keys @ q[t][..., None]).softmax(1)
        outputs.append((slots * values).sum(1))
    return rms(F.silu(torch.stack(outputs).flatten(1)), w("g_norm"), OUTPUT_EPS) @ w("o_proj").T


@torch.no_grad()
@pytest.mark.parametrize("mixer", [gla, retnet, hgrn2, gsa], ids=lambda mixer: mixer.__name__)
def test_the_network_is_that_of_the_library(mixer):
    name = mixer.__name__
    model = build(MODELS.load(name), **LAYOUTS[name].options(SETTINGS | OWN[name]))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    weights = unload(model, LAYOUTS[name])
    tokens = make_inputs(model.spec, 40, 1)
    x = weights["model.embeddings.weight"][tokens[0].long()]
    for layer in range(2):
        at = f"model.layers.{layer}"
        normed = rms(x, weights[f"{at}.attn_norm.weight"], EPS)
        x = x + mixer(normed, lambda part, at=at: weights[f"{at}.attn.{part}.weight"], weights, layer)
        normed = rms(x, weights[f"{at}.mlp_norm.weight"], EPS)
        gate, up, down = (weights[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
    logits = rms(x, weights["model.norm.weight"], EPS) @ weights["lm_head.weight"].T
    torch.testing.assert_close(model(tokens)[0], logits, rtol=1e-10, atol=1e-12)
