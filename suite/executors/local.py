"""Runs on this machine: one after the other in this process, or several at a time in worker processes.

With several jobs and `cuda`, workers are dealt out over all visible GPUs, several to a GPU where there are more jobs
than GPUs. After the first Ctrl-C (or SIGTERM, or SIGHUP of a closed terminal) every current run saves a checkpoint
between two steps; a second one ends at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from suite.contracts import Recorder
from suite.executors.workers import SIGNALS, Display, run_in_workers
from suite.runner import Finished, execute, no_operators
from suite.runs import Run


@contextlib.contextmanager
def _interruptible(event: Any, announce: Callable[[], None]) -> Iterator[None]:
    """The first of SIGNALS sets the event and calls `announce`; the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        del number, frame
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        announce()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
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
    keep_weights: bool = False,
) -> list[Finished]:
    """Carries out the runs and returns how they ended, in order of their ending. Options are those of `execute`.

    threads: CPU threads of each training run, the same here and in a worker process, so that its results are, too.
    """
    options: dict[str, Any] = {"fresh": fresh, "threads": threads, "record": record, "keep_weights": keep_weights}
    if jobs > 1 and len(runs) > 1:
        return _run_parallel(runs, root, device, display, min(jobs, len(runs)), options)
    stop = threading.Event()
    ended = []
    with _interruptible(stop, lambda: display.stopping(1)):
        for run in runs:
            display.started(run)
            report = partial(display.progressed, run)
            ended.append(execute(run, root, device, report=report, stop=stop.is_set, **options))
            display.finished(ended[-1])
            if stop.is_set():
                raise KeyboardInterrupt
    return ended


def _run_parallel(
    runs: Sequence[Run], root: Path, device: torch.device, display: Display, jobs: int, options: dict[str, Any]
) -> list[Finished]:
    spread = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1
    devices = [f"cuda:{worker % spread}" if spread > 1 else str(device) for worker in range(jobs)]
    stop = multiprocessing.get_context("spawn").Event()
    with _interruptible(stop, lambda: display.stopping(jobs)):
        ended = run_in_workers(runs, root, devices, display, stop, {**options, "sharing": -(-jobs // spread)})
    if stop.is_set():
        raise KeyboardInterrupt
    return ended
