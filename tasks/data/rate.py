"""How fast a task's rows come on the host, without a model: whether loading could ever bound training."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from suite.contracts import Batch, Segment
from suite.data import BLOCK_TOKENS, FiniteOrder, load_splits, size_of, take

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Feed:
    """A task ready to be drawn from.

    `draw(i)` gives the rows of one draw: a block of a stream, as the trainer's thread draws them one ahead, or a batch
    gathered by index from the rows in memory (on a GPU they lie on the device, so the host gathers none).
    """

    draw: Callable[[int], Batch]
    startup_s: float
    """From the configured task to the first draw: training and validation rows at hand, and their digest."""
    resident_bytes: int
    """Training rows that stay on the device; 0 for a stream."""


@dataclass(frozen=True)
class Rate:
    """What `workers` threads drew together."""

    workers: int
    rows_per_s: float
    tokens_per_s: float
    bytes_per_s: float


def feed(task: Any, batch_size: int, seed: int = 0) -> Feed:
    """Opens a task as a run does."""
    began = time.perf_counter()
    splits = load_splits(task, seed)
    draw: Callable[[int], Batch]
    if task.fresh:
        length = task.block(seed, 0, 1).inputs.shape[1]
        rows = batch_size * max(1, min(256, BLOCK_TOKENS // (batch_size * length)))

        def draw(index: int) -> Segment:
            return task.block(seed, index, rows)
    else:
        order = FiniteOrder(splits.train, batch_size, seed, True, CPU)
        # an order is arranged an epoch at a time, which threads would do for each other
        steps = [order.locate(step) for step in range(order.epoch_steps)]

        def draw(index: int) -> Batch:
            return take(*steps[index % len(steps)])

    draw(0)
    return Feed(draw, time.perf_counter() - began, sum(size_of(segment) for segment in splits.train))


def measure(source: Feed, workers: int, seconds: float = 2.0) -> Rate:
    """Draws with this many threads for about so long."""
    counter, lock = itertools.count(1), threading.Lock()
    threads = torch.get_num_threads()
    # one core a worker
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
