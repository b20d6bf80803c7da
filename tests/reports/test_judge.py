"""Cells, their verdicts, and successes by setting."""

from __future__ import annotations

import pytest
import yaml

from subquad.reports.render import render
from subquad.reports.render.draw import draw
from subquad.reports.render.judge import Sensitivity, judge
from subquad.reports.render.layout import grids
from subquad.reports.render.plan import Published
from subquad.suite.settings.report_spec import Select
from tests.reports.made import (
    EXPECTED,
    GRID,
    LENGTHS,
    SELECT,
    cell,
    grid,
    make_run,
    note,
    three,
    used,
)


def test_operators_of_runs_that_gave_no_value_do_not_mark_a_cell(make):
    runs = [make_run(seed=0, columns=used(1, "torch")), make_run(seed=1, status="diverged", columns=used(2, "triton"))]
    assert cell(make(*runs), "H3", "AR").mixed == ""


def test_a_mean_over_devices_is_marked_and_one_over_shares_of_a_device_is_not(make):
    runs = [make_run(seed=seed, columns={"device": f"NVIDIA H200, {2 + seed} runs at a time"}) for seed in range(2)]
    assert cell(make(*runs), "H3", "AR").mixed == ""
    found = cell(make(*runs, make_run(seed=2, columns={"device": "NVIDIA H100"})), "H3", "AR")
    assert (found.mixed, found.marks) == ("on NVIDIA H100 and NVIDIA H200", ("¶",))


def test_mean_spread_seeds_and_difference(make):
    found = cell(make(*three()), "H3", "AR")
    assert found.mean == pytest.approx(99.8)
    assert found.sd == pytest.approx(0.2)
    assert (found.num_seeds, found.planned, found.marks) == (3, 3, ())
    assert found.difference == pytest.approx(0.0)
    assert found.verdict == "agrees"
    assert len(found.run_ids) == 3


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.988, 0.988, 0.988), "agrees"),  # exactly the tolerance of 1 point
        ((0.987, 0.987, 0.987), "worse"),
        ((0.965, 0.985, 1.0), "unclear"),  # 1.5 points below, standard error 1.0
        ((0.974, 0.983, 0.992), "worse"),  # 1.5 points below, standard error 0.5
        ((0.955, 0.96, 0.965), "worse"),  # 3.8 points below, standard error 0.3
        ((0.955, 0.97, 0.999), "worse"),  # 2.3 points below, standard error 1.3: more noise than twice the tolerance
        ((0.90, 0.99, 0.99), "unstable"),  # two seeds meet the paper, one is 9.8 points below
        ((0.90, 0.90, 0.90), "worse"),
    ],
)
def test_verdict_is_the_tolerance_or_a_little_noise(make, values, verdict):
    assert cell(make(*three(values=values)), "H3", "AR").verdict == verdict


def paper(value: float, better: str) -> Published:
    return Published(value, 1, "%", better, "", "paper")


def test_verdict_better_looks_at_the_direction_of_the_paper():
    assert judge([90.0], paper(86.0, "higher"), 1.0) == "better"
    assert judge([82.0], paper(86.0, "higher"), 1.0) == "worse"
    assert judge([20.0], paper(22.0, "lower"), 1.0) == "better"
    assert judge([24.0], paper(22.0, "lower"), 1.0) == "worse"
    assert judge([24.0], paper(22.0, ""), 1.0) == "differs"


@pytest.mark.parametrize("centre", [60.0, 80.0, 95.0, 99.0])
def test_more_variance_is_never_kinder(centre):
    """Seeds that spread around the same mean and median can turn a verdict into `unclear` only near the tolerance."""
    kindness = ("agrees", "better", "unclear", "worse", "unstable")
    verdicts = [judge([centre - d, centre, centre + d], paper(99.0, "higher"), 2.0) for d in (0, 1, 3, 9, 30, 60)]
    allowed = verdicts[0] if abs(centre - 99.0) > 4.0 else "unclear"
    for verdict in verdicts:
        assert kindness.index(verdict) >= min(kindness.index(allowed), kindness.index(verdicts[0]))


