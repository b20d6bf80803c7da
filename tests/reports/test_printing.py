"""Every format prints the same strings, byte by byte those that are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from subquad.reports.render import build, render
from subquad.reports.render.document import amount, fixed
from tests.reports.made import (
    GRID,
    cell,
    grid,
    make_run,
    three,
    used,
)
from tests.stored import frame_of

GOLDEN = Path(__file__).parent / "golden"


# the reference rows that the byte-identical outputs are made of
def twenty_rows() -> list[list[dict[str, Any]]]:
    runs = three(speed=[1.00e6, 1.02e6, 0.99e6])
    runs += [make_run("s4d", "associative-recall", 0, 0.861, valid={100: 0.86})]
    runs += [make_run("s4d", "associative-recall", 1, status="diverged")]
    runs += [make_run("s4d", "induction-heads", 0, 0.204)]
    assert sum(map(len, runs)) == 20
    return runs


@pytest.mark.parametrize(("format", "name"), [("terminal", "report.txt"), ("md", "report.md"), ("latex", "report.tex")])
def test_output_is_byte_identical_to_the_kept_one(make, format, name):
    report = make(*twenty_rows())
    text = render(report, format)
    assert text == (GOLDEN / name).read_text(), "a wanted change: render the fixture again and read the difference"


def test_a_place_in_a_paper_that_has_no_number_is_named_without_the_word_section(make):
    for section, said in (("footnote 7", "h3, footnote 7; scale"), ("E.1 and 4", "h3, section E.1 and 4; scale")):
        report = make(make_run(), config=grid(source={"paper": "h3", "section": section}))
        assert f"source: {said}" in render(report, "terminal")


def runs_of_different_operators() -> list[list[dict[str, Any]]]:
    """Cells whose runs used two versions, two backends, one of each, and runs with and without a record."""
    return [
        make_run("h3", "associative-recall", 0, 0.996, columns=used(1, "triton")),
        make_run("h3", "associative-recall", 1, 0.998, columns=used(2, "triton")),
        make_run("h3", "induction-heads", 0, 1.0, columns=used(2, "triton")),
        make_run("h3", "induction-heads", 1, 0.99, columns=used(2, "torch")),
        make_run("s4d", "associative-recall", 0, 0.86),
        make_run("s4d", "associative-recall", 1, 0.87, columns=used(2, "triton")),
        make_run("s4d", "induction-heads", 0, 0.36, columns=used(2, "triton")),
        make_run("s4d", "induction-heads", 1, 0.35, columns=used(2, "triton")),
    ]


def test_a_mean_over_different_operators_is_marked_and_explained(make):
    text = render(make(*runs_of_different_operators()), "terminal")
    assert text == (GOLDEN / "operators.txt").read_text(), (
        "a wanted change: render the fixture again and read the difference"
    )


VERDICTS = {
    "expected": """row,column,value,unit,better,seeds,hardware,note,source
S4D,IH,35.6,%,higher,,,,paper Table 2
S4D,AR,86.0,%,higher,,,,paper Table 2
S4D,loss,5.0,nats,lower,,,,paper Table 2
H3,IH,100.0,%,higher,,,,paper Table 2
H3,AR,99.8,%,higher,,,,paper Table 2
H3,loss,1.0,nats,lower,,,,paper Table 2
""",
    "claims": """claim,left,comparison,right,source,if,follows,note
