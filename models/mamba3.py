"""Mamba-3 (SISO): a state space model with rotated B and C and a trapezoidal rule, without a convolution.

    z, x, B, C, dt, a, l, w = W_in u        [E D, E D, N, N, H, H, H, R]
    dt = softplus(dt + b_dt),   a = max(softplus(a), 1e-4),   l = sigmoid(l)
    theta_t = theta_{t-1} + dt_t pi tanh(w_t),  k_t = R(theta_t) (norm(B_t) + b_B),  q_t = R(theta_t) (norm(C_t) + b_C)
    S_t = exp(-dt_t a_t) (S_{t-1} + (1 - l_t) dt_t k_{t-1}^T x_{t-1}) + l_t dt_t k_t^T x_t
    y_t = W_out ((q_t S_t + D x_t) * silu(z_t))                                  for each of H heads of width P

with E the option `expand`, R(theta) the rotation of the first R pairs of channels, D one number a head, b_B and b_C one
vector a head, and B, C and w shared by all heads. A rotation that depends on the data makes the transition complex, and
with l = 1 the rule is that of Mamba-2.

It runs on `ssd` once: H_t = S_t + (1 - l_{t+1}) dt_{t+1} k_t^T x_t is a state that one position at a time writes to,
with the weight l_t dt_t + (1 - l_{t+1}) dt_{t+1}, and q_t S_t = exp(-dt_t a_t) q_t H_{t-1} + l_t dt_t (q_t k_t) x_t.
`rotated_keys` computes k and q.

Source: Lahoti et al. 2026 (arXiv 2603.15569); a in the projection, the norms, biases and initial values are as in the
authors' code (state-spaces/mamba at 0348a3dd7cd7b5a997d0bce5131c42146cc09324, mamba_ssm/modules/mamba3.py), without its
options for several inputs and outputs (MIMO) and for a norm of the output.

Departures: rotated pairs are channels i and i + R, where the code pairs neighbours, which permutes channels. There is
one group of B and C, the default of the code. Since that commit, the code has replaced the softplus of a by 1 + a where
a is positive and 1 / (1 - a) elsewhere; here it is that of the commit and of the paper.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels.gated_linear_attention import gated_linear_attention_step
from subquad.kernels.rotated_keys import rotate_pairs, rotated_keys, turns
from subquad.kernels.ssd import ssd, ssd_steps
from subquad.kernels.swiglu import swiglu
from subquad.models.mamba2 import HeadsConfig
from subquad.models.parts.casts import as_autocast, at_least_float32
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.initial import step_bias
from subquad.models.parts.linear import ResidualLinear, linear_behind, split_linear
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import RMSNorm
from subquad.models.parts.recompute import Recomputing, at_once, spares
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Ratio
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, Tensor, Tensor, Tensor]
LEAST_RATE, NORM_EPS = 1e-4, 1e-5
"""The least a, and what the norms of B and C add to the mean square."""


class Mamba3(Mixer):
    """The mixer. Its state: theta [B, H, R] modulo 2 pi, S [B, H, N, P], and the last k [B, H, N] and x [B, H, P]."""

    operator = staticmethod(ssd)
    ssm_names = ("D", "dt_bias")

    def __init__(self, config: Mamba3Config) -> None:
        super().__init__()
        width = config.width
        self.head_dim, self.d_state, self.pairs = config.head_size, config.d_state, config.pairs
        self.num_heads = width // self.head_dim
        self.dt_min, self.dt_max = config.dt_min, config.dt_max
        self.recompute, self.num_layers = config.recompute, config.num_layers
        self.residual_scale = config.num_layers**-0.5 if config.init_residual == "scaled" else 1.0
        heads = self.num_heads
        self.sizes = (width, width, self.d_state, self.d_state, heads, heads, heads, self.pairs)
        # gradients of the small parts together are one product
        self.parts = (width, width, sum(self.sizes[2:]))
        self.in_proj = nn.Linear(config.d_model, sum(self.sizes), bias=False)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.B_norm = RMSNorm(self.d_state, eps=NORM_EPS)
        self.C_norm = RMSNorm(self.d_state, eps=NORM_EPS)
        self.B_bias = nn.Parameter(torch.empty(heads, self.d_state))
        self.C_bias = nn.Parameter(torch.empty(heads, self.d_state))
        self.out = ResidualLinear(width, config.d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # the authors keep torch's initialisation of linear layers
        self.in_proj.reset_parameters()
        self.out.reset_parameters()
        self.out.weight.mul_(self.residual_scale)
        self.dt_bias.copy_(step_bias(self.dt_bias, self.dt_min, self.dt_max))
        for ones in (self.D, self.B_bias, self.C_bias):
            nn.init.ones_(ones)

    def _parts(self, u: Tensor, padding: LeftPadding | None = None) -> tuple[Tensor, ...]:
        """z [..., E D], x [..., H, P], B and C [..., N], `ssd_steps` [..., H], and w [..., R]."""
        z, x, small = split_linear(self.in_proj, u, self.parts)
        B, C, dt, a, trapezoid, w = small.split(self.sizes[2:], dim=-1)
        steps = ssd_steps(dt, self.dt_bias, a, trapezoid, least=LEAST_RATE)
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return z, x, B, C, *(blank(step, padding) for step in steps), w

    def _sequence(self, u: Tensor, padding: LeftPadding | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """y [B, T, D] of u [B, T, D]; the last B, all dt and w, and the last S and x."""
        z, x, B, C, dt, log_decay, write, own, w = self._parts(u, padding)
        weights = self.B_norm.weight, self.C_norm.weight, self.B_bias, self.C_bias
        with self._keeping(u) as keep:
            kept: list[Any] | None = None if keep is at_once else []
            k, q = keep(partial(rotated_keys, B, C, *weights, dt, w, eps=NORM_EPS, dtype=x.dtype, kept=kept))
            y, memory = self.operator(
                q, k, x, log_decay, write, own, self.D, return_final_state=True, recompute=keep is not at_once
            )
        return self._gated(y, z), (B[:, -1], dt, w, memory, x[:, -1])

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        """W_out of y [..., H, P] times silu(z [..., H P])."""
        return linear_behind(partial(swiglu, up=y.flatten(-2).to(z.dtype)), self.out, z)

    def _keeping(self, u: Tensor) -> AbstractContextManager[Any]:
        """`Recomputing` where keys, queries and states of all layers would take much memory, or `at_once`."""
        elements = u.shape[0] * u.shape[1] * self.num_heads * 3 * self.d_state
        num_bytes = self.num_layers * elements * as_autocast(u[:0]).element_size()
        return Recomputing() if spares(self.recompute, num_bytes, u) else nullcontext(at_once)

    def forward(self, u: Tensor) -> Tensor:
        return self._sequence(u, None)[0]

    def init_state(self, batch_size: int, capacity: int) -> State:
        shape = (batch_size, self.num_heads)
        zeros = at_least_float32(self.out.weight).new_zeros
        return (
            zeros(*shape, self.pairs),
            zeros(*shape, self.d_state, self.head_dim),
            zeros(*shape, self.d_state),
            zeros(*shape, self.head_dim),
        )

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        angle, memory, last_k, last_x = state
        # a sequence of one position writes what it reads at once
        z, x, B, C, dt, log_decay, now, _, w = (part.squeeze(1) for part in self._parts(x_t.unsqueeze(1)))
        angle = torch.remainder(angle + dt.unsqueeze(-1) * turns(w).unsqueeze(-2), 2 * math.pi)
        B, C = self.B_norm(B), self.C_norm(C)
        k, q = rotate_pairs(angle, B.unsqueeze(-2) + self.B_bias, C.unsqueeze(-2) + self.C_bias)
        late = (dt - now).unsqueeze(-1) * last_k
        memory = torch.addcmul(memory, late.unsqueeze(-1), last_x.unsqueeze(-2))
        wide = at_least_float32(x)
        keys = k * now.unsqueeze(-1)
        o, memory = gated_linear_attention_step(q, keys, wide, log_decay, memory, scale=1.0, in_place=True)
        y = o + at_least_float32(self.D).unsqueeze(-1) * wide
        return self._gated(y, z), (angle, memory, k, wide)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        y, (B, dt, w, memory, last_x) = self._sequence(x, padding)
        theta = (dt.unsqueeze(-1) * turns(w).unsqueeze(-2)).sum(1)
        (last_k,) = rotate_pairs(theta, self.B_norm(B).unsqueeze(-2) + self.B_bias)
        return y, (torch.remainder(theta, 2 * math.pi), memory, last_k, at_least_float32(last_x))

    def state_size(self, length: int) -> int:
        return self.num_heads * (self.pairs + self.d_state * self.head_dim + self.d_state + self.head_dim)


class Mamba3Config(HeadsConfig):
    """Mamba-3 in the network of its paper: RMS norms, and a SwiGLU behind every mixer."""

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 8 / 3

    @property
    def pairs(self) -> int:
        """R: half of the channels are rotated, in pairs."""
        return self.d_state // 4

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.pairs < 1:
            raise ValueError(f"mamba3: half of d_state is rotated in pairs, so it is at least 4, got {self.d_state}.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return Mamba3(self)
