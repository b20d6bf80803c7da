"""The figures of a report."""

from __future__ import annotations

import html

import pytest
import yaml
from matplotlib.colors import to_hex

from subquad.reports.render import render
from subquad.reports.render.draw import draw
from tests.reports.made import (
    EXPECTED,
    GRID,
    LENGTHS,
    SELECT,
    grid,
    make_run,
    three,
)


@pytest.mark.parametrize("kind", ["lines", "bars"])
@pytest.mark.parametrize(
    ("key", "values", "ticks"),
    [
        ("betas", ([0.9, 0.99], [0.9, 0.95]), ["[0.9, 0.95]", "[0.9, 0.99]"]),
        ("window", ("all", 64), ["64", "all"]),
        ("optimizer", ("sgd", "adam"), ["adam", "sgd"]),
    ],
)
def test_a_figure_over_lists_or_words_has_them_side_by_side(make, kind, key, values, ticks):
    runs = [make_run(test=0.9, train={key: value}, columns={"run_id": f"run-{value}"}) for value in values]
    sweep = {**grid().sweep, f"train.{key}": list(values)}
    table = {"rows": {"H3": {"model.name": "h3"}}, "columns": {str(v): {f"train.{key}": v} for v in values}}
    config = grid(sweep=sweep, table=table, figure={"kind": kind, "x": f"train.{key}"})
    expected = EXPECTED.splitlines()[0] + f"\nH3,{values[0]!r},80.0,%,higher,,,,paper\n"
    expected = expected.replace("'", "").replace(f"H3,{values[0]}", f'H3,"{values[0]}"')
    report = make(*runs, config=config, expected=expected, claims="claim,left,comparison,right,source\n")
    ((_, (series,)),) = report.figure.panels
    assert [str(point.x) for point in series.points] == ticks
    assert len(series.published) == 1
    assert [label.get_text() for label in draw(report).axes[0].get_xticklabels()] == ticks


def test_a_figure_over_steps_follows_validation(make):
    config = grid(figure={"kind": "lines", "x": "step", "split": "valid"})
    diverged = make_run(seed=3, status="diverged", valid={50: 0.0})
    report = make(*three(valid={50: 0.5, 100: 0.75}), diverged, config=config)
    assert report.figure is not None
    panel = dict(report.figure.panels)[""]
    points = next(series.points for series in panel if series.label == "H3")
    assert [(point.x, point.y) for point in points] == [(50, 50.0), (100, 75.0)]


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_row_has_one_colour_in_all_panels(make, kind):
    """A panel that lacks a row does not shift the colours of the others: the legend is one."""
    config = grid(figure={"kind": kind, "x": "step", "split": "valid", "panels": "task.name"})
    runs = [("s4d", "associative-recall"), ("h3", "associative-recall"), ("h3", "induction-heads")]
    report = make(*(make_run(model, task, valid={50: 0.5, 100: 0.75}) for model, task in runs), config=config)
    canvas = draw(report)
    assert canvas is not None
    found = []
    for ax in canvas.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.append((label, to_hex(handle.patches[0].get_facecolor() if kind == "bars" else handle.get_color())))
    colours = dict(found)
    assert [label for label, _ in found] == ["S4D", "H3", "H3"]
    assert colours["S4D"] != colours["H3"]
    assert all(colour == colours[label] for label, colour in found)


def test_bars_by_column_carry_spread_and_the_papers_number(make):
    report = make(*three())
    assert report.figure is not None
    series = next(s for s in dict(report.figure.panels)[""] if s.label == "H3")
    assert [(p.x, len(p.seeds)) for p in series.points] == [("AR", 3)]
    assert series.points[0].seeds == pytest.approx((99.6, 99.8, 100.0))
    assert dict(series.published) == {"IH": 100.0, "AR": 99.8}


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_figure_shows_every_seed_and_nothing_beyond_what_was_measured(make, kind):
    """One seed of three fails: a standard deviation around the mean would end above 100 %."""
    config = grid(figure={"kind": kind, "x": "step", "split": "valid"})
    runs = [make_run(seed=seed, valid={50: test, 100: test}) for seed, test in enumerate((1.0, 1.0, 0.1))]
    canvas = draw(make(*runs, config=config))
    (axes,) = canvas.axes
    dots = {(float(x), float(y)) for found in axes.collections for x, y in found.get_offsets()}
    assert {y for _, y in dots} == {10.0, 100.0}
    assert len({x for x, _ in dots}) == 2
    heights = [float(value) for line in axes.lines for value in line.get_ydata()]
    heights += [patch.get_height() for patch in axes.patches]
    assert heights == pytest.approx([70.0, 70.0])
    assert "one seed" in [text.get_text() for text in canvas.legends[0].get_texts()]


