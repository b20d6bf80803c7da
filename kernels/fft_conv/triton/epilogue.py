"""Steps from the sum over taps to the outputs, which are the same in both convolutions.

With conv = (sum over taps) + skip direct_gate direct,

    y = scale conv,    plain = conv in float32,    product = other conv

The input x of the convolution is direct_gate direct, which may be rounded; the skip uses the unrounded factors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.fft_conv.triton.gates import Gated
from subquad.kernels.layout import strides
from subquad.kernels.transpose import empty_time_last


@triton.jit
def finish(b_y, o_b, o_t, m_t, i_d, D, T, tensors, strides_b, strides_d, y_stride_b=None):
    """Adds the skip to b_y, the sums over taps, and stores the outputs; see the module docstring.

    b_y: one row for each sequence o_b and offset in time of o_t. m_t: mask of the elements that are in a sequence.
    tensors: the arguments that `tensor_arguments` names. strides_b, strides_d: strides of the four inputs among them.
    y_stride_b: distance of two sequences in all outputs; None: they are dense.
    """
    skip, direct, direct_gate, scale, other, y, plain, product = tensors
    direct_stride_b, direct_gate_stride_b, scale_stride_b, other_stride_b = strides_b
    direct_stride_d, direct_gate_stride_d, scale_stride_d, other_stride_d = strides_d
    o_y = (o_b * D + i_d)[:, None] * T + o_t
    if y_stride_b is not None:
        o_y = (o_b * y_stride_b + i_d * T)[:, None] + o_t
    if skip is not None:
        o_direct = (o_b * direct_stride_b + i_d * direct_stride_d)[:, None] + o_t
        b_x = tl.load(direct + o_direct, mask=m_t, other=0.0).to(tl.float32)
        if direct_gate is not None:
            o_direct = (o_b * direct_gate_stride_b + i_d * direct_gate_stride_d)[:, None] + o_t
            b_x *= tl.load(direct_gate + o_direct, mask=m_t, other=0.0).to(tl.float32)
        b_y += tl.load(skip + i_d).to(tl.float32) * b_x
    if plain is not None:
        tl.store(plain + o_y, b_y, mask=m_t)
    if product is not None:
        o_other = (o_b * other_stride_b + i_d * other_stride_d)[:, None] + o_t
        b_other = tl.load(other + o_other, mask=m_t, other=0.0).to(tl.float32)
        tl.store(product + o_y, (b_y * b_other).to(product.dtype.element_ty), mask=m_t)
    if scale is not None:
        o_scale = (o_b * scale_stride_b + i_d * scale_stride_d)[:, None] + o_t
        b_y *= tl.load(scale + o_scale, mask=m_t, other=0.0).to(tl.float32)
    tl.store(y + o_y, b_y.to(y.dtype.element_ty), mask=m_t)


class Epilogue(NamedTuple):
    """Factors of the outputs, see the module docstring; where a factor is None, its term is left out."""

    skip: Tensor | None = None
    """[D]."""
    scale: Tensor | None = None
    """[B, T, D], the output gate."""
    other: Tensor | None = None
    """[B, T, D]; where it is given, `product` is an output."""
    with_plain: bool = False
    """Whether `plain` is an output."""


class Outputs(NamedTuple):
    """Outputs of a convolution [B, T, D], time contiguous."""

    y: Tensor
    plain: Tensor | None
    product: Tensor | None


def empty_outputs(x: Tensor, epilogue: Epilogue) -> Outputs:
    """Empty outputs of the shape and dtype of x, dense; `plain` is float32."""
    return Outputs(
        empty_time_last(x),
        empty_time_last(x, torch.float32) if epilogue.with_plain else None,
        None if epilogue.other is None else empty_time_last(x),
    )


def tensor_arguments(source: Gated, epilogue: Epilogue, outputs: Outputs) -> dict[str, Any]:
    """The arguments of both convolutions' kernels from `skip` to `product`, by name and in their order."""
    with_skip = epilogue.skip is not None
    return {
        "skip": epilogue.skip,
        "direct": source.x if with_skip else None,
        "direct_gate": source.gate if with_skip else None,
        "scale": epilogue.scale,
        "other": epilogue.other,
        **outputs._asdict(),
    }


def stride_arguments(source: Gated, epilogue: Epilogue) -> dict[str, int]:
    """Their strides along B and D, by name and in their order."""
    tensors = {
        "x": source.product,
        "direct": source.x,
        "direct_gate": source.gate,
        "scale": epilogue.scale,
        "other": epilogue.other,
    }
    arguments = {}
    for name, tensor in tensors.items():
        arguments[f"{name}_stride_b"], arguments[f"{name}_stride_d"] = strides(tensor, 0, 2)
    return arguments
