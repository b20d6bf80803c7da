"""Runs with and without a plugin share no process, because a plugin may have changed anything in its own."""

import sys

import pytest

from subquad.suite.training.scores import Scores
from tests.processes import in_a_process
from tests.suite.test_plugins import GRID

CHANGING = """
from subquad.models.linear_attention import LinearAttentionConfig
from subquad.suite.training.scores import Scores

class Mine(LinearAttentionConfig):
    \"\"\"A model of mine.\"\"\"

Scores.read = lambda self: {"accuracy": (1.0, 1.0), "loss": (0.0, 1.0)}
MODELS = {"mine": Mine}
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with a grid and a plugin."""
    (tmp_path / "my-grid").mkdir()
    (tmp_path / "my-grid" / "grid.yaml").write_text(GRID)
    (tmp_path / "my_changing.py").write_text(CHANGING)
    return tmp_path


@pytest.mark.slow
def test_what_a_plugin_changes_in_its_process_is_no_part_of_the_runs_of_others(folder):
    choice = {"scale": None, "only": None, "overrides": None, "seeds": None, "data": None}
    path, grid = str(folder / "my_changing.py"), str(folder / "my-grid")
    code = f"""
from pathlib import Path
from subquad.run_suite import REPOSITORY
from subquad.suite.commands.planning import resolved_runs
from subquad.suite.executors.local import run_all
from tests.suite.test_workers import CPU, Recording, values
_, runs = resolved_runs(REPOSITORY.with_plugins([{path!r}]), {grid!r}, **{choice!r})
theirs, mine = sorted(runs, key=lambda run: len(run.plugins))
run_all([mine, theirs], Path({str(folder)!r}, "behind"), CPU, Recording(), jobs=1)
run_all([theirs], Path({str(folder)!r}, "alone"), CPU, Recording(), jobs=1)
behind, alone = (values(Path({str(folder)!r}, name), [theirs]) for name in ("behind", "alone"))
assert behind == alone, (behind, alone)
losses = [row["value"] for row in values(Path({str(folder)!r}, "behind"), [mine]) if row["metric"] == "loss"]
assert 0.0 in losses
"""
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr


def test_one_process_carries_out_no_runs_with_and_without_a_plugin(folder, command_line, monkeypatch):
    pytest.importorskip("upath")
    monkeypatch.setattr(Scores, "read", Scores.read)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # no other process sees what is written there
    command = ("run", folder / "my-grid", "--plugin", folder / "my_changing.py", "--results", "memory://shared")
    done = command_line(*command)
    assert done.returncode == 2
    assert "linear-attention on mqar, seed 0: it would share this process with the plugin my_changing" in done.stderr
    for name in ("mine", "linear-attention"):
        assert command_line(*command, "--only", f"model.name={name}").returncode == 0
    del sys.modules["my_changing"]
