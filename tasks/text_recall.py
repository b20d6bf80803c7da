"""Measures what a language model copies from its context: words that follow a word of a real text as before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field

from subquad.suite.bounds import Size
from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.tasks.base import Array
from subquad.tasks.language import TextFile

WORD = re.compile(rb"[A-Za-z']+")


def repeated(text: bytes, length: int, max_count: int) -> Array:
    """Marks the bytes of a text [N] that belong to a word which repeats a pair of words of its row, bool.

    A row is `length` bytes that predict the next ones. The pair occurs earlier in the same row and at most `max_count`
    times in the text, so that what stands there is seldom known without the row.
    """
    words = list(WORD.finditer(text))
    pairs = [(first[0], second[0]) for first, second in pairwise(words)]
    counts = Counter(pairs)
    marks = np.zeros(len(text), dtype=bool)
    last: dict[tuple[bytes, bytes], int] = {}
    for pair, (first, second) in zip(pairs, pairwise(words), strict=True):
        if counts[pair] > max_count:
            continue
        # byte i is predicted in row (i - 1) // length, whose inputs begin with byte row * length
        row = (second.start() - 1) // length
        if last.get(pair) == row:
            stop = min(second.end(), (row + 1) * length + 1)
            marks[second.start() : stop] = True
        if first.start() >= row * length:
            last[pair] = row
    return marks


class TextRecall(TextFile):
    """The next byte of any text, with the test split by what a model has to remember.

        input   M i s t e r   B r a n d t   l a u g h s .   M i s t e r   B r a n d t
        target  i s t e r   B r a n d t   l a u g h s .   M i s t e r   B r a n d t    (the next byte, everywhere)
        recall                                                        B r a n d t      (what the context has shown)
        other   i s t e r   B r a n d t   l a u g h s .   M i s t e r                  (all other bytes)

    Training and validation are those of `text-file`. The test split has two slices of the same rows: `recall`, the
    words that follow a word as they did earlier in the row, and `other`. For every value of `test_lengths` there is
    one more slice, `length=8192`, the whole text cut into rows of that many bytes.

    Source: Arora et al. 2023 (Zoology), section 3, measure language models on pairs of tokens that repeat a pair of
    the context, without those that are frequent. Departures: pairs of words in place of tokens, because tokens are
    bytes here, and a pair is frequent where it occurs more than `max_count` times in the test text.
    """

    name: ClassVar[str] = "text-recall"
    version: ClassVar[int] = 1

    max_count: Size = 30
    """A pair of words that occurs more often in the test text does not count as recall."""
    test_lengths: tuple[Size, ...] = Field(default=())
    """Further lengths, in bytes, of the rows into which the test text is cut."""

    @property
    def spec(self) -> TaskSpec:
        plain = super().spec
        if self.vocabulary != "bytes":
            raise ValueError(f"{self.name}: vocabulary={self.vocabulary}; words are found in bytes, leave it at bytes.")
        for length in self.test_lengths:
            if not 2 <= length <= 2**20 or length == self.length:
                raise ValueError(
                    f"{self.name}: test_lengths has {length}; give lengths from 2 to 2^20 other than {self.length}."
                )
        return replace(plain, max_length=max((self.length, *self.test_lengths)))

    def plan(self) -> None:
        super().plan()
        for length in self.test_lengths:
            self.require_row("test", length)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        if split != "test":
            yield from super().segments(split, seed)
            return
        (whole,) = super().segments(split, seed)
        text = bytes(self.arrays()["test.stream"])
        marks = np.zeros(whole.inputs.numel(), dtype=bool)
        marks[: len(text) - 1] = repeated(text, self.length, self.max_count)[1:]
        recall = torch.from_numpy(marks.reshape(whole.inputs.shape))
        for name, kept in (("recall", recall), ("other", ~recall)):
            targets = torch.where(kept, whole.targets, IGNORE)
            yield Segment(inputs=whole.inputs, targets=targets, slice=name)
        for length in self.test_lengths:
            yield replace(self.cut(split, length), slice=f"length={length}")
