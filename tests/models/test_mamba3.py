"""Mamba-3 equals the recurrence of its paper, written out here from the equations, and starts as its code does."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.rotated_keys import rotated_keys
from subquad.models import MODELS, mamba3
from subquad.models.parts.time_axis import LeftPadding
from subquad.suite.laws.models import build, unroll


def normed(x, norm):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def written_out(mixer, u):
    """y [B, T, D] of the exponential-trapezoidal rule with rotated B and C, one position and one head at a time."""
    batch, length, _ = u.shape
    heads, size, states, pairs = mixer.num_heads, mixer.head_dim, mixer.d_state, mixer.pairs
    z, x, B, C, dt, a, lam, turn = (u @ mixer.in_proj.weight.T).split(mixer.sizes, -1)
    outputs = torch.empty(batch, length, heads * size, dtype=u.dtype)
    for h in range(heads):
        at = slice(h * size, (h + 1) * size)
        memory = u.new_zeros(batch, size, states)
        theta, before = u.new_zeros(batch, pairs), u.new_zeros(batch, size, states)
        for t in range(length):
            step = torch.log1p(torch.exp(dt[:, t, h, None] + mixer.dt_bias[h]))
            alpha = torch.exp(-step * torch.log1p(torch.exp(a[:, t, h, None])).clamp(min=1e-4))
            trapezoid = torch.sigmoid(lam[:, t, h, None])
            theta = theta + step * math.pi * torch.tanh(turn[:, t])
            # the complex number x_i + i x_{i+R} turns by e^{i theta}
            turned = []
            for vector in (
                normed(B[:, t], mixer.B_norm) + mixer.B_bias[h],
                normed(C[:, t], mixer.C_norm) + mixer.C_bias[h],
            ):
                pair = torch.complex(vector[:, :pairs], vector[:, pairs : 2 * pairs]) * torch.exp(1j * theta)
                turned.append(torch.cat([pair.real, pair.imag, vector[:, 2 * pairs :]], -1))
            k, q = turned
            write = x[:, t, at, None] * k[:, None, :]
            alpha, beta, gamma = (c[..., None] for c in (alpha, (1 - trapezoid) * step * alpha, trapezoid * step))
            memory = alpha * memory + beta * before + gamma * write
            before = write
            outputs[:, t, at] = (memory * q[:, None, :]).sum(-1) + mixer.D[h] * x[:, t, at]
    return (outputs * z * torch.sigmoid(z)) @ mixer.out.weight.T


@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_paper():
    mixer = build(MODELS.load("mamba3"), num_layers=1, d_model=12, d_state=9, head_dim=12).mixers[0]
    mixer.in_proj.weight.normal_(std=0.5)
    for parameter in (mixer.dt_bias, mixer.D, mixer.B_bias, mixer.C_bias, mixer.B_norm.weight, mixer.C_norm.weight):
        parameter.normal_()
    u = torch.randn(2, 70, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = written_out(mixer, u)
    torch.testing.assert_close(mixer(u), wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(unroll(mixer, u, mixer.init_state(2, 70))[0], wanted, rtol=1e-9, atol=1e-10)


def test_keys_of_the_triton_kernels_give_the_same_layer(monkeypatch):
    pytest.importorskip("triton")
    mixer = build(MODELS.load("mamba3"), num_layers=1, d_model=16, d_state=12, head_dim=16).mixers[0].float()
    u = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    padding, found = LeftPadding.of(torch.tensor([20, 1, 7]), 20), []
    for backend in ("torch", "triton"):
        monkeypatch.setattr(mamba3, "rotated_keys", partial(rotated_keys, backend=backend))
        y = mixer(u)
        gradients = torch.autograd.grad(y.square().sum(), [u, *mixer.parameters()])
        with torch.no_grad():
            _, state = mixer.prefill(u, mixer.init_state(3, 20), padding)
        found.append([y, *gradients, *state])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_it_starts_as_the_authors_code_does():
    mixer = build(MODELS.load("mamba3"), num_layers=4, d_model=512, head_dim=4, d_state=16).mixers[0]
    dt = F.softplus(mixer.dt_bias)
    assert 1e-3 <= dt.min() < 2e-3
    assert 5e-2 < dt.max() <= 0.1001
    assert all((parameter == 1).all() for parameter in (mixer.D, mixer.B_bias, mixer.C_bias))
    assert abs(mixer.out.weight.abs().max() * 1024**0.5 * 2 - 1) < 0.01
    # z, x, B, C, three gates a head, and half as many angles as there are rotated channels
    assert mixer.in_proj.weight.shape == (2 * 1024 + 2 * 16 + 3 * 256 + 4, 512)
