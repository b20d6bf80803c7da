"""Rows, columns and published numbers, before any run is read."""

from __future__ import annotations

import contextlib
import copy
import json
import re

import pytest
import yaml

from subquad.reports.render.plan import read_expected
from subquad.suite.identity import setting_of
from subquad.suite.settings.grid import points
from tests.reports.made import (
    EXPECTED,
    GRID,
    cell,
    grid,
    make_run,
    three,
)


def test_an_empty_line_before_the_header_is_left_out(tmp_path):
    path = tmp_path / "expected.csv"
    path.write_text("\nrow,column,value,unit,better,note,source\n\na,b,1.5,%,higher,,table 1\n")
    assert read_expected(path)["a", "b"].value == 1.5


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ({"model.name": "h33"}, r"grid.yaml: table.rows.Typo: no run has model.name=h33 \(did you mean 'h3'\?\)"),
        ({"model.nam": "h3"}, r"grid.yaml: table.rows.Typo: no run has 'model.nam' \(did you mean 'model.name'\?\)"),
    ],
)
def test_a_row_that_no_run_can_have_is_an_error_and_not_called_missing(make, selector, words):
    table = {"rows": {"Typo": selector}, "columns": {"accuracy": {}}}
    with pytest.raises(ValueError, match=words):
        make(*three(), config=grid(table=table))


def test_rows_only_the_paper_has_are_shown_and_not_counted(make):
    report = make(*three())
    assert not cell(report, "Random", "IH").missing
    assert report.cells[0].row == "Random"


HEADER = EXPECTED.splitlines()[0]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("row,column,value,unit,note,source\n", r": the header has no better; it needs row,column,value,unit,better,"),
        ("row;column;value\n", r": the header has no row, .*, separated by commas"),
        (f"{HEADER}\nH3,AR,99.8,%\n", r", line 2: has 4 values, needs 9; .* nothing between two commas"),
        (f"{HEADER}\nH3,AR,1,%,higher,,,,s\n\nH3,IH,1,%,higher,,,,Table 2, 3\n", r", line 4: has 10 values, needs 9;"),
        (f"{HEADER}\nH3,AR,99.8 %,%,higher,,,,s\n", r", line 2: value is '99.8 %', no number; leave it empty"),
        (f"{HEADER}\nH3,AR,nan,%,higher,,,,s\n", r", line 2: value is 'nan', no number"),
        (f"{HEADER}\nH3,AR,99.8,%,Higher,,,,s\n", r", line 2: better is 'Higher'; write higher, lower or nothing"),
        (f"{HEADER}\nH3,AR,1,%,,,,,s\nH3,AR,2,%,,,,,s\n", r", line 3: H3 \| AR has a number already"),
        (f"{HEADER}\nH3,AR,99.8,%,higher,,,,\0\xe9".encode("latin-1"), r": cannot be read as a CSV file in UTF-8"),
    ],
)
def test_a_wrong_line_of_the_published_values_is_named(make, tmp_path, expected, message):
    path = tmp_path / "reports" / "demo" / "table2" / "expected.csv"
    path.parent.mkdir(parents=True)
    path.write_bytes(expected if isinstance(expected, bytes) else expected.encode())
    with pytest.raises(ValueError, match=f"^{path}{message}") as raised:
        read_expected(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_a_spreadsheet_saved_is_read_as_any_other(tmp_path):
    path = tmp_path / "expected.csv"
    path.write_text(EXPECTED)
    expected = read_expected(path)
    path.write_bytes(EXPECTED.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_expected(path) == expected
    assert expected["H3", "AR"].value == 99.8


@pytest.mark.parametrize(
    ("unit", "table", "shown"),
    [
        ("fraction", {}, "%"),
        ("%", {"percent": False}, "fraction"),
        ("%", {"metric": "loss"}, "nats"),
        ("tokens/s", {"metric": "train_throughput"}, "K tokens/s"),
        ("ppl", {"metric": "perplexity"}, ""),
        ("%", {"metric": "of_a_plugin"}, ""),
    ],
)
def test_a_published_number_in_another_unit_than_ours_is_an_error(make, unit, table, shown):
    table = {**yaml.safe_load(GRID)["table"], **table}
    expected = f"{HEADER}\nH3,AR,0.99,{unit},,,,,s\n"
    with (
        pytest.raises(ValueError, match=rf"H3 \| AR: its unit is {unit}, and the table shows {shown};")
        if shown
        else (contextlib.nullcontext())
    ):
        make(config=grid(table=table, figure=None), expected=expected, claims="")


@pytest.mark.parametrize(
    ("place", "words"), [("h3,AR", "no row 'h3', but 'H3'"), ("H3, ar", "no column ' ar', but 'AR'")]
)
def test_a_published_number_that_would_stand_in_no_cell_for_a_capital_or_a_space_is_an_error(make, place, words):
    with pytest.raises(ValueError, match=rf"expected.csv: the table has {words}; write both alike"):
        make(expected=f"{HEADER}\n{place},99,%,,,,,s\n", claims="")


@pytest.mark.parametrize(("better", "metric", "is_wrong"), [("lower", "accuracy", True), ("higher", "coverage", False)])
def test_a_published_number_that_contradicts_its_metric_is_an_error(make, better, metric, is_wrong):
    table = {**yaml.safe_load(GRID)["table"], "metric": metric}
    expected = f"{HEADER}\nH3,AR,99,,{better},,,,s\n"
    words = r"H3 \| AR: better is lower, and of accuracy a larger value is better"
    with pytest.raises(ValueError, match=words) if is_wrong else contextlib.nullcontext():
        make(config=grid(table=table, figure=None), expected=expected, claims="")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"at": "bset"}, "at: Input should be 'best', got 'bset'"),
        ({"tolerance": "small"}, "tolerance: Input should be a valid number"),
        ({"tolerance": -1}, "tolerance: Input should be greater than or equal to 0"),
        ({"split": "tset"}, "split: Input should be 'train', 'valid', 'test'"),
        ({"slice": 512}, "slice: Input should be a valid string"),
    ],
)
def test_what_a_column_measures_is_checked(option, words):
    table = yaml.safe_load(GRID)["table"]
    table["columns"]["AR"] |= option
    with pytest.raises(ValueError, match=rf"table\.columns: AR: {words}"):
        grid(table=table)


