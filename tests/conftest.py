"""Setup of all tests: Triton's interpreter without a GPU, memory full of NaN, and a time limit for quick tests.

Triton decides when it is first imported whether kernels are compiled or interpreted, so this file decides before any
test is collected.
"""

import contextlib
import os

import numpy as np
import pytest
import torch

# hooks of pytest
from tests.time_limit import pytest_addoption, pytest_configure

__all__ = ["poisoned_memory", "pytest_addoption", "pytest_configure"]


def round_in_the_interpreter():
    """Let Triton's interpreter round float32 to the nearest bfloat16, as a GPU does; it truncates (3.6 and 3.9)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return TensorHandle(values.view(torch.int16).numpy().view(np.uint16), target.scalar)

    InterpreterBuilder.cast_impl = rounded


def multiply_in_the_interpreter():
    """Let Triton's interpreter multiply bfloat16 matrices in float32; 3.9 multiplies their bits as integers."""
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
    """Fill what `torch.empty` returns with NaN, so that a result which no kernel wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # filling belongs to the deterministic mode; an operation without a deterministic implementation only warns
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
