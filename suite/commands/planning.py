"""The runs that a command is about: options that choose them, and their resolution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from suite.commands.repository import Experiment, Repository, shown
from suite.parsing import seeds_in
from suite.runs import Run

Scale = Annotated[str | None, typer.Option("--scale", help="Protocol size declared by the grid; default: its first.")]
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
    overrides: Sequence[str] | None,
    seeds: str | None,
    data: Path | None,
    without_data: bool = False,
) -> tuple[Experiment, list[Run]]:
    """An experiment and its runs. ValueError for a grid or an argument that cannot work.

    without_data: plan runs whose data are not there, and scales that cannot run here, too.
    """
    from suite.grid import expand, refuse
    from suite.resolver import Resolver

    found = repository.experiment(experiment)
    if not without_data:
        refuse(found.config, scale, shown(found.path))
    folder = None if data is None else str(data)
    resolver = Resolver(repository.tasks, repository.models, repository.operators, folder, without_data=without_data)
    runs = expand(
        found.name,
        found.config,
        resolver,
        scale=scale,
        only=only or (),
        overrides=overrides or (),
        seeds=None if seeds is None else seeds_in(seeds, "--seeds"),
        where=shown(found.path),
    )
    return found, runs
