"""Causal softmax attention, the quadratic yardstick of every other operator.

    o_t = sum_{j <= t} softmax_j(scale q_t k_j) v_j

Source: Vaswani et al. 2017, section 3.2.1, equation 1, with the mask of section 3.2.3.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.attention.reference import attention_reference
from subquad.kernels.autograd import kept, needs_gradient
from subquad.kernels.backend import NO_ELEMENT, NO_GRADIENT, on_device_of, use_triton
from subquad.kernels.checks import check_number, check_one_dtype
from subquad.kernels.operations import counted
from subquad.kernels.rotary import rotate

__all__ = ["attention", "attention_reference", "attention_step"]

MAX_HEAD_STEP = 256
"""Maximum K of the Triton kernels of a step."""
MAX_HEAD = 128
"""Maximum K of the Triton kernels for sequences."""
MEASURED_ON = (9, 0)
"""Compute capability of the GPUs on which the float32 kernels were measured to be faster than those of torch."""
MIN_LENGTH, MIN_HEAD = 256, 33
"""Number of keys and head size from which they were."""
FEW = 4
"""Plain matrix products are faster than a fused kernel of torch with a mask where fewer than one key in `FEW` has a
query. Measured in the shape of MQAR (B 128, P 64, T 512, K 128, float32, H200)."""


@counted("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor | None = None,
    window: int | Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """o [B, P, H, K] in the dtype of v, from q [B, P, H, K] and k, v [B, T, H, K], any T >= 1 and P >= 1.

    positions: [B, P], int64, strictly ascending in every row: query i sees the keys up to positions[b, i]. None: P = T,
               and query i stands at i.
    window:    how many keys a query sees, the one at its own position included; None: all up to there. A tensor [H] of
               int64 has a number of at least 1 for each head, which is not checked, because it lies on the device. With
               one number for all heads and without `positions`, T / window pairs of blocks are multiplied instead of
               all pairs of positions.
    scale:     K^-0.5 where None.
    dropout:   probability with which a weight is set to zero; the others are divided by 1 - dropout. The random numbers
               are those of torch's generator of the device, and differ between the backends.
    backend:   triton takes float32 with K up to 128 and adds in a fixed order, so that two calls give the same bits.
               torch runs its own fused kernels, which take half precision without forming the matrix of all pairs;
               where a float32 gradient is wanted on a CPU it runs plain products, which form that matrix.
               auto takes the Triton kernels for long float32 sequences on the GPUs where they are faster, unless torch
               may round to TF32, autocast is on, `torch.compile` is at work or torch's memory-efficient kernel is
               switched off.

    Raises ValueError for shapes or options that do not fit.
    """
    _check(q, k, v, positions, window, scale, dropout)
    check_one_dtype("attention", {"q": q, "k": k, "v": v})
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(window, int) and window >= k.shape[1]:
        window = None
    options: dict[str, Any] = {"obstacle": _obstacle(q, k, v, window), "is_faster": _is_faster(q, k)}
    if use_triton("attention", backend, q, k, v, beside=(positions, window), **options):
        from subquad.kernels.attention.triton import attention_triton

        with on_device_of(q):
            return attention_triton(q, k, v, positions=positions, scale=scale, dropout=dropout)
    queries, length = q.shape[1], k.shape[1]
    if scale <= 0:
        # the fused kernels multiply the minus infinity of a key that is not seen by the scale
        q, scale = q * scale, 1.0
    plain = _fused_gradients_lose_digits(q, k, v)
    if positions is None and isinstance(window, int):
        return _by_blocks(q, k, v, window, scale, dropout, plain)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if positions is None and window is None and not plain:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, dropout_p=dropout)
        return o.transpose(1, 2)
    keys = torch.arange(length, device=q.device)
    last = keys[:, None] if positions is None else positions[:, None, :, None]
    seen = keys <= last
    if isinstance(window, int):
        seen = seen & (keys > last - window)
    elif window is not None:
        # four axes, because torch has no fused kernel for a mask of three
        seen = (seen & (keys > last - window[:, None, None])).view(-1, q.shape[1], queries, length)
    is_dense = queries * FEW > length and not plain
    return _masked(q, k, v, seen, scale, dropout, is_dense).transpose(1, 2)


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, dropout: float, fused: bool) -> Tensor:
    """o [B, H, P, K] with the keys that a mask leaves, by a fused kernel of torch or by plain products."""
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, dropout_p=dropout)
    scores = (q @ k.mT * scale).masked_fill(~seen, -math.inf)
    return F.dropout(scores.softmax(-1), dropout) @ v


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, dropout: float, plain: bool) -> Tensor:
    """Attention to the last `window` keys: every block of as many queries meets its own keys and those just before."""
    batch, length, heads, size = q.shape
    count = -(-length // window)

    def blocks(x: Tensor) -> Tensor:
        """[B, T, H, K] as [B, blocks, H, window, K], with zeros after the end."""
        padded = F.pad(x, (0, 0, 0, 0, 0, count * window - length))
        return padded.unflatten(1, (count, window)).transpose(2, 3)

    def with_the_last(x: Tensor) -> Tensor:
        return torch.cat([F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), x], dim=3).flatten(0, 1)

    q, k, v = blocks(q).flatten(0, 1), with_the_last(blocks(k)), with_the_last(blocks(v))
    queries, keys = torch.arange(window, device=q.device)[:, None], torch.arange(-window, window, device=q.device)
    seen = (keys <= queries) & (keys > queries - window)
    # nothing lies before the first block
    is_first = torch.arange(count, device=q.device)[:, None, None] == 0
    seen = seen & ((keys >= 0) | ~is_first)
    seen = seen.expand(batch, *seen.shape).flatten(0, 1).unsqueeze(1)
    o = _masked(q, k, v, seen, scale, dropout, not plain)
    return o.unflatten(0, (batch, count)).transpose(2, 3).reshape(batch, count * window, heads, size)[:, :length]


def _obstacle(q: Tensor, k: Tensor, v: Tensor, window: int | Tensor | None) -> str | None:
    """Why the Triton kernels cannot take these arguments, or None."""
    if window is not None:
        return "has no window"
    for x in (q, k, v):
        if x.dtype != torch.float32:
            return f"takes float32, got {x.dtype}: for half precision, torch has a fused kernel"
    return f"takes K up to {MAX_HEAD}, got {q.shape[3]}" if q.shape[3] > MAX_HEAD else None


def _fused_gradients_lose_digits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """torch's fused kernel for CPUs errs up to four times as much in a float32 gradient as plain products do."""
    return q.device.type == "cpu" and q.dtype == torch.float32 and needs_gradient(q, k, v)