def test_a_figure_over_a_speed_has_one_point_a_row_from_the_device_of_most_runs(make):
    config = grid(figure={"kind": "lines", "x": "metric.train_throughput", "x_log2": True, "panels": "task.name"})
    newer = {"device": "NVIDIA H100", "started_at": "2036-02-01T10:00:00+00:00"}
    runs = [make_run(seed=seed, test=0.5 + seed / 10, speed=[speed]) for seed, speed in enumerate((1e6, 3e6, 7e6))]
    runs += [make_run("s4d", speed=[9e6], columns=newer)]
    report = make(*runs, config=config)
    assert report.figure is not None
    ((title, (series,)),) = report.figure.panels
    assert (title, series.label) == ("associative-recall", "H3")
    assert [(point.x, point.seeds) for point in series.points] == [(3e6, (50.0, 60.0, 70.0))]
    assert report.figure.x_label.splitlines()[1].endswith("; 1 run on others not shown")
    (axes,) = draw(report).axes
    assert axes.get_xlabel() == report.figure.x_label


def test_of_two_devices_with_equally_many_runs_a_figure_over_a_speed_shows_the_newer(make):
    config = grid(figure={"kind": "lines", "x": "metric.train_throughput"})
    newer = {"device": "NVIDIA H100", "started_at": "2036-02-01T10:00:00+00:00"}
    report = make(make_run(speed=[1e6]), make_run("s4d", speed=[9e6], columns=newer), config=config)
    assert report.figure.device == "NVIDIA H100; 1 run on others not shown"


def test_ticks_are_numbers_and_no_powers(make):
    lengths = [2**k for k in range(6, 21)]
    columns = {f"len {n}": {"task.name": "associative-recall", "slice": f"length={n}"} for n in lengths}
    config = grid(table={**LENGTHS, "columns": columns}, figure={"kind": "lines", "x": "slice.length", "x_log2": True})
    run = make_run(slices={f"length={n}": 0.9 for n in lengths})
    (axes,) = draw(make(run, config=config, claims="claim,left,comparison,right,source\n")).axes
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["64", "256", "1024", "4096", "16K", "64K", "256K", "1M"]


