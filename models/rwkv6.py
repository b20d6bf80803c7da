"""RWKV-6 (Finch): linear attention with a decay of every key channel and a bonus for the current position.

    ddlerp_u(x)_t = x_t + d_t * (mu_u + tanh((x_t + d_t * mu_x) A_u) B_u),   d_t = x_{t-1} - x_t,   u in w, k, v, r, g
    k, v, r, g = W_u ddlerp_u(x);   a_t = exp(-exp(lambda + tanh(ddlerp_w(x)_t A) B))
    o_t = r_t (S_{t-1} + diag(bonus) k_t^T v_t),   S_t = diag(a_t) S_{t-1} + k_t^T v_t        for each head
    y_t = W_o (silu(g_t) * norm_h(o_t))

with norm_h a layer norm of every head. Channel mixing, which alternates with it, and the norm behind the embedding are
those of RWKV-4 (models/rwkv.py).

It runs on `gated_linear_attention` (`read_moved`). `kernels/token_shift` computes ddlerp_u, and `kernels/rwkv6_inputs`
all that lies between the linear maps and the recurrence; the norm adds to o_t what the bonus gives.

Source: Peng et al. 2024 (arXiv 2404.05892), sections 4.1 and 4.2; initial values, the ranks 32 and 64 of the two
low-rank maps, the epsilon 64e-5 of the norm and the width 3.5 D of channel mixing are as in the authors' code
(BlinkDL/RWKV-LM at 033ce840de872dd67c42ed9f9bba08fa2d683eb7, RWKV-v5/src/model.py, x060).

Departures: the initial values are those of that commit, and the authors have changed them since. Linear maps and
embeddings start as everywhere in this suite, and A and A_u uniform within 1e-4 in place of zero, so that the first step
trains B and B_u as well. The weight of norm_h starts at one, where the authors start that of layer l = 1..L at (l /
L)^0.7. mu, the low-rank maps, lambda and the bonus have no weight decay, as there, and one learning rate, where the
authors' code has several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels.gated_linear_attention import gated_linear_attention
from subquad.kernels.rwkv6_inputs import rwkv6_inputs, rwkv6_position
from subquad.models.parts.casts import LARGEST_LOG
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.linear_attention import read_moved
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import HeadNorm
from subquad.models.parts.options import require_divides
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.models.rwkv import RWKVConfig, Shifting
from subquad.suite.bounds import Ratio, Width
from subquad.suite.contracts import TaskSpec

USES = 5
"""w, k, v, r, g: the inputs of the decay, of the three linear maps and of the gate."""


class MatrixTimeMix(Shifting):
    """Base class of time mixing with a matrix for each head. Its state: the last input [B, D], then S [B, H, K, K].

    A subclass sets the sizes below and defines `_sequence` and `step`.
    """

    num_heads: int
    head_dim: int

    def _sequence(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """y [B, T, D] and S behind x [B, T, D], from a state of zeros."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self._sequence(x)[0]

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor, ...]:
        (last,) = super().init_state(batch_size, capacity)
        return last, last.new_zeros(batch_size, self.num_heads, self.head_dim, self.head_dim)

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        # zero inputs have zero keys and values, which leave a state of zeros as it is
        x = blank(x, padding)
        y, memory = self._sequence(x)
        return y, (x[:, -1].to(state[0].dtype), memory.to(state[1].dtype))

    def state_size(self, length: int) -> int:
        return self.mu.shape[1] * (1 + self.head_dim)


