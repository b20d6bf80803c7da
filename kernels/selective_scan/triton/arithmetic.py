"""Elementwise arithmetic of the scan kernels: exponentials, step sizes, and sums and products of tuples of tensors."""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _decay(b_x, PRECISE: tl.constexpr):
    """exp(x) if PRECISE, else 2^x: one special function, with twice the error, which a thousand steps add up."""
    return libdevice.exp(b_x) if PRECISE else tl.exp2(b_x)


@triton.jit
def _sigmoid(b_x, PRECISE: tl.constexpr):
    if PRECISE:
        b_sigmoid = 1.0 / (1.0 + libdevice.exp(-b_x))
    else:
        # one special function and one product: a division would bring the handling of subnormal numbers
        b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -LOG2E))
        b_sigmoid = b_root * b_root
    return b_sigmoid


@triton.jit
def _softplus(b_x, PRECISE: tl.constexpr):
    """max(x, 0) + log(1 + w), w = exp(-|x|), by a polynomial log(1 + w) / w of relative error 3e-8."""
    b_w = _decay(-tl.abs(b_x) if PRECISE else tl.abs(b_x) * -LOG2E, PRECISE)
    b_p = 0.00523269069 * b_w - 0.0295052289
    b_p = b_p * b_w + 0.0782259443
    b_p = b_p * b_w - 0.13663246
    b_p = b_p * b_w + 0.191060074
    b_p = b_p * b_w - 0.248429826
    b_p = b_p * b_w + 0.333190969
    b_p = b_p * b_w - 0.499994931
    b_p = b_p * b_w + 0.99999997
    return tl.maximum(b_x, 0.0) + b_p * b_w


@triton.jit
def _step_size(b_dt, b_bias, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    b_dt = b_dt.to(tl.float32) + b_bias
    return _softplus(b_dt, PRECISE) if SOFTPLUS else b_dt


@triton.jit
def _step_sizes(steps, b_bias, m_t, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    """Of each channel; a step size of zero leaves the state as it is."""
    sizes = ()
    for c in tl.static_range(len(steps)):
        sizes += (tl.where(m_t, _step_size(steps[c], b_bias[c], SOFTPLUS, PRECISE), 0.0),)
    return sizes


@triton.jit
def _zeros(NUM: tl.constexpr, E: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(NUM):
        zeros += (tl.zeros([E], tl.float32),)
    return zeros


@triton.jit
def _scaled(values, factor):
    scaled = ()
    for i in tl.static_range(len(values)):
        scaled += (values[i] * factor,)
    return scaled


@triton.jit
def _in_float32(values):
    wide = ()
    for i in tl.static_range(len(values)):
        wide += (values[i].to(tl.float32),)
    return wide


@triton.jit
def _sums(left, right):
    sums = ()
    for i in tl.static_range(len(left)):
        sums += (left[i] + right[i],)
    return sums


@triton.jit
def _products(left, right):
    products = ()
    for i in tl.static_range(len(left)):
        products += (left[i] * right[i],)
    return products


@triton.jit
def _both(masks, m):
    both = ()
    for i in tl.static_range(len(masks)):
        both += (masks[i] & m,)
    return both


@triton.jit
def _dots(row, h, NT: tl.constexpr):
    """sum_n row[n] h[n] of each channel, in two chains."""
    dots = ()
    for c in tl.static_range(len(h) // NT):
        b_even = row[c * NT] * h[c * NT]
        b_odd = row[c * NT + 1] * h[c * NT + 1]
        for n in tl.static_range(2, NT, 2):
            b_even += row[c * NT + n] * h[c * NT + n]
            b_odd += row[c * NT + n + 1] * h[c * NT + n + 1]
        dots += (b_even + b_odd,)
    return dots


@triton.jit
def _add(sums, states, factors, NT: tl.constexpr):
    added = ()
    for i in tl.static_range(len(sums)):
        added += (sums[i] + states[i] * factors[i // NT],)
    return added


@triton.jit
def _over_channels(states, factors, NT: tl.constexpr):
    """sum_c states[c, n] factors[c], the channels of a thread."""
    sums = ()
    for n in tl.static_range(NT):
        b_sum = states[n] * factors[0]
        for c in tl.static_range(1, len(factors)):
            b_sum += states[c * NT + n] * factors[c]
        sums += (b_sum,)
    return sums


@triton.jit
def _advance(h, a, b_dt, b_u, row_b, NT: tl.constexpr, PRECISE: tl.constexpr):
    new_h = ()
    for i in tl.static_range(len(h)):
        new_h += (_decay(b_dt[i // NT] * a[i], PRECISE) * h[i] + b_u[i // NT] * row_b[i],)
    return new_h
