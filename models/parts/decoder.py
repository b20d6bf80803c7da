"""Reading the tokens of a whole sequence out of one hidden state."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.models.parts.casts import autocast_dtype
from subquad.models.parts.linear import Linear
from subquad.models.parts.norms import NormKind, add_norm, make_norm
from subquad.models.parts.positions import sinusoidal_table


class PositionDecoder(nn.Module):
    """Hidden states of all positions from that of the last one.

        h_0 = x + e_p;    h_i = gelu(W_i norm(h_{i-1}) + b_i), i = 1, 2;    y_p = norm(h_2)

    x [B, D] is the state and e_p the sinusoidal embedding of position p.

    Here x is the residual stream itself, which no final norm has changed. Source: the autoencoder of MAD (Poli et al.
    2024; athms/mad-lab, mad/model/auto_encoder.py at 6e7e4c903b7d4d1a31d12186b709f36fa3184041). Departures: the
    frequencies of e_p are 10000^(-i / (D/2)), those of the source 10000^(-i / (D/2 - 1)); the readout behind has a bias
    only with `readout_bias`.
    """

    table: Tensor

    def __init__(self, d_model: int, max_length: int, norm: NormKind, norm_eps: float) -> None:
        super().__init__()
        self.register_buffer("table", sinusoidal_table(max_length, d_model), persistent=False)
        self.norms = nn.ModuleList(make_norm(norm, d_model, norm_eps) for _ in range(3))
        self.linears = nn.ModuleList(Linear(d_model, d_model) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, D] and positions [B, P] to [B, P, D]."""
        h = x.unsqueeze(1) + F.embedding(positions.long(), self.table)
        for norm, linear in zip(self.norms[:2], self.linears, strict=True):
            h = F.gelu(linear(add_norm(norm, None, h, autocast_dtype(h))[0]))
        return add_norm(self.norms[2], None, h, autocast_dtype(h))[0]
