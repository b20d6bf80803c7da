"""`bench`: times the operators, compares two revisions, or rewrites the budgets of the compiled kernels."""

from __future__ import annotations

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from suite.commands.repository import LOCAL, Device, Plugins, Results, repository_of, shown


class Shapes(StrEnum):
    quick = "quick"
    paper = "paper"
    all = "all"
    short = "short"


def bench(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Operators; default: all.")] = None,
    shapes: Annotated[Shapes | None, typer.Option(help="Default: quick on a GPU, short on a CPU.")] = None,
    against: Annotated[
        str, typer.Option(help="torch or peers (timed beside ours), or a revision or checkout to compare with.")
    ] = "torch",
    compare: Annotated[
        str | None, typer.Option(metavar="REV", help="As --against REV, and exit with 1 where this tree is slower.")
    ] = None,
    plugins: Plugins = None,
    device: Device = None,
    results: Results = LOCAL,
    update_budgets: Annotated[
        bool, typer.Option("--update-budgets", help="Compile every kernel and rewrite the file of budgets; no timing.")
    ] = False,
) -> None:
    """Time the operators, compare two revisions, or rewrite the budgets of the compiled kernels."""
    from rich.console import Console

    from suite.bench.cases import KINDS, SETS, cases, check_names

    repository = repository_of(context, plugins)
    operators = repository.operators
    targets = {name: entry.target for name, entry in operators.entries.items()}
    names = check_names(ops or (), operators)
    # a file or a pipe has no width of its own, and a cut number is worse than a long line
    console = Console() if sys.stdout.isatty() else Console(width=160)
    if update_budgets:
        if ops or compare or shapes or against != "torch":
            raise ValueError("--update-budgets compiles everything and takes no other option")
        _update_budgets(targets)
        return

    import torch

    from suite.bench import show
    from suite.bench.measure import ceilings
    from suite.bench.run import Rows, compare_trees, time_cases
    from suite.bench.worker import tree_of
    from suite.environment import device_name, pick_device

    target = pick_device(device)
    base = compare or (None if against in KINDS else against)
    if compare and against != "torch":
        raise ValueError(f"--compare {compare} and --against {against}: give one of them")
    chosen = shapes or (Shapes.quick if target.type == "cuda" else Shapes.short)
    kinds = ("ours",) if base else KINDS[against]
    workloads = {name: operators.load(name) for name in names}
    wanted = [case for work in workloads.values() for case in cases(work, SETS[chosen.value], kinds)]
    rows = Rows(results, chosen.value, target, [*names, against, compare or ""])
    console.print(f"{len(wanted)} cases on {device_name(target)}, torch {torch.__version__}", highlight=False)
    failed = False
    try:
        if base:
            with tempfile.TemporaryDirectory() as folder:
                tree, commit = tree_of(base, Path(folder))
                with show.Verdicts(console, wanted) as display:
                    for verdict in compare_trees(wanted, targets, target, tree):
                        rows.add_verdict(verdict, commit, workloads[verdict.case.op].version)
                        display.add(verdict)
                        failed |= verdict.fails
        else:
            limits = ceilings(target)
            rows.add_ceilings(limits)
            with show.Timings(console, wanted, limits) as timings:
                for timing in time_cases(wanted, operators.load, targets, target, limits, record=repository.recorder()):
                    rows.add_timing(timing, workloads[timing.case.op].version)
                    timings.add(timing)
                    failed |= timing.status == "failed"
    except KeyboardInterrupt:
        what = f"what was measured is in {shown(rows.path)}" if rows.path.exists() else "nothing was measured"
        console.print(f"interrupted; {what}", highlight=False)
        raise typer.Exit(130) from None
    console.print(f"\nrows in {shown(rows.path)}", highlight=False)
    if failed and (compare or not base):
        raise typer.Exit(1)


def _update_budgets(targets: dict[str, str]) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from suite.bench import budgets

    if budgets.triton_version() is None:
        raise ValueError("--update-budgets needs Triton, which compiles here without a GPU; pip install -e '.[triton]'")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("compiling")
        collection = budgets.collect(
            targets, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    print(budgets.update(collection))
