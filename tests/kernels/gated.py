"""Helpers for the tests of gated operators: planners with small tiles, results with gradients, and watched launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

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


def make_planner(new_launches: Any = None, *, keep_all: bool = False, **tuning: Any) -> Any:
    """A planner with these changes of the tuning.

    The interpreter also computes masked elements, so there tiles are as narrow as the inputs; the minimum width of 64
    is for the compiler of a GPU.
    """
    plan = pytest.importorskip("kernels.gated_linear_attention.triton.plan")
    tuning = ({"min_width": 16} if DEVICE == "cpu" else {}) | tuning
    launches = plan.KeptLaunches if new_launches is None else new_launches
    return plan.Planner(plan.Tuning(**tuning), new_launches=launches, keep_all=keep_all)


def small_tiles() -> dict[str, Any]:
    """Changes of the tuning: tiles of 16 channels, of which inputs have several."""
    plan = pytest.importorskip("kernels.gated_linear_attention.triton.plan")
    tuning = plan.Tuning()
    return {
        name: {kind: tile._replace(block_k=16, block_v=16) for kind, tile in getattr(tuning, name).items()}
        for name in ("scores", "states", "read", "grads")
    }


def without_states() -> Any:
    """Launches of a planner for which it is an error to write the states before every chunk."""
    launch = pytest.importorskip("kernels.launch")
    from kernels.gated_linear_attention.triton.states import ENDS

    class WithoutStates(launch.KeptLaunches):
        def get(self, key: Any, make: Callable[[], Any]) -> Any:
            assert key[0] != "states" or key[1] == ENDS, "states were written"
            return super().get(key, make)

    return WithoutStates


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


def kept_launches_give_the_same(calls: Callable[[Any], Iterator[Tensor]], **tuning: Any) -> None:
    """The results of `calls(planner)`, twice in a row, are those without kept launches.

    A kept launch gets tensors of the same dtypes every time.
    """
    launch = pytest.importorskip("kernels.launch")
    made = []

    class Watched(launch.KeptLaunches):
        def __init__(self, keep: bool) -> None:
            super().__init__(keep)
            self.dtypes: dict[Hashable, list[Any]] = {}
            made.append(self)

        def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
            ready = super().get(key, make)

            def watched(*tensors: Tensor | None) -> None:
                dtypes = [None if x is None else x.dtype for x in tensors]
                assert self.dtypes.setdefault(key, dtypes) == dtypes
                ready(*tensors)

            return watched

    expected = list(calls(make_planner(**tuning)))
    planner = make_planner(Watched, keep_all=True, **tuning)
    for _ in range(2):
        for index, (actual, e) in enumerate(zip(calls(planner), expected, strict=True)):
            assert torch.equal(actual, e), index
    assert made
    assert all(launches.keep and launches.dtypes for launches in made)
