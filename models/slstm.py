"""sLSTM: the scalar memory of xLSTM, a recurrent network whose gates read its last output.

    i, f = W_i u_t, W_f u_t,   z, o = W_z x_t, W_o x_t,   u = silu(conv(x))
    h = slstm(i, f, z, o),   y = norm_h(h)

with `kernels.slstm`, linear maps within every head, without biases, and norm_h a layer norm of every head, without
bias. Its gates have recurrent matrices and biases of their own. There is no linear map behind it: a channel mixer
follows. Since a step needs the output of the one before it, no two steps are computed at the same time.

Source: Beck et al. 2024 (arXiv 2405.04517), section 2.2; layer, block and initial values are those of the released code
(NX-AI/xlstm at 18d6dedf65fdb4d9a5018bd9bfa4e59e8809cdd9, xlstm/blocks/slstm/): recurrent matrices start at zero, the
maps of the gates with the standard deviation sqrt(2 / (5 D)), and the biases of the forget gate fall from 5 to -7 over
the channels of a head, as 5 - 12 (k / (K - 1))^(0.3 + 1.3 l / (L - 1)) in layer l of L; the other biases are zero.

Departures: the feed-forward network of the code has a GELU in its gate; here it is the SwiGLU of this suite, of nearly
the same width. Its last linear map starts smaller there.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.kernels.slstm import EMPTY, empty_state, slstm, slstm_step
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import as_autocast, at_least_float32
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.initial import reset_taps
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import HeadNorm
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Factor, Ratio, Width
from subquad.suite.contracts import TaskSpec

GATES = 4


class SLSTM(Mixer):
    """The mixer. Its state: the last inputs of the convolution [B, D, W - 1], if there is one, then [B, 4, H, K]."""

    operator = staticmethod(slstm)

    def __init__(self, config: SLSTMConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.taps = config.num_heads, config.d_conv
        self.depth = layer / max(1, config.num_layers - 1)
        heads, width = self.num_heads, config.d_model // self.num_heads
        self.conv_weight = self.conv_bias = None
        if self.taps:
            self.conv_weight = nn.Parameter(torch.empty(config.d_model, self.taps))
            self.conv_bias = nn.Parameter(torch.empty(config.d_model))
        self.gates = nn.Parameter(torch.empty(GATES, heads, width, width))
        """W of i, f, z and o; rows belong to the inputs."""
        self.recurrent = nn.Parameter(torch.empty(GATES, heads, width, width))
        self.bias = nn.Parameter(torch.empty(GATES, heads, width))
        self.norm = HeadNorm(heads, config.d_model, eps=config.norm_eps, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        _, heads, width, _ = self.gates.shape
        nn.init.normal_(self.gates, std=math.sqrt(2 / (5 * heads * width)))
        nn.init.zeros_(self.recurrent)
        nn.init.zeros_(self.bias)
        ramp = torch.arange(width, dtype=self.bias.dtype, device=self.bias.device) / max(1, width - 1)
        self.bias[1] = 5 - 12 * ramp ** (0.3 + 1.3 * self.depth)
        if self.conv_weight is not None:
            reset_taps(self.conv_weight, self.conv_bias)

    def _gates(self, x: Tensor, convolved: Tensor) -> Tensor:
        """Maps inputs [..., D] to z and o, and convolved inputs to i and f. Returns all four as [..., 4, H, K]."""
        lead, weight = x.shape[:-1], as_autocast(self.gates)
        # a product for each head, because torch multiplies nothing along two axes without a copy
        first, second = (
            torch.bmm(
                as_autocast(z).reshape(-1, self.num_heads, weight.shape[2]).transpose(0, 1),
                w.permute(1, 2, 0, 3).flatten(2),
            )
            for z, w in ((convolved, weight[:2]), (x, weight[2:]))
        )
        both = torch.cat([first, second], -1).unflatten(-1, (GATES, -1))
        # [H, rows, 4, K]
        return both.permute(1, 2, 0, 3).unflatten(0, lead)

    def _output(self, h: Tensor) -> Tensor:
        return self.norm(h).to(h.dtype)

    def forward(self, x: Tensor) -> Tensor:
        convolved = x
        if self.conv_weight is not None:
            y = causal_conv1d(x, self.conv_weight, self.conv_bias, activation="silu")
            assert isinstance(y, Tensor)
            convolved = y
        h = self.operator(self._gates(x, convolved), self.recurrent, self.bias)
        assert isinstance(h, Tensor)
        return self._output(h)

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor, ...]:
        bias = at_least_float32(self.bias)
        _, heads, width = bias.shape
        memory = empty_state(batch_size, heads, width, dtype=bias.dtype, device=bias.device)
        if not self.taps:
            return (memory,)
        return bias.new_zeros(batch_size, heads * width, self.taps - 1), memory

    def restart(self, state: tuple[Tensor, ...]) -> None:
        super().restart(state)
        state[-1][:, 3] = EMPTY

    def step(self, x_t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        convolved = x_t
        if self.conv_weight is not None:
            convolved = causal_conv1d_step(x_t, self.conv_weight, self.conv_bias, state[0], activation="silu")
        h = slstm_step(self._gates(x_t, convolved), self.recurrent, self.bias, state[-1])
        return self._output(h), state

    def prefill(
        self, x: Tensor, state: tuple[Tensor, ...], padding: LeftPadding | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        convolved = x = blank(x, padding)
        before: tuple[Tensor, ...] = ()
        if self.conv_weight is not None:
            y, window = causal_conv1d(x, self.conv_weight, self.conv_bias, activation="silu", return_final_state=True)
            convolved, before = y, (window.to(state[0].dtype),)
        gates = self._gates(x, convolved)
        if padding is not None:
            # a closed input gate and an open forget gate leave the state as it is
            i, f, rest = gates.split((1, 1, GATES - 2), 2)
            gates = torch.cat([padding.fill(i, -math.inf), padding.fill(f, math.inf), rest], 2)
        h, memory = self.operator(gates, self.recurrent, self.bias, return_final_state=True)
        return self._output(h), (*before, memory.to(state[-1].dtype))

    def state_size(self, length: int) -> int:
        return self.bias.numel() + (self.bias[0].numel() * (self.taps - 1) if self.taps else 0)


class SLSTMConfig(BackboneConfig):
    """xLSTM with sLSTM layers alone, xLSTM[0:1] in the paper."""

    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 4 / 3
    num_heads: Width = 4
    d_conv: Factor | None = 4
    """Number of taps of the convolution in front of the input and forget gates, 2 to 4. None: there is none."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.d_conv is not None and not 2 <= self.d_conv <= 4:
            raise ValueError(f"slstm: needs d_conv in 2..4, or null for no convolution, got {self.d_conv}.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return SLSTM(self, layer)
