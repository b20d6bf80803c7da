"""The selective scan in plain PyTorch with its own gradient; it holds the states of one segment of time at a time.

Time is cut into segments that pass their state on. Inside a segment all decays a_t = exp(dt_t A) are computed at once,
and the recurrence h_t = a_t h_{t-1} + b_t with b_t = dt_t x_t B_t runs in place. On a CPU it runs step by step, so that
a segment stays in the cache. On an accelerator it runs in blocks, with O(sqrt(segment)) launches: each block is reduced
to its own decay and contribution, these are scanned over the blocks, and then all blocks run in parallel from their
true starts. Only exp(dt A) is ever formed, so with Re(A) < 0 nothing overflows.

Backward keeps the states at the starts of segments and recomputes the others. With g_t the gradient of h_t and
r_t = conj(a_t) g_t that of h_{t-1} through the decay,

    g_t = conj(C_t) dy_t + r_{t+1};   r_t = conj(a_t) (conj(C_t) dy_t + r_{t+1})

is the same recurrence in reversed time. The gradient of dt_t A is r_t conj(h_{t-1}), and that of b_t is g_t. With
`negative_eigenvalues`, a_t = 2 exp(dt_t A) - 1, and the gradient of dt_t A is (r_t + g_t) h_{t-1}, since the derivative
of a_t is a_t + 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable


@dataclass(frozen=True)
class Schedule:
    """Division of time into segments. It changes memory and speed and, apart from rounding, no result."""

    segment_elements: int
    """Target number of elements of a [segment, batch, width, N] buffer."""
    min_segment: int
    """Minimum length of a segment, unless the sequence is shorter."""
    blocks: bool
    """Whether a segment is cut into blocks that run side by side."""

    def cut(self, length: int, step_elements: int) -> tuple[int, int]:
        """Steps of a segment and steps of a block, for `step_elements` state elements a step of time.

        A segment is a whole number of blocks. There may be no element, as in an empty batch.
        """
        segment = min(length, max(self.min_segment, self.segment_elements // max(1, step_elements)))
        if not self.blocks:
            return segment, segment
        # a step costs two sequential passes inside the blocks, and a block one pass of the scan over blocks
        block = min(segment, max(8, 1 << round(math.log2(math.sqrt(segment / 2)))))
        return -(-segment // block) * block, block


HOST = Schedule(segment_elements=1 << 21, min_segment=16, blocks=False)
"""Buffers of 8 MiB in float32, the fastest size on a CPU (LOG.md)."""
DEVICE = Schedule(segment_elements=1 << 25, min_segment=16, blocks=True)
"""Buffers of 128 MiB in float32, and few launches."""


def selective_scan_chunked(
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
    negative_eigenvalues: bool = False,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """y [batch, length, width] and the final state [batch, width, N]; the computation is at least in float32.

    Shapes are those of `selective_scan`. schedule: None takes HOST for CPU tensors and DEVICE for others.
    """
    real = torch.promote_types(torch.promote_types(x.dtype, A.real.dtype), torch.float32)
    state_dtype = functools.reduce(
        torch.promote_types, (m.dtype for m in (A, B, C, initial_state) if m is not None), real
    )
    inputs, step = x.to(real), dt.to(real)
    if dt_bias is not None:
        step = step + dt_bias.to(real)
    if dt_softplus:
        step = F.softplus(step)
    if initial_state is None:
        initial_state = torch.zeros(x.shape[0], *A.shape, dtype=state_dtype, device=x.device)
    if schedule is None:
        schedule = HOST if x.device.type == "cpu" else DEVICE
    wide = (m.to(state_dtype) for m in (A, B, C, initial_state))
    y, state = _Scan.apply(step * inputs, step, *wide, negative_eigenvalues, schedule)
    if D is not None:
        y = y + D.to(real) * inputs
    if z is not None:
        y = y * F.silu(z.to(real))
    return y.to(x.dtype), state


def _scan_(decay: Tensor, value: Tensor, start: Tensor, block: int, *, reverse: bool = False) -> None:
    """value_t <- decay_t value_{t-1} + value_t along axis 0, in place, with `start` before the first step.

    reverse: time runs backward, with `start` behind the last step. The length is a multiple of `block`.
    """
    num_blocks = value.shape[0] // block
    decays = decay.unflatten(0, (num_blocks, block)).unbind(1)
    values = value.unflatten(0, (num_blocks, block)).unbind(1)
    if reverse:
        decays, values = decays[::-1], values[::-1]
    if num_blocks == 1:
        previous = start.unsqueeze(0)
    else:
        product, total = decays[0].clone(), values[0].clone()
        for a, v in zip(decays[1:], values[1:], strict=True):
            product.mul_(a)
            total = torch.addcmul(v, a, total)
        previous = torch.empty_like(total)
        order = range(num_blocks - 1, -1, -1) if reverse else range(num_blocks)
        carry = start
        for p in order:
            previous[p] = carry
            carry = torch.addcmul(total[p], product[p], carry)
    for a, v in zip(decays, values, strict=True):
        v.addcmul_(a, previous)
        previous = v


def _time_first(tensor: Tensor, begin: int, end: int, padded: int) -> Tensor:
    """Steps begin .. end - 1 of [batch, length, ...] as contiguous [padded, batch, ...], with zeros behind the end.

    Such a step has dt = 0 and changes no state.
    """
    part = tensor[:, begin:end].transpose(0, 1)
    missing = padded - (end - begin)
    if missing:
        part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
    return part.contiguous()


def _with_padding(size: int, block: int) -> tuple[int, int]:
    """Steps of a segment padded to whole blocks, and steps of its blocks. A segment of one block needs no padding."""
    return (size, size) if block >= size else (-(-size // block) * block, block)


def _real_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The real part of a complex tensor if `like` is real, else the tensor."""
    return tensor.real if tensor.is_complex() and not like.is_complex() else tensor


