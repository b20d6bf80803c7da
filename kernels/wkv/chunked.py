"""WKV in plain PyTorch with its own gradient, by segments of time that run side by side.

Time is cut into about sqrt(T) segments. All run at once from an empty state, which gives the end of each; a loop over
segments turns the ends into true starts, and all segments run again from these. So the loop over time has about
3 sqrt(T) rounds in place of T.

Backward. With N_t and M_t the sums of the numerator and the denominator up to step t, z_t = log(M_{t-1} + exp(u + k_t))
and q_t = exp(-z_t) dy_t, the gradients G_t of N_t and H_t of M_t obey the same recurrence in reversed time,

    G_{t-1} = exp(w) G_t + q_t;   H_{t-1} = exp(w) H_t - q_t y_t
    dv_t = exp(k_t) G_t + exp(u + k_t) q_t
    dk_t = exp(k_t) (G_t v_t + H_t) + exp(u + k_t) q_t (v_t - y_t);   du = sum_t exp(u + k_t) q_t (v_t - y_t)

and are kept as g exp(r) and h exp(r) with r_{t-1} = max(r_t + w, -z_t). No exponent above is positive. The gradient of
w takes the derivatives N'_t = exp(w) (N'_{t-1} + N_{t-1}) and M'_t by w forward in time, with zero at the start of
every segment, because the gradient behind a segment accounts for the rest:

    dw = sum_t q_t (N'_{t-1} - y_t M'_{t-1}) + sum over segments (G N' + H M' at the end)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.autograd import OnceDifferentiable
from subquad.kernels.wkv.reference import EMPTY, State, advance


def wkv_chunked(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [batch, length, width] and the final state [batch, 3, width]; the computation is at least in float32."""
    real = torch.promote_types(torch.promote_types(k.dtype, log_decay.dtype), torch.float32)
    if initial_state is None:
        initial_state = _empty(k[:, 0].to(real))
    y, state = _WKV.apply(*(m.to(real) for m in (k, v, log_decay, bonus, initial_state)))
    return y.to(v.dtype), state


def _empty(like: Tensor) -> Tensor:
    """The empty state for each row of [..., width], with its three parts on axis -2."""
    zero = torch.zeros_like(like)
    return torch.stack([zero, zero, torch.full_like(zero, EMPTY)], -2)


class _WKV(OnceDifferentiable):
    """Arguments of one dtype; the initial state [batch, 3, width]."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, w: Tensor, u: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        length = k.shape[1]
        size = max(1, math.isqrt(length))
        keys, values = _cut(k, size, EMPTY), _cut(v, size, 0.0)
        starts, _ = _starts(_ends(keys, values, w), w, size, initial.unbind(1))
        state = tuple(starts)
        outputs, logs = [], []
        last = (length - 1) % size
        final = state
        for i, (k_t, v_t) in enumerate(zip(keys, values, strict=True)):
            a, b, p = state
            scale = torch.maximum(p, u + k_t)
            past, present = torch.exp(p - scale), torch.exp(u + k_t - scale)
            total = past * b + present
            outputs.append((past * a + present * v_t) / total)
            logs.append(scale + total.log())
            state = advance(k_t, v_t, w, state)
            if i == last:
                final = tuple(part[:, -1] for part in state)
        y, z = _join(outputs, length), _join(logs, length)
        ctx.save_for_backward(k, v, w, u, initial, y, z, final[2], *starts)
        return y, torch.stack(final, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        k, v, w, u, initial, y, z, final_scale, *starts = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
            return _backward(k, v, w, u, initial, y, z, starts, (dfinal[:, 0], dfinal[:, 1], -final_scale), dy)


def _cut(x: Tensor, size: int, padding: float) -> list[Tensor]:
    """[batch, T, width] as `size` steps [batch, segments, width], one of each segment."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat([x, x.new_full((x.shape[0], missing, x.shape[2]), padding)], 1)
    return list(x.unflatten(1, (-1, size)).unbind(2))


def _join(steps: list[Tensor], length: int) -> Tensor:
    """The inverse of `_cut`."""
    return torch.stack(steps, 2).flatten(1, 2)[:, :length]


def _ends(keys: list[Tensor], values: list[Tensor], w: Tensor) -> State:
    """The state behind every segment from an empty one, [batch, segments, width] each."""
    state: State = tuple(_empty(keys[0]).unbind(-2))
    for k_t, v_t in zip(keys, values, strict=True):
        state = advance(k_t, v_t, w, state)
    return state


