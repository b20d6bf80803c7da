"""mLSTM: the matrix memory of xLSTM, with an exponential input gate, a forget gate and a normaliser for each head.

    i_t = cap(w_i x_t + b_i),   f_t = cap(w_f x_t + b_f),   cap(z) = 15 tanh(z / 15)
    S_t = sigmoid(f_t) S_{t-1} + exp(i_t) k_t^T v_t,   n_t = sigmoid(f_t) n_{t-1} + exp(i_t) k_t
    o_t = q_t S_t / (sqrt(K) max(|q_t n_t| / sqrt(K), 1)),   y_t = W_o (sigmoid(W_g x_t) * norm_h(o_t))

with q, k, v linear maps of x and norm_h a layer norm of every head, without bias.

It runs on `gated_linear_attention`, and n_t is the state of one more value channel, whose value is always one. In place
of the running stabiliser m_t of the paper, which S_t and n_t are divided by, it has the constant 15: the cap of the
gate bounds exp(i_t - 15) by one, so that nothing overflows, and the bound of the normaliser becomes exp(-15).

Source: Beck et al. 2024 (arXiv 2405.04517), section 2.3; the block is that of the 7B model (Beck et al. 2025, arXiv
2503.13427): no convolution or up-projection, capped gates, queries and keys half as wide as the values, and a SwiGLU
behind it (NX-AI/xlstm at 0d13f66353b49ca2878894b220128db7806f510e, xlstm/xlstm_large/model.py). The gates start with
zero weights and b_f from 3 to 6 over the heads (xlstm/blocks/mlstm/cell.py there), and b_i at -10, the negative value
that the paper of the 7B model introduced.

In float16 exp(i_t - 15) k_t is zero where i_t is below about -2, and so at the start; use bfloat16 or float32.

Departures: the kernels of the authors add 1e-6 to the normaliser, whose weight depends on m_t; it is left out. Their
cap of the logits at 30 is left out as well, because it is a part of the readout and not of the mixer.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.models.backbone import KeyWidthConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.linear import Linear, ResidualLinear
from subquad.models.parts.linear_attention import GatedLinearMixer, Projected
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import HeadNorm
from subquad.models.parts.step import shared_norm, step_linear
from subquad.suite.bounds import Width
from subquad.suite.contracts import TaskSpec

CAP = 15.0
"""Bound of the gates before their nonlinearities."""


class MLSTM(GatedLinearMixer):
    """The mixer. Its state: S with n as its last value channel, [B, H, K, V + 1], both divided by exp(15).

    It is refused in float16, where keys times their input gates would be zero.
    """

    norm: HeadNorm

    def __init__(self, config: MLSTMConfig) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.num_heads
        keys = config.key_width
        self.key_dim, self.value_dim = keys // self.num_heads, d_model // self.num_heads + 1
        self.split = (keys, keys, d_model, d_model)
        self.proj = nn.Linear(d_model, sum(self.split), bias=False)
        self.gates = Linear(d_model, 2 * self.num_heads)
        """The input gates of all heads, then the forget gates."""
        self.norm = HeadNorm(self.num_heads, d_model, eps=config.norm_eps, bias=False)
        self.out = ResidualLinear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gates.weight)
        self.gates.bias[: self.num_heads] = -10.0
        self.gates.bias[self.num_heads :] = torch.linspace(3.0, 6.0, self.num_heads)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        """q, k, v with a last channel of ones, the log-decays [..., H], and the gate of the output."""
        x, norm = shared_norm(norm, x)
        q, k, v, gate = step_linear(self.proj, x, norm=norm).split(self.split, dim=-1)
        capped = CAP * torch.tanh(at_least_float32(step_linear(self.gates, x, norm=norm)) / CAP)
        input_gate, forget_gate = capped.chunk(2, dim=-1)
        q, k, v = (z.unflatten(-1, (self.num_heads, -1)) for z in (q, k, v))
        if v.dtype == torch.float16:
            raise ValueError(
                "mlstm: float16 has no room for its input gates, which begin at e^-25; use bfloat16 or float32."
            )
        # one float32 operand would make the operator multiply in float32
        k = (k * torch.exp(input_gate - CAP).unsqueeze(-1)).to(v.dtype)
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        return q, k, v, F.logsigmoid(forget_gate), gate

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None = None) -> Tensor:
        o, n = o.tensor_split([-1], dim=-1)
        # the gradient of a quotient would take more passes over o than that of a product
        factor = at_least_float32(n).abs().clamp(min=math.exp(-CAP)).reciprocal()
        return step_linear(self.out, self.norm(o * factor, gate, gate_activation="sigmoid"), residual=residual)


class MLSTMConfig(KeyWidthConfig):
    """xLSTM with mLSTM layers alone, in the network of its 7B model: RMS norms and SwiGLU."""

    num_heads: Width = 4
    """The 7B model has 8 heads at a width of 4096."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return MLSTM(self)
