"""The scoreboard has what is counted, line by line."""

import pandas as pd
import pytest

from subquad.reports.render import Board
from subquad.reports.render.board import NUMBERS, Crossover, folder_of, overview
from subquad.reports.render.count import PAPERS
from subquad.suite.store import storage
from tests.reports.committed import ROWS


@pytest.fixture(scope="module")
def board() -> Board:
    reports = tuple(ROWS.report(name, "paper") for name in ("h3/table2", "mamba/table15", "quickstart"))
    return Board("overview", reports, (), pd.DataFrame(columns=storage.SCHEMA.names))


def test_the_parts_of_every_line_add_up_to_its_cells_in_a_grid(board):
    for table in overview(board).grids:
        for line in table.lines:
            published, in_grid, *parts = map(int, line[table.num_words : table.num_words + len(NUMBERS)])
            assert sum(parts) == in_grid <= published
    (table2,) = [line for line in overview(board).grids[1].lines if line[0] == "h3/table2"]
    # ten numbers in the paper; the two of `Random` are chance, which is not run
    assert table2[2:4] == ("10", "8")


def test_the_line_of_a_folder_is_the_sum_of_its_experiments(board):
    folders, experiments = overview(board).grids
    assert [line[0] for line in folders.lines] == ["h3", "mamba", "quickstart", "four papers", "all"]
    for folder, *counts in folders.lines:
        of = PAPERS if folder == "four papers" else (folder,)
        parts = [line[2:-1] for line in experiments.lines if folder == "all" or folder_of(line[0]) in of]
        numbers = [sum(map(int, column)) for column in zip(*parts, strict=True)]
        assert list(map(int, counts[: len(NUMBERS)])) == numbers


def test_most_numbers_that_are_not_run_come_first(board):
    gaps = [int(line[15]) for line in overview(board).grids[1].lines]
    assert gaps == sorted(gaps, reverse=True)


def test_the_scoreboard_of_a_paper_lists_its_claims(board):
    paper = Board("h3", board.reports[:1], (), board.kernels)
    experiments, claims = overview(paper).grids
    assert [line[0] for line in experiments.lines] == ["h3/table2", "all"]
    assert len(claims.lines) == len(board.reports[0].claims)


def test_the_picture_of_all_has_a_bar_for_each_of_the_four_papers(board):
    cells, claims, _ = overview(board).draw().axes
    assert [label.get_text() for label in cells.get_yticklabels()] == ["H3", "Mamba"]
    (line,) = [line for line in overview(board).grids[0].lines if line[0] == "mamba"]
    numbers = [text.get_text() for text in cells.texts if text.get_position()[1] == 1]
    assert numbers == [text for text in line[3:15] if text != "0"]
    assert sum(bar.get_width() for bar in claims.patches if bar.get_y() < 0) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ours", "start"),
    [((1.0, 1.0, 1.0), 64), ((3.0, 1.0, 1.0), 128), ((1.0, 3.0, 1.0), 256), ((1.0, 1.0, 2.0), None)],
)
def test_a_row_is_faster_from_the_length_behind_which_it_always_is(ours, start):
    points = tuple(zip((64, 128, 256), ours, (2.0, 2.0, 2.0), strict=True))
    assert Crossover("experiment", "row", "attention", "device", "ms", points, True).start == start
