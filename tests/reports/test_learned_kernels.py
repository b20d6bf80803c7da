"""The figure of learnt kernels, from stored rows to its panels and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from subquad.reports.render import Report, build, render
from subquad.reports.render.draw import draw
from subquad.suite.options import parse
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.report_spec import FigureSpec
from tests.reports.made import PROVENANCE
from tests.stored import frame_of

GRID = {
    "title": "kernels",
    "source": {"paper": "dss", "figure": 2},
    "baseline": {
        "task": {"name": "near"},
        "model": {"name": "dss-softmax"},
        "train": {"steps": 10, "record_kernels": {"lags": 8, "points": 4}},
    },
    "sweep": {"task.name": ["near", "far"]},
    "seeds": [0],
    "table": {
        "rows": {"Near": {"task.name": "near"}, "Far": {"task.name": "far"}},
        "columns": {
            "peak": {"metric": "kernel_peak_p95"},
            "peak at start": {"metric": "kernel_peak_p95", "slice": "at=start"},
        },
        "split": "",
        "percent": False,
        "tolerance": 20,
    },
    "figure": {"kind": "kernels"},
}
EXPECTED = "row,column,value,unit,better,seeds,hardware,note,source\n{}"
CURVES = {0: ([1.0, 0.5, 0.25, 0.0], [0.25, 1.0, 0.5, 0.0]), 1: ([0.0, 0.0, 0.5, 1.0],)}


def run(task: str, seed: int = 0, *, peak: float = 7.0, status: str = "ok", eigenvalues: bool = True, **columns: Any):
    """Rows as the trainer records them: two kernels of the first layer, one of the second."""
    config = {
        "task": {"name": task, "version": 1},
        "model": {"name": "dss-softmax", "version": 1},
        "train": {"steps": 10, "record_kernels": {"lags": 8, "points": 4, "channels": 32, "near": 128}},
        "seed": seed,
    }
    shared = {
        **PROVENANCE,
        "run_id": f"{task}{seed}",
        "experiment": "demo/kernels",
        "scale": "paper",
        "task": task,
        "model": "dss-softmax",
        "seed": seed,
        "config": json.dumps(config, sort_keys=True),
        "split": "",
        "slice": "",
        "step": 10,
        "status": "ok",
        "error": "",
        "stand_in": "",
        **columns,
    }
    rows = []
    if eigenvalues:
        for at, step, real in (("at=start,", 0, [-0.5, -0.5]), ("", 10, [-0.7 - seed, 0.1])):
            for metric, samples in (("eigenvalue_real", real), ("eigenvalue_imag", [2.0, 4.0])):
                part = {"slice": f"{at}layer=0,filter=ssm", "step": step, "samples": samples, "value": max(samples)}
                rows.append({**shared, "metric": metric, **part})
    for layer, curves in CURVES.items():
        for channel, samples in enumerate(curves):
            part = {"slice": f"layer={layer},filter=ssm,channel={channel},span=2", "samples": samples, "value": 1.0}
            rows.append({**shared, "metric": "kernel", "unit": "fraction", **part})
    rows.append({**shared, "metric": "kernel_peak_p95", "unit": "lags", "value": 3.0, "slice": "at=start", "step": 0})
    rows.append({**shared, "metric": "kernel_peak_p95", "unit": "lags", "value": peak})
    return [*rows, {**shared, "metric": "run", "value": None, "status": status}]


@pytest.fixture
def make(tmp_path: Path):
    def report(*runs: list[dict[str, Any]], expected: str = "") -> Report:
        (tmp_path / "expected.csv").write_text(EXPECTED.format(expected))
        return build(parse(ExperimentConfig, GRID, "grid.yaml"), tmp_path, frame_of(*runs))

    return report


def test_a_panel_is_what_one_run_recorded(make):
    figure = make(run("near"), run("far")).figure
    assert figure is not None
    near, far = figure.kernels
    assert (near.title, far.title) == ("Near", "Far")
    assert near.layers == (0, 0, 1)
    assert near.kernels == tuple(tuple(curve) for curves in CURVES.values() for curve in curves)
    assert near.span == 2
    assert near.eigenvalues == ((-0.7, 2.0), (0.1, 4.0))
    assert near.initial == ((-0.5, 2.0), (-0.5, 4.0))


def test_of_several_seeds_the_first_that_ended_well_is_drawn(make):
    figure = make(run("near", 0, status="failed"), run("near", 1), run("near", 2)).figure
    assert figure is not None
    (panel,) = figure.kernels
    assert panel.eigenvalues[0] == (-1.7, 2.0)


def test_the_pixels_are_the_kernels_in_lags_with_a_line_between_layers(make):
    canvas = draw(make(run("near"), run("far")))
    assert canvas is not None
    axes = [ax for ax in canvas.axes if ax.get_title()]
    assert [ax.get_title() for ax in axes] == ["Near", "Far"]
    (image,) = axes[0].images
    assert image.get_array().tolist() == [curve for curves in CURVES.values() for curve in curves]
    assert image.get_extent() == [0, 8, 3, 0]
    assert [line.get_ydata()[0] for line in axes[0].lines] == [2]
    assert [tick.get_text() for tick in axes[0].get_yticklabels()] == ["1", "2"]


def test_eigenvalues_stand_where_the_paper_puts_them(make):
    canvas = draw(make(run("near")))
    assert canvas is not None
    (below,) = (ax for ax in canvas.axes if ax.get_xlabel() == "Re λ")
    trained, before = (points.get_offsets().tolist() for points in below.collections)
    assert trained[1] == pytest.approx([0.1, 1.4436354751788103])
    assert before[0] == pytest.approx([-0.5, 0.881373587019543])


def test_filters_without_eigenvalues_are_drawn_alone(make):
    canvas = draw(make(run("near", eigenvalues=False)))
    assert canvas is not None
    assert [ax.get_title() for ax in canvas.axes if ax.get_xlabel()] == ["Near"]


def test_stand_in_data_are_named_above_their_panel(make):
    figure = make(run("near", stand_in="drawn here"), run("far")).figure
    assert figure is not None
    assert [panel.title for panel in figure.kernels] == ["Near (stand-in data)", "Far"]


def test_nothing_recorded_is_nothing_to_draw(make, tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        render(make(), "png", tmp_path / "none.png")


@pytest.mark.slow
def test_the_picture_is_the_same_every_time(make, tmp_path):
    report = make(run("near"), run("far"))
    for name in ("a", "b"):
        render(report, "png", tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_number_of_which_neither_direction_is_better_agrees_or_differs(make):
    line = "Near,peak,66,lags,{},,,,t\n"
    verdicts = [
        make(run("near", peak=peak), expected=line.format(better)).cells[0].verdict
        for peak, better in ((50, ""), (40, ""), (140, ""), (140, "higher"))
    ]
    assert verdicts == ["agrees", "differs", "differs", "better"]


def test_the_start_is_a_column_of_its_own(make):
    cells = {(cell.row, cell.column): cell.mean for cell in make(run("near")).cells}
    assert (cells["Near", "peak"], cells["Near", "peak at start"]) == (7, 3)


def test_a_figure_of_kernels_has_no_x_and_every_other_one_has():
    for options in ({"kind": "kernels", "x": "step"}, {"kind": "lines"}, {"kind": "cells", "x": "metric.state_size"}):
        with pytest.raises(ValueError, match="a figure of kind"):
            FigureSpec(**options)
