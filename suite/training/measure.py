"""Time, throughput and peak memory of a run on its device."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished, so that the host's clock includes its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of peak memory on a GPU. The peak of a host process cannot be reset."""
    if device.type == "cuda":
        # resetting fails in a process that has not initialised CUDA
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> tuple[str, int]:
    """(metric, bytes): `peak_memory` allocated on a GPU, or `peak_rss`, resident memory of the whole process."""
    if device.type == "cuda":
        return "peak_memory", torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return "peak_rss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stopwatch:
    """Rates of a loop over short windows, and the time of all of them. Evaluation and graph recording are left out.

    clock: gives seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.total = 0.0
        """Seconds of all windows that were closed."""
        self.steps_per_s: list[float] = []
        self.tokens_per_s: list[float] = []
        self._start: float | None = None
        self._steps = self._tokens = 0

    @property
    def open_seconds(self) -> float:
        """About how long the steps of the open window take.

        The host may have launched them before the device is done, so they take at least as long as those of the last
        window did.
        """
        known = self._steps / self.steps_per_s[-1] if self.steps_per_s else 0.0
        return 0.0 if self._start is None else max(self.seconds, known)

    @property
    def seconds(self) -> float:
        """Seconds since the open window began; 0 where none is open."""
        return 0.0 if self._start is None else self.clock() - self._start

    def start(self) -> None:
        """Opens a window, unless one is open."""
        if self._start is None:
            synchronize(self.device)
            self._start, self._steps, self._tokens = self.clock(), 0, 0

    def add(self, tokens: int) -> None:
        """Counts a step, if a window is open."""
        self._steps += 1
        self._tokens += tokens

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time does not count. An open window ends before it, without rates; another follows it."""
        was_open = self._start is not None
        self._close()
        yield
        if was_open:
            self.start()

    def stop(self) -> None:
        """Closes the open window and keeps its rates."""
        steps, tokens = self._steps, self._tokens
        seconds = self._close()
        if seconds > 0 and steps:
            self.steps_per_s.append(steps / seconds)
            self.tokens_per_s.append(tokens / seconds)

    def _close(self) -> float:
        """Closes the open window and returns its seconds; 0 where none is open."""
        if self._start is None:
            return 0.0
        seconds = 0.0
        if self._steps:
            synchronize(self.device)
            seconds = self.clock() - self._start
            self.total += seconds
        self._start = None
        return seconds


def rate(call: Callable[[], object], count: float, device: torch.device) -> list[float]:
    """Samples of count / time for a call: at least 3 and at most 20, within about half a second after one warm-up."""
    call()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < 3 or (len(samples) < 20 and time.perf_counter() - begin < 0.5):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        samples.append(count / (time.perf_counter() - start))
    return samples


def median(samples: list[float]) -> float | None:
    """The median, or None where there are no samples."""
    return statistics.median(samples) if samples else None
