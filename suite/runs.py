"""Common parts of all kinds of runs, their identity and their columns in a row, and of the workers for them.

A run is one point of a grid with every setting filled in. There are three kinds: training (`suite.training.run`),
timing of an operator and timing of a model (`suite.bench.config`). A run does not know its worker, which
`suite.runner.WORKERS` names. This module imports no torch, so a plan is quick.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from subquad.suite.identity import identity
from subquad.suite.metrics import domain_of, is_number, value_fault


@dataclass(frozen=True)
class Progress:
    """Progress of a run, for the display."""

    step: int
    total_steps: int
    note: str
    """A few words, e.g. `loss 0.6931  accuracy 0.512  140 steps/s`."""
    metrics: Mapping[str, float] | None = None
    """New values by name (`train/loss`), for `suite.training.live`. The first report of a run that trains has none but
    says which step it starts from; a timing has none at all (None)."""
    seconds: float = 0.0
    """Wall time of the run, interruptions left out."""


@dataclass
class Outcome:
    """Results of a run so far: rows without provenance, number of steps, digest of its data, wall time in seconds."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    data_digest: str = ""
    seconds: float = 0.0

    def add(self, metric: str, unit: str, value: float | None, **columns: Any) -> None:
        """Appends one measurement. columns: others than the defaults, e.g. `split`, `slice`, `samples`, `status`.

        A value that is not finite, or too large to be stored, becomes a row with the status `diverged` and no value.
        ValueError for a number that the metric cannot have (`suite.metrics.METRICS`).
        """
        row: dict[str, Any] = {"metric": metric, "unit": unit, "value": value, "split": "", "slice": ""}
        row |= {"status": "ok", "error": "", **columns}
        samples = row.get("samples") or ()
        lost = next((n for n in (value, *samples) if n is not None and not is_number(n)), None)
        if lost is not None:
            row |= {"value": None, "samples": None, "status": "diverged", "error": f"{metric} is {lost:g}"}
        elif fault := value_fault(metric, domain_of(metric), value, samples):
            raise ValueError(fault)
        self.rows.append(row)


class RunEnded(Exception):
    """A run that ended early for a reason that has a status of its own: `diverged`, `oom`, `n/a` or `failed`."""

    def __init__(self, status: str, reason: object) -> None:
        super().__init__(str(reason))
        self.status = status


Report = Callable[[Progress], None]
Stop = Callable[[], bool]
Alive = Callable[[str, int], None]
"""Takes a sign of life of a run: what it does now, in a word or two, and its step. A call takes microseconds."""


def never() -> bool:
    """Never asks to stop."""
    return False


def unwatched(phase: str, step: int) -> None:
    """Takes signs of life that nobody waits for."""


def with_plugins(resolved: dict[str, Any], plugins: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a run with the identities of the plugins that it uses, where it uses any."""
    return {**resolved, "plugins": dict(plugins)} if plugins else resolved


class Run(ABC):
    """One resolved run. Its subclasses are frozen dataclasses with these four fields and their own."""

    experiment: str
    scale: str
    seed: int
    plugins: Mapping[str, str]
    """`task`, `model` or `operator` to the identity of the plugin that defines it; nothing for those of the suite."""
    processes: int = 1
    """Processes that carry it out together, each on a device of its own."""
    tokenizer: str = ""
    """SHA-256 of the tokenizer file of its task when the run was planned, for its weights; "" without one."""
    takes_all_threads: ClassVar[bool] = False
    """Whether the run computes on all CPU threads that torch has, as a timing does, or on those it is given."""

    @property
    @abstractmethod
    def resolved(self) -> dict[str, Any]:
        """All settings as JSON values, defaults filled in, with the versions of what is run: what identifies it."""

    @property
    def imports(self) -> frozenset[str]:
        """Identities of the plugins that a process imports when it gets the run."""
        return frozenset(self.plugins.values())

    @property
    def is_planned_only(self) -> bool:
        """Whether the run cannot start, because its data are not there; then its run id is not known either."""
        return False

    def in_processes(self, count: int) -> Run:
        """The same run, carried out by several processes together. ValueError where that cannot be."""
        raise ValueError(f"this times one device, not {count} ({self.title}); leave it out")

    @property
    @abstractmethod
    def title(self) -> str:
        """The run in a few words."""

    @property
    @abstractmethod
    def columns(self) -> dict[str, Any]:
        """Columns of its rows that describe the run itself; identity, status and machine have columns elsewhere."""

    @cached_property
    def run_id(self) -> str:
        """16 hexadecimal digits, the same for the same resolved run."""
        return identity(self.resolved)


class Worker(ABC):
    """Carries out one run when it is called. Whatever it raises, `outcome` holds what was measured until then.

    checkpoint: where an interrupted run keeps what it needs to continue, if it can.
    report: called now and then with the progress.
    stop: asked now and then; once it is true, the worker saves what it can and raises KeyboardInterrupt.
    alive: called at every step and every phase; a run that gives no sign for long is taken to hang.
    """

    model: Any = None
    """The model that it trains, if it trains one (`suite.model.Model`)."""
    sharded = False
    """Whether each of several processes has only a share of that model."""

    def __init__(
        self,
        run: Any,
        device: Any,
        *,
        checkpoint: Path | None = None,
        report: Report | None = None,
        stop: Stop = never,
        alive: Alive = unwatched,
    ) -> None:
        self.run, self.device = run, device
        self.checkpoint, self.report, self.stop, self.alive = checkpoint, report, stop, alive
        self.outcome = Outcome()
        self.began = time.perf_counter()

    @abstractmethod
    def __call__(self) -> Outcome: ...

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Gives `profile` what the run repeats: a name, and a function that does it once, without a recorded graph.

        A function may be called until the next one is asked for. ValueError for runs that repeat nothing.
        """
        raise ValueError(f"{self.run.title}: profile takes runs that train or time a model; `bench` times operators")
