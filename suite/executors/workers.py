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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from suite.runner import Finished, execute, store_failure
from suite.runs import Progress, Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end: Ctrl-C, a scheduler's, and that of a closed terminal."""

TRIES = 2
"""How often a run is tried on workers that do not survive it."""

FaultOf = Callable[[torch.device], str | None]


class Display(Protocol):
    """Interface through which an executor reports the progress of its runs."""

    def started(self, run: Run) -> None: ...

    def progressed(self, run: Run, progress: Progress) -> None: ...

    def finished(self, finished: Finished) -> None: ...

    def stopping(self) -> None: ...

    def repeated(self, run: Run, reason: str) -> None: ...


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
    runs: Sequence[Run],
    root: Path,
    devices: Sequence[str],
    display: Display,
    stop: Any,
    options: dict[str, Any],
    *,
    fault_of: FaultOf = device_fault,
) -> list[Finished]:
    """Carries out the runs in one worker for each of `devices`, and returns how they ended, in order of their ending.

    stop: an event of the context `spawn`; once it is set, the current runs save a checkpoint and no other starts.
    options: keyword arguments of `execute`.
    fault_of: tells, after a failed run, why its worker can no longer use the device, or None.
    """
    context = multiprocessing.get_context("spawn")
    waiting, ended = deque(runs), list[Finished]()
    tries: Counter[str] = Counter()
    workers: list[_Worker] = []

    def hand_out(worker: _Worker) -> None:
        if waiting and not stop.is_set():
            run = waiting.popleft()
            tries[run.run_id] += 1
            display.started(run)
            worker.give(run)

    def begin(device: str) -> None:
        workers.append(_Worker(context, stop, device, root, options, fault_of))
        hand_out(workers[-1])

    def keep(finished: Finished) -> None:
        ended.append(finished)
        display.finished(finished)

    def repeat(run: Run, reason: str) -> bool:
        """Puts the run back into the queue unless it was tried often enough."""
        if tries[run.run_id] >= TRIES:
            return False
        display.repeated(run, reason)
        waiting.appendleft(run)
        return True

    def read(worker: _Worker) -> None:
        for message in worker.messages():
            assert worker.run is not None
            if isinstance(message, Progress):
                display.progressed(worker.run, message)
                continue
            run, worker.run = worker.run, None
            if message is not None:
                finished, fault = message
                if fault is None or not repeat(run, fault):
                    keep(finished)
                if fault is not None:
                    return
            hand_out(worker)

    def bury(worker: _Worker) -> None:
        """Replaces a dead worker, whose last messages have been read."""
        workers.remove(worker)
        reason = worker.death()
        if worker.run is not None and not repeat(worker.run, reason):
            keep(store_failure(worker.run, root, torch.device(worker.device), reason))
        if waiting and not stop.is_set():
            begin(worker.device)

    try:
        for device in devices:
            begin(device)
        # a run that is put back waits for the worker that replaces the lost one
        while any(worker.run is not None for worker in workers) or (waiting and not stop.is_set()):
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
    return ended
