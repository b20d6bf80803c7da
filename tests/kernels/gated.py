"""Helpers for the tests of gated operators: planners with small tiles, results with gradients, and kept plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.suite.laws.accuracy import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CHUNK = 64
SMALL_CHUNK = pytest.param(16, id="chunk16")
LARGE_CHUNK = pytest.param(CHUNK, id="chunk64", marks=pytest.mark.slow)
in_chunks = pytest.mark.parametrize(
    "chunk", [pytest.param(CHUNK, id="chunk64")] if DEVICE == "cuda" else [SMALL_CHUNK, LARGE_CHUNK]
)
"""Runs a test with chunks of 16 positions, which are quick in the interpreter, and with chunks of 64 as on a GPU."""


def quick(values: list[str], *kept: str) -> list[Any]:
    """Parameters for these values; those that are not in `kept` are left to `make test-all`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


def scaled(length: int, chunk: int) -> int:
    """A length of as many chunks of `chunk` positions as `length` has chunks of 64."""
    return max(1, length * chunk // CHUNK)


def on_device(inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The inputs with their tensors on the device in a dtype."""
    return {name: x.to(DEVICE, dtype) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def results(inputs: dict[str, Any], op: Callable[..., Any]) -> list[Tensor]:
    """Outputs and the gradients of all tensors, for the same cotangents."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if isinstance(x, Tensor)}
    outputs = op(**{**inputs, **leaves})
    cotangents = [torch.linspace(-1, 1, o.numel(), device=o.device).view_as(o).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), cotangents)]


def packed_sequences_are_separate_ones(
    op: Callable[..., Any], inputs: dict[str, Any], ends: list[int], states: tuple[str, ...] = ("initial_state",)
) -> None:
    """Results and gradients of sequences packed along time are those of one after the other.

    inputs: of one long sequence, with a state of which every sequence gets a multiple.
    """
    along_time = [n for n, x in inputs.items() if isinstance(x, Tensor) and x.shape[:2] == (1, ends[-1])]
    inputs = inputs | {n: torch.cat([inputs[n] * (i + 1) for i in range(len(ends) - 1)]) for n in states}

    def separately(**given: Any) -> tuple[Tensor, ...]:
        parts = []
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            part = {n: x[:, start:end] if n in along_time else x for n, x in given.items()}
            parts.append(op(**part | {n: given[n][i : i + 1] for n in states}))
        o, *finals = zip(*parts, strict=True)
        return torch.cat(o, dim=1), *map(torch.cat, finals)

    packed = results(inputs, partial(op, cu_seqlens=torch.tensor(ends, dtype=torch.int32)))
    for index, (a, e) in enumerate(zip(packed, results(inputs, separately), strict=True)):
        # a gradient of a constant decay is a sum over sequences, in another order
        assert_close(a, e.double(), torch.float32, what=f"result {index}")


def make_planner(**tuning: Any) -> Any:
    """A planner with these changes of the tuning.

    The interpreter also computes masked elements, so there tiles are as narrow as the inputs; the minimum width of 64
    is for the compiler of a GPU.
    """
    plan = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.plan")
    return plan.Planner(plan.Tuning(**({"min_width": 16} if DEVICE == "cpu" else {}) | tuning))


def on_kernels(name: str, default: Callable[[], Any] = make_planner) -> Callable[..., Any]:
    """An operator on its Triton kernels, as a function of a planner, which has a default, and of its arguments."""

    def run(planner: Any = None, cu_seqlens: Tensor | None = None, **inputs: Any) -> Any:
        impl = pytest.importorskip(f"subquad.kernels.{name}.triton")
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        op = getattr(impl, f"{name}_triton")
        o, final = op(**inputs, sequence_ends=ends, planner=default() if planner is None else planner)
        return o if final is None else (o, final)

    return run


def small_tiles() -> dict[str, Any]:
    """Changes of the tuning: tiles of 16 channels, of which inputs have several."""
    plan = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.plan")
    tuning = plan.Tuning()
    return {
        name: {kind: tile._replace(block_k=16, block_v=16) for kind, tile in getattr(tuning, name).items()}
        for name in ("scores", "states", "read", "grads")
    }


@contextmanager
def without_states() -> Iterator[None]:
    """Makes it an error to write the states before every chunk."""
    states = pytest.importorskip("subquad.kernels.gated_linear_attention.triton.states")
    launch = states.launch

    def checked(kernel: Any, plan: Any, **tensors: Any) -> None:
        assert plan.named["PART"] == states.ENDS, "states were written"
        launch(kernel, plan, **tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "launch", checked)
        yield


def calls_of_all_kinds(op: Callable[..., Any], inputs: dict[str, Any]) -> Iterator[Tensor]:
    """Results of calls with inputs that share shapes, strides and dtypes, and that differ in everything else."""
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.items() if isinstance(x, Tensor)}
    fixed = {n: x for n, x in leaves.items() if n != "log_decay"}
    o, final = op(**{**inputs, **leaves})
    fixed_o, _ = op(**{**inputs, **fixed})
    alone = op(**{**inputs, **leaves, "return_final_state": False})
    yield from op(**inputs)
    yield op(**inputs | {"return_final_state": False})
    yield from op(**inputs | {"scale": 1.0})
    yield from op(**inputs | {"initial_state": None})
    yield from torch.autograd.grad([o, final], list(leaves.values()), [o, final], retain_graph=True)
    yield from torch.autograd.grad(o.sum(), list(leaves.values()), retain_graph=True)
    yield from torch.autograd.grad(o, list(leaves.values()), o.transpose(1, 2).contiguous().transpose(1, 2))
    yield from torch.autograd.grad(fixed_o, list(fixed.values()), fixed_o)
    yield from torch.autograd.grad(alone, list(leaves.values()), alone)


def kept_plans_give_the_same(calls: Callable[[Any], Iterator[Tensor]], **tuning: Any) -> None:
    """The results of `calls(planner)`, twice in a row, are those of calls that share no plan.

    Plans of launches are kept by the plan of the call, which differs from planner to planner.
    """

    def new_planner(*operands: Any, **options: Any) -> Any:
        return make_planner(**tuning)(*operands, **options)

    expected = list(calls(new_planner))
    planner = make_planner(**tuning)
    for _ in range(2):
        for index, (actual, e) in enumerate(zip(calls(planner), expected, strict=True)):
            assert torch.equal(actual, e), index
