"""`check`: holds a model, such as one of a plugin, against the laws that every model of the suite obeys."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from suite.commands.repository import Plugins, Set, repository_of


class Part(StrEnum):
    model = "model"


def check(
    context: typer.Context,
    part: Annotated[Part, typer.Argument(help="What to check.")],
    name: Annotated[str, typer.Argument(help="Its name, e.g. gla; see `list models`.")],
    plugins: Plugins = None,
    overrides: Set = None,
) -> None:
    """Check a model: causality, steps against the parallel form, state size, gradients. Exit code 1 if a law is broken.

    The networks are small, in float64 and on the CPU.
    """
    from rich.console import Console

    from suite.parsing import assignments, parse

    models = repository_of(context, plugins).models
    config = models.load(name)
    options = dict(assignments([text.removeprefix("model.") for text in overrides or ()], "--set"))
    parse(config, options, f"{part.value} {name}")

    from suite.laws import LAWS, build

    # options that do not go together are a fault of the caller's and break no law
    build(config, **options)
    console = Console(soft_wrap=True)
    broken = 0
    for law in LAWS:
        what = (law.__doc__ or law.__name__).splitlines()[0].rstrip(".")
        try:
            law(config, **options)
        except AssertionError as error:
            broken += 1
            console.print(f"broken  {what}:\n        {error}", style="red", markup=False, highlight=False)
        except Exception as error:
            broken += 1
            reason = f"{type(error).__name__}: {error}"
            console.print(f"raised  {what}:\n        {reason}", style="red", markup=False, highlight=False)
        else:
            console.print(f"ok      {what}", markup=False, highlight=False)
    if broken:
        console.print(f"{name} breaks {broken} of {len(LAWS)} laws", highlight=False)
        raise typer.Exit(1)
    console.print(f"{name} obeys all {len(LAWS)} laws", highlight=False)
