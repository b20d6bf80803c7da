"""The rules of a report, on stored rows written and read through `suite.store.storage`."""

from __future__ import annotations

import ast
import copy
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.colors import to_hex

from reports.render import Report, build, render
from reports.render.cells import Cell, judge
from reports.render.claims import _number as ratio
from reports.render.claims import tally
from reports.render.crossover import Crossover
from reports.render.layout import grids
from reports.render.plan import Published, read_expected
from reports.render.plots import draw
from reports.render.rows import matches, slice_part
from reports.render.sensitivity import Sensitivity
from reports.render.units import amount, fixed
from suite.identity import setting_of
from suite.options import parse
from suite.settings.config import ExperimentConfig
from suite.settings.grid import points, same
from suite.settings.report_spec import Select
from suite.store import storage
from suite.store.noise import error_of_median

GOLDEN = Path(__file__).parent / "golden"

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
figure: {kind: bars, x: column}
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


def grid(**changes: Any) -> ExperimentConfig:
    """The fixture's grid with top-level keys replaced."""
    return parse(ExperimentConfig, {**yaml.safe_load(GRID), **changes}, "grid.yaml")


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
) -> list[dict[str, Any]]:
    """The rows of one run, as the runner writes them."""
    epochs = 20 if scale == "small" else 400 if task == "induction-heads" else 200
    config = {
        "task": {"name": task, "version": 1, "vocab_size": 20},
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


@pytest.fixture
def make(tmp_path: Path):
    """Writes runs as parquet, one file each, reads them back, and builds a report."""

    def report(
        *runs: list[dict[str, Any]],
        config: ExperimentConfig | None = None,
        expected: str = EXPECTED,
        claims: str = CLAIMS,
        scale: str | None = None,
    ) -> Report:
        folder = tmp_path / "reports" / "demo" / "table2"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "expected.csv").write_text(expected)
        (folder / "claims.csv").write_text(claims)
        for rows in runs:
            first = rows[0]
            storage.write(
                storage.result_path(tmp_path / "results", "demo/table2", first["scale"], first["run_id"]), rows
            )
        frame = storage.read(storage.files([tmp_path / "results"], "demo/table2"))
        return build(config or grid(), folder, frame, scale=scale)

    return report


def cell(report: Report, row: str, column: str) -> Cell:
    return next(cell for cell in report.cells if (cell.row, cell.column) == (row, column))


def note(report: Report, start: str) -> str:
    return next((line for line in report.notes if line.startswith(start)), "")


def three(
    model: str = "h3", task: str = "associative-recall", values: tuple[float, ...] = (0.996, 0.998, 1.0), **kwargs
):
    """One run for each value, seeds 0, 1, ..."""
    return [make_run(model, task, seed, value, **kwargs) for seed, value in enumerate(values)]


# the reference rows that the byte-identical outputs are made of
def twenty_rows() -> list[list[dict[str, Any]]]:
    runs = three(speed=[1.00e6, 1.02e6, 0.99e6])
    runs += [make_run("s4d", "associative-recall", 0, 0.861, valid={100: 0.86})]
    runs += [make_run("s4d", "associative-recall", 1, status="diverged")]
    runs += [make_run("s4d", "induction-heads", 0, 0.204)]
    assert sum(map(len, runs)) == 20
    return runs


@pytest.mark.parametrize(("format", "name"), [("terminal", "report.txt"), ("md", "report.md"), ("latex", "report.tex")])
def test_output_is_byte_identical_to_the_kept_one(make, format, name):
    report = make(*twenty_rows())
    text = render(report, format)
    assert text == (GOLDEN / name).read_text(), "a wanted change: render the fixture again and read the difference"


def used(version: int, backend: str) -> dict[str, Any]:
    """The columns of a run that used one operator."""
    return {"operators": json.dumps({"lti_ssm": {"version": version, "backend": backend}})}


