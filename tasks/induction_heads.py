"""Induction heads: repeat the token that followed the trigger."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from subquad.tasks.base import Array, token_dtype
from subquad.tasks.synthetic_language import SyntheticLanguage


def draw_induction(
    rng: np.random.Generator, num_rows: int, length: int, num_ordinary: int, trigger: int, place: int | None = None
) -> Array:
    """Sequences [num_rows, length + 2]: `length` tokens with one trigger among them, the trigger again, and the answer.

    Ordinary tokens are uniform over 0 .. num_ordinary - 1. The first trigger stands at index `place` of every row.
    Where `place` is None, its index is drawn uniformly from 0 .. length - 3, so that the answer is never the token
    right before the second trigger.
    """
    rows = np.empty((num_rows, length + 2), dtype=token_dtype(trigger + 1))
    rows[:, :length] = rng.integers(0, num_ordinary, (num_rows, length), dtype=rows.dtype)
    places = rng.integers(0, length - 2, (num_rows, 1)) if place is None else np.full((num_rows, 1), place)
    rows[:, length + 1 :] = np.take_along_axis(rows, places + 1, axis=1)
    np.put_along_axis(rows, places, trigger, axis=1)
    rows[:, length] = trigger
    return rows


class InductionHeads(SyntheticLanguage):
    """Induction heads as in H3 Table 2.

        input   a  c  =>  b  d  a  =>
        target  .  .  .   .  .  .  b         (evaluation; training labels every next token)

    Source: Fu et al. 2023 (H3), section 3.1 and Table 2. The paper fixes vocabulary 20 and length 30; its released
    data loader has 5000 training and 500 test rows and validates on the test rows.
    """

    name: ClassVar[str] = "induction-heads"
    version: ClassVar[int] = 1

    def check_options(self) -> None:
        if self.vocab_size < 4:
            raise ValueError(
                f"{self.name}: vocab_size={self.vocab_size} leaves {self.vocab_size - 2} ordinary tokens beside the "
                f"two special ones; needs >= 4."
            )
        for length in (self.length, *self.test_lengths):
            if length < 3:
                raise ValueError(f"{self.name}: length={length} has no room for trigger and answer; needs >= 3.")

    def extra(self) -> int:
        return 1

    def draw(self, rng: np.random.Generator, num_rows: int, length: int) -> Array:
        return draw_induction(rng, num_rows, length, self.vocab_size - 2, self.trigger)
