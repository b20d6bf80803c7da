"""The scoreboard of 50,000 rows is made in seconds and opens in two."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from subquad.run_suite import REPOSITORY
from subquad.suite.identity import identity
from subquad.suite.store import endings, storage
from tests.reports.browser import browser, needs_browser


@needs_browser
@pytest.mark.slow
@pytest.mark.timing
def test_a_page_of_50_000_rows_is_made_in_seconds_and_opens_in_2_s(tmp_path):
    """A copy of committed rows, and of runs among them with other seeds until there are enough."""
    for source in ("h3/table2", "mamba/table11", "recall/sensitivity", "h3/table12", "kernels"):
        for path in storage.files([REPOSITORY.reference], source):
            target = tmp_path / "results" / source / path.parent.name / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (part,) = (tmp_path / "results" / "recall").rglob("*.parquet")
    stored = [*endings.endings_in(part)]
    rows = sum(pq.read_metadata(path).num_rows for path in (tmp_path / "results").rglob("*.parquet"))
    copies = 0
    while rows < 50_000:
        run = storage.load(part, run_id=stored[copies % len(stored)]).to_pylist()
        settings = json.loads(run[0]["config"]) | {"seed": 1000 + copies}
        changes = {"config": json.dumps(settings), "seed": settings["seed"], "run_id": identity(settings)}
        storage.write(part.parent / f"{changes['run_id']}.parquet", [row | changes for row in run])
        rows += len(run)
        copies += 1
    out = tmp_path / "page.html"
    command = [sys.executable, "run_suite.py", "report", "--all", "--results", str(tmp_path / "results")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, timeout=240)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time, which may be three times as long on a slow processor beside other work
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 40
    with browser(tmp_path) as tab:

        def drawn_ms():
            """The time at which the first view stands."""
            tab.open(out)
            assert tab.js("window.errors") == []
            return tab.js('performance.getEntriesByName("drawn")[0].startTime')

        # other work on the machine seldom delays it three times
        assert any(drawn_ms() < 2000 for _ in range(3))
