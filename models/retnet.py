"""RetNet: linear attention with rotary queries and keys and one fixed decay per head.

    S_t = gamma_h S_{t-1} + k_t^T v_t,   o_t = q_t S_t / sqrt(K),   gamma_h = 1 - 2^(-5-h)
    y_t = W_o (swish(W_g x_t) * norm_h(o_t))

with norm_h a norm of every head h = 0, 1, ...

Source: Sun et al. 2023, equations 5-8; GSA paper, section 2.3 and appendix C.1: values are 2 D wide, and queries and
keys have a head size of 256, so the state of a layer has 512 D elements.

Departures: the norm of a head is an RMS norm instead of a group norm, and the denominators of section 2.1 of that paper
are left out. Both are as in the code that the GSA paper ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.gated_linear_attention import gated_linear_attention_step
from subquad.models.backbone import SwiGLUConfig
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.linear_attention import GatedLinearMixer
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import RMSNorm
from subquad.models.parts.positions import Rotary
from subquad.models.parts.step import step_linear
from subquad.models.parts.time_axis import LeftPadding, blank, positions_seen
from subquad.suite.bounds import Factor, Ratio, Width
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, Tensor]


class RetNet(GatedLinearMixer):
    """The mixer. Its state: [B, H, K, V], and the number of positions seen [B], which the rotation needs."""

    log_decay: Tensor
    also_called: ClassVar[Mapping[str, str]] = {"proj": "qkv"}
    """The name that attention has for the same projections, for `train.init_from`."""

    def __init__(self, config: RetNetConfig, max_length: int) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.num_heads
        self.key_dim = d_model // self.num_heads
        self.value_dim = config.expand_v * d_model // self.num_heads
        values = self.num_heads * self.value_dim
        self.from_attention = config.from_attention
        self.split = (d_model, d_model, values) if config.from_attention else (d_model, d_model, values, values)
        self.proj = nn.Linear(d_model, sum(self.split), bias=False)
        self.rotary = Rotary(self.key_dim, max_length)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.out = ResidualLinear(values, d_model, bias=False)
        gamma = 1 - 2.0 ** (-5 - torch.arange(self.num_heads, dtype=torch.float64))
        self.register_buffer("log_decay", gamma.log().to(torch.get_default_dtype()), persistent=False)

    def _heads(self, projected: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and gate of the projections [B, T, ...] at the positions time [T] or [B, T]."""
        q, k, v, *gates = projected.split(self.split, dim=-1)
        if self.from_attention:
            q, k = F.relu(q), F.relu(k)
        q, k = (z.unflatten(-1, (self.num_heads, self.key_dim)) for z in (q, k))
        q, k = self.rotary(q, k, time)
        return q, k, v.unflatten(-1, (self.num_heads, self.value_dim)), next(iter(gates), None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self._heads(self.proj(x), torch.arange(x.shape[1], device=x.device))
        o = self.operator(q, k, v, self.log_decay)
        assert isinstance(o, Tensor)
        return self._output(o, gate)

    def init_state(self, batch_size: int, capacity: int) -> State:
        self.rotary.check_capacity(capacity)
        (memory,) = super().init_state(batch_size, capacity)
        return memory, torch.zeros(batch_size, dtype=torch.long, device=memory.device)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        memory, clock = state
        projected = step_linear(self.proj, x_t, norm=norm)
        q, k, v, gate = self._heads(projected.unsqueeze(1), clock.unsqueeze(1))
        o, memory = gated_linear_attention_step(q[:, 0], k[:, 0], v[:, 0], self.log_decay, memory, in_place=True)
        return self._output(o, None if gate is None else gate[:, 0], residual), (memory, clock + 1)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        # the rotation of a padded position is of no account
        time = torch.arange(x.shape[1], device=x.device) if padding is None else padding.time.clamp(min=0)
        q, k, v, gate = self._heads(self.proj(x), time)
        o, memory = self.operator(q, blank(k, padding), v, self.log_decay, return_final_state=True)
        return self._output(o, gate), (memory, positions_seen(x, padding))


class RetNetConfig(SwiGLUConfig):
    """RetNet in the network of the GSA paper: RMS norms, and a narrow SwiGLU that makes up for the wide values."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (*SwiGLUConfig.left_out_when_off, "from_attention")
    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    mlp_ratio: Ratio = 4 / 3
    num_heads: Width = 4
    """The GSA paper keeps d_model / num_heads at 256."""
    expand_v: Factor = 2
    """Width of the values, as a multiple of d_model."""
    from_attention: bool = False
    """The form that starts with the weights of a Transformer (GSA paper, section 4.2): ReLU of queries and keys, and no
    output gate. With `expand_v: 1`, all projections have the shapes of attention."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.d_model // self.num_heads % 2:
            raise ValueError(
                f"{type(self).__name__}: the rotation needs an even head size, got d_model / num_heads = "
                f"{self.d_model // self.num_heads}; change num_heads or d_model."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return RetNet(self, spec.max_length)
