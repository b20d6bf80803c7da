"""Gated linear attention (GLA): every key channel has its own decay, which depends on the input.

    a_t = sigmoid(W_2 W_1 x_t + b)^(1/16),   S_t = diag(a_t) S_{t-1} + k_t^T v_t,   o_t = q_t S_t / sqrt(K)
    y_t = W_o (swish(W_g x_t) * norm_h(o_t))

with q_t, k_t, v_t linear maps of x_t and norm_h an RMS norm of every head.

Source: Yang et al. 2023, section 4.4; GSA paper, section 2.3 and appendix C.1: queries and keys are half as wide as the
values and have a head size of 256, so the state of a layer has 256 D elements.

Departures: the norm of a head is an RMS norm instead of a layer norm, and the output gate has no bias. Both are as in
the code that the GSA paper ran (fla-org/flash-linear-attention, fla/layers/gla.py at
0c4ada1ffe02c3b6c677cbb236764320a61e52c1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.forget_gate import forget_gate
from subquad.models.backbone import KeyWidthConfig
from subquad.models.parts.linear import Linear, ResidualLinear
from subquad.models.parts.linear_attention import GatedLinearMixer, Projected
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import RMSNorm
from subquad.models.parts.step import maps_of, shared_norm, step_linear
from subquad.suite.bounds import Positive, Width
from subquad.suite.contracts import TaskSpec


class GLA(GatedLinearMixer):
    """The mixer. Its state: [B, H, K, V]."""

    also_called: ClassVar[Mapping[str, str]] = {"proj": "qkv"}
    """The name that attention has for the same projections, for `train.init_from`."""

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.num_heads
        keys = config.key_width
        self.key_dim, self.value_dim = keys // self.num_heads, d_model // self.num_heads
        self.damping = config.damping
        self.from_attention = config.from_attention
        self.split = (keys, keys, d_model) if config.from_attention else (keys, keys, d_model, d_model)
        self.proj = nn.Linear(d_model, sum(self.split), bias=False)
        self.decay_down = nn.Linear(d_model, config.decay_rank, bias=False)
        self.decay_up = Linear(config.decay_rank, keys)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.out = ResidualLinear(d_model, d_model, bias=False)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        x, norm = shared_norm(norm, x)
        projected, low = maps_of((self.proj, self.decay_down), x, norm)
        q, k, v, *gates = projected.split(self.split, dim=-1)
        if self.from_attention:
            q, k = F.relu(q), F.relu(k)
        decay = step_linear(self.decay_up, low)
        log_decay, _ = forget_gate(decay, damping=self.damping, complement=False)
        q, k, log_decay = (z.unflatten(-1, (self.num_heads, self.key_dim)) for z in (q, k, log_decay))
        return q, k, v.unflatten(-1, (self.num_heads, self.value_dim)), log_decay, next(iter(gates), None)


class GLAConfig(KeyWidthConfig):
    """GLA in the network of the GSA paper: RMS norms and SwiGLU."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (*KeyWidthConfig.left_out_when_off, "from_attention")

    damping: Positive = 16.0
    """The forget gate is the sigmoid to the power 1 / damping, which keeps it near one."""
    decay_rank: Width = 16
    """Inner width of the low-rank map from x to the decays."""
    from_attention: bool = False
    """The form that starts with the weights of a Transformer (GSA paper, section 4.2): ReLU of queries and keys, and no
    output gate. With `expand_k: 1`, all projections have the shapes of attention."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return GLA(self)
