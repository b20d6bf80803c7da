"""Short causal convolutions: one before another mixer, and one that is a mixer itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.initial import reset_taps
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding, blank


class ShortConv(Mixer):
    """A causal depthwise convolution before another mixer, mixer(conv(x)), which thus sees the last inputs at once.

    Its state: the last W - 1 inputs [B, D, W - 1] for W taps, then that of the mixer. Source: the short filters of
    Hyena and Mamba.
    """

    def __init__(self, mixer: Mixer, width: int, taps: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset_taps(self.weight)

    def _convolve(self, x: Tensor) -> Tensor:
        y = causal_conv1d(x, self.weight)
        assert isinstance(y, Tensor)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self._convolve(x))

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.mixer.forward_at(self._convolve(x), positions)

    def init_state(self, batch_size: int, capacity: int) -> Any:
        weight = at_least_float32(self.weight)
        window = weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1)
        return window, self.mixer.init_state(batch_size, capacity)

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        window, after = state
        y_t, after = self.mixer.step(causal_conv1d_step(x_t, self.weight, None, window), after)
        return y_t, (window, after)

    def restart(self, state: Any) -> None:
        window, inner = state
        window.zero_()
        self.mixer.restart(inner)

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        y, window = causal_conv1d(blank(x, padding), self.weight, return_final_state=True)
        y, after = self.mixer.prefill(y, state[1], padding)
        return y, (window.to(state[0].dtype), after)

    def state_size(self, length: int) -> int:
        return self.weight.shape[0] * (self.weight.shape[1] - 1) + self.mixer.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return self.mixer.ssm_parameters()


class BaseConv(Mixer):
    """A short causal convolution gated by a linear map, y = conv(x) * (W x + b) + x, in every channel.

    Its state: the last W - 1 inputs [B, D, W - 1] for W taps.

    Source: Zoology (Arora et al. 2023), section 4.1, as released (HazyResearch/zoology at
    d88d6f5474f36998d82d5c3bd58a190248d0a669, zoology/mixers/base_conv.py): the convolution has a bias and torch's
    initialisation, and x itself is added inside the mixer.
    """

    def __init__(self, width: int, taps: int = 3) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.conv_weight = nn.Parameter(torch.empty(width, taps))
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        reset_taps(self.conv_weight, self.conv_bias)

    def forward(self, x: Tensor) -> Tensor:
        convolved = causal_conv1d(x, self.conv_weight, self.conv_bias)
        assert isinstance(convolved, Tensor)
        return convolved * self.proj(x) + x

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor]:
        weight = at_least_float32(self.conv_weight)
        return (weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1),)

    def step(self, x_t: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        y_t = causal_conv1d_step(x_t, self.conv_weight, self.conv_bias, state[0])
        return y_t * self.proj(x_t) + x_t, state

    def prefill(
        self, x: Tensor, state: tuple[Tensor], padding: LeftPadding | None = None
    ) -> tuple[Tensor, tuple[Tensor]]:
        y, window = causal_conv1d(blank(x, padding), self.conv_weight, self.conv_bias, return_final_state=True)
        return y * self.proj(x) + x, (window.to(state[0].dtype),)

    def state_size(self, length: int) -> int:
        return self.conv_weight.shape[0] * (self.conv_weight.shape[1] - 1)
