"""`results`: checks stored rows, and fetches the committed ones of an installation."""

from __future__ import annotations

from typing import Annotated

import typer

from subquad.suite.commands.repository import LOCAL, existing, repository_of, shown
from subquad.suite.options import visible
from subquad.suite.store.target import is_folder, is_remote, target, writable

results_app = typer.Typer(
    help="Check stored rows, and fetch the committed ones.", no_args_is_help=True, pretty_exceptions_enable=False
)


@results_app.callback()
def _results() -> None:
    """Check stored rows, and fetch the committed ones."""


@results_app.command("verify")
def verify(
    context: typer.Context,
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="Folder of results; default: yours and the committed ones.")
    ] = None,
    quarantine: Annotated[
        bool,
        typer.Option("--quarantine", help="Move bad files of one run to FOLDER.quarantine. Parts are only listed."),
    ] = False,
) -> None:
    """Read all rows of FOLDER, and name each file and run that cannot be believed, with the reason.

    A number must be one that its metric can have, JSON must be that of a run, a run must be in the folder of its
    experiment and scale, and its id must be the hash of its settings. Exits with 1 where something is wrong.
    """
    from subquad.suite.store.verify import quarantine as put_aside
    from subquad.suite.store.verify import verify as verified
    from subquad.suite.store.verify import why_not_moved

    repository = repository_of(context)
    reference = repository.reference
    if folder is None:
        if not is_folder(LOCAL):
            repository.require_reference("results verify")
        roots = [root for root in (LOCAL, reference) if root.is_dir()]
    else:
        roots = [existing(target(folder), f"results verify {folder}")]
    if quarantine and any(map(is_remote, roots)):
        raise ValueError(f"--quarantine {folder}: files are moved on this machine only; copy the folder first")
    is_good = True
    for root in roots:
        found = verified(root)
        if folder is not None and not found.num_files:
            raise ValueError(
                f"results verify {folder}: no rows below it; `run EXPERIMENT --results {folder}` makes some"
            )
        for _, sentence in found.problems:
            print(visible(sentence))
        is_good &= not found.problems
        count = f"{found.num_files} files, {found.num_runs} runs and {found.num_rows} rows checked"
        again = f", {found.num_again} runs twice with the same rows" * bool(found.num_again)
        print(f"{visible(shown(root))}: {count}{again}, {len(found.problems) or 'no'} {_problems(len(found.problems))}")
        if quarantine:
            if root.resolve() == reference.resolve():
                what = "git" if repository.pull is None else "`results pull --force`"
                print(f"committed rows are not moved; {what} brings back what was committed")
                continue
            with writable("--quarantine", root):
                for path, place in put_aside(root, (path for path, _ in found.problems)):
                    print(f"moved {visible(shown(path))} to {visible(shown(place))}")
            for path in dict.fromkeys(path for path, _ in found.problems):
                if reason := why_not_moved(path):
                    print(f"not moved, because {reason}: {visible(shown(path))}")
    if not is_good:
        raise typer.Exit(1)


@results_app.command("pull")
def pull(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Option("--from", metavar="FILE_OR_URL", help="The archive of rows, if you have it or a mirror of it."),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Download and unpack it again.")] = False,
) -> None:
    """Fetch the committed rows of the installed version into the cache (`data where`), and check their digest."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    repository = repository_of(context)
    if repository.pull is None:
        print(f"nothing to fetch: this is a checkout, which has them in {visible(shown(repository.reference))}")
        return
    console = Console(stderr=True)
    bars = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*bars, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("committed rows", total=None)

        def watch(done: int, total: int | None) -> None:
            progress.update(bar, completed=done, total=total)

        repository.pull(source, force=force, progress=watch)
    where = visible(shown(repository.reference))
    print(f"the committed rows are in {where}; `report`, `status` and others find them there")


def _problems(count: int) -> str:
    return "problem" if count == 1 else "problems"
