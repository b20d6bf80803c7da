"""The launches of the complex scan, as an operation of PyTorch with a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import num_processors, speaks_ptx
from subquad.kernels.launch import cdiv, launch
from subquad.kernels.layout import as_pairs, dense
from subquad.kernels.selective_scan.triton.complex.backward import _complex_bwd_kernel
from subquad.kernels.selective_scan.triton.complex.forward import _complex_fwd_kernel, _complex_pass_kernel
from subquad.kernels.selective_scan.triton.complex.plan import TUNING, Plan, Tuning, choose_plan
from subquad.kernels.selective_scan.triton.inputs import contiguous_channels, time_strides


class _Inputs(NamedTuple):
    """Inputs as the kernels read them: complex tensors with a last axis (real, imaginary)."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    skip: Tensor | None
    z: Tensor | None
    bias: Tensor | None

    def sizes(self, plan: Plan, softplus: bool, **more: Tensor) -> dict[str, Any]:
        """The arguments of a launch behind the tensors. more: further sequences whose strides stand behind z's."""
        sequences = {"x": self.x, "dt": self.dt, "z": self.z, **more}
        strides = {name: (0, 0) if m is None else time_strides(m) for name, m in sequences.items()}
        for name, m in (("b", self.B), ("c", self.C)):
            strides[name] = (0, 0) if m.ndim == 3 else (m.stride(0), m.stride(1))
        return {
            "T": self.x.shape[1],
            "D": self.x.shape[2],
            "segment": plan.segment,
            "splits": plan.splits,
            **{f"{name}_stride_{axis}": stride for name, pair in strides.items() for axis, stride in zip("bt", pair)},  # noqa: B905
            **self.constants(plan),
            "STEPS": plan.steps,
            "SOFTPLUS": softplus,
            "PTX": speaks_ptx(),
            "B_IN_TIME": self.B.ndim == 4,
            "C_IN_TIME": self.C.ndim == 4,
        }

    def constants(self, plan: Plan) -> dict[str, int]:
        return {"N": self.A.shape[1], "NT": plan.states, "LANES": plan.lanes, "BLOCK_D": plan.block_d}