H3 solves associative recall,H3 | AR,>=,70,section 3,,,
H3 beats S4D on induction heads,H3 | IH,>,S4D | IH,section 3,,,the paper has S4
S4D does not extrapolate,S4D | IH,<,50,section 4,S4D | AR >= 99,,
S4D stays below 60,S4D | IH,<,60,section 4,,S4D does not extrapolate,
H3 has the lower loss,H3 | loss,<,S4D | loss,section 3,,,
""",
}


def runs_that_could_flatter() -> list[list[dict[str, Any]]]:
    """High variance, a diverged seed, a claim that is true for no reason, a loss, and marks of several kinds."""
    runs = []
    for seed, (h3, s4d) in enumerate(zip((1.0, 1.0, 0.2), (0.9, 0.86, 0.82), strict=True)):
        runs.append(make_run("h3", "associative-recall", seed, h3, columns=used(1 + seed % 2, "triton")))
        runs.append(make_run("s4d", "associative-recall", seed, s4d))
    runs += [make_run("h3", "induction-heads", 0, 1.0), make_run("h3", "induction-heads", 1, status="diverged")]
    runs.append(make_run("s4d", "induction-heads", 0, 0.1))
    losses = {"h3": (1.0, 9.0, 1.0), "s4d": (3.0, 2.0, 2.5)}
    for rows in runs:
        head = rows[0]
        if head["task"] == "associative-recall":
            value = losses[head["model"]][head["seed"]]
            rows.append({**head, "metric": "loss", "unit": "nats", "split": "test", "slice": "", "value": value})
    return runs


@pytest.mark.parametrize(("format", "name"), [("terminal", "verdicts.txt"), ("latex", "verdicts.tex")])
def test_verdicts_that_cannot_flatter_are_byte_identical_to_the_kept_ones(make, format, name):
    table = yaml.safe_load(GRID)["table"]
    table["columns"]["loss"] = {"task.name": "associative-recall", "metric": "loss"}
    report = make(*runs_that_could_flatter(), config=grid(table=table), **VERDICTS)
    text = render(report, format, details=format == "latex")
    assert text == (GOLDEN / name).read_text(), "a wanted change: render the fixture again and read the difference"


def test_output_does_not_depend_on_the_order_of_the_rows(make, tmp_path):
    runs = twenty_rows()
    expected = render(make(*runs), "terminal")
    again = build(grid(), tmp_path / "reports" / "demo" / "table2", frame_of(*runs).iloc[::-1])
    assert render(again, "terminal") == expected


def test_no_expected_file_leaves_out_the_papers_columns(make):
    report = make(*three(), expected="row,column,value,unit,better,seeds,hardware,note,source\n")
    assert not report.has_published
    header = next(line for line in render(report, "md").splitlines() if line.startswith("| row"))
    assert "paper" not in header
    assert "verdict" not in header


def test_png_writes_a_picture_and_its_svg(make, tmp_path):
    report = make(*three())
    path = render(report, "png", tmp_path / "out" / "figure.png")
    assert isinstance(path, Path)
    assert path.read_bytes().startswith(b"\x89PNG")
    drawing = path.with_suffix(".svg").read_text()
    assert "H3" in drawing
    assert render(report, "png", tmp_path / "again.png")
    assert (tmp_path / "again.svg").read_bytes() == path.with_suffix(".svg").read_bytes()
    with pytest.raises(ValueError, match="--out"):
        render(report, "png")
    with pytest.raises(ValueError, match="nothing to draw"):
        render(make(config=grid(), scale="small"), "png", tmp_path / "none.png")


def test_pdf_writes_a_pdf_alone_and_a_figure_is_as_wide_as_was_asked(make, tmp_path):
    path = render(make(*three()), "pdf", tmp_path / "figure.pdf", width="column", source="report demo/table2")
    assert [found.name for found in tmp_path.glob("figure.*")] == ["figure.pdf"]
    content = path.read_bytes()
    assert content.startswith(b"%PDF")
    # 3.3 inches of 72 points
    assert re.search(rb"/MediaBox \[ *0 0 237.6 ", content)
    assert b"report demo/table2" in content
    drawing = (
        render(make(), "png", tmp_path / "figure.png", source="report demo/table2").with_suffix(".svg").read_text()
    )
    assert 'width="504pt"' in drawing
    assert "<dc:source>report demo/table2</dc:source>" in drawing


def test_html_is_one_page_that_fetches_nothing_and_names_its_runs(make):
    report = make(*three(stand_in="<sample> & more"))
    page = render(report, "html")
    assert isinstance(page, str)
    assert "<script" not in page
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "&lt;sample&gt; &amp; more" in page
    assert "<svg" in page
    for run_id in cell(report, "H3", "AR").run_ids:
        assert run_id in page


def test_a_file_is_written_where_out_names_one(make, tmp_path):
    report = make(*three())
    path = render(report, "md", tmp_path / "deep" / "report.md")
    assert Path(path).read_text() == render(report, "md")
    with pytest.raises(ValueError, match=r"unknown format 'mdx'.*'md'"):
        render(report, "mdx")


def test_numbers_are_printed_the_same_everywhere():
    assert [fixed(-0.04, 1), fixed(-0.04, 1, sign=True), fixed(1.25, 1), fixed(3, 2, sign=True)] == [
        "0.0",
        "+0.0",
        "1.2",
        "+3.00",
    ]
    assert [amount(x) for x in (0, 7, 999, 999.9, 1234, 74_123, 999_900, 1.5e9)] == [
        "0",
        "7",
        "999",
        "1.00K",
        "1.23K",
        "74.1K",
        "1.00M",
        "1.50G",
    ]
    assert amount(2.5 * 2**30, binary=True) == "2.50Gi"
