"""Allocations and launches of one call of the operator.

`Plan` holds what depends on shapes, strides, dtypes and the device only; `Planner` makes plans and, on a GPU,
keeps them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.launch import LaunchPlan, cdiv, launch, power_of_2
from subquad.kernels.layout import TensorSpec
from subquad.kernels.lti_ssm.triton.backward import _lti_bwd_kernel
from subquad.kernels.lti_ssm.triton.forward import _lti_fwd_kernel
from subquad.kernels.lti_ssm.triton.plan import (
    TUNING,
    Division,
    Tuning,
    backward_division,
    cheapest_division,
    kernel_constants,
    num_near,
    padded_states,
)
from subquad.kernels.lti_ssm.triton.prepare import _prepare_bwd_kernel, _prepare_kernel


class Plan:
    """Plans, sizes of allocations and arguments of launches of calls with equal shapes, strides, dtypes and device.

    factor, rule: s and the discretization of `kernels.lti_ssm`.   with_end: whether the final state is asked for.
    trained: whether a backward pass may follow.
    specs: of u, gate_in, gate_out, A, B and C.
    """

    def __init__(
        self,
        factor: float,
        rule: str,
        with_end: bool,
        trained: bool,
        specs: tuple[TensorSpec | None, ...],
        *,
        tuning: Tuning,
    ) -> None:
        self.with_end, self.trained, self.tuning = with_end, trained, tuning
        u, gate_in, gate_out, A, B, C = specs
        assert u is not None
        assert A is not None
        (self.batch, self.length, self.width), self.dtype = u.shape, u.dtype
        self.time_last = self.width * self.length, 1, self.length
        """Strides of [B, T, D] with time contiguous."""
        self.gated = gate_in is not None or gate_out is not None
        self.strides: dict[str, int] = {}
        for name, x in (("u", u), ("in", gate_in), ("out", gate_out)):
            self.strides |= {f"{name}_stride_b": x.strides[0] if x else 0, f"{name}_stride_d": x.strides[2] if x else 0}
        self.A_dtype, self.A_shared, self.num_states = A.dtype, len(A.shape) == 1, A.shape[-1]
        are_complex = [x is not None and x.dtype.is_complex for x in (A, B, C)]
        self.is_complex = any(are_complex)
        self.row = self.num_states * (2 if self.is_complex else 1)
        """Number of real elements in the states of one channel."""
        self.state_dtype = torch.complex64 if self.is_complex else torch.float32
        tile = tuning.tile(self.dtype, self.length, self.num_states, self.is_complex, self.gated)
        programs = tuning.programs_on(u.device)
        self.division = division = cheapest_division(
            self.batch, self.length, self.width, with_end, programs, tile, tuning
        )
        near = num_near(division.chunk)
        self.tables_shape = self.width, division.chunk + (2 + near + division.chunk // near + 8) * self.row
        self.state_shape = self.batch, self.width, self.num_states
        padded = padded_states(self.num_states, self.is_complex) * (2 if self.is_complex else 1)
        self.states_shape = self.batch, self.width, division.chunks, padded
        one_term = self.dtype == torch.bfloat16 and tile.sum_terms == 1
        self.kept_dtype = torch.bfloat16 if one_term else torch.float32
        """The dtype in which the states before each chunk and y before gate_out are kept for the backward pass."""
        bits = division.chunk.bit_length()
        self.system_arguments = {
            "factor": factor,
            # dss-exp is another name of zoh
            "RULE": "zoh" if rule == "dss-exp" else rule,
            **dict(zip(("A_COMPLEX", "B_COMPLEX", "C_COMPLEX"), are_complex, strict=True)),
            "COMPLEX": self.is_complex,
            "NEAR_BITS": bits // 2,
            "FAR_BITS": (bits - 1) // 2,
            # one state in each thread, so that sums over powers stay in it; narrower tiles repeat exp, sin and cos
            "BLOCK_N": max(32, power_of_2(self.num_states)),
            "num_warps": 1,
        }

    @functools.cached_property
    def backward_division(self) -> Division:
        fits = self.dtype == torch.bfloat16 and not self.gated and self.num_states <= 32
        return backward_division(self.division, fits, self.tuning)

    @functools.cached_property
    def partial_shape(self) -> tuple[int, int, int]:
        """Shape of the partial gradients of the taps, Bbar, w and log Abar."""
        return self.backward_division.programs, self.width, self.division.chunk + 3 * self.row

    @functools.cached_property
    def prepare(self) -> LaunchPlan:
        """Launch of the kernel that makes the tables."""
        steps, segments = self.division.steps, self.division.segments
        return LaunchPlan(
            self.width,
            N=self.num_states,
            A_stride_d=0 if self.A_shared else self.num_states,
            steps=steps,
            half_steps=cdiv(steps, 2),
            step_bits=steps.bit_length(),
            segment_bits=segments.bit_length() - 1,
            **self.system_arguments,
        )

    @functools.cached_property
    def prepare_backward(self) -> LaunchPlan:
        """Launch of the kernel that makes the gradients of the system."""
        return LaunchPlan(
            self.width,
            D=self.width,
            N=self.num_states,
            A_stride_d=0 if self.A_shared else self.num_states,
            count=self.partial_shape[0],
            **self.system_arguments,
        )

    @functools.cached_property
    def forward(self) -> LaunchPlan:
        """Launch of the forward kernel."""
        return self._sequence(self.division, {})

    def backward(self, dy_stride_b: int, dy_stride_d: int) -> LaunchPlan:
        """Launch of the backward kernel."""
        return self._sequence(self.backward_division, {"dy_stride_b": dy_stride_b, "dy_stride_d": dy_stride_d})

    def _sequence(self, division: Division, dy_strides: dict[str, int]) -> LaunchPlan:
        strides = self.strides | dy_strides
        # elements of the kept states, and the largest offset in the inputs
        most = self.batch * self.width * division.chunks * self.states_shape[-1]
        along_b, along_d = list(strides.values())[::2], list(strides.values())[1::2]
        for stride_b, stride_d in zip(along_b, along_d, strict=True):
            most = max(most, self.batch * stride_b + self.width * stride_d + self.length)
        constants = kernel_constants(
            division,
            self.num_states,
            is_complex=self.is_complex,
            dtype=self.dtype,
            gated=self.gated,
            int64=most >= self.tuning.int64_elements,
            backward=bool(dy_strides),
            tuning=self.tuning,
        )
        return LaunchPlan(
            division.programs * self.width,
            B=self.batch,
            T=self.length,
            D=self.width,
            N=self.num_states,
            num_pieces=division.pieces,
            num_steps=division.steps,
            num_chunks=division.chunks,
            **strides,
            **constants,
        )

    def pass_on(self, reached: Tensor, tables: Tensor, first: Tensor | None, backward: bool) -> Tensor:
        """The state in which each piece starts [pieces, B, D, N], from the state that each piece reaches from zero.

        first: the state in which the first piece starts, None for zero.   backward: from the last piece to the first.
        In float64, because the decay of a piece is raised to powers.
        """
        dtype = torch.complex128 if self.is_complex else torch.float64
        # the decay of a piece and its rounding error
        last = tables[:, -2 * self.row :]
        decay = (torch.view_as_complex(last.unflatten(1, (-1, 2))) if self.is_complex else last).to(dtype)
        decay = decay[:, : self.num_states] + decay[:, self.num_states :]
        if backward:
            reached, decay = reached.flip(0), decay.conj()
        starts = [torch.zeros_like(reached[0], dtype=dtype) if first is None else first.to(dtype)]
        for state in reached[:-1]:
            starts.append(torch.addcmul(state.to(dtype), decay, starts[-1]))
        return torch.stack(starts[::-1] if backward else starts).to(reached.dtype)


kept_backward = functools.lru_cache(512)(Plan.backward)


class Planner:
    """Makes the `Plan` of a call; on a GPU it keeps plans, as making one takes longer than a short kernel runs."""

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self.tuning = tuning
        self.make = functools.partial(Plan, tuning=tuning)
        self.kept = functools.lru_cache(256)(self.make)

    def __call__(self, on_gpu: bool, *key: Any) -> Plan:
        """key: the arguments of `Plan`."""
        return (self.kept if on_gpu else self.make)(*key)


def prepare(plan: Plan, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, skip: Tensor | None) -> Tensor:
    """The tables of `_prepare_kernel` in float32, one row a channel."""
    tables = C.new_empty(plan.tables_shape, dtype=torch.float32)
    launch(_prepare_kernel, plan.prepare, A=A, B=B, C=C, dt=dt, skip=skip, tables=tables)
    return tables


def prepare_bwd(
    plan: Plan, partial: Tensor, A: Tensor, B: Tensor | None, C: Tensor, dt: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of A, B, C, dt and the skip, in their dtypes."""
    # `empty_like` takes the host two thirds of the time of `new_empty`
    dA = C.new_empty(C.shape, dtype=plan.A_dtype) if plan.A_shared else torch.empty_like(A)
    dC, ddt = torch.empty_like(C), torch.empty_like(dt)
    dB = None if B is None else torch.empty_like(B)
    dskip = None if skip is None else torch.empty_like(skip)
    gradients = {"dA": dA, "dB": dB, "dC": dC, "ddt": ddt, "dskip": dskip}
    launch(_prepare_bwd_kernel, plan.prepare_backward, A=A, B=B, C=C, dt=dt, partial=partial, **gradients)
    return dA.sum(0) if plan.A_shared else dA, dB, dC, ddt, dskip


