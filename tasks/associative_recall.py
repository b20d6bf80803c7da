"""Associative recall: name the value that belongs to one queried key."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from subquad.suite.bounds import Size
from subquad.tasks.base import Array, token_dtype
from subquad.tasks.synthetic_language import SyntheticLanguage


class AssociativeRecall(SyntheticLanguage):
    """Associative recall with a single query, as in H3 Tables 2 and 12.

        input   a  2  c  4  a  2  b  3  =>  c
        target  .  .  .  .  .  .  .  .  .   4         (evaluation; training labels every next token)

    The first half of the ordinary tokens are keys, the second half values. Every sequence has its own map from keys to
    values, which are drawn with replacement, and `length // 2` pairs whose keys are drawn with replacement. The queried
    key is uniform over the keys that occur in the sequence; the source draws again until this holds.

    Source: Fu et al. 2023 (H3), section 3.1, Tables 2 and 12; details as in its released data loader. There are two
    settings: vocabulary 10 and length 20 (the default; its chance level, one of four values, is the paper's 25 %), and
    vocabulary 20 and length 40. The source validates on the test rows.
    """

    name: ClassVar[str] = "associative-recall"
    version: ClassVar[int] = 1

    vocab_size: Size = 10
    length: Size = 20

    def check_options(self) -> None:
        if self.vocab_size < 6:
            raise ValueError(
                f"{self.name}: vocab_size={self.vocab_size} leaves {self.num_keys} keys beside the two special tokens "
                f"and the values; needs >= 6."
            )
        for length in (self.length, *self.test_lengths):
            if length < 2 or length % 2:
                raise ValueError(f"{self.name}: length={length} does not hold whole pairs; needs an even number >= 2.")

    @property
    def num_keys(self) -> int:
        return (self.vocab_size - 2) // 2

    def extra(self) -> int:
        return 2

    def draw(self, rng: np.random.Generator, num_rows: int, length: int) -> Array:
        num_values = self.vocab_size - 2 - self.num_keys
        values = self.num_keys + rng.integers(0, num_values, (num_rows, self.num_keys))
        keys = rng.integers(0, self.num_keys, (num_rows, length // 2))
        occurs = np.zeros((num_rows, self.num_keys), dtype=bool)
        np.put_along_axis(occurs, keys, True, axis=1)
        # each key that occurs has the largest of independent uniform numbers with the same probability
        query = np.where(occurs, rng.random(occurs.shape), -1.0).argmax(axis=1)[:, None]
        rows = np.empty((num_rows, length + 3), dtype=token_dtype(self.vocab_size))
        rows[:, 0:length:2] = keys
        rows[:, 1:length:2] = np.take_along_axis(values, keys, axis=1)
        rows[:, length] = self.trigger
        rows[:, length + 1 : length + 2] = query
        rows[:, length + 2 :] = np.take_along_axis(values, query, axis=1)
        return rows
