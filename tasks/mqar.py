"""Multi-query associative recall (MQAR) in its two published protocols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from subquad.suite.bounds import Size
from subquad.suite.contracts import Segment, TaskSpec
from subquad.suite.options import Config
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, TaskBase, distinct, token_dtype, token_segment, token_spec, weighted_distinct


class Shape(Config):
    """Rows that share a length and a number of pairs."""

    length: Size
    num_kv_pairs: Size
    num_examples: Size


def _shapes(*shapes: tuple[int, int, int]) -> list[dict[str, int]]:
    return [dict(zip(("length", "num_kv_pairs", "num_examples"), shape, strict=True)) for shape in shapes]


PROTOCOLS: dict[str, dict[str, Any]] = {
    "zoology-fig2": {
        "length": 512,
        "num_kv_pairs": 64,
        "num_train": 100_000,
        "num_test": 3_000,
        "non_queries": "zeros",
    },
    "based-fig2": {
        "train": _shapes((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        "test": _shapes(
            (64, 4, 1_000),
            (64, 8, 1_000),
            (64, 16, 1_000),
            (128, 32, 1_000),
            (256, 64, 1_000),
            (512, 128, 1_000),
            (1024, 256, 1_000),
        ),
        "non_queries": "random",
    },
}
"""Options that each published protocol sets. An option that the user gives takes precedence."""

BLOCK_ROWS = 2048
"""Number of rows drawn at a time, which bounds the memory of intermediate arrays."""


class MQAR(TaskBase):
    """Multi-query associative recall.

        input   k1 v1 k2 v2 0  0  k2 0  k1 0
        target  .  .  .  .  .  .  v2 .  v1 .

    With V the size of the vocabulary, the first 2 `num_kv_pairs` tokens are pairs: keys are drawn without repetition
    from [1, V/2), and values from [V/2, V). Each key is queried once, at an even distance 2 g behind the pairs. Key by
    key, g is drawn without replacement from 0 .. (length - 2 num_kv_pairs) / 2 - 1, with probability proportional to (g
    + 1)^(power_a - 1). The label at a query is the value of its key. Nothing else has a label, in training as in
    evaluation.

    Two published protocols share this language and nothing more, so always name the one you mean:

    - `zoology-fig2`: Arora et al. 2023 (Zoology), Figure 2. There is one shape, the same in train and test, with zeros
      between queries. Sweep `length` and `num_kv_pairs` together over (64, 4), (128, 8), (256, 16), (512, 64).
    - `based-fig2`: Arora et al. 2024 (Based), Figure 2. Training mixes shapes, tests include longer ones, and
      every other place holds a random token. The options `train` and `test` hold the shapes and may be set.

    Both validate on their test rows (`split_policy: paper`); `clean` draws other rows of the same shapes. Their data
    loader keeps shapes apart and never shuffles, so a model sees the training shapes in order, which is an implicit
    curriculum. Here the option `train.shuffle` of the run decides.

    Departure: random non-queries come from the task's own random stream. In the released code they come from the global
    generator after the model is built, so that the data depend on the model.
    """

    name: ClassVar[str] = "mqar"
    version: ClassVar[int] = 1

    protocol: Literal["zoology-fig2", "based-fig2"] = "zoology-fig2"
    vocab_size: Size = 8192
    length: Size | None = None
    """Length of the shape of zoology-fig2, with num_kv_pairs, num_train, num_test (default 512, 64, 100000, 3000)."""
    num_kv_pairs: Size | None = None
    num_train: Size | None = None
    num_test: Size | None = None
    """Number of rows of the test split, and of a clean validation split."""
    train: tuple[Shape, ...] = ()
    """The training shapes of based-fig2."""
    test: tuple[Shape, ...] = ()
    power_a: float = Field(default=0.01, gt=0, le=16)
    """Exponent of the power law of gaps: 1 is uniform, and with smaller values queries come sooner."""
    non_queries: Literal["zeros", "random", "random-no-keys"]
    """Tokens at positions that hold neither a pair nor a query; the protocol sets the default. `zeros`: token 0.
    `random`: any token, as in based-fig2; by chance it may be a key of the row, which then looks like a query.
    `random-no-keys`: any token that is no key of the row."""

    @model_validator(mode="before")
    @classmethod
    def _of_protocol(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {**PROTOCOLS.get(values.get("protocol", "zoology-fig2"), {}), **values}

    def check_options(self) -> None:
        single = {key: getattr(self, key) for key in ("length", "num_kv_pairs", "num_train", "num_test")}
        if self.protocol == "zoology-fig2":
            for key in ("train", "test"):
                if getattr(self, key):
                    raise ValueError(
                        f"{self.name}: {key} is a list of shapes, and protocol=zoology-fig2 has one shape; "
                        f"give length and num_kv_pairs, or protocol: based-fig2."
                    )
            for key, value in single.items():
                if value is None:
                    raise ValueError(f"{self.name}: protocol=zoology-fig2 needs {key}; give a number.")
        else:
            for key, value in single.items():
                if value is not None:
                    raise ValueError(
                        f"{self.name}: {key}={value} has no meaning with protocol=based-fig2, whose shapes stand in "
                        f"train and test; set those, or protocol: zoology-fig2."
                    )
            if not self.train or not self.test:
                raise ValueError(f"{self.name}: protocol=based-fig2 needs at least one shape in train and in test.")
        for shape in (*self.shapes("train"), *self.shapes("test")):
            self._check(shape)

    def _check(self, shape: Shape) -> None:
        if shape.length % 2:
            raise ValueError(f"{self.name}: length={shape.length} is odd; pairs and gaps need an even length.")
        if 4 * shape.num_kv_pairs > shape.length:
            raise ValueError(
                f"{self.name}: num_kv_pairs={shape.num_kv_pairs} needs length >= {4 * shape.num_kv_pairs} "
                f"(4 tokens a pair), got {shape.length}; raise length or lower num_kv_pairs."
            )
        if self.vocab_size // 2 - 1 < shape.num_kv_pairs:
            raise ValueError(
                f"{self.name}: num_kv_pairs={shape.num_kv_pairs} needs vocab_size >= {2 * shape.num_kv_pairs + 2} "
                f"(half the tokens are keys, token 0 is none), got {self.vocab_size}; raise vocab_size."
            )

    def shapes(self, split: str) -> tuple[Shape, ...]:
        """The shapes of a drawn split, one per segment."""
        if self.protocol == "based-fig2":
            return self.train if split == "train" else self.test
        num_examples = self.num_train if split == "train" else self.num_test
        assert self.length is not None
        assert self.num_kv_pairs is not None
        assert num_examples is not None
        return (Shape(length=self.length, num_kv_pairs=self.num_kv_pairs, num_examples=num_examples),)

    @property
    def spec(self) -> TaskSpec:
        return token_spec(self.vocab_size, max(shape.length for shape in (*self.shapes("train"), *self.shapes("test"))))

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        split = self.drawn_split(split)
        for index, shape in enumerate(self.shapes(split)):
            rng = numpy_generator(seed, f"{self.name}/{split}", index)
            num_pairs = shape.num_kv_pairs
            inputs = np.empty((shape.num_examples, shape.length), dtype=token_dtype(self.vocab_size))
            targets = np.empty((shape.num_examples, num_pairs), dtype=inputs.dtype)
            positions = np.empty((shape.num_examples, num_pairs), dtype=token_dtype(shape.length))
            for start in range(0, shape.num_examples, BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                targets[rows], positions[rows] = self._fill(rng, inputs[rows], num_pairs)
            name = f"length={shape.length},num_kv_pairs={num_pairs}"
            yield token_segment(inputs, targets, positions, self.vocab_size, name)

    def _fill(self, rng: np.random.Generator, inputs: Array, num_pairs: int) -> tuple[Array, Array]:
        """Fills rows of inputs [R, T] and returns their targets and ascending positions [R, P]."""
        num_rows, length = inputs.shape
        context = 2 * num_pairs
        half = self.vocab_size // 2
        keys = 1 + distinct(rng, num_rows, num_pairs, half - 1)
        values = half + distinct(rng, num_rows, num_pairs, self.vocab_size - half)
        weights = np.arange(1, (length - context) // 2 + 1, dtype=np.float64) ** (self.power_a - 1)
        positions = context + 2 * weighted_distinct(rng, num_rows, num_pairs, weights)
        inputs[:, 0:context:2] = keys
        inputs[:, 1:context:2] = values
        inputs[:, context:] = 0 if self.non_queries == "zeros" else self._noise(rng, keys, length - context)
        np.put_along_axis(inputs, positions, keys.astype(inputs.dtype), axis=1)
        order = positions.argsort(axis=1)
        return np.take_along_axis(values, order, axis=1), np.take_along_axis(positions, order, axis=1)

    def _noise(self, rng: np.random.Generator, keys: Array, length: int) -> Array:
        noise = rng.integers(0, self.vocab_size, (len(keys), length), dtype=np.int32)
        if self.non_queries == "random-no-keys":
            own = np.zeros((len(keys), self.vocab_size), dtype=bool)
            np.put_along_axis(own, keys, True, axis=1)
            while (clash := np.take_along_axis(own, noise, axis=1)).any():
                noise[clash] = rng.integers(0, self.vocab_size, np.count_nonzero(clash), dtype=np.int32)
        return noise
