"""The long convolution in Triton as a differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.fft_conv.chunked import fft_conv_chunked
from subquad.kernels.fft_conv.triton.chunks_gradient import chunks_gradient
from subquad.kernels.fft_conv.triton.epilogue import Epilogue, Outputs
from subquad.kernels.fft_conv.triton.gates import Gated, gated
from subquad.kernels.fft_conv.triton.inner_stage import LongTaps, conv_long, conv_long_backward, long_taps
from subquad.kernels.fft_conv.triton.plan import (
    TUNING,
    Operands,
    Tuning,
    has_kernels,
    operands_of,
    takes_halves,
    takes_long,
    takes_spectra,
    toeplitz_plan,
)
from subquad.kernels.fft_conv.triton.products import ShiftedTaps, conv_products, shifted_taps
from subquad.kernels.fft_conv.triton.spectra import TapsSpectra, conv_spectra, taps_spectra
from subquad.kernels.fft_conv.triton.taps_gradient import taps_gradient
from subquad.kernels.layout import places_in_one
from subquad.kernels.transpose import time_last

Taps = ShiftedTaps | TapsSpectra | LongTaps
"""The taps in the layout of one of the three algorithms."""


def prepare_taps(
    source: Gated, filter: Tensor, skip: Tensor | None, lags: int, operands: Operands, tuning: Tuning = TUNING
) -> Taps:
    """The first `lags` taps of filter [D, L] for the algorithm that convolves `source`."""
    batch, length, _ = source.x.shape
    if takes_spectra(batch, source.product.shape[1], source.product.dtype, lags, tuning):
        return taps_spectra(filter, length, lags)
    if takes_long(length, source.product.dtype, lags, tuning):
        return long_taps(filter, length, lags)
    return shifted_taps(filter, skip, lags, toeplitz_plan(batch, length, lags, operands))


def convolve(source: Gated, taps: Taps, epilogue: Epilogue, reverse: bool, outputs: Outputs | None = None) -> Outputs:
    """The convolution (or with `reverse` the correlation) of `source` with the taps, and the outputs of `epilogue`.

    outputs: where products write their results (`conv_products`).
    """
    if isinstance(taps, TapsSpectra):
        return conv_spectra(source, taps, epilogue, reverse)
    if isinstance(taps, LongTaps):
        return conv_long(source, taps, epilogue, reverse)
    return conv_products(source, taps, epilogue, reverse, outputs)


def empty_like_streams(*streams: Tensor | None) -> list[Tensor] | None:
    """Empty tensors that lie in one tensor as the streams [B, T, D] do, with time contiguous; None: they do not."""
    given = [stream for stream in streams if stream is not None]
    places = places_in_one(given) if len(given) == len(streams) else None
    if places is None:
        return None
    first = given[0]
    batch, length, width = first.shape
    num, size = len(given), length * width
    if first.stride() != (num * size, 1, length):
        return None
    if sorted(places) != list(range(min(places), min(places) + num * size, size)):
        return None
    whole = torch.empty(batch, num, width, length, dtype=first.dtype, device=first.device)
    return [whole[:, (place - min(places)) // size].transpose(1, 2) for place in places]


class FftConv(OnceDifferentiable):
    """(u, filter, skip, gate_in, gate_out) and a `Tuning` to y."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        filter: Tensor,
        skip: Tensor | None,
        gate_in: Tensor | None,
        gate_out: Tensor | None,
        tuning: Tuning,
    ) -> Tensor:
        (y, plain, _), source, taps, ctx.operands = fft_conv_fwd(
            u, filter, skip, gate_in, gate_out, tuning, with_plain=gate_out is not None
        )
        # the fields of a taps object are tensors and then plain values
        ctx.kind, ctx.tuning, ctx.lags = type(taps), tuning, min(u.shape[1], filter.shape[1])
        num_tensors = sum(isinstance(part, Tensor) for part in taps)
        ctx.facts = taps[num_tensors:]
        # halves of an input without a gate are all that the backward pass reads of it
        x = None if ctx.operands is Operands.HALVES and gate_in is None else source.x
        tensors = (source.product, x, source.gate, source.rest, source.scale)
        save(ctx, *tensors, plain, gate_out, filter, skip, *taps[:num_tensors])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """With g = gate_out dy: dx = correlation of g with the taps, du = gate_in dx, dgate_in = u dx, and dgate_out =
        dy conv; the gradients of taps and skip from x and g."""
        x, u, gate_in, rest, scale, plain, gate_out, filter, skip, *tensors = saved(ctx)
        taps, source = ctx.kind(*tensors, *ctx.facts), Gated(x, u, gate_in, rest, scale)
        lags, length, with_gates = ctx.lags, dy.shape[1], gate_in is not None or gate_out is not None
        in_halves = ctx.operands is Operands.HALVES
        # with rounded factors the gradient of the skip, that of a single lag, would lose too much
        is_rounded = with_gates and ctx.operands.num_terms == 1
        direct = source if skip is not None and is_rounded else None
        dy = dy if in_halves and gate_out is None else time_last(dy)
        # streams of one tensor have their gradients in one tensor, so that autograd need not join them
        streams = empty_like_streams(gate_out, gate_in, u) if isinstance(taps, ShiftedTaps) else None
        into, outputs = None, None
        if streams is not None:
            into, outputs = streams[0], Outputs(streams[2], None, streams[1])
        g, dgate_out, dskip = gated(dy, gate_out, ctx.operands, plain, direct, into)
        epilogue = Epilogue(skip=skip, scale=gate_in, other=None if gate_in is None else u)
        needs_taps = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dfilter, dtaps = None, None
        if needs_taps and isinstance(taps, LongTaps):
            (du, _, dgate_in), dtaps = conv_long_backward(x, g, taps, epilogue, lags)
        else:
            du, _, dgate_in = convolve(g, taps, epilogue, reverse=True, outputs=outputs)
            if needs_taps:
                is_few = lags <= ctx.tuning.diagonal_lags and x.dtype == g.product.dtype == torch.bfloat16
                if is_few or source.rest is not None or g.rest is not None:
                    dtaps = chunks_gradient(source, g, length, lags)
                else:
                    dtaps = taps_gradient(x, g.product, length, lags)
        if dtaps is not None:
            dfilter = dtaps.to(filter.dtype)
            if lags < filter.shape[1]:
                dfilter = torch.nn.functional.pad(dfilter, (0, filter.shape[1] - lags))
            if skip is not None:
                dskip = (dtaps[:, 0] if dskip is None else dskip).to(skip.dtype)
        return du, dfilter, dskip, dgate_in, dgate_out, None


