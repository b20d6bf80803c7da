"""The documents say what is so: numbers stand in rows, lists are the registries, links lead to files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from models import MODELS
from reports.render import Report, build
from reports.render.claims import tally
from suite.settings.config import ExperimentConfig, find_experiments, load_experiment
from suite.settings.grid import expand
from suite.settings.parsing import parse
from suite.settings.resolver import Resolver
from suite.store import storage
from tasks import TASKS

HOME = Path(__file__).resolve().parents[2]
README = (HOME / "README.md").read_text()
REDUCED = (HOME / "docs" / "results.md").read_text()
REFERENCE = HOME / "results" / "reference"
EXPERIMENTS = find_experiments(HOME / "reports")
RESULT = re.compile(
    r"^\| \[(?P<experiment>[^]]+)\]\((?:\.\./)?reports/(?P=experiment)/\) "
    r"\| \[(?P<scale>\w+)\]\((?:\.\./)?results/reference/(?P=experiment)/(?P=scale)/\) "
    r"\| (?P<row>[^|]+) \| (?P<column>[^|]+) \| (?P<unit>[^|]+) \| (?P<paper>[^|]+) \| (?P<ours>[^|]+) "
    r"\| (?P<claims>[^|]+) \|$",
    re.MULTILINE,
)
OURS = re.compile(r"^(?P<mean>[\d.]+)(?: ± (?P<sd>[\d.]+))?(?P<marks>[†‡§¶*]*)$")
RESULTS = [match.groupdict() for match in RESULT.finditer(README + REDUCED)]


@cache
def reference_report(experiment: str, scale: str) -> Report:
    """The report of the committed rows."""
    path = EXPERIMENTS[experiment]
    rows = storage.read(storage.files([REFERENCE], experiment))
    return build(load_experiment(path), path.parent, rows, scale=scale)


def rounded(value: float | None, text: str) -> str:
    """A value with as many decimals as a text has."""
    return "none" if value is None else f"{value:.{len(text.partition('.')[2])}f}"


@pytest.mark.parametrize("line", RESULTS, ids=[f"{line['experiment']}-{line['scale']}" for line in RESULTS])
def test_a_number_of_the_results_table_stands_in_the_committed_rows(line):
    report = reference_report(line["experiment"], line["scale"])
    (cell,) = (cell for cell in report.cells if (cell.row, cell.column) == (line["row"], line["column"]))
    ours = OURS.match(line["ours"])
    assert ours is not None, f"{line['ours']!r} is no number with its marks"
    assert ours["mean"] == rounded(cell.mean, ours["mean"])
    assert (ours["sd"] is None) == (cell.sd is None)
    assert ours["sd"] is None or ours["sd"] == rounded(cell.sd, ours["sd"])
    assert ours["marks"] == "".join(cell.marks)
    assert report.unit in ("", line["unit"])
    if line["paper"] != "—":
        assert cell.published is not None
        assert line["paper"] == rounded(cell.published.value, line["paper"])
    held, counted = tally(report.claims)
    assert line["claims"] == (f"{held} of {counted}" if report.claims else "—")


def test_every_line_of_the_results_table_is_read():
    tables = re.findall(r"^\| experiment \| scale \|.*\n\| ---.*\n((?:\|.*\n)+)", README + REDUCED, re.MULTILINE)
    assert len(tables) == 2
    assert len(RESULTS) == sum(len(table.splitlines()) for table in tables) > 10


def test_paper_scale_stands_in_the_readme_and_the_rest_among_the_reduced():
    assert {match["scale"] for match in RESULT.finditer(README)} == {"paper"}
    assert "paper" not in {match["scale"] for match in RESULT.finditer(REDUCED)}


def test_every_experiment_with_committed_rows_has_a_line():
    have_rows = {str(path.parent.parent.relative_to(REFERENCE)) for path in REFERENCE.rglob("*.parquet")}
    assert {line["experiment"] for line in RESULTS} == have_rows & set(EXPERIMENTS)


def test_the_readme_names_every_task_model_operator_and_experiment():
    missing = [name for registry in (TASKS, MODELS) for name in registry if f"`{name}`" not in README]
    operators = [path.parent.name for path in (HOME / "kernels").glob("*/reference.py")]
    missing += [name for name in operators if f"(kernels/{name}/)" not in README]
    # the experiments of the papers stand in a page of their own, which has them all
    tables = (HOME / "docs" / "tables.md").read_text()
    missing += [name for name in EXPERIMENTS if f"reports/{name}/)" not in README + tables]
    assert missing == []


def test_the_readmes_own_grid_resolves_to_six_runs():
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    config = parse(ExperimentConfig, yaml.safe_load(text), "README.md")
    assert len(expand("mine/recall", config, Resolver(TASKS, MODELS))) == 6


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    folders = ("docs", "kernels", "models", "reports", "results", "suite", "tasks", "tests")
    return [*sorted(HOME.glob("*.md")), *(path for name in folders for path in sorted((HOME / name).rglob("*.md")))]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(HOME)))
def test_every_link_of_a_document_leads_to_a_file(path):
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []
