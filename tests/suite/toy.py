"""A task and a model small enough to train in a blink, for tests of the harness."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.suite.contracts import IGNORE, ModelConfig, ParamGroup, Segment, Task, TaskSpec
from subquad.suite.model import Model
from subquad.suite.registry import Entry, Registry
from subquad.suite.rng import numpy_generator
from subquad.suite.settings.resolver import Resolver
from subquad.suite.training.parallel import current
from subquad.suite.training.run import TrainingRun
from tests.runs import one_run

MEASURED = {"train_throughput", "train_steps", "train_seconds", "inference_throughput", "peak_rss", "peak_memory"}
"""Metrics of a training run that two equal runs need not have in common: times and memory."""


def numbers(rows):
    """The values that two equal runs have in common."""
    keys = ("metric", "split", "slice", "step", "value")
    return [tuple(row.get(key) for key in keys) for row in rows if row["metric"] not in MEASURED]


@contextlib.contextmanager
def interrupted(after: int) -> Iterator[Callable[[], bool]]:
    """Gives the `stop` of a run that is interrupted when it has asked so many times, and demands that it is."""
    calls = itertools.count()
    try:
        yield lambda: next(calls) >= after
    except KeyboardInterrupt:
        return
    raise AssertionError("the run was not interrupted")


def hang() -> None:
    """Never returns, and lets no other thread and no handler of a signal run."""
    while True:
        ctypes.PyDLL(None).pause()


class Parity(Task):
    """inputs  1 0 1 1 .
    target            1   the parity of the bits, at the last position
    """

    version: ClassVar[int] = 1
    length: int = 6
    num_train: int = 70
    endless: bool = False
    labels: Literal["good", "none", "hang"] = "good"

    @property
    def spec(self) -> TaskSpec:
        return TaskSpec("tokens", num_classes=2, readout="token", max_length=self.length, vocab_size=2)

    @property
    def fresh(self) -> bool:
        return self.endless

    def fingerprint(self) -> str:
        return "generated"

    def _rows(self, purpose: str, count: int, seed: int, index: int = 0) -> Segment:
        if self.labels == "hang":
            hang()
        bits = numpy_generator(seed, f"parity/{purpose}", index).integers(0, 2, (count, self.length), dtype="int16")
        inputs = torch.from_numpy(bits)
        targets = inputs.sum(1, keepdim=True) % 2 if self.labels == "good" else torch.full((count, 1), IGNORE)
        positions = torch.full((count, 1), self.length - 1, dtype=torch.int16)
        return Segment(inputs, targets, positions, slice=f"length={self.length}")

    def segments(self, split: str, seed: int) -> Iterator[Segment]:
        yield self._rows(split, self.num_train if split == "train" else 40, seed)

    def block(self, seed: int, index: int, num_rows: int) -> Segment:
        return self._rows("block", num_rows, seed, index)

    def score(self, logits: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        count = (targets != IGNORE).sum()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORE)
        return {"accuracy": ((logits.argmax(-1) == targets).sum(), count), "loss": (loss, count)}


class ToyModel(Model):
    """Embedding, dropout, flatten, two linear layers."""

    def __init__(self, config: ToyConfig, spec: TaskSpec) -> None:
        super().__init__()
        self.fault, self.fault_file = config.fault, config.fault_file
        self.embed = nn.Embedding(spec.vocab_size, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.inner = nn.Linear(spec.max_length * config.d_model, 32)
        self.head = nn.Linear(32, spec.num_classes)

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.fault == "error":
            raise RuntimeError("planted fault")
        if self.fault in ("interrupt", "exit"):
            raise KeyboardInterrupt if self.fault == "interrupt" else SystemExit(0)
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "killed once" and current().rank + 1 == current().size and not Path(self.fault_file).exists():
            Path(self.fault_file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "oom of one" and current().rank > 0:
            raise torch.OutOfMemoryError("planted: out of memory")
        if self.fault == "slow":
            time.sleep(0.02)
        if self.fault == ("hang" if self.training else "hang in evaluation"):
            hang()
        if self.fault == "hang once" and not Path(self.fault_file).exists():
            Path(self.fault_file).touch()
            hang()
        if self.fault == "oom once" and not Path(self.fault_file).exists():
            Path(self.fault_file).touch()
            raise torch.OutOfMemoryError("planted: out of memory")
        if self.fault == "oom":
            raise torch.OutOfMemoryError("planted: out of memory")
        x = self.drop(self.embed(inputs.long())).flatten(1)
        logits = self.head(torch.tanh(self.inner(x)))
        if self.fault == "nan":
            logits = logits * float("nan")
        return logits[:, None]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if self.fault == "hang in saving":
            hang()
        return super().state_dict(*args, **options)

    def state_size(self, length: int) -> int:
        return length

    def param_groups(self, no_decay: tuple[str, ...] = ()) -> list[ParamGroup]:
        return [ParamGroup("all", list(self.parameters()))]


class DoubleToyModel(ToyModel):
    """The model in float64, with a loss that keeps it and a layer that can be sharded."""

    def __init__(self, config: ToyConfig, spec: TaskSpec) -> None:
        super().__init__(config, spec)
        self.layers = nn.ModuleList([self.inner])
        self.to(torch.float64)

    def hidden(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        return self(inputs, positions)

    def readout(self, hidden: Tensor) -> Tensor:
        return hidden

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(hidden.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)


class ToyConfig(ModelConfig):
    version: ClassVar[int] = 1
    d_model: int = 4
    dropout: float = 0.1
    double: bool = False
    fault: Literal[
        *("none", "error", "oom", "nan", "killed", "killed once", "slow", "oom of one", "oom once"),
        *("hang", "hang once", "hang in evaluation", "hang in saving", "interrupt", "exit"),
    ] = "none"
    fault_file: str = ""
    """A file that a fault with the word `once` makes before it occurs; once it is there, the fault is over. Of several
    processes that train together, the last one dies."""

    def check(self, spec: TaskSpec) -> None:
        if self.d_model > 64:
            raise ValueError(f"toy: d_model={self.d_model} is above 64; lower it")

    def build(self, spec: TaskSpec) -> ToyModel:
        return (DoubleToyModel if self.double else ToyModel)(self, spec)


TASKS = Registry("task", {"parity": Entry("tests.suite.toy:Parity", "parity of bits")})
MODELS = Registry("model", {"toy": Entry("tests.suite.toy:ToyConfig", "two linear layers")})
RESOLVER = Resolver(TASKS, MODELS)


def make_run(
    task: dict | None = None, model: dict | None = None, train: dict | None = None, seed: int = 0
) -> TrainingRun:
    """One resolved run on the toy task."""
    options = {"epochs": 4, "batch_size": 16, "lr": 0.01, **(train or {})}
    task, model = {"name": "parity", **(task or {})}, {"name": "toy", **(model or {})}
    return one_run(task, model, options, seed, TASKS, MODELS)
