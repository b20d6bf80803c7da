"""The rows of a user's task are those of its files and code as they are, and so is the identity of its runs."""

import importlib
import sys

import pytest

from subquad.suite.training.data import load_splits

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


@pytest.mark.parametrize(
    ("kind", "setting", "edited"),
    [
        ("Path", "task.data=one.txt", "one.txt"),
        ("str", "task.data=one.txt", "one.txt"),
        ("str", "task.data=rows", "rows/a/b.txt"),
        ("Path", "task.more=more.txt", "more.txt"),
    ],
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


READ = "    def fingerprint(self):\n        return Path(self.data).read_text()\n\n    @property"


@pytest.mark.parametrize(
    ("change", "fingerprint", "reason"),
    [
        ("write_text('3')", "    @property", "its data changed while it was carried out"),
        ("unlink()", "    @property", "its data changed while it was carried out"),
        ("unlink()", READ, "its data cannot be read any more"),
    ],
)
def test_a_run_whose_file_changes_meanwhile_fails(folder, command_line, change, fingerprint, reason):
    build = f"    def build(self, spec):\n        Path('one.txt').{change}\n        return super().build(spec)\n"
    text = TASK.replace("DATA", "Path").replace("    table: Path | None = None\n", build)
    (folder / "my_reading.py").write_text(text.replace("    @property", fingerprint, 1))
    options = ("--plugin", "my_reading.py", "--results", "results", "--set", "model.name=filed")
    done = command_line("run", "grid", *options)
    assert done.returncode == 1
    assert reason in done.stdout
    assert not list(folder.rglob("*.checkpoint"))


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


MINE = """
from typing import ClassVar
import numpy as np
from subquad.suite.contracts import TaskSpec
from subquad.tasks.base import TaskBase, token_segment

class Mine(TaskBase):
    \"\"\"Rows of one token.\"\"\"

    name: ClassVar[str] = "mine"
    version: ClassVar[int] = 1

    @property
    def spec(self):
        return TaskSpec(input="tokens", num_classes=4, readout="token", max_length=8, vocab_size=4)

    def segments(self, split, seed):
        tokens = np.full((8, 8), TOKEN)
        yield token_segment(tokens, tokens, np.indices((8, 8))[1], 4, "length=8")
"""


def test_two_tasks_whose_classes_have_one_name_have_rows_of_their_own(folder, monkeypatch):
    for number, name in enumerate(("easy", "hard")):
        (folder / f"my_{name}.py").write_text(MINE.replace("TOKEN", str(number)))
    monkeypatch.syspath_prepend(folder)
    tasks = [importlib.import_module(f"my_{name}").Mine() for name in ("easy", "hard")]
    assert [int(load_splits(task, 0).train[0].inputs[0, 0]) for task in tasks] == [0, 1]
    for name in ("my_easy", "my_hard"):
        del sys.modules[name]


STORED = """
from typing import ClassVar
import numpy as np
from subquad.suite.contracts import TaskSpec
from subquad.tasks.data.stored import StoredTask

class Mine(StoredTask):
    \"\"\"A task that keeps arrays in the cache.\"\"\"

    name: ClassVar[str] = "mine"
    version: ClassVar[int] = 1

    @property
    def folder(self):
        return self.data

    def files(self, folder):
        return sorted(folder.glob("*.txt"))

    @property
    def spec(self):
        return TaskSpec("tokens", num_classes=2, readout="token", max_length=2, vocab_size=2)

    def plan(self):
        self.arrays()

    def read(self, folder):
        return {"sizes": np.array([path.stat().st_size FACTOR for path in self.files(folder)])}
"""


def test_an_edited_reader_of_a_users_task_makes_its_arrays_again(folder, monkeypatch):
    monkeypatch.setenv("SUBQUAD_DATA", str(folder / "cache"))
    monkeypatch.syspath_prepend(folder)
    found = []
    for factor in ("", "* 10"):
        (folder / "my_stored.py").write_text(STORED.replace("FACTOR", factor))
        found.append(importlib.import_module("my_stored").Mine(data=folder).arrays()["sizes"].tolist())
        del sys.modules["my_stored"]
    assert found == [[1, 3], [10, 30]]
