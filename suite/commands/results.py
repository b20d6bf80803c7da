"""`results`: checks stored rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from subquad.suite.commands.repository import LOCAL, existing, repository_of, shown
from subquad.suite.options import visible
from subquad.suite.store.target import is_remote, target, writable

results_app = typer.Typer(help="Check stored rows.", no_args_is_help=True, pretty_exceptions_enable=False)


@results_app.callback()
def _results() -> None:
    """Check stored rows."""


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

    reference = repository_of(context).reference
    if folder is None:
        roots = [root for root in (LOCAL, reference) if root.is_dir()]
    else:
        roots = [existing(target(folder), f"results verify {folder}")]
    if quarantine and any(map(is_remote, roots)):
        raise ValueError(f"--quarantine {folder}: files are moved on this machine only; copy the folder first")
    is_good = True
    for root in roots:
        found = verified(root)
        for _, sentence in found.problems:
            print(visible(sentence))
        is_good &= not found.problems
        count = f"{found.num_files} files, {found.num_runs} runs and {found.num_rows} rows checked"
        again = f", {found.num_again} runs twice with the same rows" * bool(found.num_again)
        print(f"{visible(shown(root))}: {count}{again}, {len(found.problems) or 'no'} {_problems(len(found.problems))}")
        if quarantine:
            if root.resolve() == reference.resolve():
                print("committed rows are not moved; git brings back what was committed")
                continue
            with writable("--quarantine", root):
                for path, place in put_aside(root, (path for path, _ in found.problems)):
                    print(f"moved {visible(shown(path))} to {visible(shown(place))}")
            for path in dict.fromkeys(path for path, _ in found.problems if _stays(path)):
                print(f"not moved, because a part may have good runs, too: {visible(shown(path))}")
    if not is_good:
        raise typer.Exit(1)


def _problems(count: int) -> str:
    return "problem" if count == 1 else "problems"


def _stays(path: Path) -> bool:
    from subquad.suite.store.storage import is_part

    return is_part(path)
