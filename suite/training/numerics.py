"""Numerical settings of a run: CPU threads, precision of matrix products, determinism, autocast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

# cuBLAS reads it once, at its first use; deterministic runs need it, and it costs the others nothing
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

Precision = Literal["fp32", "tf32", "bf16"]
"""bf16: autocast with fp32 parameters; tf32: fp32 with TF32 matrix products."""


@contextlib.contextmanager
def host_threads(count: int | None) -> Iterator[None]:
    """Lets torch compute on `count` CPU threads, and afterwards on as many as before. None changes nothing.

    A sum that is divided among threads differs, in its last digits, from the sum of one thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, tensors of no dtype of their own are made in this one."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@contextlib.contextmanager
def numerics(precision: Precision, *, deterministic: bool = False) -> Iterator[None]:
    """Sets the precision of matrix products and determinism for a run, and puts both back."""
    matmul = torch.get_float32_matmul_precision()
    cudnn_tf32, cudnn_benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    before = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)
    # memory-efficient and flash attention add gradients with atomics, in an order that differs between two calls
    backends = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with backends if deterministic else contextlib.nullcontext():
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matmul)
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = cudnn_tf32, cudnn_benchmark
            torch.use_deterministic_algorithms(before)


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of every forward pass: bfloat16 where the precision is bf16, else nothing."""
    if precision != "bf16":
        return contextlib.nullcontext()
    # cached casts would be recorded into the wrong CUDA graph
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
