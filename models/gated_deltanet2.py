"""Gated DeltaNet-2: Kimi Delta Attention with two gates in place of beta, one that erases and one that writes.

    q, k, v, a_t and the output gate as in KDA (models/deltanet.py), with |q_t| = |k_t| = 1
    b_t = sigmoid(W_b x_t), or twice that, one a key channel;    w_t = sigmoid(W_w x_t), one a value channel
    S_t = S_{t-1} diag(a_t) (I - (b_t * k_t) k_t^T) + (w_t * v_t) k_t^T,    o_t = S_t q_t / sqrt(K)

With b_t = w_t = beta_t in all channels this is KDA. S_t is the transpose of the paper's. It runs on the operator
`delta_rule` with beta = 1, which reads the state for the key b_t * k_t and writes under the key k_t (`write`).

Source: Hatamizadeh et al. 2026 (Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, arXiv 2605.22791).
Parameters, their start and the recurrence are those of flash-linear-attention (fla-org/flash-linear-attention):
fla/layers/gdn2.py at 0c4a361b535fc4fb5ff18d7a613da53aae8bdfc7.

Departures: those of KDA. Where values have more heads than keys (`num_value_heads`), each of them has decays of its own
as in KDA here; there they share those of their key.

Parameters of a layer: 6 D^2 and those of KDA for decays, output gates, convolutions and norm. Recurrent state: that of
KDA, the last inputs of the convolutions and K V elements a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subquad.kernels.delta_rule import delta_rule, delta_rule_step
from subquad.models.deltanet import DeltaMixer, Inputs, KDAConfig, Parts, Read
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.recompute import Keep, at_once
from subquad.suite.contracts import TaskSpec


def _read_and_written(k: Tensor, v: Tensor, erase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys that are read [..., G, K], a beta of one [..., H], and the keys that are written [..., H, K]."""
    written = k.repeat_interleave(v.shape[-2] // k.shape[-2], dim=-2)
    return (erase * k).to(k.dtype), v.new_ones(v.shape[:-1]), written


def erase_and_write(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, log_decay: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`delta_rule` with the gates `erase` [B, T, G, K], of the read keys alone, in place of its beta."""
    read, beta, written = _read_and_written(k, v, erase)
    return delta_rule(q, read, v, beta, log_decay, write=written, **options)


def erase_and_write_step(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, log_decay: Tensor, state: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """One position of `erase_and_write`."""
    read, beta, written = _read_and_written(k, v, erase)
    return delta_rule_step(q, read, v, beta, log_decay, state, write=written, **options)


class GatedDeltaNet2Mixer(DeltaMixer):
    """The mixer, whose `beta` are the gates that erase. Its state is that of `DeltaMixer`."""

    operator = staticmethod(erase_and_write)
    step_operator = staticmethod(erase_and_write_step)

    def __init__(self, config: GatedDeltaNet2Config) -> None:
        super().__init__(config)
        self.write = nn.Linear(config.d_model, config.value_width, bias=False)

    def _readers(self) -> list[nn.Linear]:
        return [*super()._readers(), self.write]

    def _heads(self, parts: Parts, read: Read, keep: Keep = at_once) -> Inputs:
        q, k, v, erase, log_decay = super()._heads(parts, read, keep)
        gate = self._sigmoid(read.others[0])
        return q, k, (gate.view_as(v) * v).to(v.dtype), erase.view_as(k), log_decay


class GatedDeltaNet2Config(KDAConfig):
    """Gated DeltaNet-2, in the sizes of KDA. With `negative_eigenvalues` the gates that erase go up to 2."""

    @property
    def num_betas(self) -> int:
        return self.key_width

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return GatedDeltaNet2Mixer(self)
