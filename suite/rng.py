"""One random stream per purpose, all derived from the run's seed.

stream(seed, purpose, *index) = PCG64(SeedSequence([seed, crc32(purpose), *index]))

Streams of different purposes are independent, so drawing more numbers for one (a larger model, say) cannot move
another (the data).
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def _sequence(seed: int, purpose: str, index: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *index])


def numpy_generator(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """A NumPy generator for one purpose, e.g. `numpy_generator(0, "mqar/train", segment)`."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, index)))


def torch_seed(seed: int, purpose: str, *index: int) -> int:
    """A 63-bit seed for a torch generator, from the same tree of streams."""
    return int(_sequence(seed, purpose, index).generate_state(1, np.uint64)[0] >> 1)


def torch_generator(seed: int, purpose: str, *index: int) -> torch.Generator:
    """A host torch generator for one purpose."""
    import torch

    return torch.Generator().manual_seed(torch_seed(seed, purpose, *index))
