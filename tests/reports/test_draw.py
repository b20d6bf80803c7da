"""The figures of a report show what its cells have: every seed, the paper's numbers, the best rows first."""

from __future__ import annotations

import dataclasses
import html

import pytest
import yaml
from matplotlib.colors import to_hex

from subquad.reports.render import render
from subquad.reports.render.draw import draw
from subquad.reports.render.finding import finding, words_of
from subquad.reports.render.frontier import Dot, _is_solid, frontier, kind_of
from subquad.reports.render.seeds import ALL, lines_of
from tests.reports.drawn import words
from tests.reports.made import EXPECTED, GRID, LENGTHS, SELECT, grid, make_run, three

NOTHING = {
    "expected": "row,column,value,unit,better,seeds,hardware,note,source\n",
    "claims": "claim,left,comparison,right,source\n",
}


def rows_of(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def dots_of(axes):
    """Value and whether it is filled, of every dot, row by row."""
    found = [line for line in axes.lines if line.get_marker() in ("o", "D")]
    return [(round(float(line.get_xdata()[0]), 1), line.get_markerfacecolor() != "white") for line in found]


@pytest.mark.parametrize(
    ("key", "values", "ticks"),
    [
        ("betas", ([0.9, 0.99], [0.9, 0.95]), ["[0.9, 0.95]", "[0.9, 0.99]"]),
        ("window", ("all", 64), ["64", "all"]),
        ("optimizer", ("sgd", "adam"), ["adam", "sgd"]),
    ],
)
def test_a_figure_over_lists_or_words_has_them_side_by_side(make, key, values, ticks):
    runs = [make_run(test=0.9, train={key: value}, columns={"run_id": f"run-{value}"}) for value in values]
    sweep = {**grid().sweep, f"train.{key}": list(values)}
    table = {"rows": {"H3": {"model.name": "h3"}}, "columns": {str(v): {f"train.{key}": v} for v in values}}
    config = grid(sweep=sweep, table=table, figure={"kind": "lines", "x": f"train.{key}"})
    expected = EXPECTED.splitlines()[0] + f"\nH3,{values[0]!r},80.0,%,higher,,,,paper\n"
    expected = expected.replace("'", "").replace(f"H3,{values[0]}", f'H3,"{values[0]}"')
    report = make(*runs, config=config, expected=expected, claims=NOTHING["claims"])
    ((_, (series,)),) = report.figure.panels
    assert [str(point.x) for point in series.points] == ticks
    assert len(series.published) == 1
    assert [label.get_text() for label in draw(report).axes[0].get_xticklabels()] == ticks


def test_a_figure_over_steps_follows_validation(make):
    config = grid(figure={"kind": "lines", "x": "step", "split": "valid"})
    diverged = make_run(seed=3, status="diverged", valid={50: 0.0})
    report = make(*three(valid={50: 0.5, 100: 0.75}), diverged, config=config)
    panel = dict(report.figure.panels)[""]
    points = next(series.points for series in panel if series.label == "H3")
    assert [(point.x, point.y) for point in points] == [(50, 50.0), (100, 75.0)]


def test_a_row_has_one_colour_in_all_panels(make):
    """A panel that lacks a row does not shift the colours of the others: the legend is one."""
    config = grid(figure={"kind": "lines", "x": "step", "split": "valid", "panels": "task.name"})
    runs = [("s4d", "associative-recall"), ("h3", "associative-recall"), ("h3", "induction-heads")]
    report = make(*(make_run(model, task, valid={50: 0.5, 100: 0.75}) for model, task in runs), config=config)
    canvas = draw(report)
    colors = [[to_hex(line.get_color()) for line in ax.lines] for ax in canvas.axes]
    assert [len(set(found)) for found in colors] == [2, 1]
    assert colors[1][0] == colors[0][1]


def test_lines_show_the_median_and_every_seed(make):
    """One seed of three fails: the mean is where no seed is, and a standard deviation would end above 100 %."""
    config = grid(figure={"kind": "lines", "x": "step", "split": "valid"})
    runs = [make_run(seed=seed, valid={50: test, 100: test}) for seed, test in enumerate((1.0, 1.0, 0.1))]
    canvas = draw(make(*runs, config=config))
    (axes,) = canvas.axes
    dots = {(float(x), float(y)) for found in axes.collections for x, y in found.get_offsets()}
    assert {y for _, y in dots} == {10.0, 100.0}
    assert len({x for x, _ in dots}) == 2
    assert [float(value) for line in axes.lines for value in line.get_ydata()] == [100.0, 100.0]
    assert "one seed" in words(canvas)


def test_a_figure_over_a_speed_has_one_point_a_row_from_the_device_of_most_runs(make):
    config = grid(figure={"kind": "lines", "x": "metric.train_throughput", "x_log2": True, "panels": "task.name"})
    newer = {"device": "NVIDIA H100", "started_at": "2036-02-01T10:00:00+00:00"}
    runs = [make_run(seed=seed, test=0.5 + seed / 10, speed=[speed]) for seed, speed in enumerate((1e6, 3e6, 7e6))]
    runs += [make_run("s4d", speed=[9e6], columns=newer)]
    report = make(*runs, config=config)
    ((title, (series,)),) = report.figure.panels
    assert (title, series.label) == ("associative-recall", "H3")
    assert [(point.x, point.seeds) for point in series.points] == [(3e3, (50.0, 60.0, 70.0))]
    assert report.figure.x_label.splitlines()[1].endswith("; 1 run on others not shown")


def test_a_figure_over_what_training_took_has_all_of_it(make):
    """The sums up to earlier evaluations would put a long run at the place of a short one."""
    config = grid(figure={"kind": "lines", "x": "metric.train_flops"})
    rows = make_run()
    spent = {**rows[-1], "metric": "train_flops", "unit": "flop", "split": "train", "slice": ""}
    report = make([*rows, *({**spent, "step": step, "value": step * 1e15} for step in (10, 20, 70))], config=config)
    assert [point.x for _, (series,) in report.figure.panels for point in series.points] == [70.0]


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
    (axes,) = draw(make(run, config=config, claims=NOTHING["claims"])).axes
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["64", "128", "256", "512", "1024", "2048", "4096", "8K", *(f"{2**k}K" for k in range(4, 10)), "1M"]


def test_more_than_eight_rows_and_rows_beside_a_paper_have_a_panel_each(make):
    table = {
        "rows": {f"row {i}": {"model.name": f"m{i}"} for i in range(9)},
        "columns": {f"len {n}": {"slice": f"length={n}"} for n in (64, 128)},
    }
    sweep = {"model.name": [f"m{i}" for i in range(9)]}
    config = grid(table=table, sweep=sweep, figure={"kind": "lines", "x": "slice.length"})
    runs = [make_run(f"m{i}", "induction-heads", slices={"length=64": 0.9, "length=128": 0.5}) for i in range(9)]
    canvas = draw(make(*runs, config=config, **NOTHING))
    titles = [ax.get_title() for ax in canvas.axes if ax.get_visible()]
    assert titles == [f"row {i}" for i in range(9)]
    few = {**table, "rows": dict(list(table["rows"].items())[:2])}
    config = grid(table=few, sweep={"model.name": ["m0", "m1"]}, figure={"kind": "lines", "x": "slice.length"})
    assert len([ax for ax in draw(make(config=config, **NOTHING)).axes if ax.get_visible()]) == 1
    published = "\nrow 0,len 64,90.0,%,higher,,,,paper\nrow 0,len 128,90.0,%,higher,,,,paper\n"
    report = make(config=config, expected=EXPECTED.splitlines()[0] + published, claims=NOTHING["claims"])
    canvas = draw(report)
    assert [ax.get_title() for ax in canvas.axes if ax.get_visible()] == ["row 0: 1 of 2 agree", "row 1"]
    assert "1 of 2 numbers agree with the paper" in words(canvas)
    # a number that is better than the paper does not agree with it
    lower = published.replace("len 128,90.0", "len 128,30.0")
    better = draw(make(config=config, expected=EXPECTED.splitlines()[0] + lower, claims=NOTHING["claims"]))
    assert better.axes[0].get_title() == "row 0: 1 of 2 agree, 1 better"
    assert "1 of 2 numbers agree with the paper; 1 is better" in words(better)
    (dashed,) = [line for line in canvas.axes[0].lines if line.get_linestyle() == "--"]
    assert list(dashed.get_ydata()) == [90.0, 90.0]


def test_seeds_beside_the_papers_number_are_filled_where_they_are_as_good(make):
    report = make(*three(values=(0.999, 0.99, 0.95)), *three("s4d", values=(0.2, 0.3, 0.1)))
    canvas = draw(report)
    columns = {ax.get_title(loc="left"): ax for ax in canvas.axes}
    assert rows_of(canvas.axes[0]) == ["S4D", "H3"], "a table with a paper's numbers keeps the paper's order"
    axes = columns["AR"]
    assert dots_of(axes) == [(20.0, False), (30.0, False), (10.0, False), (99.9, True), (99.0, True), (95.0, False)]
    papers = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "|"]
    assert papers == [86.0, 99.8]