class TimeMix6(MatrixTimeMix):
    """Time mixing of RWKV-6."""

    operator = staticmethod(gated_linear_attention)
    matrices = ("mix_down", "mix_up", "decay_down", "decay_up")
    ssm_names = ("mu", "mix_down", "mix_up", "decay", "decay_down", "decay_up", "bonus")

    def __init__(self, config: RWKV6Config, layer: int) -> None:
        d_model = config.d_model
        # the last row is mu_x
        super().__init__(d_model, USES + 1, layer, config.num_layers)
        self.head_dim = config.head_size
        self.num_heads = d_model // self.head_dim
        self.mix_down = nn.Parameter(torch.empty(d_model, USES * config.mix_rank))
        """A_u of all uses side by side."""
        self.mix_up = nn.Parameter(torch.empty(USES, config.mix_rank, d_model))
        """B_u."""
        self.decay = nn.Parameter(torch.empty(d_model))
        """lambda."""
        self.decay_down = nn.Parameter(torch.empty(d_model, config.decay_rank))
        self.decay_up = nn.Parameter(torch.empty(config.decay_rank, d_model))
        self.bonus = nn.Parameter(torch.empty(d_model))
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.gate = nn.Linear(d_model, d_model, bias=False)
        self.norm = HeadNorm(self.num_heads, d_model, eps=64e-5)
        self.out = ResidualLinear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        ramp = self._ramp()
        slow, fast = ramp**self.height, ramp ** (0.5 * self.height)
        self.mu.copy_(1 - torch.stack([slow, slow, slow + 0.3 * self.depth, fast, fast, slow]))
        for down, up in ((self.mix_down, self.mix_up), (self.decay_down, self.decay_up)):
            nn.init.uniform_(down, -1e-4, 1e-4)
            nn.init.uniform_(up, -0.01, 0.01)
        index = torch.arange(len(ramp), dtype=ramp.dtype, device=ramp.device)
        rising = index / max(1, len(ramp) - 1)
        self.decay.copy_(-6 + 5 * rising ** (0.7 + 1.3 * self.depth))
        self.bonus.copy_(self.depth * (1 - rising) + 0.1 * ((index + 1) % 3 - 1))

    def _project(self, x: Tensor, last: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs of `rwkv6_inputs`, and the gate; x and last as in `_mix`."""
        fixed, mu_x = self.mu.split((USES, 1))
        (shared,) = self._mix(x, last, mu_x)
        low = torch.tanh(shared @ self.mix_down)
        # all uses in one product: [uses, positions, rank] by [uses, rank, D]
        low = low.view(-1, USES, self.mix_up.shape[1]).transpose(0, 1)
        w, k, v, r, g = self._mix(x, last, fixed, (low @ self.mix_up).view(USES, *x.shape))
        decay = torch.tanh(w @ self.decay_down) @ self.decay_up
        # the logarithm of a rate, see `rate_of`
        base = self.decay.clamp(max=LARGEST_LOG) if torch.is_grad_enabled() else self.decay
        inputs = self.receptance(r), self.key(k), self.value(v), decay, base, self.bonus
        return inputs, self.gate(g)

    def _sequence(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inputs, gate = self._project(x)
        q, k, v, log_decay, own = rwkv6_inputs(*inputs, head_dim=self.head_dim)
        o, memory = read_moved(self.operator, q, k, v, log_decay)
        return self.out(self.norm(o, gate, residual=own)), memory

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        last, memory = state
        inputs, gate = self._project(x_t, last)
        at = rwkv6_position(*inputs, head_dim=self.head_dim)
        r, k, v = (z.unflatten(-1, (-1, self.head_dim)).to(memory.dtype) for z in inputs[:3])
        o = (r.unsqueeze(-2) @ memory).squeeze(-2)
        write = k.unsqueeze(-1) * v.unsqueeze(-2)
        memory = torch.addcmul(write, at.log_decay.to(memory.dtype).exp().unsqueeze(-1), memory)
        return self.out(self.norm(o, gate, residual=at.own)), (x_t.to(last.dtype), memory)


class MatrixStateConfig(RWKVConfig):
    """Base class of RWKV-6 and RWKV-7, whose state is a matrix for each head."""

    head_dim: Width | None = None
    """K, which divides d_model. None: 64, or d_model where that is less."""

    @property
    def head_size(self) -> int:
        """K."""
        return self.head_dim or min(64, self.d_model)

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        name = type(self).__name__.removesuffix("Config").lower()
        require_divides(name, head_dim=self.head_size, d_model=self.d_model)


class RWKV6Config(MatrixStateConfig):
    """RWKV-6. A layer is time mixing and channel mixing, each of which is a layer of `Backbone`."""

    mlp_ratio: Ratio = 3.5
    """Inner width of channel mixing, as a multiple of d_model."""
    mix_rank: Width = 32
    """Rank of A_u B_u."""
    decay_rank: Width = 64
    """Rank of A B in the decay."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return TimeMix6(self, layer)
