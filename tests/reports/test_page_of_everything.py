"""Every view of the page of all committed rows, in a headless Chromium: on a desk, on a phone, dark and on paper."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from subquad.reports.render import Board, render
from subquad.reports.render.page import page
from subquad.run_suite import REPOSITORY
from subquad.suite.store import storage
from tests.reports.browser import Browser, browser, needs_browser
from tests.reports.committed import ROWS

pytestmark = [pytest.mark.slow, needs_browser]

VIEWS = (
    "",
    "#experiments",
    "#experiment?name=mamba/table11&scale=paper",
    "#experiment?name=dss/table1-lra",
    "#mixers",
    "#mixer?name=kda",
    "#mixer?name=deltanet+%5B-1%2C+1%5D",
    "#pair?a=kda&b=gated-deltanet",
    "#tasks",
    "#task?name=mqar",
    "#cells",
    "#claims",
    "#cost",
    "#kernels?sort=-change",
    "#crossover",
)
MOST_NODES = 10_000
LARGEST_PAGE = 3_000_000
TITLE = 'document.querySelector("h1").textContent'


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Iterator[tuple[Browser, Path]]:
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "page.html"
    command = [sys.executable, "run_suite.py", "report", "--all", "--results", str(REPOSITORY.reference)]
    subprocess.run([*command, "--out", str(file)], check=True, capture_output=True, timeout=240)
    with browser(folder) as found:
        yield found, file


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_the_window_and_stays_small(everything, view, width):
    tab, file = everything
    tab.size(width)
    tab.open(file, view)
    assert tab.js("window.errors") == []
    assert tab.js("document.documentElement.scrollWidth <= innerWidth"), "nothing lies beyond the right edge"
    assert tab.js('document.querySelectorAll("*").length') < MOST_NODES
    assert "There is no" not in tab.js(TITLE)
    # the content has one title, and every table a caption or a label
    assert tab.js('document.querySelectorAll("main h1").length') == 1
    assert tab.js('[...document.querySelectorAll("table")].every((t) => t.caption || t.ariaLabel)')


def test_a_page_is_small(everything):
    _, file = everything
    assert file.stat().st_size < LARGEST_PAGE


def test_every_link_leads_to_a_view(everything):
    tab, file = everything
    tab.open(file)
    seen: set[str] = set()
    for view in VIEWS:
        tab.js(f"location.hash = {view!r}; render();")
        seen |= set(tab.js('[...document.querySelectorAll("main a, nav a")].map((a) => a.getAttribute("href"))'))
    assert all(href.startswith("#") for href in seen), "without the documentation, all links stay in the page"
    kinds = {href.partition("?")[0] for href in seen}
    assert {"#mixer", "#task", "#experiment", "#kernels", "#cells", "#pair"} >= kinds - {"#", *VIEWS}
    # one of each kind of subject, and of each menu entry
    for href in sorted(seen)[:: max(1, len(seen) // 40)]:
        tab.js(f"location.hash = {href!r}; render();")
        assert "There is no" not in tab.js(TITLE), href
    assert tab.js("window.errors") == []


def test_the_slider_keeps_the_mixers_whose_state_fits(everything):
    tab, file = everything
    tab.size(1440)
    tab.open(file, "#?at=mixer&sort=-recall of 32 pairs&state=16")
    lines = 'section[aria-label="Which mixer?"] tbody tr'
    kept = tab.js(f"[...document.querySelectorAll({lines!r})].map((line) => line.children[4].textContent)")
    assert 5 < len(kept) < 25
    assert all(float(text.split()[0]) <= 16 for text in kept if text.endswith("KiB"))
    answer = tab.js('document.querySelector("p[role=status]").textContent')
    assert answer.startswith("Solved with every seed: recall of 32 pairs: ")
    assert f" of {len(kept)} (" in answer
    tab.js('document.querySelector("input[type=range]").focus()')
    tab.choose("input[type=range]", "0")
    assert len(tab.js(f"[...document.querySelectorAll({lines!r})].map((line) => 1)")) < len(kept)
    assert "state=2" in tab.js("location.hash")


def test_mixers_that_differ_in_a_sign_have_names_of_their_own(everything):
    tab, file = everything
    tab.open(file, "#mixers")
    names = tab.js('[...document.querySelectorAll("main tbody tr")].map((line) => line.children[0].textContent)')
    assert len(names) == len(set(names))
    assert {"DeltaNet", "DeltaNet [-1, 1]", "KDA", "KDA [-1, 1]", "DeltaProduct", "DeltaProduct [0, 1]"} <= set(names)


def test_an_experiment_says_what_it_costs(everything):
    tab, file = everything
    tab.open(file, "#experiment?name=dss/table1-lra")
    text = tab.js('document.querySelector("main").textContent')
    assert "What it costs" in text
    assert "96,000 steps for ListOps" in text
    assert "runs stored, which took" in text


def test_a_table_grows_by_200_lines_and_print_says_what_it_cuts(everything):
    tab, file = everything
    tab.size(1440)
    tab.open(file, "#cells")
    assert tab.js('document.querySelectorAll("main tbody tr").length') == 200
    tab.click("main > button", "show 200 more")
    assert tab.js('document.querySelectorAll("main tbody tr").length') == 400
    tab.media(print=True)
    shown = 'document.querySelector(".count").getClientRects().length'
    assert tab.js(shown) == 1
    assert tab.js('document.querySelector(".count").textContent').startswith("400 of ")
    assert tab.js('document.querySelector("main input").getClientRects().length') == 0
    # the widest table of a paper fits a sheet of A4
    tab.size(718)
    tab.open(file, "#experiment?name=mamba/table11&scale=paper")
    assert tab.js("document.documentElement.scrollWidth <= innerWidth")
    tab.media()


def test_titles_of_a_long_table_stay_in_sight(everything):
    tab, file = everything
    tab.size(1440)
    tab.open(file, "#cells")
    tab.js("scrollTo(0, 3000)")
    top = tab.js('document.querySelector("main thead th").getBoundingClientRect().top')
    assert 0 <= top < 100
    assert tab.js('document.querySelector("body > header").getBoundingClientRect().top') == 0


def test_the_page_of_one_experiment_keeps_its_titles_above_its_lines(tmp_path):
    """It shares the style sheet, and has no menu below which titles would stay."""
    report = ROWS.report("h3/table2", "paper")
    file = tmp_path / "report.html"
    render(report, "html", file)
    with browser(tmp_path) as tab:
        tab.size(1440)
        tab.open(file, ready='document.readyState === "complete"')
        tab.js("window.box = (table, part) => table.querySelector(part).getBoundingClientRect()")
        overlaps = '[...document.querySelectorAll("table")].filter((t) => box(t, "th").bottom > box(t, "td").top + 1)'
        assert tab.js(f"{overlaps}.length") == 0


def test_a_phone_shows_lines_as_cards(everything):
    tab, file = everything
    tab.size(390)
    tab.open(file, "#cells?experiment=h3/table2")
    assert tab.js('getComputedStyle(document.querySelector("main thead")).display') == "none"
    titles = '[...document.querySelectorAll("main tbody tr:first-child td")].map((td) => td.dataset.title)'
    assert tab.js(titles)[:3] == ["experiment", "scale", "row"]
    # without titles to click on, a list orders the cards
    tab.choose("label.phone select", "+5")
    assert "sort=ours" in tab.js("location.hash")


HOSTILE = '"\'><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>javascript:window.hacked=1 🏴‍☠️'


def test_nothing_that_a_row_says_is_carried_out(tmp_path):
    report = ROWS.report("h3/table2", "paper")
    names = {"S4D": HOSTILE, "H3": "__proto__"}
    cells = tuple(
        replace(cell, row=names.get(cell.row, cell.row), column=f"{cell.column}{HOSTILE}", chosen=HOSTILE)
        for cell in report.cells
    )
    runs = tuple(
        replace(run, device=HOSTILE, error=HOSTILE, config=run.config | {"model": {"name": HOSTILE}, HOSTILE: HOSTILE})
        for run in report.runs
    )
    evil = replace(report, title=HOSTILE, source=HOSTILE, notes=(HOSTILE,), cells=cells, runs=runs)
    board = Board("h3", (evil,), (), storage.read([]), ())
    file = tmp_path / "page.html"
    file.write_text(page(board))
    with browser(tmp_path) as tab:
        tab.size(1440)
        for view in ("", "#experiments", "#experiment?name=h3/table2", "#mixers", "#cells", "#claims"):
            tab.open(file, view)
            for opener in range(tab.js('document.querySelectorAll(".opener").length')):
                tab.js(f'document.querySelectorAll(".opener")[{opener}].click()')
            assert tab.js("window.errors") == [], view
            assert tab.js("window.hacked") is None, view
            assert tab.js('document.querySelectorAll("main img, main script, main iframe").length') == 0
        tab.open(file, "#cells")
        tab.js("location.hash = document.querySelector('main a[href^=\"#mixer\"]').getAttribute('href'); render()")
        assert tab.js("window.hacked") is None
        assert HOSTILE[:20] in tab.js("document.body.textContent")
