"""Device hours that runs will take, from the stored durations of runs like them."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from subquad.suite.identity import likeness
from subquad.suite.registry import counted
from subquad.suite.runs import Run
from subquad.suite.settings.grid import lookup
from subquad.suite.store import endings


def estimate(
    runs: Sequence[Run], files: Sequence[Path], skip: Callable[[str], None] | None = None, *, jobs: int | None = None
) -> list[str]:
    """Lines that say how long the runs will take, one for each kind of device among the stored rows of `files`.

    Where there are several, a first line says that each is an estimate of its own.

    jobs: runs at a time, for the wall time; None: it is not said.

    The estimate of a run is the median duration of stored runs with its settings and another seed, or else of stored
    runs of its scale, task and model. The duration of a run that shared its device with others counts by its share.

    skip: called with a sentence on each file and run that cannot be read or believed; None: SchemaError is raised.

    Runs whose budget is a time have a line of their own, which needs no stored runs.
    """
    budgets = [seconds for run in runs if (seconds := lookup(run.resolved, "train.budget.seconds"))]
    given = []
    if budgets:
        whole = _duration(sum(budgets))
        given = [f"the budget of {counted(len(budgets))} to do is {whole} in all, without evaluation and compilation"]
    return given + _from_stored(runs, files, skip, jobs)


def _from_stored(
    runs: Sequence[Run], files: Sequence[Path], skip: Callable[[str], None] | None, jobs: int | None
) -> list[str]:
    """The lines of `estimate` that stored durations give."""
    if not runs:
        return []
    stored: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for ending in endings.every_ending(files, skip):
        if ending.status != "ok" or ending.duration_s is None:
            continue
        device, _, shared = ending.device.partition(", ")
        sharing = re.match(r"(\d+) runs", shared)
        for key in ending.like:
            share = ending.duration_s / (int(sharing[1]) if sharing else 1)
            stored[device][key].append((share, ending.duration_s))
    if not stored:
        return []
    # a run with a budget of time is as long as that says, whatever other runs of its task and model took
    wanted = [
        likeness(run.scale, run.resolved)[: 1 if lookup(run.resolved, "train.budget.seconds") else None] for run in runs
    ]
    lines = []
    for device, durations in sorted(stored.items()):
        medians = {
            key: (statistics.median(share for share, _ in values), statistics.median(whole for _, whole in values))
            for key, values in durations.items()
        }
        found = [medians[near] for keys in wanted if (near := next((key for key in keys if key in medians), None))]
        if found:
            rest = f"; no estimate for {len(runs) - len(found)} more" if len(found) < len(runs) else ""
            count = counted(len(found))
            shares, wholes = (sum(part) for part in zip(*found, strict=True))
            # fewer runs at a time than those that were measured together take no longer each
            slow = jobs is not None and wholes / jobs > 1.05 * shares
            wall = f", at most {_duration(wholes / jobs)} with --jobs {jobs}" if jobs and slow else ""
            lines.append(f"about {_duration(shares)} of {device} for {count} to do{wall}{rest}")
    if len(lines) > 1:
        lines.insert(0, f"{len(lines)} estimates, each for one device and from the runs that it has done:")
    return lines


def _duration(seconds: float) -> str:
    """`20 seconds`, `3.5 minutes`, `0.4 hours`."""
    if seconds >= 360:
        return f"{seconds / 3600:.2g} hours"
    return f"{seconds / 60:.2g} minutes" if seconds >= 60 else f"{seconds:.2g} seconds"
