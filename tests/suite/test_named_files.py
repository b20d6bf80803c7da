"""Files that the options of a user's task or model name are part of the identity of a run."""

import sys

import pytest

TASK = """
from pathlib import Path
from typing import ClassVar
import numpy as np
from subquad.models.linear_attention import LinearAttentionConfig
from subquad.suite.contracts import TaskSpec
from subquad.tasks.base import TaskBase, token_segment

class Read(TaskBase):
    \"\"\"Rows of tokens from files.\"\"\"

    name: ClassVar[str] = "read"
    version: ClassVar[int] = 1
    data: DATA
    more: Path | None = None

    @property
    def spec(self):
        return TaskSpec(input="tokens", num_classes=4, readout="token", max_length=8, vocab_size=4)

    def segments(self, split, seed):
        files = sorted(path for path in [Path(self.data), *Path(self.data).rglob("*")] if path.is_file())
        text = "".join(file.read_text() for file in [*files, *filter(None, [self.more])])
        tokens = np.resize([int(letter) for letter in text], (8, 8))
        yield token_segment(tokens, tokens, np.indices((8, 8))[1], 4, "length=8")

class Filed(LinearAttentionConfig):
    \"\"\"A model that reads a file.\"\"\"

    table: Path | None = None

TASKS = {"read": Read}
MODELS = {"filed": Filed}
"""
GRID = """
title: rows from a file
baseline:
  task: {name: read, data: one.txt}
  model: {name: linear-attention, num_layers: 1, d_model: 16, channel_mixer: none}
  train: {steps: 2, batch_size: 8, eval_batch_size: 8, lr: 1.0e-3, eval_every: 2}
sweep: {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"one.txt": "012", "more.txt": "3", "rows/a/b.txt": "1", "grid/grid.yaml": GRID}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    sys.modules.pop("my_reading", None)


@pytest.mark.parametrize("kind", ["Path", "str"])
@pytest.mark.parametrize(
    ("setting", "edited"),
    [("task.data=one.txt", "one.txt"), ("task.data=rows", "rows/a/b.txt"), ("task.more=more.txt", "more.txt")],
)
def test_a_grid_is_repeated_for_an_edited_file(folder, command_line, kind, setting, edited):
    (folder / "my_reading.py").write_text(TASK.replace("DATA", kind))
    command = ("run", "grid", "--plugin", "my_reading.py", "--results", "results", "--set", setting)
    done = command_line(*command)
    assert done.returncode == 0, done.stdout
    assert "1 of 1 runs are already stored" in command_line(*command).stdout
    (folder / edited).write_text((folder / edited).read_text() + "1")
    done = command_line(*command)
    assert done.returncode == 0, done.stdout
    assert "already stored" not in done.stdout


def test_a_file_has_the_same_identity_wherever_it_lies(folder, command_line):
    (folder / "my_reading.py").write_text(TASK.replace("DATA", "Path"))
    command = ("run", "grid", "--plugin", "my_reading.py", "--results", "results")
    assert command_line(*command).returncode == 0
    (folder / "one.txt").rename(folder / "rows" / "two.txt")
    done = command_line(*command, "--data", "rows/two.txt")
    assert "1 of 1 runs are already stored" in done.stdout, done.stderr


def test_a_model_that_is_given_a_file_is_refused(folder, command_line):
    (folder / "my_reading.py").write_text(TASK.replace("DATA", "Path"))
    options = ("--set", "model.name=filed", "--set", "model.table=more.txt")
    done = command_line("run", "grid", "--plugin", "my_reading.py", *options)
    assert done.returncode == 2
    assert "model filed: table is a path, and no id of a run has the content of that file" in done.stderr
