"""Rows of a task on their way to the device: digests, order in an epoch, batches, blocks of an endless stream."""

from __future__ import annotations

import bisect
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from subquad.suite.contracts import IGNORE, Batch, Segment, Task
from subquad.suite.rng import numpy_generator
from subquad.suite.runs import RunEnded

BLOCK_TOKENS = 1 << 21
"""Tokens of a block drawn from an endless stream: many enough to amortise a draw, few enough to wait for."""


def digest(segments: Iterable[Segment]) -> str:
    """SHA-256 over slice names, dtypes, shapes and bytes of all segments."""
    sha = hashlib.sha256()
    for segment in segments:
        sha.update(segment.slice.encode())
        for tensor in (segment.inputs, segment.targets, segment.positions):
            if tensor is not None:
                sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                sha.update(np.ascontiguousarray(tensor.numpy()).data)
    return sha.hexdigest()


@dataclass(frozen=True)
class Splits:
    """The training rows (none for fresh data), the validation rows and their common digest."""

    train: tuple[Segment, ...]
    valid: tuple[Segment, ...]
    digest: str


def rows_of(task: Task, split: str, seed: int) -> Iterator[Segment]:
    """The segments of a split. RunEnded for rows that a model cannot read (`TaskSpec.misfit`)."""
    for segment in task.segments(split, seed):
        yield _fitting(task, split, segment)


def block_of(task: Task, seed: int, index: int, rows: int) -> Segment:
    """A block of an endless stream of training rows, under the same condition."""
    return _fitting(task, "train", task.block(seed, index, rows))


def _fitting(task: Task, split: str, segment: Segment) -> Segment:
    if reason := task.spec.misfit(segment):
        raise RunEnded("failed", f"split {split!r}: {reason}; correct the task (`check task` tells more)")
    return segment


_latest: dict[tuple[type[Task], str, str, int], Splits] = {}


def load_splits(task: Task, seed: int) -> Splits:
    """Training and validation rows. The latest stay in memory: most neighbours in a grid share task and seed."""
    # the fingerprint tells a file that has changed since the latest call
    key = (type(task), task.model_dump_json(), task.fingerprint(), seed)
    if key not in _latest:
        _latest.clear()
        train = () if task.fresh else tuple(rows_of(task, "train", seed))
        valid = tuple(rows_of(task, "valid", seed))
        first = (block_of(task, seed, 0, 1),) if task.fresh else ()
        _latest[key] = Splits(train, valid, digest((*first, *train, *valid)))
    return _latest[key]


def require_rows(task: Task, splits: Splits, seed: int, name: str) -> None:
    """Raises RunEnded for a task without training or test rows or training labels, whose run would measure nothing."""
    # the search ends at the first segment with rows, so that the longer ones of a test are not made twice
    for split, segments in (("test", rows_of(task, "test", seed)), ("train", splits.train)):
        if not (task.fresh and split == "train") and not any(len(segment) for segment in segments):
            raise RunEnded("failed", f"task {name} has no rows in its split {split!r}")
    if not task.fresh and all(int(segment.targets.numpy().max()) == IGNORE for segment in splits.train if len(segment)):
        raise RunEnded("failed", f"task {name} has no labels in its split 'train'")


def staged_digest(splits: Splits, stages: Sequence[Task], seed: int) -> str:
    """The digest of a run's rows together with those of its stages, which are tasks of other lengths."""
    if not stages:
        return splits.digest
    sha = hashlib.sha256(splits.digest.encode())
    for task in stages:
        sha.update(digest((block_of(task, seed, 0, 1),) if task.fresh else rows_of(task, "train", seed)).encode())
    return sha.hexdigest()


def to_device(segment: Segment, device: torch.device, *, staged: bool = False) -> Segment:
    """The same rows on the device.

    staged: by way of memory that a GPU reads itself, so that the copy does not wait for the steps before it.
    """

    def move(rows: Tensor) -> Tensor:
        rows = rows.pin_memory() if staged and device.type == "cuda" else rows
        return rows.to(device, non_blocking=True)

    positions = None if segment.positions is None else move(segment.positions)
    return replace(segment, inputs=move(segment.inputs), targets=move(segment.targets), positions=positions)


