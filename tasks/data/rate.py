"""Measures the rows per second that the host draws from a task without a model, to tell if loading limits training."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from subquad.suite.contracts import Batch, Segment, Task
from subquad.suite.training.data import FiniteOrder, load_splits, size_of, steps_of_block, take

CPU = torch.device("cpu")
SEED = 0


@dataclass(frozen=True)
class Feed:
    """An opened task.

    `draw(i)` gives the rows of draw i. For an endless stream this is a block, as a thread of the trainer draws it. For
    a finite split it is a batch that is selected by index from the rows in memory; in training on a GPU the rows lie on
    the device, so the host does not select any.
    """

    draw: Callable[[int], Batch]
    startup_s: float
    """Seconds from the configured task to the first draw: loading training and validation rows and their digest."""
    resident_bytes: int
    """Bytes of the training rows that stay on the device; 0 for a stream."""


@dataclass(frozen=True)
class Rate:
    """The rates at which `workers` threads together drew rows."""

    workers: int
    rows_per_s: float
    tokens_per_s: float
    bytes_per_s: float


def feed(task: Task, batch_size: int) -> Feed:
    """Opens a task in the way a run does."""
    began = time.perf_counter()
    splits = load_splits(task, SEED)
    draw: Callable[[int], Batch]
    if task.fresh:
        length = task.block(SEED, 0, 1).inputs.shape[1]
        rows = batch_size * steps_of_block(batch_size, length)

        def draw(index: int) -> Segment:
            return task.block(SEED, index, rows)
    else:
        order = FiniteOrder(splits.train, batch_size, SEED, True, CPU)
        # the order of an epoch is computed ahead, since threads would otherwise compute it for each other
        steps = [order.locate(step) for step in range(order.epoch_steps)]

        def draw(index: int) -> Batch:
            return take(*steps[index % len(steps)])

    draw(0)
    return Feed(draw, time.perf_counter() - began, sum(size_of(segment) for segment in splits.train))


def measure(source: Feed, workers: int, seconds: float = 2.0) -> Rate:
    """Draws with `workers` threads for about `seconds`."""
    counter, lock = itertools.count(1), threading.Lock()
    threads = torch.get_num_threads()
    # every worker has one core
    torch.set_num_threads(1)

    def work(until: float) -> tuple[int, int, int]:
        rows = tokens = num_bytes = 0
        while time.perf_counter() < until:
            with lock:
                index = next(counter)
            batch = source.draw(index)
            rows += len(batch.inputs)
            tokens += batch.inputs.shape[0] * batch.inputs.shape[1]
            num_bytes += size_of(batch)
        return rows, tokens, num_bytes

    try:
        with ThreadPoolExecutor(workers) as pool:
            began = time.perf_counter()
            parts = list(pool.map(work, [began + seconds] * workers))
            took = time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    rows, tokens, num_bytes = (sum(column) / took for column in zip(*parts, strict=True))
    return Rate(workers, rows, tokens, num_bytes)
