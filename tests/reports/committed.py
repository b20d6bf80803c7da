"""The committed rows, which a process of tests reads once: they lie in thousands of files."""

from pathlib import Path

from subquad.reports.render.quotes import CommittedRows
from subquad.suite.settings.config import find_experiments

HOME = Path(__file__).resolve().parents[2]
ROWS = CommittedRows(HOME / "results", find_experiments(HOME / "reports"))
