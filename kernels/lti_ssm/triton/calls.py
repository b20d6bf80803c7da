"""What one call allocates and launches, and what calls on equal shapes share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from kernels.launch import Form, Launch, cdiv, num_processors, power_of_2, speaks_ptx
from kernels.lti_ssm.triton.backward import _lti_bwd_kernel
from kernels.lti_ssm.triton.forward import _lti_fwd_kernel
from kernels.lti_ssm.triton.plan import (
    TUNING,
    Plan,
    Tuning,
    _config,
    _constants,
    _inner,
    _padded,
    backward_plan,
    cheapest_plan,
)
from kernels.lti_ssm.triton.prepare import _prepare_bwd_kernel, _prepare_kernel


@overload
def _dense(x: Tensor) -> Tensor: ...
@overload
def _dense(x: Tensor | None) -> Tensor | None: ...
def _dense(x: Tensor | None) -> Tensor | None:
    return x if x is None or (x.is_contiguous() and not x.is_conj()) else x.resolve_conj().contiguous()


class CallPlan:
    """What calls with equal shapes, strides, dtypes and device share: plans, sizes to allocate, launches; no tensors.

    trained: whether a backward pass may follow.
    forms: shape, stride, dtype and device of u, both gates, the initial state, A, B, C, dt and D.
    launch_type: makes a launch from kernel, grid, numbers and constants.
    """

    def __init__(
        self,
        factor: float,
        rule: str,
        with_end: bool,
        trained: bool,
        *forms: Form,
        tuning: Tuning,
        launch_type: Callable[..., Launch] = Launch,
    ) -> None:
        self.tuning, self.launch_type = tuning, launch_type
        u, gate_in, gate_out, _, A, B, C, _, _ = forms
        assert u is not None
        assert A is not None
        (self.batch, self.length, self.width), _, self.dtype, device = u
        self.factor, self.rule, self.with_end, self.trained = factor, rule, with_end, trained
        # from sequence to sequence and from channel to channel
        self.strides = [(0, 0) if x is None else x[1][::2] for x in (u, gate_in, gate_out)]
        self.gated = gate_in is not None or gate_out is not None
        self.time_last = (self.width * self.length, 1, self.length)
        self.A_dtype, self.A_shared, self.num_states = A[2], len(A[0]) == 1, A[0][-1]
        self.kinds = [x is not None and x[2].is_complex for x in (A, B, C)]
        self.complex = any(self.kinds)
        # numbers of a channel's states
        self.row = self.num_states * (2 if self.complex else 1)
        self.state_dtype = torch.complex64 if self.complex else torch.float32
        config = _config(self.dtype, self.length, self.complex, tuning)
        programs = tuning.programs or tuning.programs_per_processor * num_processors(device)
        self.plan = plan = cheapest_plan(self.batch, self.length, self.width, with_end, programs, config, tuning)
        inner = _inner(plan.chunk)
        self.tables = (self.width, plan.chunk + (2 + inner + plan.chunk // inner + 8) * self.row)
        self.states = (self.batch, self.width, self.num_states)
        size = _padded(self.num_states, self.complex) * (2 if self.complex else 1)
        self.saved = (self.batch, self.width, plan.chunks, size)
        # as the products of the backward pass take them
        self.saved_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 and config.states == 1 else torch.float32
        self.launches: dict[Any, Launch] = {}

    @functools.cached_property
    def backward_plan(self) -> Plan:
        plain = self.dtype == torch.bfloat16 and not self.gated
        return backward_plan(self.plan, plain and self.num_states <= 32, self.tuning.tall_steps)

    @functools.cached_property
    def partial(self) -> tuple[int, int, int]:
        """Size of the partial sums of gradients of taps, Bbar, c and log Abar."""
        return self.backward_plan.programs, self.width, self.plan.chunk + 3 * self.row

    @functools.cached_property
    def prepare(self) -> Launch:
        plan = self.plan
        stride = 0 if self.A_shared else self.num_states
        bits = plan.steps.bit_length(), plan.segments.bit_length() - 1
        numbers = self.num_states, stride, plan.steps, cdiv(plan.steps, 2), *bits, self.factor
        return self.launch_type(_prepare_kernel, self.width, *numbers, **self._system_constants())

    @functools.cached_property
    def prepare_bwd(self) -> Launch:
        numbers = self.width, self.num_states, 0 if self.A_shared else self.num_states, self.partial[0], self.factor
        return self.launch_type(_prepare_bwd_kernel, self.width, *numbers, **self._system_constants())

    def _system_constants(self) -> dict[str, Any]:
        bits, (a, b, c) = self.plan.chunk.bit_length(), self.kinds
        return {
            # one rule has two names
            "RULE": "zoh" if self.rule == "dss-exp" else self.rule,
            "A_COMPLEX": a,
            "B_COMPLEX": b,
            "C_COMPLEX": c,
            "COMPLEX": self.complex,
            "NEAR_BITS": bits // 2,
            "FAR_BITS": (bits - 1) // 2,
            # a state a thread, so that sums over powers stay in it; narrower tiles would compute exp, sin, cos twice
            "BLOCK_N": max(32, power_of_2(self.num_states)),
            "num_warps": 1,
        }

    def launch(self, dy: tuple[int, ...] | None, *tensors: Tensor | None) -> None:
        """The kernel of a pass; dy: in the backward pass, the strides of that gradient."""
        # a launch is of the same tensors or None
        key = dy, *[x is None for x in tensors]
        ready = self.launches.get(key)
        if ready is None:
            ready = self.launches[key] = self._make(dy)
        ready(*tensors)

    def _make(self, dy: tuple[int, ...] | None) -> Launch:
        kernel, plan = (_lti_fwd_kernel, self.plan) if dy is None else (_lti_bwd_kernel, self.backward_plan)
        strides = self.strides if dy is None else [*self.strides, dy[::2]]
        # numbers of kept states, and how far the last of the inputs lies
        most = self.batch * self.width * plan.chunks * self.saved[-1]
        for stride_b, stride_d in strides:
            most = max(most, self.batch * stride_b + self.width * stride_d + self.length)
        options = self.dtype, self.gated, most >= self.tuning.wide_offsets, dy is not None, speaks_ptx()
        constants = _constants(plan, self.complex, self.num_states, *options, self.tuning)
        numbers = self.batch, self.length, self.width, self.num_states, plan.pieces, plan.steps, plan.chunks
        return self.launch_type(kernel, plan.programs * self.width, *numbers, *itertools.chain(*strides), **constants)

    def pass_on(self, reached: Tensor, small: Tensor, first: Tensor | None, backward: bool) -> Tensor:
        """The states at which pieces start, from those they reach from zero; in float64, for powers add errors up."""
        kind = torch.complex128 if self.complex else torch.float64
        last = small[:, -2 * self.row :]
        decay = (torch.view_as_complex(last.unflatten(1, (-1, 2))) if self.complex else last).to(kind)
        decay = decay[:, : self.num_states] + decay[:, self.num_states :]
        if backward:
            reached, decay = reached.flip(0), decay.conj()
        starts = [torch.zeros_like(reached[0], dtype=kind) if first is None else first.to(kind)]
        for state in reached[:-1]:
            starts.append(torch.addcmul(state.to(kind), decay, starts[-1]))
        return torch.stack(starts[::-1] if backward else starts).to(reached.dtype)


class Planner:
    """Makes the `CallPlan` of a call; on a GPU it keeps plans, as making one takes longer than a short kernel runs."""

    def __init__(self, tuning: Tuning = TUNING, launch_type: Callable[..., Launch] = Launch) -> None:
        self.tuning = tuning
        self.make = functools.partial(CallPlan, tuning=tuning, launch_type=launch_type)
        self.kept = functools.lru_cache(256)(self.make)

    def __call__(self, on_gpu: bool, *key: Any) -> CallPlan:
        return (self.kept if on_gpu else self.make)(*key)


def prepare(call: CallPlan, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, skip: Tensor | None) -> Tensor:
    """The tables of `_prepare_kernel`, one row a channel."""
    small = C.new_empty(call.tables, dtype=torch.float32)
    call.prepare(A, B, C, dt, skip, small)
    return small


def prepare_bwd(
    call: CallPlan, partial: Tensor, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of A, B, C, dt and the skip."""
    size = C.shape
    dA, dC, ddt = C.new_empty(size, dtype=call.A_dtype), C.new_empty(size), dt.new_empty(dt.shape)
    dB = None if B is None else B.new_empty(size)
    dskip = None if skip is None else skip.new_empty(skip.shape)
    call.prepare_bwd(A, B, C, dt, partial, dA, dB, dC, ddt, dskip)
    return dA.sum(0) if call.A_shared else dA, dB, dC, ddt, dskip


