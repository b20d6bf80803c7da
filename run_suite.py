"""Subquad's command line and composition root: the only file that knows every folder.

The commands are in `suite/commands`; they get the tables and folders of the repository from here. So do the functions
for Python, `from subquad import load, results, run` (`suite/notebook.py`).

In a checkout that is not installed, this file puts the folder of the package `subquad` on the import path, in place of
its own folder, whose subfolders have names that other packages have, too (`suite/package/subquad/__init__.py`).
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path

if __name__ != "subquad.run_suite":
    _here = Path(__file__).resolve().parent
    sys.path[:] = [str(_here / "suite" / "package"), *(p for p in sys.path if Path(p).resolve() != _here)]

if __name__ == "__main__":
    # until the command line handles it, which takes a second of imports, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

# torch, pandas and matplotlib take seconds to import: what needs them is imported inside a function
from subquad.kernels import OPERATORS
from subquad.models import MODELS
from subquad.suite import commands
from subquad.suite.commands.repository import Repository
from subquad.suite.contracts import Recorder
from subquad.suite.environment import reads_utf8
from subquad.suite.notebook import Notebook
from subquad.suite.registry import Entry, Registry
from subquad.tasks import TASKS

if TYPE_CHECKING:
    from subquad.kernels.workload import Workload
    from subquad.suite.bench import contracts as bench_contracts

    # operators import nothing of the harness, so the type checker compares theirs with its interface only here
    def _workload(workload: Workload) -> bench_contracts.Workload:
        return workload


WORKLOADS = Registry("operator", {name: Entry(*where) for name, where in OPERATORS.items()})


def _versions() -> Mapping[str, int]:
    from subquad.kernels.versions import VERSIONS

    return VERSIONS


def _recorder() -> Recorder:
    from subquad.kernels.backend import record_operators

    return record_operators


def _rendering() -> Any:
    from subquad.reports import render

    return render


def _data() -> Any:
    from subquad.tasks import data

    return data


def _data_rate() -> Any:
    from subquad.tasks.data import rate

    return rate


def _leakage(task: Any) -> Mapping[str, int]:
    from subquad.tasks.data.stored import leakage

    return leakage(task)


def _checkpoints() -> Any:
    from subquad.models import checkpoints

    return checkpoints


def _token_task(vocab_size: int, length: int) -> dict[str, Any]:
    vocabulary = "bytes" if vocab_size == 256 else "bpe"
    return {"name": "text-file", "vocabulary": vocabulary, "vocab_size": vocab_size, "length": length}


def _rows(home: Path) -> tuple[Path, Callable[..., Path] | None]:
    """The folder above `results` and `submissions`, and in an installed wheel, which has none, what brings them."""
    archive = home / "ROWS.json"
    if not archive.is_file():
        return home, None
    from subquad.tasks.data import committed

    found = committed.archive_of(archive)
    return found.folder(), partial(committed.pull, found)


HOME = Path(commands.__file__).resolve().parents[2]
ROWS, PULL = _rows(HOME)
REPOSITORY = Repository(
    tasks=TASKS,
    models=MODELS,
    operators=WORKLOADS,
    reports=HOME / "reports",
    reference=ROWS / "results" / "reference",
    pull=PULL,
    submissions=ROWS / "submissions",
    versions=_versions,
    recorder=_recorder,
    rendering=_rendering,
    data=_data,
    data_rate=_data_rate,
    leakage=_leakage,
    checkpoints=_checkpoints,
    token_task=_token_task,
)

_NOTEBOOK = Notebook(REPOSITORY)
run, results, load = _NOTEBOOK.run, _NOTEBOOK.results, _NOTEBOOK.load


def main() -> None:
    """Entry point of `run_suite.py` and `subquad`."""
    if not reads_utf8() and os.environ.get("PYTHONUTF8") != "1":
        # Python decides at its start how it reads files; the setting also reaches the processes that it starts
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    interrupted = False

    def leave() -> None:
        # to take the interpreter apart takes seconds on a busy machine, and whoever has sent SIGTERM may not wait
        if interrupted:
            sys.stdout.flush()
            os._exit(commands.INTERRUPTED)

    # the function that was registered first is called last
    atexit.register(leave)
    try:
        commands.main(REPOSITORY)
    except SystemExit as end:
        interrupted = end.code == commands.INTERRUPTED
        raise


if __name__ == "__main__":
    main()