def _is_faster(q: Tensor, k: Tensor) -> bool:
    return (
        q.is_cuda
        and k.shape[1] >= MIN_LENGTH
        and q.shape[3] >= MIN_HEAD
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
        and not torch.backends.cuda.matmul.allow_tf32
        and torch.backends.cuda.mem_efficient_sdp_enabled()
        and torch.cuda.get_device_capability(q.device) == MEASURED_ON
    )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    window: int | Tensor | None,
    scale: float | None,
    dropout: float,
) -> None:
    fits = q.dim() == 4 and k.dim() == 4 and 0 not in (*k.shape[1:], q.shape[1]) and v.shape == k.shape
    fits = fits and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fits or (positions is None and q.shape[1] != k.shape[1]):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(
            "attention: k and v must be [B, T, H, K] with T, H, K >= 1 and q of the same shape, or with `positions` "
            f"[B, P, H, K]; got q, k and v {shapes}."
        )
    if positions is not None and (positions.shape != q.shape[:2] or positions.dtype != torch.int64):
        raise ValueError(
            f"attention: positions must be {list(q.shape[:2])} and int64, got {list(positions.shape)} and "
            f"{positions.dtype}."
        )
    if not isinstance(window, Tensor | None) and (not isinstance(window, int) or window < 1):
        raise ValueError(f"attention: window must be at least 1 and whole, got {window}.")
    if isinstance(window, Tensor) and (window.shape != q.shape[2:3] or window.dtype != torch.int64):
        raise ValueError(
            f"attention: window must be a number or [{q.shape[2]}] and int64, one for each head, got "
            f"{list(window.shape)} and {window.dtype}."
        )
    check_number("attention", "scale", scale)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"attention: dropout must be at least 0 and below 1, got {dropout}.")


