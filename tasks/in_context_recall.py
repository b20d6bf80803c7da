"""In-context recall of MAD: values of keys that the context has shown before, among noise or of several tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np

from subquad.suite.bounds import Count, Fraction, Size
from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, ScoredByClass, token_segment, token_spec


class Recall(ScoredByClass):
    """Shared code of the two tasks: finite splits of rows [R, T + 1], of which all but the last token are the input."""

    vocab_size: Size = 16
    """Number of tokens: keys, then as many values or one more, then noise or padding."""
    length: Size = 128
    num_train: Size = 12_800
    num_test: Size = 1280
    """Number of rows of the test split, and of a clean validation split."""
    train_loss: Literal["all-tokens", "answer-only"] = "all-tokens"
    """Labels of the training split: every next token, as in the source, or those of the evaluation alone."""

    @property
    def input_length(self) -> int:
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, num_rows: int, *, train: bool) -> tuple[Array, Array]:
        """Rows [R, T + 1], and which tokens are answers [R, T + 1]."""
        raise NotImplementedError

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size, self.input_length)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        train = split == "train"
        rng = numpy_generator(seed, f"{self.name}/{split}")
        rows, answers = self.draw(rng, self.num_train if train else self.num_test, train=train)
        if not train or self.train_loss == "answer-only":
            targets = np.where(answers, rows, IGNORE)[:, 1:]
        else:
            targets = rows[:, 1:]
        positions = np.tile(np.arange(targets.shape[1]), (len(rows), 1))
        yield token_segment(rows[:, :-1], targets, positions, self.vocab_size, f"length={self.length}")


class InContextRecall(Recall):
    """In-context recall and noisy in-context recall, two of the six tasks of MAD.

        input   a  1  ~  ~  b  2  a  1  b
        target  .  .  .  .  .  .  1  .  2      (evaluation; training labels every next token)

    Pairs of a key and a value, drawn with repetition. A key has one value within a row, and wherever it occurs again
    its value is an answer. With probability `frac_noise` a pair of noise tokens `~` stands in place of a pair. The last
    pair repeats a key of the row. `length` counts the tokens of all pairs, the last value included, so T = length - 1.

    Source: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures), section 3.1, and its code,
    athms/mad-lab, mad/data/instances.py at 6e7e4c903b7d4d1a31d12186b709f36fa3184041, with multi_query. The defaults are
    the baseline of configs/tasks/in-context-recall.yml at d27bf5c6bb48b7b0d3879f40db869aa7fe84a3b3; that of the noisy
    task (noisy-in-context-recall.yml) has `vocab_size` 32, `num_noise` 16 and `frac_noise` 0.2.

    Departure: at least one pair before the last is no noise; in the source, one row of `length` / 2 has no such
    guarantee.
    """

    name: ClassVar[str] = "in-context-recall"
    version: ClassVar[int] = 1

    num_noise: Count = 0
    frac_noise: Fraction = 0.0

    def check_options(self) -> None:
        if self.length < 4 or self.length % 2:
            raise ValueError(f"{self.name}: length={self.length} does not hold whole pairs; needs an even number >= 4.")
        if self.vocab_size - self.num_noise < 4:
            raise ValueError(
                f"{self.name}: vocab_size={self.vocab_size} with num_noise={self.num_noise} leaves fewer than 4 keys "
                f"and values; raise vocab_size to {self.num_noise + 4} or more."
            )
        if (self.frac_noise > 0) != (self.num_noise > 0):
            raise ValueError(
                f"{self.name}: num_noise={self.num_noise} and frac_noise={self.frac_noise}; give both, or neither."
            )

    @property
    def input_length(self) -> int:
        return self.length - 1

    def draw(self, rng: np.random.Generator, num_rows: int, *, train: bool) -> tuple[Array, Array]:
        first_noise, pairs = self.vocab_size - self.num_noise, self.length // 2
        num_keys = first_noise // 2
        values = rng.integers(num_keys, first_noise, (num_rows, num_keys))
        keys = rng.integers(0, num_keys, (num_rows, pairs))
        noise = rng.random((num_rows, pairs)) < self.frac_noise
        noise[np.arange(num_rows), rng.integers(0, pairs - 1, num_rows)] = False
        noise[:, -1] = False
        shown, real = np.zeros((num_rows, num_keys), dtype=bool), ~noise
        repeated = np.zeros((num_rows, pairs), dtype=bool)
        # flat places of the keys, which numpy finds in half the time of pairs of indices
        flat, first = shown.reshape(-1), np.arange(num_rows) * num_keys
        for i in range(pairs):
            if i == pairs - 1:
                # the largest of independent uniform numbers falls on every key that was shown with equal probability
                keys[:, i] = np.where(shown, rng.random(shown.shape), -1.0).argmax(axis=1)
            places = first + keys[:, i]
            before = flat[places]
            repeated[:, i] = before & real[:, i]
            flat[places] = before | real[:, i]
        rows = np.stack([keys, np.take_along_axis(values, keys, axis=1)], axis=2)
        if self.num_noise:
            rows = np.where(noise[:, :, None], rng.integers(first_noise, self.vocab_size, rows.shape), rows)
        answers = np.stack([np.zeros_like(repeated), repeated], axis=2)
        return rows.reshape(num_rows, -1), answers.reshape(num_rows, -1)


class FuzzyInContextRecall(Recall):
    """Fuzzy in-context recall, one of the six tasks of MAD: keys and values of one to three tokens.

        input   _  a  b  1  c  2  3  a  b  1  c  2      (evaluation; in training every next token has a label)
        target  .  .  .  .  .  .  .  .  1  .  2  3

    A key is a selection of 1 to `max_key` key tokens without repetition, a value one of 1 to `max_value` value tokens;
    their sizes are uniform. In evaluation every key has `max_key` tokens. A key has one value within a row, and
    wherever it occurs again the tokens of its value are answers. One pair of the row is drawn first, put at a random
    place, and repeated at the end. Padding `_` in front makes up `length` input tokens.

    Source: Poli et al. 2024, section 3.1; code and defaults as for `in-context-recall`
    (configs/tasks/fuzzy-in-context-recall.yml).

    Departure: the pair of the end is always shown before it. In the source, its drawn place may lie so late that the
    row ends first.
    """

    name: ClassVar[str] = "fuzzy-in-context-recall"
    version: ClassVar[int] = 1

    max_key: Size = 3
    max_value: Size = 3

    def check_options(self) -> None:
        keys, values = (self.vocab_size - 1) // 2, self.vocab_size // 2
        if keys < self.max_key or values < self.max_value or keys < 2:
            raise ValueError(
                f"{self.name}: vocab_size={self.vocab_size} has {keys} key tokens and {values} value tokens, too few "
                f"for max_key={self.max_key} and max_value={self.max_value}; raise vocab_size."
            )
        needed = 3 * (self.max_key + self.max_value) + 1
        if self.length < needed:
            raise ValueError(
                f"{self.name}: length={self.length} has no room for three pairs of {self.max_key + self.max_value} "
                f"tokens; needs >= {needed}."
            )

    @property
    def input_length(self) -> int:
        return self.length

    def draw(self, rng: np.random.Generator, num_rows: int, *, train: bool) -> tuple[Array, Array]:
        rows = np.full((num_rows, self.length + 1), self.vocab_size - 1)
        answers = np.zeros(rows.shape, dtype=bool)
        for row, answer in zip(rows, answers, strict=True):
            tokens, asked = self._row(rng, train)
            row[-len(tokens) :] = tokens
            answer[-len(tokens) :] = asked
        return rows, answers

    def _row(self, rng: np.random.Generator, train: bool) -> tuple[list[int], list[bool]]:
        num_keys = (self.vocab_size - 1) // 2

        def pair() -> tuple[tuple[int, ...], tuple[int, ...]]:
            key_size = rng.integers(1, self.max_key + 1) if train else self.max_key
            key = rng.permutation(num_keys)[:key_size]
            value = num_keys + rng.permutation(self.vocab_size - 1 - num_keys)[: rng.integers(1, self.max_value + 1)]
            return tuple(key.tolist()), tuple(value.tolist())

        probe, probe_value = pair()
        size, largest = len(probe) + len(probe_value), self.max_key + self.max_value
        place = rng.integers(0, self.length - size - 2 * largest + 1)
        facts = {probe: probe_value}
        shown: set[tuple[int, ...]] = set()
        tokens: list[int] = []
        asked: list[bool] = []

        def add(key: tuple[int, ...]) -> None:
            tokens.extend(key + facts[key])
            asked.extend([False] * len(key) + [key in shown] * len(facts[key]))
            shown.add(key)

        # stops where another pair of full size and the last one might overrun the length
        while len(tokens) < self.length - size - largest:
            key, value = (probe, probe_value) if len(tokens) >= place and probe not in shown else pair()
            facts.setdefault(key, value)
            add(key)
        add(probe)
        return tokens, asked