def test_a_mean_that_agrees_by_chance_does_not_agree():
    assert judge([50.0, 50.0, 50.0, 75.0, 75.0], paper(61.0, "higher"), 5.0) == "worse"  # the median is 11 below
    assert judge([100.0, 100.0, 0.0], paper(66.7, "higher"), 5.0) == "unstable"


def test_a_diverged_seed_is_a_failed_one():
    assert judge([99.0, 99.0], paper(99.0, "higher"), 1.0, diverged=1) == "unstable"
    assert judge([90.0], paper(99.0, "higher"), 1.0, diverged=2) == "worse"


@pytest.mark.parametrize(("num_seeds", "marks"), [(1, ("‡",)), (2, ("‡",)), (3, ())])
def test_a_cell_of_fewer_than_three_seeds_is_marked(make, num_seeds, marks):
    assert cell(make(*three(values=(0.998,) * num_seeds)), "H3", "AR").marks == marks


def test_one_seed_has_no_spread_and_is_marked(make):
    report = make(make_run())
    found = cell(report, "H3", "AR")
    assert (found.sd, found.num_seeds, found.marks) == (None, 1, ("‡",))
    assert note(report, "‡") == "‡ fewer than 3 seeds"
    assert "99.8‡" in render(report, "terminal")
    assert "1 of 3" in render(report, "terminal")


def test_median_and_successes_stand_beside_the_mean(make):
    found = cell(make(*three(values=(0.2, 0.99, 1.0))), "H3", "AR")
    assert (found.median, found.successes, found.num_seeds) == (pytest.approx(99.0), 2, 3)


def test_failed_runs_are_counted_and_withhold_the_verdict(make):
    report = make(
        make_run(seed=0),
        make_run(seed=1, test=0.997),
        make_run(seed=2, status="oom"),
        make_run("s4d", status="oom"),
    )
    found = cell(report, "H3", "AR")
    assert (found.num_seeds, found.planned, found.failures) == (2, 3, (("oom", 1),))
    assert found.mean == pytest.approx(99.75)
    assert found.verdict == ""
    text = render(report, "terminal")
    assert "2 of 3; 1 oom" in text
    lost = cell(report, "S4D", "AR")
    assert not lost.missing
    assert lost.mean is None
    (line,) = [line.split() for line in render(report, "md").splitlines() if "S4D" in line and "| ours" in line]
    assert line.count("oom") == 1


def test_a_diverged_run_gives_no_value_from_its_earlier_evaluations(make):
    rows = make_run(status="diverged", valid={50: 0.99}, slices={"": 0.99})
    assert cell(make(rows), "H3", "AR").mean is None


def test_stand_in_data_never_fill_a_papers_cell(make):
    report = make(*three(stand_in="860-file sample"))
    found = cell(report, "H3", "AR")
    assert found.mean == pytest.approx(99.8)
    assert found.published is None
    assert found.difference is None
    assert found.verdict == ""
    assert found.marks == ("§",)
    assert "860-file sample" in note(report, "§")
    # runs of the same setting with real data beside them change nothing
    assert cell(make(make_run(seed=3), make_run(seed=4)), "H3", "AR").marks == ("§",)


def test_sensitivity_counts_the_runs_that_succeed_at_every_value(make):
    runs = [
        make_run(seed=seed, test=test, train={"lr": lr}, valid={100: test}, columns={"run_id": f"{lr}-{seed}"})
        for lr, tests in ((1e-3, (0.99, 0.2)), (1e-4, (0.99, 0.98)), (1e-2, (0.3, 0.1)))
        for seed, test in enumerate(tests)
    ]
    runs.append(make_run(seed=2, train={"lr": 1e-4}, status="diverged", columns={"run_id": "diverged"}))
    axis = {"sweep": {**grid().sweep, "train.lr": [1e-4, 1e-3, 1e-2]}}
    report = make(*runs, config=grid(**axis, select={**SELECT, "by": "accuracy", "success": 95.0}))
    (found,) = report.sensitivity
    assert (found.row, found.column) == ("H3", "AR")
    assert found.tried == ((1e-4, 2, 3), (1e-3, 1, 2), (1e-2, 0, 2))
    assert (found.rate, found.window) == ((3, 7), "0.0001 or less to 0.001 (10 times)")
    text = render(report, "terminal")
    assert "Runs that succeed, by setting" in text
    assert "2 of 3" in text
    assert make(*runs, config=grid(**axis, select={**SELECT, "by": "accuracy"})).sensitivity == ()
    none = make(*runs, config=grid(**axis, select={**SELECT, "by": "accuracy", "success": 101.0}))
    assert none.sensitivity[0].window == "none"


