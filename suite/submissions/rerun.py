"""A stored run carried out again up to its first evaluation, and held against its rows.

Training data, initialisation and order follow from the seed, and a processor gives the same last digits with the same
torch and number of threads. So there the rows must be equal. Elsewhere sums are rounded differently, which training
amplifies step by step; then the mean training loss up to the evaluation must agree to `TOLERANCE`. The evaluation
itself is not compared there: while a network learns fast, its validation loss differs by more between two devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from subquad.suite.contracts import Recorder
from subquad.suite.environment import provenance
from subquad.suite.runner import worker_of
from subquad.suite.training.numerics import host_threads
from subquad.suite.training.run import TrainingRun

TOLERANCE = 0.05
"""Largest relative difference of a mean training loss between devices or versions; docs/submit.md has measurements."""
SAME = ("device", "torch", "threads")
"""Columns that must be equal for equal last digits, as must the operators."""
TRAINED = ("train", "valid")
"""Splits with rows from before the end of training."""


def first_evaluation(run: TrainingRun, threads: int, record: Recorder) -> list[dict[str, Any]]:
    """The rows of a run on the CPU up to its first evaluation, with the columns of this machine.

    RunEnded where the run diverges before; whatever the model raises.
    """
    device = torch.device("cpu")
    worker: Any = None

    def evaluated() -> bool:
        return any(row["split"] == "valid" for row in worker.outcome.rows)

    worker = worker_of(run)(run, device, stop=evaluated)
    with host_threads(threads), record() as operators:
        with suppress(KeyboardInterrupt):
            worker()
        facts = provenance(device)
    facts |= {"operators": json.dumps(operators, sort_keys=True), "data_digest": worker.outcome.data_digest}
    return [{**facts, **row} for row in worker.outcome.rows if row["split"] in TRAINED]


def processor() -> str:
    """Maker, family, model and stepping of the processor, and the instructions that torch uses on it.

    `device` of a row is no more than a name, which one cloud gives to several generations. "" where it is not known.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    parts = [line.partition(":") for line in lines]
    known = {name.strip(): value.strip() for name, _, value in parts}
    words = [f"{name} {known[name]}" for name in ("vendor_id", "cpu family", "model", "stepping") if name in known]
    return ", ".join([*words, torch.backends.cpu.get_cpu_capability()]) if words else ""


def is_exact(stored: Mapping[str, Any], again: Mapping[str, Any], of: str) -> bool:
    """Whether equal last digits are promised, given a row of each: on the same processor with the same versions.

    of: the processor of the stored rows (`processor`).
    """
    return bool(of) and of == processor() and all(stored[name] == again[name] for name in (*SAME, "operators"))


def faults(stored: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], *, exact: bool) -> Iterator[str]:
    """A sentence on each number of a repeated run that the stored rows do not have.

    exact: whether equal last digits are promised (`is_exact`).
    """
    known = {_place(row): row for row in stored if row["split"] in TRAINED}
    for row in again:
        other = known.get(_place(row))
        metric, split, slice_name, step = _place(row)
        what = f"{metric} on {split}{f', {slice_name}' * bool(slice_name)} after {step} steps"
        if other is None:
            yield f"{what}: the stored rows have no such row"
            continue
        if other["data_digest"] != row["data_digest"]:
            yield "its data were others: the column data_digest differs; were they of another version of the task?"
            return
        if exact:
            if other["value"] != row["value"]:
                yield f"{what} is {other['value']!r} in its rows and {row['value']!r} here, on an equal machine"
        elif (metric, split) == ("loss", "train") and not _near(other["value"], row["value"]):
            yield (
                f"{what} is {other['value']:.5g} in its rows and {row['value']:.5g} here, which is more than "
                f"{TOLERANCE:.0%} apart"
            )


def _near(stored: float | None, again: float | None) -> bool:
    if stored is None or again is None:
        return stored == again
    return abs(stored - again) <= TOLERANCE * max(abs(stored), abs(again))


def _place(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return row["metric"], row["split"] or "", row["slice"] or "", row["step"]