def _starts(ends: State, w: Tensor, size: int, first: State) -> tuple[list[Tensor], State]:
    """The state before every segment, from the ends of all from an empty state; and that behind the last one."""
    state, starts = first, []
    for end in zip(*(part.unbind(1) for part in ends), strict=True):
        starts.append(state)
        state = _add(state, end, w * size)
    return [torch.stack(parts, 1) for parts in zip(*starts, strict=True)], state


def _add(state: State, end: State, decay: Tensor) -> State:
    """The sum of exp(decay) times a state and another one."""
    (a, b, p), (c, d, q) = state, end
    scale = torch.maximum(p + decay, q)
    before, after = torch.exp(p + decay - scale), torch.exp(q - scale)
    return before * a + after * c, before * b + after * d, scale


def _backward(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial: Tensor,
    y: Tensor,
    z: Tensor,
    starts: list[Tensor],
    behind: State,
    dy: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments of `_WKV`. behind: G and H behind the last step, as g, h and r."""
    length = k.shape[1]
    size = max(1, math.isqrt(length))
    keys, values = _cut(k, size, EMPTY), _cut(v, size, 0.0)
    # exp(-z) is zero in a padded step
    steps = list(zip(keys, values, _cut(y, size, 0.0), _cut(z, size, math.inf), _cut(dy, size, 0.0), strict=True))
    last = (length - 1) % size

    def retreat(state: State, i: int) -> State:
        """The gradients before step i of every segment from those behind it."""
        _, _, y_t, z_t, dy_t = steps[i]
        g, h, r = state
        # the steps behind the last one of the sequence do not decay anything
        inside = torch.ones_like(r, dtype=torch.bool)
        inside[:, -1] = i <= last
        scale = torch.maximum(r + w, -z_t)
        later, now = torch.exp(r + w - scale), torch.exp(-z_t - scale) * dy_t
        return (
            torch.where(inside, later * g + now, g),
            torch.where(inside, later * h - now * y_t, h),
            torch.where(inside, scale, r),
        )

    local: State = tuple(_empty(keys[0]).unbind(-2))
    for i in range(size - 1, -1, -1):
        local = retreat(local, i)
    # from the last segment to the first
    state, ends = behind, []
    for index in range(keys[0].shape[1] - 1, -1, -1):
        ends.append(state)
        steps_here = last + 1 if index == keys[0].shape[1] - 1 else size
        state = _add(state, tuple(part[:, index] for part in local), w * steps_here)
    g, h, r = (torch.stack(parts[::-1], 1) for parts in zip(*ends, strict=True))
    dinitial = torch.zeros_like(initial)
    size_of = torch.exp(initial[:, 2] + state[2])
    dinitial[:, 0], dinitial[:, 1] = size_of * state[0], size_of * state[1]

    after: State = (g, h, r)
    dk, dv, du = [], [], torch.zeros_like(u)
    for i in range(size - 1, -1, -1):
        k_t, v_t, y_t, z_t, dy_t = steps[i]
        g_t, h_t, r_t = after
        past, present = torch.exp(k_t + r_t), torch.exp(u + k_t - z_t) * dy_t
        direct = present * (v_t - y_t)
        dv.append(past * g_t + present)
        dk.append(past * (g_t * v_t + h_t) + direct)
        du += direct.sum((0, 1))
        after = retreat(after, i)

    a, b, p = starts
    da, db = torch.zeros_like(a), torch.zeros_like(a)
    dw = torch.zeros_like(a)
    for i, (k_t, v_t, y_t, z_t, dy_t) in enumerate(steps):
        dw += torch.exp(p - z_t) * dy_t * (da - y_t * db)
        scale = torch.maximum(p + w, k_t)
        past, present = torch.exp(p + w - scale), torch.exp(k_t - scale)
        inside = torch.ones_like(a, dtype=torch.bool)
        inside[:, -1] = i <= last
        da, db = (torch.where(inside, past * (d + m), d) for d, m in ((da, a), (db, b)))
        a, b = (torch.where(inside, m, n) for m, n in ((past * a + present * v_t, a), (past * b + present, b)))
        p = torch.where(inside, scale, p)
    dw += torch.exp(p + r) * (g * da + h * db)
    return _join(dk[::-1], length), _join(dv[::-1], length), dw.sum((0, 1)), du, dinitial
