"""Fixtures of the tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from subquad.reports.render import Report, build
from subquad.suite.settings.config import ExperimentConfig
from tests.reports.made import CLAIMS, EXPECTED, grid
from tests.stored import frame_of


@pytest.fixture
def make(tmp_path: Path):
    """Builds a report of the rows of runs, and of those that were given to the calls before."""
    stored: dict[Any, list[dict[str, Any]]] = {}

    def report(
        *runs: list[dict[str, Any]],
        config: ExperimentConfig | None = None,
        expected: str = EXPECTED,
        claims: str = CLAIMS,
        scale: str | None = None,
    ) -> Report:
        folder = tmp_path / "reports" / "demo" / "table2"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "expected.csv").write_text(expected)
        (folder / "claims.csv").write_text(claims)
        stored.update(((rows[0]["scale"], rows[0]["run_id"]), rows) for rows in runs)
        return build(config or grid(), folder, frame_of(*stored.values()), scale=scale)

    return report