@counted("attention_step")
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    window: Tensor | None = None,
    scale: float | None = None,
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Tensor:
    """One position, for decoding: o [B, H, K] in the dtype of v; keys, values and count are updated in place.

    q, k, v:      [B, H, K], of the new position.
    keys, values: [B, capacity, H, K], of which the first count[b] positions of row b are read. What lies behind them
                  is finite. The new key (rotated) and value are written there, and the count grows by one.
    count:        [B], int64. In a cache that is full, the last position is overwritten.
    cos, sin:     [positions, K / 2]. Where they are given, q and k are rotated: channels i and i + K / 2 by the angle i
                  of their position.
    window:       [H], int64, at least 1: each head sees so many last positions, the new one included; with None it
                  sees all. In a full cache they are counted from its end.
    scale:        K^-0.5 where None.
    backend:      the Triton kernels take K up to 256 and have no gradient; auto takes plain PyTorch where one is
                  recorded. Neither reads the count on the host.

    Raises ValueError for shapes that do not fit.
    """
    _check_step(q, k, v, keys, values, count, cos, sin, window)
    check_number("attention_step", "scale", scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, keys, values, cos, sin)
    obstacle = None
    if needs_gradient(*tensors):
        obstacle = NO_GRADIENT
    elif not q.numel():
        obstacle = NO_ELEMENT
    elif q.shape[-1] > MAX_HEAD_STEP:
        obstacle = f"takes K up to {MAX_HEAD_STEP}, got {q.shape[-1]}"
    elif keys.stride() != values.stride() or keys.stride(3) != 1:
        obstacle = "takes keys and values of equal strides with contiguous channels"
    if use_triton("attention_step", backend, *tensors, beside=(count, window), obstacle=obstacle):
        from subquad.kernels.attention.triton import attention_step_triton

        with on_device_of(q):
            return attention_step_triton(q, k, v, keys, values, count, cos=cos, sin=sin, window=window, scale=scale)
    now = count.clamp(max=keys.shape[1] - 1)
    if cos is not None and sin is not None:
        tables = [F.embedding(now, table).unsqueeze(1) for table in (cos, sin)]
        q, k = (rotate(x, *tables) for x in (q, k))
    rows = torch.arange(len(count), device=count.device)
    keys[rows, now], values[rows, now] = k.to(keys.dtype), v.to(values.dtype)
    behind = now[:, None, None, None] - torch.arange(keys.shape[1], device=count.device)
    seen = behind >= 0
    if window is not None:
        seen = seen & (behind < window[:, None, None])
    count += 1
    past_keys, past_values = (kept(x).to(q.dtype).transpose(1, 2) for x in (keys, values))
    scores = q.unsqueeze(2) @ past_keys.mT * scale
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ past_values).squeeze(2).to(v.dtype)


def _check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    window: Tensor | None,
) -> None:
    if q.dim() != 3 or k.shape != q.shape or v.shape != q.shape or 0 in q.shape[1:]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"attention_step: q, k and v must be [B, H, K], all of one shape with H, K >= 1, got {shapes}."
        )
    batch, heads, size = q.shape
    capacity = keys.shape[1] if keys.dim() == 4 else 0
    wanted = {"keys": (keys, (batch, capacity, heads, size)), "values": (values, (batch, capacity, heads, size))}
    for name, (tensor, shape) in {**wanted, "count": (count, (batch,))}.items():
        if tuple(tensor.shape) != shape or capacity < 1:
            least = "" if capacity else " with a capacity of at least 1"
            raise ValueError(f"attention_step: {name} must be {list(shape)}{least}, got {list(tensor.shape)}.")
    if count.dtype != torch.int64:
        raise ValueError(f"attention_step: count must be int64, got {count.dtype}.")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (table.dim() != 2 or table.shape[1] * 2 != size or table.shape[0] < capacity):
            raise ValueError(
                f"attention_step: {name} must be [positions, {size // 2}] with at least {capacity} positions, "
                f"got {list(table.shape)}."
            )
    if (cos is None) != (sin is None):
        raise ValueError("attention_step: cos and sin are given together or not at all.")
    if window is not None and (window.shape != q.shape[1:2] or window.dtype != torch.int64):
        raise ValueError(
            f"attention_step: window must be [{heads}] and int64, one number for each head, got {list(window.shape)} "
            f"and {window.dtype}."
        )
