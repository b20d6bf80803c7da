"""Plans a grid, skips what is done, carries out one run, and turns whatever happens into rows."""

from __future__ import annotations

import datetime
import gc
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import storage
from suite.config import Run

if TYPE_CHECKING:
    import torch

    from suite.trainer import Progress

ENDED = ("ok", "diverged", "oom")
"""How a run can end for good; a failed one (an exception, a full disk) is tried again by the next call."""


@dataclass(frozen=True)
class Planned:
    """A run of the grid and how a stored one of the same identity ended (None: not stored)."""

    run: Run
    stored: str | None

    @property
    def todo(self) -> bool:
        return self.stored not in ENDED


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    run: Run
    status: str
    error: str
    seconds: float
    accuracy: float | None


def plan(runs: Sequence[Run], roots: Sequence[Path], *, force: bool = False) -> list[Planned]:
    """What is stored below any of the roots is done; with `force` nothing is."""
    planned = []
    for run in runs:
        paths = (storage.result_path(root, run.experiment, run.scale, run.run_id) for root in roots)
        stored = None if force else next((status for path in paths if (status := storage.status_of(path))), None)
        planned.append(Planned(run, stored))
    return planned


def execute(
    run: Run,
    root: Path,
    device: torch.device,
    *,
    report: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    fresh: bool = False,
    sharing: int = 1,
) -> Finished:
    """Trains, measures and stores one run. Failures become rows; only an interruption is passed on.

    fresh: ignore a checkpoint that lies there. sharing: how many runs use this device at a time, itself included.
    """
    import torch

    from suite.trainer import DivergedError, Trainer

    checkpoint = storage.checkpoint_path(root, run.experiment, run.scale, run.run_id)
    if fresh:
        checkpoint.unlink(missing_ok=True)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    trainer = Trainer(run, device, checkpoint=checkpoint, report=report, stop=stop)
    status, error = "ok", ""
    try:
        trainer()
    except KeyboardInterrupt:
        raise
    except DivergedError as reason:
        status, error = "diverged", str(reason)
    except torch.OutOfMemoryError as reason:
        status, error = "oom", str(reason).splitlines()[0]
    except Exception as reason:
        status, error = "failed", f"{type(reason).__name__}: {reason}\n{traceback.format_exc(limit=-4)}"
    outcome = trainer.outcome
    columns = _columns(run, device, started_at, sharing) | {
        "data_digest": outcome.data_digest,
        "duration_s": outcome.seconds,
    }
    outcome.add("run", "", None, status=status, error=error)
    rows = [{"step": outcome.step, **columns, **row} for row in outcome.rows]
    storage.write(storage.result_path(root, run.experiment, run.scale, run.run_id), rows)
    checkpoint.unlink(missing_ok=True)
    tests = [row for row in outcome.rows if row["metric"] == "accuracy" and row.get("split") == "test"]
    whole = next((row["value"] for row in tests if row.get("slice") == ""), None)
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Finished(run, status, error, outcome.seconds, whole)


def _columns(run: Run, device: torch.device, started_at: str, sharing: int) -> dict[str, Any]:
    from suite.environment import provenance

    facts = provenance(device)
    if sharing > 1:
        # its speed is not that of a run by itself, and nobody shall read it as such
        facts["device"] += f", {sharing} runs at a time"
    return {
        "run_id": run.run_id,
        "experiment": run.experiment,
        "scale": run.scale,
        "task": run.task_name,
        "task_version": run.task.version,
        "model": run.model_name,
        "model_version": run.model.version,
        "seed": run.seed,
        "stand_in": run.task.stand_in,
        "split_policy": run.task.split_policy,
        "config": json.dumps(run.resolved, sort_keys=True),
        "precision": run.train.precision,
        "deterministic": run.train.deterministic,
        "started_at": started_at,
        **facts,
    }
