"""A task of one's own: flip-flop, a memory of one bit that is written, read, or left alone.

python run_suite.py check task flip-flop --plugin examples/my_task.py
python run_suite.py run examples/flip-flop --plugin examples/my_task.py
python run_suite.py report examples/flip-flop --plugin examples/my_task.py
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from subquad.suite.bounds import Size
from subquad.suite.contracts import IGNORE, Segment, TaskSpec
from subquad.suite.rng import numpy_generator
from subquad.tasks.base import Array, TaskBase, token_segment

WRITE_0, WRITE_1, READ, PASS = range(4)


class FlipFlop(TaskBase):
    """Flip-flop, from examples/my_task.py

        input   w1 .  r  .  w0 .  .  r     (write 1, pass, read, ...)
        target  .  .  1  .  .  .  .  0     (what was written last)

    Source: Liu et al. 2023 (Exposing Attention Glitches), section 3; here an instruction and its bit are one token.
    """

    name: ClassVar[str] = "flip-flop"
    version: ClassVar[int] = 1
    length: Size = 32
    num_train: Size = 10000
    num_test: Size = 500

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec(input="tokens", num_classes=2, readout="token", max_length=self.length, vocab_size=4)

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        rng = numpy_generator(seed, f"{self.name}/{self.drawn_split(split)}")
        shape = (self.num_train if split == "train" else self.num_test, self.length)
        tokens = np.where(rng.random(shape) < 0.8, PASS, rng.integers(3, size=shape))
        tokens[:, 0], tokens[:, -1] = rng.integers(2, size=shape[0]), READ
        written = np.maximum.accumulate((tokens < READ) * np.arange(self.length), axis=1)
        targets = np.where(tokens == READ, np.take_along_axis(tokens, written, axis=1), IGNORE)
        yield token_segment(tokens, targets, np.indices(shape)[1], 4, f"length={self.length}")

    def solve(self, segment: Segment) -> Array:
        """The oracle with which `check task` compares the labels: answers [R, P], read from left to right."""
        answers = np.empty(segment.targets.shape, dtype=int)
        for answer, tokens in zip(answers, segment.inputs.tolist(), strict=True):
            for t, token in enumerate(tokens):
                memory = token if token < READ else memory  # noqa: F821 - every row begins with a write
                answer[t] = memory
        return answers


TASKS = {"flip-flop": FlipFlop}
