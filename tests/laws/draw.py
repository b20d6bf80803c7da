"""Random numbers that are the same on every machine, for the record of what components compute.

They are made of the raw bits of a PCG64 generator, which NumPy promises never to change.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LENGTH = 70
"""Length that crosses the boundary of a chunk of 64 positions."""


class Draw:
    """A stream of random numbers that is the same on every machine, 53 bits each."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def __call__(self, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """A float64 tensor of this shape, uniform from low to high."""
        raw = self.bits.random_raw(int(np.prod(shape)))
        unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(low + (high - low) * unit).reshape(shape)

    def integers(self, below: int, *shape: int) -> Tensor:
        """An int64 tensor of this shape with values from 0 to below - 1."""
        raw = self.bits.random_raw(int(np.prod(shape)))
        return torch.from_numpy((raw % np.uint64(below)).astype(np.int64)).reshape(shape)

    def complex(self, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """A complex128 tensor of this shape, real part from low to high, imaginary part from 0 to 6."""
        return torch.complex(self(*shape, low=low, high=high), self(*shape, low=0.0, high=6.0))


def wide(x: Tensor) -> Tensor:
    """x in float64; a complex tensor gets a last axis for its real and imaginary part."""
    return torch.view_as_real(x.to(torch.complex128)) if x.is_complex() else x.double()
