"""sLSTM: the scalar memory of xLSTM, whose gates read the last output. Nothing of it can be computed ahead of time.

a_t^g = x_t^g + h_{t-1} R^g + b^g      for the input gate i, the forget gate f, the cell input z and the output gate o
m_t = max(log sigmoid(a_t^f) + m_{t-1}, a_t^i)
c_t = exp(log sigmoid(a_t^f) + m_{t-1} - m_t) c_{t-1} + exp(a_t^i - m_t) tanh(a_t^z)
n_t = exp(log sigmoid(a_t^f) + m_{t-1} - m_t) n_{t-1} + exp(a_t^i - m_t)
h_t = sigmoid(a_t^o) c_t / n_t

Every head has its own R^g [K, K], so that channels of one head mix over time and heads do not.

Source: xLSTM (Beck et al. 2024, arXiv 2405.04517), section 2.2 with the stabiliser of equations 15 to 17, and a sigmoid
for the forget gate, as in the released code (NX-AI/xlstm at 18d6dedf65fdb4d9a5018bd9bfa4e59e8809cdd9,
xlstm/blocks/slstm/src/vanilla/slstm.py).

The state is h, c, n and m. h_t does not depend on the scale exp(m_t) that c_t and n_t are divided by, so m counts as a
constant: it has no gradient, as an input and as an output. Before the first step h, c and n are zero and m is -1e30.
From then on n_t >= 1, because one of the two exponentials is one; where n is zero, nothing was written and h is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import kept, needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_shapes
from subquad.kernels.operations import counted, with_state
from subquad.kernels.slstm.reference import EMPTY, advance, slstm_reference

__all__ = ["EMPTY", "empty_state", "slstm", "slstm_step"]

MAX_WIDTH = 64
"""Maximum K of the Triton kernels, which hold four matrices [K, K] in registers, backward eight."""


def _empty_results(inputs: Mapping[str, Any]) -> Any:
    """Results of `slstm` without values."""
    x = inputs["x"]
    return with_state(x.new_empty(x.shape[0], x.shape[1], *x.shape[3:]), inputs, x.shape[0], *x.shape[2:])


@counted("slstm", results=_empty_results)
def slstm(
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The recurrence of this module over a sequence.

    x:             [batch, length, 4, heads, K], with length >= 1: what i, f, z and o, in this order, get from the
                   input of the layer.
    recurrent:     [4, heads, K, K]: R^g, whose rows belong to h_{t-1}.
    bias:          [4, heads, K]: b^g, or None. It is added in float32 at least.
    initial_state: [batch, 4, heads, K]: h, c, n and m; None for that before the first step (`empty_state`).
    backend:       triton takes K up to 64 in float32, bfloat16 and float16 on a CUDA device; torch computes one step
                   after the other. Both are deterministic.

    Returns h [batch, length, heads, K] in the dtype of x and, if return_final_state, the final state, at least float32.
    Gates and states are at least float32, also for half-precision x and under autocast. The Triton kernels multiply h
    and R in the dtype of x. ValueError for shapes that do not fit together, and where backend="triton" cannot run.
    """
    if x.ndim != 5 or x.shape[1] == 0 or x.shape[2] != 4:
        raise ValueError(f"slstm: x must be [batch, length >= 1, 4, heads, K], got {list(x.shape)}.")
    batch, _, _, heads, width = x.shape
    _check("slstm", recurrent, bias, initial_state, batch, heads, width)
    tensors = (x, recurrent, bias, initial_state)
    if use_triton("slstm", backend, *tensors, obstacle=_obstacle(width)):
        from subquad.kernels.slstm.triton import slstm_triton

        with on_device_of(x):
            y, state = slstm_triton(x, recurrent, bias, initial_state, return_final_state=return_final_state)
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            b, start = (None if part is None else part.to(wide) for part in (bias, initial_state))
            y, state = slstm_reference(x.to(wide), recurrent.to(wide), b, initial_state=start)
        y = y.to(x.dtype)
    if not return_final_state:
        return y
    assert state is not None
    return y, state


@counted("slstm_step")
def slstm_step(
    x: Tensor,
    recurrent: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One step: x [batch, 4, heads, K] to h [batch, heads, K]; `state` [batch, 4, heads, K] is updated in place.

    backend: as in `slstm`. The Triton path has no gradient; ValueError where backend="triton" is asked for one.
    """
    if x.ndim != 4 or x.shape[1] != 4:
        raise ValueError(f"slstm_step: x must be [batch, 4, heads, K], got {list(x.shape)}.")
    batch, _, heads, width = x.shape
    _check("slstm_step", recurrent, bias, state, batch, heads, width)
    tensors = (x, recurrent, bias, state)
    obstacle = NO_GRADIENT if needs_gradient(*tensors) else _obstacle(width)
    if use_triton("slstm_step", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.slstm.triton import slstm_step_triton

        with on_device_of(x):
            return slstm_step_triton(x, recurrent, bias, state)
    with torch.autocast(x.device.type, enabled=False):
        h, c, n, m = kept(state).unbind(1)
        gates = x.to(state.dtype) if bias is None else x.to(state.dtype) + bias.to(state.dtype)
        new = advance(gates, recurrent.to(state.dtype), (h, c, n, m.detach()))
        state.copy_(torch.stack(new, 1))
    return new[0].to(x.dtype)


def empty_state(
    batch: int, heads: int, width: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """The state [batch, 4, heads, width] before the first step: nothing, at a scale below that of any gate."""
    state = torch.zeros(batch, 4, heads, width, dtype=dtype, device=device)
    state[:, 3] = EMPTY
    return state


def _obstacle(width: int) -> str | None:
    return f"takes K up to {MAX_WIDTH}, got K={width}" if width > MAX_WIDTH else None


def _check(
    op: str, recurrent: Tensor, bias: Tensor | None, state: Tensor | None, batch: int, heads: int, width: int
) -> None:
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {
        "recurrent": (recurrent, (4, heads, width, width)),
        "bias": (bias, (4, heads, width)),
        "state" if op == "slstm_step" else "initial_state": (state, (batch, 4, heads, width)),
    }
    check_shapes(op, wanted, to_go_with="x")
