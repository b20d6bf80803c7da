"""Gated state spaces (GSS): a gated unit around a state space model of reduced width.

    u = gelu(W_u x) [D / 4],   v = gelu(W_v x) [4 D],   y = W_o (W_y dss(u) * v)

Source: Mehta et al. 2022, section 3.2 and figure 1: the state space model is D / 4 wide, the gate 4 D, and there is no
separate MLP. H3 (Fu et al. 2023) compares with it in table 2.

Departures from the paper: the kernel is dss-exp with its step sizes dt and its Skew-Hippo initialisation, where the
paper drops dt and draws the eigenvalues at random. d_state is 64, as for the other models of H3's table 2, where the
paper uses 512.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.models.dss import DSS
from subquad.models.hybrid import AttentionLayersConfig
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding
from subquad.models.s4d import State, check_ssm
from subquad.suite.bounds import Factor, Positive, Ratio, Width
from subquad.suite.contracts import TaskSpec


class GSS(Mixer):
    """The mixer. Its state: that of the state space model, [B, D / 4, N] complex."""

    def __init__(self, config: GSSConfig, length: int) -> None:
        super().__init__()
        d_model, gate = config.d_model, round(config.expand * config.d_model)
        width = max(1, d_model // config.reduction)
        self.ssm_in = nn.Linear(d_model, width)
        self.gate = nn.Linear(d_model, gate)
        self.ssm = DSS(width, config.d_state, "dss-exp", length=length, dt_min=config.dt_min, dt_max=config.dt_max)
        self.ssm_out = nn.Linear(width, gate)
        self.out = ResidualLinear(gate, d_model)

    def _output(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(self.ssm_out(y) * F.gelu(self.gate(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self._output(x, self.ssm(F.gelu(self.ssm_in(x))))

    def init_state(self, batch_size: int, capacity: int) -> State:
        return self.ssm.init_state(batch_size, capacity)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self.ssm.step(F.gelu(self.ssm_in(x_t)), state)
        return self._output(x_t, y), state

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        y, state = self.ssm.prefill(F.gelu(self.ssm_in(x)), state, padding)
        return self._output(x, y), state

    def state_size(self, length: int) -> int:
        return self.ssm.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return self.ssm.ssm_parameters()


class GSSConfig(AttentionLayersConfig):
    """GSS with layer norms; the gated unit replaces the MLP."""

    channel_mixer: ChannelMixerKind = "none"
    d_state: Width = 64
    reduction: Factor = 4
    """d_model divided by the width of the state space model."""
    expand: Ratio = 4.0
    """Width of the gate, as a multiple of d_model."""
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    ssm_lr: Positive | None = 1e-3

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        check_ssm("gss", self.d_state, self.dt_min, self.dt_max, pairs=False)
        if self.expand * self.d_model < 1:
            raise ValueError(f"gss: needs expand * d_model >= 1, got {self.expand} and {self.d_model}.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return GSS(self, spec.max_length)
