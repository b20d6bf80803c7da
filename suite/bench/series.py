"""A run that times an operator or a model over its lengths. Its rows are like those of a training run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from subquad.suite.bench.config import TimingRun
from subquad.suite.bench.measure import Unavailable
from subquad.suite.bench.run import BUDGET_MS, Clock
from subquad.suite.runs import Outcome, Progress, Worker


class Series(Worker):
    """Times one run, as `suite.training.trainer.Trainer` trains one. A subclass says how one length is measured.

    A length that cannot be timed (no memory, cannot run here, wrong result) becomes a row that says why, and the run
    goes on. Where a result was wrong, or no length could run here, the run ends with Unavailable.

    report: called before each length.
    stop: asked before each length; once it is true, KeyboardInterrupt is raised and nothing is kept.
    """

    def __call__(self) -> Outcome:
        """Times all lengths."""
        with ExitStack() as stack:
            stack.callback(self._take_time)
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            self._time()
        return self.outcome

    def _take_time(self) -> None:
        self.outcome.seconds = time.perf_counter() - self.began

    def _lengths(self) -> Sequence[int]:
        """The lengths of the run, in order."""
        raise NotImplementedError

    def _measure(self, length: int, part: str) -> None:
        """Adds the rows of one length, `time` among them, with `part` as their slice. May raise Unavailable."""
        raise NotImplementedError

    def _time(self) -> None:
        lengths = self._lengths()
        reasons: dict[str, str] = {}
        for done, length in enumerate(lengths):
            if self.stop():
                raise KeyboardInterrupt
            part = f"length={length}"
            self.alive(f"timing {part}", done)
            if self.report is not None:
                self.report(Progress(done, len(lengths), part))
            try:
                self._measure(length, part)
            except Unavailable as error:
                status, reason = error.status, str(error)
                self.outcome.add("time", "ms", None, slice=part, status=status, error=reason)
                reasons.setdefault(status, f"{part}: {reason}")
            # not in the except clause, where the error still keeps the tensors of this length alive
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if "failed" in reasons:
            raise Unavailable("failed", reasons["failed"])
        if "n/a" in reasons and all(row["status"] == "n/a" for row in self.outcome.rows):
            raise Unavailable("n/a", reasons["n/a"])


class OperatorTimer(Series):
    """Times an operator in one implementation. budget_ms: time given to the samples of each length."""

    run: TimingRun

    def __init__(self, *run: Any, budget_ms: float = BUDGET_MS, **options: Any) -> None:
        super().__init__(*run, **options)
        self.clock = Clock(self.device, budget_ms)

    def _lengths(self) -> Sequence[int]:
        return self.run.bench.lengths

    def _measure(self, length: int, part: str) -> None:
        (case,) = (case for case in self.run.cases if dict(case.shape)["T"] == length)
        samples, extra = self.clock.time(self.run.workload, case)
        self.outcome.add("time", "ms", statistics.median(samples), slice=part, samples=samples)
        if extra is not None:
            self.outcome.add("peak_extra_memory", "bytes", float(extra), slice=part)
