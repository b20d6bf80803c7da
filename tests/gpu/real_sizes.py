"""The comparison of kernels with plain PyTorch in float64 on the device, at sizes that a loop could not judge."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.suite.bench.contracts import Shape
from subquad.suite.laws.accuracy import FLOOR, assert_close, cast, outputs_of
from subquad.suite.laws.calls import Call, Operator, is_float

Inputs = Mapping[str, Any]


def results(op: Callable[..., Any], inputs: Inputs, sizes: Mapping[int, float] | None = None) -> dict[str, Tensor]:
    """Outputs and the gradient of every tensor that can have one, by name, for the same cotangents in every dtype.

    sizes: of the cotangents of some outputs; those of the others are of order one.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if is_float(x)}
    outputs = outputs_of(op(**{**inputs, **leaves}))
    g = torch.Generator(outputs[0].device).manual_seed(7)
    # the cotangents are rounded, so that exact results and kernels get the same ones, and have the outputs' strides
    cotangents = [
        torch.empty_like(o).copy_(
            torch.randn(o.shape, generator=g, device=o.device).bfloat16() * (sizes or {}).get(i, 1)
        )
        for i, o in enumerate(outputs)
    ]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    named = {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}
    return {f"output {i}": o for i, o in enumerate(outputs)} | named


def memory_taken(op: Callable[..., Any], inputs: Inputs) -> int:
    """Bytes that a call and its gradients take at most beside what was there before."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if is_float(x)}

    def run() -> None:
        outputs = outputs_of(op(**{**inputs, **leaves}))
        torch.autograd.grad(outputs, list(leaves.values()), [o.detach() for o in outputs], allow_unused=True)

    # the first call compiles the kernels, and frames of the compiler keep its tensors until cycles are collected
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def wide(inputs: Inputs) -> dict[str, Any]:
    return {name: cast(x, torch.float64) for name, x in inputs.items()}


def assert_equals_plain_pytorch(
    op: Callable[..., Any],
    plain: Callable[..., Any] | None,
    inputs: Inputs,
    dtype: torch.dtype | None = None,
    *,
    exact: Callable[..., Any] | None = None,
    floors: Mapping[str, float] | None = None,
    sizes: Mapping[int, float] | None = None,
) -> None:
    """Outputs and gradients follow the rule of `suite.laws.accuracy`, and outputs without gradients do.

    plain:  plain PyTorch; None: it would take too long, and a rounding of the exact result to dtype is granted.
    dtype:  that of the rule; None: each result's own.
    exact:  what is right in float64; `plain` by default.
    floors: of results that may err more or less than others, by name.
    """
    wanted = results(exact or plain, wide(inputs), sizes)
    granted = results(plain, inputs, sizes) if plain else None
    found, without = results(op, inputs, sizes), outputs_of(op(**inputs))
    assert found.keys() == wanted.keys()
    found |= {f"output {i} without gradients": x for i, x in enumerate(without)}
    for what, x in found.items():
        name = what.removesuffix(" without gradients")
        p = wanted[name].to(dtype or x.dtype) if granted is None else granted[name]
        assert granted is None or x.dtype == p.dtype, f"{what}: {x.dtype} in place of {p.dtype}"
        rule = dtype or x.dtype.to_real()
        assert_close(x, wanted[name], rule, plain=p, what=what, floor=(floors or {}).get(name))


def assert_an_operator_equals_plain_pytorch(operator: Operator, shape: Shape, dtype: torch.dtype) -> None:
    """The Triton kernels of an operator beside its plain PyTorch, each result judged by its own dtype."""
    ops = {found.name: operator.function(Call(found, shape, dtype)) for found, _ in operator.functions()}
    inputs = operator.workload.make_inputs(shape, dtype, torch.Generator(operator.device).manual_seed(1))
    floors = {n: FLOOR[inputs[n].dtype] * times for n, times in operator.workload.floors.items()}
    assert_equals_plain_pytorch(ops["triton"], ops["torch"], inputs, floors=floors)
