"""Records of the jobs that were given to a scheduler, so that a grid outlives the terminal that started it.

The record of a run's job is the JSON file `.slurm/<experiment>/<scale>/<run_id>.json` of the results, because two grids
may have a run in common and each stores rows of its own. The logs of jobs are in `.slurm`. A record stays until the
run's rows are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad.suite.runs import Run
from subquad.suite.store import endings, storage
from subquad.suite.store.documents import read_object
from subquad.suite.store.target import replacing, stamp

LATE_S = 60.0
"""Seconds for which a shared file system may hide rows that a job has just written."""


@dataclass(frozen=True)
class Job:
    """A job as it was submitted."""

    run_id: str
    job_id: str
    """`4711_3` for an element of an array, or the id of a process where there is no scheduler."""
    cluster: str
    """`slurm`, or `local` for processes of this machine."""
    log: str
    before: list[str] | None
    """Stamp of the rows that were stored when the job was submitted, which are to be replaced."""


def job_folder(root: Path) -> Path:
    """The folder of the records and logs."""
    return root / ".slurm"


def keep_job(root: Path, run: Run, job: Job) -> None:
    """Writes the record of a run's job."""
    path = _record(root, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(asdict(job)))


def forget_job(root: Path, run: Run) -> None:
    """Removes the record of a run's job."""
    _record(root, run).unlink(missing_ok=True)


def find_jobs(root: Path, runs: Iterable[Run]) -> dict[str, Job]:
    """Run id to the last job of that run, of those runs that have a record."""
    found = {}
    if job_folder(root).is_dir():
        for run in runs:
            path = _record(root, run)
            if path.is_file():
                # a record that cannot be read, or of another run, is that of no job
                with contextlib.suppress(ValueError, TypeError):
                    if (job := Job(**read_object(path))).run_id == run.run_id:
                        found[run.run_id] = job
    return found


def _record(root: Path, run: Run) -> Path:
    return job_folder(root) / run.experiment / run.scale / f"{run.run_id}.json"


def states(jobs: Iterable[Job]) -> dict[str, str]:
    """Job id to the scheduler's word (`PENDING`, `RUNNING`) for each of the jobs that have not ended.

    Raises OSError where the scheduler cannot be asked.
    """
    jobs = list(jobs)
    found = {job.job_id: "RUNNING" for job in jobs if job.cluster == "local" and _runs_here(job.job_id)}
    if any(job.cluster == "slurm" for job in jobs):
        # LOGNAME may name another user than the one that sbatch submits for
        command = ["squeue", "--noheader", "--array", "--format=%i|%T", "--user", str(os.getuid())]
        # a user's SQUEUE_STATES or SQUEUE_PARTITION would hide jobs, which would count as ended
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
        except subprocess.CalledProcessError as error:
            raise OSError(f"squeue: {' '.join(error.stderr.split()) or error}") from None
        except subprocess.SubprocessError as error:
            raise OSError(f"squeue: {error}") from None
        # some clusters print a line of their own first
        found |= dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    return found


def _runs_here(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def row_stamp(root: Path, run: Run) -> list[str] | None:
    """A value that changes whenever the rows of a run are replaced; None where there are none."""
    found = stamp(storage.result_path(root, run.experiment, run.scale, run.run_id))
    return None if found is None else list(found)


def new_ending(root: Path, run: Run, job: Job) -> Any:
    """The ending of the rows that were stored since the job was submitted; None where there are none."""
    if row_stamp(root, run) in (None, job.before):
        return None
    return endings.ending(storage.result_path(root, run.experiment, run.scale, run.run_id))
