"""Launch Triton kernels with little work on the host: `launch(kernel, grid, q=q, k=k, T=T, BLOCK=64, num_warps=4)`.

At every launch Triton inspects every argument to find the compiled kernel that fits, which takes longer than a short
kernel runs. `launch` keeps the compiled kernel under a key that it derives from the launch itself: the kernel, the
device, the names of the arguments, of every tensor its dtype and whether it begins at a multiple of 16 bytes, and of
everything else its type and its value. Launches that differ in whatever Triton may compile for therefore differ in
their keys, and addresses, numbers and the grid are passed anew at every launch. A launch whose key is known passes
addresses in place of tensors, which Triton's launcher takes without asking the driver about them.

A compiled kernel is relaunched through `CompiledKernel.run`, whose parameters Triton does not document. That is done on
the versions in TESTED_TRITON only; on every other version each launch is `kernel[grid](...)`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from subquad.kernels.device import is_hopper, speaks_ptx
from subquad.kernels.layout import as_pairs

TESTED_TRITON = ("3.6", "3.9")
"""Versions of Triton, major and minor, on which relaunching through `CompiledKernel.run` was tested: 3.6 on GPUs, and
both through their own launchers before a driver of stubs (tests/kernels/driver.py)."""

MAX_KEYS = 4096
"""Number of keys that are kept; the one that was not used for the longest time makes room for a new one."""
INT32_END = 1 << 31
"""Triton passes integers in [-INT32_END, INT32_END) in 32 bits and others in 64."""


def cdiv(total: int, part: int) -> int:
    """ceil(total / part). `triton.cdiv` takes microseconds on the host."""
    return -(-total // part)


def power_of_2(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


class CompileOptions(NamedTuple):
    """Triton's options for one kernel, part of the tuning of every operator."""

    num_warps: int
    num_stages: int | None = None
    """Depth of Triton's software pipelines; None leaves Triton's default."""
    max_registers: int | None = None
    """Maximum number of registers of a thread, so that more programs fit on a multiprocessor; None: ptxas decides."""

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a launch. A limit of registers is left out where the GPU is not NVIDIA's."""
        options: dict[str, Any] = {"num_warps": self.num_warps}
        if self.num_stages is not None:
            options["num_stages"] = self.num_stages
        if self.max_registers is not None and speaks_ptx():
            options["maxnreg"] = self.max_registers
        return options


def overlap_options(rows: int) -> dict[str, bool]:
    """The constexpr OVERLAP of a decoding kernel, and the option of its launch that goes with it.

    With it a kernel starts while the one before it still runs, if that one allows it, reads what no kernel of a step
    writes (weights), and then waits until that one has ended. NVIDIA calls it programmatic dependent launch; it needs
    Hopper. It is measured to help with one row, where kernels are short, and to hurt with 16.
    """
    return {"OVERLAP": True, "launch_pdl": True} if rows == 1 and is_hopper() else {"OVERLAP": False}


class LaunchPlan:
    """Everything of a launch but its tensors: the grid, numbers, constexprs and options, chosen once for equal sizes.

    An operator of many launches makes its plans in functions of sizes and `TensorSpec`s that `functools.lru_cache`
    keeps, so that an equal call computes none of it again. Plans are equal where all of this is equal, types included.
    """

    def __init__(self, grid: int | tuple[int, ...], /, **named: Any) -> None:
        """named: in the order that `Launcher.__call__` says."""
        self.axes, self.named = _three_axes(grid), named
        self._parts = self.axes, tuple(named.items()), tuple(map(type, named.values()))
        self._hash = hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LaunchPlan) and self._parts == other._parts


class Relaunch(NamedTuple):
    """A compiled kernel, and what `CompiledKernel.run` needs besides grid, stream and the first arguments."""

    kept: tuple[Any, Any]
    """The kernel, so that no other one gets its id, and what Triton compiled, which Triton 3.9 unloads from the GPU
    when nothing refers to it."""
    run: Callable[..., Any]
    function: Any
    metadata: Any
    num_first: int
    """Number of the kernel's parameters that every launch passes anew: all but those that a plan or the key fixes."""
    others: tuple[Any, ...]
    """Values of the other parameters."""


Heard = tuple[Relaunch | None, tuple[int, int, int], tuple[Any, ...]]
"""A launch: its compiled kernel, or None where Triton started it; the grid; all arguments, tensors as they are."""