def lti_fwd(
    plan: Plan,
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    tables: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """y [B, T, D]; on request the state before chunk T // CHUNK; where trained, the states before all chunks and, with
    a gate_out, y before this gate.
    """
    start = initial_state
    if plan.division.pieces > 1:
        ends = u.new_empty((plan.division.pieces, *plan.state_shape), dtype=plan.state_dtype)
        launch(
            _lti_fwd_kernel, plan.forward, u=u, gate_in=gate_in, gate_out=gate_out, tables=tables, start=None, y=None,
            ungated=None, states=None, end=ends,
        )  # fmt: skip
        start = plan.pass_on(ends, tables, initial_state, False)
    # not the transpose of something else: a view that a custom function returns may not be changed in place
    y = u.new_empty_strided(u.shape, plan.time_last)
    states = u.new_empty(plan.states_shape, dtype=plan.kept_dtype) if plan.trained else None
    end = u.new_empty(plan.state_shape, dtype=plan.state_dtype) if plan.with_end else None
    with_ungated = plan.trained and gate_out is not None
    ungated = u.new_empty_strided(u.shape, plan.time_last, dtype=plan.kept_dtype) if with_ungated else None
    launch(
        _lti_fwd_kernel, plan.forward, u=u, gate_in=gate_in, gate_out=gate_out, tables=tables, start=start, y=y,
        ungated=ungated, states=states, end=end,
    )  # fmt: skip
    return y, end, states, ungated


def lti_bwd(
    plan: Plan,
    u: Tensor,
    gate_in: Tensor | None,
    gate_out: Tensor | None,
    dy: Tensor,
    tables: Tensor,
    ungated: Tensor | None,
    states: Tensor,
    dend: Tensor | None,
    with_start: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Gradients of u, the gates, (partial) the tables of the channels, and the initial state.

    dend: the gradient of the state before chunk T // CHUNK.   with_start: whether the last result is asked for.
    """
    pieces, after = plan.division.pieces, None
    dy_stride_b, _, dy_stride_d = dy.stride()
    backward = kept_backward(plan, dy_stride_b, dy_stride_d)
    if pieces > 1:
        starts = u.new_empty((pieces, *plan.state_shape), dtype=plan.state_dtype)
        launch(
            _lti_bwd_kernel, backward, u=u, gate_in=gate_in, gate_out=gate_out, dy=dy, tables=tables, ungated=None,
            states=states, after=None, dend=dend, du=None, dgate_in=None, dgate_out=None, dstart=starts, partial=None,
        )  # fmt: skip
        after = plan.pass_on(starts, tables, None, True)
    shape, strides = u.shape, plan.time_last
    du = u.new_empty_strided(shape, strides)
    dgate_in = None if gate_in is None else gate_in.new_empty_strided(shape, strides)
    dgate_out = None if gate_out is None else gate_out.new_empty_strided(shape, strides)
    dstart = u.new_empty(plan.state_shape, dtype=plan.state_dtype) if with_start else None
    partial = u.new_empty(plan.partial_shape, dtype=torch.float32)
    launch(
        _lti_bwd_kernel, backward, u=u, gate_in=gate_in, gate_out=gate_out, dy=dy, tables=tables, ungated=ungated,
        states=states, after=after, dend=dend, du=du, dgate_in=dgate_in, dgate_out=dgate_out, dstart=dstart,
        partial=partial,
    )  # fmt: skip
    return du, dgate_in, dgate_out, partial, dstart
