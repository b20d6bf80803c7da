"""WKV: the weighted mean of values of RWKV-4, an attention whose weights do not depend on a query.

y_t[d] = (sum_{i < t} exp((t - 1 - i) w[d] + k_i[d]) v_i[d] + exp(u[d] + k_t[d]) v_t[d])
       / (sum_{i < t} exp((t - 1 - i) w[d] + k_i[d])        + exp(u[d] + k_t[d]))

with the logarithm of the decay w < 0 and the bonus u of the present. Each channel is on its own.

Source: RWKV (Peng et al. 2023, arXiv 2305.13048), section 3.1.2 and appendix D. There the decay is exp(-w) with w > 0;
ours is exp(log_decay), as everywhere in this repository.

The state is numerator, denominator and scale: a exp(p) is the sum over the past of the values with their weights, and
b exp(p) that of the weights. p_t = max(p_{t-1} + w, k_t), so that no exponential overflows whatever the keys are. The
same sums have many (a, b, p), so p counts as a constant: it has no gradient, as an input and as an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from subquad.kernels.autograd import kept, needs_gradient
from subquad.kernels.backend import NO_ELEMENT, NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import Allowed, check_shapes
from subquad.kernels.operations import counted, with_state
from subquad.kernels.wkv.chunked import EMPTY, wkv_chunked
from subquad.kernels.wkv.reference import advance, read

__all__ = ["EMPTY", "empty_state", "wkv", "wkv_step"]


def _empty_results(inputs: Mapping[str, Any]) -> Any:
    """Results of `wkv` without values."""
    v = inputs["v"]
    return with_state(torch.empty_like(v), inputs, v.shape[0], 3, v.shape[2])


@counted("wkv", results=_empty_results)
def wkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The mean of this module over a sequence.

    k, v:             [batch, length, width], with length >= 1.
    log_decay, bonus: [width]: w, which must be negative, and u.
    initial_state:    [batch, 3, width]: a, b and p; None for that before the first step (`empty_state`).
    backend:          triton takes float32, bfloat16 and float16 on a CUDA device; auto takes it there and plain PyTorch
                      elsewhere. Both are deterministic.

    Returns y [batch, length, width] in the dtype of v and, if return_final_state, the final state, at least float32.
    Sums and exponentials are at least float32, also for half-precision inputs and under autocast. ValueError for shapes
    that do not fit together, and where backend="triton" cannot run.
    """
    if k.ndim != 3 or k.shape[1] == 0:
        raise ValueError(f"wkv: k must be [batch, length, width] with length >= 1, got {list(k.shape)}.")
    batch, _, width = k.shape
    _check("wkv", k, v, log_decay, bonus, initial_state, batch, width)
    obstacle = None if k.numel() else NO_ELEMENT
    if use_triton("wkv", backend, k, v, log_decay, bonus, initial_state, obstacle=obstacle):
        from subquad.kernels.wkv.triton import wkv_triton

        with on_device_of(k):
            y, state = wkv_triton(k, v, log_decay, bonus, initial_state, return_final_state=return_final_state)
    else:
        with torch.autocast(k.device.type, enabled=False):
            y, state = wkv_chunked(k, v, log_decay, bonus, initial_state=initial_state)
    if not return_final_state:
        return y
    assert state is not None
    return y, state


@counted("wkv_step")
def wkv_step(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    *,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One step: k, v [batch, width] to y [batch, width]; `state` [batch, 3, width] is updated in place.

    The Triton path has no gradient, so auto takes it only where no gradient is recorded; ValueError where
    backend="triton" is asked for a gradient.
    """
    if k.ndim != 2:
        raise ValueError(f"wkv_step: k must be [batch, width], got {list(k.shape)}.")
    _check("wkv_step", k, v, log_decay, bonus, state, *k.shape)
    tensors = (k, v, log_decay, bonus, state)
    if use_triton("wkv_step", backend, *tensors, obstacle=NO_GRADIENT if needs_gradient(*tensors) else None):
        from subquad.kernels.wkv.triton import wkv_step_triton

        with on_device_of(k):
            return wkv_step_triton(k, v, log_decay, bonus, state)
    with torch.autocast(k.device.type, enabled=False):
        keys, values, w, u = (m.to(state.dtype) for m in (k, v, log_decay, bonus))
        a, b, p = kept(state).unbind(1)
        parts = (a, b, p.detach())
        y = read(keys, values, u, parts)
        state.copy_(torch.stack(advance(keys, values, w, parts), 1))
    return y.to(v.dtype)


def empty_state(
    batch: int, width: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """The state [batch, 3, width] before the first step: nothing, at a scale below that of any key."""
    state = torch.zeros(batch, 3, width, dtype=dtype, device=device)
    state[:, 2] = EMPTY
    return state


def _check(
    op: str, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor | None, batch: int, width: int
) -> None:
    wanted: dict[str, tuple[Tensor | None, Allowed]] = {
        "v": (v, tuple(k.shape)),
        "log_decay": (log_decay, (width,)),
        "bonus": (bonus, (width,)),
        "state" if op == "wkv_step" else "initial_state": (state, (batch, 3, width)),
    }
    check_shapes(op, wanted, to_go_with="k")
