"""Base class of H3's two synthetic languages: splits of unique sequences, each with its answer at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, TaskBase, language_segment, token_spec, unique_rows


class SyntheticLanguage(TaskBase):
    """A language whose sequences end in their answer.

    Source: Fu et al. 2023 (H3), section 3.1; its released data loader decides what the paper leaves open.

    In evaluation, only the last position has a label. Rows are unique within a split, as in the source. Train and test
    come from separate random streams, so a sequence may by chance be in both.

    Departure: the source numbers its tokens in the order of their spelling (`.` first, `=>` last); here ordinary tokens
    come first. The numbers of tokens do not matter, since embeddings are learned.
    """

    vocab_size: Size = 20
    """Number of tokens, two special ones included: the last but one is the trigger `=>`. The last one is the source's
    `.`, which never occurs in these languages, but which a model can predict."""
    length: Size = 30
    """Number of tokens before the final trigger, as the papers count."""
    test_lengths: tuple[Size, ...] = ()
    """Lengths of the test split, where it has others than the training length (H3 Table 12). Each has its own slice."""
    num_train: Size = 5000
    num_test: Size = 500
    """Number of rows of the test split at each length, and of a clean validation split."""
    train_loss: Literal["all-tokens", "answer-only"] = "all-tokens"
    """Labels of the training split: every next token, as in the source, or the answer alone. Results depend on it."""

    @property
    def trigger(self) -> int:
        return self.vocab_size - 2

    def extra(self) -> int:
        """Number of input tokens after the first `length` ones."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, num_rows: int, length: int) -> Array:
        """Sequences [num_rows, length + extra() + 1], each with its answer at the end."""
        raise NotImplementedError

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size, max((self.length, *self.test_lengths)) + self.extra())

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        lengths = (split == "test" and self.test_lengths) or (self.length,)
        num_rows = self.num_train if split == "train" else self.num_test
        for length in lengths:
            rng = numpy_generator(seed, f"{self.name}/{split}", length)
            yield language_segment(
                unique_rows(lambda n: self.draw(rng, n, length), num_rows, self.name),  # noqa: B023 - called at once
                all_tokens=split == "train" and self.train_loss == "all-tokens",
                num_tokens=self.vocab_size,
                slice=f"length={length}",
            )