class Launcher:
    """Starts kernels and keeps what Triton compiled. The program has one, `launch`; tests make their own.

    version: of Triton.   current_stream: gives the handle of the current stream of a device, by its index.
    """

    def __init__(self, version: str = triton.__version__, current_stream: Callable[[int], int] | None = None) -> None:
        self.relaunches = ".".join(version.split(".")[:2]) in TESTED_TRITON and torch.version.cuda is not None
        self.current_stream = current_stream or _current_stream
        # a list that is empty until Triton has compiled for the key; types tell 1, 1.0 and True apart
        self._known: Callable[..., list[Relaunch]] = functools.lru_cache(MAX_KEYS, typed=True)(lambda *key: [])
        self._listeners: dict[int, list[Heard]] = {}
        """By thread: the launches that `heard` gives."""

    def __call__(self, kernel: Any, grid: int | tuple[int, ...] | LaunchPlan, /, **named: Any) -> None:
        """`kernel[grid](**named)` on the current device; grid may be the number of programs.

        The arguments stand in the order of the kernel's parameters: first tensors, all of one device; then numbers;
        then constexprs, in any order; then Triton's options such as num_warps. Each of them may be None. A kernel gets
        a complex tensor with a last axis of its real and imaginary parts. ValueError for a tensor whose memory holds
        its conjugate or its negative, which torch would undo when it reads.

        A `LaunchPlan` in place of the grid holds all arguments behind the tensors. With fake tensors of a GPU, which
        have no memory, nothing is started, so that an operator gives results of the right shapes.
        """
        passed, device = list(named.values()), -1
        key = passed.copy()
        for index, value in enumerate(key):
            if value is None:
                continue
            if not isinstance(value, Tensor):
                break
            if device < 0:
                device = value.get_device()
                if device < 0:
                    break
                if isinstance(value, FakeTensor):
                    # it has the shape of a result and no memory, which a kernel would read at address 0
                    return
            passed[index] = address = value.data_ptr()
            key[index] = dtype = value.dtype
            if address & 15:
                # a tuple is equal to no dtype
                key[index] = (dtype,)
            if value.is_neg() or (dtype.is_complex and value.is_conj()):
                # refused by the public launch
                device = -1
                break
        plan = grid if isinstance(grid, LaunchPlan) else None
        axes = _three_axes(grid) if plan is None else plan.axes
        if device < 0 or not self.relaunches:
            # the interpreter, tensors without data, GPUs of other makers, versions of Triton that were not tested
            _launch_publicly(kernel, axes, named if plan is None else named | plan.named)
            self._tell(None, axes, ())
            return
        known = self._known(id(kernel), device, plan, tuple(named), *key)
        if not known or self.is_profiled():
            # only Triton's own launch calls a profiler's hook, and with its arguments
            given = named if plan is None else named | plan.named
            compiled = _launch_publicly(kernel, axes, given)
            if compiled is None:
                # the interpreter takes tensors of a GPU, too
                self._tell(None, axes, ())
                return
            num_first = min(len(named), sum(not parameter.is_constexpr for parameter in kernel.params))
            others = tuple(given[name] for name in kernel.arg_names[num_first:])
            known[:] = [
                Relaunch(
                    (kernel, compiled), compiled.run, compiled.function, compiled.packed_metadata, num_first, others
                )
            ]
        else:
            _, run, function, metadata, num_first, others = known[0]
            stream = self.current_stream(device)
            # no metadata of the launch and no hooks: nobody listens
            run(*axes, stream, function, metadata, None, None, None, *passed[:num_first], *others)
        if self._listeners:
            self._tell(known[0], axes, (*list(named.values())[:num_first], *others))

    @staticmethod
    def is_profiled() -> bool:
        """Whether a profiler's hook wants to be told of every launch by Triton."""
        hook = triton.knobs.runtime.launch_enter_hook
        return bool(getattr(hook, "calls", hook))

    @contextlib.contextmanager
    def heard(self) -> Iterator[list[Heard]]:
        """The launches that this thread makes in this context."""
        thread = threading.get_ident()
        found: list[Heard] = []
        self._listeners[thread] = found
        try:
            yield found
        finally:
            del self._listeners[thread]

    def _tell(self, relaunch: Relaunch | None, axes: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        heard = self._listeners.get(threading.get_ident())
        if heard is not None:
            heard.append((relaunch, axes, arguments))


def _current_stream(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_stream(device))


def _three_axes(grid: Any) -> tuple[int, int, int]:
    first, second, third = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    return first, second, third


def _launch_publicly(kernel: Any, axes: tuple[int, int, int], named: dict[str, Any]) -> Any:
    """Launches through Triton's public interface; TypeError where the arguments are not in their order."""
    # kernels of the interpreter have no `params`, and take their arguments in any order
    expected = [parameter.name for parameter in getattr(kernel, "params", ()) if not parameter.is_constexpr]
    if list(named)[: len(expected)] != expected:
        raise TypeError(f"launch: a kernel's arguments come in the order {expected}, got {list(named)}.")
    kinds = [isinstance(value, Tensor) for value in named.values() if value is not None]
    if kinds != sorted(kinds, reverse=True):
        raise TypeError(f"launch: a kernel's tensors come before its numbers, got {list(named)}.")
    given = {name: _as_in_memory(name, x) if isinstance(x, Tensor) else x for name, x in named.items()}
    # a product and a sum are one instruction, which is the default of Triton up to 3.9 and not of later versions
    return kernel[axes](**given, enable_fp_fusion=True)


def _as_in_memory(name: str, x: Tensor) -> Tensor:
    for is_lazy, resolve in ((x.is_conj(), "resolve_conj"), (x.is_neg(), "resolve_neg")):
        if is_lazy:
            # torch.conj(x) and torch.conj(x).imag are such views
            raise ValueError(
                f"launch: the memory of {name} holds other signs than its values, which are those of a view by "
                f"torch.conj; call {resolve}() on the tensor that the operator gets."
            )
    return as_pairs(x)


launch = Launcher()