def runs_of_different_operators() -> list[list[dict[str, Any]]]:
    """Cells whose runs used two versions, two backends, one of each, and runs with and without a record."""
    return [
        make_run("h3", "associative-recall", 0, 0.996, columns=used(1, "triton")),
        make_run("h3", "associative-recall", 1, 0.998, columns=used(2, "triton")),
        make_run("h3", "induction-heads", 0, 1.0, columns=used(2, "triton")),
        make_run("h3", "induction-heads", 1, 0.99, columns=used(2, "torch")),
        make_run("s4d", "associative-recall", 0, 0.86),
        make_run("s4d", "associative-recall", 1, 0.87, columns=used(2, "triton")),
        make_run("s4d", "induction-heads", 0, 0.36, columns=used(2, "triton")),
        make_run("s4d", "induction-heads", 1, 0.35, columns=used(2, "triton")),
    ]


@pytest.mark.parametrize(
    ("format", "name"), [("terminal", "operators.txt"), ("md", "operators.md"), ("latex", "operators.tex")]
)
def test_a_mean_over_different_operators_is_marked_and_explained(make, format, name):
    text = render(make(*runs_of_different_operators()), format)
    assert text == (GOLDEN / name).read_text(), "a wanted change: render the fixture again and read the difference"


VERDICTS = {
    "expected": """row,column,value,unit,better,seeds,hardware,note,source
S4D,IH,35.6,%,higher,,,,paper Table 2
S4D,AR,86.0,%,higher,,,,paper Table 2
S4D,loss,5.0,nats,lower,,,,paper Table 2
H3,IH,100.0,%,higher,,,,paper Table 2
H3,AR,99.8,%,higher,,,,paper Table 2
H3,loss,1.0,nats,lower,,,,paper Table 2
""",
    "claims": """claim,left,comparison,right,source,if,follows,note
H3 solves associative recall,H3 | AR,>=,70,section 3,,,
H3 beats S4D on induction heads,H3 | IH,>,S4D | IH,section 3,,,the paper has S4
S4D does not extrapolate,S4D | IH,<,50,section 4,S4D | AR >= 99,,
S4D stays below 60,S4D | IH,<,60,section 4,,S4D does not extrapolate,
H3 has the lower loss,H3 | loss,<,S4D | loss,section 3,,,
""",
}


def runs_that_could_flatter() -> list[list[dict[str, Any]]]:
    """High variance, a diverged seed, a claim that is true for no reason, a loss, and marks of several kinds."""
    runs = []
    for seed, (h3, s4d) in enumerate(zip((1.0, 1.0, 0.2), (0.9, 0.86, 0.82), strict=True)):
        runs.append(make_run("h3", "associative-recall", seed, h3, columns=used(1 + seed % 2, "triton")))
        runs.append(make_run("s4d", "associative-recall", seed, s4d))
    runs += [make_run("h3", "induction-heads", 0, 1.0), make_run("h3", "induction-heads", 1, status="diverged")]
    runs.append(make_run("s4d", "induction-heads", 0, 0.1))
    losses = {"h3": (1.0, 9.0, 1.0), "s4d": (3.0, 2.0, 2.5)}
    for rows in runs:
        head = rows[0]
        if head["task"] == "associative-recall":
            value = losses[head["model"]][head["seed"]]
            rows.append({**head, "metric": "loss", "unit": "nats", "split": "test", "slice": "", "value": value})
    return runs


@pytest.mark.parametrize(
    ("format", "name"), [("terminal", "verdicts.txt"), ("md", "verdicts.md"), ("latex", "verdicts.tex")]
)
def test_verdicts_that_cannot_flatter_are_byte_identical_to_the_kept_ones(make, format, name):
    table = yaml.safe_load(GRID)["table"]
    table["columns"]["loss"] = {"task.name": "associative-recall", "metric": "loss"}
    report = make(*runs_that_could_flatter(), config=grid(table=table), **VERDICTS)
    text = render(report, format)
    assert text == (GOLDEN / name).read_text(), "a wanted change: render the fixture again and read the difference"


def test_operators_of_runs_that_gave_no_value_do_not_mark_a_cell(make):
    runs = [make_run(seed=0, columns=used(1, "torch")), make_run(seed=1, status="diverged", columns=used(2, "triton"))]
    assert cell(make(*runs), "H3", "AR").mixed == ""


def test_output_does_not_depend_on_the_order_of_the_rows(make, tmp_path):
    runs = twenty_rows()
    expected = render(make(*runs), "terminal")
    frame = pd.concat([storage.read([path]) for path in reversed(storage.files([tmp_path / "results"], "demo/table2"))])
    again = build(grid(), tmp_path / "reports" / "demo" / "table2", frame.iloc[::-1])
    assert render(again, "terminal") == expected


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


