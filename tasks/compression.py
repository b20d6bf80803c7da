"""Compression of MAD: the last position has to hold the whole row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, ScoredByClass, token_segment, token_spec


class Compression(ScoredByClass):
    """Compression, one of the six tasks of MAD.

        input   b  a  a  c  #
        target  b  a  a  c  #

    All tokens of a row of uniform tokens with `#` at its end are read out of the hidden state of `#` alone. The readout
    is `last`: an MLP maps that state and a position to the token at this position (`models/parts/decoder.py`).

    Source: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures), section 3.1, and its code,
    athms/mad-lab, mad/data/instances.py at 6e7e4c903b7d4d1a31d12186b709f36fa3184041. The defaults are the baseline of
    configs/tasks/compression.yml at d27bf5c6bb48b7b0d3879f40db869aa7fe84a3b3. As in the source, `#` has a label.
    Version 2: the state is decoded as it is, and was normalised before.
    """

    name: ClassVar[str] = "compression"
    version: ClassVar[int] = 2

    vocab_size: Size = 16
    """Number of tokens, `#` included."""
    length: Size = 32
    num_train: Size = 12_800
    num_test: Size = 1280
    """Number of rows of the test split, and of a clean validation split."""

    def check_options(self) -> None:
        if self.vocab_size < 3:
            raise ValueError(f"{self.name}: vocab_size={self.vocab_size} has one token beside `#`; needs >= 3.")
        if self.length < 2:
            raise ValueError(f"{self.name}: length={self.length} has no room for a token and `#`; needs >= 2.")

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size, self.length, "last")

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        num_rows = self.num_train if split == "train" else self.num_test
        rng = numpy_generator(seed, f"{self.name}/{split}")
        inputs = rng.integers(0, self.vocab_size - 1, (num_rows, self.length))
        inputs[:, -1] = self.vocab_size - 1
        positions = np.tile(np.arange(self.length), (num_rows, 1))
        yield token_segment(inputs, inputs, positions, self.vocab_size, f"length={self.length}")

    def solve(self, segment: Segment) -> Array:
        """The oracle: repeats the row."""
        return segment.inputs.numpy().astype(int)
