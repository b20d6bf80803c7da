"""A run that another experiment has stored is not trained again: its rows are written for this one."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from subquad.suite.runner import execute
from subquad.suite.store import elsewhere, endings, parts, storage
from subquad.suite.store.claims import Claims
from subquad.suite.store.status import standings
from tests.suite.test_speed_runs import one as timing
from tests.suite.toy import make_run

CPU = torch.device("cpu")
RUN = make_run()
HERE = replace(RUN, experiment="toy/other")


def rows_of(root, run):
    paths = endings.files_of(root, [(run.experiment, run.scale, run.run_id)])
    return [row for path in paths for row in storage.load(path, run_id=run.run_id).to_pylist()]


def named(rows, run):
    """The rows as they stand in the experiment and scale of a run."""
    return [{**row, "experiment": run.experiment, "scale": run.scale} for row in rows]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows that the run stores."""
    root = tmp_path_factory.mktemp("stored")
    execute(RUN, root, CPU)
    return rows_of(root, RUN)


@pytest.fixture
def keep(tmp_path, rows):
    """Stores these rows for a run, with other values in some columns, in a folder of results."""

    def keep(run=RUN, root=tmp_path, **columns):
        path = storage.result_path(root, run.experiment, run.scale, run.run_id)
        storage.write(path, [{**row, **columns} for row in named(rows, run)])
        return path

    return keep


@pytest.mark.parametrize("run", [HERE, replace(RUN, scale="grown")], ids=["experiment", "scale"])
@pytest.mark.parametrize("in_a_part", [False, True])
def test_all_columns_but_the_place_are_those_of_the_run_that_was_made(tmp_path, keep, rows, run, in_a_part):
    path = keep()
    if in_a_part:
        parts.write(parts.of_runs([path], [RUN.run_id], path.parent))
        path.unlink()
    checkpoint = storage.checkpoint_path(tmp_path, run.experiment, run.scale, run.run_id)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.touch()
    found = elsewhere.find([run], tmp_path)
    name = "toy/test" if run is HERE else "toy/test at paper"
    assert standings([run], tmp_path)[0].detail == f"stored in {name}"
    assert elsewhere.take([run], found, tmp_path) == [run]
    assert rows_of(tmp_path, run) == named(rows, run)
    assert not checkpoint.exists()
    assert not list(tmp_path.rglob("*.claim"))
    assert standings([run], tmp_path)[0].state == "ok"


def test_what_another_process_has_or_has_stored_is_left_alone(tmp_path, keep):
    keep()
    found = elsewhere.find([HERE], tmp_path)
    with Claims(tmp_path) as others:
        others.take(HERE)
        assert elsewhere.take([HERE], found, tmp_path) == []
    keep(HERE, commit="newer")
    assert elsewhere.take([HERE], found, tmp_path) == []
    assert {row["commit"] for row in rows_of(tmp_path, HERE)} == {"newer"}


def test_rows_that_are_lost_after_the_plan_are_not_taken(tmp_path, keep):
    path = keep()
    found = elsewhere.find([HERE], tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    assert elsewhere.take([HERE], found, tmp_path) == []
    assert elsewhere.find([HERE], tmp_path) == {}
    assert not list(tmp_path.rglob("*.claim"))


def test_only_good_rows_of_today_are_taken(tmp_path, keep):
    used = json.dumps({"scan": {"version": 1, "backend": "torch"}})
    keep(operators=used)
    assert elsewhere.find([HERE], tmp_path, lambda: {"scan": 1}).keys() == {RUN.run_id}
    assert elsewhere.find([HERE], tmp_path, lambda: {"scan": 2}) == {}
    # its own rows are no other experiment's
    assert elsewhere.find([RUN], tmp_path) == {}
    keep(status="diverged")
    assert elsewhere.find([HERE], tmp_path) == {}
    keep(root=tmp_path / "probes")
    assert elsewhere.find([HERE], tmp_path) == {}


def test_rows_of_an_older_schema_are_not_taken(tmp_path, rows):
    table = pa.Table.from_pylist([{**row, "schema": 1} for row in rows], storage.SCHEMA)
    path = storage.result_path(tmp_path, RUN.experiment, RUN.scale, RUN.run_id)
    path.parent.mkdir(parents=True)
    pq.write_table(table.drop_columns([*storage.ADDED]), path)
    assert storage.load(path, ["run_id"]).num_rows
    assert elsewhere.find([HERE], tmp_path) == {}


def test_a_time_and_the_weights_of_another_run_are_not_determined_by_settings():
    assert elsewhere.is_determined(RUN)
    assert not elsewhere.is_determined(timing())
    assert not elsewhere.is_determined(make_run(train={"epochs": None, "budget": {"seconds": 1}}))
    assert elsewhere.is_determined(make_run(train={"epochs": None, "budget": {"flops": 1e6}}))
    assert not elsewhere.is_determined(replace(RUN, base=RUN))
    assert not elsewhere.is_determined(replace(RUN, fingerprint="missing"))


GRID = """
title: t
baseline:
  task: {name: mqar, length: 64, num_kv_pairs: 4, vocab_size: 64, num_train: 8, num_test: 8}
  model: {name: linear-attention, num_layers: 1, d_model: 8}
  train: {steps: 2, eval_every: 2, batch_size: 4}
table: {rows: {all: {}}, columns: {MQAR: {task.name: mqar}}}
"""


def test_run_takes_rows_unless_it_is_told_to_train(command_line, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "grid.yaml").write_text(GRID)
    results = tmp_path / "results"

    def run(name, *options):
        return command_line("run", tmp_path / name, "--results", results, "--device", "cpu", *options)

    assert run("one").returncode == 0
    planned = run("two", "--dry-run").stdout
    assert "  in one" in planned
    assert "1 run, 1 to do, 1 stored elsewhere" in planned
    assert "about" not in planned
    shown = command_line("status", tmp_path / "two", "--results", results).stdout
    assert "elsewhere    1 run stored in one\n" in shown
    assert "1 run, 1 elsewhere" in shown
    assert "about" not in shown
    assert "taken from one" in run("two").stdout
    assert "1 of 1 runs are already stored" in run("two").stdout
    (path,) = (results / "two").rglob("*.parquet")
    for options in (("--force",), ("--keep-weights",)):
        path.unlink()
        done = run("two", *options)
        assert (done.returncode, "taken" in done.stdout) == (0, False)
