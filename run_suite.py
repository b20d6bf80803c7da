"""Subquad's command line and composition root: the only file that knows every folder.

The commands are in `suite/commands`; they get the tables and folders of the repository from here.
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # until the command line handles it, which takes a second of imports, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch, pandas and matplotlib take seconds to import: what needs them is imported inside a function
from kernels import OPERATORS
from models import MODELS
from suite import commands
from suite.commands.repository import Repository
from suite.contracts import Recorder
from suite.registry import Entry, Registry
from tasks import TASKS

if TYPE_CHECKING:
    from kernels.workload import Workload
    from models.backbone import Backbone, BackboneConfig
    from models.blocks import Mixer
    from suite import contracts
    from suite.bench import contracts as bench_contracts
    from tasks.base import TaskBase
    from tasks.data.stored import StoredTask
    from tasks.sc09 import SC09

    # the registries load by name, so the type checker compares the folders' classes with the interfaces only here
    def _task(task: TaskBase) -> contracts.Task:
        return task

    def _prepared(task: StoredTask) -> contracts.Prepared:
        return task

    def _generating(task: SC09) -> contracts.Generating:
        return task

    def _mixer(mixer: Mixer) -> contracts.Mixer:
        return mixer

    def _model(model: Backbone) -> contracts.Model:
        return model

    def _layered(model: Backbone) -> contracts.Layered:
        return model

    def _model_config(config: BackboneConfig) -> contracts.ModelConfig:
        return config

    def _workload(workload: Workload) -> bench_contracts.Workload:
        return workload


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
REPOSITORY = Repository(
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
    commands.main(REPOSITORY)


if __name__ == "__main__":
    main()
