"""`export`: every stored row, flat and exact."""

import csv
import io
import json
import os

import pytest

from subquad.run_suite import REPOSITORY
from tests.stored import store

WORDS = ("verified", "falsified", "toy", "inconclusive")
VALUES = [0.1, 1 / 3, 1e-300, 12345678901234567.0]


@pytest.fixture
def stored(tmp_path):
    """Rows of two runs with different settings, and of one of another experiment."""
    for experiment, settings in (
        ("quickstart", {"model": {"name": "gla", "d_model": 8}, "train": {"betas": [0.9, 0.95], "clip": None}}),
        ("quickstart", {"model": {"name": "mamba", "d_state": 16}}),
        ("h3/table2", {"model": {"name": "h3"}}),
    ):
        rows = [{"metric": "loss", "step": step, "value": value, "dirty": True} for step, value in enumerate(VALUES)]
        rows.append({"metric": "time", "samples": VALUES[:2], "error": 'a, "b"\nc'})
        store(tmp_path, rows, {**settings, "seed": 2**62 + 1}, experiment=experiment)
    return tmp_path


def test_csv_has_every_row_and_all_digits(command_line, stored):
    done = command_line("export", "quickstart", "h3/table2", "--results", stored)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [len(row["run_id"]) for row in rows] == [16] * 15
    # files are read in the order of their names
    rows.sort(key=lambda row: ["gla", "mamba", "h3"].index(row["model.name"]))
    assert [float(row["value"]) for row in rows[:4]] == VALUES
    assert int(rows[0]["seed"]) == 2**62 + 1
    assert (rows[0]["dirty"], rows[0]["train.clip"], rows[5]["model.d_model"]) == ("true", "", "")
    assert json.loads(rows[4]["samples"]) == VALUES[:2]
    assert (rows[4]["error"], rows[4]["value"]) == ('a, "b"\nc', "")
    assert (rows[0]["model.d_model"], json.loads(rows[0]["train.betas"]), rows[5]["model.d_state"]) == (
        *("8", [0.9, 0.95]),
        "16",
    )


def test_json_is_one_array_with_a_row_a_line(command_line, stored, tmp_path):
    out = tmp_path / "rows.json"
    done = command_line("export", stored, "--out", out)
    assert done.stdout == f"wrote 15 rows to {out}\n"
    rows = json.loads(out.read_text())
    assert len(out.read_text().splitlines()) == 15 + 2
    assert rows[0]["samples"] is None
    assert {row["model.name"]: "model.d_state" in row for row in rows} == {"gla": False, "mamba": True, "h3": False}


def test_numbers_that_json_does_not_have_are_null(command_line, tmp_path):
    rows = [{"metric": "loss", "value": float("inf"), "samples": [float("nan"), 1.0]}]
    store(tmp_path, [*rows, {"metric": "run", "status": "diverged"}], experiment="quickstart")
    row, _ = json.loads(command_line("export", "quickstart", "--format", "json", "--results", tmp_path).stdout)
    assert (row["value"], row["samples"]) == (None, None)


def test_filters_keep_rows_by_columns_and_settings(command_line, stored):
    only = ("--only", "metric=time", "--only", "model.name=gla,h*")
    done = command_line("export", stored, *only)
    assert [row["model.name"] for row in csv.DictReader(io.StringIO(done.stdout))] == ["h3", "gla"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("quikstart",), "did you mean 'quickstart'"),
        (("gsa/table2",), "gsa/table2: no rows below"),
        (("quickstart", "--only", "metric=los"), "did you mean 'loss'"),
        (("quickstart", "--only", "model.d_stat=1"), "did you mean 'model.d_state'"),
        (("quickstart", "--format", "json", "--out", "x.csv"), "the two do not agree"),
        (("quickstart", "--out", "x.xls"), "the ending must be .csv or .json, or give --format"),
    ],
)
def test_a_fault_is_known_before_anything_is_written(command_line, stored, arguments, words):
    done = command_line("export", *arguments, "--results", stored)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr


def test_a_link_keeps_its_place_and_a_pipe_is_written(command_line, stored, tmp_path):
    (tmp_path / "kept.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("kept.csv")
    assert command_line("export", "quickstart", "--results", stored, "--out", tmp_path / "link.csv").returncode == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "kept.csv").read_text() == command_line("export", "quickstart", "--results", stored).stdout
    os.mkfifo(tmp_path / "pipe.csv")
    reader = os.open(tmp_path / "pipe.csv", os.O_RDONLY | os.O_NONBLOCK)
    assert command_line("export", "quickstart", "--results", stored, "--out", tmp_path / "pipe.csv").returncode == 0
    assert (tmp_path / "pipe.csv").is_fifo()
    assert os.read(reader, 100_000).decode() == (tmp_path / "kept.csv").read_text()
    os.close(reader)


def test_a_device_without_room_is_an_error_and_stays(command_line, stored, tmp_path):
    # a link, so that the device itself would survive an error of this test
    (tmp_path / "full.csv").symlink_to("/dev/full")
    done = command_line("export", "quickstart", "--results", stored, "--out", tmp_path / "full.csv")
    assert done.returncode == 2
    assert "cannot be written (No space left on device)" in done.stderr


@pytest.mark.parametrize("text", ['=HYPERLINK("http://x","y")', "+1", "-1+1", "@SUM(A1)", "\tx"])
def test_a_text_is_no_formula_of_a_spreadsheet(command_line, tmp_path, text):
    row = {"metric": "loss", "status": "failed", "error": text, "value": -1.5}
    store(tmp_path, [row], experiment="quickstart")
    done = command_line("export", "quickstart", "--results", tmp_path)
    (found,) = csv.DictReader(io.StringIO(done.stdout))
    assert (found["error"], found["value"]) == (f"'{text}", "-1.5")


def test_verdicts_are_exported(command_line):
    """A paper's verdicts are exported at every scale that has rows; this project's own claims are none of a paper."""
    done = command_line("export", "h3/table2", "h3/figure2", "--verdicts", "--results", REPOSITORY.reference)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {(line["experiment"], line["kind"]) for line in lines} >= {("h3/table2", "number"), ("h3/figure2", "claim")}
    assert not any(line["source"].startswith("ours") for line in lines)
    as_json = command_line("export", "h3/table2", "--verdicts", "--format", "json")
    assert {line["logbook"] for line in json.loads(as_json.stdout)} <= {*WORDS, ""}
