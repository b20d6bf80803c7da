"""The measurements that docs/grids.md quotes are those of the stored rows."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

import pytest

from subquad.suite.store import storage

HOME = Path(__file__).resolve().parents[2]
PROBES = HOME / "results" / "reference" / "probes"
PAGE = (HOME / "docs" / "grids.md").read_text()


def runs(folder):
    """The rows of every run of a probe."""
    found = {}
    for table in storage.tables(storage.files_below(PROBES / folder)):
        for row in table.to_pylist():
            found.setdefault(row["run_id"], []).append(row)
    return list(found.values())


def value(rows, metric, **where):
    (found,) = {row["value"] for row in rows if row["metric"] == metric and where.items() <= row.items()}
    return found


def speeds(folder, model):
    return [value(rows, "train_steps") for rows in runs(folder) if rows[0]["model"] == model]


def line(name):
    """The numbers of a line of a table."""
    (cells,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    return [float(cell.replace(",", "")) for cell in cells.split("|")]


@pytest.mark.parametrize("model", ["gla", "attention", "mamba"])
def test_speeds_of_runs_that_share_a_gpu(model):
    (alone,), (stacked,), eight = (speeds(f"packing/{how}", model) for how in ("alone", "stacked", "eight"))
    assert len(eight) == 8
    together, as_eight = 8 * median(eight), 8 * stacked
    expected = [alone, together, together / alone, as_eight, as_eight / alone]
    assert line(model) == pytest.approx(expected, rel=0.004)


def test_time_of_64_runs_on_one_gpu_and_on_two():
    quoted = re.search(r"take ([\d.]+) s on one H200 and ([\d.]+) s on two", PAGE)
    assert quoted is not None
    for gpus, seconds in zip(("one", "two"), quoted.groups(), strict=True):
        first = [rows[0] for rows in runs(f"packing/{gpus}")]
        starts = [datetime.fromisoformat(row["started_at"]) for row in first]
        ends = [start + timedelta(seconds=row["duration_s"]) for start, row in zip(starts, first, strict=True)]
        assert len(first) == 64
        assert float(seconds) == pytest.approx((max(ends) - min(starts)).total_seconds(), abs=0.05)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("one process", "large/one"),
        ("one process, four rows at a time", "large/pieces"),
        ("two processes on two GPUs, sharded", "large/two"),
    ],
)
def test_a_large_run_in_one_process_and_in_two(name, folder):
    (rows,) = runs(folder)
    expected = [value(rows, "train_throughput"), value(rows, "peak_memory") / 2**30]
    expected += [value(rows, "loss", split="train", step=step) for step in (8, 16, 24)]
    assert line(name) == pytest.approx(expected, rel=2e-3)
