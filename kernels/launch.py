"""`launch`: start a compiled Triton kernel again without asking Triton which one it is.

At every launch Triton looks at every argument to find the compiled kernel that fits, which takes the host longer than
a short kernel runs. Here the answer is kept, under a key that tells apart at least what Triton does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

LARGE = 1 << 31

_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}
"""What starts a kernel: launcher, handle, metadata, values of the constexprs."""


def cdiv(total: int, part: int) -> int:
    """ceil(total / part); triton.cdiv takes the host some microseconds."""
    return -(-total // part)


def power_of_2(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the GPU that Triton launches on; asking takes a millisecond. One under the interpreter."""
    if device.type == "cpu":
        return 1
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]


def launch(kernel: Any, grid: int | tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) on the current device; grid may be the number of programs.

    args: tensors of one device, integers, floats and None, all parameters before the constexprs; the first that is not
    None is a tensor. constants: constexprs, hashable, and options of Triton such as num_warps, for one kernel always
    the same ones in the same order.
    """
    first = next(argument for argument in args if argument is not None)
    if not (first.is_cuda and torch.version.cuda):
        # the interpreter, tensors without data, other makes of GPU
        kernel[(grid,) if isinstance(grid, int) else grid](*args, **constants)
        return
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
        return
    run, function, metadata, values = known
    x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    run(x, y, z, _current_stream(device), function, metadata, None, None, None, *args, *values)


def _current_stream(device: int) -> int:
    return int(triton.runtime.driver.active.get_current_stream(device))
