"""Sweeps over the inputs of every workload: what does not fit the other inputs is refused, and nothing may be empty.

`test_refusals.py` has the words of single refusals.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from subquad.kernels import OPERATORS
from subquad.run_suite import REPOSITORY
from subquad.suite.laws.calls import Operator, is_float

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["torch", "triton"]
every_operator = pytest.mark.parametrize("name", [name for name in OPERATORS if name != "embedding"])
"""The workload of `embedding` is its gradient, which users do not call."""


def calls_of(operator):
    """Calls of our backends. The workload of `rotary` makes the positions of rows with starts of their own itself."""
    return [c for c in operator.once() if c.implementation.name in BACKENDS and "starts" not in c.shape]


def copies(inputs):
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


MAY_DIFFER = {
    ("attention_step", "cos", 0), ("attention_step", "sin", 0),
    ("causal_conv1d", "initial_state", 2),
    ("fft_conv", "u", 1), ("fft_conv", "filter", 1), ("fft_conv_at", "u", 1), ("fft_conv_at", "filter", 1),
    ("rotary", "q", 2), ("rotary", "k", 2),
    ("skinny_linear", "norm_weight", 0),
}  # fmt: skip
"""Axes of inputs that may be longer than others, or may be divided into groups: their sizes are in the table."""
ANY_RANK = {"cauchy": "residues", "forget_gate": "x", "norm": "x", "squared_relu": "x", "ssd_steps": "x", "swiglu": "x"}
"""Inputs with any number of leading axes."""
MAY_BE_COMPLEX = {"A", "B", "C", "initial_state", "state", "residues", "Lambda", "s"}


def tied_axes(workload, shape):
    """The axes of inputs, as (name, axis), whose size another axis of the inputs has too by the letters of a shape."""

    def sizes(shape):
        made = workload.make_inputs(shape, torch.float32, torch.Generator())
        return {(n, i): size for n, x in made.items() if isinstance(x, Tensor) for i, size in enumerate(x.shape)}

    before, tied = sizes(shape), set()
    for letter, size in shape.items():
        if isinstance(size, int):
            after = sizes({**shape, letter: 2 * size})
            grown = {axis for axis in before if before[axis] != after[axis]}
            tied |= grown if len(grown) > 1 else set()
    return tied


def misfits(workload, shape, inputs):
    """Inputs of which one has another size along an axis, another rank, device or kind of numbers; what, and inputs."""
    tied = tied_axes(workload, shape)
    for name, x in inputs.items():
        # the workload makes the tables of `rotary` from its angles
        if not isinstance(x, Tensor) or name == "angle":
            continue
        for axis in (axis for axis in range(x.dim()) if (name, axis) in tied):
            if (workload.op, name, axis) not in MAY_DIFFER:
                if x.shape[axis] > 1:
                    yield f"{name} has one element along axis {axis}", name, x.narrow(axis, 0, 1)
                yield f"{name} is longer along axis {axis}", name, torch.cat([x, x.narrow(axis, 0, 1)], axis)
        if ANY_RANK.get(workload.op) != name:
            yield f"{name} has one axis more", name, x[None]
        if len([y for y in inputs.values() if isinstance(y, Tensor)]) > 1:
            yield f"{name} is on another device", name, x.to("meta")
        if is_float(x):
            yield f"{name} holds integers", name, (x.real if x.is_complex() else x).to(torch.int64)
        else:
            yield f"{name} is float", name, x.float()
        if x.is_floating_point() and name not in MAY_BE_COMPLEX:
            yield f"{name} is complex", name, x.to(torch.complex64)


@every_operator
def test_an_input_that_does_not_fit_the_others_is_refused(name):
    """Nothing is broadcast, converted or read from another device by accident."""
    found = Operator(REPOSITORY.operators.load(name), device=DEVICE)
    wrong = []
    for call in calls_of(found):
        op, inputs = found.function(call), found.rounded(call)
        for what, changed, x in misfits(found.workload, call.shape, inputs):
            try:
                op(**copies(inputs) | {changed: x})
                wrong.append(f"{call}: accepted, though {what}")
            except ValueError as refusal:
                if not str(refusal).startswith(f"{name}: "):
                    wrong.append(f"{call}: {what}: refused without the name of the operator: {refusal}")
            except (RuntimeError, IndexError, TypeError, AttributeError) as error:
                wrong.append(f"{call}: {what}: {type(error).__name__}: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@every_operator
def test_a_size_of_zero_is_refused_or_has_results_without_nan(name):
    """The laws of operators try no sequence and no position; these are heads, channels, states and classes."""
    found = Operator(REPOSITORY.operators.load(name), device=DEVICE)
    for call in calls_of(found):
        for letter in (letter for letter, size in call.shape.items() if isinstance(size, int) and letter not in "BT"):
            none = replace(call, shape={**call.shape, letter: 0})
            try:
                inputs = found.rounded(none)
            except (ZeroDivisionError, RuntimeError, IndexError):
                # the workload itself divides by this size
                continue
            with contextlib.suppress(ValueError):
                assert not any(x.isnan().any() for x in found.forward(none, inputs)), f"{none}: a result is NaN"
