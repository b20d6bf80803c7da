"""Copying of strings that are longer than those of the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from subquad.suite.bounds import Size
from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import CHUNK_ROWS, Array, FreshTask, predicted_classes, token_segment, token_spec


class Copying(FreshTask):
    """Copying with length generalisation.

        input   $  c  a  b  |  c  a  b  ;  $  a  |  a      (training: strings one after the other, each ends in `;`)
        target  .  .  .  .  c  a  b  ;  .  .  .  a  ;

        input   $  c  a  b  a  |  c  a  b                     (evaluation: one longer string)
        target  .  .  .  .  .  c  a  b  a

    The letters are uniform. A training row of `length` tokens is filled with strings of `min_string` .. `max_string`
    letters, each followed by its copy; the last string is cut off and has no label. Labels are the letters of the copy
    and, in training, its end.

    Source: Jelassi et al. 2024 (Repeat After Me), section 4.1, and its code, sjelassi/transformers_ssm_copy,
    synthetic_exps/data_utils.py and test_utils.py at 1f32ac617ff4951485ff391aef4fbb66bc4ebdd8, whose defaults of
    lengths (main.py there) are those here; 26 letters are the largest vocabulary there. `accuracy` counts letters,
    `exact` counts whole strings, as the figures of the paper do. All letters of the string stand in the input
    (teacher forcing), as in that code.
    """

    name: ClassVar[str] = "copying"
    version: ClassVar[int] = 1

    vocab_size: Size = 26
    """Number of letters; `$`, `|` and `;` come on top."""
    length: Size = 220
    """Number of tokens of a training row."""
    min_string: Size = 8
    max_string: Size = 50
    test_strings: tuple[Size, ...] = Field(default=(50, 100, 150, 200), min_length=1)
    """Letters of the strings of the test split; each number has its own slice. Validation has `max_string`."""
    num_test: Size = 640
    """Number of strings of each test length, and of a clean validation split."""

    def check_options(self) -> None:
        if self.vocab_size < 2:
            raise ValueError(f"{self.name}: vocab_size={self.vocab_size}; needs two letters or more.")
        if self.min_string > self.max_string:
            raise ValueError(f"{self.name}: min_string={self.min_string} is above max_string={self.max_string}.")
        if self.length < 2 * self.max_string + 3:
            raise ValueError(
                f"{self.name}: max_string={self.max_string} with its copy needs length >= {2 * self.max_string + 3}, "
                f"got {self.length}; raise length or lower max_string."
            )

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size + 3, max(self.length, 2 * max(self.max_string, *self.test_strings) + 1))

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        for size in self.test_strings if split == "test" else (self.max_string,):
            letters = numpy_generator(seed, f"{self.name}/{split}", size).integers(
                0, self.vocab_size, (self.num_test, size)
            )
            begin, middle = (np.full((self.num_test, 1), self.vocab_size + i) for i in (0, 1))
            inputs = np.concatenate([begin, letters, middle, letters[:, :-1]], axis=1)
            positions = np.tile(np.arange(size + 1, 2 * size + 1), (self.num_test, 1))
            yield token_segment(inputs, letters, positions, self.vocab_size + 3, f"length={size}")

    def chunk(self, seed: int, index: int) -> Segment:
        rng = numpy_generator(seed, f"{self.name}/train", index)
        begin, middle, end = range(self.vocab_size, self.vocab_size + 3)
        # one token more than the input, because the labels are next tokens
        rows = np.empty((CHUNK_ROWS, self.length + 1), dtype=np.int64)
        targets = np.full((CHUNK_ROWS, self.length), IGNORE)
        for row, target in zip(rows, targets, strict=True):
            start = 0
            while start < len(row):
                size = int(rng.integers(self.min_string, self.max_string + 1))
                letters = rng.integers(0, self.vocab_size, size)
                example = np.concatenate([[begin], letters, [middle], letters, [end]])[: len(row) - start]
                row[start : start + len(example)] = example
                if len(example) == 2 * size + 3:
                    target[start + size + 1 : start + 2 * size + 2] = example[size + 2 :]
                start += len(example)
        positions = np.tile(np.arange(self.length), (CHUNK_ROWS, 1))
        return token_segment(rows[:, :-1], targets, positions, self.vocab_size + 3, f"length={self.length}")

    def score(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Adds `exact`: the fraction of rows without a wrong label, of those with a label."""
        labelled = targets != IGNORE
        rows = labelled.any(-1)
        right = ((predicted_classes(logits) == targets) | ~labelled).all(-1) & rows
        return {**super().score(logits, targets), "exact": (right.sum(), rows.sum())}

    def solve(self, segment: Segment) -> Array:
        """The oracle: behind `|`, it repeats what stands between `$` and `|`, and then ends."""
        begin, middle, end = range(self.vocab_size, self.vocab_size + 3)
        answers = np.full(segment.inputs.shape, -1)
        for answer, tokens in zip(answers, segment.inputs.tolist(), strict=True):
            copied: list[int] = []
            string: list[int] = []
            for t, token in enumerate(tokens):
                if token == begin:
                    string = []
                elif token == middle:
                    copied = [*string, end]
                elif not copied:
                    string.append(token)
                answer[t] = copied.pop(0) if copied else -1
        positions = segment.positions.numpy().astype(int)  # type: ignore[union-attr]
        return np.take_along_axis(answers, positions, axis=1)
