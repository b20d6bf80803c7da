"""Mamba-2 equals the recurrence of its paper, written out here from the equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subquad.models import MODELS
from subquad.suite.contracts import TaskSpec

SPEC = TaskSpec("tokens", num_classes=16, readout="token", max_length=40, vocab_size=16)


def written_out(mixer, u):
    """y [B, T, D] of Dao and Gu 2024, listing 1, one position and one head at a time."""
    batch, length, _ = u.shape
    width, states, heads = mixer.norm.weight.shape[0], mixer.d_state, mixer.num_heads
    z, inputs, raw = (u @ mixer.in_proj.weight.T).split((width, width + 2 * states, heads), -1)
    taps = mixer.conv_weight.shape[1]
    padded = F.pad(inputs, (0, 0, taps - 1, 0))
    windows = torch.stack([padded[:, t : t + taps] for t in range(length)], 1)
    convolved = F.silu((windows * mixer.conv_weight.T).sum(2) + mixer.conv_bias)
    x, B, C = convolved.split((width, states, states), -1)
    dt = torch.log1p(torch.exp(raw + mixer.dt_bias))
    size, outputs = width // heads, torch.empty(batch, length, width, dtype=u.dtype)
    for h in range(heads):
        channels = slice(h * size, (h + 1) * size)
        state = torch.zeros(batch, size, states, dtype=u.dtype)
        for t in range(length):
            decay = torch.exp(-dt[:, t, h] * torch.exp(mixer.log_A[h]))[:, None, None]
            write = dt[:, t, h, None, None] * x[:, t, channels, None] * B[:, t, None, :]
            state = decay * state + write
            outputs[:, t, channels] = (state * C[:, t, None, :]).sum(-1) + mixer.D[h] * x[:, t, channels]
    gated = outputs * F.silu(z)
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + mixer.norm.eps)
    return (gated * scale * mixer.norm.weight) @ mixer.out.weight.T


@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_paper():
    torch.manual_seed(0)
    config = MODELS.load("mamba2")(num_layers=1, d_model=12, d_state=5, head_dim=8)
    (mixer,) = config.build(SPEC).double().mixers
    # step sizes and decays that differ between heads, and a norm that is none
    mixer.dt_bias.normal_()
    mixer.norm.weight.normal_()
    u = torch.randn(2, 40, 12, dtype=torch.float64)
    torch.testing.assert_close(mixer(u), written_out(mixer, u), rtol=1e-11, atol=1e-11)


def test_it_starts_as_the_authors_code_does():
    torch.manual_seed(0)
    config = MODELS.load("mamba2")(num_layers=4, d_model=512, head_dim=4)
    mixer = config.build(SPEC).mixers[0]
    dt = F.softplus(mixer.dt_bias)
    assert 1e-3 <= dt.min() < 2e-3
    assert 5e-2 < dt.max() <= 0.1001
    rates = mixer.log_A.exp()
    assert 1.0 <= rates.min() < 2.0
    assert 15.0 < rates.max() <= 16.0
    assert (mixer.D == 1).all()
    # uniform within 1 / sqrt(inputs), and the map into the residual stream smaller by sqrt(layers)
    assert abs(mixer.out.weight.abs().max() * 1024**0.5 * 2 - 1) < 0.01
    assert {"log_A", "D", "dt_bias"} == set(mixer.ssm_parameters())


def test_its_smallest_published_size():
    """The hub's mamba2-130m: 24 layers of width 768, with a vocabulary of 50277 padded to a multiple of 16."""
    spec = TaskSpec("tokens", num_classes=50288, readout="token", max_length=64, vocab_size=50288)
    with torch.device("meta"):
        model = MODELS.load("mamba2")(num_layers=24, d_model=768).build(spec)
    width, states, heads = 1536, 128, 24
    layer = 768 * (2 * width + 2 * states + heads) + 5 * (width + 2 * states) + 3 * heads + width + width * 768 + 768
    assert sum(parameter.numel() for parameter in model.parameters()) == 50288 * 768 + 24 * layer + 768
