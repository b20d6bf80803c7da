"""`publish`: puts the runs of a folder of results into parts, which are committed."""

from __future__ import annotations

from typing import Annotated

import typer

from subquad.suite.commands.repository import existing, repository_of, shown
from subquad.suite.registry import counted, few
from subquad.suite.store.target import target, writable


def publish(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="FROM", help="Folder of results whose runs are published.")],
    results: Annotated[
        str | None, typer.Option("--results", help="Folder that gets the parts; default: the committed results.")
    ] = None,
) -> None:
    """Write the runs of FROM into one immutable part for each experiment and scale, without those that are there.

    FROM keeps its files. Nothing is written where a file is damaged, or a run has not ended or is there with other
    rows.
    """
    from subquad.suite.store import parts

    folder = existing(target(source), f"publish {source}")
    repository = repository_of(context)
    if results is None and repository.pull is not None:
        raise ValueError(f"publish {source}: an installation has no folder to commit; name one with --results")
    place = repository.reference if results is None else target(results)
    if folder.resolve() == place.resolve():
        raise ValueError(f"publish {source}: the runs of a folder cannot be published into itself; name another one")
    found, there = parts.unpublished(folder, place)
    if not found and not there:
        raise ValueError(f"publish {source}: it has no runs; name a folder with the files that `run` has written")
    for part in found:
        if results is None and [place / name for name in part.experiments] != [part.folder]:
            names = few(part.experiments)
            raise ValueError(
                f"publish {source}: rows of {names} would be in {shown(part.folder)}; name the folder of results "
                "above, or with --results the folder that gets them"
            )
    with writable("--results", place):
        for part in found:
            path = parts.write(part)
            print(f"{counted(len(part.run_ids))}, {part.table.num_rows} rows: {shown(path)}")
    if there:
        print(f"{counted(there)} were there already")
