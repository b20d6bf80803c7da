"""The state space model as a convolution with its filter, in plain PyTorch, plus terms for the states on request.

The filter [D, T] comes from `kernels.ssm_kernel` in O(D T) memory. Short sequences are multiplied by its Toeplitz
matrix (two launches, no transform), longer ones go through `kernels.fft_conv`. An initial state h adds the response
Re(C Abar^(t+1) h), and the final state is the sum of Abar^(T-1-t) Bbar v_t; both use powers of Abar in two levels, like
the filter itself.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.fft_conv import fft_conv
from subquad.kernels.fft_conv.chunked import circular_conv, fast_length, with_skip
from subquad.kernels.ssm_kernel import Discretization, ssm_kernel
from subquad.kernels.ssm_kernel.chunked import filter_dtype, vandermonde_product, widen
from subquad.kernels.ssm_kernel.discretize import discretize, split_softmax

TOEPLITZ_MAX_LENGTH = 128
"""Longest sequence for which a Toeplitz product is faster than two transforms (measurements: LOG.md)."""


def lti_ssm_chunked(
    u: Tensor,
    A: Tensor,
    B: Tensor | None,
    C: Tensor,
    dt: Tensor,
    *,
    conj_pairs: bool = True,
    D: Tensor | None = None,
    discretization: Discretization = "zoh",
    bidirectional: bool = False,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    length: int | None = None,
    position: int = 0,
    detach_maximum: bool = False,
    backend: Literal["auto", "torch"] = "torch",
    toeplitz_max_length: int = TOEPLITZ_MAX_LENGTH,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D] in the dtype of u and, on request, the final state [B, D, N], else None; see `lti_ssm`.

    backend: how the filter is made and applied.   toeplitz_max_length: longest sequence for a Toeplitz product.
    """
    dtype, steps = u.dtype, u.shape[1]
    wide = torch.promote_types(u.dtype, filter_dtype(A, B, C, dt))
    filter_of = partial(
        ssm_kernel, A, B, dt=dt, length=steps, conj_pairs=conj_pairs, discretization=discretization,
        normalize_over=length, detach_maximum=detach_maximum, backend=backend,
    )  # fmt: skip
    forward = filter_of(C[0] if bidirectional else C)
    with_states = initial_state is not None or return_final_state
    if steps > toeplitz_max_length and not bidirectional and not with_states:
        return fft_conv(u, forward, D=D, gate_in=gate_in, gate_out=gate_out, backend=backend), None
    v = u.to(wide) if gate_in is None else gate_in.to(wide) * u.to(wide)
    if D is not None:
        forward = with_skip(forward.to(wide), D.to(wide))
    y = _convolve(
        v, forward.to(wide), filter_of(C[1]).to(wide) if bidirectional else None, toeplitz_max_length, backend
    )
    state = None
    if with_states:
        states = _SoftmaxStates if discretization == "dss-softmax" else _States
        system = states(
            A,
            B,
            C,
            dt,
            discretization=discretization,
            steps=steps,
            length=length or steps,
            position=position,
            real=wide,
        )
        if initial_state is not None:
            initial_state = initial_state.to(system.dtype)
            y = y + (2.0 if conj_pairs else 1.0) * system.response(initial_state)
        if return_final_state:
            state = system.final(v, initial_state)
    return (y if gate_out is None else gate_out.to(wide) * y).to(dtype), state


def _convolve(
    v: Tensor, forward: Tensor, backward: Tensor | None, toeplitz_max_length: int, backend: Literal["auto", "torch"]
) -> Tensor:
    """v [B, T, D] convolved with `forward` [D, T] at lags 0, 1, ... and `backward` [D, T] at lags -1, -2, ..."""
    steps = v.shape[1]
    if steps <= toeplitz_max_length:
        past = backward.flip(-1)[:, 1:] if backward is not None else forward.new_zeros(forward.shape[0], steps - 1)
        # windows[d, t, s] is the tap at lag t - (T - 1 - s): the Toeplitz matrix for inputs in reversed time
        windows = torch.cat([past, forward], dim=1).unfold(1, steps, 1)
        return torch.matmul(windows, v.flip(1).permute(2, 1, 0)).permute(2, 1, 0)
    size = fast_length(2 * steps - 1)
    taps = forward
    if backward is not None:
        gap = forward.new_zeros(forward.shape[0], size - 2 * steps + 1)
        taps = torch.cat([forward, gap, backward[:, : steps - 1].flip(-1)], dim=1)
    return circular_conv(v, taps, size, backend)


