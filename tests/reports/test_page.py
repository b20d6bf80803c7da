"""The HTML page of a scoreboard, in a headless Chromium: what a reader clicks, types and goes back to.

The quick tests use a board of three experiments, and the slow ones every committed row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from subquad.reports.render import About, Board, build, render
from subquad.reports.render.board import health
from subquad.reports.render.page import page, page_data, visible
from subquad.run_suite import REPOSITORY
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.store import storage
from tests.reports.browser import Browser, browser, needs_browser

LINES = '[...document.querySelectorAll("main > .wide > table > tbody > tr:not(.detail)")]'
TEXTS = f"{LINES}.map((line) => [...line.children].map((cell) => cell.textContent.trim()))"


@pytest.fixture(scope="module")
def board() -> Board:
    reports = []
    for name in ("h3/table2", "h3/table3", "h3/figure2"):
        _, config, path = REPOSITORY.experiment(name)
        frame = storage.read(storage.files([REPOSITORY.reference], name))
        # one experiment of the page has no rows, whatever is committed
        reports.append(build(config, path.parent, frame.iloc[:0] if name == "h3/table3" else frame))
    kernels = storage.read(storage.files_below(REPOSITORY.reference / "kernels" / "quick"))
    about = (About("model", "s4d", "diagonal state space model", "models/s4d.py", "x' = A x + B u"),)
    return Board("h3", tuple(reports), (), kernels, tuple(REPOSITORY.operators), about)


@pytest.fixture(scope="module")
def tab(board, tmp_path_factory) -> Iterator[tuple[Browser, Path]]:
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "page.html"
    file.write_text(page(board))
    with browser(folder) as found:
        found.size(1440)
        yield found, file


def numbers(lines: list[list[str]], column: int) -> list[float]:
    found = [re.match(r"[\d.]+", line[column]) for line in lines]
    return [float(match.group()) for match in found if match]


@needs_browser
def test_a_reader_sorts_filters_and_opens_a_run(board, tab):
    tab, file = tab
    tab.open(file, "#cells")
    everything = tab.js(TEXTS)
    means = sorted(cell.mean for report in board.reports for cell in report.cells if cell.mean is not None)
    tab.click("th button", "ours")
    # shown values are rounded, so they may differ from the means in the last digit
    assert numbers(tab.js(TEXTS), 5) == pytest.approx(means, abs=0.06)
    tab.click("th button", "ours")
    descending = tab.js(TEXTS)
    assert numbers(descending, 5) == pytest.approx(means[::-1], abs=0.06)
    assert not re.match(r"\d", descending[-1][5]), "cells without a value come last in either direction"
    tab.type("main input", "h3 associative")
    kept = tab.js(TEXTS)
    assert 0 < len(kept) < len(everything)
    assert all("associative" in " ".join(line).lower() for line in kept)
    assert f"{len(kept)} lines (of {len(everything)} without a filter)" in tab.js(
        'document.querySelector("[role=status].count").textContent'
    )
    tab.click(".opener")
    (cell,) = [c for c in board.reports[0].cells if (c.row, c.column) == tuple(kept[0][2:4])]
    detail = tab.js('document.querySelector("tr.detail").textContent')
    for word in ("python run_suite.py run h3/table2 --scale paper --only", *cell.run_ids, "NVIDIA H200", "d_model"):
        assert word in detail
    assert tab.js('document.querySelectorAll("tr.detail svg").length') >= 2
    tab.click(".opener")
    assert tab.js('document.querySelector("tr.detail")') is None
    assert tab.js("window.errors") == []
    assert tab.js('performance.getEntriesByType("resource").length') == 0, "the page is self-contained"


@needs_browser
def test_the_address_holds_what_is_chosen_and_back_undoes_it(tab):
    tab, file = tab
    tab.open(file, "#cells?experiment=h3/table2&verdict=agrees")
    tab.click("th button", "row")
    tab.choose("main select", "h3/figure2")
    assert "experiment=h3/figure2" in tab.js("location.hash")
    tab.back()
    tab.wait(f"{LINES}[0]?.textContent.includes('h3/table2')")
    lines = tab.js(TEXTS)
    assert [line[0] for line in lines] == ["h3/table2"] * 3
    assert [line[8] for line in lines] == ["agrees"] * 3
    assert [line[2] for line in lines] == sorted(line[2] for line in lines)
    tab.click(".opener")
    address = tab.js("location.hash")
    tab.open(file, address)
    assert tab.js('document.querySelectorAll("tr.detail").length') == 1, "an address opens the lines that it names"


@needs_browser
def test_a_link_to_a_case_of_a_kernel_shows_it(tab):
    """The line was open, and thousands of pixels below what the reader saw."""
    tab, file = tab
    tab.size(1280, 900)
    tab.open(file, "#kernels")
    tab.js('[...document.querySelectorAll(".opener")].at(-1).click()')
    tab.open(file, tab.js("location.hash"))
    assert tab.js("scrollY") > 900
    assert 0 < tab.js('document.querySelector("tr.detail").getBoundingClientRect().top') < 900


@needs_browser
def test_keys_open_a_line_only_at_its_button(tab):
    tab, file = tab
    tab.open(file, "#cells?experiment=h3/table2")
    tab.js('document.querySelector(".opener").focus()')
    tab.key(" ")
    assert tab.js('document.querySelector(".opener").getAttribute("aria-expanded")') == "true"
    tab.key("Enter")
    assert tab.js('document.querySelector(".opener").getAttribute("aria-expanded")') == "false"
    tab.click("td.num", "100.0")
    assert tab.js('document.querySelector("tr.detail")') is None, "a click on a number only selects text"
    tab.js('document.querySelector("td a").focus()')
    tab.key("Enter")
    tab.wait('document.querySelector("h1").textContent.startsWith("h3/table2: ")')


@needs_browser
def test_search_leads_to_a_mixer_and_to_a_pair(tab):
    tab, file = tab
    tab.open(file)
    tab.type(".search input", "s4d")
    tab.key("Enter")
    tab.wait('document.querySelector("h1").textContent === "s4d"')
    assert "x' = A x" in tab.js('document.querySelector("pre.doc").textContent')
    tab.choose(".pair label + label select", "attention")
    tab.click(".pair button")
    tab.wait('document.querySelector("h1").textContent === "s4d against attention"')
    better = {line[3]: line[-1] for line in tab.js(TEXTS)}
    assert better["Associative Recall acc"] == "attention better"


def test_every_number_of_the_scoreboard_is_in_the_data_of_the_page(board):
    data = page_data(board)
    assert len(data["cells"]) == sum(len(report.cells) for report in board.reports)
    for cell in data["cells"]:
        assert set(cell["runs"]) <= set(range(len(data["runs"])))
    run = data["runs"][0]
    assert data["settings"][run["settings"]]["task"]["name"]
    ((steps, losses),) = [(i, y) for metric, split, i, y in run["curves"] if (metric, split) == ("loss", "train")]
    assert data["steps"][steps] == sorted(data["steps"][steps])
    assert len(data["steps"][steps]) == len(losses)
    found = {(row["operator"], row["implementation"]) for row in data["kernels"]}
    assert ("causal_conv1d", "triton") in found


def test_a_short_number_of_a_line_is_drawn_where_it_was_and_says_three_digits():
    assert visible([1000.1234, 1000.5678]) == [1000.123, 1000.568], "its height is 0.4"
    assert visible([0.0123456, 90.0, 0.0]) == [0.0123, 90.0, 0], "a chart says a small number beside large ones"
    assert visible([2.3456, 2.3456]) == [2.35, 2.35]


def test_the_id_of_a_run_stands_once_in_the_data(board):
    text = json.dumps(page_data(board))
    run = board.reports[0].runs[0].run_id
    assert text.count(f'"{run}"') == 1


def test_the_command_of_a_cell_selects_its_runs(board, tmp_path):
    data = page_data(board)
    cell = next(c for c in data["cells"] if c["row"] == "H3" and c["column"] == "Induction Head acc")
    words = cell["command"].split()
    assert words[:6] == ["python", "run_suite.py", "run", "h3/table2", "--scale", "paper"]
    filters = [word for word in words[6:] if word != "--only"]
    options = {"overrides": None, "seeds": None, "data": None, "results": tmp_path, "without_data": True}
    _, runs = resolved_runs(REPOSITORY, "h3/table2", scale="paper", only=filters, **options)
    # neither more nor fewer, as a command without filters would
    assert {data["runs"][i]["id"] for i in cell["runs"]} == {run.run_id for run in runs}


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
    # the page refuses numbers that JSON has not
    assert page(replace(board, reports=(replace(report, cells=cells),)))


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
