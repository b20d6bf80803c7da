"""Position-wise networks, the second branch of a layer."""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.swiglu import swiglu
from subquad.models.parts.linear import Linear, ResidualLinear, linear_behind
from subquad.models.parts.step import step_linear

ChannelMixerKind = Literal["none", "identity", "mlp", "swiglu"]


class ChannelMixer(nn.Module):
    """Base class of the position-wise networks of a layer."""

    def branch_step(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x + self(norm(x)) at one position, x [B, D]."""
        raise NotImplementedError


class MLP(ChannelMixer):
    """y = W2 gelu(W1 x + b1) + b2 with W1 [ratio D, D]."""

    def __init__(self, d_model: int, ratio: float) -> None:
        super().__init__()
        inner = round(ratio * d_model)
        self.up = Linear(d_model, inner)
        self.down = ResidualLinear(inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def branch_step(self, x: Tensor, norm: nn.Module) -> Tensor:
        return step_linear(self.down, step_linear(self.up, x, norm=norm, activation="gelu"), residual=x)


class SwiGLU(ChannelMixer):
    """y = W2 (silu(Wg x) * W1 x) without biases; the inner width is ratio D, rounded up to a multiple of 8.

    Source: Shazeer 2020, GLU variants improve Transformer. Llama's 2/3 of 4 D is the ratio 8/3.
    """

    def __init__(self, d_model: int, ratio: float) -> None:
        super().__init__()
        inner = 8 * math.ceil(ratio * d_model / 8)
        self.gate_up = nn.Linear(d_model, 2 * inner, bias=False)
        self.down = ResidualLinear(inner, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_behind(swiglu, self.down, self.gate_up(x))

    def branch_step(self, x: Tensor, norm: nn.Module) -> Tensor:
        both = step_linear(self.gate_up, x, norm=norm)
        if len(x) > 1:
            return step_linear(self.down, swiglu(both), residual=x)
        gate, up = both.chunk(2, dim=-1)
        return step_linear(self.down, up, gate=gate, residual=x)


def make_channel_mixer(kind: ChannelMixerKind, d_model: int, ratio: float) -> nn.Module | None:
    """The position-wise network of a layer, or None for the kind `none`.

    With `identity` the branch of the channel mixer stays and adds the normalised input itself, x + norm(x). Zoology's
    block does so where its state mixer is `torch.nn.Identity`, as in all of its grids of associative recall
    (HazyResearch/zoology at d88d6f5474f36998d82d5c3bd58a190248d0a669, zoology/model.py, class TransformerBlock).
    """
    if kind == "none":
        return None
    if kind == "identity":
        return nn.Identity()
    return MLP(d_model, ratio) if kind == "mlp" else SwiGLU(d_model, ratio)
