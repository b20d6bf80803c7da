"""Causal depthwise convolution with a short filter.

y_t[d] = act(sum_{w=0}^{W-1} weight[d, w] x_{t-(W-1)+w}[d] + bias[d]),   x_s = 0 before the start

The last tap (w = W - 1) meets the current input, as in torch.nn.Conv1d. The state holds the last W - 1 inputs,
oldest first. Source: the `Conv` of Mamba (Gu & Dao 2023), figure 3 and section 3.4; Hyena (Poli et al. 2023) takes
W = 3.

The channels of q, k and v of a mixer may be convolved together, and the heads of q and k be divided by their length
(`causal_conv1d_heads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.autograd import needs_gradient
from subquad.kernels.backend import NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.causal_conv1d.chunked import causal_conv1d_chunked
from subquad.kernels.checks import check_choice, check_integers, check_shapes
from subquad.kernels.norm import norm
from subquad.kernels.operations import counted

__all__ = ["causal_conv1d", "causal_conv1d_heads", "causal_conv1d_step"]

MAX_WIDTH = 4
"""Maximum number of taps of a filter."""
MAX_HEAD = 256
"""Maximum channels of a head of length one in Triton, where a program holds some steps of a whole head."""


@counted("causal_conv1d")
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["silu"] | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
    time_last: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The convolution of this module. x [B, T, D], weight [D, W] with W in 2..4, bias [D].

    initial_state: [B, D, S] with S >= W - 1, the last S inputs; the final state is as long, W - 1 without one.
    seq_idx:       [B, T] integers, the sequence of each step where several are packed along time. A step sees those of
                   its own sequence only. It excludes states, and runs in plain PyTorch.

    Returns y [B, T, D] and, on request, the final state, both in the dtype of x; sums are float32 at least.
    x may have any strides. The Triton path is fast where D or T is contiguous (channel-last or channel-first), and
    gives y and the gradient of x the same layout. With `time_last` it gives y with T contiguous from any x, for an
    operator behind it that reads y so, and takes the gradient of y so; PyTorch's path does not heed it. Raises
    ValueError for shapes or options that do not fit.
    """
    _check(x, weight, bias, activation, initial_state)
    if initial_state is not None and initial_state.shape[2] >= weight.shape[1]:
        y = causal_conv1d(
            x, weight, bias, activation=activation, initial_state=initial_state[..., 1 - weight.shape[1] :],
            seq_idx=seq_idx, time_last=time_last, backend=backend,
        )  # fmt: skip
        assert isinstance(y, Tensor)
        return (y, _last_inputs(initial_state, x)) if return_final_state else y
    if seq_idx is not None:
        return _packed(x, weight, bias, activation, seq_idx, initial_state, return_final_state, backend)
    if use_triton("causal_conv1d", backend, x, weight, bias, initial_state):
        from subquad.kernels.causal_conv1d.triton import causal_conv1d_triton

        with on_device_of(x):
            return causal_conv1d_triton(x, weight, bias, activation, initial_state, return_final_state, time_last)
    with torch.autocast(x.device.type, enabled=False):
        y, state = causal_conv1d_chunked(x, weight, bias, activation=activation, initial_state=initial_state)
    return (y, state) if return_final_state else y


