"""Gated slot attention (GSA): every head has M memory slots, written with forget gates and read by a softmax over them.

    q, k, v = swish(W_q x), swish(W_k x), swish(W_v x),   a = sigmoid(W_a x)^(1/8)  [M] per head
    K_t = diag(a_t) K_{t-1} + (1 - a_t)^T k_t,   V_t = diag(a_t) V_{t-1} + (1 - a_t)^T v_t
    o_t = softmax(K_t q_t) V_t,   y_t = W_o RMSNorm(swish(concat_h o_t))

Source: GSA paper (Zhang et al. 2024), equations 6-9 and figure 2. With M = 64, H = 4 and damping 8 as there, the state
of a layer has 128 D elements.

The ablations of the paper's table 2: `gate` (decays that do not depend on the input; without any the model is `abc`),
`readout` (another function, or none, in place of the softmax over slots) and `num_slots`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from subquad.kernels.gated_slot_attention import gated_slot_attention, gated_slot_attention_step
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.linear import ResidualLinear, shared_linears, silu_parts
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.norms import NormKind, RMSNorm
from subquad.models.parts.step import shared_norm, step_linear
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Epsilon, Positive, Ratio, Width
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, Tensor]
Gate = Literal["constant", "retnet"]
Readout = Literal["identity", "swish", "relu", "relu2"]

FUNCTIONS: dict[Readout, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Functions of the first pass, element by element, that may take the place of the softmax over slots."""
LAST_GATE = 8.0
"""Constant gates start as sigmoid(b)^(1/8) with b from 0 to 8: slots that keep their content for 12 to 24,000 steps."""


class GSA(FusedStepMixer):
    """The mixer. Its state: key memories [B, H, K, M] and value memories [B, H, M, K].

    With a readout it is two passes of gated linear attention with that function between them.
    """

    log_decay: Tensor | None

    operator = staticmethod(gated_slot_attention)

    def __init__(self, config: GSAConfig) -> None:
        super().__init__()
        d_model, self.num_heads, self.num_slots = config.d_model, config.num_heads, config.num_slots
        self.head_dim = d_model // self.num_heads
        self.damping = config.damping
        self.function = None if config.readout is None else FUNCTIONS[config.readout]
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        constant = config.gate == "constant"
        self.decay = None if constant else nn.Linear(d_model, self.num_heads * self.num_slots, bias=False)
        self.gate = nn.Parameter(torch.empty(self.num_heads, self.num_slots)) if constant else None
        fixed = torch.log1p(-(2.0 ** -(5.0 + torch.arange(self.num_heads)))).unsqueeze(-1)
        self.register_buffer("log_decay", fixed if config.gate == "retnet" else None, persistent=False)
        self.norm = RMSNorm(d_model, eps=config.output_norm_eps or config.norm_eps)
        self.out = ResidualLinear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.gate is not None:
            # slots that all decayed alike would all hold the same
            self.gate.copy_(torch.linspace(0.0, LAST_GATE, self.num_slots).expand_as(self.gate))

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, norm = shared_norm(norm, x)
        maps = [self.qkv] if self.decay is None else [self.qkv, self.decay]
        if x.ndim == 3:
            qkv, *gates = shared_linears(maps, x)
            parts = silu_parts(qkv, 3)
        else:
            parts = step_linear(self.qkv, x, norm=norm, activation="silu").chunk(3, dim=-1)
            gates = [step_linear(linear, x, norm=norm) for linear in maps[1:]]
        q, k, v = (part.unflatten(-1, (self.num_heads, self.head_dim)) for part in parts)
        logits = gates[0].unflatten(-1, (self.num_heads, self.num_slots)) if gates else self.gate
        assert logits is not None
        log_gate, slots = forget_gate(logits, damping=self.damping)
        assert slots is not None
        slots = slots.expand(*q.shape[:-1], -1)
        log_decay = log_gate if self.log_decay is None else self.log_decay
        return q, k, v, slots, log_decay.expand_as(slots)

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, log_decay: Tensor, final: bool = False
    ) -> tuple[Tensor, State | None]:
        """o [B, T, H, V] and, if asked for, the state behind it."""
        if self.function is None:
            result = self.operator(q, k, v, slots, log_decay, scale=1.0, return_final_state=final)
            return result if isinstance(result, tuple) else (result, None)
        attend = partial(gated_linear_attention, log_decay=log_decay, scale=1.0, return_final_state=final)
        slots = slots.to(v.dtype)
        read = attend(q, k, slots, decay_on="value")
        if not final:
            assert isinstance(read, Tensor)
            o = attend(self.function(read), slots, v)
            assert isinstance(o, Tensor)
            return o, None
        o, values = attend(self.function(read[0]), slots, v)
        return o, (read[1], values)

    def _output(self, o: Tensor, residual: Tensor | None = None) -> Tensor:
        o = self.norm.before_product(o.flatten(-2), activation="silu")
        return step_linear(self.out, o, residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        return self._output(self._mix(*self._project(x))[0])

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.out.weight)
        return (
            weight.new_zeros(batch_size, self.num_heads, self.head_dim, self.num_slots),
            weight.new_zeros(batch_size, self.num_heads, self.num_slots, self.head_dim),
        )

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        q, k, v, slots, log_decay = self._project(x_t, norm)
        if self.function is None:
            o, state = gated_slot_attention_step(q, k, v, slots, log_decay, state, scale=1.0, in_place=True)
            return self._output(o, residual), state
        slots = slots.to(v.dtype)
        read, keys = gated_linear_attention_step(
            q, k, slots, log_decay, state[0], decay_on="value", scale=1.0, in_place=True
        )
        o, values = gated_linear_attention_step(
            self.function(read), slots, v, log_decay, state[1], scale=1.0, in_place=True
        )
        return self._output(o, residual), (keys, values)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        q, k, v, slots, log_decay = self._project(x)
        o, after = self._mix(q, k, v, blank(slots, padding), log_decay, final=True)
        assert after is not None
        return self._output(o), after

    def state_size(self, length: int) -> int:
        return 2 * self.num_heads * self.head_dim * self.num_slots


class GSAConfig(BackboneConfig):
    """GSA in the network of its paper: RMS norms and SwiGLU."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *BackboneConfig.left_out_when_off, "gate", "readout", "output_norm_eps",
    )  # fmt: skip
    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 8 / 3
    norm: NormKind = "rms"
    num_heads: Width = 4
    num_slots: Width = 64
    damping: Positive = 8.0
    """The forget gate is the sigmoid to the power 1 / damping, which keeps it near one (tau of the paper)."""
    gate: Gate | None = None
    """Replacement of the damped gates a, between equations 8 and 9, in the row "w/ data-independent decay", which the
    paper does not define.
    `constant`: W_a x is a parameter of every slot, so that decays and writing strengths do not depend on the input.
    `retnet`: the decay of a head is 1 - 2^(-5 - h), as in RetNet, and writing strengths are those of GSA."""
    readout: Readout | None = None
    """Function of K_t q_t in place of the softmax over slots: none (`identity`), Swish, ReLU or ReLU squared."""
    output_norm_eps: Epsilon | None = None
    """Epsilon of the norm of o_t. None: `norm_eps`. In flash-linear-attention it is 1e-5 whatever `norm_eps` is."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return GSA(self)
