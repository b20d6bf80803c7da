"""Carries out a benchmark, from cases to rows: times every implementation, or compares two revisions."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.suite import environment
from subquad.suite.bench.base import Base
from subquad.suite.bench.cases import Case, spread
from subquad.suite.bench.compare import SIDES, Comparison, compare
from subquad.suite.bench.contracts import Workload
from subquad.suite.bench.measure import Ceilings, Unavailable, checked, extra_memory, find, gate, sample, versions_in
from subquad.suite.bench.tuning import forms_compiled_together
from subquad.suite.bench.worker import ChildError, Worker, cold_start
from subquad.suite.contracts import Recorder, no_operators
from subquad.suite.store import storage

EXPERIMENT = "kernels"
BUDGET_MS = 200.0
"""Time given to the samples of one case."""
BLOCK_MS = 40.0
"""Time given to one block of samples of a comparison; a round has three blocks."""


@dataclass(frozen=True)
class Timing:
    """One case as measured; `status` is ok, or says with `reason` why there is no time."""

    case: Case
    samples_ms: list[float]
    floor_ms: float | None = None
    num_bytes: int = 0
    num_flops: int = 0
    extra_bytes: int | None = None
    cold_start_s: float | None = None
    status: str = "ok"
    reason: str = ""
    operators: str | None = None
    """The operators that the case called, as in the column `operators`; None if they were not recorded."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Further facts on the measurement for its row, such as versions of packages."""

    @property
    def median_ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None

    @property
    def spread(self) -> float | None:
        return spread(self.samples_ms)


class Clock:
    """Times cases on one device, and remembers which kernels the accuracy rule has judged.

    budget_ms: time given to the samples of one case.
    """

    def __init__(self, device: torch.device, budget_ms: float = BUDGET_MS) -> None:
        self.device, self.budget_ms = device, budget_ms
        self.judged: dict[tuple[Any, ...], tuple[str, str] | None] = {}

    def time(self, workload: Workload, case: Case) -> tuple[list[float], int | None]:
        """Raw samples (ms), and the bytes beyond the inputs where the device tells. Raises Unavailable."""
        try:
            # called before the accuracy check, because some peers tune themselves to the shape of their first call
            with forms_compiled_together():
                call = checked(workload, case, self.device)
                self._judge(workload, case)
            return sample(call, self.device, self.budget_ms), extra_memory(call, self.device)
        except torch.OutOfMemoryError:
            raise Unavailable("oom", f"{case}: out of memory") from None

    def _judge(self, workload: Workload, case: Case) -> None:
        short = tuple(workload.short(dict(case.shape)).items())
        key = (case.op, case.implementation, short, case.dtype, case.backward)
        if key not in self.judged:
            try:
                gate(workload, case, self.device)
                self.judged[key] = None
            except Unavailable as error:
                # the error itself is not kept, because its traceback would keep the tensors of its caller
                self.judged[key] = error.status, str(error)
        if (verdict := self.judged[key]) is not None:
            raise Unavailable(*verdict)


def time_cases(
    cases: Iterable[Case],
    load: Callable[[str], Workload],
    targets: Mapping[str, str],
    device: torch.device,
    ceilings: Ceilings,
    *,
    record: Recorder = no_operators,
) -> Iterator[Timing]:
    """Times case after case.

    load: gives the workload of an operator.
    targets: where a fresh process finds it, as `module:attribute`.
    record: tells which operators a case called.
    """
    clock = Clock(device)
    started: set[tuple[str, str]] = set()
    for case in cases:
        workload = load(case.op)
        cost = workload.cost(dict(case.shape), getattr(torch, case.dtype), case.backward)
        counts: dict[str, Any] = {
            "floor_ms": ceilings.floor_ms(cost, case.dtype),
            "num_bytes": cost.num_bytes,
            "num_flops": cost.num_flops,
            "config": {"packages": found} if (found := versions_in(find(workload, case.implementation))) else {},
        }
        try:
            with record() as used:
                times, extra = clock.time(workload, case)
            counts["operators"] = None if record is no_operators else json.dumps(used, sort_keys=True)
            cold = None
            which = (case.op, case.implementation)
            if case.backward and find(workload, case.implementation).cold_start and which not in started:
                started.add(which)
                cold = cold_start(targets, str(device), case)
            yield Timing(case, times, extra_bytes=extra, cold_start_s=cold, **counts)
        except (Unavailable, ChildError) as error:
            yield Timing(case, [], status=error.status, reason=str(error), **counts)


@dataclass(frozen=True)
class Verdict:
    """One case of this revision against the base; `comparison` is None where one of the two has no time."""

    case: Case
    comparison: Comparison | None
    base_reason: str = ""
    reason: str = ""

    @property
    def word(self) -> str:
        """slower, faster, same; new (the base cannot), broken (only the base can), n/a (neither)."""
        if self.comparison is not None:
            return self.comparison.verdict
        if not self.reason:
            return "new"
        return "n/a" if self.base_reason else "broken"

    @property
    def fails(self) -> bool:
        return self.word in ("slower", "broken")


def compare_trees(
    cases: Iterable[Case],
    targets: Mapping[str, str],
    device: torch.device,
    base: Base,
    *,
    versions: Mapping[str, int] | None = None,
) -> Iterator[Verdict]:
    """Times every case in three processes in turn: the base, this revision, and the base again.

    versions: versions of the workloads of this tree. A case whose workload has another one in the base is `new`.
    """
    trees = {"A": base, "B": None, "control": base}
    with ExitStack() as stack:
        workers = {
            side: stack.enter_context(Worker(targets, str(device), base=trees[side], versions=versions))
            for side in SIDES
        }
        for case in cases:
            failed: dict[str, str] = {}

            def asked(side: str, what: str, case: Case = case, failed: dict[str, str] = failed, **options: Any) -> Any:
                try:
                    return workers[side].ask(what, case=case.to_json(), **options)
                except ChildError as error:
                    failed[side] = f"{error.status}: {error}"
                    raise

            for side in SIDES:
                with suppress(ChildError):
                    asked(side, "prepare")
            found = None
            if not failed:
                with suppress(ChildError):
                    found = compare(partial(asked, what="sample", budget_ms=BLOCK_MS))
            yield Verdict(case, found, failed.get("A", failed.get("control", "")), failed.get("B", ""))