@counted("causal_conv1d")
def causal_conv1d_heads(
    x: Tensor,
    weight: Tensor,
    heads: Sequence[tuple[int, int]],
    *,
    num_unit: int = 0,
    eps: float = 1e-6,
    activation: Literal["silu"] | None = None,
    return_final_state: bool = False,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> tuple[Tensor, ...]:
    """The convolution of this module, its channels as heads of several results [B, T, H, K], such as q, k and v.

    heads:    (H, K) of every result. The channels of x are those of the first result, then those of the second, ...
    num_unit: the heads of the first `num_unit` results have length one, y / sqrt(|y|^2 + eps), as queries and keys of
              the delta rule (Yang et al. 2024, arXiv 2406.06484).

    Returns the results and, on request, the final state [B, D, W - 1], all in the dtype of x. The Triton path writes
    every result as a dense tensor of its own, rounds it once, writes one gradient of x from theirs, and keeps x alone.
    It takes heads of length one of up to 256 channels. PyTorch's path rounds the convolution as well. Raises
    ValueError for shapes or options that do not fit.
    """
    _check(x, weight, None, activation, None)
    sizes = [number * size for number, size in heads]
    if sum(sizes) != x.shape[2] or min(sizes or [0]) < 1 or not 0 <= num_unit <= len(sizes):
        raise ValueError(
            f"causal_conv1d_heads: heads must have the {x.shape[2]} channels of x together and num_unit be at most "
            f"their number, got heads={[tuple(shape) for shape in heads]} and num_unit={num_unit}."
        )
    largest = max([0, *(size for _, size in heads[:num_unit])])
    obstacle = f"takes heads of up to {MAX_HEAD} channels, got {largest}" if largest > MAX_HEAD else None
    if x.shape[2] == 1:
        obstacle = "takes two channels or more"
    if use_triton("causal_conv1d", backend, x, weight, obstacle=obstacle):
        from subquad.kernels.causal_conv1d.triton import causal_conv1d_heads_triton

        with on_device_of(x):
            results = causal_conv1d_heads_triton(x, weight, heads, num_unit, activation, eps)
    else:
        y = causal_conv1d(x, weight, activation=activation, backend=backend)
        assert isinstance(y, Tensor)
        parts = zip(y.split(sizes, -1), heads, strict=True)
        results = tuple(part.unflatten(-1, shape) for part, shape in parts)
        # a batch of no rows has nothing to normalise, which `norm` refuses
        if x.shape[0]:
            units = (norm(part, None, kind="l2", eps=eps, backend=backend) for part in results[:num_unit])
            results = (*units, *results[num_unit:])
    if not return_final_state:
        return results
    past = weight.shape[1] - 1
    last = F.pad(x[:, max(x.shape[1] - past, 0) :], (0, 0, max(past - x.shape[1], 0), 0))
    return *results, last.transpose(1, 2).contiguous()


@counted("causal_conv1d")
def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    *,
    activation: Literal["silu"] | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One step: x [B, D] to y [B, D]; `state` [B, D, S] with S >= W - 1, the last S inputs, is updated in place.

    x may also be several steps, [B, T, D], which gives y [B, T, D]. The Triton path has no gradient.
    """
    if x.ndim == 3:
        y, after = causal_conv1d(
            x, weight, bias, activation=activation, initial_state=state, return_final_state=True, backend=backend
        )
        state.copy_(after)
        return y
    _check_step(x, weight, bias, activation, state)
    longer = state.shape[2] - weight.shape[1] + 1
    if longer:
        # the inputs that no tap meets any more move on as well; the copy is needed because the two views overlap
        state[..., :longer] = state[..., 1 : longer + 1].clone()
        state = state[..., longer:]
    tensors = (x, weight, bias, state)
    obstacle = NO_GRADIENT if needs_gradient(*tensors) else None
    if use_triton("causal_conv1d_step", backend, *tensors, obstacle=obstacle):
        from subquad.kernels.causal_conv1d.triton import causal_conv1d_step_triton

        with on_device_of(x):
            return causal_conv1d_step_triton(x, weight, bias, state, activation)
    window = torch.cat([state, x.to(state.dtype).unsqueeze(-1)], dim=-1)
    state.copy_(window[..., 1:])
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    y = (window.to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)


def _last_inputs(initial_state: Tensor, x: Tensor) -> Tensor:
    """The last inputs [B, D, S] of (initial state [B, D, S], x)."""
    return torch.cat([initial_state.to(x.dtype), x.transpose(1, 2)], 2)[..., x.shape[1] :].contiguous()


def _packed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seq_idx: Tensor,
    initial_state: Tensor | None,
    return_final_state: bool,
    backend: str,
) -> Tensor:
    """The convolution of packed sequences."""
    check_integers("causal_conv1d", "seq_idx", seq_idx)
    check_shapes("causal_conv1d", {"seq_idx": (seq_idx, tuple(x.shape[:2]))})
    if initial_state is not None or return_final_state:
        raise ValueError("causal_conv1d: seq_idx excludes states, which are of one sequence; leave one of both out.")
    use_triton("causal_conv1d", backend, x, weight, bias, beside=(seq_idx,), obstacle="does not take seq_idx")
    with torch.autocast(x.device.type, enabled=False):
        return causal_conv1d_chunked(x, weight, bias, activation=activation, seq_idx=seq_idx)[0]


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial_state: Tensor | None
) -> None:
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"causal_conv1d: x must be [B, T, D] with T >= 1, got {list(x.shape)}.")
    _check_filter("causal_conv1d", x.shape[2], weight, bias, activation)
    if initial_state is not None:
        _check_state("causal_conv1d: initial_state", (x.shape[0], x.shape[2]), weight, initial_state)


def _check_state(what: str, rows: tuple[int, int], weight: Tensor, state: Tensor) -> None:
    least = weight.shape[1] - 1
    if state.ndim != 3 or tuple(state.shape[:2]) != rows or state.shape[2] < least:
        raise ValueError(f"{what} must be {[*rows, least]}, or longer along the last axis, got {list(state.shape)}.")


def _check_step(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor) -> None:
    if x.ndim != 2:
        raise ValueError(f"causal_conv1d_step: x must be [B, D] or [B, T, D], got {list(x.shape)}.")
    _check_filter("causal_conv1d_step", x.shape[1], weight, bias, activation)
    _check_state("causal_conv1d_step: state", (x.shape[0], x.shape[1]), weight, state)


def _check_filter(op: str, width: int, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    if weight.ndim != 2 or weight.shape[0] != width or not 2 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"{op}: weight must be [D, W] with D={width} and W in 2..{MAX_WIDTH}, got {list(weight.shape)}; "
            "use fft_conv for longer filters."
        )
    check_shapes(op, {"bias": (bias, (width,))})
    check_choice(op, "activation", activation, (None, "silu"))
