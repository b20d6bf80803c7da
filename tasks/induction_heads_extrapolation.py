"""Induction heads that are trained at one length and tested at many, as in Mamba."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np

from subquad.suite.bounds import Count, Size, Total
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import CHUNK_ROWS, FreshTask, language_segment, token_spec
from subquad.tasks.induction_heads import draw_induction


class InductionHeadsExtrapolation(FreshTask):
    """Induction heads with length extrapolation, Mamba Tables 2 and 11.

        input   a  c  =>  b  d  a  =>        (length 7)
        target  .  .  .   .  .  .  b

    Source: Gu and Dao 2023 (Mamba), section 4.1.2 and appendix E.1: training at length 256 with 16 tokens on fresh data
    in batches of 8, "epochs" of 8192 steps, and fixed validation sets of every length 2^6 .. 2^20. No code was
    released. The paper leaves open, and here are options:

    - the language. Here it is that of H3 Table 2, which the paper builds on; the trigger is the last of the
      `vocab_size` tokens, and `length` counts all input tokens, the final trigger included;
    - the place of the first trigger (`trigger_place`). Here it is uniform. The one public script whose author reports
      zero loss up to 2^20 (hrbigelow/mamba-recall at 90e591383f01089a5752fe006c6220236302ac9c, data.py) puts it at
      index 5 of every row, which also removes the need to search for it;
    - the labels in training (`train_loss`). Readers report that the task is not learned with all tokens labelled;
    - the number of rows at each length (`num_test`). Every accuracy of Table 11 is a multiple of 1/256, hence 256.
      Lengths at which that is more than `max_test_tokens` tokens have fewer rows.

    `split_policy: paper` validates on the test rows of every length. `clean` validates on other rows: of the training
    length, so that the selection of a model sees no extrapolation, or of `valid_lengths`.
    """

    name: ClassVar[str] = "induction-heads-extrapolation"
    version: ClassVar[int] = 1
    left_out_when_off: ClassVar[tuple[str, ...]] = ("trigger_place", "valid_lengths")

    vocab_size: Size = 16
    """Number of tokens, the trigger included."""
    length: Size = 256
    test_lengths: tuple[Size, ...] = tuple(2**k for k in range(6, 21))
    valid_lengths: tuple[Size, ...] = ()
    """Lengths of the validation rows under `clean`; empty: the training length. With those of the test, the accuracy of
    every length is followed during training on fixed rows, as in appendix E.1."""
    num_test: Size = 256
    """Number of rows of each test length, and of each validation length."""
    max_test_tokens: Total = 2**25
    """Largest number of tokens at one test length, which bounds its memory (2 bytes a token) and time. The default
    gives 256 rows up to 2^17, 128 at 2^18, 64 at 2^19 and 32 at 2^20; with 2^28 there are 256 rows at every length."""
    train_loss: Literal["all-tokens", "answer-only"] = "answer-only"
    trigger_place: Count | None = None
    """Index of the first trigger in every row. None: it is drawn uniformly for each row."""

    def check_options(self) -> None:
        if self.vocab_size < 3:
            raise ValueError(
                f"{self.name}: vocab_size={self.vocab_size} leaves {self.vocab_size - 1} ordinary tokens beside the "
                f"trigger; needs >= 3."
            )
        if not self.test_lengths:
            raise ValueError(f"{self.name}: test_lengths is empty; give at least one length.")
        if self.valid_lengths and self.split_policy == "paper":
            raise ValueError(
                f"{self.name}: valid_lengths has no meaning with split_policy=paper, which validates on the test rows; "
                f"drop it, or take split_policy: clean."
            )
        for length in (self.length, *self.test_lengths, *self.valid_lengths):
            if length < 4:
                raise ValueError(f"{self.name}: length={length} has no room for two triggers and answer; needs >= 4.")
            if self.trigger_place is not None and self.trigger_place > length - 4:
                raise ValueError(
                    f"{self.name}: trigger_place={self.trigger_place} leaves no room for the answer and the second "
                    f"trigger at length {length}; choose 0 to {length - 4}."
                )
            if length > self.max_test_tokens:
                raise ValueError(
                    f"{self.name}: length={length} is above max_test_tokens={self.max_test_tokens}, which leaves no "
                    f"row; raise max_test_tokens or drop the length."
                )

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size, max(self.length, *self.test_lengths, *self.valid_lengths))

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        for length in self.test_lengths if split == "test" else self.valid_lengths or (self.length,):
            rng = numpy_generator(seed, f"{self.name}/{split}", length)
            num_rows = min(self.num_test, self.max_test_tokens // length)
            yield self._rows(rng, num_rows, length, all_tokens=False)

    def chunk(self, seed: int, index: int) -> Segment:
        rng = numpy_generator(seed, f"{self.name}/train", index)
        return self._rows(rng, CHUNK_ROWS, self.length, all_tokens=self.train_loss == "all-tokens")

    def _rows(self, rng: np.random.Generator, num_rows: int, length: int, all_tokens: bool) -> Segment:
        rows = draw_induction(rng, num_rows, length - 1, self.vocab_size - 1, self.vocab_size - 1, self.trigger_place)
        return language_segment(rows, all_tokens=all_tokens, num_tokens=self.vocab_size, slice=f"length={length}")
