"""The card and the coloured table that a page of the documentation begins with."""

import re
from dataclasses import replace

import pytest

from subquad.reports.render.card import SIGNS, card, verdict_table
from tests.reports.committed import ROWS


@pytest.fixture(scope="module")
def table11():
    return ROWS.report("mamba/table11", "paper")


def test_every_cell_has_its_place_and_the_colour_of_its_verdict(table11):
    text = verdict_table(table11)
    heads = re.findall(r'<th scope="col">(.*?)</th>', text)
    assert heads == [column.rpartition(" ")[2] for column in table11.spec.columns]
    assert '<th colspan="15" scope="colgroup">test acc at length</th>' in text
    rows = {
        name: re.findall(r"<td(?: class=\"(\w+)\"[^>]*)?>(.*?)</td>", line)
        for name, line in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)
    }
    columns = list(table11.spec.columns)
    for cell in table11.cells:
        kind, content = rows[cell.row][columns.index(cell.column)]
        assert kind == (cell.verdict if cell.verdict in SIGNS else "")
        if cell.published.value is not None:
            assert f"<i>{cell.published.value:.{cell.published.decimals}f}</i>" in content


def test_the_parts_of_a_bar_fill_it_and_words_say_the_same(table11):
    text = card(table11, "../scoreboard.html")
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", text)]
    assert sum(widths) == pytest.approx(100, abs=0.5)
    assert ", ".join(re.findall(r'title="(.*?)"', text)) == re.search("<strong>(.*?)</strong>", text)[1]
    assert 'href="../scoreboard.html#experiment?name=mamba/table11&amp;scale=paper"' in text


def test_text_of_a_table_is_no_markup(table11):
    evil = "<img src=x onerror=alert(1)>"
    cells = tuple(replace(cell, row=evil, column=evil + cell.column) for cell in table11.cells)
    found = verdict_table(replace(table11, cells=cells)) + card(replace(table11, scale=evil), "")
    assert "<img" not in found
