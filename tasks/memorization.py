"""Memorization of MAD: facts that hold in every row, and so have to be kept in the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, ScoredByClass, token_segment, token_spec


class Memorization(ScoredByClass):
    """Memorization, one of the six tasks of MAD.

        input   c  ?  a  ?  c  ?
        target  .  2  .  3  .  2

    Behind each key stands a token `?`, at which the model names the value of the key. Keys are drawn uniformly with
    repetition, and no two keys have the same value. The map from keys to values is the same in all rows, splits and
    seeds, and values are never an input, so nothing can be learned from the context.

    Source: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures), section 3.1, and its code,
    athms/mad-lab, mad/data/instances.py at 6e7e4c903b7d4d1a31d12186b709f36fa3184041, whose map has the fixed seed
    12345. The defaults are the baseline of configs/tasks/memorization.yml at d27bf5c6bb48b7b0d3879f40db869aa7fe84a3b3;
    the harder ones have more tokens.
    """

    name: ClassVar[str] = "memorization"
    version: ClassVar[int] = 1

    vocab_size: Size = 256
    """Number of tokens: keys, then as many values or one more, then `?`."""
    length: Size = 32
    num_train: Size = 256
    num_test: Size = 1280
    """Number of rows of the test split, and of a clean validation split."""

    def check_options(self) -> None:
        if self.vocab_size < 5:
            raise ValueError(f"{self.name}: vocab_size={self.vocab_size} has fewer than two keys; needs >= 5.")
        if self.length < 2 or self.length % 2:
            raise ValueError(f"{self.name}: length={self.length} is odd; every key has a `?` behind it.")

    @property
    def num_keys(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def values(self) -> Array:
        """The value of every key, [num_keys]."""
        order = numpy_generator(0, f"{self.name}/map").permutation(self.vocab_size - 1 - self.num_keys)
        return self.num_keys + order[: self.num_keys]

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size, self.length)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        num_rows = self.num_train if split == "train" else self.num_test
        keys = numpy_generator(seed, f"{self.name}/{split}").integers(0, self.num_keys, (num_rows, self.length // 2))
        inputs = np.stack([keys, np.full_like(keys, self.vocab_size - 1)], axis=2).reshape(num_rows, -1)
        positions = np.tile(np.arange(1, self.length, 2), (num_rows, 1))
        yield token_segment(inputs, self.values[keys], positions, self.vocab_size, f"length={self.length}")

    def solve(self, segment: Segment) -> Array:
        """The oracle: looks up the key before every `?`."""
        facts = dict(enumerate(self.values.tolist()))
        return np.array([[facts[key] for key in row[::2]] for row in segment.inputs.tolist()])
