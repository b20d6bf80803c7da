"""Selective scan: a diagonal recurrence whose step size, input map and output map depend on the input.

h_t[d, n] = exp(dt_t[d] A[d, n]) h_{t-1}[d, n] + dt_t[d] B_t[n] x_t[d]
y_t[d]    = Re(sum_n C_t[n] h_t[d, n]) + D[d] x_t[d],   times silu(z_t[d]) where z is given

With `negative_eigenvalues`, the state is multiplied by 2 exp(dt A) - 1 between -1 and 1, in place of exp(dt A) between
0 and 1 (Grazzi et al. 2024, arXiv 2411.12537, section 5).

Source: Mamba (Gu & Dao 2023), section 3.2, Algorithm 2. A, B, C and D are the paper's; shapes are given in words.

Departures from the paper:
- Equation 4 discretizes B by zero-order hold, (exp(dt A) - 1) / A * B. Ours is the Euler form dt * B, which is what the
  authors' own code computes; the two agree to first order in dt.
- With complex A the real part is not doubled. Pass both conjugates or double C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import kept, needs_gradient
from subquad.kernels.backend import NO_ELEMENT, NO_GRADIENT, made_once, on_device_of, record, use_triton
from subquad.kernels.checks import Allowed, check_shapes
from subquad.kernels.operations import counted, with_state
from subquad.kernels.selective_scan.chunked import selective_scan_chunked

__all__ = ["selective_scan", "selective_scan_step"]

MAX_STATES_TRITON = 64
"""Maximum N of the Triton kernels."""


def _empty_results(inputs: Mapping[str, Any]) -> Any:
    """Results of `selective_scan` without values."""
    x, A = inputs["x"], inputs["A"]
    wide = torch.promote_types(x.dtype, torch.float32)
    state = torch.promote_types(wide, A.dtype) if A.is_complex() else wide
    return with_state(torch.empty_like(x), inputs, x.shape[0], *A.shape, dtype=state)


@counted("selective_scan", results=_empty_results)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    negative_eigenvalues: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of this module over a sequence.

    x, dt, z:          [batch, length, width].
    A:                 [width, N], real or complex, Re(A) < 0.
    B, C:              [batch, length, N] where they depend on the input, else [width, N]; or [batch, length, G, N], one
                       map for each of G groups of neighbouring channels, which are scanned one after the other.
    D, dt_bias:        [width]. The step size is dt + dt_bias, through softplus if dt_softplus.
    initial_state:     [batch, width, N]; None for zero.
    negative_eigenvalues: whether the factor of the state is 2 exp(dt A) - 1. All tensors are real then; in Triton, the
                       scan does not run on the matrix units and does not cut time into segments.
    backend:           triton takes float32, bfloat16, float16 and complex64 inputs on a CUDA device and N up to 64; it
                       first copies x, dt and z unless their last axis is contiguous. auto takes Triton there and plain
                       PyTorch elsewhere. Both are deterministic.

    Returns y [batch, length, width] in the dtype of x and, if return_final_state, the final state [batch, width, N].
    States, decays and step sizes are at least float32, also for half-precision x and under autocast. ValueError for
    shapes that do not fit together, and where backend="triton" cannot run.
    """
    if 4 in (B.ndim, C.ndim):
        options: dict[str, Any] = {
            "dt_softplus": dt_softplus, "negative_eigenvalues": negative_eigenvalues, "backend": backend,
        }  # fmt: skip
        y, state = _scan_groups(x, dt, A, B, C, D, z, dt_bias, initial_state, options)
        return (y, state) if return_final_state else y
    in_triton, is_complex = _choose((x, dt, A, B, C, D, z, dt_bias, initial_state), backend, negative_eigenvalues)
    record("selective_scan", "triton" if in_triton else "torch")
    options = {"dt_softplus": dt_softplus}
    if negative_eigenvalues:
        options["negative_eigenvalues"] = True
    if in_triton:
        scan: Callable[..., Any]
        if is_complex:
            from subquad.kernels.selective_scan.triton.complex import selective_scan_complex as scan
        else:
            from subquad.kernels.selective_scan.triton import selective_scan_triton as scan
        with on_device_of(x):
            return scan(
                x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state,
                return_final_state=return_final_state, **options,
            )  # fmt: skip
    with torch.autocast(x.device.type, enabled=False):
        y, state = selective_scan_chunked(
            x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state, **options
        )
    return (y, state) if return_final_state else y


