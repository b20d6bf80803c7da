"""The runs that a command is about: options that choose them, and their resolution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.suite.commands.repository import LOCAL, Experiment, Repository, shown
from subquad.suite.options import seeds_in
from subquad.suite.runs import Run

Scale = Annotated[str | None, typer.Option("--scale", help="Protocol (scale) of the grid; default: its first.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Keep runs with one of these values: model.name=gsa,gla or model.name=dss-*; repeatable."),
]
Seeds = Annotated[
    str | None,
    typer.Option(metavar="N|A,B", help="Use seeds 0 to N-1, or those of a list (3,7 or 3,), not the grid's."),
]
Data = Annotated[Path | None, typer.Option(help="Folder of data, for tasks that read one; default: the cache.")]


def resolved_runs(
    repository: Repository,
    experiment: str,
    *,
    scale: str | None,
    only: Sequence[str] | None,
    overrides: Sequence[str] | Mapping[str, Any] | None,
    seeds: str | None,
    data: Path | None,
    results: Path = LOCAL,
    without_data: bool = False,
) -> tuple[Experiment, list[Run]]:
    """An experiment and its runs. ValueError for a grid or an argument that cannot work.

    results: folder of results, where `train.init_from` finds the weights of runs.
    without_data: plan runs whose data are not there, and scales that cannot run here, too.
    """
    from subquad.suite.settings.grid import expand, refuse
    from subquad.suite.settings.resolver import Resolver

    found = repository.experiment(experiment)
    if not without_data:
        refuse(found.config, scale, shown(found.path))
    if data is not None and not data.exists():
        raise ValueError(f"--data {data}: there is no such file or folder")
    if data is not None and "task.data" in {str(text).partition("=")[0].strip() for text in overrides or ()}:
        raise ValueError(f"--data {data}: --set task.data names the data as well; leave one out")
    folder = None if data is None else str(data)
    resolver = Resolver(
        repository.tasks,
        repository.models,
        repository.operators,
        folder,
        without_data=without_data,
        roots=[results, repository.reference],
    )
    runs = expand(
        found.rows,
        found.config,
        resolver,
        scale=scale,
        only=only or (),
        overrides=overrides or (),
        seeds=None if seeds is None else seeds_in(seeds, "--seeds"),
        where=shown(found.path),
    )
    if data is not None and not any(hasattr(getattr(run, "task", None), "data") for run in runs):
        kept = " that --only keeps" if only else ""
        raise ValueError(f"--data {data}: no task of {found.name}{kept} reads data; leave --data out")
    return found, runs


def resolved_experiments(
    repository: Repository, experiments: Iterable[str], **choice: Any
) -> list[tuple[Experiment, list[Run]]]:
    """Several experiments and their runs, each experiment once; `choice` goes to `resolved_runs`.

    ValueError where two folders have one name, or where two experiments share a run: executors and their display know
    a run by its id, and a run is stored under one experiment.
    """
    names = list(experiments)
    for name in names[1:]:
        # a wrong name is known at once, while the runs of the first experiment may take seconds to resolve
        repository.experiment(name)
    found: dict[str, tuple[Experiment, list[Run]]] = {}
    for name in names:
        experiment, runs = resolved_runs(repository, name, **choice)
        known = found.setdefault(experiment.name, (experiment, runs))[0]
        if not known.path.samefile(experiment.path):
            raise ValueError(
                f"{shown(known.path)} and {shown(experiment.path)}: both are named {experiment.name!r}, and their rows "
                "would mix; rename one of the folders"
            )
    owners: dict[str, str] = {}
    for experiment, runs in found.values():
        for run in runs:
            # without its data a run has no id yet
            owner = experiment.name if run.is_planned_only else owners.setdefault(run.run_id, experiment.name)
            if owner != experiment.name:
                raise ValueError(
                    f"{owner} and {experiment.name} share the run {run.run_id}, and one call stores a run once; "
                    "call `run` once for each of the two"
                )
    return list(found.values())
