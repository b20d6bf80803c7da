"""One random stream per purpose, all derived from the run's seed.

stream(seed, purpose, *index) = PCG64(SeedSequence([seed, crc32(purpose), *index]))

Streams of different purposes are independent: drawing more for one purpose, as the initialisation of a larger model
does, cannot change what another one draws, such as the data.
"""

from __future__ import annotations

import zlib

import numpy as np


def _sequence(seed: int, purpose: str, index: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *index])


def numpy_generator(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """A NumPy generator for one purpose, e.g. `numpy_generator(0, "mqar/train", segment)`."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, index)))


def torch_seed(seed: int, purpose: str, *index: int) -> int:
    """A 63-bit seed for a torch generator, from the same tree of streams."""
    return int(_sequence(seed, purpose, index).generate_state(1, np.uint64)[0] >> 1)
