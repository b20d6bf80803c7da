"""RWKV-6 equals the recurrence of its paper, written out here from the equations, and starts as its code does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from subquad.kernels.backend import triton_missing
from subquad.kernels.rwkv6_inputs import rwkv6_inputs
from subquad.models import MODELS, rwkv6
from subquad.suite.laws.models import build, unroll
from tests.models.on_kernels import kernels_equal_plain_pytorch


def written_out(mixer, x):
    """y [B, T, D] of Peng et al. 2024, equations 16 to 20 in our letters, one position and one head at a time."""
    batch, length, width = x.shape
    size, heads = mixer.head_dim, width // mixer.head_dim
    rank = mixer.mix_up.shape[1]
    maps = {"k": mixer.key, "v": mixer.value, "r": mixer.receptance, "g": mixer.gate}
    memory = x.new_zeros(batch, heads, size, size)
    last, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(length):
        now = x[:, t]
        shared = now + (last - now) * mixer.mu[5]
        found = {}
        for i, use in enumerate("wkvrg"):
            low = torch.tanh(shared @ mixer.mix_down[:, i * rank : (i + 1) * rank]) @ mixer.mix_up[i]
            mixed = now + (last - now) * (mixer.mu[i] + low)
            found[use] = mixed @ maps[use].weight.T if use in maps else mixed
        raw = mixer.decay + torch.tanh(found["w"] @ mixer.decay_down) @ mixer.decay_up
        decay = torch.exp(-torch.exp(raw))
        heard = torch.empty_like(now)
        for h in range(heads):
            at = slice(h * size, (h + 1) * size)
            write = found["k"][:, at, None] * found["v"][:, None, at]
            read = memory[:, h] + mixer.bonus[at, None] * write
            o = (found["r"][:, at, None] * read).sum(1)
            centred = o - o.mean(-1, keepdim=True)
            heard[:, at] = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 64e-5)
            memory[:, h] = decay[:, at, None] * memory[:, h] + write
        heard = heard * mixer.norm.weight + mixer.norm.bias
        gate = found["g"] * torch.sigmoid(found["g"])
        outputs.append((gate * heard) @ mixer.out.weight.T)
        last = now
    return torch.stack(outputs, 1)


@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_paper():
    options = {"num_layers": 1, "d_model": 12, "head_dim": 4, "mix_rank": 3, "decay_rank": 5}
    mixer = build(MODELS.load("rwkv6"), **options).mixers[0]
    # the low-rank maps start near zero
    for parameter in (mixer.mix_down, mixer.mix_up, mixer.decay_down, mixer.decay_up, mixer.bonus):
        parameter.normal_(std=0.5)
    mixer.norm.weight.normal_()
    mixer.norm.bias.normal_()
    x = torch.randn(2, 70, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = written_out(mixer, x)
    torch.testing.assert_close(mixer(x), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(unroll(mixer, x, mixer.init_state(2, 70))[0], wanted, rtol=1e-10, atol=1e-12)


def test_it_starts_as_the_authors_code_does():
    model = build(MODELS.load("rwkv6"), num_layers=3, d_model=128)
    first, last = model.mixers[0], model.mixers[4]
    assert (first.num_heads, first.head_dim) == (2, 64)
    torch.testing.assert_close(first.decay[[0, 127]], torch.tensor([-6.0, -1.0], dtype=torch.float64))
    # mu of w is 1 - i / D in the first layer, and 1 - (i / D)^(1 / 3) in the last one of three
    half = torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(first.mu[0, 64], half)
    torch.testing.assert_close(last.mu[0, 64], 1 - half ** (1 / 3))
    torch.testing.assert_close(last.mu[2, 64], 1 - half ** (1 / 3) - 0.3)
    torch.testing.assert_close(
        last.bonus[[0, 1, 126]], torch.tensor([1.0, 1 - 1 / 127 + 0.1, 1 / 127], dtype=half.dtype)
    )
    assert first.mix_down.abs().max() <= 1e-4
    assert 0.0099 < first.mix_up.abs().max() <= 0.01
    (undecayed,) = (group for group in model.param_groups() if group.name == "ssm")
    assert undecayed.weight_decay == 0.0
    assert any(parameter is first.mix_down for parameter in undecayed.parameters)


@pytest.mark.skipif(triton_missing() is not None, reason="needs Triton")
@pytest.mark.usefixtures("poisoned_memory")
def test_time_mixing_on_the_kernels_equals_that_on_plain_pytorch(monkeypatch):
    mixer = build(MODELS.load("rwkv6"), num_layers=1, d_model=24, head_dim=8).mixers[0]
    kernels_equal_plain_pytorch(
        mixer, 3, lambda backend: monkeypatch.setattr(rwkv6, "rwkv6_inputs", partial(rwkv6_inputs, backend=backend))
    )
