"""Triton runs in its interpreter where there is no GPU, which it decides when it is first imported."""

import contextlib
import os

import numpy as np
import pytest
import torch


def round_in_the_interpreter():
    """Triton's interpreter cuts float32 off to bfloat16 (seen in 3.6 and 3.9), where a GPU rounds to the nearest."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        numbers = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(numbers.view(torch.int16).numpy().view(np.uint16), target.scalar)

    InterpreterBuilder.cast_impl = rounded


def multiply_in_the_interpreter():
    """Triton's interpreter multiplies the bits of bfloat16 matrices as integers (seen in 3.9)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        round_in_the_interpreter()
        multiply_in_the_interpreter()


@pytest.fixture
def poisoned_memory():
    """`torch.empty` is full of NaN, so that a result nobody wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # the filling is part of the deterministic mode; only warn where an operation has no such form
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