def test_one_seed_has_no_spread_and_is_marked(make):
    report = make(make_run())
    found = cell(report, "H3", "AR")
    assert (found.sd, found.num_seeds, found.marks) == (None, 1, ("‡",))
    assert "one seed" in note(report, "‡")
    assert "99.8‡" in render(report, "terminal")
    assert "1 of 3" in render(report, "terminal")


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


def test_a_run_cut_off_before_its_last_row_counts_as_failed(make):
    rows = [row for row in make_run() if row["metric"] != "run"]
    assert cell(make(rows), "H3", "AR").failures == (("failed", 1),)


def test_reduced_scale_is_marked_and_never_judged(make):
    report = make(*three(scale="small"))
    found = cell(report, "H3", "AR")
    assert report.scale == "small"
    assert found.marks == ("†",)
    assert found.difference is not None
    assert found.verdict == ""
    assert note(report, "†") == "† reduced: scale small (train.epochs: 20); no verdict against the paper"
    assert [claim.marks for claim in report.claims if claim.verdict != "not run"] == [("†",)]


def test_paper_scale_is_preferred_and_another_shown_on_demand(make):
    runs = [*three(scale="small", values=(0.5, 0.5, 0.5)), *three()]
    assert cell(make(*runs), "H3", "AR").mean == pytest.approx(99.8)
    assert cell(make(*runs, scale="small"), "H3", "AR").mean == pytest.approx(50.0)
    with pytest.raises(ValueError, match=r"unknown scale 'smal'.*small"):
        make(*runs, scale="smal")


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


def test_real_data_go_before_stand_ins(make):
    later = {"started_at": "2027-01-01T00:00:00+00:00"}
    sample = three(stand_in="sample", values=(0.1, 0.1, 0.1), columns=later, train={"batch_size": 7})
    found = cell(make(*sample, *three()), "H3", "AR")
    assert found.mean == pytest.approx(99.8)
    assert found.marks == ()


def test_runs_that_are_no_point_of_the_grid_are_left_out_and_named(make):
    report = make(*three(), make_run(seed=3, test=0.1, train={"epochs": 1}))
    assert cell(report, "H3", "AR").num_seeds == 3
    assert note(report, "left out") == ("left out: 1 run with train.epochs: 1, which no point of this grid has")


def test_settings_are_never_averaged_the_newest_is_shown(make):
    later = {"started_at": "2027-01-01T00:00:00+00:00"}
    report = make(*three(values=(0.2, 0.2, 0.2)), *three(columns=later, train={"clip": 1.0}))
    assert cell(report, "H3", "AR").mean == pytest.approx(99.8)
    assert note(report, "left out") == "left out: 3 runs with another setting than the runs that their cell shows"


def test_the_newest_setting_is_that_of_the_newest_run(make):
    """Its other runs may be older than those of the setting that is left out."""

    def run(seed, year, test, **train):
        return make_run(seed=seed, test=test, columns={"started_at": f"{year}-01-01T00:00:00+00:00"}, train=train)

    old, newest = run(0, 2026, 0.9), run(1, 2028, 0.9)
    between = run(0, 2027, 0.2, clip=1.0), run(1, 2027, 0.2, clip=1.0)
    assert cell(make(old, *between, newest), "H3", "AR").values == pytest.approx((90.0, 90.0))


def test_runs_that_the_grid_has_go_before_newer_ones_with_another_setting(make, tmp_path):
    later = {"started_at": "2027-01-01T00:00:00+00:00"}
    make(*three(), *three(values=(0.2, 0.2, 0.2), columns=later, train={"clip": 1.0}))
    frame = storage.read(storage.files([tmp_path / "results"], "demo/table2"))
    ours = json.loads(frame[frame["started_at"] < "2027"]["config"].iloc[0])
    asked = []

    def planned(scale):
        asked.append(scale)
        # the data need not be here, and any seed stands for all
        return [{**ours, "data": "missing", "seed": 7}]

    report = build(grid(), tmp_path / "reports" / "demo" / "table2", frame, planned=planned)
    assert cell(report, "H3", "AR").mean == pytest.approx(99.8)
    assert asked == ["paper"]


SELECT = {"best_of": ["train.lr"], "by": "accuracy", "split": "valid"}


