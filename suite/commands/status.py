"""`status`: where every run of a grid stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from subquad.suite.commands.console import skipped, table_console
from subquad.suite.commands.planning import Data, Only, Scale, Seeds, resolved_runs
from subquad.suite.commands.repository import LOCAL, ExperimentName, OwnResults, Plugins, Sets, repository_of
from subquad.suite.options import visible
from subquad.suite.registry import counted

if TYPE_CHECKING:
    from rich.console import Console

    from subquad.suite.store.status import Standing

STYLES = {"running": "green", "failed": "red", "damaged": "red", "diverged": "red", "oom": "red"}


def status(
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
    """Show which runs are done, running (where, since when), failed (why) or to do, and the time that is left."""

    from subquad.suite.display import Labels
    from subquad.suite.store import storage
    from subquad.suite.store.estimate import estimate
    from subquad.suite.store.status import standings

    repository = repository_of(context, plugins)
    (experiment, config, _), runs = resolved_runs(
        repository, experiment, scale=scale, only=only, overrides=overrides, seeds=seeds, data=data, results=results,
        without_data=True,
    )  # fmt: skip
    said: list[str] = []
    found = standings(runs, results, config.select, said.append, repository.versions)
    console = table_console()
    label = Labels(runs)
    for standing in found:
        if standing.state in ("unneeded", "elsewhere"):
            continue
        if standing.detail or standing.state not in ("ok", "to do"):
            line = f"{standing.state:11s}  {label(standing.run)}  {visible(standing.detail)}"
            style = STYLES.get(standing.state, "")
            console.print(line.rstrip(), style=style, highlight=False, markup=False, soft_wrap=True)
    for detail, count in Counter(standing.detail for standing in found if standing.state == "elsewhere").items():
        console.print(f"elsewhere    {counted(count)} {visible(detail)}", highlight=False, markup=False, soft_wrap=True)
    print_summary(console, experiment, results, found)
    # `run` repeats what failed and what could not run here; runs without data are in the plan of `--dry-run` too
    to_do = ("running", "queued", "interrupted", "to do", "no data", "failed", "n/a")
    left = [standing.run for standing in found if standing.state in to_do]
    lines = estimate(left, storage.files([results, repository.reference], experiment), said.append)
    if left and not lines and repository.unfetched:
        lines = [f"the time that is left is not known{repository.unfetched}"]
    for line in lines:
        console.print(visible(line), highlight=False, markup=False, soft_wrap=True)
    for reason in dict.fromkeys(said):
        if all(standing.detail != reason for standing in found):
            skipped(reason)


def print_summary(console: Console, experiment: str, results: Path, found: Sequence[Standing]) -> None:
    """Prints in one line how many runs of an experiment there are and where they stand."""
    from subquad.suite.store.status import summary

    count = counted(len(found))
    line = f"{experiment}, scale {found[0].run.scale}, in {results}: {count}, {summary(found)}"
    console.print(visible(line), highlight=False, markup=False, soft_wrap=True)