class _Scan(OnceDifferentiable):
    """h_t = a_t h_{t-1} + u_t B_t and y_t = Re(sum_n C_t h_t), from u = dt x and dt [batch, length, width].

    A, B, C and the initial state have the dtype of the states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        initial_state: Tensor,
        negative: bool,
        schedule: Schedule,
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = u.shape
        segment, block = schedule.cut(length, batch * A.numel())
        outputs, starts, state = [], [], initial_state
        for begin in range(0, length, segment):
            end = min(begin + segment, length)
            padded, this_block = _with_padding(end - begin, block)
            starts.append(state)
            part = _Segment(u, dt, A, B, C, begin, end, padded, negative)
            states = part.states(state, this_block)[1:]
            y = _contract(states, part.C)
            outputs.append((y.real if y.is_complex() else y)[: end - begin].transpose(0, 1))
            state = states[-1].clone()
        ctx.save_for_backward(u, dt, A, B, C, *starts)
        ctx.negative, ctx.segment, ctx.block = negative, segment, block
        return torch.cat(outputs, dim=1), state

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        u, dt, A, B, C, *starts = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(u.device.type, enabled=False):
            gradients = _backward(u, dt, A, B, C, starts, dy, dstate, ctx.negative, ctx.segment, ctx.block)
        return *gradients, None, None


class _Segment:
    """The arguments of one segment with time as their first axis, and its decays."""

    def __init__(
        self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, begin: int, end: int, padded: int, negative: bool
    ) -> None:
        self.u, self.dt = (_time_first(m, begin, end, padded) for m in (u, dt))
        # [steps, batch, N], or [width, N] where they do not depend on the input
        self.B, self.C = (_time_first(m, begin, end, padded) if m.ndim == 3 else m for m in (B, C))
        self.decay = (self.dt.unsqueeze(-1) * A).exp_()
        if negative:
            self.decay.mul_(2).sub_(1)

    def states(self, start: Tensor, block: int) -> Tensor:
        """The start and the state after every step, [steps + 1, batch, width, N]."""
        states = start.new_empty(len(self.u) + 1, *start.shape)
        states[0] = start
        torch.mul(self.u.unsqueeze(-1), _over_width(self.B), out=states[1:])
        _scan_(self.decay, states[1:], start, block)
        return states


def _over_width(m: Tensor) -> Tensor:
    """A map with an axis for the channels: [steps, batch, 1, N] or [width, N]."""
    return m.unsqueeze(-2) if m.ndim == 3 else m


def _contract(states: Tensor, m: Tensor) -> Tensor:
    """sum_n states[..., d, n] m[..., n] for a map [steps, batch, N], or with m[d, n] for a map [width, N]."""
    if m.ndim == 3:
        return torch.matmul(states, m.unsqueeze(-1)).squeeze(-1)
    return (states * m).sum(-1)


def _backward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    starts: list[Tensor],
    dy: Tensor,
    dstate: Tensor,
    negative: bool,
    segment: int,
    block: int,
) -> tuple[Tensor, ...]:
    """Gradients of the arguments of `_Scan` but the last, segment by segment in reversed time."""
    length = u.shape[1]
    du, ddt = torch.empty_like(u), torch.empty_like(dt)
    dA, dB, dC = torch.zeros_like(A), torch.zeros_like(B), torch.zeros_like(C)
    subscripts_b, subscripts_c = ("lbn" if m.ndim == 3 else "dn" for m in (B, C))
    gradient = dstate
    for index in range(len(starts) - 1, -1, -1):
        begin = index * segment
        end = min(begin + segment, length)
        size = end - begin
        padded, this_block = _with_padding(size, block)
        part = _Segment(u, dt, A, B, C, begin, end, padded, negative)
        states = part.states(starts[index], this_block)
        dy_part = _time_first(dy, begin, end, padded).to(A.dtype)
        u_part = part.u.to(A.dtype)
        dC_part = torch.einsum(f"lbd,lbdn->{subscripts_c}", dy_part, states[1:].conj())
        decay, conj_b, conj_c = part.decay.conj_physical(), part.B.conj(), part.C.conj()
        reverse = torch.empty_like(states)
        reverse[-1] = gradient
        torch.mul(dy_part.unsqueeze(-1), _over_width(conj_c), out=reverse[:-1])
        reverse[:-1].mul_(decay)
        _scan_(decay, reverse[:-1], gradient, this_block, reverse=True)
        dB_part = torch.einsum(f"lbd,lbdn->{subscripts_b}", u_part, reverse[1:])
        dB_part += torch.einsum(f"lbd,{subscripts_c}->{subscripts_b}", u_part * dy_part, conj_c)
        du_part = _contract(reverse[1:], conj_b) + dy_part * (_over_width(conj_c) * _over_width(conj_b)).sum(-1)
        gradient = reverse[0].clone()
        # the gradient of dt_t A
        exponent = reverse[:-1]
        if negative:
            exponent = exponent + reverse[1:] + dy_part.unsqueeze(-1) * _over_width(conj_c)
        exponent = exponent.mul_(states[:-1].conj())
        dA += torch.einsum("lbd,lbdn->dn", part.dt.to(A.dtype), exponent)
        ddt_part = (exponent * A.conj()).sum(-1)
        for whole, grad in ((du, du_part), (ddt, ddt_part)):
            whole[:, begin:end] = _real_like(grad, whole)[:size].transpose(0, 1)
        for whole, grad, subscripts in ((dB, dB_part, subscripts_b), (dC, dC_part, subscripts_c)):
            if subscripts == "dn":
                whole += grad
            else:
                whole[:, begin:end] = grad[:size].transpose(0, 1)
    return du, ddt, dA, dB, dC, gradient
