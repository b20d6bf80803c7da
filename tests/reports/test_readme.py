"""The documents say what is so: numbers stand in rows, lists are the registries, links lead to files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from subquad.models import MODELS
from subquad.reports.render import Report, read_papers
from subquad.reports.render.quotes import LINE, SHORT, rewritten
from subquad.suite.options import parse
from subquad.suite.settings.config import ExperimentConfig, find_experiments
from subquad.suite.settings.grid import expand
from subquad.suite.settings.resolver import Resolver
from subquad.suite.store import storage
from subquad.tasks import TASKS
from tests.reports.browser import browser, needs_browser
from tests.reports.committed import ROWS

HOME = Path(__file__).resolve().parents[2]
README = (HOME / "README.md").read_text()
NUMBERS = (HOME / "docs" / "results.md").read_text()
CONTENTS = (HOME / "docs" / "contents.md").read_text()
REFERENCE = HOME / "results" / "reference"
EXPERIMENTS = find_experiments(HOME / "reports")
RESULTS = [*LINE.finditer(NUMBERS), *SHORT.finditer(README)]


def reference_report(experiment: str, scale: str) -> Report:
    """The report of the committed rows, made once."""
    return ROWS.report(experiment, scale)


def scale_of(line: re.Match[str]) -> str:
    """The scale that a line names, or that of the README's table."""
    return line.groupdict().get("scale", "README")


def lines() -> list[Any]:
    """Returns the lines of the tables. Those of the largest experiments are slow, whose reports take 5 to 10 s."""
    slow = [pytest.mark.slow]
    large = ("mad/score", "state-tracking/mixers")
    return [
        pytest.param(line, id=f"{line['experiment']}-{scale_of(line)}", marks=slow * (line["experiment"] in large))
        for line in RESULTS
    ]


@pytest.mark.parametrize("line", lines())
def test_a_number_of_the_results_table_stands_in_the_committed_rows(line):
    assert rewritten(line[0], reference_report) == line[0], "run `python run_suite.py report --update-docs`"


def test_a_line_is_rewritten_as_the_rows_have_it():
    line = next(line for line in RESULTS if line["experiment"] == "h3/table2")
    for column, wrong in (
        ("row", "S4D"),
        ("column", "Induction Head acc"),
        ("unit", "ms"),
        ("paper", "12.3"),
        ("ours", "12.3 ± 4.5†"),
        ("claims", "1 of 99"),
    ):
        start, end = (at - line.start() for at in line.span(column))
        assert rewritten(line[0][:start] + wrong + line[0][end:], reference_report) == line[0]
    with pytest.raises(ValueError, match=r"h3/table2, small has no number"):
        rewritten(line[0].replace("paper", "small"), reference_report)


def test_every_line_of_the_results_table_is_read():
    tables = re.findall(r"^\| experiment \| scale \|.*\n\| ---.*\n((?:\|.*\n)+)", NUMBERS, re.MULTILINE)
    assert len(tables) == 2
    tables += re.findall(r"^\| table \| cell \|.*\n\| ---.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert len(RESULTS) == sum(len(table.splitlines()) for table in tables) > 10


def test_the_table_of_the_readme_fits_a_screen():
    (header,) = re.findall(r"^\| table \| cell \|.*$", README, re.MULTILINE)
    assert header.count("|") == 6
    assert 4 <= len(SHORT.findall(README)) <= 10


STYLE = """
.page { width: 922px; font: 16px/1.5 sans-serif } p, pre, table { margin: 0 0 16px } img { max-width: 100% }
h1, h2 { margin: 24px 0 16px; line-height: 1.25; padding-bottom: .3em; border-bottom: 1px solid }
pre { padding: 16px; overflow: auto; font-size: 85%; line-height: 1.45 }
table { display: block; max-width: 100%; overflow: auto; border-collapse: collapse }
th, td { padding: 6px 13px; border: 1px solid }
"""
"""Sizes of a git host's page, on a column of 922 pixels."""


@needs_browser
def test_the_readme_shows_results_within_two_screens_and_cuts_nothing(tmp_path):
    body = MarkdownIt("commonmark").enable("table").render(README).replace('src="docs/', f'src="{HOME.as_uri()}/docs/')
    page = tmp_path / "readme.html"
    page.write_text(f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style><div class="page">{body}</div>')
    with browser(tmp_path) as tab:
        tab.size(1280, 1080)
        tab.open(page, ready='document.readyState === "complete"')
        start = tab.js("[...document.querySelectorAll('h2')].find((one) => one.textContent === 'Results').offsetTop")
        assert 1000 < start < 2 * 1080
        assert tab.js("[...document.querySelectorAll('pre, table')].filter((n) => n.scrollWidth > 922).length") == 0


def test_paper_scale_stands_in_a_table_of_its_own_and_the_rest_among_the_reduced():
    at_paper, reduced = NUMBERS.split("\n## Reduced protocols\n")
    assert {match["scale"] for match in LINE.finditer(at_paper)} == {"paper"}
    assert "paper" not in {match["scale"] for match in LINE.finditer(reduced)}


def test_every_experiment_with_committed_rows_has_a_line():
    have_rows = {str(path.parent.parent.relative_to(REFERENCE)) for path in storage.files_below(REFERENCE)}
    assert {line["experiment"] for line in RESULTS} == have_rows & set(EXPERIMENTS)


def test_the_contents_name_every_task_model_operator_and_experiment():
    missing = [name for registry in (TASKS, MODELS) for name in registry if f"`{name}`" not in CONTENTS]
    operators = [path.parent.name for path in (HOME / "kernels").glob("*/reference.py")]
    missing += [name for name in operators if f"kernels/{name}/)" not in CONTENTS]
    # the experiments of the papers are in a list of their own, which has them all
    placed = {
        name
        for items in read_papers(HOME / "reports" / "papers.yaml", EXPERIMENTS).values()
        for item in items
        for name in item.experiments
    }
    missing += [name for name in EXPERIMENTS if f"reports/{name}/)" not in CONTENTS + NUMBERS and name not in placed]
    assert missing == []


def test_the_guides_own_grid_resolves_to_six_runs():
    text, *_ = re.findall(r"```yaml\n(title: .*?)```", (HOME / "docs" / "grids.md").read_text(), re.DOTALL)
    config = parse(ExperimentConfig, yaml.safe_load(text), "grids.md")
    assert len(expand("mine/recall", config, Resolver(TASKS, MODELS))) == 6


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    folders = ("docs", "kernels", "models", "reports", "results", "suite", "tasks", "tests")
    return [*sorted(HOME.glob("*.md")), *(path for name in folders for path in sorted((HOME / name).rglob("*.md")))]


def test_every_link_of_a_document_leads_to_a_file():
    links = [
        (path, target)
        for path in documents()
        # badges and runs of workflows are pages of the host, beside those of files
        for target in re.findall(r"\]\((?!https?://|#|\.\./\.\./actions/)([^)#]+)", path.read_text())
    ]
    assert len(links) > 500
    assert [f"{path}: {target}" for path, target in links if not (path.parent / target).exists()] == []
