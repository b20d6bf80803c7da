"""Lightning attention: linear attention with one fixed decay a head, slower in deeper layers and later heads.

    q_t, k_t, v_t = silu(W_q x_t), silu(W_k x_t), silu(W_v x_t)
    S_t = exp(-s) S_{t-1} + k_t^T v_t,   o_t = q_t S_t,   y_t = W_o (sigmoid(W_g x_t) * norm(o_t))
    s = 2^(-8 h / H) (1 - l / (L - 1) + 1e-5)      for head h = 1..H of layer l = 0..L-1

with norm an RMS norm over the channels of all heads. With a single layer, the factor of the layer is 1 + 1e-5.

Source: Qin et al. 2024 (arXiv 2405.17381, TransNormerLLM with lightning attention); MiniMax-01 (arXiv 2501.08313),
section 2.2. What these leave open (the activation of values, the norm over all heads, the sigmoid of the gate, the
layer's factor of s) is as in the code of MiniMax-Text-01 (huggingface/transformers at
008e574391258935f3ecc3035c882e73bbcac419, src/transformers/models/minimax/modular_minimax.py).

Departures: that code has L - 1 + 1e-5 in place of L - 1 in the factor of the layer, so that a single layer needs no
case of its own. The rows of W_q, W_k and W_v are not interleaved by heads, which permutes them. The network around the
mixer is that of GLA, with norms before the branches and SwiGLU, where MiniMax-01 has experts, and softmax attention in
every eighth layer (the model `hybrid` builds such lists of layers). Heads are d_model / num_heads wide.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.models.backbone import SwiGLUConfig
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.linear_attention import GatedLinearMixer, Projected
from subquad.models.parts.norms import RMSNorm
from subquad.models.parts.step import step_linear
from subquad.suite.bounds import Width
from subquad.suite.contracts import TaskSpec


class Lightning(GatedLinearMixer):
    """The mixer. Its state: [B, H, K, K]."""

    log_decay: Tensor
    norm: RMSNorm
    scale = 1.0

    def __init__(self, config: LightningConfig, layer: int) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.num_heads
        self.key_dim = self.value_dim = d_model // self.num_heads
        self.proj = nn.Linear(d_model, 4 * d_model, bias=False)
        self.norm = RMSNorm(d_model, eps=config.norm_eps)
        self.out = ResidualLinear(d_model, d_model, bias=False)
        head = torch.arange(1, self.num_heads + 1, dtype=torch.float64)
        slope = 2.0 ** (-8 * head / self.num_heads) * (1 - layer / max(1, config.num_layers - 1) + 1e-5)
        self.register_buffer("log_decay", -slope.to(torch.get_default_dtype()), persistent=False)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        width = self.out.in_features
        qkv, gate = step_linear(self.proj, x, norm=norm).split((3 * width, width), dim=-1)
        q, k, v = F.silu(qkv).unflatten(-1, (3, self.num_heads, self.key_dim)).unbind(-3)
        return q, k, v, self.log_decay, gate

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None = None) -> Tensor:
        assert gate is not None
        y = self.norm.before_product(o.flatten(-2), gate, gate_activation="sigmoid")
        return step_linear(self.out, y, residual=residual)


class LightningConfig(SwiGLUConfig):
    """Lightning attention in a network of RMS norms and SwiGLU."""

    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    num_heads: Width = 4
    """MiniMax-01 has 64 heads of 128 channels."""

    def mixer(self, layer: int, spec: TaskSpec) -> Lightning:
        return Lightning(self, layer)
