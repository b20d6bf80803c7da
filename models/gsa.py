"""Gated slot attention (GSA): every head has M memory slots, written with forget gates and read by a softmax over them.

    q, k, v = swish(W_q x), swish(W_k x), swish(W_v x),   a = sigmoid(W_a x)^(1/8)  [M] per head
    K_t = diag(a_t) K_{t-1} + (1 - a_t)^T k_t,   V_t = diag(a_t) V_{t-1} + (1 - a_t)^T v_t
    o_t = softmax(K_t q_t) V_t,   y_t = W_o RMSNorm(swish(concat_h o_t))

Source: GSA paper (Zhang et al. 2024), equations 6-9 and figure 2. With M = 64, H = 4 and damping 8 as there, the state
of a layer has 128 D elements.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.gated_slot_attention import gated_slot_attention, gated_slot_attention_step
from models.backbone import BackboneConfig, require_divides
from models.blocks import (
    ChannelMixerKind,
    LeftPadding,
    Mixer,
    NormKind,
    ResidualLinear,
    RMSNorm,
    at_least_float32,
    blank,
    shared_norm,
    step_linear,
)
from suite.bounds import Positive, Ratio, Width
from suite.contracts import TaskSpec

State = tuple[Tensor, Tensor]


class GSA(Mixer):
    """The mixer. Its state: key memories [B, H, K, M] and value memories [B, H, M, K]."""

    operator = staticmethod(gated_slot_attention)

    def __init__(self, config: GSAConfig) -> None:
        super().__init__()
        d_model, self.num_heads, self.num_slots = config.d_model, config.num_heads, config.num_slots
        self.head_dim = d_model // self.num_heads
        self.damping = config.damping
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.decay = nn.Linear(d_model, self.num_heads * self.num_slots, bias=False)
        self.norm = RMSNorm(d_model, eps=config.norm_eps)
        self.out = ResidualLinear(d_model, d_model, bias=False)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, norm = shared_norm(norm, x)
        qkv = step_linear(self.qkv, x, norm=norm, activation="silu")
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        log_decay = F.logsigmoid(at_least_float32(step_linear(self.decay, x, norm=norm))) / self.damping
        log_decay = log_decay.unflatten(-1, (self.num_heads, self.num_slots))
        return q, k, v, -torch.expm1(log_decay), log_decay

    def _output(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        o = self.norm.before_product(o.flatten(-2), activation="silu")
        return step_linear(self.out, o, residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        o = self.operator(*self._project(x), scale=1.0)
        assert isinstance(o, Tensor)
        return self._output(o)

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.out.weight)
        return (
            weight.new_zeros(batch_size, self.num_heads, self.head_dim, self.num_slots),
            weight.new_zeros(batch_size, self.num_heads, self.num_slots, self.head_dim),
        )

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        return self._step(x_t, None, None, state)

    def branch_step(self, x_t: Tensor, norm: nn.Module, state: State) -> tuple[Tensor, State]:
        return self._step(x_t, norm, x_t, state)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        o, state = gated_slot_attention_step(*self._project(x_t, norm), state, scale=1.0, in_place=True)
        return self._output(o, residual), state

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        q, k, v, slots, log_decay = self._project(x)
        o, state = self.operator(q, k, v, blank(slots, padding), log_decay, scale=1.0, return_final_state=True)
        return self._output(o), state

    def state_size(self, length: int) -> int:
        return 2 * self.num_heads * self.head_dim * self.num_slots


class GSAConfig(BackboneConfig):
    """GSA in the network of its paper: RMS norms and SwiGLU."""

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 8 / 3
    norm: NormKind = "rms"
    num_heads: Width = 4
    num_slots: Width = 64
    damping: Positive = 8.0
    """The forget gate is the sigmoid to the power 1 / damping, which keeps it near one (tau of the paper)."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        require_divides(type(self).__name__, num_heads=self.num_heads, d_model=self.d_model)

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return GSA(self)