def _floats(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _programs(x: Tensor, plan: Plan) -> int:
    """Programs of one segment."""
    return x.shape[0] * cdiv(x.shape[2], plan.block_d)


def _pass(inputs: _Inputs, plan: Plan, total_dt: Tensor, ends: Tensor, first: Tensor | None, *, reverse: bool) -> None:
    launch(
        _complex_pass_kernel, _programs(inputs.x, plan), A=inputs.A, total_dt=total_dt, ends=ends, first_state=first,
        D=inputs.x.shape[2], splits=plan.splits, **inputs.constants(plan), REVERSE=reverse, num_warps=plan.num_warps,
    )  # fmt: skip


def _forward(
    inputs: _Inputs, plan: Plan, softplus: bool, initial_state: Tensor | None, *, return_final_state: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, the final state [batch, D, N, 2] or None, and the states before all groups or None."""
    x = inputs.x
    batch, length, width = x.shape
    tile = (2 * plan.states, width, plan.lanes)
    arguments = inputs.sizes(plan, softplus) | {"num_warps": plan.num_warps}
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = _floats(x, batch, width, inputs.A.shape[1], 2) if return_final_state else None
    groups = _floats(x, batch, cdiv(length, plan.steps), *tile) if keep else None
    start, grid = initial_state, _programs(x, plan) * plan.splits
    if plan.splits > 1:
        start = _floats(x, batch, plan.splits, *tile)
        total_dt = _floats(x, batch, plan.splits, width)
        launch(
            _complex_fwd_kernel, grid, **inputs._asdict(), start=None, y=None, end=start, total_dt=total_dt,
            groups=None, **arguments,
        )  # fmt: skip
        _pass(inputs, plan, total_dt, start, initial_state, reverse=False)
    launch(
        _complex_fwd_kernel, grid, **inputs._asdict(), start=start, y=y, end=final, total_dt=None, groups=groups,
        **arguments,
    )  # fmt: skip
    return y, final, groups


def _backward(
    inputs: _Inputs, plan: Plan, softplus: bool, groups: Tensor, dy: Tensor, dfinal: Tensor | None, has_initial: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs and of the initial state, those of complex tensors as pairs."""
    x, _, A, B, C, skip, z, bias = inputs
    batch, length, width = x.shape
    tile = (2 * plan.states, width, plan.lanes)
    in_time = (B.ndim == 4, C.ndim == 4)
    terms = 2 * plan.states * sum(in_time)
    arguments = inputs.sizes(plan, softplus, dy=dy) | {
        "PART": plan.part, **plan.backward.keywords(),
    }  # fmt: skip
    # in the order of the kernel's parameters
    given = {**inputs._asdict(), "groups": groups, "dy": dy}
    results = dict.fromkeys(
        ("dx", "ddt", "dz", "dA", "dB", "dC", "dskip", "dbias", "partial", "before", "total_dt"), None
    )
    after, grid = dfinal, _programs(x, plan) * plan.splits
    if plan.splits > 1:
        after = _floats(x, batch, plan.splits, *tile)
        total_dt = _floats(x, batch, plan.splits, width)
        ends = results | {"before": after, "total_dt": total_dt}
        launch(_complex_bwd_kernel, grid, **given, after=None, **ends, **arguments)
        _pass(inputs, plan, total_dt, after, dfinal, reverse=True)

    def sums(wanted: bool, *shape: int) -> Tensor | None:
        return _floats(x, batch, plan.splits, *shape) if wanted else None

    dx, ddt = (torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in (x, inputs.dt))
    dz = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
    dA, dB, dC = (sums(wanted, *tile) for wanted in (True, not in_time[0], not in_time[1]))
    dskip, dbias = sums(skip is not None, width), sums(bias is not None, width)
    partial = _floats(x, cdiv(width, plan.block_d), batch, length, terms, plan.lanes) if terms else None
    before = _floats(x, batch, width, A.shape[1], 2) if has_initial else None
    launch(
        _complex_bwd_kernel, grid, **given, after=after, dx=dx, ddt=ddt, dz=dz, dA=dA, dB=dB, dC=dC, dskip=dskip,
        dbias=dbias, partial=partial, before=before, total_dt=None, **arguments,
    )  # fmt: skip
    maps = [] if partial is None else list(partial.sum(0).unflatten(2, (sum(in_time), 2, plan.states)).unbind(2))
    dB, dC = (
        _as_pairs_of(maps.pop(0) if depends else _over_batch(total), A.shape[1])
        for depends, total in zip(in_time, (dB, dC), strict=True)
    )
    dskip, dbias = (
        None if m is None or total is None else _over_batch(total).to(m.dtype)
        for m, total in ((skip, dskip), (bias, dbias))
    )
    return dx, ddt, _as_pairs_of(_over_batch(dA), A.shape[1]), dB, dC, dskip, dz, dbias, before


def _over_batch(sums: Tensor | None) -> Tensor:
    """The sum over batch rows and segments; [2 NT, D, LANES] becomes [D, 2, NT, LANES]."""
    assert sums is not None
    total = sums.sum((0, 1))
    return total.unflatten(0, (2, -1)).permute(2, 0, 1, 3) if total.ndim == 3 else total


def _as_pairs_of(parts: Tensor, num_states: int) -> Tensor:
    """[..., 2, NT, LANES] as [..., N, 2], contiguous: state i LANES + q is number i of lane q."""
    return parts.flatten(-2)[..., :num_states].transpose(-1, -2).contiguous()


class ComplexScan(OnceDifferentiable):
    """The scan of inputs whose memory the kernels can read, with A, B, C and the initial state in complex64."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None, z: Tensor | None,
        bias: Tensor | None, initial_state: Tensor | None, softplus: bool, return_final_state: bool, tuning: Tuning,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        inputs, plan = _prepare(x, dt, A, B, C, skip, z, bias, tuning)
        y, final, groups = _forward(
            inputs, plan, softplus, as_pairs(initial_state), return_final_state=return_final_state, keep=True
        )
        save(ctx, *inputs, groups)
        ctx.plan, ctx.softplus, ctx.has_initial = plan, softplus, initial_state is not None
        ctx.set_materialize_grads(False)
        return y, None if final is None else torch.view_as_complex(final)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, groups = saved(ctx)
        inputs = _Inputs(*tensors)
        dy = torch.zeros_like(inputs.x) if dy is None else contiguous_channels(dy)
        dx, ddt, dA, dB, dC, dskip, dz, dbias, dinitial = _backward(
            inputs, ctx.plan, ctx.softplus, groups, dy, as_pairs(dense(dfinal)), ctx.has_initial
        )
        dA, dB, dC, dinitial = (None if m is None else torch.view_as_complex(m) for m in (dA, dB, dC, dinitial))
        return dx, ddt, dA, dB, dC, dskip, dz, dbias, dinitial, None, None, None


def _prepare(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None, z: Tensor | None,
    bias: Tensor | None, tuning: Tuning,
) -> tuple[_Inputs, Plan]:  # fmt: skip
    plan = choose_plan(x.shape, A.shape[1], num_processors(x.device), tuning)
    return _Inputs(x, dt, as_pairs(A), as_pairs(B), as_pairs(C), skip, z, bias), plan


def selective_scan_complex(
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
    return_final_state: bool = False,
    tuning: Tuning = TUNING,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_scan` with complex states, for arguments whose shapes were checked; the final state in complex64.

    Those of A, B, C and the initial state that are real are copied to complex64.
    """
    x, dt = contiguous_channels(x), contiguous_channels(dt)
    z = None if z is None else contiguous_channels(z)
    A, B, C = (dense(m.to(torch.complex64)) for m in (A, B, C))
    initial_state = None if initial_state is None else dense(initial_state.to(torch.complex64))
    tensors = (x, dt, A, B, C, dense(D), z, dense(dt_bias))
    if needs_gradient(*tensors, initial_state):
        y, state = ComplexScan.apply(*tensors, initial_state, dt_softplus, return_final_state, tuning)
    else:
        y, pairs, _ = _forward(
            *_prepare(*tensors, tuning), dt_softplus, as_pairs(initial_state),
            return_final_state=return_final_state, keep=False,
        )  # fmt: skip
        state = None if pairs is None else torch.view_as_complex(pairs)
    return (y, state) if return_final_state else y
