"""Elementwise arithmetic of the scan kernels.

A function whose name ends in `each` takes and returns tuples of tensors. A tuple has one tensor for each channel of a
thread, or one for each state of each channel, channel by channel, with NT states a channel.
"""

# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp_or_exp2(b_x, PRECISE: tl.constexpr):
    """exp(x) if PRECISE, else 2^x by the hardware's instruction, whose error is twice as large.

    Over the thousand steps that a state may remember this error adds up.
    """
    return libdevice.exp(b_x) if PRECISE else tl.exp2(b_x)


@triton.jit
def decay_of(b_x, PRECISE: tl.constexpr, NEGATIVE: tl.constexpr):
    """The factor of the state: exp(x), or 2 exp(x) - 1 if NEGATIVE, with x as `exp_or_exp2` takes it."""
    b_decay = exp_or_exp2(b_x, PRECISE)
    return 2.0 * b_decay - 1.0 if NEGATIVE else b_decay


@triton.jit
def sigmoid(b_x, PRECISE: tl.constexpr):
    """1 / (1 + exp(-x))."""
    if PRECISE:
        b_sigmoid = 1.0 / (1.0 + libdevice.exp(-b_x))
    else:
        # one special function and one product: a division would add the handling of subnormal numbers
        b_root = tl.rsqrt(1.0 + tl.exp2(b_x * -LOG2E))
        b_sigmoid = b_root * b_root
    return b_sigmoid


@triton.jit
def softplus(b_x, PRECISE: tl.constexpr):
    """log(1 + exp(x)) = max(x, 0) + log(1 + w) with w = exp(-|x|).

    log(1 + w) / w is a polynomial in w with a relative error of 3e-8.
    """
    b_w = exp_or_exp2(-tl.abs(b_x) if PRECISE else tl.abs(b_x) * -LOG2E, PRECISE)
    b_ratio = 0.00523269069 * b_w - 0.0295052289
    b_ratio = b_ratio * b_w + 0.0782259443
    b_ratio = b_ratio * b_w - 0.13663246
    b_ratio = b_ratio * b_w + 0.191060074
    b_ratio = b_ratio * b_w - 0.248429826
    b_ratio = b_ratio * b_w + 0.333190969
    b_ratio = b_ratio * b_w - 0.499994931
    b_ratio = b_ratio * b_w + 0.99999997
    return tl.maximum(b_x, 0.0) + b_ratio * b_w


@triton.jit
def step_size(b_dt, b_bias, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    """The step size in float32 from dt as it was given: dt + bias, through softplus if SOFTPLUS."""
    b_dt = b_dt.to(tl.float32) + b_bias
    return softplus(b_dt, PRECISE) if SOFTPLUS else b_dt


@triton.jit
def step_size_each(steps, b_bias, m_t, SOFTPLUS: tl.constexpr, PRECISE: tl.constexpr):
    """The step sizes of the channels, and zero where not m_t: a step of size zero does not change the state."""
    sizes = ()
    for c in tl.static_range(len(steps)):
        sizes += (tl.where(m_t, step_size(steps[c], b_bias[c], SOFTPLUS, PRECISE), 0.0),)
    return sizes


@triton.jit
def zero_each(NUM: tl.constexpr, E: tl.constexpr):
    """NUM tensors of E zeros."""
    zeros = ()
    for _ in tl.static_range(NUM):
        zeros += (tl.zeros([E], tl.float32),)
    return zeros


@triton.jit
def scale_each(values, factor):
    """values[i] factor."""
    scaled = ()
    for i in tl.static_range(len(values)):
        scaled += (values[i] * factor,)
    return scaled


@triton.jit
def float32_each(values):
    """values[i] in float32."""
    wide = ()
    for i in tl.static_range(len(values)):
        wide += (values[i].to(tl.float32),)
    return wide


@triton.jit
def add_each(left, right):
    """left[i] + right[i]."""
    sums = ()
    for i in tl.static_range(len(left)):
        sums += (left[i] + right[i],)
    return sums


@triton.jit
def multiply_each(left, right):
    """left[i] right[i]."""
    products = ()
    for i in tl.static_range(len(left)):
        products += (left[i] * right[i],)
    return products


@triton.jit
def and_each(masks, m):
    """masks[i] and m."""
    both = ()
    for i in tl.static_range(len(masks)):
        both += (masks[i] & m,)
    return both


@triton.jit
def multiply_add_each(sums, states, factors, NT: tl.constexpr):
    """sums[c, n] + states[c, n] factors[c]."""
    added = ()
    for i in tl.static_range(len(sums)):
        added += (sums[i] + states[i] * factors[i // NT],)
    return added


@triton.jit
def dot_each(row, h, NT: tl.constexpr):
    """sum_n row[c, n] h[c, n] for each channel c: the even and the odd terms apart, so that two sums are in flight."""
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
def sum_channels_each(states, factors, NT: tl.constexpr):
    """sum_c states[c, n] factors[c] for each state n, over the channels of a thread."""
    sums = ()
    for n in tl.static_range(NT):
        b_sum = states[n] * factors[0]
        for c in tl.static_range(1, len(factors)):
            b_sum += states[c * NT + n] * factors[c]
        sums += (b_sum,)
    return sums


@triton.jit
def next_state_each(h, a, b_dt, b_u, row_b, NT: tl.constexpr, PRECISE: tl.constexpr, NEGATIVE: tl.constexpr):
    """The recurrence: exp(dt[c] a[c, n]) h[c, n] + u[c] row_b[c, n] with u = dt x; see `decay_of`.

    a is A times log2(e) unless PRECISE, for the decay is 2^(dt a) then.
    """
    new_h = ()
    for i in tl.static_range(len(h)):
        new_h += (decay_of(b_dt[i // NT] * a[i], PRECISE, NEGATIVE) * h[i] + b_u[i // NT] * row_b[i],)
    return new_h
