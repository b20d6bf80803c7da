"""`launch`: start a compiled Triton kernel again without asking Triton which one it is.

At every launch Triton looks at every argument to find the compiled kernel that fits, which takes the host longer than
a short kernel runs. Here the answer is kept, under a key that tells apart at least what Triton does. `Launch` keeps
the arguments that are no tensors as well, for a caller who knows that they have not changed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

LARGE = 1 << 31
Form = tuple[Any, ...] | None

_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}
"""What starts a kernel: launcher, handle, metadata, values of the constexprs."""


def cdiv(total: int, part: int) -> int:
    """ceil(total / part); triton.cdiv takes the host some microseconds."""
    return -(-total // part)


def power_of_2(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def form(x: torch.Tensor | None) -> Form:
    """All that a launch of kernels depends on, except for where x lies."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def speaks_ptx() -> bool:
    """Whether kernels are compiled for a GPU of NVIDIA."""
    return not triton.knobs.runtime.interpret and _is_nvidia(triton.runtime.driver.active)


@functools.cache
def _is_nvidia(driver: Any) -> bool:
    """Asking takes the host some microseconds."""
    return bool(driver.get_current_target().backend == "cuda")


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """ctx.save_for_backward for kernels that go by the memory of what they read, see `saved`."""
    ctx.save_for_backward(*tensors)
    ctx.memory = [None if x is None else x.stride() for x in tensors]


def saved(ctx: Any) -> list[Any]:
    """What was saved, in the memory it had: hooks that keep it elsewhere may return it in other."""
    return [
        x if x is None else _in_memory(x, strides) for x, strides in zip(ctx.saved_tensors, ctx.memory, strict=True)
    ]


def _in_memory(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == strides:
        return x
    # of what was expanded there is one
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
    return torch.empty_strided(once.shape, strides, dtype=x.dtype, device=x.device).copy_(once).expand(x.shape)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the GPU that Triton launches on; asking takes a millisecond. One under the interpreter."""
    if device.type == "cpu":
        return 1
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]


def launch(kernel: Any, grid: int | tuple[int, ...], *args: Any, **constants: Any) -> tuple[Any, ...] | None:
    """kernel[grid](*args, **constants) on the current device; grid may be the number of programs.

    Returns what started it, of an NVIDIA GPU and a kernel that was compiled before.

    args: tensors of one device, integers, floats and None, all parameters before the constexprs; the first that is not
    None is a tensor. constants: constexprs, hashable, and options of Triton such as num_warps, for one kernel always
    the same ones in the same order.
    """
    first = next(argument for argument in args if argument is not None)
    if not (first.is_cuda and torch.version.cuda):
        # the interpreter, tensors without data, other makes of GPU
        kernel[(grid,) if isinstance(grid, int) else grid](*args, **constants)
        return None
    device = first.device.index
    key: list[Any] = [id(kernel), device]
    for argument in args:
        kind = type(argument)
        if kind is int:
            # Triton asks for 1, multiples of 16 and more than 32 bits
            key.append(1 if argument == 1 else 2 + (argument & 15 == 0) + 2 * (not -LARGE <= argument < LARGE))
        elif argument is None or kind is float:
            key.append(kind)
        else:
            key.append(argument.dtype)
            key.append(argument.data_ptr() & 15)
    key.extend(constants.values())
    known = _compiled.get(tuple(key))
    hooks = triton.knobs.runtime
    if known is None or getattr(hooks.launch_enter_hook, "calls", hooks.launch_enter_hook):
        # a profiler listens: it gets what Triton tells it
        compiled = kernel[(grid,) if isinstance(grid, int) else grid](*args, **constants)
        values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _compiled[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata, values
        return None
    run, function, metadata, values = known
    run(*_axes(grid), _current_stream(device), function, metadata, None, None, None, *args, *values)
    return known


class Launch:
    """launch(kernel, grid, *tensors, *numbers, **constants), called with tensors of always the same device and dtypes.

    Always the same ones of them are None; a kernel gets complex ones as pairs. Of tensors at multiples of 16 bytes
    nothing is asked but where they are.
    """

    def __init__(self, kernel: Any, grid: int | tuple[int, ...], *numbers: Any, **constants: Any) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.start: tuple[Any, ...] | None = None

    def __call__(self, *tensors: Any) -> None:
        hooks = triton.knobs.runtime
        if self.start is not None and not getattr(hooks.launch_enter_hook, "calls", hooks.launch_enter_hook):
            # as numbers Triton takes them for what they are and does not ask the driver
            pointers, low = [], 0
            for tensor in tensors:
                pointer = None if tensor is None else tensor.data_ptr()
                pointers.append(pointer)
                low |= pointer or 0
            if low & 15 == 0:
                run, axes, device, function, metadata, rest = self.start
                run(*axes, _current_stream(device), function, metadata, None, None, None, *pointers, *rest)
                return
        pairs = [torch.view_as_real(x) if x is not None and x.dtype.is_complex else x for x in tensors]
        known = launch(self.kernel, self.grid, *pairs, *self.numbers, **self.constants)
        given = [tensor for tensor in tensors if tensor is not None]
        if known is not None and all(tensor.data_ptr() & 15 == 0 for tensor in given):
            run, function, metadata, values = known
            device = given[0].device.index
            self.start = run, _axes(self.grid), device, function, metadata, (*self.numbers, *values)


def _axes(grid: int | tuple[int, ...]) -> tuple[int, ...]:
    return (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]


def _current_stream(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_stream(device))
