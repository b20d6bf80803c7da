"""The HTML page of a scoreboard, in a headless Chromium: it opens without errors, sorts, filters and opens a run.

A script behind the page uses it as a reader would, with clicks and words, and writes what it saw into the document.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from subquad.reports.render import Board, build, render
from subquad.reports.render.board import health
from subquad.reports.render.page import page, page_data
from subquad.run_suite import REPOSITORY
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.store import storage
from tests.reports.browser import needs_browser, visited

READER = """
<pre id="seen"></pre>
<script>
const texts = (selector) => [...document.querySelectorAll(selector)].map((node) => node.textContent);
const rows = () => [...document.querySelectorAll("#cells > .wide > table > tbody > tr")];
const lines = () => rows().map((row) => [...row.children].map((cell) => cell.textContent));
const head = (name) => [...document.querySelectorAll("#cells > .wide > table th button")]
  .find((button) => button.textContent === name);
const seen = { opened: lines() };
head("ours").click();
seen.ascending = lines();
head("ours").click();
seen.descending = lines();
const words = document.querySelector("#cells input");
words.value = "h3 associative";
words.dispatchEvent(new Event("input"));
seen.filtered = lines();
rows()[0].click();
seen.detail = document.querySelector("#cells tr.detail").textContent;
seen.charts = document.querySelectorAll("#cells tr.detail svg").length;
rows()[0].click();
seen.closed = document.querySelector("#cells tr.detail") === null;
seen.sections = texts("h2");
seen.loaded = performance.getEntriesByType("resource").length;
seen.errors = window.errors;
document.getElementById("seen").textContent = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def board() -> Board:
    reports = []
    for name in ("h3/table2", "h3/table3", "h3/figure2"):
        _, config, path = REPOSITORY.experiment(name)
        frame = storage.read(storage.files([REPOSITORY.reference], name))
        # one experiment of the page has no rows, whatever is committed
        reports.append(build(config, path.parent, frame.iloc[:0] if name == "h3/table3" else frame))
    kernels = storage.read(storage.files_below(REPOSITORY.reference / "kernels" / "quick"))
    return Board("h3", tuple(reports), (), kernels, tuple(REPOSITORY.operators))


@needs_browser
def test_a_reader_sorts_filters_and_opens_a_run(board, tmp_path):
    seen = visited(page(board), tmp_path, READER)
    assert seen["errors"] == []
    assert seen["loaded"] == 0, "the page is self-contained"
    means = sorted(cell.mean for report in board.reports for cell in report.cells if cell.mean is not None)

    def ours(lines: list[list[str]]) -> list[float]:
        found = [re.match(r"[\d.]+", line[5]) for line in lines]
        return [float(match.group()) for match in found if match]

    # shown values are rounded, so they may differ from the means in the last digit
    assert ours(seen["ascending"]) == pytest.approx(means, abs=0.06)
    assert ours(seen["descending"]) == pytest.approx(means[::-1], abs=0.06)
    assert not re.match(r"\d", seen["descending"][-1][5]), "cells without a value come last in either direction"
    assert seen["filtered"]
    assert len(seen["filtered"]) < len(seen["opened"])
    for line in seen["filtered"]:
        assert "associative" in " ".join(line).lower()
    (cell,) = [c for c in board.reports[0].cells if (c.row, c.column) == tuple(seen["filtered"][0][2:4])]
    assert "python run_suite.py run h3/table2 --scale paper --only" in seen["detail"]
    for word in (*cell.run_ids, "NVIDIA H200", "model.d_model"):
        assert word in seen["detail"]
    assert seen["charts"] >= 2
    assert seen["closed"]


def test_every_number_of_the_scoreboard_is_in_the_data_of_the_page(board):
    data = page_data(board)
    assert len(data["cells"]) == sum(len(report.cells) for report in board.reports)
    for cell in data["cells"]:
        assert set(cell["runs"]) <= data["runs"].keys()
    run = next(iter(data["runs"].values()))
    assert data["settings"][run["settings"]]["task"]["name"]
    losses = [points for metric, split, points in run["curves"] if (metric, split) == ("loss", "train")]
    assert losses
    assert losses[0] == sorted(losses[0])
    found = {(row["operator"], row["implementation"]) for row in data["kernels"]}
    assert ("causal_conv1d", "triton") in found


def test_the_command_of_a_cell_selects_its_runs(board, tmp_path):
    cell = next(c for c in page_data(board)["cells"] if c["row"] == "H3" and c["column"] == "Induction Head acc")
    words = cell["command"].split()
    assert words[:6] == ["python", "run_suite.py", "run", "h3/table2", "--scale", "paper"]
    filters = [word for word in words[6:] if word != "--only"]
    options = {"overrides": None, "seeds": None, "data": None, "results": tmp_path, "without_data": True}
    _, runs = resolved_runs(REPOSITORY, "h3/table2", scale="paper", only=filters, **options)
    # neither more nor fewer, as a command without filters would
    assert set(cell["runs"]) == {run.run_id for run in runs}


def test_text_of_a_page_cannot_end_its_script(board):
    evil = replace(board.reports[0], title="</script><script>alert(1)</script>")
    text = page(replace(board, reports=(evil,)))
    assert text.count("</script>") == page(board).count("</script>")


def test_a_value_without_end_does_not_break_the_page(board):
    report = board.reports[0]
    cells = (replace(report.cells[2], mean=math.inf, values=(math.inf, 0.5)), *report.cells[3:])
    (found, *_) = page_data(replace(board, reports=(replace(report, cells=cells),)))["cells"]
    assert found["mean"] is None
    assert found["values"] == [0.5]
    assert "Infinity" not in page(replace(board, reports=(replace(report, cells=cells),)))


def test_health_names_what_is_missing(board):
    found = dict(health(replace(board, operators=(*board.operators, "never-timed"))))
    assert found["1 of 3 experiments have no rows"] == ["h3/table3"]
    assert "never-timed" in next(names for text, names in found.items() if "operators have no benchmark" in text)
    missing = sum(cell.missing for report in board.reports for cell in report.cells)
    planned = sum(bool(cell.planned) for report in board.reports for cell in report.cells)
    assert f"{missing} of {planned} cells have not been run" in found


def test_a_page_is_written_to_the_file_that_is_named(board, tmp_path):
    made = render(board, "html", tmp_path / "board.html")
    assert made.read_text() == page(board)
