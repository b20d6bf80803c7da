"""`profile`: shows where the time of a run's step goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.suite.commands.console import table_console
from subquad.suite.commands.planning import Data, Only, Scale, resolved_runs
from subquad.suite.commands.repository import Device, ExperimentName, Plugins, Sets, repository_of

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.suite.profiling import Share

LONGEST = 90
"""Characters of a kernel's name that are shown; those of templates in C++ have hundreds."""


def profile(
    context: typer.Context,
    experiment: ExperimentName,
    plugins: Plugins = None,
    scale: Scale = None,
    only: Only = None,
    overrides: Sets = None,
    device: Device = None,
    data: Data = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps whose mean is shown, after three warm-ups.")] = 10,
    top: Annotated[int, typer.Option(min=1, help="Kernels that are shown; the others are one line.")] = 20,
) -> None:
    """Show how the time of a training step, or of a timed call of a model, is divided among kernels. Nothing is stored.

    One table a run of the grid, with its first seed. On a GPU the times are those of its kernels, which a recorded
    step carries out one after the other; on a CPU those of torch's operations on the host.
    """
    repository = repository_of(context, plugins)
    _, runs = resolved_runs(repository, experiment, scale=scale, only=only, overrides=overrides, seeds=None, data=data)

    # the library that watches the device writes lines of its own; it reads this when torch is loaded
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    import torch

    from subquad.suite.display import Labels
    from subquad.suite.environment import pick_device
    from subquad.suite.profiling import shares
    from subquad.suite.runner import worker_of

    target = pick_device(device)
    first = [run for run in runs if run.seed == runs[0].seed]
    console, label = table_console(), Labels(first)
    for run in first:
        try:
            for part, step in worker_of(run)(run, target).steps():
                console.print(_table(f"{label(run)}, {part}", shares(step, target, steps), top))
        except torch.OutOfMemoryError:
            console.print(f"{label(run)}: out of memory on {target}", markup=False)
            raise typer.Exit(1) from None


def _table(title: str, found: Sequence[Share], top: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("kernel", title=Text(title), title_justify="left")
    for column in ("calls a step", "us a step", "%"):
        table.add_column(column, justify="right")
    total = sum(share.microseconds for share in found)

    def add(name: str, some: Sequence[Share]) -> None:
        calls, time = sum(share.calls for share in some), sum(share.microseconds for share in some)
        share = f"{100 * time / total:.1f}" if total else ""
        table.add_row(Text(name), f"{calls:,.1f}".removesuffix(".0"), f"{time:,.1f}", share)

    for share in found[:top]:
        add(share.name if len(share.name) <= LONGEST else f"{share.name[:LONGEST]}...", [share])
    if found[top:]:
        add(f"{len(found) - top} others", found[top:])
    table.add_section()
    add("all", found)
    return table
