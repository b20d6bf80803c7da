"""Runs as an array of Slurm jobs, submitted by submitit. One job carries out one run and holds its claim.

- A job that Slurm warns by SIGUSR2 (90 s before its time is up, or before it is preempted) saves a checkpoint between
  two steps, and is put back into Slurm's queue.
- After SIGTERM it saves and waits for what Slurm does: a preempted job is put back, a cancelled one ends.
- Jobs go on when the terminal is gone. The same command waits for them again and submits none twice; `status` shows
  them, and `collect` gives a row to a run whose job ended without one.
- A job whose run is not needed any more (`select.enough`) when it starts ends at once and removes its record.

All nodes need this checkout at the same path, and the folder of results.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from subquad.suite.environment import IMPORTED_FROM, pick_device
from subquad.suite.executors.contract import LeftRunningError, Settings
from subquad.suite.executors.local import StopSignals, run_in_sequence
from subquad.suite.executors.processes import StopFlag
from subquad.suite.executors.queue import Display, RunQueue
from subquad.suite.executors.workers import SILENCE_S
from subquad.suite.options import Config
from subquad.suite.runner import ENDED, UNNEEDED, Finished, store_failure
from subquad.suite.runs import Run
from subquad.suite.store.claims import Claims, claim_path, read_claim
from subquad.suite.store.endings import endings_of
from subquad.suite.store.enough import Enough
from subquad.suite.store.jobs import (
    LATE_S,
    Job,
    find_jobs,
    forget_job,
    job_folder,
    keep_job,
    new_ending,
    row_stamp,
    states,
)
from subquad.suite.store.target import is_remote

ARRAY_SIZE = 1000
"""Most jobs in an array; Slurm takes 1001 by default."""
WARNING_S = 90
"""Seconds before the end of its time at which a job is warned."""
GRACE_S = 300.0
"""Seconds that a job which has saved after SIGTERM waits for Slurm to end it."""
REQUEUES, REQUEUES_OF_TIMINGS = 1000, 3
"""Number of times that a job may run out of time. A timing has no checkpoint and begins anew."""


class Slurm(Config):
    """Runs as Slurm jobs. What is not among the options can be given to sbatch by its variables (SBATCH_ACCOUNT)."""

    partition: str | None = None
    minutes: int = Field(default=60, ge=1)
    """Time of a job, after which its run is saved and put back into the queue."""
    gpus: int | None = Field(default=None, ge=0, le=1)
    """GPUs of a run; None: 1 unless `--device cpu` is given."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Host memory of a job; None: the cluster's default."""
    wait: bool = True
    """Whether the command waits for the jobs."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local` starts the jobs at once as processes of this machine, to try things out."""

    def check(self, settings: Settings) -> str:
        if settings.device not in (None, "cpu", "cuda"):
            raise ValueError(f"--device {settings.device}: Slurm chooses the GPU of a job; expected cpu or cuda")
        if settings.within_s is not None:
            raise ValueError(
                "--within: jobs go on without this command; give their time by --executor-options minutes=60"
            )
        # Slurm warns up to a minute early, and a job that is warned as it starts would be put back again and again
        if self.cluster == "slurm" and 60 * self.minutes < WARNING_S + 60:
            raise ValueError(
                f"--executor-options minutes={self.minutes}: a job is saved {WARNING_S} s before its end, or a minute "
                "earlier, and would get nowhere; give 3 minutes or more"
            )
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise ValueError("--executor slurm: there is no sbatch here; call this on a login node of the cluster")
        return "Slurm" if self.cluster == "slurm" else "processes of this machine"

    def __call__(self, runs: Sequence[Run], root: Path, display: Display, settings: Settings) -> list[Finished]:
        if is_remote(root):
            raise ValueError(f"--results {root}: the records of Slurm jobs need a folder that the nodes share")
        root = root.resolve()
        jobs = find_jobs(root, runs)
        current = _states(jobs.values())
        jobs = {run_id: job for run_id, job in jobs.items() if job.job_id in current}
        new = [run for run in runs if run.run_id not in jobs]
        for start in range(0, len(new), ARRAY_SIZE):
            jobs |= self._submit(new[start : start + ARRAY_SIZE], root, settings)
        experiment = runs[0].experiment if runs else ""
        hint = f"`status {experiment}` shows them, the same command waits for them"
        if not self.wait:
            raise LeftRunningError(f"{len(new)} jobs submitted, {len(jobs) - len(new)} were there; {hint}", 0)
        flag = StopFlag()
        with StopSignals(flag, lambda: None, None):
            late_s = LATE_S if self.cluster == "slurm" else 2.0
            ended = _watch(runs, jobs, root, display, flag, settings.enough, late_s=late_s)
        if len(ended) < len(runs):
            raise LeftRunningError(f"{len(runs) - len(ended)} jobs go on; {hint}", 130)
        return ended

    def _submit(self, runs: Sequence[Run], root: Path, settings: Settings) -> dict[str, Job]:
        import submitit

        folder = job_folder(root)
        # the jobs unpickle what stands there, so nobody else may write into it
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        requeues = REQUEUES_OF_TIMINGS if runs[0].takes_all_threads else REQUEUES
        executor = submitit.AutoExecutor(folder, cluster=self.cluster, slurm_max_num_timeout=requeues)
        gpus = self.gpus if self.gpus is not None else int(settings.device != "cpu")
        slurm: dict[str, Any] = {
            "partition": self.partition,
            "array_parallelism": settings.jobs or len(runs),
            "signal_delay_s": WARNING_S,
            "setup": [f"export PYTHONPATH={shlex.quote(str(IMPORTED_FROM))}${{PYTHONPATH:+:$PYTHONPATH}}"],
        }
        executor.update_parameters(
            name=runs[0].experiment.replace("/", "-"),
            timeout_min=self.minutes,
            cpus_per_task=settings.threads,
            **({"gpus_per_node": gpus} if gpus else {}),
            **({} if self.memory_gb is None else {"mem_gb": self.memory_gb}),
            **{f"slurm_{name}": value for name, value in slurm.items() if value is not None},
        )
        try:
            with executor.batch():
                submitted = [executor.submit(_Job.of(run, root, settings)) for run in runs]
        except submitit.core.utils.FailedJobError as error:
            raise ValueError(f"--executor slurm: sbatch takes no array of {len(runs)} jobs ({_line(error)})") from None
        jobs = {}
        for run, job in zip(runs, submitted, strict=True):
            log = str(job.paths.stderr)
            jobs[run.run_id] = Job(run.run_id, job.job_id, self.cluster, log, row_stamp(root, run))
            keep_job(root, run, jobs[run.run_id])
        return jobs


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


