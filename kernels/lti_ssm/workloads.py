"""What the benchmark runs of the time-invariant state space model: sizes of the long convolution, N conjugate pairs.

`gates` is `plain` (S4D, DSS) or `gated` (H3). The system stays float32 (complex64) where u is in half precision.

`triton` is timed on memory [B, D, T], as the baselines are, behind the same [B, T, D] view.

Two baselines of PyTorch, both with transforms in float32 on memory [B, D, T]: `fft` forms the filter from all its
powers and convolves, which is the whole operator; `fft-filter-given` is timed with the filter ready, the convolution
alone (what a kernel that never forms a filter has to beat), so its time is a part of the operator's and leaves out the
gradients of the system.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.fft_conv.workloads import channel_first, time_second, torch_fft_conv
from kernels.lti_ssm import lti_ssm
from kernels.lti_ssm.reference import lti_ssm_reference
from kernels.ssm_kernel import ssm_kernel
from kernels.ssm_kernel.workloads import make_system, system_bytes, vandermonde_kernel
from kernels.workload import Cost, Implementation, Inputs, Shape, Workload, normal, sizes, traffic

CHUNK = 64
SEQUENCES = ("u", "gate_in", "gate_out")


def reference(**inputs: Any) -> Tensor:
    return lti_ssm_reference(**inputs)[0]


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    size = sizes(shape, "BTD")
    names = SEQUENCES if shape["gates"] == "gated" else SEQUENCES[:1]
    sequences = {name: normal(generator, dtype, *size) for name in names}
    skip = normal(generator, torch.promote_types(dtype, torch.float32), size[-1])
    return {**sequences, **make_system(shape, dtype, generator), "D": skip}


def cost(shape: Shape, dtype: torch.dtype, backward: bool) -> Cost:
    """Products in chunks of C = 64: a position meets C taps, and writes and reads N complex states, 2 C + 8 N flops.

    Backward twice that: the same for du, and as much for the gradients of taps, states and maps.
    """
    batch, length, width, state = sizes(shape, "BTDN")
    sequence = batch * length * width * dtype.itemsize
    inputs = (3 if shape["gates"] == "gated" else 1) * sequence
    inputs += system_bytes(shape, dtype) + width * max(4, dtype.itemsize)
    return Cost(
        num_bytes=traffic(inputs, sequence, backward),
        num_flops=(3 if backward else 1) * batch * length * width * (2 * CHUNK + 8 * state),
        matrix=True,
    )


def short(shape: Shape) -> Shape:
    """From 512 steps on, as every real shape: below, our own paths are others. 656 is 16 times 41, as a real T
    is a multiple of 16, and no multiple of a chunk."""
    return {**shape, "B": min(2, int(shape["B"])), "T": min(656, int(shape["T"])), "D": min(16, int(shape["D"]))}


def with_skip(filters: Tensor, skip: Tensor) -> Tensor:
    """[D, T]: the skip is the tap at lag zero."""
    return torch.cat([filters[:, :1] + skip[:, None], filters[:, 1:]], dim=1)


def load_triton() -> Callable[..., Any]:
    import triton  # noqa: F401

    return partial(lti_ssm, backend="triton")


def time_contiguous(inputs: Inputs) -> Inputs:
    """u and gates as they are, [B, T, D], in memory [B, D, T]: the order that the kernels and every peer work in."""
    names = [name for name in SEQUENCES if name in inputs]
    return inputs | {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names}


def fft(A: Tensor, B: None, C: Tensor, dt: Tensor, D: Tensor, **sequences: Any) -> Tensor:
    return torch_fft_conv(filter=with_skip(vandermonde_kernel(A, B, C, dt, sequences["u"].shape[-1]), D), **sequences)


def sequences_first(inputs: Inputs) -> Inputs:
    """u and gates as [B, D, T], the system as it is."""
    return inputs | channel_first({name: inputs[name] for name in SEQUENCES if name in inputs})


def with_filter(inputs: Inputs) -> Inputs:
    system = {name: inputs[name] for name in ("A", "B", "C", "dt")}
    filters = ssm_kernel(**system, length=inputs["u"].shape[1], backend="torch")
    sequences = channel_first({name: inputs[name] for name in SEQUENCES if name in inputs})
    return {**sequences, "filter": with_skip(filters, inputs["D"])}


WORKLOAD = Workload(
    op="lti_ssm",
    reference=reference,
    make_inputs=make_inputs,
    cost=cost,
    short=short,
    implementations=(
        Implementation("triton", "ours", load_triton, time_contiguous, cold_start=True),
        Implementation("torch", "ours", lambda: partial(lti_ssm, backend="torch")),
        Implementation("fft", "torch", lambda: fft, sequences_first, time_second),
        Implementation("fft-filter-given", "torch", lambda: torch_fft_conv, with_filter, time_second),
    ),
    shapes={
        "quick": ({"B": 50, "T": 1024, "D": 256, "N": 32, "gates": "plain"},),
        "paper": (
            {"B": 8, "T": 512, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 2048, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 8192, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 32768, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 8, "T": 8192, "D": 1024, "N": 32, "gates": "gated"},
            {"B": 1, "T": 131072, "D": 1024, "N": 32, "gates": "plain"},
            {"B": 50, "T": 1024, "D": 256, "N": 32, "gates": "plain"},
            {"B": 16, "T": 16384, "D": 256, "N": 32, "gates": "plain"},
            {"B": 50, "T": 2048, "D": 128, "N": 64, "gates": "plain"},
        ),
    },
    keep=("dt", "D"),
)
