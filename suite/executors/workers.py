"""Worker processes for the runs of a grid, and their supervision.

Every worker carries out one run at a time on a device of its own and reports through a pipe. The parent watches pipes
and processes, so that one lost worker costs one try of one run:

- A worker that dies (killed, out of host memory) is replaced, and its run is tried once more on the new one. If that
  one dies as well, the run gets a row `failed` that names the signal.
- After an illegal memory access a process can no longer use its GPU, and under CUDA's multi-process service neither can
  those that share the GPU. Such a worker ends, and its run is tried once more on a new one.
- A worker whose parent is gone ends at once.

Workers see none of the signals that a terminal or a scheduler sends to all processes; the parent decides what they do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from suite.executors.queue import RunQueue
from suite.runner import execute, store_failure
from suite.runs import Progress, Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end: Ctrl-C, a scheduler's, and that of a closed terminal."""

TRIES = 2
"""How often a run is tried on workers that do not survive it."""

FaultOf = Callable[[torch.device], str | None]


def device_fault(device: torch.device) -> str | None:
    """Why this process can no longer use the device, in one line; None if it can."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(
    pipe: Connection, stop: Any, device_name: str, root: Path, options: dict[str, Any], fault_of: FaultOf
) -> None:
    """Body of a worker: carries out the runs that come through the pipe until None comes.

    It sends every `Progress`; after a run (Finished, fault of the device or None), or None for an interrupted run.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device = torch.device(device_name)
    while (run := pipe.recv()) is not None:
        try:
            finished = execute(run, root, device, report=pipe.send, stop=stop.is_set, **options)
        except KeyboardInterrupt:
            pipe.send(None)
            continue
        fault = fault_of(device) if finished.status == "failed" else None
        pipe.send((finished, fault))
        if fault is not None:
            # the exit handlers of CUDA libraries may hang on a broken device
            os._exit(1)


class _Worker:
    """A worker as its parent sees it: the process, the pipe, its device, and the run that it carries out."""

    def __init__(
        self,
        context: Any,
        stop: Any,
        device: str,
        root: Path,
        options: dict[str, Any],
        fault_of: FaultOf = device_fault,
    ) -> None:
        self.device = device
        self.run: Run | None = None
        self.lost = False
        """Whether the process ends, because it can no longer use its device."""
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, stop, device, root, options, fault_of), daemon=True)
        # a process inherits the mask, so a signal cannot reach the worker even while it imports its modules
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def give(self, run: Run) -> None:
        self.run = run
        # a worker that died at once is noticed by its sentinel
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(run)

    def messages(self) -> Iterator[Any]:
        """What the worker has sent and nobody has read."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                yield self.pipe.recv()

    def death(self) -> str:
        """How the process ended."""
        self.process.join()
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed, signal {-code}"
        return f"the worker ended with exit code {code}"


def run_in_workers(
    queue: RunQueue,
    root: Path,
    devices: Sequence[str],
    stop: Any,
    options: dict[str, Any],
    *,
    fault_of: FaultOf = device_fault,
) -> None:
    """Carries out the runs of a queue in one worker for each of `devices`, until all have ended.

    stop: an event of the context `spawn`; once it is set, the current runs save a checkpoint and no other starts.
    options: keyword arguments of `execute`.
    fault_of: tells, after a failed run, why its worker can no longer use the device, or None.
    """
    context = multiprocessing.get_context("spawn")
    free = list(devices)
    tries: Counter[str] = Counter()
    workers: list[_Worker] = []

    def hand_out() -> None:
        """Gives runs to the idle workers, and then to new ones on the free devices."""
        for worker in workers:
            if worker.run is None and not worker.lost and (run := queue.next(worker.device)):
                tries[run.run_id] += 1
                worker.give(run)
        while free and (run := queue.next(free[0])):
            tries[run.run_id] += 1
            workers.append(_Worker(context, stop, free.pop(0), root, options, fault_of))
            workers[-1].give(run)

    def repeat(run: Run, reason: str) -> bool:
        """Puts the run back into the queue unless it was tried often enough."""
        if tries[run.run_id] >= TRIES:
            return False
        queue.repeat(run, reason)
        return True

    def read(worker: _Worker) -> None:
        for message in worker.messages():
            assert worker.run is not None
            if isinstance(message, Progress):
                queue.display.progressed(worker.run, message)
                continue
            run, worker.run = worker.run, None
            if message is None:
                queue.leave(run)
                continue
            finished, fault = message
            worker.lost = fault is not None
            if fault is None or not repeat(run, fault):
                queue.end(finished)

    def bury(worker: _Worker) -> None:
        """Makes room for another worker in place of a dead one, whose last messages have been read."""
        workers.remove(worker)
        free.append(worker.device)
        reason = worker.death()
        if worker.run is not None and not repeat(worker.run, reason):
            queue.end(store_failure(worker.run, root, torch.device(worker.device), reason))

    try:
        while True:
            if not stop.is_set():
                hand_out()
            if not any(worker.run is not None for worker in workers) and (stop.is_set() or not queue.left):
                break
            ready = wait([part for worker in workers for part in (worker.pipe, worker.process.sentinel)], timeout=0.2)
            for worker in list(workers):
                if worker.pipe in ready or worker.process.sentinel in ready:
                    read(worker)
                if worker.process.sentinel in ready:
                    bury(worker)
        for worker in workers:
            with contextlib.suppress(BrokenPipeError):
                worker.pipe.send(None)
        for worker in workers:
            worker.process.join(timeout=5)
    finally:
        for worker in workers:
            worker.process.kill()