def fft_conv_fwd(
    u: Tensor,
    filter: Tensor,
    skip: Tensor | None,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    tuning: Tuning,
    with_plain: bool,
) -> tuple[Outputs, Gated, Taps, Operands]:
    """The outputs of the convolution, and the inputs, taps and operands as the kernels took them."""
    lags = min(u.shape[1], filter.shape[1])
    operands = operands_of(u.dtype, u.shape[1], lags, tuning)
    source, _, _ = gated(u, gate_in, operands)
    taps = prepare_taps(source, filter, skip, lags, operands, tuning)
    epilogue = Epilogue(skip=skip, scale=gate_out, with_plain=with_plain)
    return convolve(source, taps, epilogue, reverse=False), source, taps, operands


def fft_conv_triton(
    u: Tensor,
    filter: Tensor,
    *,
    D: Tensor | None = None,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
    tuning: Tuning = TUNING,
) -> Tensor:
    """y [B, T, D] in the dtype of u, with time contiguous unless the filter has more taps than the kernels take."""
    length, lags = u.shape[1], min(u.shape[1], filter.shape[1])
    if not has_kernels(length, u.dtype, lags, tuning):
        return fft_conv_chunked(u, filter, D=D, gate_in=gate_in, gate_out=gate_out, backend="triton")
    if gate_in is not None or not takes_halves(length, u.dtype, tuning):
        # halves of an input without a gate are written from any layout
        u = time_last(u)
    gate_in, gate_out = (None if gate is None else time_last(gate) for gate in (gate_in, gate_out))
    skip = None if D is None else D.contiguous()
    tensors = (u, filter, skip, gate_in, gate_out)
    if needs_gradient(*tensors):
        return FftConv.apply(*tensors, tuning)
    return fft_conv_fwd(*tensors, tuning, with_plain=False)[0].y
