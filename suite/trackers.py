"""Runs in Trackio, a viewer that keeps its data on this machine: while they train, and from stored rows.

The project is `subquad` unless TRACKIO_PROJECT names another one. A run has the id of ours as its name, its experiment
as its group, and every setting under its dotted key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from subquad.suite.settings.grid import iter_keys

Row = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The columns of a row, and the settings of its run by their dotted keys (`suite.store.rows.Selection.rows`)."""


def begin(run_id: str, experiment: str, resolved: Mapping[str, Any], *, resume: bool) -> Any:
    """Begins a run of Trackio. resume: continue the one of this name."""
    import trackio

    return trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", "subquad"),
        name=run_id,
        group=experiment,
        config=dict(iter_keys(resolved)),
        resume="allow" if resume else "never",
    )


def export(rows: Iterable[Row]) -> int:
    """Gives Trackio every value of stored rows, those of a run one after the other, and returns the number of runs.

    The name of a metric has its split and slice: `test/accuracy [length=64]`. Rows without a value are left out.
    """
    count = 0
    for run_id, found in groupby(rows, key=lambda row: row[0]["run_id"]):
        own = list(found)
        run = begin(run_id, own[0][0]["experiment"], own[0][1], resume=False)
        valued = [columns for columns, _ in own if columns["value"] is not None]
        for step, at_step in groupby(sorted(valued, key=_step), key=_step):
            run.log({_named(columns): columns["value"] for columns in at_step}, step=step)
        run.finish()
        count += 1
    return count


def _step(columns: Mapping[str, Any]) -> int:
    return columns["step"] or 0


def _named(columns: Mapping[str, Any]) -> str:
    name = "/".join(filter(None, (columns["split"], columns["metric"])))
    return f"{name} [{columns['slice']}]" if columns["slice"] else name