@counted("selective_scan_step")
def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    negative_eigenvalues: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One step of the recurrence; `state` [batch, width, N] is updated in place.

    x, dt, z: [batch, width]; B, C: [batch, N], or with a map for each channel [batch, width, N] or, where it does not
    depend on the input, [1, width, N]; the rest as in `selective_scan`. Returns y [batch, width] in the dtype of x. The
    Triton path has no gradient, so auto takes it only where no gradient is recorded; ValueError where backend="triton"
    is asked for a gradient.
    """
    _check("selective_scan_step", x, A, dt=dt, B=B, C=C, state=state, D=D, z=z, dt_bias=dt_bias)
    options = {"softplus": dt_softplus}
    if negative_eigenvalues:
        _check_real("selective_scan_step", A, B, C, state)
        options["negative"] = True
    reals, maps = (x, dt, D, z, dt_bias), (A, B, C, state)
    obstacle = NO_GRADIENT if needs_gradient(*reals, *maps) else None
    if _use_triton("selective_scan_step", backend, reals, maps, _is_complex(*maps), obstacle=obstacle):
        from subquad.kernels.selective_scan.triton import selective_scan_step_triton

        with on_device_of(x):
            return selective_scan_step_triton(x, dt, A, B, C, state, skip=D, z=z, bias=dt_bias, **options)
    with torch.autocast(x.device.type, enabled=False):
        real = A.real.dtype
        size = dt.to(real) if dt_bias is None else dt.to(real) + dt_bias.to(real)
        if dt_softplus:
            size = F.softplus(size)
        b, c = (m.unsqueeze(1) if m.ndim == 2 else m for m in (B, C))
        inputs = x.to(real)
        decay = torch.exp(size.unsqueeze(-1) * A)
        if negative_eigenvalues:
            decay = 2 * decay - 1
        state.mul_(decay).add_((size * inputs).unsqueeze(-1) * b)
        y = (kept(state) * c).sum(-1)
        y = y.real if y.is_complex() else y
        if D is not None:
            y = y + D.to(real) * inputs
        if z is not None:
            y = y * F.silu(z.to(real))
    return y.to(x.dtype)


def _scan_groups(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The scan of one group of channels after the other, each with its own B, C or both."""
    groups = {m.shape[2] for m in (B, C) if m.ndim == 4}
    width = A.shape[0]
    if len(groups) != 1 or width % max(groups):
        raise ValueError(
            f"selective_scan: B and C {list(B.shape)}, {list(C.shape)} must have equally many groups, which divide the "
            f"width {width}."
        )
    size = width // groups.pop()
    results = []
    for g, first in enumerate(range(0, width, size)):
        mine = slice(first, first + size)
        # a map is one of this group, or one of all channels, or one for each channel
        b, c = (m[:, :, g] if m.ndim == 4 else m if m.ndim == 3 else m[mine] for m in (B, C))
        start = None if initial_state is None else initial_state[:, mine]
        gate = None if z is None else z[..., mine]
        skip, bias = (m if m is None else m[mine] for m in (D, dt_bias))
        results.append(
            selective_scan(
                x[..., mine], dt[..., mine], A[mine], b, c, D=skip, z=gate, dt_bias=bias, initial_state=start,
                return_final_state=True, **options,
            )
        )  # fmt: skip
    outputs, states = zip(*results, strict=True)
    return torch.cat(outputs, -1), torch.cat(states, 1)


@made_once
def _choose(tensors: tuple[Any, ...], backend: str, negative: bool) -> tuple[bool, bool]:
    """Whether the scan of these tensors runs in Triton, and whether one is complex; refuses what does not fit."""
    x, dt, A, B, C, D, z, dt_bias, initial_state = tensors
    _check("selective_scan", x, A, dt=dt, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_state=initial_state)
    if negative:
        _check_real("selective_scan", A, B, C, initial_state)
    maps = A, B, C, initial_state
    is_complex = _is_complex(*maps)
    return _use_triton("selective_scan", backend, (x, dt, D, z, dt_bias), maps, is_complex), is_complex


def _is_complex(*tensors: Tensor | None) -> bool:
    return any(m is not None and m.is_complex() for m in tensors)


def _use_triton(
    op: str,
    backend: str,
    reals: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    maps: tuple[Tensor, Tensor, Tensor, Tensor | None],
    is_complex: bool,
    obstacle: str | None = None,
) -> bool:
    """maps: A, B, C and the state, of which each may be complex.   is_complex: whether one is."""
    num_states = maps[0].shape[1]
    if not (reals[0].numel() and num_states):
        obstacle = NO_ELEMENT
    elif num_states > MAX_STATES_TRITON:
        obstacle = f"takes N up to {MAX_STATES_TRITON}, got N={num_states}"
    if is_complex:
        # the dtype of the real and imaginary parts decides for a complex tensor
        maps = tuple(m.real if m is not None and m.is_complex() else m for m in maps)  # type: ignore[assignment]
    return use_triton(op, backend, *reals, *maps, obstacle=obstacle)


def _check(op: str, x: Tensor, A: Tensor, **others: Tensor | None) -> None:
    """others: the further tensors of the scan or of the step by their names."""
    shape, is_step = x.shape, op == "selective_scan_step"
    if len(shape) != (2 if is_step else 3) or not (is_step or shape[1]):
        axes = "[batch, width]" if is_step else "[batch, length, width] with length >= 1"
        raise ValueError(f"{op}: x must be {axes}, got {list(shape)}.")
    batch, width = shape[0], shape[-1]
    if A.ndim != 2 or A.shape[0] != width:
        raise ValueError(f"{op}: A must be [width, N] with width {width}, got {list(A.shape)}.")
    num_states = A.shape[1]
    state = (batch, width, num_states)
    maps = [(*shape[:-1], num_states), *([state, (1, width, num_states)] if is_step else [(width, num_states)])]
    allowed: dict[str, Allowed] = {
        "dt": shape, "z": shape, "B": maps, "C": maps, "D": (width,), "dt_bias": (width,), "initial_state": state,
        "state": state,
    }  # fmt: skip
    check_shapes(op, {name: (tensor, allowed[name]) for name, tensor in others.items()}, to_go_with="x and A")


def _check_real(op: str, *tensors: Tensor | None) -> None:
    if _is_complex(*tensors):
        raise ValueError(f"{op}: negative_eigenvalues needs real A, B, C and states; give real ones or leave it off.")
