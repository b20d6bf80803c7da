"""Notes, costs and provenance below the table."""

from __future__ import annotations

import os

import pytest
import yaml

from subquad.reports.render import render
from subquad.reports.render.layout import grids
from tests.reports.made import (
    GRID,
    SELECT,
    cell,
    grid,
    make_run,
    note,
    swept,
    three,
)


@pytest.mark.parametrize("format", ["html", "pdf"])
def test_a_full_disk_leaves_the_page_that_was_there(make, tmp_path, monkeypatch, format):
    def full(_):
        raise OSError(28, "No space left on device")

    page = tmp_path / "out" / f"page.{format}"
    page.parent.mkdir()
    page.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        render(make(*three()), format, page)
    assert [path.read_text() for path in page.parent.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"metric": "acuracy"}, "AR: none of its runs has the metric acuracy (did you mean 'accuracy'?)"),
        ({"split": "test-last"}, "AR: its runs have accuracy of test, and none of test-last"),
    ],
)
def test_a_column_of_what_no_run_has_says_so_beside_its_dashes(make, column, words):
    table = yaml.safe_load(GRID)["table"]
    table["columns"]["AR"] |= column
    assert words in make(*three(), config=grid(table=table, figure=None), expected="", claims="").notes
    assert not any(text.startswith("AR: ") for text in make(*three()).notes)


def test_what_has_not_run_is_a_dash_and_counted(make):
    report = make(*three())
    found = cell(report, "S4D", "IH")
    assert found.missing
    assert found.verdict == ""
    assert note(report, "—") == "— not run: 3 of 4 cells"
    lines = [line.split(" | ") for line in render(report, "md").splitlines() if line.startswith("| H3 ")][:2]
    assert [line[1].strip() for line in lines] == ["paper", "ours"]
    assert lines[1][2].strip() == "—"
    # a row of which nothing has run shows what the paper has, and no dashes
    lines = [line for line in render(report, "md").splitlines() if line.startswith("| S4D")]
    assert [line.split(" | ")[1].strip() for line in lines] == ["paper"]
    assert "35.6" in lines[0]


def test_nothing_run_gives_a_whole_table_of_dashes(make):
    report = make()
    assert note(report, "—") == "— not run: 4 of 4 cells"
    assert report.experiment == "demo/table2"
    assert report.scale == "paper"
    assert {claim.verdict for claim in report.claims} == {"not run"}


def test_cells_that_a_scale_leaves_out_are_told_from_those_still_to_run(make):
    config = grid(scales={"paper": {}, "tiny": {"sweep": {"model.name": ["h3"]}}})
    report = make(config=config, scale="tiny")
    assert note(report, "—") == "— not run: 4 of 4 cells, 2 of them not in scale tiny"


def test_reduced_scale_is_marked_and_never_judged(make):
    report = make(*three(scale="small"))
    found = cell(report, "H3", "AR")
    assert report.scale == "small"
    assert found.marks == ("†",)
    assert found.difference is not None
    assert found.verdict == ""
    assert note(report, "†") == "† reduced: scale small (train.epochs: 20); no verdict against the paper"
    assert [claim.marks for claim in report.claims if claim.verdict != "not run"] == [("†",)]


def test_what_holds_for_a_row_or_for_all_cells_is_said_once(make):
    both = ("associative-recall", "induction-heads")
    runs = [run for task in both for run in three(task=task, valid={100: 0.8}, train={"lr": 1e-3})]
    words = "* best by accuracy on valid, mean over seeds, ties by loss: train.lr="
    assert note(make(*runs, config=swept()), "*") == f"{words}0.001 (best of 1 of 2)"
    runs += three("s4d", valid={100: 0.8}, train={"lr": 1e-4})
    picks = "0.0001 (best of 1 of 2): S4D / AR; train.lr=0.001 (best of 1 of 2): H3"
    assert note(make(*runs, config=swept()), "*") == words + picks


def test_choices_that_differ_in_many_cells_stand_in_the_list_of_cells(make):
    tasks = ("associative-recall", "induction-heads")
    names = [f"mixer{i}" for i in range(7)]
    values = yaml.safe_load(GRID)
    config = grid(
        sweep={**values["sweep"], "model.name": names, "train.lr": [1e-3, 1e-4]},
        select=SELECT,
        table={**values["table"], "rows": {name: {"model.name": name} for name in names}},
    )
    runs = [
        run
        for name in names
        for task, lr in zip(tasks, (1e-3, 1e-4), strict=True)
        for run in three(name, task=task, valid={100: 0.8}, train={"lr": lr})
    ]
    empty = {"claims": "claim,left,comparison,right,source\n", "expected": ""}
    few = make(*runs[:6], config=config, **empty)
    assert "column" not in note(few, "*")
    assert all(part.header[-1] != "best at" for part in grids(few))
    report = make(*runs, config=config, **empty)
    assert (
        note(report, "*")
        == "* best by accuracy on valid, mean over seeds, ties by loss: the column `best at` of the table of every cell"
    )
    (listed,) = [part for part in grids(report) if part.heading == "Every cell that has runs"]
    assert listed.header[-1] == "best at"
    assert {line[-1] for line in listed.lines} == {f"train.lr={lr} (best of 1 of 2)" for lr in (0.001, 0.0001)}


def test_speeds_of_different_devices_are_never_pooled(make):
    other = {"device": "NVIDIA A100"}
    report = make(
        make_run(seed=0, speed=[100.0, 110.0]),
        make_run(seed=1, speed=[1000.0, 1010.0], columns=other),
        make_run(seed=2),
    )
    costs = {cost.device: cost for cost in report.costs}
    assert costs["NVIDIA A100"].values["train_throughput"] == (1005.0, 1000.0, 1010.0)
    assert costs["NVIDIA H200"].values["train_throughput"] == (105.0, 100.0, 110.0)
    assert cell(report, "H3", "AR").num_seeds == 3
    assert "device: NVIDIA A100, NVIDIA H200" in report.provenance


def test_a_cost_is_the_median_of_what_was_measured_at_no_certain_length(make):
    rows = make_run(speed=[100.0, 110.0, 900.0])
    (speed,) = (row for row in rows if row["metric"] == "train_throughput")
    (cost,) = make([*rows, {**speed, "slice": "length=64", "value": 5.0, "samples": [5.0]}]).costs
    assert cost.values["train_throughput"] == (110.0, 100.0, 900.0)


def test_provenance_names_commits_and_marks_uncommitted_ones(make):
    report = make(make_run(seed=0), make_run(seed=1, columns={"dirty": True, "started_at": "2026-03-04T00:00:00"}))
    assert "commit: 0123456789, 0123456789-dirty" in report.provenance
    assert "dates: 2026-03-01 to 2026-03-04" in report.provenance
    assert "runs: 2" in report.provenance


def test_costs_that_add_up_over_the_training_are_those_of_its_end(make):
    """A row stands at every evaluation, and their median would be half of it."""
    runs = three()
    for rows in runs:
        rows[:0] = [
            {**rows[0], "metric": "train_flops", "unit": "flop", "split": "", "value": 1e9 * step, "step": step}
            for step in (50, 100)
        ]
    (cost,) = make(*runs).costs
    assert cost.values["train_flops"] == (1e11, 1e11, 1e11)
