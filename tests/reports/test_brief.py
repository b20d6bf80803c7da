"""The report that fits a screen, and the colours of a terminal."""

import re

import pytest

from subquad.reports.render import brief, render
from subquad.reports.render.layout import document
from subquad.reports.render.printing import terminal
from tests.reports.committed import ROWS
from tests.reports.made import make_run

CODES = re.compile(r"\x1b\[\d+m")


@pytest.fixture(scope="module")
def table2():
    return ROWS.report("h3/table2", "paper")


def test_eight_cells_take_less_than_a_screen_and_none_is_lost(table2):
    shown = brief(table2)
    lines = str(render(shown, "terminal")).splitlines()
    assert len(lines) < 24
    measured = [cell for cell in table2.cells if cell.mean is not None]
    assert len(shown.grids[0].lines) == len(measured) == 8
    for cell, line in zip(measured, shown.grids[0].lines, strict=True):
        assert line[:2] == (cell.row, cell.column)
        assert line[-1] == cell.verdict
        assert line[-2] == str(cell.num_seeds)


def test_what_was_left_out_is_said_in_every_report(make):
    report = make(*[make_run("h3", "induction-heads", 0, 1.0)], make_run("hyena", "induction-heads", 0, 1.0))
    left_out = [note for note in report.notes if note.startswith("left out")]
    assert left_out
    assert set(left_out) <= set(brief(report).notes)


@pytest.mark.parametrize("width", [None, 60, 100])
def test_colours_change_no_letter_and_no_place(table2, width):
    for shown in (brief(table2), document(table2)):
        plain, colored = terminal(shown, width), terminal(shown, width, color=True)
        assert CODES.sub("", colored) == plain
        assert "\x1b[32magrees\x1b[0m" in colored
        assert "\x1b[31mworse\x1b[0m" in colored


def test_a_table_of_many_cells_has_the_layout_of_the_paper():
    table11 = ROWS.report("mamba/table11", "paper")
    assert brief(table11).grids == document(table11).grids[:1]
