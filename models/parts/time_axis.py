"""Positions along the time axis: some of them, padding in front of rows, and the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.positions import running_sum as running_sum
from subquad.kernels.positions import take_positions as take_positions


def time_contiguous(x: Tensor) -> Tensor:
    """x [B, T, D], on a GPU with time contiguous in memory."""
    if not use_triton("transpose", "auto", x):
        return x
    from subquad.kernels.transpose import time_last

    with on_device_of(x):
        return time_last(x)


@dataclass(frozen=True)
class LeftPadding:
    """Padded positions in front of the rows of a batch, so that rows of unlike length end together."""

    lengths: Tensor
    """[B]: positions of each row that are no padding."""
    time: Tensor
    """[B, T]: index of a position within its row, zero for the first one behind the padding and negative before it."""

    @classmethod
    def of(cls, lengths: Tensor, steps: int) -> LeftPadding:
        """The padding of rows with these lengths [B], padded to `steps` positions."""
        time = torch.arange(steps, device=lengths.device) - (steps - lengths.unsqueeze(1))
        return cls(lengths, time)

    def fill(self, x: Tensor, value: float, first: int = 0) -> Tensor:
        """x [B, T, ...] with a value in the padding and at the positions of each row before the one given."""
        return x.masked_fill((self.time < first).view(*self.time.shape, *[1] * (x.ndim - 2)), value)

    def to_front(self, x: Tensor) -> Tensor:
        """x [B, T, D] with every row moved to the front and its padding behind it."""
        steps = x.shape[1]
        return take_positions(x, (torch.arange(steps, device=x.device) - self.lengths.unsqueeze(1)) % steps)

    def to_back(self, x: Tensor) -> Tensor:
        """The inverse of `to_front`."""
        return take_positions(x, self.time % x.shape[1])


def blank(x: Tensor, padding: LeftPadding | None) -> Tensor:
    """x [B, T, ...] with zeros at padded positions, where there are any."""
    return x if padding is None else padding.fill(x, 0.0)


def positions_seen(x: Tensor, padding: LeftPadding | None) -> Tensor:
    """[B], int64, a new tensor: number of positions of each row of x [B, T, D] that are no padding."""
    if padding is not None:
        # a state keeps it and changes it in place, and the caller of `prefill` keeps the lengths
        return padding.lengths.clone()
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.long, device=x.device)


def newest_first(x: Tensor, size: int) -> Tensor:
    """The last inputs [B, size, D] of x [B, T, D] in reversed order, zeros where T is less than size."""
    steps = x.shape[1]
    return F.pad(x[:, max(steps - size, 0) :].flip(1), (0, 0, 0, max(size - steps, 0)))
