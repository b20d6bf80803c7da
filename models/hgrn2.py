"""HGRN2: a gated linear RNN with a matrix state, whose input gate is one minus its forget gate.

    f_t = lb + (1 - lb) sigmoid(W_f x_t),   S_t = diag(f_t) S_{t-1} + (1 - f_t)^T v_t,   o_t = swish(W_q x_t) S_t
    y_t = W_o norm(o_t)

lb [D] is a lower bound of the forget gate that grows with depth, so that upper layers remember longer: every layer l
has one learned row g_l, and lb_l = sum_{1 <= i <= l} softmax_i(g)_i, which is zero in the first layer.

Source: Qin et al. 2024, section 3; the lower bound is that of HGRN (Qin et al. 2023), section 3.3. In the GSA paper,
appendix C.1, heads of keys and values have a size of 128, so the state of a layer has 128 D elements.

Departure: o is scaled by K^-0.5. The norm that follows undoes this, except for the effect of its epsilon.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.forget_gate import forget_gate
from subquad.models.backbone import SwiGLUConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.linear_attention import GatedLinearMixer, Projected
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import RMSNorm
from subquad.models.parts.options import require_divides
from subquad.models.parts.step import step_linear
from subquad.suite.bounds import Epsilon, Width
from subquad.suite.contracts import TaskSpec


class LowerBounds(nn.Module):
    """The lower bounds of all layers, computed from one parameter [layers, D] that the layers share."""

    def __init__(self, num_layers: int, d_model: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_layers, d_model))

    def forward(self, forget: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """log f and 1 - f of a layer >= 1 from its logits [..., D]; the first layer (0) has no bound."""
        log_f, rest = forget_gate(forget, self.logits, layer=layer)
        assert rest is not None
        return log_f, rest


class HGRN2(GatedLinearMixer):
    """The mixer. Its state: [B, H, K, K]."""

    def __init__(self, config: HGRN2Config, layer: int, lower_bounds: LowerBounds | None) -> None:
        super().__init__()
        d_model, self.num_heads = config.d_model, config.heads
        self.key_dim = self.value_dim = d_model // self.num_heads
        self.layer = layer
        self.lower_bounds = lower_bounds
        self.proj = nn.Linear(d_model, 3 * d_model, bias=False)
        self.norm = RMSNorm(d_model, eps=config.output_norm_eps or config.norm_eps)
        self.out = ResidualLinear(d_model, d_model, bias=False)

    def _project(self, x: Tensor, norm: nn.Module | None = None) -> Projected:
        q, forget, v = step_linear(self.proj, x, norm=norm).chunk(3, dim=-1)
        # log f and 1 - f are computed from the logits, so that neither rounds to zero
        if self.lower_bounds is None:
            forget = at_least_float32(forget)
            log_decay, k = F.logsigmoid(forget), torch.sigmoid(-forget)
        else:
            log_decay, k = self.lower_bounds(forget, self.layer)
        # one float32 operand would make the operator multiply in float32
        k = k.to(v.dtype)
        q, k, v, log_decay = (z.unflatten(-1, (self.num_heads, -1)) for z in (F.silu(q), k, v, log_decay))
        return q, k, v, log_decay, None


class HGRN2Config(SwiGLUConfig):
    """HGRN2 in the network of the GSA paper: RMS norms and SwiGLU."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *SwiGLUConfig.left_out_when_off, "expand_ratio", "output_norm_eps",
    )  # fmt: skip

    num_heads: Width = 4
    """The GSA paper keeps d_model / num_heads, the expansion of the state, at 128."""
    expand_ratio: Width | None = None
    """Size of a head at any width, but at most d_model; where given, `num_heads` is not used. HGRN2's authors set 128
    on MQAR, which is 1, 1, 2 and 4 heads at the widths 64 to 512 (OpenNLPLab/Zoology at
    2af2135f4e3649a44a78b7938c70eb7b244e8965, zoology/experiments/hgrn/hgrn2.py)."""
    lower_bound: bool = True
    output_norm_eps: Epsilon | None = None
    """Epsilon of the norm of o_t. None: `norm_eps`. In flash-linear-attention it is 1e-5 whatever `norm_eps` is."""

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.num_heads if self.expand_ratio is None else self.d_model // min(self.expand_ratio, self.d_model)

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        name = type(self).__name__
        if self.expand_ratio is None:
            require_divides(name, num_heads=self.num_heads, d_model=self.d_model)
        elif self.expand_ratio < self.d_model:
            require_divides(name, expand_ratio=self.expand_ratio, d_model=self.d_model)

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        shared = LowerBounds(self.num_layers, self.d_model) if self.lower_bound and self.num_layers > 1 else None
        return [HGRN2(self, layer, shared if layer else None) for layer in range(self.num_layers)]
