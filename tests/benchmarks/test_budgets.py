"""Every kernel that the operators launch keeps within its budget, on every target that Triton can compile for."""

import itertools
import json
import random
import warnings
from pathlib import Path

import pytest

from subquad.kernels import OPERATORS
from subquad.suite.bench import budgets
from subquad.suite.bench.compile import TARGETS

WORKLOADS = {op: target for op, (target, _) in OPERATORS.items()}


@pytest.fixture(autouse=True)
def _budgets_of_this_triton():
    if (reason := budgets.reason()) is not None:
        pytest.skip(reason)


def assert_within_budget(collection):
    for target, why in collection.unavailable.items():
        warnings.warn(f"budgets of {target} were not checked: {why}", stacklevel=1)
    if savings := budgets.savings(collection):
        warnings.warn(f"calls cost less than budgeted; {budgets.UPDATE} keeps that: {savings}", stacklevel=1)
    violations = budgets.check(collection)
    assert not violations, "\n".join(map(str, violations))


@pytest.mark.timeout(1500)
def test_no_kernel_that_changed_since_its_budget_was_written_exceeds_it():
    """Kernels whose source is unchanged are not compiled. For sm_90, with the shapes of the benchmarks, see below."""
    # one process lists the kernels of several targets
    targets = [name for name in TARGETS if name != "sm_90"]
    collection = budgets.collect(WORKLOADS, targets, unchanged=budgets.digests())
    changed = sorted({name for found in collection.found.values() for name in found})
    if changed:
        warnings.warn(f"compiled {len(changed)} kernels; {budgets.UPDATE} records them: {changed}", stacklevel=1)
    assert_within_budget(collection)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_changed_kernels_and_one_of_each_operator_are_within_their_budgets():
    """An unchanged digest stands for unchanged figures, so this catches what a digest misses and figures not measured.

    The choice changes with the file, so that every kernel has its turn. One variant of each would take five minutes of
    a processor.
    """
    known = budgets.digests()["sm_90"]
    chance = random.Random(budgets.FILE.read_bytes())
    of_operators = itertools.groupby(sorted(known), key=lambda name: name.partition("/")[0])
    chosen = {chance.choice([*names]) for _, names in of_operators}
    unchanged = {name: digest for name, digest in known.items() if name not in chosen}
    # another process would list all kernels once more, which takes as long as to compile a dozen
    collection = budgets.collect(WORKLOADS, ["sm_90"], jobs=1, unchanged={"sm_90": unchanged})
    assert_within_budget(collection)
    assert set(collection.found["sm_90"]) >= chosen


def test_every_kernel_can_be_started_on_the_gpu_that_it_is_measured_on():
    known = json.loads(budgets.FILE.read_text())["budgets"][budgets.triton_version()]["sm_90"]
    reasons = {name: budget for name, budget in known.items() if isinstance(budget, str)}
    assert not reasons


def test_every_operator_with_triton_kernels_has_budgets():
    """Kernels are recorded from the implementations of a workload that are `ours` and have a cold start."""
    known = json.loads(budgets.FILE.read_text())["budgets"][budgets.triton_version()]
    ops = {name.split("/")[0] for variants in known.values() for name in variants}
    folders = {op: Path(target.split(":")[0].replace(".", "/")).parent for op, (target, _) in OPERATORS.items()}
    # two operators may share a folder
    with_kernels = {folder for folder in folders.values() if list((budgets.REPOSITORY / folder).glob("triton*"))}
    missing = with_kernels - {folders[op] for op in ops if op in folders}
    assert not missing, f"{', '.join(map(str, missing))}: add the implementation, then {budgets.UPDATE}"
