"""MesaNet: every query reads the linear map that fits the values so far best, found anew at each position.

    q_t, k_t = unit(silu(conv(W x)_t)),   v_t = W_v x_t,   b_t = sigmoid(w_b x_t + c_b),   a_t = sigmoid(w_a x_t + c_a)
    H_t = a_t H_{t-1} + b_t k_t k_t^T,    G_t = a_t G_{t-1} + b_t k_t v_t^T
    o_t = G_t^T (H_t + diag(l))^-1 q_t,   y_t = W_o norm_h(o_t)

G_t^T (H_t + diag(l))^-1 is the matrix M with the least sum_j a_{j+1} ... a_t b_j |v_j - M k_j|^2 + sum_i l_i |M_i|^2,
with M_i its columns and l, one a key channel, learned and at least 1/4. The inverse is never formed: 30 steps of
conjugate gradients find z_t = (H_t + diag(l))^-1 q_t at all positions at once. A step needs H_t p_t for vectors p_t,
which is gated linear attention with p as its queries and the keys as its values; o follows from z in the same way. So
the mixer runs on the operator `gated_linear_attention`: 31 calls in a forward pass, as many again in a backward pass,
and the gradients of two.

Source: von Oswald et al. 2025 (MesaNet: Sequence Modeling by Locally Optimal Test-Time Training, arXiv 2506.05233).
Parameters and their start are those of flash-linear-attention (fla-org/flash-linear-attention at
bc3b101dcb713ddc5bd8924b66754eb68b5ccf89): fla/layers/mesa_net.py, operator fla/ops/mesa_net/naive.py.

Departures: the steps are taken in float32 at least and without epsilons in their denominators, where that operator adds
1e-5; z stays in float32 when it reads, as in decoding; and all begin at zero, where its decoding begins at
q_t / (diag(H_t) + l). The output gate, an option of that layer, is left out. Widths of heads follow from `d_model`, and
those of keys from `expand_k`.

Parameters of a layer, with E = `expand_k`: (2 + 2 E) D^2 for q, k, v and the output, 2 (D + 1) H for the gates, 2 E D W
for convolutions of W taps, E D for l, and V for the norm. Recurrent state: the last W - 1 inputs of the convolutions
and K (K + V) elements a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d_heads, causal_conv1d_step
from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from subquad.models.backbone import KeyWidthConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.conjugate_gradients import solve
from subquad.models.parts.initial import reset_taps
from subquad.models.parts.linear import Linear, ResidualLinear
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.norms import RMSNorm, unit
from subquad.models.parts.step import maps_of, shared_norm, step_linear
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Factor, Positive, Ratio
from subquad.suite.contracts import TaskSpec

LEAST_RIDGE = 0.25
"""The smallest l, which keeps the system solvable in few steps."""

State = tuple[Tensor, Tensor]


def _of_sequence(p: Tensor, strong: Tensor, k: Tensor, log_decay: Tensor, ridge: Tensor) -> Tensor:
    """(H_t + diag(l)) p_t at all positions, for p [B, T, H, K] and strong_t = b_t k_t."""
    o = gated_linear_attention(p, strong, k, log_decay, scale=1.0)
    assert isinstance(o, Tensor)
    return o + ridge * p


def _of_position(p: Tensor, gram: Tensor, ridge: Tensor) -> Tensor:
    """(H + diag(l)) p for p [B, H, K] and the state H [B, H, K, K], which is symmetric."""
    return (gram @ p.unsqueeze(-1)).squeeze(-1) + ridge * p


class MesaNetMixer(FusedStepMixer):
    """The mixer. Its state: the last W - 1 inputs of the convolutions, then H and G side by side, [B, H, K, K + V]."""

    ssm_names = ("ridge",)

    def __init__(self, config: MesaNetConfig) -> None:
        super().__init__()
        d_model, heads, keys = config.d_model, config.num_heads, config.key_width
        self.num_heads, self.num_steps = heads, config.num_steps
        self.key_dim, self.value_dim = keys // heads, d_model // heads
        self.split = (2 * keys, d_model)
        self.proj = nn.Linear(d_model, sum(self.split), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * keys, config.d_conv))
        self.gates = Linear(d_model, 2 * heads)
        """The logits of b of all heads, then those of a."""
        self.ridge = nn.Parameter(torch.empty(heads, self.key_dim))
        """[H, K], with l = 1/4 + softplus(ridge)."""
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.out = ResidualLinear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset_taps(self.conv_weight)
        # l starts at one
        self.ridge.fill_(math.log(math.expm1(1.0 - LEAST_RIDGE)))

    def _read(self, x: Tensor, norm: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inputs of the convolutions, v [..., H, V], b and the logarithm of a [..., H], of norm(x)."""
        x, norm = shared_norm(norm, x)
        projected, gates = maps_of((self.proj, self.gates), x, norm)
        qk, v = projected.split(self.split, dim=-1)
        beta, decay = at_least_float32(gates).chunk(2, dim=-1)
        return qk, v.unflatten(-1, (self.num_heads, -1)), torch.sigmoid(beta), F.logsigmoid(decay)

    def _ridge(self) -> Tensor:
        return LEAST_RIDGE + F.softplus(at_least_float32(self.ridge))

    def _mix(self, x: Tensor, padding: LeftPadding | None, *, final: bool) -> tuple[Tensor, State | None]:
        qk, v, beta, log_decay = self._read(x)
        heads = (self.num_heads, self.key_dim)
        # without biases, keys of padding are zero, and a state of zeros stays zero
        q, k, *window = causal_conv1d_heads(
            blank(qk, padding),
            self.conv_weight,
            (heads, heads),
            num_unit=2,
            activation="silu",
            return_final_state=final,
        )
        wide = at_least_float32(k)
        strong = beta.unsqueeze(-1) * wide
        z = solve(_of_sequence, at_least_float32(q), strong, wide, log_decay, self._ridge(), num_steps=self.num_steps)
        if not final:
            o = gated_linear_attention(z, strong, v, log_decay, scale=1.0)
            assert isinstance(o, Tensor)
            return self._output(o), None
        both = torch.cat([k.to(v.dtype), v], dim=-1)
        o, state = gated_linear_attention(z, strong, both, log_decay, scale=1.0, return_final_state=True)
        return self._output(o[..., self.key_dim :]), (window[0], state)

    def _output(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        return step_linear(self.out, o.flatten(-2), norm=self.norm, residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        return self._mix(x, None, final=False)[0]

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        y, after = self._mix(x, padding, final=True)
        assert after is not None
        return y, (after[0].to(state[0].dtype), after[1])

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.proj.weight)
        window = weight.new_zeros(batch_size, self.conv_weight.shape[1] - 1, self.split[0]).transpose(1, 2)
        return window, weight.new_zeros(batch_size, self.num_heads, self.key_dim, self.key_dim + self.value_dim)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        window, before = state
        qk, v, beta, log_decay = self._read(x_t, norm)
        convolved = causal_conv1d_step(at_least_float32(qk), self.conv_weight, None, window, activation="silu")
        q, k = unit(convolved.unflatten(-1, (2 * self.num_heads, -1))).chunk(2, dim=-2)
        both = torch.cat([k, at_least_float32(v)], dim=-1)
        strong = beta.unsqueeze(-1) * k
        _, after = gated_linear_attention_step(strong, strong, both, log_decay, before, in_place=True)
        gram, read = after.split([self.key_dim, self.value_dim], dim=-1)
        z = solve(_of_position, q, gram, self._ridge(), num_steps=self.num_steps)
        o = (z.unsqueeze(-2) @ read).squeeze(-2)
        return self._output(o.to(v.dtype), residual), (window, after)

    def state_size(self, length: int) -> int:
        window = self.split[0] * (self.conv_weight.shape[1] - 1)
        return window + self.num_heads * self.key_dim * (self.key_dim + self.value_dim)


class MesaNetConfig(KeyWidthConfig):
    """MesaNet in the network of its release: RMS norms and SwiGLU."""

    expand_k: Ratio = 1.0
    d_conv: Factor = 4
    """Taps of the convolutions of queries and keys."""
    num_steps: Factor = 30
    """Steps of conjugate gradients for each position."""
    ssm_lr: Positive | None = None

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if not 2 <= self.d_conv <= 4:
            raise ValueError(f"mesanet: needs d_conv in 2..4, got {self.d_conv}.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return MesaNetMixer(self)
