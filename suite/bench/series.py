"""A run of an experiment that times: one operator or model over its lengths, its rows like a training run's."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from suite.bench.measure import Unavailable
from suite.bench.run import Clock
from suite.config import AnyRun
from suite.trainer import Outcome, Progress


class Series:
    """Times one run, as `suite.trainer.Trainer` trains one. A subclass says how one length is measured.

    A length without a time (no memory, cannot run here, wrong result) is a row that says why, and the run goes on.
    Where results were wrong, or no length could run here, Unavailable ends it.
    report: called before each length. stop: asked there; True raises KeyboardInterrupt, and nothing is kept.
    """

    def __init__(
        self,
        run: AnyRun,
        device: torch.device,
        *,
        report: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run: Any = run
        self.device, self.report, self.stop = device, report, stop
        self.outcome = Outcome()
        self.began = time.perf_counter()

    def __call__(self) -> Outcome:
        """The whole run."""
        with ExitStack() as stack:
            stack.callback(self._clock)
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            self._time()
        return self.outcome

    def _clock(self) -> None:
        self.outcome.seconds = time.perf_counter() - self.began

    def _lengths(self) -> Sequence[int]:
        """What the run goes through."""
        raise NotImplementedError

    def _measure(self, length: int, part: str) -> None:
        """Adds the rows of one length, `time` among them. Raises Unavailable where there are none."""
        raise NotImplementedError

    def _time(self) -> None:
        lengths = self._lengths()
        reasons: dict[str, str] = {}
        for done, length in enumerate(lengths):
            if self.stop():
                raise KeyboardInterrupt
            part = f"length={length}"
            if self.report is not None:
                self.report(Progress(done, len(lengths), part))
            try:
                self._measure(length, part)
            except Unavailable as error:
                status, reason = error.status, str(error)
                self.outcome.add("time", "ms", None, slice=part, status=status, error=reason)
                reasons.setdefault(status, f"{part}: {reason}")
            # only here is nothing left of the last length, not even in an error
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if "failed" in reasons:
            raise Unavailable("failed", reasons["failed"])
        if "n/a" in reasons and all(row["status"] == "n/a" for row in self.outcome.rows):
            raise Unavailable("n/a", reasons["n/a"])


class Timer(Series):
    """Of an operator in one implementation."""

    def _lengths(self) -> Sequence[int]:
        self.clock = Clock(self.device)
        return self.run.bench.lengths

    def _measure(self, length: int, part: str) -> None:
        (case,) = (case for case in self.run.cases if dict(case.shape)["T"] == length)
        samples, extra = self.clock.time(self.run.workload, case)
        self.outcome.add("time", "ms", statistics.median(samples), slice=part, samples=samples)
        if extra is not None:
            self.outcome.add("peak_extra_memory", "bytes", float(extra), slice=part)