def lti_fwd(
    call: CallPlan,
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    small: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, on request the state before chunk T // C and, where trained, the states before each chunk."""
    given, start = (u, gate_in, gate_out, small), initial_state
    if call.plan.pieces > 1:
        ends = u.new_empty((call.plan.pieces, *call.states), dtype=call.state_dtype)
        call.launch(None, *given, None, None, None, ends)
        start = call.pass_on(ends, small, initial_state, False)
    # not the transpose of something else: a view that a custom function returns may not be changed in place
    y = u.new_empty_strided(u.shape, call.time_last)
    saved = u.new_empty(call.saved, dtype=call.saved_dtype) if call.trained else None
    end = u.new_empty(call.states, dtype=call.state_dtype) if call.with_end else None
    call.launch(None, *given, start, y, saved, end)
    return y, end, saved


def lti_bwd(
    call: CallPlan,
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    dy: Tensor,
    small: Tensor,
    saved: Tensor,
    dend: Tensor | None,
    with_start: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Gradients of u, the gates, partial ones of taps, Bbar, c and log Abar [*, D, *], and of the initial state."""
    given, strides, after, pieces = (u, gate_in, gate_out, dy, small, saved), dy.stride(), None, call.plan.pieces
    if pieces > 1:
        starts = u.new_empty((pieces, *call.states), dtype=call.state_dtype)
        call.launch(strides, *given, None, dend, None, None, None, starts, None)
        after = call.pass_on(starts, small, None, True)
    size, order = u.shape, call.time_last
    du = u.new_empty_strided(size, order)
    dgate_in = None if gate_in is None else gate_in.new_empty_strided(size, order)
    dgate_out = None if gate_out is None else gate_out.new_empty_strided(size, order)
    dstart = u.new_empty(call.states, dtype=call.state_dtype) if with_start else None
    partial = u.new_empty(call.partial, dtype=torch.float32)
    call.launch(strides, *given, after, dend, du, dgate_in, dgate_out, dstart, partial)
    return du, dgate_in, dgate_out, partial, dstart
