"""The sLSTM layer equals that of its paper, written out here from the equations, without a stabiliser."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from subquad.models import MODELS
from subquad.suite.laws.models import build


def written_out(mixer, x):
    """y [B, T, D] of Beck et al. 2024, equations 8 to 14 with the layer of figure 10, head by head."""
    batch, length, d_model = x.shape
    _, heads, width, _ = mixer.gates.shape
    seen = x
    if mixer.conv_weight is not None:
        padded = F.pad(x.transpose(1, 2), (mixer.taps - 1, 0))
        convolved = F.conv1d(padded, mixer.conv_weight[:, None], mixer.conv_bias, groups=d_model).transpose(1, 2)
        seen = convolved * torch.sigmoid(convolved)
    y = torch.empty_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        h, c, n = (x.new_zeros(batch, width) for _ in range(3))
        for t in range(length):
            inputs = (seen, seen, x, x)
            i, f, z, o = (
                u[:, t, part] @ mixer.gates[gate, head] + h @ mixer.recurrent[gate, head] + mixer.bias[gate, head]
                for gate, u in enumerate(inputs)
            )
            c = torch.sigmoid(f) * c + torch.exp(i) * torch.tanh(z)
            n = torch.sigmoid(f) * n + torch.exp(i)
            h = torch.sigmoid(o) * c / n
            centred = h - h.mean(-1, keepdim=True)
            y[:, t, part] = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + mixer.norm.eps)
    return y * mixer.norm.weight


@torch.no_grad()
def test_the_mixer_is_the_layer_of_the_paper():
    for taps in (4, None):
        mixer = build(MODELS.load("slstm"), num_layers=1, d_model=12, num_heads=3, d_conv=taps).mixers[0]
        for parameter in (mixer.recurrent, mixer.bias, mixer.gates, mixer.norm.weight):
            parameter.normal_()
        x = torch.randn(2, 40, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(mixer(x), written_out(mixer, x), rtol=1e-9, atol=1e-11)


def test_biases_of_the_forget_gate_fall_and_recurrent_maps_start_at_zero():
    first, last = build(MODELS.load("slstm"), num_layers=2, d_model=16, num_heads=2).mixers
    for mixer in (first, last):
        assert not mixer.recurrent.any()
        assert not mixer.bias[[0, 2, 3]].any()
        assert mixer.bias[1, :, 0].tolist() == [5, 5]
        assert mixer.bias[1, :, -1].tolist() == [-7, -7]
        assert (mixer.bias[1].diff() < 0).all()
    # channels of the last layer remember for longer
    assert (last.bias[1, :, 1:-1] > first.bias[1, :, 1:-1]).all()
