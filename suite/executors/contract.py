"""The contract of executors, and the table of them.

An executor takes the runs of a grid, the folder of results, a display and settings, and returns how each run ended.
The identity of a run does not depend on the place where it is carried out, so grids never mention an executor.

Every executor holds the claim (`suite.store.claims`) of each run while it is carried out. So any number of executors,
of any kind, can work on one grid and folder at a time.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from subquad.suite.contracts import Recorder, no_operators
from subquad.suite.environment import with_extra
from subquad.suite.options import options_in, parse, shortened
from subquad.suite.registry import Entry, Registry
from subquad.suite.runner import Finished
from subquad.suite.runs import Run
from subquad.suite.store.enough import Enough

if TYPE_CHECKING:
    from subquad.suite.executors.queue import Display

EXECUTORS = Registry(
    "executor",
    {
        "local": Entry("subquad.suite.executors.local:Local", "this machine"),
        "ray": Entry("subquad.suite.executors.ray:Ray", "a Ray cluster"),
        "slurm": Entry("subquad.suite.executors.slurm:Slurm", "jobs of a Slurm cluster"),
    },
)

PACKAGES = {"ray": ("ray", "ray"), "slurm": ("submitit", "slurm")}
"""Executor to the package that it needs, and the extra that installs the package."""


class LeftRunningError(Exception):
    """The command ends, and the runs go on without it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Settings:
    """Options of one call of `run` that hold for every executor."""

    device: str | None = None
    """`cpu`, `cuda` or `cuda:N`; None: a GPU if the machine that carries out the run has one."""
    jobs: int | None = None
    """Runs at a time; None: the executor's own number."""
    packed: bool = False
    """Whether as many runs share each GPU as its memory and speed allow (`--jobs auto`)."""
    processes: int = 1
    """Processes that train each run together, on a GPU each."""
    repeat: bool = False
    """Whether stored rows are replaced."""
    fresh: bool = False
    """Whether checkpoints are ignored."""
    threads: int = 1
    """CPU threads of each training run."""
    record: Recorder = no_operators
    """Tells which operators a run used."""
    keep_weights: bool = False
    log: tuple[str, ...] = ()
    """Viewers that get the metrics of training runs (`suite.training.live.SINKS`)."""
    within_s: float | None = None
    """Seconds after which the current runs are asked to save a checkpoint and no other starts."""
    enough: Enough | None = None
    """Tells which runs are not needed any more; None: all of them are needed."""

    @property
    def of_each_run(self) -> dict[str, Any]:
        """Those of them that are keyword arguments of `suite.runner.execute`."""
        return {name: getattr(self, name) for name in ("fresh", "threads", "record", "keep_weights", "log")}

    def __post_init__(self) -> None:
        for name, value, most in (
            ("jobs", self.jobs, 4096),
            ("nproc", self.processes, 4096),
            ("threads", self.threads, 1024),
        ):
            # in Python, True is an integer
            if value is not None and not (type(value) is int and 1 <= value <= most):
                raise ValueError(f"--{name} {shortened(value)}: expected a whole number from 1 to {most}")


class Executor(Protocol):
    """Carries out runs. An executor is a frozen configuration (`suite.options.Config`), its fields are options."""

    def check(self, settings: Settings) -> str:
        """Names the place where the runs will be carried out, in a few words. ValueError for what cannot work here."""

    def __call__(self, runs: Sequence[Run], root: Path, display: Display, settings: Settings) -> list[Finished]:
        """Carries out the runs and returns how they ended, in order of their ending.

        After the first signal that asks for an end, the current runs save checkpoints and no other starts. Raises
        KeyboardInterrupt, or `OutOfTimeError` after `settings.within_s`, unless all runs ended; or `LeftRunningError`
        if they go on without this process.
        """


def check_name(name: str) -> None:
    """Raises ValueError for an unknown executor, or one whose package is missing. It imports nothing."""
    if name not in EXECUTORS:
        raise EXECUTORS.unknown(name)
    if name in PACKAGES:
        package, extra = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--executor {name} needs {package}; install the extra: {with_extra(extra)}.")


def choose(name: str, options: Iterable[str] = ()) -> Executor:
    """The executor of this name. ValueError for an unknown one, a missing package, or a wrong option.

    options: `key=value` pairs, several in one text separated by commas: `address=auto,gpus=0.25`.
    """
    flag = "--executor-options"
    pairs = [pair for text in options for pair in text.split(",") if pair]
    values = options_in(pairs, flag, "key=value, e.g. gpus=1")
    check_name(name)
    return cast(Executor, parse(EXECUTORS.load(name), values, f"{flag} ({name})"))
