"""Rotary and sinusoidal positions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.rotary import rotary, rotate


class Rotary(nn.Module):
    """Rotary positions: rotates pairs of channels of queries and keys by angles that grow with the position.

        (x_i, x_{i+d/2}) -> R(t theta_i) (x_i, x_{i+d/2}),  theta_i = 10000^(-2i/d)           Su et al. 2021, eq. 34

    With xpos, queries are also multiplied by zeta_i^{t/512} and keys by zeta_i^{-t/512}, where
    zeta_i = (2i/d + 0.4) / 1.4: Sun et al. 2022 (A length-extrapolatable transformer), section 3.2.

    With `rotated` r only the first r / 2 pairs are rotated, with theta_i = 10000^(-2i/r), as in GPT-NeoX.

    Departures: channel i is paired with i + d/2 instead of its neighbour, which is a permutation of channels. In xpos,
    t counts from the middle of `max_length`, which halves the range of the exponents and changes no product of a query
    with a key.
    """

    cos: Tensor
    sin: Tensor
    log_zeta: Tensor | None

    def __init__(self, head_dim: int, max_length: int, *, xpos: bool = False, rotated: int | None = None) -> None:
        super().__init__()
        self.max_length = max_length
        self.rotated = head_dim if rotated is None else rotated
        index = torch.arange(0, head_dim, 2, dtype=torch.float64) / self.rotated
        time = torch.arange(max_length, dtype=torch.float64)[:, None]
        angle = time * torch.where(index < 1, 10000.0**-index, 0.0)
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)
        zeta = (time - max_length // 2) / 512 * torch.log((index + 0.4) / 1.4)
        self.register_buffer("log_zeta", zeta.to(dtype) if xpos else None, persistent=False)

    def forward(self, q: Tensor, k: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [B, T, H, d] at the positions time [T] or [B, T], rotated; each keeps its dtype.

        Raises ValueError for more positions than the tables have.
        """
        # a kernel would read behind the tables; values of time on a GPU cannot be checked without waiting for it
        self.check_capacity(q.shape[1])
        if self.log_zeta is None:
            return rotary(q, k, self.cos, self.sin, time)
        cos, sin = (F.embedding(time, table).unsqueeze(-2) for table in (self.cos, self.sin))
        zeta = F.embedding(time, self.log_zeta).unsqueeze(-2)
        grow, shrink = zeta.exp(), (-zeta).exp()
        return rotate(q, cos * grow, sin * grow), rotate(k, cos * shrink, sin * shrink)

    def check_capacity(self, capacity: int) -> None:
        """Raises ValueError where there are no angles for so many positions."""
        if capacity > self.max_length:
            raise ValueError(
                f"rotary positions cover max_length={self.max_length} positions, got {capacity}; raise max_length."
            )


def sinusoidal_table(length: int, width: int) -> Tensor:
    """[length, width]: sin(t w_i) and cos(t w_i) with w_i = 10000^(-2i/width), Vaswani et al. 2017, section 3.5.

    Departure: sines fill the first half of the channels and cosines the second, which permutes them.
    """
    half = (width + 1) // 2
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(half) * (-2 * math.log(10000.0) / width))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]
