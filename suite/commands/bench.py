"""`bench`: times the operators, compares two revisions, and checks or rewrites the budgets of compiled kernels."""

from __future__ import annotations

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subquad.suite.commands.console import table_console
from subquad.suite.commands.repository import LOCAL, Device, Plugins, Results, repository_of, shown
from subquad.suite.registry import Registry


class Shapes(StrEnum):
    quick = "quick"
    paper = "paper"
    all = "all"
    short = "short"


def bench(
    context: typer.Context,
    ops: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Operators; default: those of --plugin, or else all."),
    ] = None,
    shapes: Annotated[Shapes | None, typer.Option(help="Default: quick on a GPU, short on a CPU.")] = None,
    against: Annotated[
        str, typer.Option(help="torch or peers (timed beside ours), or a revision or checkout to compare with.")
    ] = "torch",
    compare: Annotated[
        str | None, typer.Option(metavar="REV", help="As --against REV, and exit with 1 where this tree is slower.")
    ] = None,
    arena: Annotated[
        bool,
        typer.Option(
            "--arena", help="Time ours beside every peer, as CUDA graphs, the fastest of three processes; resumable."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="With --arena: stop after so many minutes; the same command continues."),
    ] = None,
    plugins: Plugins = None,
    device: Device = None,
    results: Results = LOCAL,
    check_budgets: Annotated[
        bool,
        typer.Option(
            "--check-budgets", help="Compile the changed kernels of these operators; exit with 1 for one over budget."
        ),
    ] = False,
    update_budgets: Annotated[
        bool, typer.Option("--update-budgets", help="Compile every kernel of these operators and rewrite its budget.")
    ] = False,
) -> None:
    """Time the operators, compare two revisions, or compare compiled kernels with their budgets."""

    from subquad.suite.bench.base import HOME, base_of
    from subquad.suite.bench.cases import KINDS, SETS, cases, check_names

    repository = repository_of(context, plugins)
    operators = repository.operators
    targets = {name: entry.target for name, entry in operators.entries.items()}
    files = _plugin_files(operators)
    # somebody who names a plugin is interested in its operators
    names = check_names(ops or (list(files) if plugins else ()), operators)
    # a file or a pipe has no width of its own, and a cut number is worse than a long line
    console = table_console()
    if check_budgets or update_budgets:
        if compare or shapes or against != "torch" or arena or (check_budgets and update_budgets):
            raise ValueError("--check-budgets and --update-budgets time nothing and take only operators and --plugin")
        from subquad.suite.commands.budgets import check_all, update_all

        places = {name: (targets[name], files.get(name)) for name in names}
        options = "".join([*(f" {name}" for name in ops or ()), *(f" --plugin {name}" for name in plugins or ())])
        if update_budgets:
            update_all(places)
        elif not check_all(places, options):
            raise typer.Exit(1)
        return

    if minutes is not None and not arena:
        raise ValueError("bench --minutes: only --arena continues where it stopped; give both")
    if arena:
        if compare or against != "torch":
            raise ValueError("bench --arena times ours beside all peers; leave --against and --compare out")
        from subquad.suite.commands.arena import measure

        measure(repository, names, shapes, minutes, device, results, files, console)
        return

    import torch

    from subquad.suite.bench import show
    from subquad.suite.bench.measure import ceilings
    from subquad.suite.bench.run import Rows, compare_trees, time_cases
    from subquad.suite.environment import device_name, pick_device
    from subquad.suite.store.target import probe, writable

    target = pick_device(device)
    base = compare or (None if against in KINDS else against)
    if compare and against != "torch":
        raise ValueError(f"--compare {compare} and --against {against}: give one of them")
    chosen = shapes or (Shapes.quick if target.type == "cuda" else Shapes.short)
    kinds = ("ours",) if base else KINDS[against]
    workloads = {name: operators.load(name) for name in names}
    wanted = [case for work in workloads.values() for case in cases(work, SETS[chosen.value], kinds)]
    rows = Rows(results, chosen.value, target, [*names, against, compare or ""], files)
    with writable("--results", results):
        probe(rows.path.parent)
    console.print(f"{len(wanted)} cases on {device_name(target)}, torch {torch.__version__}", highlight=False)
    failed, compared = False, False
    try:
        if base:
            versions = {name: work.version for name, work in workloads.items()}
            with tempfile.TemporaryDirectory() as folder:
                tree = base_of(base, [files.get(name, HOME) for name in names], Path(folder))
                with show.Verdicts(console, wanted) as display:
                    for verdict in compare_trees(wanted, targets, target, tree, versions=versions):
                        rows.add_verdict(verdict, tree.commit, workloads[verdict.case.op].version)
                        display.add(verdict)
                        failed |= verdict.fails
                        compared |= verdict.word != "n/a"
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
    if compare and not compared:
        raise ValueError("neither revision can run any case here, so nothing was compared; the table has the reasons")
    if failed and (compare or not base):
        raise typer.Exit(1)


def _plugin_files(operators: Registry) -> dict[str, Path]:
    """The file of each operator that a plugin defines. ValueError for one whose workload has another name."""
    files = {}
    for name, entry in operators.entries.items():
        if entry.plugin:
            if (op := operators.load(name).op) != name:
                raise ValueError(f"OPERATORS of {entry.plugin}: {name!r} has a workload of op={op!r}; name both alike")
            files[name] = Path(sys.modules[entry.target.partition(":")[0]].__file__ or "").resolve()
    return files
