"""The launches of WKV, as an operation of PyTorch with a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable, needs_gradient, save, saved
from subquad.kernels.device import num_processors, speaks_ptx
from subquad.kernels.launch import launch
from subquad.kernels.layout import dense
from subquad.kernels.wkv.triton.backward import _wkv_bwd_kernel, _wkv_decay_kernel
from subquad.kernels.wkv.triton.forward import _wkv_fwd_kernel
from subquad.kernels.wkv.triton.plan import TUNING, Plan, Tuning, choose_plan


def _channels(x: Tensor) -> Tensor:
    """[batch, T, D] itself where its channels are contiguous, else a copy."""
    return x if x.stride(2) == 1 else x.contiguous()


def _sizes(plan: Plan, **sequences: Tensor) -> dict[str, Any]:
    """The arguments of a launch behind the tensors, with the strides of some sequences."""
    _, length, width = sequences["k"].shape
    strides = {f"{name}_stride_{axis}": m.stride(i) for name, m in sequences.items() for i, axis in enumerate("bt")}
    return {
        "T": length, "D": width, "segment": plan.segment, "splits": plan.splits, **strides, "BLOCK_D": plan.block_d,
        "STEPS": plan.steps, "PTX": speaks_ptx(),
    }  # fmt: skip


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _forward(
    plan: Plan, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial: Tensor | None, *, final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """y, the final state, y in float32, z and the ends of the segments; all but y are None where not wanted."""
    batch, _, width = k.shape
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    z = _floats(k, *k.shape) if keep else None
    rounded = y.dtype != torch.float32
    exact = _floats(k, *k.shape) if keep and rounded else None
    state = _floats(k, batch, 3, width) if final else None
    ends = _floats(k, batch, plan.splits, 3, width) if plan.splits > 1 else None
    given = {"k": k, "v": v, "w": w, "u": u, "initial": initial, "ends": ends}
    sizes = _sizes(plan, k=k, v=v)
    if ends is not None:
        launch(
            _wkv_fwd_kernel, plan.programs, **given, y=None, exact=None, z=None, final=None, **sizes, FOLD=False,
            num_warps=plan.num_warps,
        )  # fmt: skip
    launch(
        _wkv_fwd_kernel, plan.programs, **given, y=y, exact=exact, z=z, final=state, **sizes, FOLD=True,
        num_warps=plan.num_warps,
    )  # fmt: skip
    return y, state, exact if rounded else y, z, ends


class WKV(OnceDifferentiable):
    """WKV of sequences with contiguous channels; gradients for all tensors."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial: Tensor | None, plan: Plan
    ) -> tuple[Tensor, Tensor | None]:
        y, final, exact, z, ends = _forward(plan, k, v, w, u, initial, final=True, keep=True)
        save(ctx, k, v, w, u, initial, final, exact, z, ends)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        k, v, w, u, initial, final, y, z, ends = saved(ctx)
        plan: Plan = ctx.plan
        batch, _, width = k.shape
        dy = torch.zeros_like(k) if dy is None else _channels(dy)
        dk, dv = (torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in (k, v))
        du, dw = _floats(k, batch, plan.splits, width), _floats(k, batch, plan.splits, width)
        dinitial = None if initial is None else _floats(k, batch, 3, width)
        after = _floats(k, batch, plan.splits, 3, width) if plan.splits > 1 else None
        common = {"initial": initial, "final": final, "y": y, "z": z, "dy": dy, "dfinal": dense(dfinal)}
        results = {"dk": dk, "dv": dv, "du": du, "dinitial": dinitial}
        sizes = _sizes(plan, k=k, v=v, dy=dy)
        given = {"k": k, "v": v, "w": w, "u": u, **common, "ends": after}
        if after is not None:
            launch(
                _wkv_bwd_kernel, plan.programs, **given, **dict.fromkeys(results), **sizes, FOLD=False,
                num_warps=plan.num_warps,
            )  # fmt: skip
        launch(_wkv_bwd_kernel, plan.programs, **given, **results, **sizes, FOLD=True, num_warps=plan.num_warps)
        launch(
            _wkv_decay_kernel, plan.programs, k=k, v=v, w=w, **common, ends=ends, after=after, dw=dw, **sizes,
            num_warps=plan.num_warps,
        )  # fmt: skip
        if dinitial is not None:
            dinitial = dinitial.to(initial.dtype)
        return dk, dv, dw.sum((0, 1)).to(w.dtype), du.sum((0, 1)).to(u.dtype), dinitial, None


def wkv_triton(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    initial_state: Tensor | None = None,
    *,
    return_final_state: bool = False,
    tuning: Tuning = TUNING,
) -> tuple[Tensor, Tensor | None]:
    """`wkv` for arguments whose shapes were checked: y, and the final state in float32, which may be None."""
    tensors = (_channels(k), _channels(v), dense(log_decay), dense(bonus), dense(initial_state))
    plan = choose_plan(k.shape, num_processors(k.device), tuning)
    if needs_gradient(*tensors):
        y, final = WKV.apply(*tensors, plan)
    else:
        y, final, *_ = _forward(plan, *tensors, final=return_final_state, keep=False)
    return y, final