def swept() -> ExperimentConfig:
    values = yaml.safe_load(GRID)
    return grid(sweep={**values["sweep"], "train.lr": [1e-3, 1e-4]}, select=SELECT)


def test_the_best_value_is_chosen_on_validation_and_not_on_test(make):
    report = make(
        *three(values=(0.90, 0.90, 0.90), valid={50: 0.2, 100: 0.8}, train={"lr": 1e-3}),
        *three(values=(0.99, 0.99, 0.99), valid={50: 0.9, 100: 0.7}, train={"lr": 1e-4}),
        config=swept(),
    )
    found = cell(report, "H3", "AR")
    assert found.mean == pytest.approx(90.0)
    assert found.chosen == "train.lr=0.001 (best of 2)"
    assert (
        note(report, "*")
        == "* best by accuracy on valid, mean over seeds, ties by loss: train.lr=0.001 (best of 2): H3 / AR"
    )


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


def test_a_cell_says_of_how_many_values_it_is_the_best(make):
    report = make(*three(values=(0.9, 0.9, 0.9), valid={100: 0.8}, train={"lr": 1e-3}), config=swept())
    assert cell(report, "H3", "AR").chosen == "train.lr=0.001 (best of 1 of 2)"


def test_where_a_value_may_be_enough_one_with_fewer_seeds_is_not_chosen(make):
    whole = three(values=(0.8, 0.8, 0.8), valid={100: 0.9}, train={"lr": 1e-3})
    given_up = make_run(seed=0, test=0.99, valid={100: 0.99}, train={"lr": 1e-4})
    assert cell(make(*whole, given_up, config=swept()), "H3", "AR").mean == pytest.approx(99.0)
    enough = swept().model_copy(update={"select": Select(best_of=("train.lr",), enough=0.9)})
    assert cell(make(*whole, given_up, config=enough), "H3", "AR").mean == pytest.approx(80.0)


RATES = ([1e-3, 1e-4], [1e-4, 1e-3])


def swept_in(rates: list[float], **select: Any) -> ExperimentConfig:
    values = yaml.safe_load(GRID)
    return grid(sweep={**values["sweep"], "train.lr": rates}, select={**SELECT, **select})


@pytest.mark.parametrize("better", [1e-3, 1e-4])
def test_of_equal_values_the_one_with_the_smaller_validation_loss_is_chosen(make, better):
    # equal means of other seeds, whose plain sums differ in the last bit
    accuracies = {1e-3: (0.1, 0.2, 0.3), 1e-4: (0.3, 0.2, 0.1)}
    runs = [
        make_run(
            seed=seed,
            test=0.9 if lr == better else 0.5,
            valid={50: 1.0, 100: accuracy},
            loss={50: 0.0 if lr != better else 9.0, 100: (0.2 if lr == better else 0.3) - 0.1 * seed},
            train={"lr": lr},
        )
        for lr in RATES[0]
        for seed, accuracy in enumerate(accuracies[lr])
    ]
    found = cell(make(*runs, config=swept()), "H3", "AR")
    assert found.mean == pytest.approx(90.0)
    assert found.chosen == f"train.lr={better} (best of 2)"


def test_the_loss_of_a_tie_is_that_of_the_weights_the_run_kept(make):
    runs = [
        make_run(test=0.9, valid={50: 0.8, 75: 0.8, 100: 0.7}, loss={50: 0.1, 75: 9, 100: 9}, train={"lr": 1e-4}),
        make_run(test=0.5, valid={50: 0.7, 100: 0.8}, loss={50: 0.0, 100: 0.2}, train={"lr": 1e-3}),
    ]
    kept = [[{**row, "config": row["config"].replace('"last"', '"best"')} for row in rows] for rows in runs]
    assert cell(make(*kept, config=swept()), "H3", "AR").mean == pytest.approx(90.0)