def powers_sum(v: Tensor, z: Tensor) -> Tensor:
    """sum_t exp(z (T - 1 - t)) v_t: v [B, T, D], z [D, N] in float64, to [B, D, N]."""
    batch, steps, width = v.shape
    inner = math.isqrt(steps - 1) + 1
    outer = -(-steps // inner)
    # zeros in front carry the oldest, highest powers
    blocks = F.pad(v, (0, 0, outer * inner - steps, 0)).view(batch, outer, inner, width)
    blocks = blocks.permute(3, 0, 1, 2).reshape(width, batch * outer, inner)
    j = torch.arange(inner - 1, -1, -1, device=z.device, dtype=torch.float64)
    i = torch.arange(outer - 1, -1, -1, device=z.device, dtype=torch.float64) * inner
    kind = torch.promote_types(v.dtype, torch.complex64) if z.is_complex() else v.dtype
    near = torch.exp(z.unsqueeze(1) * j[:, None]).to(kind)
    if z.is_complex():
        partial = torch.matmul(blocks, torch.view_as_real(near).flatten(-2))
        partial = torch.view_as_complex(partial.unflatten(-1, (-1, 2)))
    else:
        partial = torch.matmul(blocks, near)
    partial = partial.unflatten(1, (batch, outer))
    return (partial * torch.exp(z[:, None, None] * i[:, None]).to(kind)).sum(2).transpose(0, 1)


class _States:
    """Response to an initial state and the final state, for every discretization but dss-softmax.

    steps: T.   length, position: those of `lti_ssm`, used by dss-softmax.   real: dtype of outputs and states, complex
    states in the complex dtype of that precision.
    """

    def __init__(
        self,
        A: Tensor,
        B: Tensor | None,
        C: Tensor,
        dt: Tensor,
        *,
        discretization: str,
        steps: int,
        length: int,
        position: int,
        real: torch.dtype,
    ) -> None:
        self.steps, self.length, self.position, self.real = steps, length, position, real
        self.dtype = state_dtype(A, B, C, real)
        A, B, C, dt, _ = widen(A, B, C, dt)
        self._discretize(A, B, C, dt, discretization)

    def _discretize(self, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, discretization: str) -> None:
        self.log_abar, scale = discretize(A, dt, discretization)
        self.weight = C
        parts = [part for part in (scale, B) if part is not None]
        self.bbar = parts[0] * parts[1] if len(parts) == 2 else (parts[0] if parts else None)

    def response(self, state: Tensor) -> Tensor:
        """Outputs [B, T, D] in response to an initial state [B, D, N], without the factor of conjugate pairs."""
        weight = (self.weight * torch.exp(self.log_abar) * state).transpose(0, 1)
        return vandermonde_product(weight, self.log_abar, self.steps, self.real).permute(1, 2, 0)

    def final(self, v: Tensor, state: Tensor | None) -> Tensor:
        """The state [B, D, N] after inputs v [B, T, D] that follow an initial state (None: zeros)."""
        total = powers_sum(v, self.log_abar)
        total = total if self.bbar is None else total * self.bbar
        if state is not None:
            total = total + torch.exp(self.log_abar * self.steps) * state
        # a negative Abar has a complex logarithm, also in a real system
        return (total.real if total.is_complex() and not self.dtype.is_complex else total).to(self.dtype)


class _SoftmaxStates(_States):
    """The same for dss-softmax, whose state is scaled as described in the docstring of `kernels.lti_ssm`."""

    def _discretize(self, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, discretization: str) -> None:
        self.grows, self.z, scale = split_softmax(A, dt, self.length)
        weight = C if B is None else C * B
        self.weight = weight * scale

    def response(self, state: Tensor) -> Tensor:
        weight = (self.weight * state).transpose(0, 1)
        grows, zero = self.grows.unsqueeze(1), torch.zeros_like(weight)
        z = self.z.unsqueeze(1)
        falling = torch.where(grows, zero, weight * torch.exp(z))
        left = self.length - self.position - self.steps
        rising = torch.where(grows, weight * torch.exp(z * left), zero)
        falling, rising = (vandermonde_product(part, self.z, self.steps, self.real) for part in (falling, rising))
        return (falling + rising.flip(-1)).permute(1, 2, 0)

    def final(self, v: Tensor, state: Tensor | None) -> Tensor:
        falling = powers_sum(v, self.z)
        rising = powers_sum(v.flip(1), self.z) * torch.exp(self.z * self.position)
        if state is not None:
            falling, rising = falling + torch.exp(self.z * self.steps) * state, rising + state
        return torch.where(self.grows, rising, falling).to(self.dtype)


def state_dtype(A: Tensor, B: Tensor | None, C: Tensor, real: torch.dtype) -> torch.dtype:
    """dtype of the states: complex where any part of the system is, in the precision of `real`."""
    is_complex = any(m is not None and m.is_complex() for m in (A, B, C))
    return torch.promote_types(real, torch.complex64) if is_complex else real
