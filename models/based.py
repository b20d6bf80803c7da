"""The linear attention of Based: features whose products are the Taylor series of the exponential up to its square.

    phi(q) phi(k)^T = 1 + s + s^2 / 2   with s = q k^T / sqrt(F)            for q, k of F channels a head
    S_t = S_{t-1} + phi(k_t)^T v_t,   z_t = z_{t-1} + phi(k_t),   o_t = phi(q_t) S_t / (phi(q_t) z_t),   y_t = W_o o_t

A term is at least a half, so the normaliser never comes near zero. Queries and keys have F = 16 channels, and values
have d_model / num_heads channels.

Source: Arora et al. 2024 (arXiv 2402.18668), section 4; HazyResearch/based at
202f499a58363331749969cf8751f7f1183808cd, based/models/mixers/linear_attention.py. The network around the mixer is that
of their model of 360M parameters (train/configs/experiment/reference/based-360m.yaml at
2f51aa59c1a02ee25eafaa168a4080239184bc4a): RMS norms, and SwiGLU twice as wide as the model. That model is a hybrid: of
27 layers five have this mixer, five attention with a window, and the others a gated convolution. Here every layer has
this mixer; the model `hybrid` builds such lists, and `attention` has the option `window`.

Departure: x_i x_j and x_j x_i are one feature instead of two, times sqrt(2). The products are the same with
1 + F + F (F + 1) / 2 features instead of 1 + F + F^2, for F = 16 with 153 instead of 273, and the state is as much
smaller.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.models.backbone import BackboneConfig
from subquad.models.linear_attention import LinearAttention
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.linear_attention import Projected
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import NormKind
from subquad.models.parts.step import step_linear
from subquad.suite.bounds import Ratio, Width
from subquad.suite.contracts import TaskSpec


class TaylorFeatures(nn.Module):
    """phi(x) [..., 1 + F + F (F + 1) / 2] of x [..., F]: one, every element, and all products of two."""

    first: Tensor
    second: Tensor
    weight: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(width, width)
        # products with these matrices select the elements of each pair; indexing has a slow gradient on a GPU
        eye = torch.eye(width)
        self.register_buffer("first", eye[:, rows], persistent=False)
        self.register_buffer("second", eye[:, columns], persistent=False)
        weight = torch.where(rows == columns, 0.5**0.5, 1.0) / width**0.5
        self.register_buffer("weight", weight.to(torch.get_default_dtype()), persistent=False)
        self.scale = width**-0.25

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + sum(self.first.shape)

    def forward(self, x: Tensor) -> Tensor:
        pairs = (x @ self.first.to(x.dtype)) * (x @ self.second.to(x.dtype)) * self.weight.to(x.dtype)
        return torch.cat([torch.ones_like(x[..., :1]), x * self.scale, pairs.to(x.dtype)], dim=-1)


class Based(LinearAttention):
    """The mixer. Its state: S with z as its last value channel, [B, H, 1 + F + F (F + 1) / 2, V + 1]."""

    def __init__(self, config: BasedConfig) -> None:
        Mixer.__init__(self)
        d_model, self.num_heads = config.d_model, config.num_heads
        self.value_dim = d_model // config.num_heads + 1
        keys = config.num_heads * config.feature_dim
        self.split = (keys, keys, d_model)
        self.qkv = nn.Linear(d_model, sum(self.split), bias=False)
        self.features = TaylorFeatures(config.feature_dim)
        self.key_dim = self.features.width
        self.out = ResidualLinear(d_model, d_model, bias=False)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        projected = step_linear(self.qkv, x, norm=norm).split(self.split, dim=-1)
        q, k, v = (z.unflatten(-1, (self.num_heads, -1)) for z in projected)
        # one float32 operand would make the operator multiply in float32
        q, k = (self.features(at_least_float32(z)).to(v.dtype) for z in (q, k))
        return q, k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), None, None

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None = None) -> Tensor:
        dtype = o.dtype
        o, z = at_least_float32(o).tensor_split([-1], dim=-1)
        # all features of padding are zero, and then so is z
        return step_linear(self.out, (o / (z + 1e-12)).flatten(-2).to(dtype), residual=residual)


class BasedConfig(BackboneConfig):
    """Based with its linear attention in every layer."""

    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 2.0
    norm: NormKind = "rms"
    num_heads: Width = 4
    """The model of 360M parameters has 16 heads of 64 channels."""
    feature_dim: Width = 16
    """F, the number of channels of a query or key in a head."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return Based(self)
