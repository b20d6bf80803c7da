"""`report`: renders stored rows as the paper's table and figure."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from suite.commands.repository import KERNELS, LOCAL, ExperimentName, StoredResults, repository_of, shown
from suite.registry import nearest


class Format(StrEnum):
    terminal = "terminal"
    md = "md"
    latex = "latex"
    png = "png"
    html = "html"


def report(
    context: typer.Context,
    experiment: ExperimentName,
    format: Annotated[
        Format, typer.Option(help="terminal, md and latex print; png and html write a file.")
    ] = Format.terminal,
    scale: Annotated[str | None, typer.Option(help="Show this scale; default: paper if it has rows.")] = None,
    results: StoredResults = None,
    out: Annotated[Path | None, typer.Option(help="File to write; png also writes an SVG beside it.")] = None,
) -> None:
    """Render an experiment (paper's number, ours, difference, seeds, verdict, figure), or the history of `kernels`."""
    from suite import storage

    repository = repository_of(context)
    # rows of the two folders are never mixed: the user's own rows, or else the committed ones
    paths = next((found for root in repository.roots(results) if (found := storage.files([root], experiment))), [])
    rendered: Any
    if experiment == KERNELS:
        rendering = repository.rendering()
        rendered = rendering.history(storage.read([path for path in paths if scale in (None, path.parent.name)]))
    else:
        config, path = repository.experiment(experiment)
        if scale is not None and scale not in config.scales:
            raise ValueError(
                f"unknown scale {scale!r}{nearest(scale, config.scales)}; there are: {', '.join(config.scales)}"
            )
        rendering = repository.rendering()
        rendered = rendering.build(config, path.parent, storage.read(paths), scale=scale)
    if out is None and format in (Format.png, Format.html):
        out = (results or LOCAL) / experiment / f"{'figure' if format is Format.png else 'report'}.{format}"
    made = rendering.render(rendered, format.value, out)
    print(f"wrote {shown(made)}" if isinstance(made, Path) else made)
