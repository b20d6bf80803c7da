"""Fixtures of the tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.render import Report, build
from suite.settings.config import ExperimentConfig
from suite.store import storage
from tests.reports.made import CLAIMS, EXPECTED, grid


@pytest.fixture
def make(tmp_path: Path):
    """Writes runs as parquet, one file each, reads them back, and builds a report."""

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
        for rows in runs:
            first = rows[0]
            storage.write(
                storage.result_path(tmp_path / "results", "demo/table2", first["scale"], first["run_id"]), rows
            )
        frame = storage.read(storage.files([tmp_path / "results"], "demo/table2"))
        return build(config or grid(), folder, frame, scale=scale)

    return report
