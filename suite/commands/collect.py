"""`collect`: gives rows to the runs whose jobs ended without any."""

from __future__ import annotations

import typer

from subquad.suite.commands.console import skipped, table_console
from subquad.suite.commands.planning import Data, Only, Scale, Seeds, resolved_runs
from subquad.suite.commands.repository import LOCAL, ExperimentName, OwnResults, Plugins, Sets, repository_of
from subquad.suite.commands.status import print_summary


def collect(
    context: typer.Context,
    experiment: ExperimentName,
    plugins: Plugins = None,
    scale: Scale = None,
    only: Only = None,
    overrides: Sets = None,
    seeds: Seeds = None,
    data: Data = None,
    results: OwnResults = LOCAL,
) -> None:
    """For every run whose Slurm job ended without a row, store a row that says that the run failed."""

    from subquad.suite.display import GridDisplay
    from subquad.suite.executors.slurm import collect as collect_jobs
    from subquad.suite.store.status import standings

    repository = repository_of(context, plugins)
    (experiment, config, _), runs = resolved_runs(
        repository, experiment, scale=scale, only=only, overrides=overrides, seeds=seeds, data=data, results=results
    )
    console = table_console()
    ended = collect_jobs(runs, results)
    display = GridDisplay(console, len(ended), runs=runs)
    for finished in ended:
        display.finished(finished)
    found = standings(runs, results, config.select, skipped, repository.versions)
    print_summary(console, experiment, results, found)
