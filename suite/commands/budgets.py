"""Checks and updates files of budgets, one after the other, for `bench --check-budgets` and `--update-budgets`.

The budgets of Subquad's operators are in `kernels/budgets.json`, those of a plugin's in `budgets.json` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from subquad.suite.bench import budgets
from subquad.suite.bench.budgets import FILE, UPDATE, Collection
from subquad.suite.environment import with_extra

Workloads = Mapping[str, tuple[str, Path | None]]
"""Maps an operator to the place of its workload and the file of its plugin (None for an operator of Subquad)."""


def check_all(workloads: Workloads, options: str) -> bool:
    """Compiles the kernels that changed since their budgets were written, prints violations; True where there are none.

    options: the operators and plugins as the user named them. ValueError where nothing can be checked.
    """
    good = True
    for path, targets in _files(workloads):
        update = UPDATE + options
        if (why := budgets.reason(path, update)) is not None:
            raise ValueError(f"nothing can be checked: {why}")
        collection = _collect(targets, budgets.digests(path))
        violations = budgets.check(collection, path, update)
        for violation in violations:
            print(violation)
        savings = budgets.savings(collection, path)
        for line in savings:
            print(f"{line}; {update} keeps it")
        launched = sum(map(len, collection.digests.values()))
        compiled = sum(map(len, collection.found.values()))
        known = f"{launched} kernels for {', '.join(collection.found)}, {launched - compiled} of them unchanged"
        print(
            f"{path.name}: {known}; {sum(map(len, collection.calls.values()))} calls; {len(violations)} violations"
            + (f"; to accept: {update}" if violations else "")
        )
        good &= not violations
    return good


def update_all(workloads: Workloads) -> None:
    """Compiles every kernel, rewrites the budgets and prints what changed. ValueError where that is impossible."""
    for path, targets in _files(workloads):
        collection = _collect(targets)
        try:
            print(budgets.update(collection, path))
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _files(workloads: Workloads) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each file of budgets and the places of its workloads."""
    if budgets.triton_version() is None:
        raise ValueError(f"budgets need Triton, which compiles here without a GPU; {with_extra('triton')}")
    places = {op: file.with_name(FILE.name) if file else FILE for op, (_, file) in workloads.items()}
    for path in dict.fromkeys(places.values()):
        yield path, {op: target for op, (target, _) in workloads.items() if places[op] == path}


def _collect(targets: Mapping[str, str], unchanged: budgets.Digests | None = None) -> Collection:
    """The kernels of operators. ValueError where there are none, because then nothing would be checked."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("compiling")
        collection = budgets.collect(
            targets,
            unchanged=unchanged,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if not collection.digests:
        raise ValueError(f"Triton can compile for no target here: {collection.unavailable}")
    if not any(collection.digests.values()) and not collection.failures:
        raise ValueError(
            f"{', '.join(targets)}: no kernel is launched, so there is nothing to check; budgets are those of "
            "implementations of kind 'ours' with cold_start=True"
        )
    return collection
