"""Rows of a run that another experiment, or another scale, has stored in the same folder of results.

The id of a run depends on neither. So `run` writes these rows for its own experiment and scale, with everything else as
it is, and does not train the run again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from subquad.suite.runner import ENDED, older_operators
from subquad.suite.runs import Run
from subquad.suite.settings.grid import lookup
from subquad.suite.store import endings, storage
from subquad.suite.store.checks import PROBES
from subquad.suite.store.claims import Claims
from subquad.suite.store.documents import operators_in
from subquad.suite.training.run import TrainingRun

COLUMNS = ("schema", "run_id", "metric", "status", "operators")

Versions = Callable[[], Mapping[str, int]]
"""Gives today's version of every operator."""


@dataclass(frozen=True)
class Elsewhere:
    """The place where the rows of a run are stored."""

    path: Path
    name: str
    """`dss/table1-lra`, or `dss/table1-lra at small` for another scale than that of the run."""


def is_determined(run: Run) -> bool:
    """Whether the settings of a run determine its numbers, wherever it is carried out, and its rows are all of it.

    They do not in a timing, nor where a time is the budget. A run that starts with the weights of another one is left
    out too, because the weights would be missing beside the rows.
    """
    is_training = isinstance(run, TrainingRun) and run.base is None and not run.is_planned_only
    return is_training and not lookup(run.resolved, "train.budget.seconds")


def find(runs: Iterable[Run], root: Path, versions: Versions = dict) -> dict[str, Elsewhere]:
    """Run id to rows that can be taken, for those of the runs that have some.

    These rows can be believed, have today's schema, are of a run that ended as `ok`, and were made with today's
    operators. Rows below a folder `probes` are not taken.
    """
    wanted = {run.run_id: run for run in runs if is_determined(run)}
    try:
        files = storage.files_below(root) if wanted else []
    except FileNotFoundError:
        # there is no such bucket, which whoever writes to it is told
        return {}
    places: dict[Path, set[str]] = {}
    for path in files:
        if PROBES not in path.parts[len(root.parts) :]:
            here = (run_id for run_id in endings.runs_of(path, lambda reason: None) if run_id in wanted)
            if found := {run_id for run_id in here if _folder(wanted[run_id], root) != path.parent}:
                places[path] = found
    today = versions() if places else {}
    with ThreadPoolExecutor(16) as pool:
        good = list(pool.map(lambda path: _good(path, today) & places[path], places))
    taken: dict[str, Elsewhere] = {}
    for path, run_ids in zip(places, good, strict=True):
        *experiment, scale = path.parent.parts[len(root.parts) :]
        for run_id in run_ids:
            at = "" if scale == wanted[run_id].scale else f" at {scale}"
            taken.setdefault(run_id, Elsewhere(path, "/".join(experiment) + at))
    return taken


def _folder(run: Run, root: Path) -> Path:
    return storage.result_path(root, run.experiment, run.scale, run.run_id).parent


def _good(path: Path, today: Mapping[str, int]) -> set[str]:
    """The runs of a file whose rows can be taken."""
    return {
        row["run_id"]
        for table in storage.tables([path], COLUMNS, skip=lambda reason: None)
        for row in table.to_pylist()
        if (row["metric"], row["status"], row["schema"]) == ("run", "ok", storage.SCHEMA_VERSION)
        and not older_operators(operators_in(row["operators"]), today)
    }


def take(runs: Sequence[Run], found: Mapping[str, Elsewhere], root: Path) -> list[Run]:
    """Writes the rows of runs for their own experiments, and returns the runs that are stored now.

    A run that another process has claimed, and one whose rows cannot be read or written, is left to the executor. Files
    appear whole, so nothing is left of an interrupted call but whole files.
    """
    from subquad.suite.training import checkpoints

    taken = []
    with Claims(root) as claims:
        for run in runs:
            with contextlib.suppress(OSError, storage.SchemaError):
                if claims.take(run) is not None:
                    continue
                try:
                    if _take(run, found[run.run_id].path, root):
                        taken.append(run)
                        # a checkpoint that stays beside the rows is not read again
                        checkpoints.remove(storage.checkpoint_path(root, run.experiment, run.scale, run.run_id))
                finally:
                    claims.release(run)
    return taken


def _take(run: Run, source: Path, root: Path) -> bool:
    place = (run.experiment, run.scale, run.run_id)
    (own,) = endings.endings_of(root, [place], lambda reason: None)
    if own is not None and own.status in ENDED:
        # another process has stored it since it was planned
        return False
    rows = storage.load(source, run_id=run.run_id).to_pylist()
    storage.write(
        storage.result_path(root, *place), [{**row, "experiment": run.experiment, "scale": run.scale} for row in rows]
    )
    return True
