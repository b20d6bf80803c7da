"""Lightning attention equals its recurrence, written out here from the equations."""

from __future__ import annotations

import torch

from subquad.models import MODELS
from subquad.suite.laws.models import build


def written_out(mixer, x, layer, num_layers):
    """y [B, T, D] one position and one head at a time."""
    batch, length, width = x.shape
    heads = mixer.num_heads
    size = width // heads
    silu = torch.nn.functional.silu
    query, key, value, gate = mixer.proj.weight.split(width)
    q, k, v = silu(x @ query.T), silu(x @ key.T), silu(x @ value.T)
    o = torch.empty_like(x)
    for h in range(heads):
        slope = (0.5 ** (8 / heads)) ** (h + 1) * (1 - layer / (num_layers - 1) + 1e-5)
        at = slice(h * size, (h + 1) * size)
        state = x.new_zeros(batch, size, size)
        for t in range(length):
            state = torch.exp(torch.tensor(-slope, dtype=x.dtype)) * state + k[:, t, at, None] * v[:, t, None, at]
            o[:, t, at] = (q[:, t, at, None] * state).sum(1)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + mixer.norm.eps) * mixer.norm.weight
    return (torch.sigmoid(x @ gate.T) * normed) @ mixer.out.weight.T


@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_equations():
    mixers = build(MODELS.load("lightning"), num_layers=3, d_model=12, num_heads=3).mixers
    x = torch.randn(2, 70, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for layer, mixer in enumerate(mixers):
        mixer.norm.weight.normal_()
        wanted = written_out(mixer, x, layer, 3)
        torch.testing.assert_close(mixer(x), wanted, rtol=1e-10, atol=1e-12)


def test_later_layers_and_heads_forget_more_slowly():
    model = build(MODELS.load("lightning"), num_layers=3, num_heads=8)
    # the slopes of ALiBi with eight heads in the first layer, and hardly any in the last
    wanted = -(2.0 ** -torch.arange(1.0, 9.0, dtype=torch.float64))
    torch.testing.assert_close(model.mixers[0].log_decay, wanted * (1 + 1e-5))
    torch.testing.assert_close(model.mixers[1].log_decay, wanted * (0.5 + 1e-5))
    torch.testing.assert_close(model.mixers[2].log_decay, wanted * 1e-5)