def test_a_smaller_loss_does_not_outweigh_a_better_value(make):
    runs = [
        make_run(test=0.9, valid={100: 0.81}, loss={100: 0.3}, train={"lr": 1e-4}),
        make_run(test=0.5, valid={100: 0.80}, loss={100: 0.2}, train={"lr": 1e-3}),
    ]
    assert cell(make(*runs, config=swept()), "H3", "AR").mean == pytest.approx(90.0)


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_without_a_loss_the_first_of_equal_values_in_the_grid_is_chosen(make, rates, names):
    # a loss that only the second value has decides nothing
    runs = [
        make_run(
            test=test,
            valid={100: 1.0},
            loss=loss,
            train={"lr": lr},
            columns={"run_id": f"h3-associative-recall-{name}"},
        )
        for lr, test, loss, name in zip(rates, (0.9, 0.5), (None, {100: 0.1}), names, strict=True)
    ]
    found = cell(make(*runs, config=swept_in(rates)), "H3", "AR")
    assert found.mean == pytest.approx(90.0)
    assert found.chosen == f"train.lr={rates[0]} (best of 2)"


@pytest.mark.parametrize("rates", RATES)
def test_a_value_that_run_may_skip_changes_no_choice(make, rates):
    config = swept_in(rates, enough=0.9)
    good = make_run(test=0.9, valid={100: 0.95}, loss={100: 0.2}, train={"lr": rates[0]})
    better = make_run(test=0.5, valid={100: 1.0}, loss={100: 0.1}, train={"lr": rates[1]})
    assert cell(make(good, config=config), "H3", "AR").mean == pytest.approx(90.0)
    report = make(better, config=config)
    assert cell(report, "H3", "AR").mean == pytest.approx(90.0)
    assert note(report, "*").startswith(
        "* first with 0.9 in every seed, else best by accuracy on valid, mean over seeds, ties by loss: "
    )


@pytest.mark.parametrize("rates", RATES)
def test_a_good_value_is_not_called_the_first_while_runs_of_an_earlier_one_are_missing(make, rates):
    config = swept_in(rates, enough=0.9)
    first, later = (three(values=(0.9, 0.9, 0.9), valid={100: 0.95}, train={"lr": lr}) for lr in rates)
    for found in (later, first[:2]):
        # two seeds of three are not all of them
        assert cell(make(*found, config=config), "H3", "AR").chosen == f"train.lr={rates[1]} (best of 1 of 2)"
    assert cell(make(*first, config=config), "H3", "AR").chosen == f"train.lr={rates[0]} (best of 2)"


def test_a_good_value_after_one_that_is_not_is_the_first(make):
    config = swept_in([1e-3, 1e-4, 1e-5], enough=0.9)
    bad, good = (make_run(valid={100: valid}, train={"lr": lr}) for lr, valid in ((1e-3, 0.8), (1e-4, 0.95)))
    assert cell(make(bad, good, config=config), "H3", "AR").chosen == "train.lr=0.0001 (best of 2)"


def test_selection_looks_at_the_weights_the_run_kept(make):
    kept = {"keep": "best"}
    report = make(
        *three(values=(0.90, 0.90, 0.90), valid={50: 0.2, 100: 0.8}, train={"lr": 1e-3, **kept}),
        *three(values=(0.99, 0.99, 0.99), valid={50: 0.9, 100: 0.7}, train={"lr": 1e-4, **kept}),
        config=swept(),
    )
    assert cell(report, "H3", "AR").mean == pytest.approx(99.0)


def test_selection_takes_the_mean_over_seeds_and_shuns_failures(make):
    lucky = [
        make_run(seed=0, test=0.5, valid={100: 0.99}, train={"lr": 1e-3}),
        make_run(seed=1, status="diverged", train={"lr": 1e-3}),
        make_run(seed=2, status="diverged", train={"lr": 1e-3}),
    ]
    steady = three(values=(0.8, 0.8, 0.8), valid={100: 0.8}, train={"lr": 1e-4})
    found = cell(make(*lucky, *steady, config=swept()), "H3", "AR")
    assert found.mean == pytest.approx(80.0)
    assert found.failures == ()


def test_selection_is_by_the_mean_and_not_by_the_best_the_median_or_the_worst_seed(make):
    # the first value has the best seed and the best median, the second the best of the worst seeds
    values = {1e-3: (0.9, 0.9, 0.0), 1e-4: (0.7, 0.7, 0.7), 1e-5: (0.8, 0.8, 0.6)}
    runs = [
        make_run(seed=seed, valid={100: valid}, train={"lr": lr})
        for lr, seeds in values.items()
        for seed, valid in enumerate(seeds)
    ]
    assert cell(make(*runs, config=swept_in(list(values))), "H3", "AR").chosen == "train.lr=1e-05 (best of 3)"


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


