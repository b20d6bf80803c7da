"""Plans the runs of a grid, carries out one run by the worker of its kind, and writes whatever happens as rows."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad.suite.bench.config import SpeedRun, TimingRun
from subquad.suite.contracts import Recorder, no_operators
from subquad.suite.plugins import changed_since_planned
from subquad.suite.registry import Entry
from subquad.suite.runs import Alive, Progress, Report, Run, RunEnded, Stop, Worker, never, unwatched
from subquad.suite.store import endings, storage
from subquad.suite.store.target import private_folder
from subquad.suite.store.weights import save_weights
from subquad.suite.training.live import Log
from subquad.suite.training.run import TrainingRun

if TYPE_CHECKING:
    import torch

WORKERS: dict[type[Run], Entry] = {
    TrainingRun: Entry("subquad.suite.training.trainer:Trainer", "trains a model on a task"),
    TimingRun: Entry("subquad.suite.bench.series:OperatorTimer", "times an operator"),
    SpeedRun: Entry("subquad.suite.bench.models:ModelTimer", "times a model"),
}
"""Kind of run to the `Worker` that carries it out. Workers import torch, which no plan needs, and are loaded by name.
"""


def worker_of(run: Run) -> Callable[..., Worker]:
    """The class of the workers that carry out this kind of run."""
    worker: Callable[..., Worker] = WORKERS[type(run)].load()
    return worker


ENDED = ("ok", "diverged", "oom")
"""Statuses of runs that are not repeated.

