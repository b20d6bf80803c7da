"""The selective scan as a parallel scan in PyTorch without kernel fusion: the baseline of Mamba's figure 8.

Every tensor of the recurrence h_t = a_t h_{t-1} + b_t is materialised as [batch, length, width, N]. Steps combine by

the associative rule

(a, b) o (a', b') = (a a', a' b + b')

in the work-efficient scan that the paper builds on (section 3.3.2; Blelloch 1990): neighbours are paired, the sequence
of pairs is scanned by the same rule, and the states in between follow with one more step each. That is 2 log2(length)
dependent passes over tensors that halve in length, with three products for each element of [batch, length, width, N].

Source: Mamba (Gu & Dao 2023), appendices D and E.5, which say no more than that it is a standard parallel scan.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def scan(a: Tensor, b: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t along axis 1 of a and b, from h = 0 before the first step."""
    length = a.shape[1]
    if length == 1:
        return b
    first, second = slice(0, length - length % 2, 2), slice(1, None, 2)
    odd = scan(a[:, first] * a[:, second], torch.addcmul(b[:, second], a[:, second], b[:, first]))
    h = torch.empty_like(b)
    h[:, 0] = b[:, 0]
    h[:, 1::2] = odd
    h[:, 2::2] = torch.addcmul(b[:, 2::2], a[:, 2::2], odd[:, : (length - 1) // 2])
    return h


def selective_scan_unfused(
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
) -> Tensor:
    """y of `selective_scan` in the dtype of x, for real A and for B and C that depend on the input.

    Shapes are those of `selective_scan`; the computation is at least in float32.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, A.dtype), torch.float32)
    inputs, step = x.to(wide), dt.to(wide)
    if dt_bias is not None:
        step = step + dt_bias.to(wide)
    if dt_softplus:
        step = F.softplus(step)
    decay = torch.exp(step.unsqueeze(-1) * A.to(wide))
    h = scan(decay, (step * inputs).unsqueeze(-1) * B.to(wide).unsqueeze(2))
    y = torch.einsum("btdn,btn->btd", h, C.to(wide))
    if D is not None:
        y = y + D.to(wide) * inputs
    if z is not None:
        y = y * F.silu(z.to(wide))
    return y.to(x.dtype)
