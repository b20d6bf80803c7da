"""Stored timings of the operators: every case of every run, oldest first."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from subquad.reports.render.floors import with_floors
from subquad.suite.bench.cases import SETS
from subquad.suite.store.documents import verdict_in
from subquad.suite.store.storage import TEXTS


@dataclass(frozen=True)
class Point:
    """One measured case of one run."""

    op: str
    """Name of the operator."""
    case: str
    """`B8 T2048 D2048 W4 bfloat16`."""
    direction: str
    implementation: str
    device: str
    commit: str
    started_at: str
    run_id: str
    samples: tuple[float, ...]
    value: float | None
    status: str
    error: str
    others: dict[str, float]
    """The metrics `floor_time`, `peak_extra_memory` and `cold_start` of the same case and run."""
    setting: dict[str, str]
    """Shapes, versions of torch and Triton, and threads of the run, by name."""
    compared: dict[str, Any]
    """`ratio`, `low`, `high`, `noise`, `base` and `verdict` of `bench --compare`, if it measured this point."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.device, self.op, self.case, self.direction, self.implementation

    @property
    def share_of_floor(self) -> float | None:
        """The floor over the median time in percent, or None where either was not measured."""
        floor = self.others.get("floor_time")
        return None if floor is None or not self.value else 100 * floor / self.value

    @property
    def quartiles(self) -> tuple[float, float]:
        """The quartiles of the samples, between which half of them lie; for a single sample, twice its value."""
        assert self.value is not None
        if len(self.samples) < 2:
            return self.value, self.value
        low, _, high = statistics.quantiles(self.samples, n=4)
        return low, high


def points_of(frame: pd.DataFrame) -> list[Point]:
    """The measured cases of all runs of `bench` for the sets of shapes that it offers, oldest first."""
    return sorted(_points(shown_rows(frame)), key=lambda point: point.started_at)


def shown_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the sets of shapes that `bench` offers, with an empty text where there is none."""
    # a copy, because other readers have the frame, too
    return with_floors(frame[frame["scale"].isin(SETS)].fillna({name: "" for name in TEXTS if name in frame}))


def _points(frame: pd.DataFrame) -> Iterator[Point]:
    columns = ["run_id", "task", "model", "slice", "device", "commit"]
    others: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in frame[frame["metric"].isin(["floor_time", "peak_extra_memory", "cold_start"])].to_dict("records"):
        others.setdefault(tuple(row[name] for name in columns), {})[row["metric"]] = row["value"]
    compared = {}
    for row in frame[(frame["metric"] == "ratio") & frame["value"].notna()].to_dict("records"):
        compared[tuple(row[name] for name in columns)] = {**verdict_in(row["config"]), "ratio": row["value"]}
    for row in frame[frame["metric"] == "time"].to_dict("records"):
        case, direction = case_of(row["slice"])
        yield Point(
            op=row["task"],
            case=case,
            direction=direction,
            implementation=row["model"],
            device=row["device"],
            commit=row["commit"] or "unknown",
            started_at=row["started_at"],
            run_id=row["run_id"],
            samples=tuple(row["samples"]) if row["samples"] is not None else (),
            value=None if pd.isna(row["value"]) else float(row["value"]),
            status=row["status"],
            error=row["error"],
            others=others.get(tuple(row[name] for name in columns), {}),
            setting={"shapes": row["scale"], **{name: row[name] for name in ("torch", "triton")}, **_threads(row)},
            compared=compared.get(tuple(row[name] for name in columns), {}),
        )


def _threads(row: Mapping[Any, Any]) -> dict[str, str]:
    """Threads of the host, which rows of 2026-11-23 and before do not have."""
    count = row.get("threads")
    return {"threads": "unknown" if pd.isna(count) else f"{count:.0f}"}


def case_of(slice: str) -> tuple[str, str]:
    """`B=8,T=64,decay=key,dtype=bfloat16,pass=forward` as ("B8 T64 key bfloat16", "forward")."""
    pairs = dict(part.split("=", 1) for part in slice.split(","))
    direction = pairs.pop("pass")
    return " ".join(f"{key}{value}" if value.isdigit() else value for key, value in pairs.items()), direction
