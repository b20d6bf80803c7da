"""Passages that two texts share, byte for byte."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

PASSAGE = 100
"""Bytes from which on a common passage counts, about twenty words: shorter ones are names, dates and phrases."""
CHUNK = 1 << 22
"""Positions of a text that are hashed at a time."""
BUCKETS = 24
"""Bits of a hash by which most positions are told to be in no common passage."""

Array = np.ndarray[Any, Any]

_ODD = 0x9E3779B97F4A7C15
"""A base of the hash; an odd number has an inverse modulo 2^64."""


def shared_bytes(first: bytes, second: bytes, passage: int = PASSAGE, *, chunk: int = CHUNK) -> int:
    """Number of bytes of `second` that lie in a passage of so many bytes which `first` has as well.

    Windows are compared by 64-bit hashes, of which two differ for different texts but for one pair in 10^19.
    """
    if min(len(first), len(second)) < passage:
        return 0
    wanted = np.concatenate([hashes for _, hashes in _windows(second, passage, chunk)])
    known = np.unique(wanted)
    buckets = np.zeros(1 << BUCKETS, dtype=bool)
    buckets[_bucket(known)] = True
    found = np.zeros(len(known), dtype=bool)
    for _, hashes in _windows(first, passage, chunk):
        near = hashes[buckets[_bucket(hashes)]]
        at = np.minimum(np.searchsorted(known, near), len(known) - 1)
        found[at[known[at] == near]] = True
    starts = found[np.searchsorted(known, wanted)]
    # a byte is in a passage where one of the last windows before it starts
    covered = np.zeros(len(second) + 1, dtype=np.int64)
    begins = np.flatnonzero(starts)
    covered[begins] += 1
    np.add.at(covered, begins + passage, -1)
    return int((np.cumsum(covered[:-1]) > 0).sum())


def _bucket(hashes: Array) -> Array:
    # the last bits of a sum of multiples of odd powers are poorly mixed
    return (hashes >> np.uint64(64 - BUCKETS)).astype(np.int64)


def _windows(text: bytes, passage: int, chunk: int) -> Any:
    """Gives the positions of a chunk and the hashes of the windows that start there, chunk by chunk.

    The hash of the window at i is the sum of letter[b_{i+j}] p^j over its bytes, modulo 2^64, as a difference of
    running sums of letter[b_j] p^j, divided by p^i.
    """
    values = np.frombuffer(text, dtype=np.uint8)
    for start in range(0, len(values) - passage + 1, chunk):
        part = values[start : start + chunk + passage - 1]
        powers, inverses = _powers(min(chunk, len(values)) + passage)
        sums = np.zeros(len(part) + 1, dtype=np.uint64)
        np.cumsum(_letters()[part] * powers[: len(part)], out=sums[1:])
        count = len(part) - passage + 1
        hashes = (sums[passage:] - sums[:count]) * inverses[:count]
        yield range(start, start + count), hashes


@functools.cache
def _letters() -> Array:
    """A random number for each byte."""
    return np.random.default_rng(0).integers(0, 2**64, 256, dtype=np.uint64)


@functools.lru_cache(maxsize=2)
def _powers(count: int) -> tuple[Array, Array]:
    """The first powers of the base modulo 2^64, and their inverses."""
    powers = []
    for base in (_ODD, pow(_ODD, -1, 2**64)):
        factors = np.full(count, base, dtype=np.uint64)
        factors[0] = 1
        powers.append(np.multiply.accumulate(factors))
    return powers[0], powers[1]
