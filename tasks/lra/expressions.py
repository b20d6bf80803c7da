"""Nested expressions over digits, the language of ListOps, which are drawn many at a time.

An expression is a tree whose nodes are digits, or operators with 2 to `max_args` arguments. The trees of a chunk are
drawn, measured, evaluated and written together, level by level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.suite.rng import numpy_generator

# not imported from tasks.base, so that a process that only generates starts without loading torch
Array = NDArray[Any]

TOKENS = ("<pad>", "<end>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
PAD, END, DIGIT, OPERATOR, CLOSE = 0, 1, 2, 12, 16
"""Tokens of padding, of the end mark, of digit 0, of the first operator and of the closing bracket."""
MIN, MAX, MED, SM = range(4)
OPERATOR_RATE = 0.25
"""Probability that a node is an operator where it may be one."""

CHUNK = 2048
"""Number of trees drawn at a time. About one in five has a length within the limits."""


@dataclass(frozen=True)
class Language:
    """The limits of expressions. Lengths, in tokens, lie strictly between min_length and max_length."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000


@dataclass
class _Level:
    """The nodes of one depth of many trees: tree after tree, and siblings next to each other."""

    tree: Array
    parent: Array
    """Index of the parent in the level above."""
    is_operator: Array
    symbol: Array
    """The number of the operator, or the digit."""
    num_args: Array
    """Number of arguments; 0 for a digit."""


def _grow(rng: np.random.Generator, language: Language, num_trees: int) -> tuple[list[_Level], Array]:
    """The levels of random trees whose root is an operator, and their lengths in tokens.

    A node is an operator with 2 to max_args arguments with probability `OPERATOR_RATE`, and a digit otherwise. At the
    greatest depth every node is a digit. A tree stops growing when it is too long, which its length shows.
    """
    levels: list[_Level] = []
    tree, parent = np.arange(num_trees), np.zeros(num_trees, dtype=np.int64)
    size = np.zeros(num_trees, dtype=np.int64)
    for depth in range(1, language.max_depth + 1):
        count = len(tree)
        is_operator = rng.random(count) <= OPERATOR_RATE
        symbol = rng.integers(0, 10, count)
        operators = rng.integers(0, 4, count)
        num_args = rng.integers(2, language.max_args + 1, count)
        if depth == 1:
            # a tree of a single digit is never long enough, so none is drawn
            is_operator[:] = True
        if depth == language.max_depth:
            is_operator[:] = False
        num_args[~is_operator] = 0
        symbol[is_operator] = operators[is_operator]
        # an operator has two tokens, itself and its closing bracket, and a digit has one
        size += np.bincount(tree, 1 + is_operator, minlength=num_trees).astype(np.int64)
        levels.append(_Level(tree, parent, is_operator, symbol, num_args))
        num_args[size[tree] >= language.max_length] = 0
        parent = np.repeat(np.arange(count), num_args)
        tree = tree[parent]
        if not len(tree):
            break
    return levels, size


def _median(values: Array, owner: Array, counts: Array) -> Array:
    """The median of the values of every owner, rounded down. Values are ordered by owner; counts: how many each has."""
    order = np.lexsort((values, owner))
    ranked = values[order]
    start = np.cumsum(counts) - counts
    return (ranked[start + (counts - 1) // 2] + ranked[start + counts // 2]) // 2


def _evaluate(levels: list[_Level]) -> tuple[list[Array], list[Array]]:
    """Value and number of tokens of every node, as one array per level."""
    values: list[Array] = [np.empty(0, dtype=np.int64)] * len(levels)
    sizes: list[Array] = [np.empty(0, dtype=np.int64)] * len(levels)
    for depth in range(len(levels) - 1, -1, -1):
        level = levels[depth]
        value, size = level.symbol.copy(), np.ones(len(level.tree), dtype=np.int64)
        parents = np.flatnonzero(level.num_args)
        if len(parents):
            below, owner = values[depth + 1], levels[depth + 1].parent
            counts = level.num_args[parents]
            starts = np.cumsum(counts) - counts
            results = np.stack(
                [
                    np.minimum.reduceat(below, starts),
                    np.maximum.reduceat(below, starts),
                    _median(below, owner, counts),
                    np.add.reduceat(below, starts) % 10,
                ]
            )
            value[parents] = results[level.symbol[parents], np.arange(len(parents))]
            size[parents] = 2 + np.add.reduceat(sizes[depth + 1], starts)
        values[depth], sizes[depth] = value, size
    return values, sizes


def draw(seed: int, index: int, language: Language) -> tuple[Array, Array, Array]:
    """The expressions of one chunk of a stream: padded tokens [R, max_length], lengths [R] and values [R]."""
    rng = numpy_generator(seed, "lra-listops/trees", index)
    levels, lengths = _grow(rng, language, CHUNK)
    values, sizes = _evaluate(levels)
    good = (lengths > language.min_length) & (lengths < language.max_length)
    row = np.cumsum(good) - 1
    tokens = np.full((int(good.sum()), language.max_length), PAD, dtype=np.uint8)
    place = np.zeros(CHUNK, dtype=np.int64)
    for depth, level in enumerate(levels):
        if depth:
            # a node stands behind the operator of its parent and behind its earlier siblings
            size = sizes[depth]
            before = np.cumsum(size) - size
            first = np.flatnonzero(np.diff(level.parent, prepend=-1))
            counts = np.diff(np.append(first, len(level.parent)))
            place = place[level.parent] + 1 + before - np.repeat(before[first], counts)
        kept = good[level.tree]
        rows, columns = row[level.tree[kept]], place[kept]
        is_operator = level.is_operator[kept]
        tokens[rows, columns] = np.where(is_operator, OPERATOR, DIGIT) + level.symbol[kept]
        closing = columns + sizes[depth][kept] - 1
        tokens[rows[is_operator], closing[is_operator]] = CLOSE
    return tokens, lengths[good], values[0][good]


def evaluate(tokens: Array) -> int:
    """The value of one expression, computed with a stack. It is the oracle that the tests use."""
    stack: list[list[int]] = []
    for token in tokens.tolist():
        if OPERATOR <= token < CLOSE:
            stack.append([token - OPERATOR])
            continue
        if token == CLOSE:
            operator, *args = stack.pop()
            ranked = sorted(args)
            middle = (ranked[(len(args) - 1) // 2] + ranked[len(args) // 2]) // 2
            value = (ranked[0], ranked[-1], middle, sum(args) % 10)[operator]
        else:
            value = token - DIGIT
        if not stack:
            return value
        stack[-1].append(value)
    raise ValueError("the expression does not end")
