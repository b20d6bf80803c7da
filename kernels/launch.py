"""`launch`: start a compiled Triton kernel again without asking Triton which one it is.

At every launch Triton looks at every argument to find the compiled kernel that fits, which takes the host longer than
a short kernel runs. Here the answer is kept, under a key that tells apart at least what Triton does.
"""

from __future__ import annotations

from typing import Any

import torch

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def cdiv(total: int, part: int) -> int:
    """ceil(total / part); triton.cdiv takes the host some microseconds."""
    return -(-total // part)


def power_of_2(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """kernel[(programs,)](*args, **constants).

    args: tensors (the first is one), integers and None, the parameters before the constexprs. constants: constexprs,
    hashable, and options of Triton such as num_warps, for one kernel always the same ones in the same order.
    """
    first = args[0]
    if not (first.is_cuda and torch.version.cuda):
        kernel[(programs,)](*args, **constants)
        return
    kinds: list[Any] = []
    for argument in args:
        if type(argument) is int:
            # Triton asks for 0, 1, multiples of 16 and more than 32 bits
            kinds.append(argument if argument < 2 else (argument % 16 == 0, argument >= 1 << 31))
        elif argument is None:
            kinds.append(None)
        else:
            kinds.append((argument.dtype, argument.data_ptr() % 16))
    key = (id(kernel), first.device.index, *kinds, *constants.values())
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[(programs,)](*args, **constants)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
    else:
        compiled, values = known
        compiled[(programs, 1, 1)](*args, *values)
