"""Where every run of a grid stands, read from its rows, claims and checkpoints in one folder of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.runs import Run
from suite.store import storage
from suite.store.claims import Claim, find_claims
from suite.store.jobs import Job, find_jobs, states

ORDER = ("running", "queued", "ok", "diverged", "oom", "failed", "n/a", "interrupted", "to do", "no data")


@dataclass(frozen=True)
class Standing:
    """Where one run stands."""

    run: Run
    state: str
    """`running`, `queued` (as a job), the status of its stored rows, `interrupted` (it has a checkpoint), `to do`, or
    `no data`."""
    detail: str
    """Who carries it out and since when, or why it failed."""


def standings(runs: Sequence[Run], root: Path) -> list[Standing]:
    """Where the runs of one experiment stand, in their order."""
    claims = {(claim.scale, claim.run_id): claim for run in runs[:1] for claim in find_claims(root, run.experiment)}
    jobs = find_jobs(root, runs)
    try:
        words = states(jobs.values())
    except OSError:
        words = {job.job_id: "its scheduler cannot be asked here" for job in jobs.values()}
    paths = [storage.result_path(root, run.experiment, run.scale, run.run_id) for run in runs]
    return [
        _standing(run, root, ending, claims.get((run.scale, run.run_id)), jobs.get(run.run_id), words)
        for run, ending in zip(runs, storage.endings(paths), strict=True)
    ]


def _standing(
    run: Run, root: Path, ending: storage.Ending | None, claim: Claim | None, job: Job | None, words: dict[str, str]
) -> Standing:
    if run.is_planned_only:
        return Standing(run, "no data", "")
    # a stored run that is repeated has rows, and a claim or a job
    if claim is not None and claim.live:
        return Standing(run, "running", f"{claim.holder}, since {claim.since.removesuffix('+00:00')} UTC")
    if job is not None and job.job_id in words:
        return Standing(run, "queued", f"job {job.job_id}, {words[job.job_id].lower()}")
    if ending is not None:
        return Standing(run, ending.status, ending.error.partition("\n")[0])
    detail = "" if job is None else f"its job {job.job_id} has ended without rows"
    if storage.checkpoint_path(root, run.experiment, run.scale, run.run_id).exists():
        return Standing(run, "interrupted", detail or "continues from its checkpoint")
    return Standing(run, "to do", detail)


def summary(found: Sequence[Standing]) -> str:
    """`60 ok, 1 failed, 4 running, 7 to do`."""
    counts = Counter(standing.state for standing in found)
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
