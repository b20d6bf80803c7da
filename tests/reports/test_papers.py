"""Every table and figure of the four papers has its place, and what cannot run here says so at once."""

from __future__ import annotations

import re
import time

import pandas as pd
import pytest
import yaml

from subquad.models import MODELS
from subquad.reports.render import Board, build, read_papers, render
from subquad.reports.render.board import NUMBERS, overview
from subquad.reports.render.plan import read_expected
from subquad.run_suite import REPOSITORY, WORKLOADS
from subquad.suite.commands import main
from subquad.suite.options import parse
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.settings.grid import expand, points, seeds_of
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store.storage import SCHEMA
from subquad.tasks import TASKS
from tests.reports.committed import CONFIGS, EXPERIMENTS, HOME, ROWS

PAPERS = read_papers(HOME / "reports" / "papers.yaml", EXPERIMENTS)
LISTED = [name for name, config in CONFIGS.items() if not config.baseline]


def called(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(REPOSITORY, arguments)
    return int(ended.value.code or 0)


def test_every_table_and_figure_of_the_four_papers_has_a_place():
    assert {paper: len(items) for paper, items in PAPERS.items()} == {"h3": 25, "gsa": 10, "dss": 9, "mamba": 22}
    for paper, tables in (("h3", 20), ("gsa", 4), ("dss", 4), ("mamba", 15)):
        named = " ".join(item.item for item in PAPERS[paper])
        missing = [number for number in range(1, tables + 1) if f"Table {number}" not in named]
        assert missing == [], f"{paper}: no place for tables {missing}"


def test_most_tables_and_figures_can_run_at_some_scale():
    items = [item for items in PAPERS.values() for item in items]
    runs = [item for item in items if any(CONFIGS[name].runnable for name in item.experiments)]
    tested = [item for item in items if not item.experiments]
    assert len(runs) >= 55
    assert len(tested) == 5


def test_the_experiments_of_an_item_name_its_paper():
    for paper, items in PAPERS.items():
        for name in (name for item in items for name in item.experiments):
            source = CONFIGS[name].source
            assert source is not None
            assert source.paper == paper, f"{name} stands for a table of {paper}"


def test_the_documents_of_an_item_exist():
    missing = [
        path for items in PAPERS.values() for item in items for path in item.documents if not (HOME / path).exists()
    ]
    assert missing == []


def test_every_experiment_with_a_table_or_figure_of_the_four_papers_is_an_item():
    placed = {name for items in PAPERS.values() for item in items for name in item.experiments}
    sourced = {
        name
        for name, config in CONFIGS.items()
        if config.source and config.source.paper in PAPERS and (config.source.table or config.source.figure)
    }
    assert sourced <= placed


@pytest.mark.slow
def test_the_page_of_all_tables_has_every_item_and_its_links_lead_to_files(tmp_path):
    page = tmp_path / "tables.md"
    assert called("report", "tables", "--format", "md", "--out", str(page)) == 0
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().splitlines() if "|" in line]
    *items, every = lines[2:]
    assert [line[:2] for line in items] == [[paper, item.item] for paper, items in PAPERS.items() for item in items]
    # each number is counted at one item
    numbers = range(7, 7 + len(NUMBERS))
    assert [sum(int(line[i]) for line in items) for i in numbers] == [int(every[i]) for i in numbers]
    assert int(every[7]) == ROWS.count("four papers")["published"]
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert len(links) > 60
    assert [link for link in links if not (tmp_path / link).exists()] == []


@pytest.mark.parametrize("name", LISTED)
def test_what_cannot_run_says_why_and_ends_with_2(name, capsys):
    for extra in ((), ("--dry-run",)):
        assert called("run", name, *extra) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "cannot run here: " in said


@pytest.mark.parametrize("name", LISTED)
def test_the_report_of_what_cannot_run_has_the_papers_numbers(name):
    report = build(CONFIGS[name], EXPERIMENTS[name].parent, pd.DataFrame(columns=SCHEMA.names))
    assert report.cells
    assert all(cell.published and not cell.planned for cell in report.cells)
    assert any(note.startswith("scale paper cannot run here: ") for note in report.notes)
    assert "ours" not in str(render(report, "terminal")).splitlines()[3]


def test_a_scale_that_cannot_run_names_those_that_can(capsys):
    assert called("run", "mamba/table6") == 2
    assert "--scale small runs" in capsys.readouterr().err


def test_a_plan_of_what_cannot_run_is_still_checked(capsys):
    assert called("run", "mamba/table6", "--dry-run") == 0
    assert "cannot run here: 7 billion tokens" in capsys.readouterr().out


def test_a_grid_runs_or_says_why_not():
    with pytest.raises(ValueError, match="baseline: missing, and cannot_run says nothing about paper"):
        parse(ExperimentConfig, {"title": "nothing"}, "grid.yaml")
    with pytest.raises(ValueError, match="cannot_run: unknown scale 'papr'"):
        parse(ExperimentConfig, {"title": "nothing", "cannot_run": {"papr": "it is too large"}}, "grid.yaml")


