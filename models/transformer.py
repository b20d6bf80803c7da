"""Transformer++: attention with the modern recipe, which is rotary positions, SwiGLU, RMS norms and no biases.

    o_t = sum_{j <= t} softmax_j(R_t q_t R_j k_j / sqrt(K)) v_j,   y_t = W_o concat_h(o_t)          R_t: rotation at t

Source: Mamba paper (Gu and Dao 2023), section 4.2; GSA paper (Zhang et al. 2024), appendix C.1; Touvron et al. 2023.
"""

from __future__ import annotations

from typing import Literal

from subquad.models.attention import AttentionConfig
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.norms import NormKind
from subquad.suite.bounds import Ratio, Width


class TransformerPPConfig(AttentionConfig):
    """The mixer of `attention` in the network of Llama."""

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 8 / 3
    norm: NormKind = "rms"
    position: Literal["none", "learned", "sinusoidal", "rope", "xpos"] = "rope"
    num_heads: Width = 4
    bias: bool = False
