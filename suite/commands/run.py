"""`run`: carries out the runs of a grid that are not stored yet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from suite.commands.planning import Data, Only, Scale, Seeds, resolved_runs
from suite.commands.repository import LOCAL, Device, ExperimentNames, Plugins, Results, Set, repository_of
from suite.parsing import seconds
from suite.runs import Run


def run(
    context: typer.Context,
    experiments: ExperimentNames,
    plugins: Plugins = None,
    scale: Scale = None,
    only: Only = None,
    overrides: Set = None,
    seeds: Seeds = None,
    device: Device = None,
    data: Data = None,
    results: Results = LOCAL,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Runs at a time; default: 1 on this machine, as many as fit on a cluster."),
    ] = None,
    executor: Annotated[
        str, typer.Option(help="What carries out the runs: local, or ray or slurm on a cluster (docs/grids.md).")
    ] = "local",
    executor_options: Annotated[
        list[str] | None, typer.Option("--executor-options", help="Options of the executor: address=auto,gpus=0.25.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(min=1, max=1024, help="CPU threads of each training run; another number gives other last digits."),
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and train nothing.")] = False,
    keep_weights: Annotated[
        bool, typer.Option("--keep-weights", help="Keep the weights of trained models, for `generate`.")
    ] = False,
    within: Annotated[
        str | None,
        typer.Option(help="Time after which current runs save and no other starts: 90s, 10m, 2h; then exit code 3."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Repeat runs that are already stored.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Repeat the stored runs that ended with an error, and no others.")
    ] = False,
) -> None:
    """Run named grids, task x model or operators; what is stored is skipped, what was interrupted continues."""
    from rich.console import Console

    from suite.executors.contract import LeftRunningError, Settings, choose

    within_s = None if within is None else seconds(within, "--within")
    if force and retry_failed:
        raise ValueError("--force --retry-failed: the first repeats all runs, the second some of them; give one")
    carry_out = choose(executor, executor_options or ())
    repository = repository_of(context, plugins)
    choice: dict[str, Any] = {"scale": scale, "only": only, "overrides": overrides, "seeds": seeds, "data": data}
    found = [resolved_runs(repository, name, **choice, without_data=dry_run) for name in dict.fromkeys(experiments)]
    runs = [run for _, part in found for run in part]
    timed = [experiment.name for experiment, _ in found if experiment.config.timed]
    if (jobs or 1) > 1 and timed:
        raise ValueError(
            f"--jobs {jobs}: {timed[0]} times operators, and runs side by side would disturb each other; leave it out"
        )
    settings = Settings(
        device=device,
        jobs=1 if timed else jobs,
        fresh=force or retry_failed,
        threads=threads,
        record=repository.recorder(),
        keep_weights=keep_weights,
        within_s=within_s,
    )
    place = carry_out.check(settings)

    from suite import storage
    from suite.estimate import estimate
    from suite.runner import FAILED, outdated, plan

    planned = plan(runs, [results], force=force, versions=repository.versions())
    if retry_failed:
        planned = [item for item in planned if item.stored in FAILED]
    todo = [item.run for item in planned if item.todo or retry_failed]
    console = Console()
    if (line := outdated(planned)) is not None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if dry_run:
        _print_plan([item.run for item in planned], [item.stored or "to do" for item in planned])
        console.print(f"{len(planned)} runs, {len(todo)} to do, on {place}; results in {results}", highlight=False)
        roots = [results, repository.reference]
        for line in estimate(todo, [file for experiment, _ in found for file in storage.files(roots, experiment.name)]):
            console.print(line, highlight=False, soft_wrap=True)
        for experiment, _ in found:
            config = experiment.config
            if reason := config.cannot_run.get(scale or next(iter(config.scales))):
                console.print(f"cannot run here: {reason}", highlight=False, markup=False, soft_wrap=True)
        return
    if retry_failed:
        console.print(f"{len(todo)} of {len(runs)} runs in {results} ended with an error", highlight=False)
    elif len(todo) < len(runs):
        console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are already stored in {results}", highlight=False)

    from suite.display import GridDisplay
    from suite.executors.local import OutOfTimeError
    from suite.target import probe

    try:
        for folder in {results / run.experiment / run.scale for run in todo} or {results}:
            probe(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"--results {results}: nothing can be written there ({reason}); name another folder or make room."
        ) from None

    with GridDisplay(console, len(todo)) as display:
        try:
            ended = carry_out(todo, results, display, settings)
        except OutOfTimeError:
            display.interrupted("the time is up")
            raise typer.Exit(3) from None
        except LeftRunningError as left:
            console.print(str(left), highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(left.exit_code) from None
        except KeyboardInterrupt:
            display.interrupted()
            raise typer.Exit(130) from None
    bad = [finished for finished in ended if finished.status in FAILED]
    if bad:
        console.print(f"{len(bad)} of {len(ended)} runs ended with an error; their rows say why (`show RUN_ID`)")
        raise typer.Exit(1)
    reports = "; ".join(f"python run_suite.py report {experiment.name}" for experiment, _ in found)
    console.print(f"done: {len(ended)} runs; now: {reports}", highlight=False, soft_wrap=True)


def _print_plan(runs: Sequence[Run], stored: Sequence[str]) -> None:
    """Prints every run on one line with the dotted keys in which the runs differ, then what all runs share."""
    from suite.grid import iter_keys

    if not runs:
        return
    flat = [{key: json.dumps(value) for key, value in iter_keys(item.resolved)} for item in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    varying = [key for key in keys if len({values.get(key, "") for values in flat}) > 1]
    for item, status, values in zip(runs, stored, flat, strict=True):
        changes = "  ".join(f"{key}={values[key]}" for key in varying if key in values)
        # the data are part of the identity
        print(f"{'-' * 16}  no data  {changes}" if item.is_planned_only else f"{item.run_id}  {status}  {changes}")
    print("\nshared by all runs:")
    for key in keys:
        if key not in varying:
            print(f"  {key} = {flat[0].get(key)}")