@dataclass(frozen=True)
class _Job:
    """Carries out the one run of a job as the local executor would."""

    run: Run
    root: Path
    device: str | None
    options: dict[str, Any]
    repeat: bool
    """Whether rows that are there already are replaced."""
    enough: Enough | None
    """Tells whether the run is still needed; None: it is."""

    @classmethod
    def of(cls, run: Run, root: Path, settings: Settings) -> _Job:
        enough = None if settings.enough is None else settings.enough.of(run, root)
        return cls(run, root, settings.device, settings.of_each_run, settings.repeat, enough)

    def __call__(self) -> None:
        import submitit
        from rich.console import Console

        from subquad.suite.display import GridDisplay

        stop, warned = threading.Event(), threading.Event()

        def heed(number: int, frame: object) -> None:
            del frame
            if number == signal.SIGUSR2:
                warned.set()
            stop.set()

        before = {number: signal.signal(number, heed) for number in (signal.SIGUSR2, signal.SIGTERM)}
        place = f"job {submitit.JobEnvironment().job_id}"
        with Claims(self.root, silence_s=SILENCE_S) as claims, GridDisplay(Console(), 1) as display:
            queue = RunQueue([self.run], self.root, claims, display, repeat=self.repeat, enough=self.enough)
            run_in_sequence(queue, self.root, pick_device(self.device), stop, self.options, place=place)
        if queue.ended:
            if queue.ended[0].status == UNNEEDED:
                forget_job(self.root, self.run)
            return
        warned.wait(GRACE_S)
        for number, handler in before.items():
            signal.signal(number, handler)
        if warned.is_set():
            # submitit's handler puts the job back into the queue and ends this process
            signal.raise_signal(signal.SIGUSR2)

    def checkpoint(self) -> Any:
        """Returns what the job carries out when it starts again: the same run, from its checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, options={**self.options, "fresh": False}))


def _watch(
    runs: Sequence[Run],
    jobs: dict[str, Job],
    root: Path,
    display: Display,
    stop: StopFlag,
    enough: Enough | None,
    *,
    late_s: float,
) -> list[Finished]:
    """Shows the runs of jobs until all have ended or are not needed, or `stop` is set. Returns how they ended."""
    left = {run.run_id: run for run in runs}
    shown: set[str] = set()
    gone_since: dict[str, float] = {}
    ended: list[Finished] = []
    current: Container[str] = {job.job_id for job in jobs.values()}
    for look in itertools.count():
        if not left or stop.is_set():
            return ended
        if look % 5 == 0:
            # a busy scheduler does not always answer; what it said before stands until it does
            with contextlib.suppress(OSError):
                current = states([jobs[run_id] for run_id in left])
        for run in list(left.values()):
            claim = read_claim(claim_path(root, run.experiment, run.scale, run.run_id))
            is_running = claim is not None and claim.live
            finished = _ending(run, jobs[run.run_id], root)
            if finished is None and not is_running and (reason := enough.why_not(run) if enough else ""):
                finished = Finished(run, UNNEEDED, reason, 0.0, "", stored=False)
            if finished is None and not is_running and jobs[run.run_id].job_id not in current:
                since = gone_since.setdefault(run.run_id, time.monotonic())
                if time.monotonic() - since > late_s:
                    finished = _lost(run, jobs[run.run_id], root)
            if finished is not None:
                del left[run.run_id]
                forget_job(root, run)
                ended.append(finished)
                display.finished(finished)
            elif is_running and run.run_id not in shown:
                shown.add(run.run_id)
                display.started(run)
        stop.wait(1.0)
    raise AssertionError("not reached")


def _ending(run: Run, job: Job, root: Path) -> Finished | None:
    """Returns how the run of a job ended; None if it has not."""
    ending = new_ending(root, run, job)
    return None if ending is None else Finished(run, ending.status, ending.error, 0.0, f"job {job.job_id}")


def _lost(run: Run, job: Job, root: Path) -> Finished | None:
    """Stores a run whose job ended without rows as failed, if it has no rows of an earlier end. Its checkpoint stays.

    None: another process carries the run out.
    """
    reason = f"its job {job.job_id} ended without rows; log: {job.log}"
    # whoever holds the claim may be about to write rows
    with Claims(root) as claims:
        if claims.take(run) is not None:
            return None
        if finished := _ending(run, job, root):
            return finished
        (before,) = endings_of(root, [(run.experiment, run.scale, run.run_id)])
        if before is not None and before.status in ENDED:
            return Finished(run, "failed", f"{reason}; the rows that were stored stay", 0.0, "", stored=False)
        return store_failure(run, root, torch.device("cpu"), reason)


def collect(runs: Sequence[Run], root: Path, *, late_s: float = LATE_S) -> list[Finished]:
    """Gives a row `failed` to every run whose job ended without rows, and returns how the runs of ended jobs ended.

    ValueError where the scheduler cannot be asked, or where jobs wrote their rows into another folder.
    """
    root = root.resolve()
    jobs = find_jobs(root, runs)

    def ended() -> list[Run]:
        current = _states(jobs.values())
        return [run for run in runs if run.run_id in jobs and jobs[run.run_id].job_id not in current]

    over = ended()
    deadline = time.monotonic() + late_s
    while any(_ending(run, jobs[run.run_id], root) is None for run in over) and time.monotonic() < deadline:
        time.sleep(0.5)
    for run in over:
        # a job writes into the folder that it was submitted for, whatever its name is now
        folder = Path(jobs[run.run_id].log).parent.parent
        away = folder.is_absolute() and folder != root and _ending(run, jobs[run.run_id], root) is None
        if away and _ending(run, jobs[run.run_id], folder):
            raise ValueError(f"{root}: this folder was moved, and jobs wrote their rows into {folder}; copy them here")
    found = []
    # a job that was put back into the queue may have been missing for a moment
    for run in ended() if over else ():
        job = jobs[run.run_id]
        if finished := _ending(run, job, root) or _lost(run, job, root):
            found.append(finished)
            forget_job(root, run)
    return found


def _states(jobs: Iterable[Job]) -> dict[str, str]:
    """`states`, and ValueError where the scheduler cannot be asked."""
    try:
        return states(jobs)
    except OSError as error:
        raise ValueError(f"the scheduler cannot be asked ({error}); try again, on a login node") from None