def test_seeds_are_sorted_by_those_that_succeed_and_then_by_the_median(make):
    """By the mean, GLA with 3, 100 and 100 % was before a row with 75 % in each seed, and it stays there."""
    tests = {"low": (0.75, 0.75, 0.75), "unstable": (0.03, 1.0, 1.0), "high": (0.95, 0.95, 0.5), "all": (1.0, 1.0, 1.0)}
    runs = [
        make_run(name, "induction-heads", seed, value, valid={100: value})
        for name, values in tests.items()
        for seed, value in enumerate(values)
    ]
    table = {
        "rows": {name: {"model.name": name} for name in tests},
        "columns": {"IH": {"task.name": "induction-heads", "chance": 5.0}},
    }
    sweep = {"model.name": list(tests), "train.lr": [5e-4, 1e-2]}
    costs = [{"metric": "num_parameters", "label": "parameters (K)"}]
    choice = {"table": table, "sweep": sweep, "select": {**SELECT, "success": 99.0}}
    report = make(*runs, config=grid(**choice, figure={"kind": "seeds", "costs": costs}), **NOTHING)
    panel, numbers = draw(report).axes
    assert rows_of(panel) == ["all", "unstable", "high", "low"]
    assert panel.get_title(loc="left") == "IH\n1 of 4 with every seed"
    assert dots_of(panel)[3:6] == [(3.0, False), (100.0, True), (100.0, True)]
    assert [line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == ":"] == [5.0]
    assert [text.get_text() for text in numbers.texts] == ["74.0"] * 4
    assert numbers.get_title(loc="right") == "parameters\n(K)"


