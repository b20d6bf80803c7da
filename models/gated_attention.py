"""Gated attention: softmax attention with a sigmoid gate on the output of every head, computed from the layer's input.

    o_t = sum_{j <= t} softmax_j(R_t q_t R_j k_j / sqrt(K)) v_j,   y_t = W_o concat_h(o_t * sigmoid(W_g x_t))

R_t is the rotation at t, and x_t the input of the layer behind its norm, from which q, k and v are computed too. With
`gate: channel` W_g has a row for every channel of every head, D x D, and with `gate: head` one for every head, H x D.

Source: Qiu et al. 2025 (Gated Attention for Large Language Models, arXiv 2505.06708), section 2: the gate behind the
attention (G1), by elements and by heads. Released code: qiuzh20/gated_attention, modeling_qwen3.py at
df42212f08f0ab69d3b26956d61feff730dc3804, options elementwise_attn_output_gate and headwise_attn_output_gate.

Departures: the network is that of `transformer++`, so queries and keys have no norms of their own, and every head has
its own keys and values. The released code is a Qwen3, which normalises queries and keys and whose heads share keys and
values in groups. The rows of W_g are a matrix of their own; there they lie in that of the queries.

Parameters of a layer: 5 D^2 with a gate for each channel, 4 D^2 + H D with one for each head. Recurrent state: that of
attention, 2 T D elements per layer.
"""

from __future__ import annotations

from subquad.models.attention import OutputGate
from subquad.models.transformer import TransformerPPConfig


class GatedAttentionConfig(TransformerPPConfig):
    """`transformer++` with output gates."""

    gate: OutputGate = "channel"
    """Whether each channel of a head has its own gate, or each head."""

    @property
    def output_gate(self) -> OutputGate:
        return self.gate