def test_selection_by_a_loss_takes_the_lowest(make):
    def with_loss(lr: float, loss: float, accuracy: float) -> list[dict[str, Any]]:
        rows = make_run(test=accuracy, train={"lr": lr})
        return [{**rows[0], "metric": "loss", "unit": "nats", "value": loss, "split": "valid"}, *rows]

    config = swept()
    config = grid(sweep=config.sweep, select={**SELECT, "by": "loss"})
    report = make(with_loss(1e-3, 0.1, 0.7), with_loss(1e-4, 2.0, 0.9), config=config)
    assert cell(report, "H3", "AR").mean == pytest.approx(70.0)


def test_the_best_evaluation_has_the_highest_accuracy_or_the_lowest_loss(make):
    columns = {name: {"metric": name, "split": "valid", "at": "best"} for name in ("accuracy", "loss")}
    config = grid(table={"rows": {"H3": {"model.name": "h3"}}, "columns": columns}, figure=None)
    run = make_run(valid={50: 0.5, 75: 0.9, 100: 0.7}, loss={50: 2.0, 75: 1.0, 100: 3.0})
    report = make(run, config=config, expected=EXPECTED.splitlines()[0], claims=CLAIMS.splitlines()[0])
    assert [cell(report, "H3", name).mean for name in columns] == pytest.approx([90.0, 1.0])


def test_claims_hold_fail_or_wait(make):
    both = [*three(), *three("s4d", values=(0.86, 0.86, 0.86)), *three(task="induction-heads", values=(1.0, 1.0, 1.0))]
    waiting = make(*both).claims
    assert [claim.verdict for claim in waiting] == ["holds", "not run"]
    done = make(*both, *three("s4d", "induction-heads", (0.356, 0.35, 0.36))).claims
    assert [(claim.verdict, claim.detail) for claim in done] == [("holds", "3 seeds"), ("holds", "2 of 2, 3 seeds")]


def test_a_claim_fails_at_one_column_even_while_others_wait(make):
    report = make(*three(values=(0.5, 0.5, 0.5)), *three("s4d", values=(0.86, 0.86, 0.86)))
    first, second = report.claims
    assert first.verdict == "fails"
    assert (second.verdict, second.detail) == ("fails", "50.00 against 86.00 at AR, 3 seeds")


