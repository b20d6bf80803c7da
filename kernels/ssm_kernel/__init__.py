"""The convolution filter of a diagonal, time-invariant state space model.

K[d, l] = s Re(sum_n C[d, n] Abar[d, n]^l Bbar[d, n]),   s = 2 where only one of each conjugate pair is given, else 1

`discretization` gives Abar and Bbar:
- zoh, dss-exp:      Abar = exp(dt A),                          Bbar = (exp(dt A) - 1) / A * B
- bilinear:          Abar = (1 + dt A / 2) / (1 - dt A / 2),    Bbar = dt B / (1 - dt A / 2)
- dss-exp-no-scale:  Abar = exp(dt A),                          Bbar = B
- dss-softmax:       Abar = exp(dt A),                          Bbar = (exp(dt A) - 1) / (A (exp(L dt A) - 1)) * B

Sources: S4D (Gu et al. 2022), equations 3 to 6; DSS (Gupta et al. 2022), proposition 1, section 3.1 and appendix A.2.

Departures from the papers:
- The reciprocal in dss-softmax is the guarded one, conj(x) / (|x|^2 + 1e-7), applied to x = A (exp(L dt A) - 1) as in
  the authors' figure 6. Appendix A.2 states it for the sum of the row instead; the two differ in the guard alone.
- Where Re(A) > 0, dss-softmax is computed for -A in reversed time, which equals the paper's subtraction of the maximum.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.backend import on_device_of, use_triton
from subquad.kernels.checks import check_choice, check_shapes
from subquad.kernels.operations import counted
from subquad.kernels.ssm_kernel.chunked import ssm_kernel_chunked
from subquad.kernels.ssm_kernel.discretize import DISCRETIZATIONS, Discretization

__all__ = ["DISCRETIZATIONS", "Discretization", "check_parameters", "ssm_kernel"]


@counted("ssm_kernel")
def ssm_kernel(
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    length: int,
    *,
    conj_pairs: bool = True,
    discretization: Discretization = "zoh",
    normalize_over: int | None = None,
    detach_maximum: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """The filter K [D, length] of this module in O(D length) memory; at least float32, in Triton float32.

    A: [D, N] or [N], complex or real; B, C: [D, N], B = None stands for ones; dt: [D], positive. Re(A) must not be
    positive, except with dss-softmax.

    normalize_over: for dss-softmax only, the L of its normalization where that is more than `length`.
    detach_maximum: for dss-softmax only, take the maximum that is subtracted from a row for a constant in the backward
        pass, as the authors' figure 6 does (`torch.no_grad`). The filter is the same; where Re(A) > 0, the gradients of
        A and dt are not those of the filter.
    backend: `auto` takes the Triton path on a GPU where all inputs are float32, float16 or bfloat16 (complex64).

    ValueError where shapes, options or the backend do not fit together.
    """
    check_parameters("ssm_kernel", A, B, C, dt, conj_pairs=conj_pairs, discretization=discretization)
    if length < 1:
        raise ValueError(f"ssm_kernel: length must be at least 1, got {length}.")
    if normalize_over is not None and (discretization != "dss-softmax" or normalize_over < length):
        raise ValueError(
            f"ssm_kernel: normalize_over={normalize_over} is for dss-softmax and at least length={length}, got "
            f"{discretization}; leave it out."
        )
    if detach_maximum and discretization != "dss-softmax":
        raise ValueError(f"ssm_kernel: detach_maximum is for dss-softmax, got {discretization}; leave it out.")
    options: dict[str, Any] = {
        "conj_pairs": conj_pairs,
        "discretization": discretization,
        "normalize_over": normalize_over,
        "detach_maximum": detach_maximum,
    }
    # for a complex tensor, the dtype of its parts decides
    if use_triton("ssm_kernel", backend, dt, *(x if x is None else x.real for x in (A, B, C))):
        from subquad.kernels.ssm_kernel.triton import ssm_kernel_triton

        # meta tensors, on which launches are recorded, have no autocast of their own
        with on_device_of(dt), torch.autocast("cuda" if dt.is_cuda else "cpu", enabled=False):
            return ssm_kernel_triton(A, B, C, dt, length, **options)
    with torch.autocast(A.device.type, enabled=False):
        return ssm_kernel_chunked(A, B, C, dt, length, **options)


def check_parameters(
    op: str,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool,
    discretization: str,
) -> None:
    """Raises ValueError where the parameters of a diagonal state space do not fit together."""
    if dt.ndim != 1:
        raise ValueError(f"{op}: dt must be [D], got {list(dt.shape)}.")
    width = dt.shape[0]
    if A.ndim not in (1, 2) or (A.ndim == 2 and A.shape[0] != width):
        raise ValueError(f"{op}: A must be [N] or [D, N] with D={width} as in dt, got {list(A.shape)}.")
    shape = (width, A.shape[-1])
    check_shapes(op, {"B": (B, shape), "C": (C, shape)}, to_go_with="A and dt")
    if conj_pairs and not A.is_complex():
        raise ValueError(f"{op}: conj_pairs=True needs a complex A, got {A.dtype}; pass conj_pairs=False.")
    check_choice(op, "discretization", discretization, DISCRETIZATIONS)
