"""`bench --arena`: times our operators beside other projects' and continues where an earlier call stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from subquad.suite.commands.console import skipped
from subquad.suite.commands.repository import ARENA, KERNELS, Repository, shown


def measure(
    repository: Repository,
    names: Sequence[str],
    shapes: str | None,
    minutes: float | None,
    device: str | None,
    results: Path,
    files: Mapping[str, Path],
    console: Console,
) -> None:
    """Times the cases of these operators that have peers and that no row of the same run has yet.

    Comparisons that no stored row of this device and method has tried come first.

    minutes: time after which it stops; None: when all are done.
    """
    ends_at = None if minutes is None else time.monotonic() + 60 * minutes

    import torch

    from subquad.suite.bench.arena import METHOD, SCALE, competing, has_peers, in_order, one_for_every_peer
    from subquad.suite.bench.cases import SETS
    from subquad.suite.bench.measure import versions_in
    from subquad.suite.bench.run import Rows
    from subquad.suite.environment import device_name, pick_device
    from subquad.suite.store.target import probe, writable

    target = pick_device(device)
    operators = repository.operators
    workloads = {name: work for name in names if has_peers(work := operators.load(name))}
    if not workloads:
        raise ValueError(f"bench --arena: no other project has a kernel for {', '.join(names)} here; name another one")
    if shapes is None and target.type == "cuda":
        wanted = [case for work in workloads.values() for case in one_for_every_peer(work)]
    else:
        sets, on_gpu = SETS[shapes or "short"], target.type == "cuda"
        wanted = [case for work in workloads.values() for case in competing(work, sets, on_gpu=on_gpu)]
    every = [found for name in operators for found in operators.load(name).implementations]
    packages = {name: version for found in every for name, version in versions_in(found).items()}
    rows = Rows(
        results, SCALE, target, [f"method {METHOD}", *map(str, sorted(packages.items()))], files, continued=True
    )
    with writable("--results", results):
        probe(rows.path.parent)
    tried = _tried_before(repository, results, device_name(target))
    left = in_order(
        operators.load,
        [case for case in wanted if not rows.has(case)],
        lambda case: (case.op, case.implementation, case.slice) in tried,
    )
    earlier = f", {len(wanted) - len(left)} of them timed before" if len(left) < len(wanted) else ""
    said = f"{len(wanted)} cases{earlier}, on {device_name(target)}, torch {torch.__version__}"
    console.print(said, *(f"{name} {version}" for name, version in sorted(packages.items())), sep=", ", highlight=False)
    if left:
        count = _time(repository, left, target, rows, ends_at, console)
        if count < len(left):
            console.print(f"stopped with {len(left) - count} cases left; the same command continues", highlight=False)
    console.print(f"rows in {shown(rows.path)}; report arena shows them", highlight=False)


def _tried_before(repository: Repository, results: Path, device: str) -> set[tuple[str, str, str]]:
    """Operator, implementation and slice of the cases that stored rows of this device and method have tried."""
    from subquad.suite.bench.arena import METHOD
    from subquad.suite.bench.cases import is_not_installed
    from subquad.suite.store import storage

    paths = storage.files([results, repository.reference], KERNELS)
    columns = ["task", "model", "slice", "metric", "device", "error", "config"]
    found = storage.read([path for path in paths if path.parent.name == ARENA], columns, skip=skipped)
    found = found[(found["metric"] == "time") & (found["device"] == device)]
    return {
        (row["task"], row["model"], row["slice"])
        for row in found.to_dict("records")
        if json.loads(row["config"]).get("method") == METHOD and not is_not_installed(row["error"] or "")
    }


def _time(
    repository: Repository, left: Sequence[Any], target: Any, rows: Any, ends_at: float | None, console: Console
) -> int:
    """Times cases and writes their rows; the number of cases that were done before time was over."""
    import typer

    from subquad.suite.bench import show
    from subquad.suite.bench.arena import Arena
    from subquad.suite.bench.measure import ceilings

    operators, count = repository.operators, 0
    targets = {name: entry.target for name, entry in operators.entries.items()}
    limits = ceilings(target)
    if not rows.rows:
        rows.add_ceilings(limits)
    arena = Arena(targets, operators.load, target, limits, ends_at=ends_at)
    try:
        with arena, show.Timings(console, left, limits) as timings:
            for group in arena.time(left):
                for timing in group:
                    rows.add_timing(timing, operators.load(timing.case.op).version)
                    timings.add(timing)
                    count += 1
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues after {shown(rows.path)}", highlight=False)
        raise typer.Exit(130) from None
    return count
