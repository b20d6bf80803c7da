"""The arena on a GPU: calls are recorded, and one that cannot be is timed as it is, in processes of their own."""

from dataclasses import replace

import torch

from subquad.kernels.workload import Implementation
from subquad.suite.bench.arena import Arena, competing
from subquad.suite.bench.measure import Ceilings
from tests.suite import toy_operators


def reads(x):
    """Reads a value back from the device, which no recording allows."""
    assert torch.isfinite(x.sum()).item()
    return x.cumsum(1)


SUM = replace(
    toy_operators.SUM,
    implementations=(
        Implementation("cumsum", "ours", lambda: lambda x: x.cumsum(1)),
        Implementation("reads", "peer", lambda: reads),
    ),
)


def test_a_call_is_recorded_and_one_that_cannot_be_is_timed_as_it_is():
    limits = Ceilings(copy=[1e12], matmul={"bfloat16": [1e14]})
    wanted = [case for case in competing(SUM, ["quick"]) if not case.backward]
    targets = {"running_sum": "tests.gpu.test_arena:SUM"}
    with Arena(targets, lambda op: SUM, "cuda", limits, budget_ms=5.0) as arena:
        ((cumsum, other),) = arena.time(wanted)
    assert cumsum.status == other.status == "ok", (cumsum.reason, other.reason)
    assert cumsum.config["not_recorded"] == ""
    assert other.config["not_recorded"]
    assert len(cumsum.config["processes"]) == len(other.config["processes"]) == 3
    assert cumsum.extra_bytes > 0
