"""The state of every run of a grid, read from its rows, claims and checkpoints in one folder of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from subquad.suite.runner import UNNEEDED
from subquad.suite.runs import Run
from subquad.suite.settings.report_spec import Select
from subquad.suite.store import elsewhere, endings, storage
from subquad.suite.store.claims import Claim, find_claims
from subquad.suite.store.enough import Enough
from subquad.suite.store.jobs import Job, find_jobs, states
from subquad.suite.store.target import files_like, is_folder

ORDER = (
    "running",
    "queued",
    "ok",
    "diverged",
    "oom",
    "failed",
    "n/a",
    "interrupted",
    "damaged",
    "elsewhere",
    "to do",
    "unneeded",
    "no data",
)

UNSTORED = ("to do", "interrupted")
"""States of runs without rows that nobody carries out."""


@dataclass(frozen=True)
class Standing:
    """The state of one run."""

    run: Run
    state: str
    """`running`, `queued` (as a job), the status of its stored rows, `interrupted` (it has a checkpoint), `to do`,
    `elsewhere` (another experiment has stored rows that `run` takes), `unneeded` (a value before its own is good
    enough), `damaged` (its rows cannot be read or believed) or `no data`."""
    detail: str
    """Names the process that carries out the run and its start, or says why the run failed or is not needed."""


def standings(
    runs: Sequence[Run],
    root: Path,
    select: Select | None = None,
    skip: Callable[[str], None] | None = None,
    versions: elsewhere.Versions = dict,
) -> list[Standing]:
    """Returns the state of every run of one experiment, in the order of the runs.

    select: the selection of its report, which may say that a run is not needed.
    skip: called with a sentence on each file and run that cannot be read or believed, even of another grid; then the
        state of the run is `damaged`. None: SchemaError is raised.
    versions: gives today's version of every operator; rows of other experiments that used older ones are not taken.
    """
    enough = Enough(runs, root, {run.experiment: select for run in runs[:1]})
    claims = {(claim.scale, claim.run_id): claim for run in runs[:1] for claim in find_claims(root, run.experiment)}
    jobs = find_jobs(root, runs)
    try:
        words = states(jobs.values())
    except OSError:
        words = {job.job_id: "its scheduler cannot be asked here" for job in jobs.values()}
    stored = endings.endings_of(root, [(run.experiment, run.scale, run.run_id) for run in runs], skip)
    unstored = unstored_states(runs, root)
    found = [
        _standing(run, state, ending, claims.get((run.scale, run.run_id)), jobs.get(run.run_id), words)
        for run, state, ending in zip(runs, unstored, stored, strict=True)
    ]
    found = [_spared(standing, enough) if standing.state in UNSTORED else standing for standing in found]
    others = elsewhere.find([standing.run for standing in found if standing.state in UNSTORED], root, versions)
    return [
        Standing(standing.run, "elsewhere", f"stored in {others[standing.run.run_id].name}")
        if standing.state in UNSTORED and standing.run.run_id in others
        else standing
        for standing in found
    ]


def _spared(standing: Standing, enough: Enough) -> Standing:
    reason = enough.why_not(standing.run)
    return Standing(standing.run, UNNEEDED, reason) if reason else standing


def _standing(
    run: Run, unstored: str, ending: endings.Ending | None, claim: Claim | None, job: Job | None, words: dict[str, str]
) -> Standing:
    if run.is_planned_only:
        return Standing(run, unstored, "")
    # a stored run that is repeated has rows, and a claim or a job
    if claim is not None and claim.live:
        return Standing(run, "running", f"{claim.holder}, since {claim.since.removesuffix('+00:00')} UTC")
    if job is not None and job.job_id in words:
        return Standing(run, "queued", f"job {job.job_id}, {words[job.job_id].lower()}")
    if ending is not None:
        return Standing(run, ending.status, ending.error.partition("\n")[0])
    detail = "" if job is None else f"its job {job.job_id} has ended without rows"
    return Standing(run, unstored, detail or "continues from its checkpoint" * (unstored == "interrupted"))


def unstored_states(runs: Sequence[Run], root: Path) -> list[str]:
    """Returns where runs stand if they have no rows and no process carries them out.

    That is `no data`, `interrupted` or `to do`. Each folder is listed once, because a bucket answers slowly.
    """
    checkpoints = [storage.checkpoint_path(root, run.experiment, run.scale, run.run_id) for run in runs]
    folders = {path.parent for path in checkpoints}
    there = {path for folder in folders if is_folder(folder) for path in files_like(folder, "*.checkpoint")}
    return [
        "no data" if run.is_planned_only else "interrupted" if path in there else "to do"
        for run, path in zip(runs, checkpoints, strict=True)
    ]


def summary(found: Sequence[Standing]) -> str:
    """`60 ok, 1 failed, 4 running, 7 to do`."""
    counts = Counter(standing.state for standing in found)
    return ", ".join(f"{counts[state]} {state}" for state in ORDER if counts[state])