A failed run (an exception, a full disk) is repeated by the next call, and so is one that could not run here (`n/a`).
"""

UNNEEDED = "unneeded"
"""Status of a run that was not carried out, because a value before its own is good enough (`suite.store.enough`).
It has no rows."""

FAILED = ("failed", "diverged", "oom")
"""Statuses of runs that ended with an error."""


@dataclass(frozen=True)
class Planned:
    """A run of the grid, and how the stored run of the same identity ended (None: not stored), or `unneeded`."""

    run: Run
    stored: str | None
    older: tuple[str, ...] = ()
    """Operators that have a higher version today than the stored run used: `selective_scan 1 (now 2)`."""

    @property
    def todo(self) -> bool:
        return self.stored not in (*ENDED, UNNEEDED)


@dataclass(frozen=True)
class Finished:
    """A run that has ended, with its status."""

    run: Run
    status: str
    error: str
    seconds: float
    found: str
    """The result in a few words."""
    stored: bool = True
    """Whether its rows are where the next call finds them."""


def plan(
    runs: Sequence[Run], roots: Sequence[Path], *, force: bool = False, versions: Mapping[str, int] | None = None
) -> list[Planned]:
    """Every run with the status of its stored rows below any of the roots; with `force`, stored rows are ignored.

    versions: today's version of every operator, against which those of stored runs are held.
    """
    # an id is a hash of all settings, so it is taken once
    files = [(run.experiment, run.scale, run.run_id) for run in runs]
    stored: dict[int, endings.Ending] = {}
    for root in () if force else roots:
        missing = [index for index in range(len(runs)) if index not in stored]
        found = endings.endings_of(root, [files[index] for index in missing])
        stored |= {index: ending for index, ending in zip(missing, found, strict=True) if ending is not None}
    planned = []
    for index, run in enumerate(runs):
        ending = stored.get(index)
        if ending is None:
            planned.append(Planned(run, None))
            continue
        planned.append(Planned(run, ending.status, older_operators(ending.operators, versions or {})))
    return planned


def older_operators(used: Mapping[str, Mapping[str, Any]], versions: Mapping[str, int]) -> tuple[str, ...]:
    """Operators of a stored run that have a higher version today: `selective_scan 1 (now 2)`."""
    return tuple(
        f"{name} {operator['version']} (now {versions[name]})"
        for name, operator in sorted(used.items())
        if operator["version"] < versions.get(name, 0)
    )


def missing_bases(runs: Sequence[Run], root: Path) -> dict[str, Run]:
    """The runs, by id, that must be carried out before these, because their weights are not stored."""
    bases = {run.base.run_id: run.base for run in runs if isinstance(run, TrainingRun) and run.base is not None}
    return {
        run_id: run
        for run_id, run in bases.items()
        if not storage.weights_path(root, run.experiment, run.scale, run_id).exists()
    }


def outdated(planned: Sequence[Planned]) -> str | None:
    """One line on the stored runs that are kept although their operators have changed; None where there are none."""
    kept = [item for item in planned if item.older and not item.todo]
    if not kept:
        return None
    groups: dict[str, list[str]] = {}
    for item in kept:
        groups.setdefault(", ".join(item.older), []).append(item.run.run_id)
    parts = "; ".join(f"{operators}: {', '.join(run_ids)}" for operators, run_ids in groups.items())
    return f"kept, but stored with older operators ({parts}); --force repeats them"


def execute(
    run: Run,
    root: Path,
    device: torch.device,
    *,
    report: Report | None = None,
    stop: Stop = never,
    alive: Alive = unwatched,
    fresh: bool = False,
    sharing: int | Callable[[], int] = 1,
    threads: int = 1,
    record: Recorder = no_operators,
    keep_weights: bool = False,
    log: Sequence[str] = (),
) -> Finished:
    """Trains and measures one run, or times it, and stores it. Failures become rows; only an interruption is passed on.

    fresh: ignore a checkpoint that lies there.
    sharing: how many runs use this device at a time, itself included; a function is asked at the end of the run.
    threads: CPU threads that a run trains on. A run that times takes all that torch has.
    record: tells which operators the run used.
    keep_weights: write the weights of a model that was trained beside its rows (`suite.store.weights`).
    log: viewers that get the metrics of a training run while it trains (`suite.training.live.SINKS`).
    """
    from subquad.suite.environment import code
    from subquad.suite.training import checkpoints
    from subquad.suite.training.numerics import host_threads

    checkpoint = storage.checkpoint_path(root, run.experiment, run.scale, run.run_id)
    if fresh:
        checkpoints.remove(checkpoint)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # kept for the rows now, because the checkout may move on before the run ends
    code()
    live = Log(run, storage.log_path(root, run.experiment, run.scale, run.run_id), log)

    def tell(progress: Progress) -> None:
        live.add(progress)
        if report is not None:
            report(progress)

    worker = worker_of(run)(run, device, checkpoint=checkpoint, report=tell, stop=stop, alive=alive)
    with live, host_threads(None if run.takes_all_threads else threads), record() as operators:
        status, error = _carry_out(run, worker, stop)
        columns = _columns(run, device, started_at, sharing() if callable(sharing) else sharing)
    if status == "ok" and (reason := _changed_meanwhile(run)):
        status, error = "failed", reason
        # a user who undoes the change must not continue what was trained with it
        with contextlib.suppress(OSError):
            checkpoints.remove(checkpoint)
    if worker.sharded:
        columns["device"] += ", sharded"
    alive("writing rows", worker.outcome.step)
    if keep_weights and status == "ok" and (reason := _write_weights(run, root, worker)):
        status, error = "failed", reason
    outcome = worker.outcome
    columns |= {
        "data_digest": outcome.data_digest,
        "duration_s": outcome.seconds,
        "operators": None if record is no_operators else json.dumps(operators, sort_keys=True),
    }
    found = _found(outcome.rows)
    outcome.add("run", "", None, status=status, error=error)
    fault = _store(run, root, [{"step": outcome.step, **columns, **row} for row in outcome.rows])
    if fault:
        # the checkpoint stays, so that the next call only has to finish the run
        status, error = "failed", fault
    if status in ENDED:
        # a checkpoint that stays beside the rows is not read again
        with contextlib.suppress(OSError):
            checkpoints.remove(checkpoint)
    del worker
    _free_memory(device)
    return Finished(run, status, error, outcome.seconds, found, stored=not fault)


def _carry_out(run: Run, worker: Worker, stop: Stop) -> tuple[str, str]:
    """Carries out a run, and returns the status with which it ended and its error, which is empty for `ok`."""
    import torch

    try:
        if reason := changed_since_planned(run.plugins.values()):
            return "failed", reason
        worker()
    except RunEnded as ended:
        return ended.status, str(ended)
    except torch.OutOfMemoryError as error:
        return "oom", str(error).splitlines()[0]
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and (stop is never or stop()):
            raise
        # without a request to stop, code of the run raised it
        return "failed", f"{type(error).__name__}: {error}\n{of_any_machine(traceback.format_exc(limit=-4))}"
    return "ok", ""


def _changed_meanwhile(run: Run) -> str:
    """Says in one line what the run may have read that is not what was planned; "" where there is nothing."""
    if reason := changed_since_planned(run.plugins.values(), ended=True):
        return reason
    try:
        # the test rows are read last
        if isinstance(run, TrainingRun) and run.task.fingerprint() != run.fingerprint:
            return "its data changed while it was carried out; give the command again"
    except (OSError, ValueError) as error:
        return f"its data cannot be read any more ({error}); give the command again"
    return ""


def of_any_machine(text: str) -> str:
    """A traceback with the paths of files within their package, and not those of this machine's folders."""

    def within(found: re.Match[str]) -> str:
        path = Path(found[1])
        if "site-packages" in path.parts:
            return f'File "{Path(*path.parts[path.parts.index("site-packages") + 1 :])}"'
        here = Path(__file__).parents[1]
        return f'File "{path.relative_to(here) if path.is_relative_to(here) else path.name}"'

    return re.sub(r'File "([^"\n]+)"', within, text)