@pytest.mark.parametrize(
    ("tests", "success", "found"),
    [
        ({"a": (1.0, 1.0), "b": (0.5, 1.0)}, 99.0, "one of 2 models solves the task with every seed"),
        ({"a": (1.0, 1.0), "b": (1.0, 1.0)}, 99.0, "every model solves the task with every seed"),
        ({"a": (0.8, 1.0), "b": (0.5, 1.0)}, 99.0, "no model solves the task with every seed"),
        # at 90 % one succeeds, at 95 % none does
        ({"a": (0.93, 1.0), "b": (0.5, 1.0)}, 99.0, ""),
        ({"a": (0.93, 1.0), "b": (0.5, 0.5), "c": (0.5, 0.5), "d": (0.1, 0.1)}, 99.0, "at most one of 4 models solves"),
        # the threshold of the grid counts, too
        ({"a": (0.8, 1.0), "b": (0.5, 1.0)}, 75.0, ""),
        ({"a": (1.0,), "b": (0.5,)}, 99.0, ""),
        # a run that diverged has solved nothing
        ({"a": (1.0, 1.0, None), "b": (1.0, 1.0)}, 99.0, "one of 2 models solves the task with every seed"),
    ],
)
def test_a_finding_is_printed_only_if_it_holds_at_every_threshold(make, tests, success, found):
    runs = [
        make_run(name, "induction-heads", seed, valid={100: 1.0}, status="diverged")
        if value is None
        else make_run(name, "induction-heads", seed, value, valid={100: value})
        for name, values in tests.items()
        for seed, value in enumerate(values)
    ]
    table = {
        "rows": {name: {"model.name": name} for name in tests},
        "columns": {"IH": {"task.name": "induction-heads"}},
    }
    sweep = {"model.name": list(tests), "train.lr": [5e-4, 1e-2]}
    report = make(*runs, config=grid(table=table, sweep=sweep, select={**SELECT, "success": success}), **NOTHING)
    title = draw(report).axes[0].get_title(loc="left")
    whole = sum(None not in values and min(values) >= success / 100 for values in tests.values())
    assert ("with every seed" not in title) or f"\n{whole} of {len(tests)} with every seed" in title
    colors = {line.color for (row, _), line in lines_of(report).items() if None in tests[row]}
    assert ALL not in colors
    solid = {cell.row for cell in report.cells if _is_solid(report, cell)}
    assert solid == {row for row, values in tests.items() if None not in values and min(values) >= success / 100}
    assert finding(report).startswith(found)
    assert bool(finding(report)) == bool(found)
    assert found[1:] in words_of(report).title


