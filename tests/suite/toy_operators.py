"""Operators small enough to time in a blink: a running sum in several implementations, and one step of it."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from subquad.kernels.workload import Cost, Implementation, Workload, normal, sizes, traffic
from subquad.suite.registry import Entry, Registry

BIG = 64
"""Length from which an implementation runs out of memory."""


def running_sum(x):
    total = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        total = total + x[:, t]
        out.append(total)
    return torch.stack(out, 1)


def short_of_memory(x):
    if x.shape[1] >= BIG:
        raise torch.OutOfMemoryError("planted")
    return x.cumsum(1)


def needs_another_device(x):
    raise ValueError("needs a CUDA device")


def missing():
    raise ImportError("no module named 'peer'")


def cost(shape, dtype, backward):
    size = 4 * shape["B"] * shape["T"] * shape["D"]
    return Cost(traffic(size, size, backward), size)


SUM = Workload(
    op="running_sum",
    reference=running_sum,
    make_inputs=lambda shape, dtype, generator: {"x": normal(generator, dtype, *sizes(shape, "BTD"))},
    cost=cost,
    short=lambda shape: {**shape, "T": min(16, shape["T"])},
    implementations=(
        Implementation("cumsum", "ours", lambda: lambda x: x.cumsum(1)),
        Implementation("hungry", "ours", lambda: short_of_memory),
        Implementation("late", "ours", lambda: lambda x: x.cumsum(1).roll(1, 1)),
        Implementation("elsewhere", "ours", lambda: needs_another_device),
        Implementation("absent", "peer", missing),
    ),
    shapes={"quick": ({"B": 2, "T": 16, "D": 3, "kind": "plain"},), "paper": ()},
)
STEP = Workload(
    op="step",
    reference=running_sum,
    make_inputs=SUM.make_inputs,
    cost=cost,
    short=dict,
    implementations=SUM.implementations[:1],
    shapes={"quick": ({"B": 2, "D": 3},)},
    backward=False,
)
OPERATORS = Registry(
    "operator",
    {
        "running_sum": Entry("tests.suite.toy_operators:SUM", "sums"),
        "step": Entry("tests.suite.toy_operators:STEP", "one step of it"),
    },
)


def sleeping(x):
    time.sleep(600)


HANGS = replace(
    SUM, op="hangs", implementations=(*SUM.implementations[:1], Implementation("sleep", "peer", lambda: sleeping))
)