class Rows:
    """The rows of one benchmark: one file below `kernels/<set>/`, written whole again after every case."""

    def __init__(
        self,
        root: Path,
        shapes: str,
        device: torch.device,
        request: Sequence[str],
        plugins: Mapping[str, Path] | None = None,
        *,
        continued: bool = False,
    ) -> None:
        """plugins: the file of each operator that a plugin defines; its rows have the commit of that checkout.

        continued: takes up the file of an earlier call with the same request, code, versions and device. Code with
        uncommitted changes is never taken for the same.
        """
        self.commits = {op: environment.commit(file.parent) for op, file in (plugins or {}).items()}
        self.started = datetime.now(UTC)
        self.shapes = shapes
        self.provenance = environment.provenance(device)
        known = [self.provenance["dirty"], *(dirty for _, dirty in self.commits.values())]
        same = continued and not any(dirty is not False for dirty in known)
        identity = [list(request), shapes, "" if same else self.started.isoformat(), self.provenance]
        self.run_id = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.path = storage.result_path(root, EXPERIMENT, shapes, self.run_id)
        self.rows: list[dict[str, Any]] = storage.load(self.path).to_pylist() if same and self.path.exists() else []
        self.earlier_s = 0.0
        if self.rows:
            self.earlier_s = self.rows[0]["duration_s"] or 0.0
        self.written = {(row["task"], row["model"], row["slice"]) for row in self.rows if row["metric"] == "time"}
        """Operator, implementation and slice of the cases that are done."""

    def has(self, case: Case) -> bool:
        """Whether an earlier call has timed a case, or found why it cannot."""
        return (case.op, case.implementation, case.slice) in self.written

    def add(
        self,
        metric: str,
        unit: str,
        value: float | None,
        *,
        case: Case | None = None,
        samples: Sequence[float] = (),
        status: str = "ok",
        error: str = "",
        config: Mapping[str, Any] | None = None,
        commit: str | None = None,
        version: int | None = None,
        operators: str | None = None,
    ) -> None:
        row = {
            "run_id": self.run_id,
            "experiment": EXPERIMENT,
            "scale": self.shapes,
            "task": case.op if case else "device",
            "task_version": version,
            "model": case.implementation if case else "",
            "split": "",
            "slice": case.slice if case else "",
            "metric": metric,
            "unit": unit,
            "value": value,
            "samples": list(samples),
            "status": status,
            "error": error,
            "stand_in": "",
            "split_policy": "",
            "config": json.dumps(config or {}),
            "precision": case.dtype if case else "",
            "operators": operators,
            "started_at": self.rows[0]["started_at"] if self.rows else self.started.isoformat(timespec="seconds"),
            **self.provenance,
        }
        if commit is not None:
            # the commit of a base is known, the state of its tree is that of the commit
            row |= {"commit": commit, "dirty": False}
        elif case and case.op in self.commits:
            row["commit"], row["dirty"] = self.commits[case.op]
        self.rows.append(row)

    def add_ceilings(self, ceilings: Ceilings) -> None:
        self.add("copy_bandwidth", "bytes/s", statistics.median(ceilings.copy), samples=ceilings.copy)
        for dtype, rates in ceilings.matmul.items():
            self.add("matmul_rate", "flop/s", statistics.median(rates), samples=rates, config={"dtype": dtype})

    def add_timing(self, timing: Timing, version: int) -> None:
        """time (ms), floor_time (ms), peak_extra_memory (bytes), cold_start (s)."""
        config = {"num_bytes": timing.num_bytes, "num_flops": timing.num_flops, **timing.config}
        common: Any = {"case": timing.case, "version": version, "config": config, "operators": timing.operators}
        self.add(
            "time",
            "ms",
            timing.median_ms,
            samples=timing.samples_ms,
            status=timing.status,
            error=timing.reason,
            **common,
        )
        self.add("floor_time", "ms", timing.floor_ms, **common)
        if timing.extra_bytes is not None:
            self.add("peak_extra_memory", "bytes", timing.extra_bytes, **common)
        if timing.cold_start_s is not None:
            self.add("cold_start", "s", timing.cold_start_s, **common)
        self.write()

    def add_verdict(self, verdict: Verdict, base: str, version: int) -> None:
        """time (ms) of both revisions, the ratio new over base with one sample a round."""
        common: Any = {"case": verdict.case, "version": version}
        found = verdict.comparison
        if found is None:
            self.add("ratio", "", None, status="n/a", error=verdict.reason or verdict.base_reason, **common)
            self.write()
            return
        for side, commit in (("A", base), ("B", None)):
            times = found.samples[side]
            self.add("time", "ms", statistics.median(times), samples=times, commit=commit, **common)
        judged = {name: getattr(found, name) for name in ("low", "high", "noise", "limit", "verdict")}
        self.add("ratio", "", found.ratio, samples=found.ratios, config={"base": base, **judged}, **common)
        self.write()

    def write(self) -> None:
        duration = self.earlier_s + (datetime.now(UTC) - self.started).total_seconds()
        storage.write(self.path, [{**row, "duration_s": duration} for row in self.rows])
