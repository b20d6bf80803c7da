"""Attention with bounded memory control (ABC): every head has M memory slots, which never forget.

    e_t = exp(W_phi x_t)  [M] per head,   phi_t = e_t / sum_{j <= t} e_j
    K_t = K_{t-1} + phi_t^T k_t,   V_t = V_{t-1} + phi_t^T v_t,   o_t = softmax(K_t q_t / sqrt(K)) V_t,   y_t = W_o o_t

Source: Peng et al. 2022; as restated in the GSA paper (Zhang et al. 2024), equations 3 and 4, which this follows.

With `forget="running-mean"` the normaliser covers all positions up to the current one:

    K_t = sum_{j <= t} e_j^T k_j / sum_{j <= t} e_j

This is the same phi_t together with a decay of 1 - phi_t. The code that produced the GSA paper's comparison computes
this variant.

Departures: W_phi x is clamped to [-32, 32], as in that code. The factor 1 / sqrt(K) of the logits is in neither
equation; GSA (equation 6) reads without it.

Apart from the decay, the mixer differs from `gsa` in this factor, in the strength of writing, and in having neither
Swish on q, k and v (equation 8) nor RMSNorm(swish(.)) on the output (equation 9).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from subquad.kernels.gated_slot_attention import gated_slot_attention, gated_slot_attention_step
from subquad.models.backbone import SwiGLUConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding, blank, running_sum
from subquad.suite.bounds import Width
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, Tensor, Tensor]


class ABC(Mixer):
    """The mixer. Its state: key memories [B, H, K, M], value memories [B, H, M, K] and log sum_j e_j [B, H, M]."""

    operator = staticmethod(gated_slot_attention)

    def __init__(self, config: ABCConfig) -> None:
        super().__init__()
        d_model, self.num_heads, self.num_slots = config.d_model, config.num_heads, config.num_slots
        self.head_dim = d_model // self.num_heads
        self.running_mean = config.forget == "running-mean"
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.slots = nn.Linear(d_model, self.num_heads * self.num_slots, bias=False)
        self.out = ResidualLinear(d_model, d_model, bias=False)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        logits = at_least_float32(self.slots(x)).clamp(-32.0, 32.0)
        return q, k, v, logits.unflatten(-1, (self.num_heads, self.num_slots))

    def _slots(self, logits: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """phi, the logarithm of its decay and log sum_j e_j, all [B, T, H, M]."""
        total = _running_total(logits)
        log_decay = None
        if self.running_mean:
            # the memory is empty before the first position, so any decay will do there
            log_decay = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1] - total[:, 1:]], dim=1)
        return (logits - total).exp(), log_decay, total

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, logits = self._project(x)
        slots, log_decay, _ = self._slots(logits)
        o = self.operator(q, k, v, slots, log_decay)
        assert isinstance(o, Tensor)
        return self.out(o.flatten(-2))

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.out.weight)
        return (
            weight.new_zeros(batch_size, self.num_heads, self.head_dim, self.num_slots),
            weight.new_zeros(batch_size, self.num_heads, self.num_slots, self.head_dim),
            weight.new_full((batch_size, self.num_heads, self.num_slots), -torch.inf),
        )

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        keys, values, total = state
        q, k, v, logits = self._project(x_t)
        new_total = torch.logaddexp(total, logits)
        log_decay = total - new_total if self.running_mean else None
        slots = (logits - new_total).exp()
        o, (keys, values) = gated_slot_attention_step(q, k, v, slots, log_decay, (keys, values), in_place=True)
        return self.out(o.flatten(-2)), (keys, values, new_total)

    def restart(self, state: State) -> None:
        super().restart(state)
        state[2].fill_(-torch.inf)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        q, k, v, logits = self._project(x)
        slots, log_decay, total = self._slots(logits if padding is None else padding.fill(logits, -torch.inf))
        if padding is not None and log_decay is not None:
            log_decay = padding.fill(log_decay, 0.0, first=1)
        o, (keys, values) = self.operator(q, k, v, blank(slots, padding), log_decay, return_final_state=True)
        return self.out(o.flatten(-2)), (keys, values, total[:, -1])

    def state_size(self, length: int) -> int:
        return self.num_heads * self.num_slots * (2 * self.head_dim + 1)


def _running_total(logits: Tensor) -> Tensor:
    """Returns log sum_{j <= t} exp(logits_j) of logits [B, T, H, M], which are at most 32 or -inf.

    The sum of T exponentials is far from the ends of float32.
    """
    return running_sum(logits.exp()).log()


class ABCConfig(SwiGLUConfig):
    """ABC in the network of the GSA paper: RMS norms and SwiGLU."""

    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    num_heads: Width = 4
    num_slots: Width = 64
    forget: Literal["none", "running-mean"] = "none"
    """`none`: slots never decay, the papers' equation. `running-mean`: every slot holds a weighted mean of the past."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return ABC(self)
