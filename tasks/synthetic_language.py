"""The frame of the two synthetic languages of H3: splits of unique sequences that end in their answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from pydantic import Field

from suite.contracts import Segment, TaskSpec
from suite.rng import numpy_generator
from tasks.base import Array, TaskBase, language_segment, unique_rows


class SyntheticLanguage(TaskBase):
    """Source: Fu et al. 2023 (H3), section 3.1; its released data loader fixes what the paper leaves open.

    Evaluation labels the last position only. Rows are unique within a split, as in the source; train and test come
    from separate streams, so a sequence may by chance stand in both.

    Departure: the source numbers its tokens in the order of their spelling (`.` first, `=>` last); here ordinary
    tokens come first. Ids are arbitrary, since embeddings are learned.
    """

    vocab_size: int = 20
    """Counts the two special tokens: the last id but one is the trigger `=>`, the last one the source's `.`, which
    these languages never emit but which a model can predict."""
    length: int = 30
    """Tokens before the final trigger, as the papers count."""
    test_lengths: tuple[int, ...] = ()
    """Lengths of the test split where they are not the training length (H3 Table 12); one slice each."""
    num_train: int = Field(default=5000, ge=1)
    num_test: int = Field(default=500, ge=1)
    """Rows of the test split at each length, and of a clean validation split."""
    train_loss: Literal["all-tokens", "answer-only"] = "all-tokens"
    """Labels of the training split: every next token, as the source, or only the answer. The outcome depends on it."""

    @property
    def trigger(self) -> int:
        return self.vocab_size - 2

    def extra(self) -> int:
        """Input tokens after the first `length`."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, num_rows: int, length: int) -> Array:
        """[num_rows, length + extra() + 1] sequences with their answer at the end."""
        raise NotImplementedError

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            input="tokens",
            num_classes=self.vocab_size,
            readout="token",
            max_length=max((self.length, *self.test_lengths)) + self.extra(),
            vocab_size=self.vocab_size,
        )

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
