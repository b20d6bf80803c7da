"""Laws of every figure: what is written can be read, is neither cut nor covered, and names every device."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from subquad.reports.render import report_of
from subquad.reports.render.draw import draw, draw_board
from subquad.reports.render.finding import devices_of
from subquad.reports.render.sheet import TEXT, WIDTHS, log_ticks, measure, wrapped
from subquad.run_suite import REPOSITORY
from subquad.suite.commands import main
from subquad.suite.commands.report import _drawable
from subquad.suite.metrics import SPENT
from tests.reports.committed import CONFIGS, HOME, ROWS
from tests.reports.drawn import faults, words
from tests.reports.made import SELECT, grid, make_run

HARD = ["S4D", "_H3 with a name that is much longer than a third of a column", "$x_1$ [-1, 1]", "x" * 60]
"""Names of rows and columns that are hard to place."""
COSTS = [{"metric": "num_parameters", "label": "parameters (K)"}]
NONE = {
    "expected": "row,column,value,unit,better,seeds,hardware,note,source\n",
    "claims": "claim,left,comparison,right,source\n",
}


def hard(make, kind, *, columns=4, rows=12, published=False):
    """A report with many rows and columns of hard names, whose seeds are far from each other."""
    names = [f"{HARD[i % 4]} {i}" for i in range(rows)]
    heads = [f"{HARD[(i + 1) % 4]} {i}" for i in range(columns)]
    table = {
        "rows": {name: {"model.name": f"m{i}"} for i, name in enumerate(names)},
        "columns": {head: {"slice": f"length={2**i}", "chance": 10.0 * i} for i, head in enumerate(heads)},
    }
    figures = {
        "lines": {"kind": "lines", "x": "slice.length", "x_log2": True, "x_label": "length", "y_label": "accuracy (%)"},
        "words": {"kind": "lines", "x": "column", "y_label": "accuracy (%)"},
        "successes": {"kind": "successes", "x_label": "learning rate"},
        "curves": {"kind": "curves", "split": "valid", "costs": [{"metric": name, "label": name} for name in SPENT]},
    }
    figure = figures.get(kind, {"kind": kind, "costs": COSTS if kind in ("seeds", "costs") else []})
    runs = []
    for i in range(rows):
        for seed, test in enumerate((1.0, 0.03 * i, 0.5)):
            slices = {f"length={2**column}": test for column in range(columns)}
            run = make_run(f"m{i}", "induction-heads", seed, test, valid={100: test, 50: test / 2}, slices=slices)
            valid = [row for row in run if row["split"] == "valid"] if kind == "curves" else []
            run += [{**row, "slice": name} for row in valid for name in slices]
            for name in SPENT if kind == "curves" else ():
                run += [{**run[-1], "metric": name, "value": 10.0**i * step, "step": step} for step in (50, 100)]
            runs.append(run)
    sweep = {"model.name": [f"m{i}" for i in range(rows)], "train.lr": [5e-4, 1e-2]}
    texts = dict(NONE)
    if published:
        texts["expected"] += "".join(
            f'"{n}","{h}",{9 * i},%,higher,,,,paper\n' for n in names for i, h in enumerate(heads)
        )
    success = {**SELECT, "success": 90.0}
    return make(*runs, config=grid(table=table, figure=figure, sweep=sweep, select=success), **texts)


@pytest.mark.parametrize(
    ("kind", "shape", "width"),
    [
        ("seeds", {}, "column"),
        pytest.param("seeds", {"columns": 9, "rows": 3, "published": True}, "page", marks=pytest.mark.slow),
        ("costs", {"columns": 2}, "column"),
        ("cells", {"columns": 9}, "column"),
        ("lines", {"published": True, "rows": 5}, "column"),
        pytest.param("lines", {"rows": 9}, "page", marks=pytest.mark.slow),
        pytest.param("lines", {"rows": 5}, "column", marks=pytest.mark.slow),
        ("words", {"columns": 7, "rows": 5}, "column"),
        ("successes", {"rows": 3, "columns": 1}, "column"),
        pytest.param("curves", {"rows": 14, "columns": 2}, "page", marks=pytest.mark.slow),
        ("curves", {"columns": 1}, "column"),
    ],
)
def test_nothing_is_cut_covered_or_too_small_to_read(make, kind, shape, width):
    report = hard(make, kind, **shape)
    canvas = draw(report, width)
    assert faults(canvas) == []
    assert canvas.get_figwidth() == WIDTHS[width]
    assert all(device in words(canvas) for device in devices_of(report))


def committed(name, scale):
    def beside(other):
        return ROWS.report(other, "paper")

    path = ROWS.experiments[name]
    return report_of(CONFIGS[name], path.parent, name, ROWS.committed(name), scale=scale, beside=beside)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("gsa/figure3a", ["column"]),
        *(pytest.param(name, list(WIDTHS), marks=pytest.mark.slow) for name in ROWS.experiments),
    ],
)
def test_the_figures_of_committed_rows_can_be_read(name, widths):
    for scale in sorted({run.scale for run in ROWS.committed(name)}):
        report = committed(name, scale)
        for width in widths if not report.figure.empty else ():
            canvas = draw(report, width)
            assert faults(canvas) == [], (scale, width)
            written = words(canvas)
            assert all(re.sub(r", \d+ runs at a time$", "", run.device) in written for run in report.runs)
            assert report.experiment not in written, "a title says what is shown, and not its id"


@pytest.mark.parametrize("width", ["page", "column"])
def test_a_scoreboard_can_be_read(width):
    counts = {"agree": 30, "better": 1, "agree, few seeds": 9, "not run": 60, "claims: hold": 5, "other data": 4}
    line = Counter(counts)
    canvas = draw_board(
        "All experiments", [(name, line) for name in ("h3", "mamba", "a-folder/with-a-long-name")], width
    )
    assert faults(canvas) == []


def test_wrapping_keeps_every_word_and_the_width():
    text = "Gated DeltaNet [-1, 1] and " + "y" * 90
    lines = wrapped(text, 0.9, TEXT)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(measure(line, TEXT) for line in lines) <= 0.9
    assert any("[-1, 1]" in line for line in lines), "a pair in brackets is not divided"


def test_a_word_is_broken_behind_a_sign_between_its_parts():
    """A title read `times mamba_ss m`."""
    room = measure("mamba_ss", TEXT)
    assert wrapped("times mamba_ssm", room, TEXT) == ["times", "mamba_", "ssm"]
    assert "".join(wrapped("a" * 40, room, TEXT)) == "a" * 40


@pytest.mark.parametrize(("low", "high"), [(6.1, 7.4), (0.0302, 0.0345), (0.3, 3.0), (1e-5, 1e-2)])
def test_a_logarithmic_axis_has_at_least_two_ticks_in_view(low, high):
    ticks = log_ticks(low, high, room=2.0)
    assert len(ticks) > 1
    assert all(low <= tick * 1.001 and tick <= high * 1.001 for tick in ticks)
    assert log_ticks(low, low, room=2.0)


@pytest.mark.parametrize(("name", "kind"), [("mamba/figure4", "seeds"), ("kernels/models", "cells")])
def test_another_kind_of_figure_leaves_out_what_is_said_to_that_of_the_grid(name, kind):
    """The x of lines and the columns of seeds, which the other kind does not have, were errors."""
    built = _drawable(REPOSITORY, name, {"--figure": kind})
    assert built.figure.spec.kind == kind
    assert (built.figure.spec.x, built.figure.spec.columns) == ("", ())


def test_every_figure_of_the_documents_says_which_command_draws_it():
    """`report --update-docs` draws them again, so that none is drawn by hand or forgotten."""
    docs = HOME / "docs"
    assert {path.stem for path in docs.glob("*.png")} == {path.stem for path in docs.glob("*.svg")}
    for path in docs.glob("*.svg"):
        assert re.search(r"<dc:source>report (--all|kernels|[\w/-]+ --scale \w+)", path.read_text()), path.name


# the counts of the scoreboard are those of the documents' tables (test_committed_counts.py)
DRAWN = [path for path in sorted((HOME / "docs").glob("*.svg")) if path.stem != "scoreboard"]


@pytest.mark.slow
@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_figure_of_the_documents_is_that_of_the_committed_rows(tmp_path, path):
    """Compares what is written on it, because lines differ in their last digits between versions of matplotlib."""
    (command,) = re.findall(r"<dc:source>(report [^<]+)", path.read_text())
    drawn = tmp_path / path.name
    with pytest.raises(SystemExit) as end:
        main(REPOSITORY, [*command.split(), "--results", str(REPOSITORY.reference), "--out", str(drawn)])
    assert not end.value.code
    texts = [re.findall(r"<text [^>]*>([^<]+)<", file.read_text()) for file in (path, drawn)]
    assert texts[0] == texts[1]
