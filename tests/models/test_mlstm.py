"""The mLSTM equals the recurrence of its paper with the running stabiliser, written out here from the equations."""

from __future__ import annotations

import torch

from subquad.models import MODELS
from subquad.suite.laws.models import build


def written_out(mixer, x):
    """y [B, T, D] of Beck et al. 2024, equations 19 to 27 with the stabiliser of equations 15 to 17, head by head."""
    batch, length, _ = x.shape
    heads, keys, values = mixer.num_heads, mixer.key_dim, mixer.value_dim - 1
    query, key, value, gate = mixer.proj.weight.split(mixer.split)
    raw = x @ mixer.gates.weight.T + mixer.gates.bias
    raw = 15 * torch.tanh(raw / 15)
    o = torch.empty_like(x)
    for h in range(heads):
        at, out = slice(h * keys, (h + 1) * keys), slice(h * values, (h + 1) * values)
        q, k, v = x @ query[at].T, x @ key[at].T / keys**0.5, x @ value[out].T
        memory, n, m = x.new_zeros(batch, values, keys), x.new_zeros(batch, keys), x.new_zeros(batch, 1)
        for t in range(length):
            log_f, i = torch.log(torch.sigmoid(raw[:, t, heads + h, None])), raw[:, t, h, None]
            new = torch.maximum(log_f + m, i)
            keep, write = torch.exp(log_f + m - new), torch.exp(i - new)
            memory = keep[..., None] * memory + write[..., None] * v[:, t, :, None] * k[:, t, None, :]
            n, m = keep * n + write * k[:, t], new
            least = torch.maximum((n * q[:, t]).sum(-1, keepdim=True).abs(), torch.exp(-m))
            o[:, t, out] = (memory * q[:, t, None, :]).sum(-1) / least
        centred = o[..., out] - o[..., out].mean(-1, keepdim=True)
        o[..., out] = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + mixer.norm.eps)
    return (torch.sigmoid(x @ gate.T) * o * mixer.norm.weight) @ mixer.out.weight.T


@torch.no_grad()
def test_the_mixer_is_the_recurrence_of_the_paper():
    mixer = build(MODELS.load("mlstm"), num_layers=1, d_model=12, num_heads=3, expand_k=0.5).mixers[0]
    mixer.gates.weight.normal_(std=2.0)
    mixer.norm.weight.normal_()
    x = torch.randn(2, 70, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # input gates far below one, around it, and near the cap, where the normaliser decides
    for bias in (-10.0, 0.0, 30.0):
        mixer.gates.bias[:3] = bias
        torch.testing.assert_close(mixer(x), written_out(mixer, x), rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_open_input_gates_stay_finite_in_half_precision():
    mixer = build(MODELS.load("mlstm"), num_layers=1, d_model=16, num_heads=2, dtype=torch.float32).mixers[0]
    x = torch.randn(1, 300, 16, generator=torch.Generator().manual_seed(0))
    mixer.gates.bias[:] = 1000.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(mixer(x.bfloat16())).all()


def test_gates_start_closed_and_remembering():
    mixer = build(MODELS.load("mlstm"), num_heads=4).mixers[0]
    assert not mixer.gates.weight.any()
    assert mixer.gates.bias.tolist() == [-10, -10, -10, -10, 3, 4, 5, 6]