def test_the_best_evaluation_needs_a_direction():
    table = yaml.safe_load(GRID)["table"]
    table["columns"]["AR"] |= {"at": "best", "metric": "coverage"}
    with pytest.raises(ValueError, match="'coverage' does not say whether a smaller value is better"):
        grid(table=table)


def test_a_selector_that_selects_nothing_is_an_error(make):
    bad = {**yaml.safe_load(GRID)["table"], "rows": {"H3": {"modle.name": "h3"}}}
    with pytest.raises(ValueError, match=r"modle\.name"):
        make(config=grid(table=bad))


def test_a_column_may_state_another_value_for_a_key_of_the_row(make):
    table = yaml.safe_load(GRID)["table"]
    table["rows"] = {"H3": {"model.name": "h3", "task.name": "induction-heads"}, "S4D": {"model.name": "s4d"}}
    report = make(*three(), *three("s4d"), config=grid(table=table, figure=None))
    found = {(cell.row, cell.column): cell.num_seeds for cell in report.cells if cell.mean is not None}
    assert found == {("H3", "AR"): 3, ("S4D", "AR"): 3}


def test_a_setting_in_words_leaves_the_run_as_it_is():
    config = {"seed": 3, "task": {"name": "a", "data": "/x"}, "train": {"lr": 1.0, "init_from": {"base": "b", "n": 2}}}
    before = copy.deepcopy(config)
    assert json.loads(setting_of(config, ["train.lr", "task.name.more", "bench.x"])) == {
        "task": {"name": "a"},
        "train": {"init_from": {"n": 2}},
    }
    assert config == before


def test_a_grid_without_a_table_shows_a_row_for_every_point(make):
    report = make(*three(), config=grid(table=None, figure=None), claims="claim,left,comparison,right,source\n")
    assert len(report.cells) == 4
    found = next(c for c in report.cells if c.mean is not None)
    assert "model.name=h3" in found.row
    assert found.num_seeds == 3


AXES = {"model.name": ["s4d", "h3"], "train.clip": [0.0, 1.0], "train.lr": [1e-4, 1e-3, 1e-2]}


@pytest.mark.parametrize(
    ("sweep", "x", "lines"),
    [
        (AXES, "train.lr", ["s4d 0.0", "s4d 1.0", "h3 0.0", "h3 1.0"]),
        ({key: AXES[key] for key in reversed(AXES)}, "train.lr", ["0.0 s4d", "0.0 h3", "1.0 s4d", "1.0 h3"]),
        (
            {"model.name": ["s4d", "h3"], "size": [{"train.lr": lr, "train.epochs": int(1 / lr)} for lr in (0.1, 0.2)]},
            "train.lr",
            ["s4d", "h3"],
        ),
        ({"train.lr": [1e-4, 1e-3]}, "train.lr", ["all"]),
    ],
)
def test_a_figure_over_an_axis_has_a_line_for_every_combination_of_the_others(make, sweep, x, lines):
    config = grid(table=None, sweep=sweep, figure={"kind": "lines", "x": x})
    plan = [dict(point) for point in points(config, "paper")]
    runs = [
        make_run(
            point["model.name"],
            "induction-heads",
            train={key.removeprefix("train."): value for key, value in point.items() if key.startswith("train.")},
        )
        for point in plan
    ]
    nothing = {
        "expected": "row,column,value,unit,better,seeds,hardware,note,source\n",
        "claims": "claim,left,comparison,right,source\n",
    }
    report = make(*runs, config=config, **nothing)
    assert report.figure is not None
    ((_, panel),) = report.figure.panels
    assert [re.sub(r"[a-z]+\.[a-z]+=|,", "", series.label) for series in panel] == lines
    values = list(dict.fromkeys(point[x] for point in plan))
    assert all([point.x for point in series.points] == values for series in panel)
    assert len({cell.row for cell in report.cells}) == len(lines)
