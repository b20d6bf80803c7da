"""The grids and the committed rows, which a process of tests reads once: they lie in thousands of files."""

from pathlib import Path

from subquad.reports.render.quotes import CommittedRows
from subquad.suite.settings.config import find_experiments, load_experiment

HOME = Path(__file__).resolve().parents[2]
EXPERIMENTS = find_experiments(HOME / "reports")
CONFIGS = {name: load_experiment(path) for name, path in EXPERIMENTS.items()}
ROWS = CommittedRows(HOME / "results", EXPERIMENTS)
