"""Made-up runs and grids, written and read through `suite.store.storage`."""

from __future__ import annotations

import json
from typing import Any

from subquad.reports.render import Report
from subquad.reports.render.judge import Cell
from subquad.suite.options import parse, read_yaml
from subquad.suite.settings.config import ExperimentConfig

GRID = """
title: two-layer models on the synthetic languages
source: {paper: h3, table: 2}
baseline:
  task: {name: induction-heads}
  model: {name: h3, d_model: 32}
  train: {epochs: 400, lr: 5.0e-4}
sweep:
  model.name: [s4d, h3]
  task:
    - {task.name: induction-heads}
    - {task.name: associative-recall, train.epochs: 200}
seeds: [0, 1, 2]
scales:
  paper: {}
  small: {train.epochs: 20}
table:
  rows: {S4D: {model.name: s4d}, H3: {model.name: h3}}
  columns: {IH: {task.name: induction-heads}, AR: {task.name: associative-recall}}
figure: {kind: seeds}
"""


EXPECTED = """row,column,value,unit,better,seeds,hardware,note,source
Random,IH,5.0,%,higher,20,,,paper Table 2
S4D,IH,35.6,%,higher,,,,paper Table 2
S4D,AR,86.0,%,higher,,,,paper Table 2
H3,IH,100.0,%,higher,,,,paper Table 2
H3,AR,99.8,%,higher,,,,paper Table 2
"""


CLAIMS = """claim,left,comparison,right,source
H3 solves associative recall,H3 | AR,>=,99,paper section 3.1
H3 beats S4D on both languages,H3 | *,>,S4D | *,paper section 3.1
"""


PROVENANCE = {
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "12.8",
    "python": "3.12.3",
    "precision": "fp32",
    "deterministic": False,
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "started_at": "2026-03-01T10:00:00+00:00",
    "duration_s": 60.0,
}


VALUES = read_yaml(GRID)


def grid(**changes: Any) -> ExperimentConfig:
    """The fixture's grid with top-level keys replaced."""
    return parse(ExperimentConfig, {**VALUES, **changes}, "grid.yaml")


def make_run(
    model: str = "h3",
    task: str = "associative-recall",
    seed: int = 0,
    test: float | None = 0.998,
    *,
    scale: str = "paper",
    status: str = "ok",
    valid: dict[int, float] | None = None,
    loss: dict[int, float] | None = None,
    slices: dict[str, float | None] | None = None,
    speed: list[float] | None = None,
    train: dict[str, Any] | None = None,
    stand_in: str = "",
    columns: dict[str, Any] | None = None,
    task_options: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """The rows of one run, as the runner writes them."""
    epochs = 20 if scale == "small" else 400 if task == "induction-heads" else 200
    config = {
        "task": {"name": task, "version": 1, "vocab_size": 20, **(task_options or {})},
        "model": {"name": model, "version": 1, "d_model": 32},
        "train": {"epochs": epochs, "lr": 5e-4, "keep": "last", **(train or {})},
        "seed": seed,
        "data": "generated",
    }
    text = json.dumps(config, sort_keys=True)
    shared = {
        **PROVENANCE,
        "run_id": f"{model}-{task}-{seed}-{abs(hash_of(text + scale)) % 10**6:06d}",
        "experiment": "demo/table2",
        "scale": scale,
        "task": task,
        "task_version": 1,
        "model": model,
        "model_version": 1,
        "seed": seed,
        "stand_in": stand_in,
        "split_policy": "paper",
        "config": text,
        "data_digest": "d",
        "split": "",
        "slice": "",
        "step": 100,
        "status": "ok",
        "error": "",
        **(columns or {}),
    }

    def row(metric: str, unit: str, value: float | None, **more: Any) -> dict[str, Any]:
        return {**shared, "metric": metric, "unit": unit, "value": value, **more}

    rows = [row("accuracy", "fraction", v, split="valid", step=s) for s, v in (valid or {}).items()]
    rows += [row("loss", "nats", v, split="valid", step=s) for s, v in (loss or {}).items()]
    for name, value in (slices or {}).items():
        rows.append(
            row("accuracy", "fraction", value, split="test", slice=name, status="ok" if value is not None else "oom")
        )
    if status == "ok":
        rows.append(row("accuracy", "fraction", test, split="test"))
        rows.append(row("num_parameters", "count", 74_000.0))
        if speed:
            rows.append(row("train_throughput", "tokens/s", sorted(speed)[len(speed) // 2], samples=speed))
    rows.append(row("run", "", None, status=status, error="" if status == "ok" else "loss is not finite"))
    return rows


def hash_of(text: str) -> int:
    """A hash that is the same in every process."""
    return sum((i + 1) * ord(c) for i, c in enumerate(text))


def cell(report: Report, row: str, column: str) -> Cell:
    return next(cell for cell in report.cells if (cell.row, cell.column) == (row, column))


def note(report: Report, start: str) -> str:
    return next((line for line in report.notes if line.startswith(start)), "")


def three(
    model: str = "h3", task: str = "associative-recall", values: tuple[float, ...] = (0.996, 0.998, 1.0), **kwargs
):
    """One run for each value, seeds 0, 1, ..."""
    return [make_run(model, task, seed, value, **kwargs) for seed, value in enumerate(values)]


def used(version: int, backend: str) -> dict[str, Any]:
    """The columns of a run that used one operator."""
    return {"operators": json.dumps({"lti_ssm": {"version": version, "backend": backend}})}


SELECT = {"best_of": ["train.lr"], "by": "accuracy", "split": "valid"}


def swept() -> ExperimentConfig:
    return grid(sweep={**VALUES["sweep"], "train.lr": [1e-3, 1e-4]}, select=SELECT)


LENGTHS = {
    "rows": {"H3": {"model.name": "h3"}},
    "columns": {f"len {n}": {"task.name": "associative-recall", "slice": f"length={n}"} for n in (64, 128)},
}
