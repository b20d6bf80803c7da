"""Subquad's command line and composition root: the only file that knows every folder.

The commands are in `suite/commands`; they get the tables and folders of the repository from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# torch, pandas and matplotlib take seconds to import: what needs them is imported inside a function
from kernels import OPERATORS
from models import MODELS
from suite import commands
from suite.commands.house import House
from suite.registry import Entry, Registry
from suite.runner import Recorder
from tasks import TASKS

WORKLOADS = Registry("operator", {name: Entry(*where) for name, where in OPERATORS.items()})


def _versions() -> Mapping[str, int]:
    from kernels.versions import VERSIONS

    return VERSIONS


def _recorder() -> Recorder:
    from kernels.backend import record_operators

    return record_operators


def _rendering() -> Any:
    from reports import render

    return render


def _data() -> Any:
    from tasks import data

    return data


def _data_rate() -> Any:
    from tasks.data import rate

    return rate


def _leakage(task: Any) -> Mapping[str, int]:
    from tasks.data.stored import leakage

    return leakage(task)


HOME = Path(__file__).resolve().parent
HOUSE = House(
    tasks=TASKS,
    models=MODELS,
    operators=WORKLOADS,
    reports=HOME / "reports",
    reference=HOME / "results" / "reference",
    versions=_versions,
    recorder=_recorder,
    rendering=_rendering,
    data=_data,
    data_rate=_data_rate,
    leakage=_leakage,
)


def main() -> None:
    """Entry point of `run_suite.py` and `subquad`."""
    commands.main(HOUSE)


if __name__ == "__main__":
    main()
