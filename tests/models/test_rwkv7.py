"""RWKV-7 equals the recurrence of its paper, written out here from the equations, and starts as its code does."""

from __future__ import annotations

import math

import torch

from subquad.kernels.rwkv7_inputs import rwkv7_position
from subquad.models import MODELS
from subquad.suite.laws.models import build, unroll


def written_out(mixer, x):
    """y [B, T, D] of Peng et al. 2025 with the state S [V, K] of the paper, one position and one head at a time."""
    batch, length, width = x.shape
    size = mixer.head_dim
    heads = width // size
    memory = x.new_zeros(batch, heads, size, size)
    last, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(length):
        r_x, w_x, k_x, v_x, a_x, g_x = (x[:, t] + (last - x[:, t]) * mu for mu in mixer.mu)
        r, raw_k, v = r_x @ mixer.receptance.weight.T, k_x @ mixer.key.weight.T, v_x @ mixer.value.weight.T
        raw = mixer.w_0 + torch.tanh(w_x @ mixer.w_down) @ mixer.w_up
        # the code has w = -softplus(-raw) - 0.5 and a decay of exp(-exp(w))
        decay = torch.exp(-torch.exp(-torch.log(1 + torch.exp(-raw)) - 0.5))
        rate = 1 / (1 + torch.exp(-(mixer.a_0 + a_x @ mixer.a_down @ mixer.a_up)))
        gate = torch.sigmoid(g_x @ mixer.g_down) @ mixer.g_up
        k = raw_k * (1 + (rate - 1) * mixer.alpha)
        heard = torch.empty_like(r)
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            c = raw_k[:, at] * mixer.xi[at]
            c = c / c.square().sum(-1, keepdim=True).sqrt()
            change = torch.diag_embed(decay[:, at]) - c[:, :, None] * (rate[:, at] * c)[:, None, :]
            memory[:, h] = memory[:, h] @ change + v[:, at, None] * k[:, None, at]
            o = (memory[:, h] @ r[:, at, None]).squeeze(-1)
            centred = o - o.mean(-1, keepdim=True)
            normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 64e-5)
            bonus = (r[:, at] * k[:, at] * mixer.rho[at]).sum(-1, keepdim=True)
            heard[:, at] = normed * mixer.norm.weight[at] + mixer.norm.bias[at] + bonus * v[:, at]
        outputs.append((gate * heard) @ mixer.out.weight.T)
        last = x[:, t]
    return torch.stack(outputs, 1)


@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_paper():
    mixer = build(MODELS.load("rwkv7"), num_layers=1, d_model=12, head_dim=4, rank=3).mixers[0]
    for parameter in mixer.ssm_parameters().values():
        parameter.normal_(std=0.7)
    mixer.norm.weight.normal_()
    mixer.norm.bias.normal_()
    x = torch.randn(2, 150, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = written_out(mixer, x)
    torch.testing.assert_close(mixer(x), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(unroll(mixer, x, mixer.init_state(2, 150))[0], wanted, rtol=1e-10, atol=1e-12)


def test_it_starts_as_the_authors_code_does():
    model = build(MODELS.load("rwkv7"), num_layers=3, d_model=128)
    first, last = model.mixers[0], model.mixers[4]
    assert (first.num_heads, first.head_dim) == (2, 64)
    float64 = {"dtype": torch.float64}
    # -6 and 0 at the ends of the layer, 0.5 more, and 2.5 less or more at the ends of a head
    torch.testing.assert_close(first.w_0[[0, 127]], torch.tensor([-6 + 0.5 - 2.5, 0.5 + 2.5], **float64))
    torch.testing.assert_close(last.w_0[63], torch.tensor(-6 + 6 * (63 / 127) ** 2 + 0.5 + 2.5, **float64))
    torch.testing.assert_close(first.a_0[[0, 127]], torch.tensor([-0.19 - 0.3 - 0.2, -0.19 + 0.3 + 0.2], **float64))
    torch.testing.assert_close(last.mu[0, 64], torch.tensor(1 - 0.5 ** (0.2 / 3), **float64))
    torch.testing.assert_close(model.mixers[5].mu[0, 64], torch.tensor(1 - 0.5 ** (1 / 81), **float64))
    torch.testing.assert_close(first.g_up @ first.g_up.T, 0.01 * torch.eye(len(first.g_up), **float64))
    assert (first.w_up.shape[0], first.g_up.shape[0]) == (32, 32)
    wide = MODELS.load("rwkv7")(d_model=768)
    assert wide.ranks == (64, 128)
    (undecayed,) = (group for group in model.param_groups() if group.name == "ssm")
    assert undecayed.weight_decay == 0.0
    assert any(parameter is first.w_down for parameter in undecayed.parameters)


@torch.no_grad()
def test_no_decay_is_faster_than_that_of_the_paper():
    mixer = build(MODELS.load("rwkv7"), num_layers=1, d_model=8, head_dim=4).mixers[0]
    mixer.w_0.fill_(50.0)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    inputs, *_ = mixer._project(x)
    log_decay = rwkv7_position(*inputs, head_dim=4).log_decay
    torch.testing.assert_close(log_decay.exp().min(), torch.tensor(math.exp(-math.exp(-0.5)), dtype=torch.float64))
