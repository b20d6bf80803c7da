"""Which path an operator takes: Triton on an accelerator, plain PyTorch everywhere else."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def triton_missing() -> str | None:
    """The reason why Triton cannot be imported, or None."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"needs the package triton ({error})"
    return None


def use_triton(op: str, backend: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether `op` runs in Triton, by its first input x and its other tensor inputs.

    auto: on a CUDA device, where Triton can be imported and every dtype is float32, bfloat16 or float16.
    triton: ValueError where it cannot run. Besides CUDA tensors it takes CPU tensors under Triton's interpreter
        (TRITON_INTERPRET=1) and meta tensors, for which a launcher computes shapes only.
    """
    if backend == "torch":
        return False
    if backend not in ("auto", "triton"):
        raise ValueError(f"{op}: backend={backend!r} is not one of 'auto', 'torch', 'triton'.")
    if backend == "auto" and x.device.type != "cuda":
        return False
    reason = _obstacle(x, *others)
    if reason and backend == "triton":
        raise ValueError(f"{op}: backend='triton' {reason}; use backend='auto' or 'torch'.")
    return reason is None


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device; this makes it that of x."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _obstacle(x: Tensor, *others: Tensor | None) -> str | None:
    if (missing := triton_missing()) is not None:
        return missing
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in TRITON_DTYPES:
            return f"takes float32, bfloat16 and float16, got {tensor.dtype}"
        if tensor is not None and tensor.device != x.device:
            return f"needs all tensors on one device, got {x.device} and {tensor.device}"
    if x.device.type in ("cuda", "meta"):
        return None
    from triton import knobs

    if x.device.type == "cpu" and knobs.runtime.interpret:
        return None
    return f"needs a CUDA device (or, on the CPU, TRITON_INTERPRET=1 before the start), got {x.device.type}"
