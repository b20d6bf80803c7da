"""Linear attention: a feature map phi takes the place of the softmax.

    S_t = S_{t-1} + phi(k_t)^T v_t,   z_t = z_{t-1} + phi(k_t),   o_t = phi(q_t) S_t / (phi(q_t) z_t)

Source: Katharopoulos et al. 2020, equations 8-12 and 18-20 (phi = elu + 1, normalised: the defaults); GSA paper,
section 2.2, equation 5 (phi = identity, not normalised).

Departures: phi(q_t) S_t and phi(q_t) z_t are both multiplied by K^-0.5, so that outputs that are not normalised are
smaller by this factor; and 1e-6 is added to the product with z_t, which is zero where all features of a query are.

It runs on `gated_linear_attention` without decay. The normaliser z is computed as the state of one more value channel,
whose value is always one.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.linear_attention import GatedLinearMixer, Projected
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import RMSNorm
from subquad.models.parts.step import step_linear
from subquad.suite.bounds import Width
from subquad.suite.contracts import TaskSpec

FeatureMap = Literal["elu+1", "relu", "swish", "identity"]


def feature_map(kind: FeatureMap, x: Tensor) -> Tensor:
    """phi(x), element by element."""
    if kind == "elu+1":
        return F.elu(x) + 1
    if kind == "relu":
        return F.relu(x)
    return F.silu(x) if kind == "swish" else x


class LinearAttention(GatedLinearMixer):
    """The mixer. Its state: [B, H, K, V], with one more value channel where the output is normalised."""

    norm: RMSNorm | None

    def __init__(self, config: LinearAttentionConfig) -> None:
        super().__init__()
        d_model = config.d_model
        self.num_heads = config.num_heads
        self.key_dim = d_model // config.num_heads
        self.value_dim = self.key_dim + config.normalize
        self.kind: FeatureMap = config.feature_map
        self.normalize = config.normalize
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.norm = RMSNorm(self.key_dim, eps=config.norm_eps) if config.output_norm == "rms" else None
        self.out = ResidualLinear(d_model, d_model, bias=False)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        q, k, v = step_linear(self.qkv, x, norm=norm).unflatten(-1, (3, self.num_heads, self.key_dim)).unbind(-3)
        # one float32 operand would make the operator multiply in float32
        q, k = (feature_map(self.kind, at_least_float32(z)).to(v.dtype) for z in (q, k))
        if self.normalize:
            v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        return q, k, v, None, None

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None = None) -> Tensor:
        dtype = o.dtype
        if self.normalize:
            o, z = at_least_float32(o).tensor_split([-1], dim=-1)
            # with relu all features of a query may be zero, and then so is z
            o = o / (z + 1e-6)
        o = o if self.norm is None else self.norm.before_product(o)
        return step_linear(self.out, o.flatten(-2).to(dtype), residual=residual)


class LinearAttentionConfig(BackboneConfig):
    """Linear attention in the network of the other baselines: norms before the branches, and an MLP."""

    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    num_heads: Width = 4
    feature_map: FeatureMap = "elu+1"
    normalize: bool = True
    """Divide by phi(q) z. This needs features that cannot be negative."""
    output_norm: Literal["none", "rms"] = "none"
    """`rms`: an RMS norm of every head's output, which replaces the normaliser in later work (Qin et al. 2022)."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.normalize and self.feature_map in ("swish", "identity"):
            raise ValueError(
                f"{type(self).__name__}: feature_map={self.feature_map!r} can be negative, so its sum cannot "
                "normalise; set normalize to false, or use 'elu+1' or 'relu'."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return LinearAttention(self)
