"""Setup of all tests: Triton's interpreter without a GPU, memory full of NaN, and a time limit for quick tests.

Triton decides when it is first imported whether kernels are compiled or interpreted, so this file decides before any
test is collected.
"""

import contextlib
import dataclasses
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


def patch_the_language_once_a_launch():
    """Let Triton's interpreter patch `triton.language` once a launch; 3.9 repeats it at each call of a device function.

    It walks all members of the language for that, which takes half of the time of a kernel made of small functions.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(fn):
        # functions of one module see the same names of the language
        if fn.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(fn.__module__)
        scope = patch(fn)
        restore = scope.restore

        def restore_and_forget():
            # only a launch restores; what device functions have patched is then patched anew in the next launch
            patched.clear()
            restore()

        scope.restore = restore_and_forget
        return scope

    # older versions of Triton keep no record of what they patch
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once


def spare_unused_checks_in_the_interpreter():
    """Let Triton's interpreter skip the overflow check of integers, whose result it uses only when it debugs (3.9)."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    if not options.debug:
        interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        round_in_the_interpreter()
        multiply_in_the_interpreter()
        patch_the_language_once_a_launch()
        spare_unused_checks_in_the_interpreter()


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a result which no kernel wrote cannot pass."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # filling belongs to the deterministic mode; an operation without a deterministic implementation only warns
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1000).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
