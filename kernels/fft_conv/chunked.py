"""The long convolution by real FFTs of a fast length, at least T + L - 1 so that nothing wraps around."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=1024)
def fast_length(minimum: int) -> int:
    """The smallest even 2^a 3^b 5^c >= minimum, which FFT libraries transform without a fallback."""
    best = 1 << max(1, (minimum - 1).bit_length())
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


def circular_conv(v: Tensor, taps: Tensor, size: int) -> Tensor:
    """The first T outputs of the circular convolution of length `size`: v [B, T, D], taps [D, <= size]."""
    # transforms run along the last axis: contiguous rows beat strided ones on every library
    product = torch.fft.rfft(v.transpose(1, 2), n=size) * torch.fft.rfft(taps, n=size)
    return torch.fft.irfft(product, n=size)[..., : v.shape[1]].transpose(1, 2)


def fft_conv_chunked(
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None = None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> Tensor:
    """y [B, T, D] in the dtype of u; half-precision arguments are computed in float32."""
    length, dtype = u.shape[1], u.dtype
    wide = torch.promote_types(torch.promote_types(u.dtype, filter.dtype), torch.float32)
    v = u.to(wide) if gate_in is None else gate_in.to(wide) * u.to(wide)
    taps = filter[:, :length].to(wide)
    if D is not None:
        # the skip is the tap at lag zero
        taps = torch.cat([taps[:, :1] + D.to(wide).unsqueeze(1), taps[:, 1:]], dim=1)
    y = circular_conv(v, taps, fast_length(length + taps.shape[1] - 1))
    return (y if gate_out is None else gate_out.to(wide) * y).to(dtype)