def test_the_frontier_has_what_no_cheaper_row_equals():
    def dot(name, cost, median):
        return Dot(name, cost, median, median, median)

    dots = [dot("small", 1, 20), dot("same", 1, 10), dot("worse", 2, 15), dot("best", 3, 99.5), dot("hair", 4, 99.9)]
    assert [found.row for found in frontier(dots, lower=False, tolerance=1.0)] == ["small", "best"]
    assert [found.row for found in frontier(dots, lower=True, tolerance=1.0)] == ["same"]
    luck = Dot("two seeds of three", 2.5, 100.0, 3.0, 100.0)
    assert luck not in frontier([*dots, luck], lower=False, tolerance=1.0), "one seed fails"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("Gated DeltaNet [-1, 1]", "delta rule"),
        ("RWKV-7", "delta rule"),
        ("RWKV-6", "linear attention"),
        ("Linear attention", "linear attention"),
        ("Attention", "softmax attention"),
        ("Mamba-2", "state space model"),
        ("Hyena", "another kind"),
    ],
)
def test_a_row_belongs_to_the_kind_of_its_mixer(row, kind):
    assert kind_of(row)[0] == kind


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


def test_the_cells_of_a_table_have_medians_as_numbers_and_the_best_row_first(make):
    cells = {"figure": {"kind": "cells"}}
    assert draw(make(config=grid(**cells), **NOTHING)) is None
    runs = [*three(values=(0.9, 0.95, 0.1)), *three("s4d", values=(0.2, 0.3))]
    axes = draw(make(*runs, config=grid(**cells), **NOTHING)).axes[0]
    assert rows_of(axes) == ["H3", "S4D"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["AR"]
    assert [(text.get_position(), text.get_text()) for text in axes.texts] == [((0, 0), "90.0"), ((0, 1), "25.0")]
    # a value in a column that the other row lacks moves no row
    more = make(*three("s4d", "induction-heads", values=(1.0,)), config=grid(**cells), **NOTHING)
    assert rows_of(draw(more).axes[0]) == ["H3", "S4D"]
    # the smallest time is the best, and each column has colours of its own
    table = {**yaml.safe_load(GRID)["table"], "percent": False, "metric": "time", "split": ""}
    times = [{**row, "metric": "time", "unit": "ms", "split": ""} for run in runs for row in run]
    times = [row for row in times if row["value"] is not None and row["value"] < 1000]
    report = make(times, config=grid(table=table, **cells), **NOTHING)
    assert words_of(report).x_label == "time (ms, lower is better)"
    axes = draw(report).axes[0]
    assert rows_of(axes) == ["S4D", "H3"]
    assert axes.collections[0].get_array().ravel().tolist() == [1.0, 0.0]


def test_the_colour_of_a_cell_counts_the_seeds_that_succeed_or_leaves_chance_out(make):
    runs = [
        make_run(model, "induction-heads", seed, test, valid={100: test}, slices={"length=2": 0.75})
        for model, tests in (("h3", (1.0, 1.0, 0.1)), ("s4d", (0.9, 0.9, 0.9)))
        for seed, test in enumerate(tests)
    ]
    choice = {"figure": {"kind": "cells"}, "select": {**SELECT, "success": 99.0}}
    choice["sweep"] = {"model.name": ["s4d", "h3"], "train.lr": [5e-4, 1e-2]}
    rows = {"S4D": {"model.name": "s4d"}, "H3": {"model.name": "h3"}}
    canvas = draw(make(*runs, config=grid(**choice, table={"rows": rows, "columns": {"IH": {}}}), **NOTHING))
    assert rows_of(canvas.axes[0]) == ["H3", "S4D"]
    assert canvas.axes[0].collections[0].get_array().ravel().tolist() == pytest.approx([2 / 3, 0.0])
    assert "2 3 of 3" in words(canvas)
    columns = {"IH": {"chance": 20.0}, "two": {"slice": "length=2", "chance": 50.0}}
    canvas = draw(make(*runs, config=grid(**choice, table={"rows": rows, "columns": columns}), **NOTHING))
    assert canvas.axes[0].collections[0].get_array().ravel().tolist() == pytest.approx([1.0, 0.5, 0.875, 0.5])
    assert "IH, chance 20" in words(canvas)


@pytest.mark.parametrize("kind", ["seeds", "cells"])
def test_a_column_of_another_metric_has_its_own_axis_and_no_threshold(make, kind):
    runs = []
    for name, test, loss in (("s4d", 1.0, 2.5), ("h3", 0.5, 1.5)):
        for seed in range(2):
            run = make_run(name, "induction-heads", seed, test, valid={100: test}, loss={100: loss})
            runs.append([{**row, "split": "test" if row["metric"] == "loss" else row["split"]} for row in run])
    table = {
        "rows": {"H3": {"model.name": "h3"}, "S4D": {"model.name": "s4d"}},
        "columns": {"IH": {"chance": 5.0}, "loss (nats)": {"metric": "loss"}},
    }
    sweep = {"model.name": ["s4d", "h3"], "train.lr": [5e-4, 1e-2]}
    select = {**SELECT, "success": 99.0}
    report = make(*runs, config=grid(table=table, sweep=sweep, select=select, figure={"kind": kind}), **NOTHING)
    axes = draw(report).axes
    if kind == "cells":
        # the best of each column is dark
        assert axes[0].collections[0].get_array().tolist() == [[1.0, 0.0], [0.5, 1.0]]
        return
    assert rows_of(axes[0]) == ["S4D", "H3"]
    assert axes[0].get_xlim() == (-3, 103)
    low, high = axes[1].get_xlim()
    assert 1 < low < high < 3
    assert [ax.get_title(loc="left") for ax in axes] == ["IH\n1 of 2 with every seed", "loss (nats)"]
    assert finding(report) == "one of 2 models solves the setting with every seed"


@pytest.mark.parametrize("kind", ["lines", "seeds", "cells"])
def test_any_name_of_a_row_or_a_column_is_drawn_letter_by_letter(make, kind, tmp_path):
    names = ["_S4D", "$H_3$ \\alpha & <b>"]
    table = {
        "rows": {names[0]: {"model.name": "s4d"}, names[1]: {"model.name": "h3"}},
        "columns": {"$A$R": {"task.name": "associative-recall"}, "I$H": {"task.name": "induction-heads"}},
    }
    labels = {"x": "column", "y_label": "$y_label$", "x_label": "$x"} if kind == "lines" else {}
    config = grid(table=table, figure={"kind": kind, **labels})
    runs = [make_run(), make_run("s4d", test=0.5), make_run(task="induction-heads")]
    report = make(*runs, config=config, **NOTHING)
    svg = html.unescape(render(report, "png", tmp_path / "figure.png").with_suffix(".svg").read_text())
    for name in (*names, "$A$R", *(["$y_label$", "$x"] if labels else [])):
        assert name in svg


def test_a_zero_that_a_logarithmic_axis_cannot_show_is_said(make):
    config = grid(figure={"kind": "lines", "x": "column", "y_log10": True})
    other = make_run(task="induction-heads")
    for values, notes in (((0.0, 0.998), ["1 at or below 0 not shown"]), ((0.5, 0.998), [])):
        canvas = draw(make(*three(values=values), other, config=config, **NOTHING))
        assert [text.get_text() for text in canvas.axes[0].texts if "shown" in text.get_text()] == notes


def test_a_cost_of_another_experiment_stands_beside_its_rows_with_the_device(make):
    costs = [{"experiment": "demo/speed", "column": "AR", "label": "decode (ms)", "note": "four layers"}]
    fractions = {**yaml.safe_load(GRID)["table"], "percent": False}
    other = make(*three(values=(0.0123,)), config=grid(table=fractions), **NOTHING)
    report = make(config=grid(figure={"kind": "seeds", "costs": costs}))
    assert "decode" not in words(draw(report)), "nothing gave the other experiment"
    beside = dataclasses.replace(report, beside=lambda name: dataclasses.replace(other, device="NVIDIA H100"))
    canvas = draw(beside)
    assert [text.get_text() for text in canvas.axes[-1].texts] == ["", "0.0123"]
    assert "decode (ms): four layers on NVIDIA H100 (demo/speed)." in words(canvas)


def test_a_figure_leaves_out_rows_without_runs_and_names_them_or_says_how_many(make):
    names = [f"m{i}" for i in range(8)]
    table = {"rows": {name: {"model.name": name} for name in names}, "columns": {"recall": {}}}
    config = grid(table=table, sweep={"model.name": names}, figure={"kind": "seeds"})
    for count, said in ((2, "Not run: 6 of 8 rows."), (5, "Not run: m5, m6, m7."), (8, "")):
        report = make(*(make_run(name, "induction-heads", 0, 0.5) for name in names[:count]), config=config, **NOTHING)
        note = words_of(report).note
        assert said in note
        assert note.count("Not run") == bool(said)
        assert set(rows_of(draw(report).axes[0])) == set(names[:count])


def test_seeds_that_nothing_judges_lie_on_those_of_the_best_row(make):
    """A band behind the worst row, or one where a threshold judges the seeds, would call other rows ties."""
    values = {"s4d": (0.5, 0.55, 0.65), "h3": (0.6, 0.7, 0.75)}
    runs = [make_run(name, "induction-heads", seed, v) for name, vs in values.items() for seed, v in enumerate(vs)]
    for success, bands in ((None, [(60.0, 75.0)]), (90.0, [])):
        select = SELECT if success is None else {**SELECT, "success": success}
        canvas = draw(make(*runs, config=grid(select=select), **NOTHING))
        spans = [
            patch.get_extents().transformed(canvas.axes[0].transData.inverted()) for patch in canvas.axes[0].patches
        ]
        assert [(round(span.x0, 1), round(span.x1, 1)) for span in spans] == bands
        assert ("a row that reaches there is a tie" in words(canvas)) == bool(bands)


def test_rows_that_are_steps_of_a_setting_stay_in_their_order(make):
    names = ["none", "half", "all"]
    table = {"rows": {name: {"model.name": name} for name in names}, "columns": {"recall": {}}}
    for order, rows in (("best", ["half", "all", "none"]), ("table", names)):
        config = grid(table=table, sweep={"model.name": names}, figure={"kind": "seeds", "order": order})
        runs = [make_run(name, "induction-heads", 0, v) for name, v in zip(names, (0.1, 0.9, 0.5), strict=True)]
        assert rows_of(draw(make(*runs, config=config, **NOTHING)).axes[0]) == rows


def test_a_figure_draws_the_columns_that_it_names(make):
    table = {"rows": {"s4d": {"model.name": "s4d"}}, "columns": {"again": {}, "recall": {}}}
    run = make_run("s4d", "induction-heads", 0, 0.5)
    for columns, titles in (((), ["again", "recall"]), (("recall",), ["recall"])):
        config = grid(table=table, sweep={"model.name": ["s4d"]}, figure={"kind": "seeds", "columns": columns})
        assert [ax.get_title(loc="left") for ax in draw(make(run, config=config, **NOTHING)).axes] == titles
    with pytest.raises(
        ValueError, match=r"figure.columns: the table has no column 'recal' \(did you mean 'recall'\?\)"
    ):
        grid(table=table, figure={"kind": "seeds", "columns": ["recal"]})
