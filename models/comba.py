"""Comba: the delta rule as a control loop, which feeds back what the undecayed state holds and corrects its output.

    q, k, v, beta_t, a_t as in Gated DeltaNet (models/deltanet.py), with |q_t| = |k_t| = 1;   b = sigmoid(c)
    S_t = S_{t-1} (a_t I - beta_t b k_t k_t^T) + beta_t v_t k_t^T,     o_t = S_t (q_t - d k_t) / sqrt(K)
    y = W_o (norm_h(o) * sigmoid(W_g x))

The transition is a scalar plus a matrix of rank one. b, the strength of the feedback, and d, that of the correction of
the output, are learned, one a head of keys. In Gated DeltaNet the decayed state is read, a_t (I - beta_t k_t k_t^T),
and d is zero. An eigenvalue of the transition is a_t - beta_t b, which is above -1 and may be negative.

It runs on the operator `delta_rule` of Gated DeltaNet, which decays the state before it is read. With r_t = b / a_t,

    S_t = a_t S_{t-1} (I - beta'_t k_t k_t^T) + beta'_t v'_t k_t^T,    beta'_t = r_t beta_t,    v'_t = v_t / r_t

is the recurrence above.

Source: Hu et al. 2025 (Improving Bilinear RNNs with Closed-loop Control, arXiv 2506.02475), the scalar-plus-low-rank
form. Parameters and their start are those of the authors' layer in flash-linear-attention
(fla-org/flash-linear-attention): fla/layers/comba.py at 0d927fdd6fcca3f39ea7e69a154d18142a869cd3, operator
fla/ops/comba/fused_recurrent.py at 07815769467e8bda006e029feb5982c52c14d48b.

Departures: that layer forms p = b k and q - d p before it normalises keys and queries, and its operator normalises p as
well, which cancels b. Here b scales a unit key, and d k is subtracted from a unit query, as in the equations. Since r_t
must be finite, a decay below e^-16 = 1.1e-7 (in float16 below e^-8 = 3.4e-4) is taken as that, and b is at least 2^-10.
Neither b nor d is subject to weight decay; there b is. Widths of heads follow from `d_model`.

Parameters of a layer: 6 D^2 and those of Gated DeltaNet for the heads, and 2 more a head of keys. Recurrent state: that
of Gated DeltaNet, the last inputs of the convolutions and K V elements a head.
"""

from __future__ import annotations

import torch
from torch import nn

from subquad.models.deltanet import DeltaMixer, GatedDeltaNetConfig, Inputs, Parts, Read
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.recompute import Keep, at_once
from subquad.suite.bounds import NonNegative
from subquad.suite.contracts import TaskSpec

LOWEST_LOG_DECAY = -16.0
"""The smallest logarithm of a decay: the rounding of float32 loses all of a state that decays farther."""
LOWEST_LOG_DECAY_FLOAT16 = -8.0
"""float16 still holds values that are scaled by it."""
LOWEST_STRENGTH = 2.0**-10


class CombaMixer(DeltaMixer):
    """The mixer. Its state is that of `DeltaMixer`."""

    gate_activation = "sigmoid"

    def __init__(self, config: CombaConfig) -> None:
        super().__init__(config)
        self.feedback = nn.Parameter(torch.ones(self.num_key_heads))
        """[G], the c of b = sigmoid(c)."""
        self.correction = nn.Parameter(torch.full((self.num_key_heads,), config.correction))
        """[G], the d."""

    def _heads(self, parts: Parts, read: Read, keep: Keep = at_once) -> Inputs:
        q, k, v, beta, log_decay = super()._heads(parts, read, keep)
        assert log_decay is not None
        log_decay = log_decay.clamp(min=LOWEST_LOG_DECAY_FLOAT16 if v.dtype == torch.float16 else LOWEST_LOG_DECAY)
        strength = torch.sigmoid(at_least_float32(self.feedback)).clamp(min=LOWEST_STRENGTH)
        # one step a token, whose axis the decays lack
        ratio = (strength.repeat_interleave(self.num_heads // self.num_key_heads) * torch.exp(-log_decay)).unsqueeze(-2)
        corrected = q - at_least_float32(self.correction).unsqueeze(-1) * k.squeeze(-3)
        return corrected.to(q.dtype), k, (v / ratio.unsqueeze(-1)).to(v.dtype), ratio * beta, log_decay

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {**super().ssm_parameters(), "feedback": self.feedback, "correction": self.correction}


class CombaConfig(GatedDeltaNetConfig):
    """Comba, with the widths of Gated DeltaNet."""

    correction: NonNegative = 1.0
    """d at the start. The authors take 1 for 1.3 billion parameters and 0.02 for 340 million."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.negative_eigenvalues:
            raise ValueError(
                "CombaConfig: negative_eigenvalues doubles beta, and a - beta b could pass -1, where the state grows; "
                "leave it out: a - beta b can be negative without it."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return CombaMixer(self)
