"""Word problems of finite groups: the running product, for which a model has to keep a state."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from subquad.suite.bounds import Count, Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import CHUNK_ROWS, Array, FreshTask, token_segment, unique_rows

LARGEST_ORDER = 720
"""Largest number of elements of a group, that of S6: the table of products has its square."""


@functools.cache
def permutations(group: str) -> tuple[tuple[int, ...], ...]:
    """The elements of S_m or A_m in lexicographic order, the identity first, each as the images of 0 .. m - 1."""
    points = range(int(group[1:]))
    every = itertools.permutations(points)
    if group[0] == "S":
        return tuple(every)
    # a permutation is even where an even number of pairs stands in the wrong order
    return tuple(p for p in every if sum(p[i] > p[j] for i in points for j in range(i)) % 2 == 0)


@functools.cache
def products(group: str) -> Array:
    """The table [n, n] of products: the element number of x y at [x, y], where (x y)(i) = x(y(i))."""
    if group[0] == "Z":
        elements = np.arange(int(group[1:]))
        return (elements[:, None] + elements) % len(elements)
    images = np.array(permutations(group))
    weights = images.shape[1] ** np.arange(images.shape[1])
    # distinct permutations have distinct numbers in base m
    codes, order = np.unique(images @ weights, return_index=True)
    return order[np.searchsorted(codes, images[:, images] @ weights)]


@functools.cache
def orders(group: str) -> Array:
    """The order of every element: how often it has to be multiplied by itself until the product is the identity."""
    table = products(group)
    elements = powers = np.arange(len(table))
    found = np.zeros(len(table), dtype=int)
    for times in range(1, len(table) + 1):
        found[(powers == 0) & (found == 0)] = times
        powers = table[powers, elements]
    return found


class WordProblem(FreshTask):
    """The word problem of a group: at every position, the product of all elements so far.

        input   $  2  0  1  2                 (the group Z3, whose product is addition modulo 3)
        target  .  2  2  0  2

        y_t = y_{t-1} x_t,    y_0 = the identity

    The elements x_t are drawn uniformly and independently. Z2 is parity, Zm is addition modulo m, S3 and S5 are all
    permutations of 3 and 5 points, and A5 the even ones of 5 points, the smallest group that is not solvable. Elements
    of S and A are numbered in lexicographic order; the numbers do not matter, since embeddings are learned.

    Source: Merrill, Petty and Sabharwal 2024 (The Illusion of State in State-Space Models), with code in
    jopetty/word-problem, src/generate_data.py at 0fb17d1a75fa7e108091d94abd739a14abdddb6b: uniform elements, unique
    rows, every position labelled, and a first token `$` that their tokenizer adds (`begin`). Siems et al. 2025
    (DeltaProduct) train at length 128 and test up to 512 on 100,000 rows each (automl/DeltaProduct, README.md at
    08a4eada2f081ca0c5adb321dfda2110a6453ae2). Grazzi et al. 2024 (negative eigenvalues) train parity on fresh rows of 3
    to 40 bits that are labelled at their end alone, and test on one set of 40 to 256 bits, which `min_test_length`
    allows (adankow/unlocking_state_tracking, xlstm/experiments/parity_delta_net_single_layer.yaml at
    7145c7af8efec414f706e6d44d84df5745ab34e9).

    Sequences of mixed lengths with every position labelled are prefixes of longer ones, so for a causal model the
    option `length` covers them, too. A curriculum of lengths is `train.length_warmup`. With `labels: end`, each
    training row has one label, whose place is drawn; what stands behind it cannot matter to a causal model.

    Departures: the sources label `$` with itself, here it has no label. Merrill et al. split one set of rows into
    training and test; here they come from separate random streams.
    """

    name: ClassVar[str] = "word-problem"
    version: ClassVar[int] = 1
    left_out_when_off: ClassVar[tuple[str, ...]] = ("min_test_length", "repeats")

    group: str = "S3"
    """`Zm`, `Sm` or `Am`: the integers modulo m under addition, or all or the even permutations of m points."""
    length: Size = 128
    """Number of elements of a training row, without `$`."""
    test_lengths: tuple[Size, ...] = Field(default=(32, 64, 128, 256, 512), min_length=1)
    """Lengths of the test rows, in elements; each has its own slice. Validation has the training length."""
    labels: Literal["every", "end"] = "every"
    """`every`: all positions. `end`: one position of a row, in evaluation the last, in training a position drawn
    uniformly from `min_length` .. `length`."""
    min_length: Size = 1
    """Shortest sequence that `labels: end` trains on."""
    min_test_length: Count = 0
    """With `labels: end`, the label of a test row stands at a position drawn uniformly from here to the test length;
    0: at the last position."""
    begin: bool = True
    """Whether every row begins with a token `$`, at which a model can write the identity into an empty state."""
    identity: bool = True
    """Whether the identity is among the elements that are drawn."""
    max_moved: Count = 0
    """Largest number of points that a drawn permutation moves (2: swaps); 0: any number. All elements can be products
    whichever are drawn, where these generate the group."""
    num_train: Count = 100_000
    """Number of unique training rows; 0: fresh rows at every step."""
    num_test: Size = 1000
    """Number of rows of each test length, and of a clean validation split."""
    repeats: bool = False
    """Whether the test also has rows in which one element is repeated, each drawn element but the identity in a row of
    its own. They have a slice for each test length and each order of an element (`length=64,order=3`). Rows of random
    elements seldom repeat one for long, so a model can be right on them without keeping the products of such rows."""

    def check_options(self) -> None:
        if not re.fullmatch(r"Z[1-9]\d{0,3}|[SA][1-9]", self.group):
            raise ValueError(f"{self.name}: group={self.group!r} is none; write Zm, Sm or Am, such as Z2, S5 or A5.")
        size = int(self.group[1:])
        order = size if self.group[0] == "Z" else int(np.prod(range(1, size + 1))) // (1 + (self.group[0] == "A"))
        if not 2 <= order <= LARGEST_ORDER:
            raise ValueError(
                f"{self.name}: group={self.group} has {order} elements; choose one with 2 to {LARGEST_ORDER}."
            )
        if self.max_moved and self.group[0] == "Z":
            raise ValueError(f"{self.name}: max_moved counts moved points and has no meaning with group={self.group}.")
        if len(self.drawn) < 2:
            raise ValueError(
                f"{self.name}: group={self.group} with identity={self.identity} and max_moved={self.max_moved} leaves "
                f"{len(self.drawn)} elements to draw; needs 2 or more."
            )
        if self.min_length > self.length:
            raise ValueError(f"{self.name}: min_length={self.min_length} is above length={self.length}; lower it.")
        if self.min_length > 1 and self.labels == "every":
            raise ValueError(f"{self.name}: min_length has no meaning with labels=every; take labels: end, or drop it.")
        if self.min_test_length and self.labels == "every":
            raise ValueError(
                f"{self.name}: min_test_length has no meaning with labels=every; take labels: end, or drop it."
            )
        if self.repeats and self.labels == "end":
            raise ValueError(
                f"{self.name}: repeats needs a label at every position, got labels=end; take labels: every, or drop it."
            )
        if self.min_test_length > min(self.test_lengths):
            raise ValueError(
                f"{self.name}: min_test_length={self.min_test_length} is above a test length of "
                f"{min(self.test_lengths)}; lower it."
            )

    @property
    def drawn(self) -> Array:
        """The elements that are drawn."""
        elements = np.arange(len(products(self.group)))
        if self.max_moved:
            moved = (np.array(permutations(self.group)) != np.arange(int(self.group[1:]))).sum(axis=1)
            elements = elements[moved <= self.max_moved]
        return elements if self.identity else elements[elements != 0]

    @property
    def fresh(self) -> bool:
        return not self.num_train

    @property
    def num_elements(self) -> int:
        return len(products(self.group))

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            input="tokens",
            num_classes=self.num_elements,
            readout="token",
            max_length=max(self.length, *self.test_lengths) + self.begin,
            vocab_size=self.num_elements + self.begin,
        )

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        for length in self.test_lengths if split == "test" else (self.length,):
            rng = numpy_generator(seed, f"{self.name}/{split}", length)
            if split == "train":
                rows = unique_rows(lambda n: self._draw(rng, n, self.length), self.num_train, self.name)  # noqa: B023
            else:
                rows = self._draw(rng, self.num_test, length)
            yield self._labelled(rows, rng, split)
            if split == "test" and self.repeats:
                for order, elements in self._by_order().items():
                    rows = np.repeat(elements[:, None], length, axis=1)
                    yield self._labelled(rows, rng, split, f"length={length},order={order}")

    def chunk(self, seed: int, index: int) -> Segment:
        rng = numpy_generator(seed, f"{self.name}/train", index)
        return self._labelled(self._draw(rng, CHUNK_ROWS, self.length), rng, "train")

    def _draw(self, rng: np.random.Generator, num_rows: int, length: int) -> Array:
        return self.drawn[rng.integers(0, len(self.drawn), (num_rows, length))]

    def _by_order(self) -> dict[int, Array]:
        """The drawn elements but the identity, by their order."""
        elements = self.drawn[self.drawn != 0]
        order = orders(self.group)[elements]
        return {int(n): elements[order == n] for n in np.unique(order)}

    def _labelled(self, rows: Array, rng: np.random.Generator, split: str, name: str = "") -> Segment:
        num_rows, length = rows.shape
        table, running = products(self.group), np.empty_like(rows)
        state = np.zeros(num_rows, dtype=rows.dtype)
        for t in range(length):
            running[:, t] = state = table[state, rows[:, t]]
        shortest = {"train": self.min_length, "test": self.min_test_length}.get(split) or length
        if self.labels == "every":
            places = np.tile(np.arange(length), (num_rows, 1))
        elif shortest < length:
            places = rng.integers(shortest - 1, length, (num_rows, 1))
        else:
            places = np.full((num_rows, 1), length - 1)
        inputs = np.pad(rows, ((0, 0), (1, 0)), constant_values=self.num_elements) if self.begin else rows
        targets = np.take_along_axis(running, places, axis=1)
        ranged = split == "test" and shortest < length
        name = name or (f"length={shortest}..{length}" if ranged else f"length={length}")
        return token_segment(inputs, targets, places + self.begin, self.spec.vocab_size, name)

    def solve(self, segment: Segment) -> Array:
        """The oracle: answers [R, P], found by moving points one element after the other, without a table."""
        inputs, positions = segment.inputs.numpy().astype(int), segment.positions.numpy()  # type: ignore[union-attr]
        answers = np.empty(positions.shape, dtype=int)
        if self.group[0] == "Z":
            sums = np.where(inputs < self.num_elements, inputs, 0).cumsum(axis=1)
            return np.take_along_axis(sums, positions.astype(int), axis=1) % self.num_elements
        elements = permutations(self.group)
        number = {element: i for i, element in enumerate(elements)}
        for answer, tokens, places in zip(answers, inputs.tolist(), positions.tolist(), strict=True):
            state, states = elements[0], []
            for token in tokens:
                state = state if token == self.num_elements else tuple(state[i] for i in elements[token])
                states.append(number[state])
            answer[:] = [states[place] for place in places]
        return answers
