"""Numerical settings of a run: CPU threads, precision of matrix products, determinism, autocast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Literal

# cuBLAS reads it once, at its first use; deterministic runs need it, and it costs the others nothing
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

from subquad.suite.runs import RunEnded

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


def _settings() -> dict[str, Any]:
    """The settings of torch by which a run computes, by the words that name them."""
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch has two interfaces for it, and does not read by one what was set by the other
        products = "another"
    return {
        "float32 matmul precision": products,
        "TF32 convolutions": torch.backends.cudnn.allow_tf32,
        "cuDNN benchmark": torch.backends.cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "gradient mode": torch.is_grad_enabled(),
        "number of CPU threads": torch.get_num_threads(),
    }


def _be_deterministic(wanted: bool) -> None:
    # even to set what is set, torch imports its compiler, which takes a second; where it only warns, it is not set
    if torch.are_deterministic_algorithms_enabled() != wanted or torch.is_deterministic_algorithms_warn_only_enabled():
        torch.use_deterministic_algorithms(wanted)


def _set(settings: dict[str, Any]) -> None:
    products, tf32, benchmark, deterministic, dtype, grad, threads = settings.values()
    torch.set_float32_matmul_precision("highest" if products == "another" else products)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark
    _be_deterministic(deterministic)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)


@contextlib.contextmanager
def same_settings() -> Iterator[None]:
    """A context in which the settings of torch stay as they are. RunEnded, and put back, where code changed them."""
    before = _settings()
    try:
        yield
        found = _settings()
    finally:
        _set(before)
    changed = [f"{name} from {value} to {found[name]}" for name, value in before.items() if found[name] != value]
    if changed:
        raise RunEnded(
            "failed",
            f"the code changed torch's {', '.join(changed)}, so its numbers are not what the settings of the run say; "
            "let it leave them alone, and choose the precision by train.precision",
        )


@contextlib.contextmanager
def numerics(precision: Precision, *, deterministic: bool = False) -> Iterator[None]:
    """Sets the precision of matrix products and determinism for a run, and puts both back.

    RunEnded at the end where the code of the run has changed these or another setting of torch (`same_settings`).
    """
    before = _settings()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = False
    _be_deterministic(deterministic)
    # memory-efficient and flash attention add gradients with atomics, in an order that differs between two calls
    backends = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with backends if deterministic else contextlib.nullcontext():
        try:
            with same_settings():
                yield
        finally:
            _set(before)


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of every forward pass: bfloat16 where the precision is bf16, else nothing."""
    if precision != "bf16":
        return contextlib.nullcontext()
    # cached casts would be recorded into the wrong CUDA graph
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
