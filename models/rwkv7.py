"""RWKV-7 (Goose): a state that decays by channel and is corrected by a generalised delta rule.

    m_u(x)_t = x_t + (x_{t-1} - x_t) * mu_u,   u in r, w, k, v, a, g;      r, k', v = W_r m_r(x), W_k m_k(x), W_v m_v(x)
    d = exp(-exp(-1/2) sigmoid(w_0 + tanh(m_w(x) A_w) B_w))                the decay, at least 0.54
    e = sigmoid(a_0 + m_a(x) A_a B_a),   c = k' * xi / |k' * xi|,   k = k' * (1 + (e - 1) * alpha)
    S_t = diag(d_t) S_{t-1} - (e_t * c_t)^T (c_t S_{t-1}) + k_t^T v_t,     o_t = r_t S_t          for each head
    y_t = W_o (g_t * (norm_h(o_t) + (sum_i rho_i r_ti k_ti) v_t)),         g = sigmoid(m_g(x) A_g) B_g

with S [K, V] and norm_h a layer norm of every head. What is removed from the state, c S, lies in another direction than
what is written: `kernels/delta_rule/generalised.py`. `kernels/token_shift` computes all m_u, and `kernels/rwkv7_inputs`
what lies between the linear maps and the recurrence. Channel mixing is y = W_v relu(W_k m(x))^2.

Source: Peng et al. 2025 (arXiv 2503.14456), section 4; initial values, ranks and the epsilon 64e-5 of the norm as in
the authors' code (BlinkDL/RWKV-LM at d4a6c3be999c5c2ece521660279a5d68ced0458d, RWKV-v7/train_temp/src/model.py, x070).

Departures: the values of a layer are its own, where the authors mix them with those of the first layer (the value
residual); layers of this suite see the residual stream alone. Linear maps and embeddings start as everywhere in this
suite, and A_w, A_a and A_g uniform within 1e-4 in place of zero, so that the first step trains B as well. The weight of
norm_h starts at one, where the authors start that of layer l = 1..L at (l / L)^0.7. mu, the low-rank maps and all
vectors have no weight decay, as there, and one learning rate, where the authors give w_0 twice that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels.delta_rule import delta_rule
from subquad.kernels.rwkv7_inputs import rwkv7_inputs, rwkv7_position
from subquad.kernels.squared_relu import squared_relu
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.linear import ResidualLinear, linear_behind
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import HeadNorm
from subquad.models.parts.recompute import Keep, Recomputing, at_once, spares
from subquad.models.rwkv import ChannelMixing
from subquad.models.rwkv6 import MatrixStateConfig, MatrixTimeMix
from subquad.suite.bounds import Width
from subquad.suite.contracts import TaskSpec

USES = ("r", "w", "k", "v", "a", "g")


class TimeMix7(MatrixTimeMix):
    """Time mixing of RWKV-7."""

    matrices = ("w_down", "w_up", "a_down", "a_up", "g_down", "g_up")
    ssm_names = ("mu", *matrices, "w_0", "a_0", "xi", "alpha", "rho")
    w_down: nn.Parameter
    w_up: nn.Parameter
    a_down: nn.Parameter
    a_up: nn.Parameter
    g_down: nn.Parameter
    g_up: nn.Parameter

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        d_model = config.d_model
        super().__init__(d_model, len(USES), layer, config.num_layers)
        self.head_dim, self.recompute = config.head_size, config.recompute
        self.num_heads, self.num_layers = d_model // self.head_dim, config.num_layers
        for use, rank in (("w", config.ranks[0]), ("a", config.ranks[0]), ("g", config.ranks[1])):
            self.register_parameter(f"{use}_down", nn.Parameter(torch.empty(d_model, rank)))
            self.register_parameter(f"{use}_up", nn.Parameter(torch.empty(rank, d_model)))
        self.w_0 = nn.Parameter(torch.empty(d_model))
        self.a_0 = nn.Parameter(torch.empty(d_model))
        self.xi = nn.Parameter(torch.empty(d_model))
        self.alpha = nn.Parameter(torch.empty(d_model))
        self.rho = nn.Parameter(torch.empty(d_model))
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.norm = HeadNorm(self.num_heads, d_model, eps=64e-5)
        self.out = ResidualLinear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        ramp = self._ramp()
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        self.mu.copy_(1 - torch.stack([ramp ** (powers[use] * self.height) for use in USES]))
        for use in ("w", "a", "g"):
            nn.init.uniform_(getattr(self, f"{use}_down"), -1e-4, 1e-4)
            up = getattr(self, f"{use}_up")
            # half precision has no orthogonal start
            up.copy_(nn.init.orthogonal_(torch.empty_like(at_least_float32(up)), gain=0.1))
        index = torch.arange(len(ramp), dtype=ramp.dtype, device=ramp.device)
        rising = index / max(1, len(ramp) - 1)
        in_head = 2 * (index % self.head_dim) / max(1, self.head_dim - 1) - 1
        bent = in_head * in_head.abs()
        self.w_0.copy_(-5.5 + 6 * rising ** (1 + self.depth**0.3) + 2.5 * bent)
        self.a_0.copy_(-0.19 + 0.3 * bent + 0.4 * (rising - 0.5))
        self.xi.copy_(0.71 - 0.1 * (rising - 0.5))
        self.alpha.fill_(1.02)
        self.rho.fill_(-0.04)

    def _read(self, x: Tensor, last: Tensor | None = None, keep: Keep = at_once) -> tuple[Tensor, ...]:
        """r, k', v [..., H, K], and what B_w, B_a and B_g multiply; x and last as in `_mix`."""
        mixed = dict(zip(USES, keep(lambda: self._mix(x, last)), strict=True))
        r, k, v = self.receptance(mixed["r"]), self.key(mixed["k"]), self.value(mixed["v"])
        low = torch.tanh(mixed["w"] @ self.w_down), mixed["a"] @ self.a_down, torch.sigmoid(mixed["g"] @ self.g_down)
        return r, k, v.unflatten(-1, (-1, self.head_dim)), *low

    def _vectors(self) -> tuple[Tensor, ...]:
        return self.w_0, self.a_0, self.xi, self.alpha, self.rho

    def _project(self, x: Tensor, last: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """The inputs of `rwkv7_inputs`, v [..., H, K] and the gate; x and last as in `_mix`."""
        r, k, v, w, a, g = self._read(x, last)
        return (r, k, w @ self.w_up, a @ self.a_up, *self._vectors()), v, g @ self.g_up

    def _output(self, o: Tensor, v: Tensor, strength: Tensor, gate: Tensor) -> Tensor:
        return self.out(self.norm(o, gate, gate_activation="identity", skip=v, skip_scale=strength))

    def _sequence(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # the linear maps keep six mixed inputs, low-rank maps give three vectors, and the delta rule reads three more
        # and the decays in float32
        if not spares(self.recompute, self.num_layers * x.numel() * (12 * x.element_size() + 4), x):
            return self._run(x, at_once)
        with Recomputing() as keep:
            return self._run(x, keep)

    def _run(self, x: Tensor, keep: Keep) -> tuple[Tensor, Tensor]:
        r, k, v, low_w, low_a, low_g = self._read(x, keep=keep)
        # in the dtype of this pass also where they are multiplied again
        w_up, a_up, g_up, vectors = self.w_up, self.a_up, self.g_up, self._vectors()
        gate = keep(lambda: low_g @ g_up)
        w, a = keep(lambda: (low_w @ w_up, low_a @ a_up))
        prepared = keep(lambda w, a: tuple(rwkv7_inputs(r, k, w, a, *vectors, head_dim=self.head_dim)), w, a)
        q, reading, write, plain, log_decay, strength = prepared
        beta = v.new_ones(v.shape[:-1])
        options: Any = {"write": write, "plain": plain, "scale": 1.0, "return_final_state": True}
        o, memory = delta_rule(q, reading, v, beta, log_decay, **options)
        return self._output(o, v, strength, gate), memory

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        last, memory = state
        inputs, v, gate = self._project(x_t, last)
        *vectors, strength = rwkv7_position(*inputs, head_dim=self.head_dim)
        q, value = inputs[0].unflatten(-1, (-1, self.head_dim)).to(memory.dtype), v.to(memory.dtype)
        key, remove, add, log_decay = (z.to(memory.dtype) for z in vectors)
        removed = remove.unsqueeze(-2) @ memory
        memory = log_decay.exp().unsqueeze(-1) * memory + add.unsqueeze(-1) * removed
        memory = torch.addcmul(memory, key.unsqueeze(-1), value.unsqueeze(-2))
        o = (q.unsqueeze(-2) @ memory).squeeze(-2)
        return self._output(o, v, strength, gate), (x_t.to(last.dtype), memory)


class ChannelMix7(ChannelMixing):
    """Channel mixing of RWKV-7."""

    def __init__(self, config: RWKV7Config, layer: int) -> None:
        d_model, width = config.d_model, config.channel_width
        super().__init__(d_model, 1, layer, config.num_layers)
        self.recompute, self.num_layers = config.recompute, config.num_layers
        self.key = nn.Linear(d_model, width, bias=False)
        self.out = ResidualLinear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.mu.copy_((1 - self._ramp() ** self.height**4).expand_as(self.mu))

    def _output(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        if last is not None or not spares(self.recompute, self.num_layers * x.numel() * x.element_size(), x):
            (mixed,) = self._mix(x, last)
            return linear_behind(squared_relu, self.out, self.key(mixed))
        with Recomputing() as keep:
            return linear_behind(squared_relu, self.out, self.key(keep(lambda: self._mix(x, None)[0])))


class RWKV7Config(MatrixStateConfig):
    """RWKV-7. A layer is time mixing and channel mixing, each of which is a layer of `Backbone`."""

    rank: Width | None = None
    """Rank of A_w B_w, A_a B_a and A_g B_g. None: the authors' 1.8 sqrt(D), and 0.6 D^0.8 for the last, rounded to
    multiples of 32."""

    @property
    def ranks(self) -> tuple[int, int]:
        """The rank of the low-rank maps for w and a, and of that for g."""
        suggested = (1.8 * self.d_model**0.5, 0.6 * self.d_model**0.8)
        narrow, wide = (self.rank or max(32, round(size / 32) * 32) for size in suggested)
        return narrow, wide

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return TimeMix7(self, layer)

    def channel_mix(self, layer: int) -> Mixer:
        return ChannelMix7(self, layer)
