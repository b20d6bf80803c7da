"""Counts the floating-point operations of operators by the cost that their workloads state, on tensors without values.

Within `count_operations`, a call of an operator that mixes positions or multiplies matrices is not carried out: its
cost (`Cost.num_flops`) is added, and its results are tensors of the right shapes and dtypes whose values are undefined,
with gradients of the same kind. Operators that work on single elements, such as norms and rotations, have no such
count; they run, and torch's counter (`torch.utils.flop_counter`) counts none of their arithmetic either.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from subquad.kernels.autograd import Function

if TYPE_CHECKING:
    from subquad.kernels.workload import Workload

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class OperatorCount:
    """Operations of the operators that were called, by name; with a gradient those of the backward pass as well."""

    by_operator: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_operator.values())

    def add(self, name: str, num_flops: int) -> None:
        self.by_operator[name] = self.by_operator.get(name, 0) + num_flops


_count: ContextVar[OperatorCount | None] = ContextVar("count", default=None)


@contextlib.contextmanager
def count_operations() -> Iterator[OperatorCount]:
    """Context manager that yields the count of the operators that this thread calls in it, best on fake tensors."""
    count = OperatorCount()
    token = _count.set(count)
    try:
        yield count
    finally:
        _count.reset(token)


def counted(
    name: str, *, results: Callable[[Mapping[str, Any]], Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of an operator, or of a step of it, whose operations `count_operations` counts.

    name:    the workload in the table `kernels.OPERATORS` whose `shape_of` and `cost` say how many there are.
    results: empty results of a call from its arguments by name. Without it, or where it gives None, the operator is
             carried out to find their shapes, once for equal arguments, which takes seconds for long sequences where
             its PyTorch code takes one chunk after the other.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def operator(*args: P.args, **kwargs: P.kwargs) -> R:
            # Dynamo cannot trace a context variable; what is compiled is counted without compilation
            if torch.compiler.is_compiling() or (count := _count.get()) is None:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            leaves, _ = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            workload = _workload(name)
            assert workload.shape_of is not None, f"{name} has no shape_of"
            shape = workload.shape_of(given.arguments)
            count.add(name, workload.cost(shape, tensors[0].dtype, backward).num_flops)
            key = function, tuple(_description(leaf) for leaf in leaves), tuple(kwargs)
            # fake tensors of torch may only meet tensors that were made in the mode that made them
            mode = getattr(tensors[0], "fake_mode", None) or contextlib.nullcontext()

            def call() -> Any:
                found = None if results is None else results(given.arguments)
                return function(*args, **kwargs) if found is None else found

            found = _results(key, call, mode)
            return tree_unflatten(list(_Uncomputed.apply(found.leaves, *tensors)), found.structure)

        return operator

    return decorate


def with_state(y: Tensor, inputs: Mapping[str, Any], *state: int, dtype: torch.dtype | None = None) -> Any:
    """Results of an operator: y, and a state of this shape where the call asks for it; None for packed sequences.

    dtype: of the state; None: that of y, float32 at least.
    """
    if inputs.get("cu_seqlens") is not None:
        return None
    if not inputs["return_final_state"]:
        return y
    return y, y.new_empty(state, dtype=dtype or torch.promote_types(y.dtype, torch.float32))


@functools.cache
def _workload(name: str) -> Workload:
    from subquad.kernels import OPERATORS

    module, _, attribute = OPERATORS[name][0].partition(":")
    workload: Workload = getattr(importlib.import_module(module), attribute)
    return workload


def _description(leaf: Any) -> Hashable:
    """Returns all that the shapes of results may depend on."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class _Results:
    """Shapes and dtypes of the results of a call, and how they are nested."""

    leaves: tuple[tuple[torch.Size, torch.dtype], ...]
    structure: Any


_known: dict[Hashable, _Results] = {}


def _results(key: Hashable, call: Callable[[], Any], mode: contextlib.AbstractContextManager[Any]) -> _Results:
    """The shapes of the results of a call, which is carried out in a mode of torch the first time."""
    if key not in _known:

        def shapes() -> _Results:
            with torch.no_grad(), mode:
                leaves, structure = tree_flatten(call())
            return _Results(tuple((x.shape, x.dtype) for x in leaves), structure)

        # a count and a record belong to a thread, so nothing that another thread does enters them
        with ThreadPoolExecutor(max_workers=1) as thread:
            _known[key] = thread.submit(shapes).result()
    return _known[key]


class _Uncomputed(Function):
    """Results of the given shapes and dtypes with undefined values, and such gradients of the tensors."""

    @staticmethod
    def forward(ctx: Any, results: tuple[tuple[torch.Size, torch.dtype], ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [(x.shape, x.dtype, x.device) for x in tensors]
        return tuple(torch.empty(shape, dtype=dtype, device=tensors[0].device) for shape, dtype in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        return None, *(
            torch.empty(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in wanted
        )
