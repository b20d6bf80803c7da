"""Tables in the paper's layout: a matrix, fitted to a terminal's width, whole in a pipe, and LaTeX that compiles."""

from __future__ import annotations

import re
import shutil
import subprocess

import pandas as pd
import pytest

from subquad.reports.render import Document, build, render
from subquad.reports.render.document import Grid
from subquad.reports.render.layout import document
from subquad.reports.render.printing import terminal
from subquad.run_suite import REPOSITORY
from subquad.suite.options import parse
from subquad.suite.settings.config import ExperimentConfig
from subquad.suite.store import storage
from tests.reports.committed import ROWS


def committed(name: str, scale: str = "paper") -> Document:
    return document(ROWS.report(name, scale))


@pytest.fixture(scope="module")
def table11() -> Document:
    return committed("mamba/table11")


@pytest.fixture(scope="module")
def every_document() -> list[Document]:
    """The reports of all experiments without rows, which have the words of every grid, and some with rows."""
    nothing = pd.DataFrame(columns=storage.SCHEMA.names)
    documents = [document(build(config, path.parent, nothing)) for _, config, path in REPOSITORY.every_experiment()]
    with_rows = map(committed, ("h3/table2", "gsa/figure4", "gsa/kernels"))
    return [*documents, *with_rows, committed("mamba/table1", "small")]


def test_a_row_of_the_paper_is_a_line_with_its_columns_side_by_side(table11):
    grid = table11.grids[0]
    assert grid.header == ("row", "%", *(str(2**n) for n in range(6, 21)))
    assert set(grid.groups[2:]) == {"test acc at length"}
    lines = {line[:2]: line[2:] for line in grid.lines}
    assert lines["Mamba", "paper"] == ("100", "100", "100.0", *["100"] * 12)
    assert len(lines["Mamba", "ours"]) == len(lines["Mamba", "verdict"]) == 15
    # the cells have numbers of seeds and differences, which the matrix has no room for
    (cells,) = [grid for grid in table11.grids if grid.heading == "Every cell that has runs"]
    assert {"seeds", "difference"} <= set(cells.header)
    assert all(line[3] for line in cells.lines)


def test_a_table_of_which_nothing_has_run_has_no_column_of_dashes(every_document):
    (empty,) = [found for found in every_document if found.name == "mamba/table11"]
    grid = empty.grids[0]
    assert {line[1] for line in grid.lines} == {"paper"}
    assert "—" not in {text for line in grid.lines for text in line}


def test_the_table_of_a_grid_that_states_none_is_derived_from_its_two_axes(tmp_path):
    axes = {"model.name": ["gla", "mamba"], "model.d_model": [16, 32]}
    values = {"title": "two axes", "baseline": {"task": {"name": "mqar"}}, "sweep": axes}
    nothing = pd.DataFrame(columns=storage.SCHEMA.names)
    grid = document(build(parse(ExperimentConfig, values, "grid.yaml"), tmp_path, nothing)).grids[0]
    assert grid.titles[2:] == ("d_model 16", "d_model 32")
    assert grid.header[2:] == ("16", "32")
    assert [line[0] for line in grid.lines] == ["gla", "mamba"]
    # neither the baseline nor the order of the axes makes the x axis of a figure the setting of the rows
    for swept in (axes, dict(reversed(axes.items()))):
        baseline = {**values["baseline"], "model": {"d_model": 16}}
        drawn = {**values, "baseline": baseline, "sweep": swept, "figure": {"kind": "lines", "x": "model.d_model"}}
        grid = document(build(parse(ExperimentConfig, drawn, "grid.yaml"), tmp_path, nothing)).grids[0]
        assert [line[0] for line in grid.lines] == ["gla", "mamba"]
    # a third axis has no place in a matrix
    values["sweep"] = {**axes, "train.lr": [1e-3, 1e-2]}
    grid = document(build(parse(ExperimentConfig, values, "grid.yaml"), tmp_path, nothing)).grids[0]
    assert len(grid.lines) == 8


def test_a_transposed_table_has_the_columns_below_each_other():
    grid = committed("gsa/kernels").grids[0]
    assert grid.header[0] == "column"
    assert "Triton" in grid.header
    assert "GSA T2048 forward+backward" in {line[0] for line in grid.lines}
    # its numbers are goals and times of a peer, not of a paper
    assert "paper" not in {line[1] for line in grid.lines}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_line_fits_into_the_terminal_and_no_value_is_lost(table11, width):
    text = terminal(table11, width)
    assert max(map(len, text.splitlines())) <= width
    values = {text for grid in table11.grids for line in grid.lines for text in line[grid.num_words :] if text}
    assert all(value in text for value in values)
    words = re.sub(r"\s+", " ", text)
    assert all(length in words for length in table11.grids[0].header)


def test_nothing_is_cut_or_wrapped_in_a_pipe(table11):
    lines = render(table11, "terminal").splitlines()
    for grid in table11.grids:
        for line in grid.lines:
            assert any(all(text in shown for text in line[1:]) for shown in lines), line
    assert all(note in lines for note in table11.notes)


def test_a_group_wider_than_its_columns_is_not_cut():
    grid = Grid(
        "",
        ("row", "", "a", "b"),
        (("x", "", "1", "2"),),
        2,
        ((),),
        ("", "", "a long common title", "a long common title"),
    )
    page = Document("n", "t", "w", (grid,), (), ())
    assert "a long common title" in terminal(page, None)
    # two columns of a digit
    assert r"\multicolumn{2}{c}{\parbox{34pt}{\centering a long common title}}" in str(render(page, "latex"))
    assert r"\cmidrule(lr){3-4}" in str(render(page, "latex"))
    assert '<th colspan="2">a long common title</th>' in str(render(page, "html"))
    assert "a long common title a" in str(render(page, "md"))


def test_latex_of_every_report_is_ascii_and_no_line_of_a_table_begins_with_a_sign(every_document):
    for found in every_document:
        text = str(render(found, "latex"))
        body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
        assert body.isascii(), (found.name, [c for c in body if not c.isascii()])
        assert not re.search(r"\\\\\s*[*\[]", body), found.name


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex on the PATH")
@pytest.mark.parametrize("options", ["", "twocolumn"])
def test_latex_of_every_report_compiles_with_booktabs_and_fits(every_document, tmp_path, options):
    # LaTeX keeps few floats that have no page yet
    text = "\n".join(str(render(found, "latex", details=True)) for found in every_document)
    text = re.sub(r"(\\end{table\*?})", r"\1\\clearpage", text)
    head = rf"\documentclass[{options}]{{article}}\usepackage{{booktabs}}\begin{{document}}"
    (tmp_path / "all.tex").write_text(f"{head}\n{text}\n\\end{{document}}")
    done = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert not re.findall(r"(?:Overfull|Float too large).*", (tmp_path / "all.log").read_text(errors="replace"))


def test_latex_is_the_main_table_with_caption_label_and_notes_and_the_others_by_option(table11):
    text = str(render(table11, "latex"))
    assert text.count(r"\caption{") == text.count(r"\label{") == 1
    assert r"\label{tab:mamba/table11-paper}" in text
    assert re.search(r"Paper: mamba, table 11; ours: mean \$\\pm\$ standard deviation over \d to 5 seeds", text)
    assert "verdicts: a seed succeeds if it is within 5 points of the paper or better" in text
    assert "Cost" not in text
    every = str(render(table11, "latex", details=True))
    labels = re.findall(r"\\label{tab:mamba/table11-paper(.*?)}", every)
    assert labels == ["", "-claims", "-every-cell-that-has-runs", "-cost"]
