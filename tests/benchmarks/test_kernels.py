"""The cases of `run_suite.py bench` under pytest-benchmark, for `--benchmark-compare`, its JSON and its histograms.

    pytest tests/benchmarks/test_kernels.py --benchmark-only --benchmark-autosave

The samples are those of `suite.bench.measure` (device time, with the cache overwritten before each), which the plugin
receives through its clock. Without `--benchmark-only` every case goes through the accuracy rule once. On a CPU the
shapes are the short ones. Triton kernels are interpreted there, on fewer channels, in the slow tier: in the quick tier
the laws of operators try them on small shapes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subquad.kernels import OPERATORS
from subquad.suite.bench import measure
from subquad.suite.bench.cases import Case, cases
from subquad.suite.registry import Entry, Registry

REGISTRY = Registry("operator", {name: Entry(*where) for name, where in OPERATORS.items()})
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = "quick" if DEVICE.type == "cuda" else "short"


class Replay:
    """A clock whose k-th pair of readings differs by the k-th sample."""

    __name__ = "device time"

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.calls = 0
        self.now = 0.0

    def __call__(self) -> float:
        if self.calls % 2 and self.samples:
            self.now += self.samples[self.calls // 2 % len(self.samples)]
        self.calls += 1
        return self.now


def cut(case: Case, **most: int) -> Case:
    """The case with at most these sizes; the others choose the kernel and stay."""
    return replace(case, shape=tuple((key, min(value, most.get(key, value))) for key, value in case.shape))


def tiny(case: Case) -> Case:
    """The case with one sequence and one channel of 17 steps.

    A case of a single step has four channels, because one number may be near zero by chance.
    """
    return cut(case, B=1, T=17, D=1 if "T" in dict(case.shape) else 4, H=1)


def narrow(case: Case) -> Case:
    """The case with one sequence of 130 steps and eight channels, which the interpreter carries out in seconds."""
    return cut(case, B=1, T=130, D=8, H=1)


def parameter(workload, case, *marks):
    clock = Replay()
    group = f"{case.op} {case.label} {case.dtype} {case.direction}"
    benchmark = pytest.mark.benchmark(group=group, timer=clock)
    return pytest.param(workload, case, clock, id=str(case).replace(" ", "-"), marks=[benchmark, *marks])


def parameters():
    """On a CPU all but the tiny cases of one kernel, and of implementations that no law judges, are slow."""
    for name in REGISTRY:
        workload = REGISTRY.load(name)
        seen = set()
        for case in cases(workload, [SHAPES], ["ours", "torch", "peer"]):
            implementation = measure.find(workload, case.implementation)
            if DEVICE.type != "cpu":
                yield parameter(workload, case)
                continue
            # a backward pass begins with the forward pass
            if case.backward or not workload.backward:
                yield parameter(workload, narrow(case) if implementation.cold_start else case, pytest.mark.slow)
            kind = case.implementation, case.dtype, case.direction
            if kind not in seen and (name == "swiglu" or (implementation.kind != "ours" and case.backward)):
                seen.add(kind)
                yield parameter(workload, tiny(case))


@pytest.mark.parametrize(("workload", "case", "clock"), list(parameters()))
def test_kernel(benchmark, workload, case, clock):
    try:
        measure.gate(workload, case, DEVICE)
        call = measure.checked(workload, case, DEVICE)
    except measure.Unavailable as error:
        if error.status == "n/a":
            pytest.skip(str(error))
        raise
    samples = [0.0] if benchmark.disabled else [ms / 1e3 for ms in measure.sample(call, DEVICE)]
    clock.samples, clock.calls = samples, 0
    benchmark.pedantic(lambda: None, rounds=len(samples))
    if not benchmark.disabled:
        assert benchmark.stats.stats.median == pytest.approx(sorted(samples)[len(samples) // 2], rel=0.2)
