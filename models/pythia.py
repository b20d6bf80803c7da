"""Pythia, a GPT-NeoX: attention and an MLP side by side, and rotary positions in a part of every head.

    y = x + attention(norm_1(x)) + W_2 gelu(W_1 norm_2(x) + b_1) + b_2

The mixer is that of `attention`, with biases and rotary positions: of the K channels of a head r are
rotated, r = K / 4 in Pythia. Embedding and readout have weights of their own.

Source: Black et al. 2022 (arXiv 2204.06745), section 2.1; Biderman et al. 2023 (arXiv 2304.01373), table 1 and
section 2.2. With equal weights it computes what `GPTNeoXForCausalLM` of transformers computes.

Departures: channel i of a head is paired with i + K / 2, where GPT-NeoX pairs i with i + r / 2, which is a permutation
of channels (`models.checkpoints` carries it out). Weights start as everywhere in this suite.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from subquad.models.attention import Attention, AttentionConfig
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.channel import MLP
from subquad.models.parts.layer import Layer
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.positions import Rotary
from subquad.models.parts.time_axis import LeftPadding, take_positions
from subquad.suite.contracts import TaskSpec


class ExactMLP(MLP):
    """An MLP with gelu itself and not its approximation by a hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ParallelLayer(Layer):
    """A mixer and a channel mixer that read the same residual stream; what both add to it is added at once."""

    def __init__(self, config: BackboneConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.channel = ExactMLP(config.d_model, config.mlp_ratio)

    def _both(self, residual: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and what is to be added to it, given the result y of the mixer."""
        assert self.channel is not None
        assert self.channel_norm is not None
        x, _ = self._enter(self.channel_norm, residual, None)
        return residual, self.dropout(y) + self.dropout(self.channel(x))

    def forward(self, residual: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x, residual = self._enter(self.mixer_norm, residual, branch)
        return self._both(residual, self.mixer(x))

    def forward_at(self, residual: Tensor, branch: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        x, residual = self._enter(self.mixer_norm, residual, branch)
        return self._both(take_positions(residual, positions), self.mixer.forward_at(x, positions))

    def prefill(
        self, residual: Tensor, branch: Tensor | None, state: Any, padding: LeftPadding | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        x, residual = self._enter(self.mixer_norm, residual, branch)
        y, state = self.mixer.prefill(x, state, padding)
        return *self._both(residual, y), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        x, residual = self._enter(self.mixer_norm, x_t, None)
        y_t, state = self.mixer.step(x, state)
        residual, branch = self._both(residual, y_t)
        return residual + branch, state


class PythiaConfig(AttentionConfig):
    """GPT-NeoX in the shape of Pythia."""

    positions: ClassVar[tuple[str, ...]] = ("none", "learned", "sinusoidal", "rope")

    position: Literal["none", "learned", "sinusoidal", "rope", "xpos"] = "rope"
    rotary_fraction: float = Field(default=0.25, gt=0.0, le=1.0)
    """r / K, the fraction of the channels of a head that are rotated."""
    tie_embeddings: bool = False

    @property
    def rotated(self) -> int:
        """r."""
        return int(self.rotary_fraction * (self.d_model // self.num_heads))

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        windows = self.window is not None or self.masked_heads is not None
        if self.channel_mixer != "mlp" or not self.prenorm or windows:
            raise ValueError(
                "pythia: has an MLP, norms before the branches and no window; leave out channel_mixer, prenorm, window "
                "and masked_heads."
            )
        if self.rotated < 2 or self.rotated % 2:
            raise ValueError(
                f"pythia: rotary_fraction={self.rotary_fraction} of d_model / num_heads = "
                f"{self.d_model // self.num_heads} channels are {self.rotated}, which are no pairs; change one of them."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        rotary = None
        if self.position == "rope":
            rotary = Rotary(self.d_model // self.num_heads, spec.max_length, rotated=self.rotated)
        return Attention(self.d_model, self.num_heads, self.attention_dropout, self.bias, rotary)

    def layer(self, index: int, mixer: Mixer) -> Layer:
        return ParallelLayer(self, mixer)
