"""Launch Triton kernels with little work on the host.

At every launch Triton inspects every argument to find the compiled kernel that fits, which takes longer than a short
kernel runs. `launch` does the same with less work: it keeps the compiled kernel under a key that tells apart at least
what Triton compiles separately. `KeptLaunch` keeps the scalar arguments and the grid as well, for calls with equal
shapes, strides, dtypes and device; `KeptLaunches` is the table of those that belong to one plan.

A compiled kernel is relaunched through `CompiledKernel.run`, whose parameters Triton does not document. That is done on
the versions in TESTED_TRITON only; on every other version each launch is `kernel[grid](...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import triton

from kernels.device import is_hopper, speaks_ptx

TESTED_TRITON = ("3.6", "3.9")
"""Versions of Triton, major and minor, on which relaunching through `CompiledKernel.run` was tested on a GPU."""

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


def _is_profiled() -> bool:
    """Whether a hook listens to launches; it is called, with its arguments, by Triton's own launch only."""
    hook = triton.knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


def _argument_names(kernel: Any) -> list[str]:
    """Names of the kernel's parameters that are not constexprs."""
    return [parameter.name for parameter in kernel.params if not parameter.is_constexpr]


def _three_axes(grid: int | tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    return first, second, third


def _current_stream(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_stream(device))


class Relaunch(NamedTuple):
    """A compiled kernel, and what `CompiledKernel.run` needs besides grid, stream and arguments."""

    run: Callable[..., Any]
    function: Any
    metadata: Any
    constexprs: tuple[Any, ...]
    """Values of the constexprs, in the order of the kernel's parameters."""
    num_arguments: int
    """Number of the kernel's parameters that are not constexprs."""


class Launcher:
    """Starts kernels and keeps what Triton compiled. The program has one, `launch`; tests make their own.

    version: of Triton.   current_stream: gives the handle of the current stream of a device, by its index.
    """

    def __init__(self, version: str = triton.__version__, current_stream: Callable[[int], int] | None = None) -> None:
        self.relaunches = ".".join(version.split(".")[:2]) in TESTED_TRITON
        self.current_stream = current_stream or _current_stream
        self._compiled: dict[tuple[Any, ...], Relaunch] = {}
        self._num_arguments: dict[int, int] = {}

    def __call__(self, kernel: Any, grid: int | tuple[int, ...], *args: Any, **named: Any) -> Relaunch | None:
        """`kernel[grid](*args, **named)` on the current device; grid may be the number of programs.

        The arguments stand in the order of the kernel's parameters, the first ones in `args`, the others by name:
        tensors of one device, integers, floats and None, of which the first that is not None is a tensor; then the
        constexprs, which are hashable; then Triton's options such as num_warps. A kernel always gets the same
        constexprs and options in the same order.

        Returns what relaunched the kernel, or None where Triton itself launched it.
        """
        values = (*args, *named.values())
        # a loop, because a generator takes the host half a microsecond
        first: Any = None
        for first in values:
            if first is not None:
                break
        if not (self.relaunches and first.is_cuda and torch.version.cuda):
            # the interpreter, tensors without data, GPUs of other makers, versions of Triton that were not tested
            kernel[(grid,) if isinstance(grid, int) else grid](*args, **named)
            return None
        num_arguments = self._num_arguments.get(id(kernel))
        if num_arguments is None:
            num_arguments = self._num_arguments[id(kernel)] = len(_argument_names(kernel))
        device = first.device.index
        arguments = values[:num_arguments]
        # with the names, so that a call which gives them in another order finds nothing and is refused
        parts: list[Any] = [id(kernel), device, *named]
        for value in arguments:
            kind = type(value)
            if kind is int:
                # Triton compiles separately for 1, for multiples of 16 and for integers of 64 bits
                parts.append(1 if value == 1 else 2 + (value & 15 == 0) + 2 * (not -INT32_END <= value < INT32_END))
            elif value is None or kind is float:
                parts.append(kind)
            else:
                parts.append(value.dtype)
                parts.append(value.data_ptr() & 15)
        parts.extend(values[num_arguments:])
        key = tuple(parts)
        known = self._compiled.get(key)
        if known is None or _is_profiled():
            expected, names = _argument_names(kernel)[len(args) :], list(named)
            if names[: len(expected)] != expected:
                raise TypeError(f"launch: a kernel's arguments come in the order {expected}, got {names}.")
            compiled = kernel[(grid,) if isinstance(grid, int) else grid](*args, **named)
            constexprs = tuple(named[name] for name in kernel.arg_names[num_arguments:])
            self._compiled[key] = Relaunch(
                compiled.run, compiled.function, compiled.packed_metadata, constexprs, num_arguments
            )
            return None
        self.start(known, _three_axes(grid), device, (*arguments, *known.constexprs))
        return known

    def start(self, known: Relaunch, axes: tuple[int, int, int], device: int, arguments: tuple[Any, ...]) -> None:
        """Starts a compiled kernel; a tensor among its arguments may be given by its address."""
        stream = self.current_stream(device)
        # no metadata of the launch and no hooks: nobody listens
        known.run(*axes, stream, known.function, known.metadata, None, None, None, *arguments)


launch = Launcher()


class KeptLaunch:
    """A launch with its grid, scalars and constexprs fixed; calling it gives the tensors, the first parameters.

    Every call gives tensors of the same device and dtypes, with None in the same places. A kernel gets a complex tensor
    with a last axis of its real and imaginary parts. Once Triton has compiled the kernel, a call whose tensors all
    begin at multiples of 16 bytes passes nothing but their addresses.
    """

    def __init__(
        self, kernel: Any, grid: int | tuple[int, ...], *scalars: Any, launcher: Launcher = launch, **named: Any
    ) -> None:
        """scalars, named: the arguments behind the tensors, constexprs and options, see `Launcher.__call__`."""
        self.kernel, self.grid, self.scalars, self.named, self.launcher = kernel, grid, scalars, named, launcher
        self._known: tuple[Relaunch, tuple[int, int, int], int, tuple[Any, ...]] | None = None
        self._names: tuple[str, ...] | None = None

    def __call__(self, *tensors: Any, **by_name: Any) -> None:
        """The tensors, all by place or all by name, in the order of the kernel's parameters."""
        if by_name:
            names, tensors = tuple(by_name), tuple(by_name.values())
            if names != self._names:
                self._check(names)
        if self._known is not None and not _is_profiled():
            # Triton's launcher takes an integer as an address without asking the driver about it
            addresses, low = [], 0
            for tensor in tensors:
                address = None if tensor is None else tensor.data_ptr()
                addresses.append(address)
                low |= address or 0
            if low & 15 == 0:
                known, axes, device, others = self._known
                self.launcher.start(known, axes, device, (*addresses, *others))
                return
        pairs = [torch.view_as_real(x) if x is not None and x.dtype.is_complex else x for x in tensors]
        relaunch = self.launcher(self.kernel, self.grid, *pairs, *self.scalars, **self.named)
        given = [tensor for tensor in tensors if tensor is not None]
        if relaunch is not None and all(tensor.data_ptr() & 15 == 0 for tensor in given):
            scalars = (*self.scalars, *self.named.values())[: relaunch.num_arguments - len(tensors)]
            device = given[0].device.index
            self._known = relaunch, _three_axes(self.grid), device, (*scalars, *relaunch.constexprs)

    def _check(self, names: tuple[str, ...]) -> None:
        expected = tuple(self.kernel.arg_names[: len(names)])
        if names != expected:
            raise TypeError(f"launch: a kernel's tensors come in the order {expected}, got {names}.")
        self._names = names


class KeptLaunches:
    """The kept launches of one plan, by whatever the plan leaves open.

    keep: False makes every launch anew, for plans that are used once.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._kept: dict[Hashable, KeptLaunch] = {}

    def get(self, key: Hashable, make: Callable[[], KeptLaunch]) -> KeptLaunch:
        """The launch under a key, made at its first use."""
        ready = self._kept.get(key)
        if ready is None:
            ready = make()
            if self.keep:
                self._kept[key] = ready
        return ready