@pytest.mark.parametrize(
    ("key", "values", "names", "window"),
    [
        ("clip", (None, 1.0), ("1", "None"), "1, None"),
        ("betas", ([0.9, 0.99], [0.9, 0.95]), ("[0.9, 0.95]", "[0.9, 0.99]"), "[0.9, 0.95], [0.9, 0.99]"),
        ("optimizer", ("sgd", "adam"), ("adam", "sgd"), "adam, sgd"),
        ("length", (10, 9), ("9", "10"), "9 or less to 10 or more (1.11 times)"),
    ],
)
def test_a_swept_setting_may_be_null_a_list_or_a_word(make, key, values, names, window):
    """Such a sweep trains for hours before its report is made."""
    runs = [make_run(test=0.99, train={key: value}, columns={"run_id": f"run-{value}"}) for value in values]
    config = {
        "sweep": {**grid().sweep, f"train.{key}": list(values)},
        "select": {"best_of": [f"train.{key}"], "by": "accuracy", "split": "test", "success": 95.0},
    }
    report = make(*runs, config=grid(**config, figure={"kind": "successes", "x_label": key}))
    (found,) = report.sensitivity
    assert [runs for _, _, runs in found.tried] == [1, 1]
    assert found.window == window
    table = next(table for table in grids(report) if table.heading == "Runs that succeed, by setting")
    assert table.header == ("row", "column", *names, "all", "window")
    assert [label.get_text() for label in draw(report).axes[0].get_xticklabels()] == list(names)
    for format in ("terminal", "md", "latex"):
        assert render(report, format)


def test_values_of_several_swept_settings_are_sorted_by_their_size(make):
    runs = [
        make_run(test=0.99, train={"lr": lr, "clip": clip}, columns={"run_id": f"{lr}-{clip}"})
        for lr in (1e-3, 1e-5)
        for clip in (None, 1.0, 0.5)
    ]
    select = {"best_of": ["train.lr", "train.clip"], "by": "accuracy", "split": "test", "success": 95.0}
    sweep = {**grid().sweep, "train.lr": [1e-3, 1e-5], "train.clip": [None, 1.0, 0.5]}
    (found,) = make(*runs, config=grid(sweep=sweep, select=select)).sensitivity
    assert [value for value, _, _ in found.tried] == [(lr, clip) for lr in (1e-5, 1e-3) for clip in (0.5, 1.0, None)]


def test_a_run_without_a_loss_counts_as_the_worst_one(make):
    table = yaml.safe_load(GRID)["table"]
    table["columns"] = {"loss": {"task.name": "associative-recall", "metric": "loss"}}
    runs = []
    for seed, value in enumerate((2.0, 3.0, None)):
        status = "diverged" if value is None else "ok"
        rows = make_run(seed=seed, status=status, columns={"run_id": f"run-{seed}"})
        if value is not None:
            rows.append({**rows[0], "metric": "loss", "unit": "nats", "split": "test", "value": value})
        runs.append(rows)
    select = {"best_of": ["train.lr"], "by": "loss", "split": "test", "success": 2.5}
    none = {"expected": EXPECTED.splitlines()[0], "claims": "claim,left,comparison,right,source\n"}
    (found,) = make(*runs, config=grid(table=table, select=select), **none).sensitivity
    assert found.tried == ((5e-4, 1, 3),)
    assert found.medians == (3.0,)


