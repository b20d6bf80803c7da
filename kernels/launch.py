"""`launch`: start a compiled Triton kernel again without asking Triton which one it is.

At every launch Triton looks at every argument to find the compiled kernel that fits, which takes the host longer than
a short kernel runs. Here the answer is kept, under a key that tells apart at least what Triton does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


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
    import triton

    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]


def launch(kernel: Any, grid: int | tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) on the current device; grid may be the number of programs.

    args: tensors, integers, floats and None, all parameters before the constexprs. constants: constexprs, hashable, and
    options of Triton such as num_warps, for one kernel always the same ones in the same order.
    """
    grid = (grid,) if isinstance(grid, int) else grid
    kinds: list[Any] = []
    device = None
    for argument in args:
        kind = type(argument)
        if kind is int:
            # Triton asks for 0, 1, multiples of 16 and more than 32 bits
            kinds.append(argument if argument < 2 else (argument % 16 == 0, argument >= 1 << 31))
        elif argument is None or kind is float:
            kinds.append(kind)
        elif argument.is_cuda and torch.version.cuda:
            device = argument.device.index
            kinds.append((argument.dtype, argument.data_ptr() % 16))
        else:
            break
    else:
        key = (id(kernel), device, *kinds, *constants.values())
        known = _compiled.get(key)
        if known is None:
            compiled = kernel[grid](*args, **constants)
            _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
        else:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*args, *values)
        return
    # the interpreter, tensors without data, other makes of GPU
    kernel[grid](*args, **constants)