def _without_places(resolved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, in which files and folders of a user have their names without the folders above them.

    Paths are no part of an identity (`suite.identity`), and rows are published.
    """
    task = resolved.get("task")
    if not isinstance(task, dict):
        return resolved
    named = {key: Path(task[key]).name for key in ("data", "tokenizer") if isinstance(task.get(key), str)}
    return {**resolved, "task": {**task, **named}}


def _write_weights(run: Run, root: Path, worker: Worker) -> str:
    """Writes the weights of the model that a run has trained, if it trains one, or says in one line why not."""
    if worker.model is not None:
        try:
            path = storage.weights_path(root, run.experiment, run.scale, run.run_id)
            save_weights(path, run.resolved, worker.model.state_dict(), run.tokenizer)
        except OSError as error:
            return f"its weights could not be written ({error.strerror or error}); free space and run it again"
    return ""


def _free_memory(device: torch.device) -> None:
    """Gives the memory of a run that has ended back to the device, for the runs that share it."""
    import torch

    gc.collect()
    if device.type == "cuda":
        # after a failed kernel this fails as well, and the reason of the failure is in the rows
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _store(run: Run, root: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Writes the rows of a run, or says in one line why not and where they are instead."""

    def write(root: Path) -> OSError | None:
        try:
            storage.write(storage.result_path(root, run.experiment, run.scale, run.run_id), rows)
        except OSError as error:
            return error
        return None

    if (error := write(root)) is None:
        return ""
    reason = f"its rows could not be written ({error.strerror or error})"
    try:
        aside = private_folder(f"subquad-rows-{os.getuid()}")
    except OSError:
        aside = None
    if aside is not None and write(aside) is None:
        return f"{reason} and are in {aside}; free space, and copy the content of that folder into {root}"
    return f"{reason}; free space and give the command again"


def store_failure(run: Run, root: Path, device: torch.device, reason: str, status: str = "failed") -> Finished:
    """Stores a run whose process ended without rows as `failed (reason)`. Its checkpoint stays."""
    error = f"{status} ({reason})"
    columns = _columns(run, device, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), 1)
    row = {"metric": "run", "unit": "", "value": None, "split": "", "slice": "", "status": status, "error": error}
    fault = _store(run, root, [{"step": 0, **columns, **row}])
    return Finished(run, status, fault or error, 0.0, "", stored=not fault)


def _found(rows: Sequence[Mapping[str, Any]]) -> str:
    """`accuracy 0.9980` on the whole test split, or `0.0131 to 11.2 ms, oom at length=524288`."""
    for row in rows:
        if row["metric"] == "accuracy" and row["split"] == "test" and row["slice"] == "" and row["value"] is not None:
            return f"accuracy {row['value']:.4f}"
    times = [row["value"] for row in rows if row["metric"] == "time" and row["value"] is not None]
    oom = [row["slice"] for row in rows if row["metric"] == "time" and row["status"] == "oom"]
    words = [f"{min(times):.3g} to {max(times):.3g} ms"] if times else []
    return ", ".join(words + [f"oom at {', '.join(oom)}"] * bool(oom))


def _columns(run: Run, device: torch.device, started_at: str, sharing: int) -> dict[str, Any]:
    from subquad.suite.environment import provenance

    facts = provenance(device)
    if run.processes > 1:
        facts["device"] = f"{run.processes} x {facts['device']}"
    if sharing > 1:
        # its speed is not that of a run alone on the device, and the row must not claim so
        facts["device"] += f", {sharing} runs at a time"
    return {
        "run_id": run.run_id,
        "experiment": run.experiment,
        "scale": run.scale,
        "seed": run.seed,
        "config": json.dumps(_without_places(run.resolved), sort_keys=True),
        "started_at": started_at,
        **run.columns,
        **facts,
    }
