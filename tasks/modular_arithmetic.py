"""Modular arithmetic: the value of an expression over the digits below a modulus, with or without brackets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from pydantic import Field

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import CHUNK_ROWS, Array, FreshTask, token_segment

SIGNS = "+-*=()"
"""Tokens behind the digits, in this order; one token of padding follows the last that a language has."""
PLUS, MINUS, TIMES, EQUALS, OPEN, CLOSE = range(len(SIGNS))
SHORTEST_IN_BRACKETS = 5
"""Length, with `=`, the answer and a token of padding, of the shortest expression in brackets: two tokens, as `-3`."""
WHOLE = 5
"""Smallest number of tokens of an expression in brackets that has an operation: `(a+b)`."""


class ModularArithmetic(FreshTask):
    """The value modulo m of an arithmetic expression, asked for at the `=` behind it.

        input   2  -  3  -  3  *  2  =                    (m = 5, without brackets: products before sums)
        target  .  .  .  .  .  .  .  3

        input   (  (  1  +  3  )  *  -  2  )  =  _        (with brackets: a pair around every operation)
        target  .  .  .  .  .  .  .  .  .  .  2  .

    Without brackets, digits and operators are uniform. The length of an expression is odd, and uniform over the odd
    lengths. With brackets, an expression of n tokens is

        d,  -d,  (d)  or  (-d)    for n = 1, 2, 3 or 4, with a uniform digit d,
        (left op right)           for n >= 5: left has 1 .. n - 4 tokens and right the other ones; op is uniform.

    Source: Grazzi et al. 2024 (arXiv 2411.12537), section 5.1 and appendix E.1.2, after Deletang et al. 2023. Without
    brackets, their code is that of xLSTM (NX-AI/xlstm, experiments/data/formal_language/tasks/modular_arithmetic.py at
    18d6dedf65fdb4d9a5018bd9bfa4e59e8809cdd9); with brackets, it is adankow/unlocking_state_tracking,
    xlstm/experiments/data/formal_language/tasks/modular_arithmetic_with_brackets.py at
    ef8aaa307c5f0cdc530de9b3cb3fb9328c9da991. A length counts there, and so in the options here, the expression, `=`,
    the answer and, with brackets, one token of padding; the input ends with `=`. Table 3 multiplies in both languages,
    and the last column of Table 5 does not (`multiply: false`).

    Departures: the classes are the m values alone, there all tokens are. What stands behind `=` is padding, which does
    not matter to a causal model. The clean validation split has strings of the largest training length; there, rates
    are chosen by strings of the test lengths (`split_policy: paper` does so).
    """

    name: ClassVar[str] = "modular-arithmetic"
    version: ClassVar[int] = 1

    modulus: int = Field(default=5, ge=2, le=1000)
    brackets: bool = False
    """Whether every operation stands in brackets. Without, the language is regular."""
    multiply: bool = True
    """Whether `*` is among the operators. With `*`, zero is the most frequent answer."""
    min_length: Size = 3
    """Smallest length of a training string. With brackets, a string of a length below 5 is one of length 5."""
    length: Size = 40
    """Largest length of a training string."""
    min_test_length: Size = 40
    """Smallest length of a test string. Without brackets, whose strings have odd lengths, an even smallest length
    stands for the odd one below, and so does an even largest one."""
    test_length: Size = 256
    num_test: Size = 8192
    """Number of strings of the test split, and of a clean validation split."""

    def check_options(self) -> None:
        least = SHORTEST_IN_BRACKETS if self.brackets else 3
        for low, high in (("min_length", "length"), ("min_test_length", "test_length")):
            smallest, largest = getattr(self, low), getattr(self, high)
            if largest < least:
                raise ValueError(f"{self.name}: {high}={largest} has no room for an expression; needs >= {least}.")
            if smallest < 3:
                raise ValueError(f"{self.name}: {low}={smallest} has no room for a digit, `=` and answer; needs >= 3.")
            if smallest > largest:
                raise ValueError(f"{self.name}: {low}={smallest} is above {high}={largest}; lower it.")

    @property
    def num_tokens(self) -> int:
        return self.modulus + (len(SIGNS) if self.brackets else SIGNS.index("(")) + 1

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(
            input="tokens",
            num_classes=self.modulus,
            readout="token",
            max_length=max(self.length, self.test_length) - 1,
            vocab_size=self.num_tokens,
        )

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        low, high = (self.min_test_length, self.test_length) if split == "test" else (self.length, self.length)
        yield self._strings(numpy_generator(seed, f"{self.name}/{split}"), self.num_test, low, high)

    def chunk(self, seed: int, index: int) -> Segment:
        rng = numpy_generator(seed, f"{self.name}/train", index)
        return self._strings(rng, CHUNK_ROWS, self.min_length, self.length)

    def _strings(self, rng: np.random.Generator, num_rows: int, low: int, high: int) -> Segment:
        inputs = np.full((num_rows, high - 1), self.num_tokens - 1)
        draw = self._bracketed if self.brackets else self._flat
        sizes, values = draw(rng, inputs, low, high)
        np.put_along_axis(inputs, sizes[:, None], self.modulus + EQUALS, axis=1)
        name = f"length={low}..{high}" if low < high else f"length={high}"
        return token_segment(inputs, values[:, None], sizes[:, None], self.num_tokens, name)

    def _flat(self, rng: np.random.Generator, inputs: Array, low: int, high: int) -> tuple[Array, Array]:
        """Writes expressions without brackets; their numbers of tokens [R] and values [R]."""
        num_rows = len(inputs)
        # k digits have k - 1 operators between them, and `=` and the answer make a length of 2 k + 1
        most = (high - 1) // 2
        counts = rng.integers((low - 1) // 2, most + 1, num_rows)
        digits = rng.integers(0, self.modulus, (num_rows, most))
        signs = rng.integers(0, 2 + self.multiply, (num_rows, most))
        inside = np.arange(most) < counts[:, None]
        inputs[:, : 2 * most : 2] = np.where(inside, digits, self.num_tokens - 1)
        between = np.where(inside[:, 1:], self.modulus + signs[:, 1:], self.num_tokens - 1)
        inputs[:, 1 : 2 * most - 1 : 2] = between
        # a digit behind the end is a summand of zero
        digits, signs = np.where(inside, digits, 0), np.where(inside, signs, PLUS)
        signs[:, 0] = PLUS
        total, term = np.zeros(num_rows, dtype=int), np.zeros(num_rows, dtype=int)
        for digit, sign in zip(digits.T, signs.T, strict=True):
            times = sign == TIMES
            total += np.where(times, 0, term)
            term = np.where(times, term * digit, np.where(sign == MINUS, -digit, digit)) % self.modulus
        return 2 * counts - 1, (total + term) % self.modulus

    def _bracketed(self, rng: np.random.Generator, inputs: Array, low: int, high: int) -> tuple[Array, Array]:
        """Writes expressions in brackets; their numbers of tokens [R] and values [R].

        All expressions that are nested equally deep, of all rows, are drawn together: first of each level the operators
        and the numbers of tokens, from the outermost level inwards, and then the values back outwards.
        """
        sizes = np.maximum(rng.integers(low, high + 1, len(inputs)), SHORTEST_IN_BRACKETS) - 3
        rows, starts, counts = np.arange(len(inputs)), np.zeros(len(inputs), dtype=int), sizes
        levels: list[tuple[Array, Array, Array]] = []
        while len(rows):
            whole = counts >= WHOLE
            values = rng.integers(0, self.modulus, len(rows))
            row, start, count = rows[~whole], starts[~whole], counts[~whole]
            # (-d): a bracket stands around the longer two, and a sign before the digit of those with an even number
            wrapped, negative = count >= 3, count % 2 == 0
            inputs[row, start + wrapped + negative] = values[~whole]
            inputs[row[wrapped], start[wrapped]] = self.modulus + OPEN
            inputs[row[wrapped], (start + count - 1)[wrapped]] = self.modulus + CLOSE
            inputs[row[negative], (start + wrapped)[negative]] = self.modulus + MINUS
            values[~whole] *= np.where(negative, -1, 1)
            row, start, count = rows[whole], starts[whole], counts[whole]
            left = rng.integers(1, count - 3)
            signs = rng.integers(0, 2 + self.multiply, len(row))
            inputs[row, start] = self.modulus + OPEN
            inputs[row, start + 1 + left] = self.modulus + signs
            inputs[row, start + count - 1] = self.modulus + CLOSE
            levels.append((whole, values, signs))
            # all left sides, and then all right sides
            rows = np.concatenate([row, row])
            starts = np.concatenate([start + 1, start + 2 + left])
            counts = np.concatenate([left, count - 3 - left])
        inner: Array = np.empty(0, dtype=int)
        for whole, values, signs in reversed(levels):
            a, b = np.split(inner, 2)
            values[whole] = np.where(signs == TIMES, a * b, np.where(signs == MINUS, a - b, a + b))
            inner = values % self.modulus
        return sizes, inner

    def solve(self, segment: Segment) -> Array:
        """The oracle: a parser by recursive descent, with exact integers and the modulus at the end alone."""
        names = [*map(str, range(self.modulus)), *SIGNS]
        answers = []
        for tokens, (place,) in zip(segment.inputs.tolist(), segment.positions.tolist(), strict=True):  # type: ignore[union-attr]
            answers.append([_value([names[token] for token in tokens[:place]]) % self.modulus])
        return np.array(answers)


def _value(text: list[str]) -> int:
    """The value of an expression: products before sums, and a sign before a digit or a bracket."""
    left = text[::-1]

    def factor() -> int:
        token = left.pop()
        if token == "-":
            return -factor()
        if token != "(":
            return int(token)
        value = total()
        assert left.pop() == ")"
        return value

    def product() -> int:
        value = factor()
        while left and left[-1] == "*":
            left.pop()
            value *= factor()
        return value

    def total() -> int:
        value = product()
        while left and left[-1] in "+-":
            value += product() if left.pop() == "+" else -product()
        return value

    value = total()
    assert not left
    return value