def test_columns_of_slices_share_runs_and_keep_their_own_failures(make):
    config = grid(table=LENGTHS, figure={"kind": "lines", "x": "slice.length", "x_log2": True})
    expected = (
        "row,column,value,unit,better,seeds,hardware,note,source\n"
        "H3,len 64,90,%,higher,,,,t\nH3,len 128,,%,higher,,,oom; at 128,t\n"
    )
    runs = three(slices={"length=64": 0.9, "length=128": None})
    report = make(*runs, config=config, expected=expected, claims="claim,left,comparison,right,source\n")
    assert cell(report, "H3", "len 64").mean == pytest.approx(90.0)
    assert cell(report, "H3", "len 128").failures == (("oom", 3),)
    assert len(report.costs) == 1
    lines = render(report, "md").splitlines()
    assert sum("oom" in line for line in lines if "| H3  |" in line) == 3  # the paper's, ours, the count
    assert report.figure is not None
    (_, (series,)), *_ = report.figure.panels
    assert [(point.x, len(point.seeds)) for point in series.points] == [(64, 3)]
    assert series.points[0].y == pytest.approx(90.0)
    assert series.published == ((64, 90.0),)


def test_a_mean_over_settings_takes_the_best_run_of_each_and_waits_for_all(make):
    table = {
        "rows": {"H3": {"model.name": "h3"}},
        "columns": {"AR": {"task.name": "associative-recall"}},
        "mean_over": ["train.batch_size"],
    }
    config = grid(
        sweep={"train.batch_size": [32, 64], "train.lr": [1e-3, 1e-2]},
        baseline={"task": {"name": "associative-recall"}, "model": {"name": "h3"}, "train": {"epochs": 200}},
        table=table,
        figure=None,
        select={"best_of": ["train.lr"]},
    )

    def run(seed, batch_size, lr, valid, test):
        return make_run(seed=seed, valid={100: valid}, test=test, train={"batch_size": batch_size, "lr": lr})

    whole = [run(0, 32, 1e-3, 0.5, 0.4), run(0, 32, 1e-2, 0.9, 0.8), run(0, 64, 1e-3, 0.9, 1.0), run(0, 64, 1e-2, 0, 0)]
    half = [run(1, 32, 1e-3, 0.1, 0.1), run(1, 32, 1e-2, 0.9, 0.2)]
    expected = "row,column,value,unit,better,seeds,hardware,note,source\nH3,AR,95,%,higher,,,,t\n"
    claims = "claim,left,comparison,right,source\n"
    # rows stay from call to call; a cell without a number names no value
    first, *few = whole[1:]
    assert not cell(make(first, config=config, expected=expected, claims=claims), "H3", "AR").chosen
    found = cell(make(*few, config=config, expected=expected, claims=claims), "H3", "AR")
    assert found.values == pytest.approx((90.0,))
    assert found.chosen == "train.lr (best of 1 to 2 in every setting, values missing in 1)"
    # a value that is good enough spares those after it in the grid, and none before it
    enough = config.model_copy(update={"select": Select(best_of=("train.lr",), enough=0.9)})
    found = cell(make(config=enough, expected=expected, claims=claims), "H3", "AR")
    assert found.chosen == "train.lr (best of 1 to 2 in every setting, values missing in 1)"
    enough = enough.model_copy(update={"sweep": {**config.sweep, "train.lr": [1e-2, 1e-3]}})
    found = cell(make(config=enough, expected=expected, claims=claims), "H3", "AR")
    assert found.chosen == "train.lr (best of 1 to 2 in every setting)"
    found = cell(make(*whole, *half, config=config, expected=expected, claims=claims), "H3", "AR")
    assert found.values == pytest.approx((90.0,))
    assert found.planned == 3
    assert len(found.run_ids) == 3
    assert found.chosen == "train.lr (best of 2 in every setting)"


def test_the_window_is_a_stretch_of_neighbours_and_says_where_it_may_be_wider():
    def window(*successes: int) -> str:
        tried = tuple((10.0**i, count, 4) for i, count in enumerate(successes))
        return Sensitivity("H3", "AR", tried, (50.0,) * len(tried)).window

    assert window(0, 0, 1, 0) == "none"
    assert window(0, 2, 4, 1) == "10 to 100 (10 times)"
    assert window(4, 0, 2, 3, 0) == "100 to 1e+03 (10 times)"
    assert window(0, 3, 0, 0) == "10"
    assert window(0, 0, 0, 4) == "1e+03 or more"
    assert window(4, 4, 4, 4) == "1 or less to 1e+03 or more (1e+03 times)"
    assert window(4) == "1 (no other was tried)"
