"""Tests the counts of the committed rows."""

from __future__ import annotations

import csv

import pytest

from subquad.reports.render.count import count
from subquad.reports.render.report import Report
from subquad.run_suite import REPOSITORY
from subquad.suite.commands.report import _board
from tests.reports.committed import HOME, ROWS


def test_26_numbers_of_table_11_of_mamba_are_published_at_chance():
    assert ROWS.count("mamba/table11")["at chance"] == 26


def test_no_committed_cell_is_judged_across_devices():
    for name in ("h3/table7", "gsa/footnote7", "mamba/table15"):
        for found in ROWS.report(name, "paper").cells:
            assert (
                not found.published
                or found.published.value is None
                or found.mean is None
                or found.verdict.startswith("other")
                or (found.unit == "x")
            )


def test_a_ratio_that_the_paper_claims_is_judged_within_one_device():
    report = ROWS.report("h3/table7", "paper")
    row = {found.column: found for found in report.cells if found.row == "Hybrid H3-1.3B"}
    base = {found.column: found for found in report.cells if found.row == "Transformer-1.3B"}
    ratio = row["max speedup over Transformer"]
    assert ratio.mean == max(row[column].mean / base[column].mean for column in row if "speedup" not in column)
    assert (ratio.published.value, ratio.verdict, round(ratio.mean, 1)) == (2.4, "worse", 0.8)
    # a time is the smaller the faster
    times = {(found.row, found.column): found.mean for found in ROWS.report("h3/table8", "paper").cells}
    wanted = [times["Transformer", column] / times["S4D", column] for column in ("ListOps", "Text", "Image")]
    assert times["S4D", "LRA speedup"] == pytest.approx(sum(wanted) / 3)


def test_too_few_reflections_are_shown_only_where_enough_of_them_learn():
    """At `small` no number of reflections learns A5 or S5, so that few of them do not says nothing."""
    wanted = {"Three are not enough for S5", "One is not enough for A5"}
    for scale, verdict in (("small", "unclear"), ("grown", "holds")):
        claims = ROWS.report("state-tracking/groups", scale).claims
        assert {claim.verdict for claim in claims if claim.text in wanted} == {verdict}


@pytest.mark.slow
def test_the_documents_count_what_the_scoreboard_counts():
    """The scoreboard resolves the grids of today, and documents do not."""
    board = _board(REPOSITORY, "overview", REPOSITORY.reference)
    counted: dict[str, Report] = {report.experiment: report for report in board.reports}
    for name in ROWS.experiments:
        assert count(counted[name], board.others) == ROWS.count(name), name
    with (HOME / "docs" / "quotes.csv").open(newline="") as file:
        assert sum("four papers" in line["query"] for line in csv.DictReader(file)) > 10
