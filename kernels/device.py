"""Properties of the GPU that Triton compiles for. They are cached, because querying the driver takes microseconds.

The functions ask Triton's active driver and not `torch.cuda`, so that kernels can be compiled for a GPU that is not
present (`suite.bench.compile`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def active_gpu() -> Any:
    """The GPU that kernels are compiled for, as Triton's driver, which tells plans apart; None in the interpreter."""
    return None if interpreted() else triton.runtime.driver.active


def speaks_ptx() -> bool:
    """Whether kernels are compiled for a GPU of NVIDIA, so that they may contain PTX and limit their registers."""
    return not interpreted() and _is_nvidia(triton.runtime.driver.active)


def is_hopper() -> bool:
    """Whether kernels are compiled for NVIDIA's Hopper (compute capability 9.0)."""
    return not interpreted() and _is_hopper(triton.runtime.driver.active)


def float32_products() -> str:
    """Triton's `input_precision` that multiplies float32 matrices with nearly float32 accuracy on matrix units.

    tf32x3 (three products of tf32 numbers) on NVIDIA GPUs and in the interpreter; ieee on GPUs that have no tf32.
    """
    return "tf32x3" if interpreted() or _is_nvidia(triton.runtime.driver.active) else "ieee"


def num_processors(device: torch.device) -> int:
    """Number of multiprocessors of the GPU that Triton launches on; 1 for CPU tensors."""
    return 1 if device.type == "cpu" else _num_processors(triton.runtime.driver.active, device)


@functools.cache
def _num_processors(driver: Any, device: torch.device) -> int:
    # the driver is part of the key because `suite.bench.compile` describes several GPUs in one process
    return driver.utils.get_device_properties(driver.get_current_device())["multiprocessor_count"]


@functools.cache
def _is_nvidia(driver: Any) -> bool:
    return bool(driver.get_current_target().backend == "cuda")


@functools.cache
def _is_hopper(driver: Any) -> bool:
    target = driver.get_current_target()
    return bool(target.backend == "cuda" and target.arch == 90)
