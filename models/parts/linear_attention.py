"""The base class of mixers that are one call of gated linear attention between linear maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_step
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.mixer import FusedStepMixer
from subquad.models.parts.step import step_linear
from subquad.models.parts.time_axis import LeftPadding, blank

Projected = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""q, k [..., H, K], v [..., H, V], the log-decay or None, and the gate [..., H V] of the output or None."""


def read_moved(
    operator: Callable[..., Any], queries: Tensor, k: Tensor, v: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """(o, S_T) with o_t = q_t S_{t-1}, the state before position t is written, for `gated_linear_attention`.

    That operator returns q_t S_{t-1} at position t - 1 for the query q_t, so queries have moved back by one position,
    queries_t = q_{t+1} with zeros at the last position, and outputs move forward here. scale is one.
    """
    o, final = operator(queries, k, v, log_decay, scale=1.0, return_final_state=True)
    return F.pad(o[:, :-1], (0, 0, 0, 0, 1, 0)), final


class GatedLinearMixer(FusedStepMixer):
    """Base class of mixers on `gated_linear_attention`. Their state begins with S [B, H, K, V].

        S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t,   o_t = scale q_t S_t,   y_t = W_o (silu(gate_t) * norm(o_t))

    A mixer sets the sizes and modules below and defines `_project`. Where its output is another one, it overrides
    `_output` as well. A normaliser sum_j k_j is the state of one more value channel, whose values are ones: V is then
    one more than the width of the output.
    """

    operator = staticmethod(gated_linear_attention)
    scale: ClassVar[float | None] = None
    """None stands for K^-0.5."""

    num_heads: int
    key_dim: int
    value_dim: int
    norm: nn.Module | None
    """It normalises every head where it is V wide, and all of them together where it is H V wide."""
    out: ResidualLinear

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        """The operands of norm(x), for x [B, T, D] or one position of it, [B, D]."""
        raise NotImplementedError

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None = None) -> Tensor:
        return step_linear(self.out, o.flatten(-2), norm=self.norm, gate=gate, residual=residual)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, log_decay, gate = self._project(x)
        o = self.operator(q, k, v, log_decay, scale=self.scale)
        assert isinstance(o, Tensor)
        return self._output(o, gate)

    def init_state(self, batch_size: int, capacity: int) -> Any:
        weight = at_least_float32(self.out.weight)
        return (weight.new_zeros(batch_size, self.num_heads, self.key_dim, self.value_dim),)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        q, k, v, log_decay, gate = self._project(x_t, norm)
        o, new = gated_linear_attention_step(q, k, v, log_decay, state[0], scale=self.scale, in_place=True)
        return self._output(o, gate, residual), (new,)

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        q, k, v, log_decay, gate = self._project(x)
        o, new = self.operator(q, blank(k, padding), v, log_decay, scale=self.scale, return_final_state=True)
        return self._output(o, gate), (new,)

    def state_size(self, length: int) -> int:
        return self.num_heads * self.key_dim * self.value_dim
