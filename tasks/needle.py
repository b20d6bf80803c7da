"""A needle in a haystack: a number that is named once, somewhere in a generated text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from pydantic import Field

from subquad.suite.bounds import Count, Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import CHUNK_ROWS, Array, FreshTask, distinct, token_segment, token_spec


class Needle(FreshTask):
    """A needle in a haystack of synthetic text.

        input   the of KEY dog is 7 3 . a the KEY cat is 1 9 . of a the KEY cat is 1
        target   .   .  .   .  .  . . . .  .   .   .  . . . . .  . .  .   .  1  9

    The haystack consists of `num_words` filler words with Zipf's frequencies, p(word r) ~ 1 / r, drawn independently.
    One sentence in it says which number belongs to a name; further sentences (`num_distractors`) give other names other
    numbers. The row ends with the beginning of the sentence, which the model continues by the digits of the number.
    The needle stands at a depth (its place over the last possible one) that is uniform in training; in the test, the
    depths are divided into `num_depths` equal parts, and each has its own slice.

    Source: the single and multi-key needles of RULER (Hsieh et al. 2024, section 3, "NIAH"), which ask language models
    in words. Departures: text, names and digits are single tokens of a vocabulary of our own, so that small models can
    be trained on the task; RULER's haystacks are essays, repeated sentences, or more needles.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[int] = 1

    length: Size = 256
    """Number of input tokens of a training row."""
    test_lengths: tuple[Size, ...] = Field(default=(256, 512, 1024), min_length=1)
    num_depths: Size = 4
    num_words: Size = 200
    num_names: Size = 32
    num_digits: Size = 4
    num_distractors: Count = 0
    num_test: Size = 256
    """Number of rows of each test length and depth, and of a clean validation split."""

    def check_options(self) -> None:
        if self.num_names <= self.num_distractors or self.num_names < 2:
            raise ValueError(
                f"{self.name}: num_names={self.num_names} with num_distractors={self.num_distractors}; every needle "
                f"has a name of its own, and there must be two: raise num_names."
            )
        for length in (self.length, *self.test_lengths):
            if length < self.needed:
                raise ValueError(
                    f"{self.name}: length={length} does not hold {1 + self.num_distractors} sentences of "
                    f"{self.sentence} tokens and the question; needs >= {self.needed}."
                )

    @property
    def sentence(self) -> int:
        """Tokens of a sentence: KEY, name, is, the digits, and a full stop."""
        return self.num_digits + 4

    @property
    def question(self) -> int:
        """Input tokens at the end: KEY, name, is, and all digits but the last."""
        return self.num_digits + 2

    @property
    def needed(self) -> int:
        """Smallest length, at which a needle has `num_depths` places or more to stand."""
        return (1 + self.num_distractors) * self.sentence + self.question + self.num_depths

    @property
    def num_tokens(self) -> int:
        return self.num_words + self.num_names + 13

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.num_tokens, max(self.length, *self.test_lengths))

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        if split == "valid":
            rng = numpy_generator(seed, f"{self.name}/{split}", self.length)
            yield self._rows(rng, self.num_test, self.length, (0.0, 1.0), f"length={self.length}")
            return
        for length in self.test_lengths:
            for part in range(self.num_depths):
                depths = part / self.num_depths, (part + 1) / self.num_depths
                rng = numpy_generator(seed, f"{self.name}/{split}", length, part)
                yield self._rows(rng, self.num_test, length, depths, f"length={length},depth={depths[0]:g}")

    def chunk(self, seed: int, index: int) -> Segment:
        rng = numpy_generator(seed, f"{self.name}/train", index)
        return self._rows(rng, CHUNK_ROWS, self.length, (0.0, 1.0), f"length={self.length}")

    def _rows(
        self, rng: np.random.Generator, num_rows: int, length: int, depths: tuple[float, float], slice: str
    ) -> Segment:
        """Rows whose needle stands at a depth from `depths[0]` up to, but not including, `depths[1]`."""
        key, is_, stop = range(self.num_tokens - 3, self.num_tokens)
        first_name, first_digit = self.num_words, self.num_words + self.num_names
        sentences = 1 + self.num_distractors
        # the haystack without its sentences, between whose words they are put
        words = length - self.question - sentences * self.sentence
        weights = 1 / np.arange(1, self.num_words + 1)
        filler = rng.choice(self.num_words, (num_rows, words), p=weights / weights.sum())
        names = first_name + distinct(rng, num_rows, sentences, self.num_names)
        digits = first_digit + rng.integers(0, 10, (num_rows, sentences, self.num_digits))
        low, high = (int(np.ceil(depth * (words + 1))) for depth in depths)
        gaps = rng.integers(0, words + 1, (num_rows, sentences))
        # sentence 0 is the needle
        gaps[:, 0] = rng.integers(low, high, num_rows)
        order = gaps.argsort(axis=1, kind="stable")
        inputs = np.empty((num_rows, length), dtype=np.int64)
        for row in range(num_rows):
            parts, done = [], 0
            for i in order[row]:
                parts += [filler[row, done : gaps[row, i]], [key, names[row, i], is_], digits[row, i], [stop]]
                done = gaps[row, i]
            parts += [filler[row, done:], [key, names[row, 0], is_], digits[row, 0, :-1]]
            inputs[row] = np.concatenate(parts)
        positions = np.tile(np.arange(length - self.num_digits, length), (num_rows, 1))
        return token_segment(inputs, digits[:, 0], positions, self.num_tokens, slice)

    def solve(self, segment: Segment) -> Array:
        """The oracle: looks for the first sentence that begins as the last one does."""
        answers = []
        for tokens in segment.inputs.tolist():
            asked = tokens[len(tokens) - self.question :][:3]
            place = next(i for i in range(len(tokens)) if tokens[i : i + 3] == asked)
            answers.append(tokens[place + 3 : place + 3 + self.num_digits])
        return np.array(answers)
