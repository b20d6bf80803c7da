"""Runs on this machine: one after the other in this process, or several at a time in worker processes.

With several jobs and `cuda`, workers are dealt out over all visible GPUs, several to a GPU where there are more jobs
than GPUs. After the first Ctrl-C every current run saves a checkpoint between two steps; a second one ends at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from suite.contracts import Recorder
from suite.runner import Finished, execute, no_operators
from suite.runs import Progress, Run


class Display(Protocol):
    """Interface through which an executor reports the progress of its runs."""

    def started(self, run: Run) -> None: ...

    def progressed(self, run: Run, progress: Progress) -> None: ...

    def finished(self, finished: Finished) -> None: ...


@contextlib.contextmanager
def _interruptible(event: Any) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets the event; the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        del number, frame
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(
    runs: Sequence[Run],
    root: Path,
    device: torch.device,
    display: Display,
    *,
    jobs: int = 1,
    fresh: bool = False,
    threads: int = 1,
    record: Recorder = no_operators,
) -> list[Finished]:
    """Carries out the runs and returns how they ended, in order of their ending. Options are those of `execute`.

    threads: CPU threads of each training run, the same here and in a worker process, so that its results are, too.
    """
    options: dict[str, Any] = {"fresh": fresh, "threads": threads, "record": record}
    if jobs > 1 and len(runs) > 1:
        return _run_parallel(runs, root, device, display, min(jobs, len(runs)), options)
    stop = threading.Event()
    ended = []
    with _interruptible(stop):
        for run in runs:
            display.started(run)
            report = partial(display.progressed, run)
            ended.append(execute(run, root, device, report=report, stop=stop.is_set, **options))
            display.finished(ended[-1])
            if stop.is_set():
                raise KeyboardInterrupt
    return ended


_worker: dict[str, Any] = {}


def _start_worker(messages: Any, stop: Any, devices: Any, options: dict[str, Any]) -> None:
    # the parent decides what an interruption means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker.update(messages=messages, stop=stop, device=torch.device(devices.get()), options=options)


def _work(run: Run, root: Path) -> Finished | None:
    messages, stop = _worker["messages"], _worker["stop"]
    if stop.is_set():
        return None
    messages.put((run.run_id, None))

    def report(progress: Progress) -> None:
        messages.put((run.run_id, progress))

    try:
        return execute(run, root, _worker["device"], report=report, stop=stop.is_set, **_worker["options"])
    except KeyboardInterrupt:
        return None


def _run_parallel(
    runs: Sequence[Run], root: Path, device: torch.device, display: Display, jobs: int, options: dict[str, Any]
) -> list[Finished]:
    context = multiprocessing.get_context("spawn")
    messages, stop, devices = context.Queue(), context.Event(), context.Queue()
    spread = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1
    for worker in range(jobs):
        devices.put(f"cuda:{worker % spread}" if spread > 1 else str(device))
    by_id = {run.run_id: run for run in runs}

    def forward_messages(block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                run_id, progress = messages.get(timeout=0.2 if block else 0.0)
                if progress is None:
                    display.started(by_id[run_id])
                else:
                    display.progressed(by_id[run_id], progress)

    ended: list[Finished] = []
    setup: tuple[Any, ...] = (messages, stop, devices, {**options, "sharing": -(-jobs // spread)})
    with (
        _interruptible(stop),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=setup) as pool,
    ):
        waiting = [pool.submit(_work, run, root) for run in runs]
        while waiting:
            forward_messages(block=True)
            for future in [future for future in waiting if future.done()]:
                waiting.remove(future)
                finished = future.result()
                if finished is not None:
                    ended.append(finished)
                    display.finished(finished)
    if stop.is_set():
        raise KeyboardInterrupt
    return ended
