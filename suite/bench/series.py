"""A run of an experiment that times operators: one implementation over its lengths, its rows like a training run's."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from suite.bench.measure import Unavailable
from suite.bench.run import Clock
from suite.config import TimingRun
from suite.trainer import Outcome, Progress


class Timer:
    """Times one run, as `suite.trainer.Trainer` trains one.

    A length without a time (no memory, cannot run here, wrong result) is a row that says why, and the run goes on.
    Where results were wrong, or no length could run here, Unavailable ends it.
    report: called before each length. stop: asked there; True raises KeyboardInterrupt, and nothing is kept.
    """

    def __init__(
        self,
        run: TimingRun,
        device: torch.device,
        *,
        report: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.device, self.report, self.stop = run, device, report, stop
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

    def _time(self) -> None:
        clock, cases = Clock(self.device), self.run.cases
        reasons: dict[str, str] = {}
        for done, case in enumerate(cases):
            if self.stop():
                raise KeyboardInterrupt
            part = f"length={dict(case.shape)['T']}"
            if self.report is not None:
                self.report(Progress(done, len(cases), part))
            try:
                samples, extra = clock.time(self.run.workload, case)
            except Unavailable as error:
                status, reason = error.status, str(error)
                self.outcome.add("time", "ms", None, slice=part, status=status, error=reason)
                reasons.setdefault(status, f"{part}: {reason}")
            else:
                self.outcome.add("time", "ms", statistics.median(samples), slice=part, samples=samples)
                if extra is not None:
                    self.outcome.add("peak_extra_memory", "bytes", float(extra), slice=part)
            # only here is nothing left of the last length, not even in an error
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if "failed" in reasons:
            raise Unavailable("failed", reasons["failed"])
        if "n/a" in reasons and all(row["status"] == "n/a" for row in self.outcome.rows):
            raise Unavailable("n/a", reasons["n/a"])