def take(segment: Segment, rows: Tensor) -> Batch:
    """The named rows as a batch."""
    positions = None if segment.positions is None else segment.positions.index_select(0, rows)
    return Batch(segment.inputs.index_select(0, rows), segment.targets.index_select(0, rows), positions)


def size_of(batch: Batch) -> int:
    """Bytes of the tensors of a batch."""
    parts = (batch.inputs, batch.targets, batch.positions)
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def chunks(num_rows: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive batches; the last may be short."""
    for start in range(0, num_rows, size):
        yield start, min(start + size, num_rows)


def epoch_length(segments: tuple[Segment, ...], batch_size: int) -> int:
    """Batches of an epoch, the short last batch of each segment included."""
    return sum(-(-len(segment) // batch_size) for segment in segments)


def steps_of_block(batch_size: int, length: int) -> int:
    """Steps whose rows are drawn together from an endless stream of sequences of some length.

    It is a power of two: tasks draw whole chunks of rows, and blocks that begin inside of a chunk would draw it twice.
    """
    return 1 << min(256, max(1, BLOCK_TOKENS // (batch_size * length))).bit_length() - 1


class Order(Protocol):
    """Tells which rows a step trains on. `epoch_steps` is the length of an epoch in steps."""

    epoch_steps: int

    def locate(self, step: int) -> tuple[Segment, Tensor]:
        """The segment of a step, on the device, and the rows of it. Steps count from 0 over the whole run."""
        ...

    def close(self) -> None:
        """Stops background threads."""
        ...


class FiniteOrder:
    """The batches of every epoch of a finite split. A batch never mixes segments, so its rows have one length.

    With shuffling, rows are permuted within each segment and then the batches are permuted, by a random stream that
    depends only on (seed, epoch). Without, every epoch has the stored order.
    """

    def __init__(
        self, segments: tuple[Segment, ...], batch_size: int, seed: int, shuffle: bool, device: torch.device
    ) -> None:
        self.sources = [to_device(segment, device) for segment in segments]
        self.batch_size, self.seed, self.shuffle, self.device = batch_size, seed, shuffle, device
        self.epoch_steps = epoch_length(segments, batch_size)
        self._epoch = -1
        self._plan: list[tuple[int, int, int]] = []
        self._rows: list[Tensor] = []

    def _arrange(self, epoch: int) -> None:
        rng = numpy_generator(self.seed, "order", epoch)
        self._rows, plan = [], []
        for number, source in enumerate(self.sources):
            rows = rng.permutation(len(source)) if self.shuffle else np.arange(len(source))
            self._rows.append(torch.from_numpy(rows).to(self.device))
            plan += [(number, start, stop) for start, stop in chunks(len(source), self.batch_size)]
        self._plan = [plan[i] for i in rng.permutation(len(plan))] if self.shuffle and len(self.sources) > 1 else plan
        self._epoch = epoch

    def locate(self, step: int) -> tuple[Segment, Tensor]:
        epoch, position = divmod(step, self.epoch_steps)
        if epoch != self._epoch:
            self._arrange(epoch)
        number, start, stop = self._plan[position]
        return self.sources[number], self._rows[number][start:stop]

    def close(self) -> None:
        pass


class HostOrder(FiniteOrder):
    """The same batches of rows that stay in host memory; a thread gathers them a few steps ahead."""

    AHEAD = 4

    def __init__(
        self, segments: tuple[Segment, ...], batch_size: int, seed: int, shuffle: bool, device: torch.device
    ) -> None:
        super().__init__(segments, batch_size, seed, shuffle, torch.device("cpu"))
        self.target = torch.device(device)
        # a single thread, because arranging the order of an epoch is not thread-safe
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-data")
        self._coming: dict[int, Future[Segment]] = {}

    def _gather(self, step: int) -> Segment:
        segment, rows = super().locate(step)
        batch = take(segment, rows)
        return Segment(batch.inputs, batch.targets, batch.positions, segment.slice, segment.rate)

    def locate(self, step: int) -> tuple[Segment, Tensor]:
        wanted = range(step, step + self.AHEAD)
        for ahead in wanted:
            if ahead not in self._coming:
                self._coming[ahead] = self._thread.submit(self._gather, ahead)
        for gone in [other for other in self._coming if other not in wanted]:
            del self._coming[gone]
        # copied by this thread, because no other may use the device while a CUDA graph is recorded
        segment = to_device(self._coming[step].result(), self.target, staged=True)
        return segment, torch.arange(len(segment), device=self.target)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def finite_order(
    segments: tuple[Segment, ...],
    batch_size: int,
    seed: int,
    shuffle: bool,
    device: torch.device,
    *,
    free_bytes: int | None = None,
) -> FiniteOrder:
    """The order that keeps the rows on the device where they take at most half of its free memory, else on the host.

    free_bytes: free memory of the device; None asks the device, and a CPU always has enough. The batches are the same.
    """
    if free_bytes is None:
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize
    kind = FiniteOrder if sum(map(size_of, segments)) <= free_bytes // 2 else HostOrder
    return kind(segments, batch_size, seed, shuffle, device)


class StagedOrder:
    """The orders of several stages one after the other, and then that of the full length.

    stages: for each, a function that opens its order, and one from that order to its number of steps. Only the order of
    the current stage is open.
    """

    def __init__(self, stages: Sequence[tuple[Callable[[], Order], Callable[[Order], int]]], last: Order) -> None:
        self._openers, self.last = [opener for opener, _ in stages], last
        self.epoch_steps = last.epoch_steps
        self._open: tuple[int, Order] | None = None
        self._ends: list[int] = []
        for number, (_, steps) in enumerate(stages):
            self._ends.append(self.stage_steps + steps(self._stage(number)))

    @property
    def stage_steps(self) -> int:
        """Steps of all stages together."""
        return self._ends[-1] if self._ends else 0

    def _stage(self, number: int) -> Order:
        if self._open is None or self._open[0] != number:
            self._close_stage()
            self._open = number, self._openers[number]()
        return self._open[1]

    def _close_stage(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def locate(self, step: int) -> tuple[Segment, Tensor]:
        number = bisect.bisect_right(self._ends, step)
        start = self._ends[number - 1] if number else 0
        if number < len(self._ends):
            return self._stage(number).locate(step - start)
        self._close_stage()
        return self.last.locate(step - start)

    def close(self) -> None:
        self._close_stage()
        self.last.close()


class FreshOrder:
    """Batches of an endless stream, drawn in blocks by a thread one block ahead of the training.

    The thread draws into host memory and the caller of `locate` copies to the device, because no other thread may use
    the device while a CUDA graph is recorded.
    """

    def __init__(self, task: Task, batch_size: int, seed: int, epoch_steps: int, device: torch.device) -> None:
        self.task, self.batch_size, self.seed, self.device = task, batch_size, seed, device
        self.epoch_steps = epoch_steps
        length = task.block(seed, 0, 1).inputs.shape[1]
        self.block_steps = steps_of_block(batch_size, length)
        self._rows = torch.arange(self.block_steps * batch_size, device=device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fresh-data")
        self._index = -1
        self._block: Segment | None = None
        self._next: Future[Segment] | None = None

    def _draw(self, index: int) -> Segment:
        return block_of(self.task, self.seed, index, self.block_steps * self.batch_size)

    def locate(self, step: int) -> tuple[Segment, Tensor]:
        index, position = divmod(step, self.block_steps)
        if index != self._index:
            ready = self._next if self._next is not None and index == self._index + 1 else None
            drawn = ready.result() if ready is not None else self._draw(index)
            self._block = to_device(drawn, self.device, staged=True)
            self._index = index
            self._next = self._thread.submit(self._draw, index + 1)
        assert self._block is not None
        start = position * self.batch_size
        return self._block, self._rows[start : start + self.batch_size]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
