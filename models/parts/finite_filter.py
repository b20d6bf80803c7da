"""Causal filters of finite length, whose recurrent state is the last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.causal_conv1d import causal_conv1d
from subquad.kernels.fft_conv import fft_conv
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding, blank, newest_first

MOST_TAPS = 4
"""Maximum number of taps of `causal_conv1d`, which needs no transform."""


class FiniteFilter(Mixer):
    """y_t = sum_{m < M} k[m] x_{t-m} + D x_t in every channel: x [B, T, D] to [B, T, D].

    Its state: the last M - 1 inputs [B, D, M - 1], the newest first.
    """

    def skip(self) -> Tensor:
        """D [D]."""
        raise NotImplementedError

    def taps(self) -> Tensor:
        """The filter k [D, M]."""
        raise NotImplementedError

    @property
    def num_taps(self) -> int:
        """M."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        taps = self.taps()
        if not 2 <= self.num_taps <= MOST_TAPS:
            return fft_conv(x, taps, D=self.skip())
        # the newest input comes last, and the skip is its tap
        y = causal_conv1d(x, torch.cat([taps[:, 1:].flip(1), taps[:, :1] + self.skip().unsqueeze(1)], dim=1))
        assert isinstance(y, Tensor)
        return y

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor, ...]:
        D = at_least_float32(self.skip())
        return (D.new_zeros(batch_size, len(D), self.num_taps - 1),)

    def step(self, x_t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs = at_least_float32(x_t)
        # the newest input comes first, as in the state vector of a shift register
        window = torch.cat([inputs.unsqueeze(-1), state[0]], dim=-1)
        y = (window * self.taps()).sum(-1) + self.skip() * inputs
        return y.to(x_t.dtype), (window[..., :-1],)

    def prefill(
        self, x: Tensor, state: tuple[Tensor, ...], padding: LeftPadding | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = blank(x, padding)
        window = newest_first(at_least_float32(x), state[0].shape[-1]).mT
        return self(x), (window.contiguous(),)

    def state_size(self, length: int) -> int:
        return len(self.skip()) * (self.num_taps - 1)