def test_an_item_without_a_place_and_an_unknown_experiment_are_errors(tmp_path):
    path = tmp_path / "papers.yaml"
    path.write_text(yaml.safe_dump({"h3": [{"item": "Table 1", "shows": "examples"}]}))
    with pytest.raises(ValueError, match="Table 1: name its experiments or its documents"):
        read_papers(path, EXPERIMENTS)
    path.write_text(yaml.safe_dump({"h3": [{"item": "Table 2", "shows": "accuracy", "experiments": ["h3/tabel2"]}]}))
    with pytest.raises(ValueError, match=r"unknown experiment 'h3/tabel2' .*h3/table2"):
        read_papers(path, EXPERIMENTS)


def test_numbers_of_what_cannot_run_are_published_and_in_no_grid():
    nothing = pd.DataFrame(columns=SCHEMA.names)
    report = build(CONFIGS["h3/table4"], EXPERIMENTS["h3/table4"].parent, nothing)
    grid, *_ = overview(Board("h3", (report,), (), nothing)).grids
    assert grid.lines[0][2:16] == ("21", *["0"] * 13)


# `test_experiments.py` plans each of them in the quick tier
@pytest.mark.slow
def test_all_plans_together_take_seconds():
    start, faults = time.process_time(), []
    for name, config in CONFIGS.items():
        resolver = Resolver(TASKS, MODELS, WORKLOADS, without_data=True)
        for scale in config.scales if config.baseline else ():
            try:
                assert expand(name, config, resolver, scale=scale, seeds=seeds_of(config, scale)[:1])
            except ValueError as error:
                faults.append(f"{name} {scale}: {error}")
    # a part of the environment may not be installed
    assert [fault for fault in faults if " is n/a " not in fault] == []
    # five seconds with all imports, and more on a slow processor
    assert time.process_time() - start < 20


def published(name: str) -> dict[tuple[str, str], float]:
    """The numbers of an experiment's expected.csv."""
    found = read_expected(EXPERIMENTS[name].parent / "expected.csv")
    return {key: value.value for key, value in found.items() if value.value is not None}


def test_the_scaling_grid_has_the_sizes_and_budgets_of_table_12_of_mamba():
    numbers = published("mamba/table12")
    for size in ("125M", "350M", "760M", "1.3B"):
        row = {column: value for (name, column), value in numbers.items() if name == size}
        found = [p for p in points(CONFIGS["mamba/figure4"], "paper") if p["model.d_model"] == row["d_model"]]
        assert len(found) == 14
        for point in found:
            assert point["train.steps"] == row["training steps"]
            assert point["train.batch_size"] * point["task.length"] == 2**19
            factor = 1 if point["model.name"] in ("hyena", "attention") else 5
            assert point["train.lr"] == pytest.approx(factor * row["learning rate"])
            layers = {"mamba": 2, "hyena": 1.5, "h3": 1.5}.get(point["model.name"], 1) * row["n_layers"]
            assert point["model.num_layers"] == layers


def test_the_piano_grid_has_the_lengths_and_batches_of_table_14_of_mamba():
    batches = {
        int(row.removeprefix("length ")): value
        for (row, column), value in published("mamba/figure7").items()
        if column == "batch size"
    }
    found = {point["task.length"]: point["train.batch_size"] for point in points(CONFIGS["mamba/figure7"], "paper")}
    assert found == batches
    assert len(found) == 8


LRA = {"ListOps": "lra-listops", "Text": "lra-text", "Image": "lra-image", "Pathfinder": "lra-pathfinder"}
LRA |= {"Path-X": "lra-pathx", "Speech Commands (Raw)": "speech-commands"}
KEYS = {
    "Depth": "model.num_layers",
    "Features H": "model.d_model",
    "Dropout": "model.resid_dropout",
    "LR": "train.lr",
    "Batch Size": "train.batch_size",
    "Epochs": "train.epochs",
    "WD": "train.weight_decay",
    "Patience": "train.plateau_patience",
    "state size N": "model.d_state",
    "LR of DSS params (Lambda,W,log_dt)": "model.ssm_lr",
}


@pytest.mark.parametrize("experiment", ["dss/table1-lra", "dss/table2", "dss/table3", "dss/kernels", "dss/figure5"])
def test_the_grids_of_dss_have_the_settings_of_its_table_4(experiment):
    paper = published("dss/table4")
    # appendix A.3 lists where DSS departs from the table
    for (row, column), value in list(paper.items()):
        if column.endswith(" (DSS exception)") and column.removesuffix(" (DSS exception)") in KEYS:
            paper[row, column.removesuffix(" (DSS exception)")] = value
    norms = read_expected(EXPERIMENTS["dss/table4"].parent / "expected.csv")
    for point in points(CONFIGS[experiment], "paper"):
        (row,) = (name for name, task in LRA.items() if task == point["task.name"])
        for column, key in KEYS.items():
            assert point[key] == paper[row, column], f"{row}: {key}"
        assert {"batch": "BN", "layer": "LN"}[point["model.norm"]] in norms[row, "Norm"].note
        assert str(point["model.prenorm"]) in norms[row, "Pre-norm"].note
        if (row, "LR of log_dt (DSS exception)") in paper:
            assert point["model.dt_lr"] == paper[row, "LR of log_dt (DSS exception)"]


@pytest.mark.parametrize("content", [b"h3: [", b"\xff", b"h3: [], h3: []", b"- 1"])
def test_a_list_of_papers_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "papers.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: [^\n]+$"):
        read_papers(path, EXPERIMENTS)