def test_a_claim_is_unclear_within_its_noise_or_where_a_seed_is_lost(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,>=,95,s\n"
    steady = make(*three(values=(0.98, 0.99, 1.0)), claims=claims).claims[0]
    noisy = make(*three(values=(0.90, 1.0, 1.0)), claims=claims).claims[0]
    lost = make(*three(values=(0.98, 0.99)), make_run(seed=2, status="diverged"), claims=claims).claims[0]
    assert [claim.verdict for claim in (steady, noisy, lost)] == ["holds", "unclear", "unclear"]
    assert noisy.detail == "by 1.67, two standard errors are 6.67, 3 seeds"
    assert lost.detail == "1 run without a value, 2 seeds"


@pytest.mark.parametrize(("comparison", "verdict"), [(">", "fails"), (">=", "holds"), ("<", "fails")])
def test_equal_sides_are_neither_larger_nor_smaller(make, comparison, verdict):
    claims = f"claim,left,comparison,right,source\na,H3 | AR,{comparison},98,s\n"
    (claim,) = make(*three(values=(0.98, 0.98, 0.98)), claims=claims).claims
    assert claim.verdict == verdict


def test_a_claim_cannot_hold_vacuously_and_one_that_follows_is_not_counted(make):
    claims = (
        "claim,left,comparison,right,source,if,follows,note\n"
        "S4D fails beyond,S4D | AR,<,50,s,S4D | IH >= 99,,the paper has S4\n"
        "S4D fails clearly,S4D | AR,<,60,s,,S4D fails beyond,\n"
    )
    assert make(*three("s4d", values=(0.2, 0.2, 0.2)), claims=claims).claims[0].verdict == "not run"
    unsolved = [*three("s4d", values=(0.2, 0.2, 0.2)), *three("s4d", "induction-heads", (0.1, 0.1, 0.1))]
    first, second = make(*unsolved, claims=claims).claims
    assert (first.verdict, first.detail) == ("void", "needs S4D | IH >= 99, got 10.00, 3 seeds")
    assert tally([first, second]) == (0, 1)
    assert second.verdict == "holds"
    solved = [*three("s4d", values=(0.2, 0.2, 0.2)), *three("s4d", "induction-heads", (1.0, 1.0, 1.0))]
    report = make(*solved, claims=claims)
    assert report.claims[0].verdict == "holds"
    assert tally(report.claims) == (1, 1)
    text = render(report, "terminal")
    assert "S4D fails beyond [the paper has S4]" in text
    assert "(not counted: follows from 'S4D fails beyond')" in text


def test_a_claim_carries_every_mark_of_its_cells(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,>,S4D | AR,s\n"
    runs = [make_run(columns=used(1, "triton")), make_run(seed=1, columns=used(2, "triton"))]
    (claim,) = make(*runs, make_run("s4d", test=0.5, stand_in="a sample"), claims=claims).claims
    assert claim.marks == ("‡", "§", "¶")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,H3 | AR,!=,1,s", "'!=' is not one of"),
        ("x,H4 | AR,>,1,s", "no 'H4'.*did you mean 'H3'"),
        ("x,H3 | XX,>,1,s", "no 'XX'"),
        ("x,much,>,1,s", "neither a number nor"),
        ("x,H3 | AR,>,1,s,H3 is good", "if is not `row | column >= number`, got 'H3 is good'"),
        ("x,H3 | AR,>,1,s,,y", "follows names no other claim, 'y'"),
    ],
)
def test_a_claim_about_nothing_is_an_error(make, line, message):
    with pytest.raises(ValueError, match=message):
        make(claims=f"claim,left,comparison,right,source,if,follows\n{line}\n")


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


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ("claim,left,comparison,right\n", r": the header has no source; it needs claim,left,comparison,right,source"),
        ("claim,left,comparison,right,source,if\nx,H3 | AR,>\n", r", line 2: has 3 values, needs 5 to 6;"),
        ("claim,left,comparison,right,source\nx, y,H3 | AR,>,1,s\n", r", line 2: has 6 values, needs 5; put a text"),
    ],
)
def test_a_wrong_line_of_the_claims_is_named(make, claims, message):
    with pytest.raises(ValueError, match=r"claims\.csv" + message):
        make(claims=claims)


def test_a_file_that_a_spreadsheet_saved_is_read_as_any_other(tmp_path):
    path = tmp_path / "expected.csv"
    path.write_text(EXPECTED)
    expected = read_expected(path)
    path.write_bytes(EXPECTED.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_expected(path) == expected
    assert expected["H3", "AR"].value == 99.8


def test_close_is_within_the_tables_tolerance(make):
    claims = "claim,left,comparison,right,source\na,H3 | AR,~,100.5,s\nb,H3 | AR,~,101,s\nc,H3 | AR,<,101,s\n"
    assert [claim.verdict for claim in make(*three(), claims=claims).claims] == ["holds", "fails", "holds"]


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


LENGTHS = {
    "rows": {"H3": {"model.name": "h3"}},
    "columns": {f"len {n}": {"task.name": "associative-recall", "slice": f"length={n}"} for n in (64, 128)},
}


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
    # of times the smallest is the best, and each column has colours of its own
    table = {**yaml.safe_load(GRID)["table"], "percent": False}
    times = grid(table=table, figure={"kind": "cells", "y": "time", "percent": False, "split": ""})
    report = make(*three(values=(0.9, 0.95)), *three("s4d", values=(0.2, 0.3)), config=times)
    axes = draw(report).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["S4D", "H3"]
    assert axes.images[0].get_array()[:, 1].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="a figure of kind cells takes a cost"):
        grid(figure={"kind": "cells", "x": "model.d_model"})


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


def test_no_expected_file_leaves_out_the_papers_columns(make):
    report = make(*three(), expected="row,column,value,unit,better,seeds,hardware,note,source\n")
    assert not report.has_published
    header = next(line for line in render(report, "md").splitlines() if line.startswith("| row"))
    assert "paper" not in header
    assert "verdict" not in header


