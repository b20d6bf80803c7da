"""Runs kernels in Gluon on a CPU: their Python as it stands, in threads, on tensors without layouts.

This shows whether indices, phases of barriers and equations are right. It shows nothing of layouts, of fences, or of
what is waited for too late, because copies and products have ended when they have begun.
"""

from __future__ import annotations

import builtins
import itertools
import threading
import types
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language import constexpr

SECONDS = 20
"""Time after which a wait is an error."""


class Values(Tensor):
    """A tensor in registers."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        return self.contiguous().view(dtype) if bitcast else super().to(dtype)


def values(x: Any) -> Values:
    return torch.as_tensor(x).as_subclass(Values)


class Pointer:
    """Addresses in the memory of a tensor."""

    def __init__(self, memory: Tensor, offsets: Any) -> None:
        self.memory, self.offsets = memory, offsets

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.offsets - less)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)


def load(p: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Values:
    found = torch.full(p.offsets.shape, other, dtype=p.memory.dtype)
    mask = torch.ones(()).bool() if mask is None else mask
    mask = mask.as_subclass(Tensor).expand(found.shape)
    found[mask] = p.memory[_inside(p, p.offsets.as_subclass(Tensor)[mask])]
    return values(found)


def store(p: Pointer, x: Tensor, mask: Tensor | None = None) -> None:
    assert x.dtype == p.memory.dtype
    offsets, x = torch.broadcast_tensors(p.offsets.as_subclass(Tensor), x.as_subclass(Tensor))
    if mask is not None:
        offsets, x = offsets[mask], x[mask]
    p.memory[_inside(p, offsets)] = x


def _inside(p: Pointer, offsets: Tensor) -> Tensor:
    assert ((offsets >= 0) & (offsets < len(p.memory))).all()
    return offsets


class Shared:
    """A tensor in shared memory, NaN until something is stored in it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.shape = memory, memory.shape

    def index(self, i: Any) -> Shared:
        return Shared(self.memory[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.memory.narrow(dim, int(start), length))

    def permute(self, order: Any) -> Shared:
        return Shared(self.memory.permute(*order))

    def load(self, layout: Any) -> Values:
        return values(self.memory.clone())

    def store(self, x: Tensor) -> None:
        assert (x.shape, x.dtype) == (self.shape, self.memory.dtype)
        self.memory.copy_(x)


class Barrier:
    """An mbarrier: a phase ends when as many threads have arrived as `count` says."""

    def __init__(self) -> None:
        self.changed, self.phase, self.count, self.left = threading.Condition(), 0, 0, 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, count: int = 1, pred: Any = True) -> None:
        with self.changed:
            self.left -= count if pred else 0
            assert self.left >= 0, "more have arrived than a phase has"
            if not self.left:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != int(parity), SECONDS), "nothing arrives"


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:
        return self[int(i)]


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def copy_to_shared(s_x: Shared, p: Pointer) -> None:
    s_x.store(load(p))


def product(left: Any, s_right: Shared, b_sum: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    left = left.memory if isinstance(left, Shared) else left
    assert left.dtype == s_right.memory.dtype == torch.bfloat16
    b_product = values(left.as_subclass(Tensor).float() @ s_right.memory.float())
    assert b_product.shape == b_sum.shape
    return b_product + b_sum if use_acc else b_product


def xor_sum(x: Tensor, axis: int) -> Tensor:
    first, *others = x.unbind(axis)
    for other in others:
        first = first ^ other
    return first


def scan(x: Tensor, axis: int, combine: Any, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def specialize(parts: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
    """Every part in a thread of its own. The first error is that of the call."""
    errors: list[Exception] = []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            # autograd is switched off in each thread apart
            with torch.no_grad():
                function(*arguments)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Language(types.SimpleNamespace):
    """`gluon.language`; what is not named below makes layouts, which are None."""

    bfloat16, float32, int32, int64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *_: None)
    load, store, xor_sum, associative_scan = map(staticmethod, (load, store, xor_sum, scan))
    allocate_shared_memory, warp_specialize = map(staticmethod, (allocate, specialize))
    static_range = builtins.range
    arange = staticmethod(lambda first, end, layout: values(torch.arange(first, end)))
    zeros = staticmethod(lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)))
    where = staticmethod(lambda mask, x, y: torch.where(mask, x, y))
    exp = staticmethod(lambda x: x.exp())
    exp2 = staticmethod(lambda x: x.exp2())
    sum = staticmethod(lambda x, axis: x.sum(axis))
    maximum = staticmethod(lambda x, y: torch.maximum(values(x), values(y)))
    minimum = staticmethod(lambda x, y: torch.minimum(values(x), values(y)))
    join = staticmethod(lambda x, y: torch.stack((x, y), -1))
    split = staticmethod(lambda x: x.unbind(-1))
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    convert_layout = staticmethod(lambda x, layout: x)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Program:
    """A kernel with the functions that it calls, of which each module has stand-ins for what Gluon provides."""

    def __init__(self, copy_warps: int) -> None:
        self.gl = Language()
        arrive = lambda barrier, increment_count: barrier.arrive(copy_warps * 32)  # noqa: E731
        nothing = lambda *_: None  # noqa: E731
        self.stand_ins = {
            "gl": self.gl,
            "async_copy": types.SimpleNamespace(mbarrier_arrive=arrive, wait_group=nothing, commit_group=lambda: None),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: "barriers", init=Barrier.init, wait=Barrier.wait, arrive=Barrier.arrive
            ),
            "fence_async_shared": nothing,
            "barrier_of_warps": nothing,
            "warpgroup_mma": product,
            "warpgroup_mma_wait": lambda _, deps: deps if len(deps) > 1 else deps[0],
            "copy_to_shared": copy_to_shared,
            "seen_as": lambda s_x, dtype, shape, layout: Shared(s_x.memory.view(*shape)),
            "range": lambda *ends: map(values, builtins.range(*map(int, ends))),
        }
        self.scopes: dict[int, dict[str, Any]] = {}

    def python(self, function: Any) -> Any:
        """The Python of a function in Gluon, in the scope of its module."""
        given = function.fn.__globals__
        if id(given) not in self.scopes:
            scope = self.scopes[id(given)] = {}
            for name, x in given.items():
                is_code = isinstance(x, GluonJITFunction)
                scope[name] = self.python(x) if is_code else x.value if isinstance(x, constexpr) else x
            scope.update(
                self.stand_ins, row_layout=self.gl.layout, state_layout=self.gl.layout, half_rows=self.gl.layout
            )
        code = function.fn.__code__
        return types.FunctionType(code, self.scopes[id(given)])


def run(kernel: Any, grid: tuple[int, ...], copy_warps: int, **named: Any) -> None:
    """`kernel[grid]` with these arguments."""
    program = Program(copy_warps)
    function = program.python(kernel)
    given: dict[str, Any] = {}
    for parameter in kernel.params:
        x = named[parameter.name]
        if isinstance(x, Tensor):
            x = Pointer(torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0), x.storage_offset())
        given[parameter.name] = x if parameter.is_constexpr or isinstance(x, (Pointer, types.NoneType)) else values(x)
    program.gl.num_programs = lambda axis: values(grid[axis])
    for ids in itertools.product(*map(builtins.range, grid)):
        program.gl.program_id = lambda axis, ids=ids: values(ids[axis])
        function(**given)
