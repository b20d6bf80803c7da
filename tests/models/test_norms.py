"""The norm of heads is the group norm of torch, times the activation of its gate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from subquad.kernels.backend import triton_missing
from subquad.kernels.norm import norm as norm_operator
from subquad.models import MODELS
from subquad.models.parts import norms
from subquad.models.parts.norms import HeadNorm, RMSNorm
from subquad.suite.laws.models import build
from tests.models.on_kernels import kernels_equal_plain_pytorch


def make_norm(heads, width, *, bias=True):
    norm = HeadNorm(heads, heads * width, eps=1e-3, bias=bias).double()
    g = torch.Generator().manual_seed(width)
    for parameter in norm.parameters():
        parameter.data.normal_(generator=g)
    x, residual = torch.randn(2, 2, 5, heads, width, generator=g, dtype=torch.float64)
    gate = torch.randn(2, 5, heads * width, generator=g, dtype=torch.float64)
    return norm, x, residual, gate


def group_norm(norm, x):
    """torch's group norm of x [..., H, V]."""
    rows = x.flatten(0, -3).flatten(1)
    return F.group_norm(rows, norm.num_groups, norm.weight, norm.bias, norm.eps).view(*x.shape[:-2], -1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_it_is_the_group_norm_of_torch_times_the_gate(heads, bias):
    norm, x, residual, gate = make_norm(heads, 8, bias=bias)
    expected = group_norm(norm, x)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(x, gate), expected * F.silu(gate))
    torch.testing.assert_close(norm(x, gate, gate_activation="sigmoid"), expected * torch.sigmoid(gate))
    torch.testing.assert_close(norm(x, gate, residual=residual), group_norm(norm, x + residual) * F.silu(gate))
    # one position, as in decoding
    torch.testing.assert_close(norm(x[:, 0], gate[:, 0]), expected[:, 0] * F.silu(gate[:, 0]))


def test_the_result_is_wide_alone_and_has_the_dtype_of_its_gate():
    norm, x, residual, gate = make_norm(3, 8)
    norm, x, gate = norm.float(), x.bfloat16(), gate.bfloat16()
    assert norm(x).dtype == torch.float32
    assert norm(x, residual=residual.float()).dtype == torch.float32
    assert norm(x.float(), gate).dtype == torch.bfloat16
    expected = group_norm(norm, x.float()) * torch.sigmoid(gate.float())
    # rounded once: float32 in between
    assert torch.equal(norm(x, gate, gate_activation="sigmoid"), expected.bfloat16())


def test_an_rms_norm_before_a_product_takes_either_gate():
    norm = RMSNorm(8, eps=1e-3)
    x, gate = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    expected = F.rms_norm(x, (8,), norm.weight, norm.eps)
    torch.testing.assert_close(norm.before_product(x, gate), expected * F.silu(gate))
    torch.testing.assert_close(norm.before_product(x, gate, gate_activation="sigmoid"), expected * torch.sigmoid(gate))


@pytest.mark.skipif(triton_missing() is not None, reason="needs Triton")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", ["mlstm", "rwkv6", "rwkv7", "lightning"])
def test_mixers_on_the_kernels_equal_those_on_plain_pytorch(name, monkeypatch):
    config = MODELS.load(name)
    heads = {"head_dim": 8} if "head_dim" in config.model_fields else {"num_heads": 3}
    mixer = build(config, num_layers=1, d_model=24, dtype=torch.float32, **heads).mixers[0]
    kernels_equal_plain_pytorch(
        mixer, 2, lambda backend: monkeypatch.setattr(norms, "norm", partial(norm_operator, backend=backend))
    )