def test_png_writes_a_picture_and_its_svg(make, tmp_path):
    report = make(*three())
    path = render(report, "png", tmp_path / "out" / "figure.png")
    assert isinstance(path, Path)
    assert path.read_bytes().startswith(b"\x89PNG")
    drawing = path.with_suffix(".svg").read_text()
    assert "H3" in drawing
    assert render(report, "png", tmp_path / "again.png")
    assert (tmp_path / "again.svg").read_bytes() == path.with_suffix(".svg").read_bytes()
    with pytest.raises(ValueError, match="--out"):
        render(report, "png")
    with pytest.raises(ValueError, match="nothing to draw"):
        render(make(config=grid(figure=None)), "png", tmp_path / "none.png")


def test_html_is_one_page_that_fetches_nothing_and_names_its_runs(make):
    report = make(*three(stand_in="<sample> & more"))
    page = render(report, "html")
    assert isinstance(page, str)
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "&lt;sample&gt; &amp; more" in page
    assert "<svg" in page
    for run_id in cell(report, "H3", "AR").run_ids:
        assert run_id in page


def test_a_file_is_written_where_out_names_one(make, tmp_path):
    report = make(*three())
    path = render(report, "md", tmp_path / "deep" / "report.md")
    assert Path(path).read_text() == render(report, "md")
    with pytest.raises(ValueError, match=r"unknown format 'mdx'.*'md'"):
        render(report, "mdx")


def test_latex_escapes_what_latex_would_read(make):
    text = str(render(make(*three(scale="small")), "latex"))
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    assert not re.search(r"(?<!\\)%", body)
    assert r"99.8 $\pm$ 0.2$^\dagger$" in body


def test_numbers_are_printed_the_same_everywhere():
    assert [fixed(-0.04, 1), fixed(-0.04, 1, sign=True), fixed(1.25, 1), fixed(3, 2, sign=True)] == [
        "0.0",
        "+0.0",
        "1.2",
        "+3.00",
    ]
    assert [amount(x) for x in (0, 7, 999, 999.9, 1234, 74_123, 999_900, 1.5e9)] == [
        "0",
        "7",
        "999",
        "1.00K",
        "1.23K",
        "74.1K",
        "1.00M",
        "1.50G",
    ]
    assert amount(2.5 * 2**30, binary=True) == "2.50Gi"


def test_values_of_a_grid_meet_values_of_a_resolved_run():
    assert same(1, 1.0)
    assert same("1e-3", 0.001)
    assert same([1, 2], (1, 2))
    assert same({"length": 64}, {"length": 64, "num_examples": 3})
    assert not same(True, 1)
    assert not same(1, True)
    assert not same("paper", None)
    assert not same([1], [1, 2])
    assert matches({"model.name": "h3", "slice": "length=64"}, {"model": {"name": "h3"}})
    assert not matches({"model.name": "h3", "model.inner": "s6"}, {"model": {"name": "h3"}})
    assert slice_part("length=512,num_kv_pairs=64", "num_kv_pairs") == 64
    assert slice_part("", "length") is None


def test_reports_import_nothing_but_suite():
    root = Path(__file__).resolve().parents[2]
    banned = {"torch", "tasks", "models", "kernels"}
    paths = list((root / "reports").rglob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.partition(".")[0] for name in names}, path


def test_a_ratio_has_the_error_of_both_of_its_sides():
    sides = ("a", "c"), ("b", "c")
    cells = {
        sides[0]: Cell("a", "c", mean=8.0, sd=0.4, num_seeds=4),
        sides[1]: Cell("b", "c", mean=2.0, sd=0.2, num_seeds=4),
    }
    found = ratio(sides, "", cells)
    assert found.value == 4.0
    assert found.error == pytest.approx(math.hypot(0.2, 4 * 0.1) / 2)


def test_the_error_of_a_median_shrinks_with_the_root_of_the_count():
    assert error_of_median([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.2533 * 1.4826 / math.sqrt(5))


@pytest.mark.parametrize(
    ("ours", "start"),
    [((1.0, 1.0, 1.0), 64), ((3.0, 1.0, 1.0), 128), ((1.0, 3.0, 1.0), 256), ((1.0, 1.0, 2.0), None)],
)
def test_a_row_is_faster_from_the_length_behind_which_it_always_is(ours, start):
    points = tuple(zip((64, 128, 256), ours, (2.0, 2.0, 2.0), strict=True))
    assert Crossover("experiment", "row", "attention", "device", "ms", points, True).start == start
