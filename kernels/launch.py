"""`launch`: start a compiled Triton kernel again without asking Triton which one it is.

At every launch Triton looks at every argument to find the compiled kernel that fits, which takes the host longer than
a short kernel runs. Here the answer is kept, under a key that tells apart at least what Triton does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def cdiv(total: int, part: int) -> int:
    """ceil(total / part); triton.cdiv takes the host some microseconds."""
    return -(-total // part)


def power_of_2(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def _kind(argument: Any) -> Any:
    """Of a tensor its dtype and alignment, of an integer whether it is 0, 1, a multiple of 16, wider than 32 bits."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if type(argument) is int:
        return argument if argument < 2 else (argument % 16 == 0, argument >= 1 << 31)
    return type(argument)


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """kernel[(programs,)](*args, **constants); the first of args is a tensor, the constexprs are the last parameters.

    Keyword arguments are the constexprs, hashable, and options of Triton such as num_warps.
    """
    first = args[0]
    if not (first.is_cuda and torch.version.cuda):
        kernel[(programs,)](*args, **constants)
        return
    key = (id(kernel), first.device.index, *map(_kind, args), *constants.items())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(programs,)](*args, **constants)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
    else:
        compiled, values = known
        compiled[(programs, 1, 1)](*args, *values)
