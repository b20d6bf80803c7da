"""The long convolution by real FFTs of a fast length, at least T + L - 1 so that nothing wraps around.

Gradients are correlations: with X, H and G the spectra of inputs, taps and dy, dx = IFFT(conj(H) G) and dtaps =
IFFT(sum over sequences of conj(X) G), so that G is transformed once for both. PyTorch's own derivative of a real
transform is a complex transform of twice the size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import Function, OnceDifferentiable, needs_gradient, not_saved
from subquad.kernels.backend import chooses_triton, on_device_of, record


@lru_cache(maxsize=1024)
def fast_length(minimum: int) -> int:
    """The smallest even 2^a 3^b 5^c >= minimum, which FFT libraries transform without a fallback.

    A power of two that is at most a sixteenth longer is taken instead: cuFFT takes half the time (4096 for 4000).
    """
    best = 1 << max(1, (minimum - 1).bit_length())
    if 16 * best <= 17 * minimum:
        return best
    fives = 1
    while fives < best:
        threes = fives
        while threes < best:
            candidate = 2 * threes
            while candidate < minimum:
                candidate *= 2
            best = min(best, candidate)
            threes *= 3
        fives *= 5
    return best


def _transformed(v: Tensor, taps: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The circular convolution [B, D, size] of v [B, D, <= size] and taps [D, <= size], and the spectra of both."""
    # the taps, which have the fewest elements, take the factor 1 / size of the inverse
    x_hat, h_hat = torch.fft.rfft(v, n=size), torch.fft.rfft(taps, n=size, norm="forward")
    return torch.fft.irfft(x_hat * h_hat, n=size, norm="forward"), x_hat, h_hat


def correlated(x_hat: Tensor, g_hat: Tensor, size: int) -> Tensor:
    """IFFT(sum over sequences of conj(X) G), [D, size]; G is overwritten."""
    # computed as conj(sum of X conj(G)): the conjugate of the sum has only [D, size / 2 + 1] elements
    return torch.fft.irfft(g_hat.conj_physical_().mul_(x_hat).sum(0).conj(), n=size)


class WithSkip(Function):
    """`with_skip`, whose gradients are views of one tensor."""

    @staticmethod
    def forward(ctx: Any, taps: Tensor, skip: Tensor) -> Tensor:
        whole = taps.clone()
        whole[:, 0].add_(skip)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient[:, 0]


def with_skip(taps: Tensor, skip: Tensor) -> Tensor:
    """Taps [D, L] that include a skip [D], which is a tap at lag zero."""
    return WithSkip.apply(taps, skip)


class CircularConv(OnceDifferentiable):
    """`_transformed` with its gradients."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, taps: Tensor, size: int) -> Tensor:
        y, x_hat, h_hat = _transformed(v, taps, size)
        ctx.save_for_backward(x_hat if ctx.needs_input_grad[1] else None, h_hat)
        not_saved(ctx, v, taps)
        ctx.steps, ctx.lags, ctx.size = v.shape[-1], taps.shape[-1], size
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, h_hat = ctx.saved_tensors
        g_hat = torch.fft.rfft(dy, n=ctx.size)
        dv = dtaps = None
        if ctx.needs_input_grad[0]:
            dv = torch.fft.irfft(g_hat * h_hat.conj(), n=ctx.size, norm="forward")[..., : ctx.steps]
        if x_hat is not None:
            dtaps = correlated(x_hat, g_hat, ctx.size)[:, : ctx.lags]
        return dv, dtaps, None


def circular_conv(v: Tensor, taps: Tensor, size: int, backend: Literal["auto", "torch", "triton"] = "torch") -> Tensor:
    """The first T steps of the circular convolution of length `size`: v [B, T, D], taps [D, <= size] to [B, T, D].

    backend: of the passes between the transforms, in float32.
    """
    if not v.numel():
        # libraries refuse a batch of no transforms; the product has the right shape and passes zeros back to the taps
        return v * taps[:, 0]
    if chooses_triton("fft_conv", backend, v, taps):
        from subquad.kernels.fft_conv.triton.half_size import half_size_conv

        record("fft_conv", "triton")
        with on_device_of(v):
            return half_size_conv(v, taps, size)
    # transforms run along the last axis
    x = v.transpose(1, 2)
    # without a gradient no autograd function, which takes the host as long as a short transform
    y = CircularConv.apply(x, taps, size) if needs_gradient(v, taps) else _transformed(x, taps, size)[0]
    # sliced outside of the function, because a view that it returns could not be changed in place
    return y[..., : v.shape[1]].transpose(1, 2)


def fft_conv_chunked(
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None = None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    backend: Literal["auto", "torch", "triton"] = "torch",
) -> Tensor:
    """y [B, T, D] in the dtype of u; half-precision arguments are computed in float32."""
    length, dtype = u.shape[1], u.dtype
    wide = torch.promote_types(torch.promote_types(u.dtype, filter.dtype), torch.float32)
    v = u.to(wide) if gate_in is None else gate_in.to(wide) * u.to(wide)
    # the gradient of a slice is a copy, also where the slice is all
    taps = (filter if filter.shape[1] <= length else filter[:, :length]).to(wide)
    if D is not None:
        taps = with_skip(taps, D.to(wide))
    y = circular_conv(v, taps, fast_length(length + taps.shape[1] - 1), backend)
    return (y if gate_out is None else gate_out.to(wide) * y).to(dtype)