def test_successes_are_drawn_as_a_field_for_every_value(make):
    runs = [
        make_run(seed=seed, test=test, train={"lr": lr}, columns={"run_id": f"{lr}-{seed}"})
        for lr, tests in ((1e-3, (0.99, 0.2)), (1e-4, (0.99, 0.98)))
        for seed, test in enumerate(tests)
    ]
    runs.append(make_run(seed=2, train={"lr": 1e-4}, status="diverged", columns={"run_id": "diverged"}))
    axis = {"sweep": {**grid().sweep, "train.lr": [1e-4, 1e-3]}}
    figure = {"kind": "successes", "x_label": "learning rate"}
    report = make(*runs, config=grid(**axis, figure=figure, select={**SELECT, "by": "accuracy", "success": 95.0}))
    assert report.sensitivity[0].medians == pytest.approx((98.0, 59.5))
    axes = draw(report).axes[0]
    assert [text.get_text() for text in axes.texts] == ["2/3", "98.0", "1/2", "59.5"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.0001", "0.001"]
    assert draw(make(*runs, config=grid(**axis, figure=figure))) is None


def test_the_cells_of_a_table_are_drawn_with_the_best_row_first(make):
    config = grid(figure={"kind": "cells"})
    assert draw(make(config=config)) is None
    report = make(*three(values=(0.9, 0.95)), *three("s4d", values=(0.2, 0.3)), config=config)
    axes = draw(report).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["H3", "S4D"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["AR"]
    assert [(text.get_position(), text.get_text()) for text in axes.texts] == [((0, 0), "92.5"), ((0, 1), "25.0")]
    assert axes.get_xlabel() == "%, mean over 2 seeds"
    # a value in a column that the other row lacks moves no row
    more = make(*three("s4d", "induction-heads", values=(1.0,)), config=config)
    assert [label.get_text() for label in draw(more).axes[0].get_yticklabels()] == ["H3", "S4D"]
    assert [label.get_text() for label in draw(more).axes[0].get_xticklabels()] == ["IH", "AR"]
    costs = grid(figure={"kind": "cells", "x": "metric.num_parameters", "x_label": "parameters"})
    cells, dots = draw(make(config=costs)).axes
    ((x, y),) = [line.get_data() for line in dots.get_lines()]
    assert list(x) == [next(c.values["num_parameters"][0] for c in report.costs if c.label == r) for r in ("H3", "S4D")]
    assert list(y) == [0, 1]
    assert dots.get_xlabel() == "parameters"
    assert [text.get_text() for text in cells.texts] == ["92.5", "100.0", "25.0"]
    # the smallest time is the best, and each column has colours of its own
    table = {**yaml.safe_load(GRID)["table"], "percent": False}
    times = grid(table=table, figure={"kind": "cells", "y": "time", "percent": False, "split": ""})
    report = make(*three(values=(0.9, 0.95)), *three("s4d", values=(0.2, 0.3)), config=times)
    axes = draw(report).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["S4D", "H3"]
    assert axes.images[0].get_array()[:, 1].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="a figure of kind cells takes a cost"):
        grid(figure={"kind": "cells", "x": "model.d_model"})


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_the_papers_numbers_of_a_row_that_did_not_run_are_named_in_the_legend(make, kind):
    canvas = draw(make(*three(), config=grid(figure={"kind": kind, "x": "column"})))
    assert canvas is not None
    (axes,) = canvas.axes
    handles, labels = axes.get_legend_handles_labels()
    assert set(labels) == ({"S4D", "H3"} if kind == "lines" else {"S4D", "H3", "paper"})
    found = dict(zip(labels, handles, strict=True))
    assert to_hex(found["S4D"].get_color()) not in (to_hex("black"), to_hex("C0"))


NOTHING = {
    "expected": "row,column,value,unit,better,seeds,hardware,note,source\n",
    "claims": "claim,left,comparison,right,source\n",
}


@pytest.mark.parametrize("kind", ["lines", "bars", "cells"])
def test_any_name_of_a_row_or_a_column_is_drawn_letter_by_letter(make, kind, tmp_path):
    names = ["_S4D", "$H_3$ \\alpha & <b>"]
    table = {
        "rows": {names[0]: {"model.name": "s4d"}, names[1]: {"model.name": "h3"}},
        "columns": {"$A$R": {"task.name": "associative-recall"}},
    }
    labels = {"x": "column", "y_label": "$y_label$", "x_label": "$x"} if kind != "cells" else {}
    config = grid(table=table, figure={"kind": kind, **labels})
    report = make(make_run(), make_run("s4d", test=0.5), config=config, **NOTHING)
    canvas = draw(report)
    svg = html.unescape(render(report, "png", tmp_path / "figure.png").with_suffix(".svg").read_text())
    for name in (*names, "$A$R", *(["$y_label$", "$x"] if kind != "cells" else [])):
        assert name in svg
    if kind != "cells":
        assert {text.get_text() for text in canvas.legends[0].get_texts()} >= {names[0], names[1].replace("$", r"\$")}


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_zero_that_a_logarithmic_axis_cannot_show_is_said(make, kind):
    config = grid(figure={"kind": kind, "x": "column", "y_log10": True})
    for values, notes in (((0.0, 0.998), ["1 at or below 0 not shown"]), ((0.5, 0.998), [])):
        canvas = draw(make(*three(values=values), config=config, **NOTHING))
        assert [text.get_text() for text in canvas.axes[0].texts if "shown" in text.get_text()] == notes
