"""Rows of made-up runs that are what their settings say, as readers demand it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from subquad.suite.identity import identity
from subquad.suite.metrics import unit_of
from subquad.suite.store import storage


def made(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], **columns: Any) -> list[dict[str, Any]]:
    """Rows of one run with these settings, with the columns that follow from them.

    columns: of all rows. The experiment is `toy`, the scale `paper` and the status `ok` where nothing else is given.
    """
    shared: dict[str, Any] = {"experiment": "toy", "scale": "paper", "status": "ok", "seed": settings.get("seed")}
    for section in ("task", "model"):
        if section in settings:
            part = settings[section]
            shared |= {section: part["name"], f"{section}_version": part.get("version")}
    shared |= {"run_id": identity(settings), "config": json.dumps(settings, sort_keys=True), **columns}
    return [{**shared, "unit": unit_of(row["metric"]), **row} for row in rows]


def store(
    root: Path, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any] | None = None, **columns: Any
) -> Path:
    """Writes the rows of one run below a folder of results, and returns their file."""
    whole = made(rows, settings or {}, **columns)
    path = storage.result_path(root, whole[0]["experiment"], whole[0]["scale"], whole[0]["run_id"])
    storage.write(path, whole)
    return path


def frame_of(*runs: Sequence[Mapping[str, Any]]) -> Any:
    """The rows of runs as a frame, as `storage.read` gives them, in the order of the ids of the runs."""
    rows = [row for run in sorted(runs, key=lambda run: str(run[0]["run_id"])) for row in run]
    return pa.Table.from_pylist([{"schema": storage.SCHEMA_VERSION, **row} for row in rows], storage.SCHEMA).to_pandas()
