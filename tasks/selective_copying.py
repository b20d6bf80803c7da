"""Selective copying: repeat the data tokens that are scattered among noise, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np

from subquad.suite.bounds import Count, Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import (
    CHUNK_ROWS,
    Array,
    FreshTask,
    ScoredByClass,
    distinct,
    token_dtype,
    token_segment,
    token_spec,
)


class SelectiveCopying(ScoredByClass, FreshTask):
    """Selective copying as in Mamba Table 1, which follows the denoising task of Jing et al. 2019.

        input   _  a  _  _  c  b  _  ?  ?  ?
        target  .  .  .  .  .  .  .  a  c  b

    `num_data` data tokens, drawn with repetition, stand at uniformly chosen places of a context of noise tokens `_`. At
    the `num_data` answer positions behind it, the model must repeat them in order.

    Source: Gu and Dao 2023 (Mamba), section 4.1.1 and appendix E.1: length 4096, 16 tokens "including the white noise
    token", 16 data tokens, batches of 64 and 400K steps. No code was released, and the rest is open. Options decide
    what stands at the answer positions (`marker`), what the length counts (`length_rule`), and how large the evaluation
    split is (`num_test`). Training data are fresh at every step here, which the paper states for induction heads only.
    Accuracy is per answer token.

    The task of the same name in MAD (Poli et al. 2024, section 3.1; code in athms/mad-lab, mad/data/instances.py at
    6e7e4c903b7d4d1a31d12186b709f36fa3184041) has `length` 256, `length_rule: total`, `marker: before`, `places: gaps`
    and `num_train` 12800.
    """

    name: ClassVar[str] = "selective-copying"
    version: ClassVar[int] = 1
    left_out_when_off: ClassVar[tuple[str, ...]] = ("places", "num_train")

    length: Size = 4096
    vocab_size: Size = 16
    """Number of tokens: noise (token 0), data tokens, and the marker if it is `in-vocabulary`."""
    num_data: Size = 16
    marker: Literal["in-vocabulary", "additional", "none", "before"] = "in-vocabulary"
    """Input tokens at the answer positions. `in-vocabulary`: a marker that is one of the `vocab_size` tokens, which
    leaves vocab_size - 2 data symbols (14), as in public third-party code. `additional`: a marker beyond these tokens,
    which leaves vocab_size - 1 data symbols (15). `none`: noise, as in the white cells of Mamba Figure 2, so that a
    model has to count positions. `before`: one marker of the vocabulary as the last token of the context, and noise at
    the answer positions, as in MAD."""
    length_rule: Literal["context", "total", "noise"] = "context"
    """Tokens that `length` counts. `context`: noise and data tokens, so T = length + num_data. `total`: all tokens, T =
    length. `noise`: noise tokens alone, T = length + 2 num_data, as in public third-party code."""
    num_test: Size = 1024
    """Number of rows of the test split, and of a clean validation split."""
    places: Literal["uniform", "gaps"] = "uniform"
    """Places of the data tokens in the context. `uniform`: all selections of places are equally likely. `gaps`: every
    noise token falls into one of the `num_data` gaps before a data token, so that the last one ends the context, as in
    MAD."""
    num_train: Count = 0
    """Number of training rows; 0: fresh rows at every step."""

    def check_options(self) -> None:
        if self.num_symbols < 2:
            needed = 3 + (self.marker in ("in-vocabulary", "before"))
            raise ValueError(
                f"{self.name}: vocab_size={self.vocab_size} with marker={self.marker} leaves {self.num_symbols} data "
                f"symbols; needs vocab_size >= {needed}."
            )
        if self.free < self.num_data:
            raise ValueError(
                f"{self.name}: num_data={self.num_data} does not fit into a context of {self.free} tokens "
                f"(length={self.length}, length_rule={self.length_rule}); raise length or lower num_data."
            )

    @property
    def num_symbols(self) -> int:
        """Number of data symbols, which are the tokens 1 .. num_symbols."""
        return self.vocab_size - 1 - (self.marker in ("in-vocabulary", "before"))

    @property
    def context(self) -> int:
        """Number of tokens before the first answer position."""
        return self.length + {"context": 0, "total": -self.num_data, "noise": self.num_data}[self.length_rule]

    @property
    def free(self) -> int:
        """Number of tokens of the context that are data or noise."""
        return self.context - (self.marker == "before")

    @property
    def fresh(self) -> bool:
        return not self.num_train

    @property
    def num_tokens(self) -> int:
        return self.vocab_size + (self.marker == "additional")

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.num_tokens, self.context + self.num_data)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        num_rows = self.num_train if split == "train" else self.num_test
        yield self._rows(numpy_generator(seed, f"{self.name}/{split}"), num_rows)

    def chunk(self, seed: int, index: int) -> Segment:
        return self._rows(numpy_generator(seed, f"{self.name}/train", index), CHUNK_ROWS)

    def _rows(self, rng: np.random.Generator, num_rows: int) -> Segment:
        places = self._places(rng, num_rows)
        dtype = token_dtype(self.num_tokens)
        data = rng.integers(1, self.num_symbols + 1, places.shape, dtype=dtype)
        inputs = np.zeros((num_rows, self.context + self.num_data), dtype=dtype)
        np.put_along_axis(inputs, places, data, axis=1)
        if self.marker == "before":
            inputs[:, self.free] = self.num_tokens - 1
        elif self.marker != "none":
            inputs[:, self.context :] = self.num_tokens - 1
        positions = np.tile(np.arange(self.context, inputs.shape[1]), (num_rows, 1))
        return token_segment(inputs, data, positions, self.num_tokens, f"length={self.length}")

    def _places(self, rng: np.random.Generator, num_rows: int) -> Array:
        """Places of the data tokens, ascending, [num_rows, num_data]."""
        if self.places == "uniform":
            return np.sort(distinct(rng, num_rows, self.num_data, self.free), axis=1)
        gaps = rng.multinomial(self.free - self.num_data, np.full(self.num_data, 1 / self.num_data), size=num_rows)
        return gaps.cumsum(axis=1) + np.arange(self.num_data)
