"""Mamba-2: a gated block around a short convolution and a state space model with one decay a head (SSD).

    z, x, B, C, dt = W_in u  [E D, E D, N, N, H];   x, B, C = silu(conv(x, B, C));   dt = softplus(dt + b_dt)
    S_t = exp(-dt_t a) S_{t-1} + B_t^T (dt_t x_t);   y_t = C_t S_t + D x_t          for each of H heads of width P
    W_out norm(y * silu(z))

with E the option `expand`, a > 0 and D one number a head, and B and C shared by all heads. S [N, P] is the state of
`ssd` with one group of queries C and keys B and the weights dt, and a step of it is gated linear attention's.

Source: Dao & Gu 2024 (arXiv 2405.21060), section 7.1 and listing 1; what the text leaves open (a uniform in [1, 16],
the initialisation of dt, biases, one RMS norm over all E D channels behind the gate) is as in the authors' code
(state-spaces/mamba, mamba_ssm/modules/mamba2.py). With equal weights it computes what `Mamba2ForCausalLM` of
transformers computes.

Departures: there is one group of heads, the default of the code; step sizes have no upper limit, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.kernels.gated_linear_attention import gated_linear_attention_step
from subquad.kernels.ssd import ssd, ssd_steps
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32, rate_of
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.initial import reset_taps, step_bias
from subquad.models.parts.linear import ResidualLinear, split, split_linear
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.norms import NormKind, RMSNorm
from subquad.models.parts.options import require_divides
from subquad.models.parts.recompute import Recomputing, spares
from subquad.models.parts.step import step_linear
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Factor, Positive, Width
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, Tensor]


class Mamba2(FusedStepMixer):
    """The mixer. Its state: the last inputs of the convolution [B, E D + 2 N, W - 1], then S [B, H, N, P]."""

    operator = staticmethod(ssd)
    ssm_names = ("log_A", "D", "dt_bias")

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        width = config.width
        self.head_dim, self.d_state = config.head_size, config.d_state
        self.num_heads = width // self.head_dim
        self.dt_min, self.dt_max = config.dt_min, config.dt_max
        self.recompute, self.num_layers = config.recompute, config.num_layers
        self.residual_scale = config.num_layers**-0.5 if config.init_residual == "scaled" else 1.0
        convolved = width + 2 * config.d_state
        self.sizes = (width, convolved, self.num_heads)
        self.in_proj = nn.Linear(config.d_model, sum(self.sizes), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(convolved, config.d_conv))
        self.conv_bias = nn.Parameter(torch.empty(convolved))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.log_A = nn.Parameter(torch.empty(self.num_heads))
        """The logarithm of a."""
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = RMSNorm(width, eps=config.norm_eps)
        self.out = ResidualLinear(width, config.d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # the authors keep torch's initialisation of linear and convolution layers
        self.in_proj.reset_parameters()
        self.out.reset_parameters()
        self.out.weight.mul_(self.residual_scale)
        reset_taps(self.conv_weight, self.conv_bias)
        self.dt_bias.copy_(step_bias(self.dt_bias, self.dt_min, self.dt_max))
        self.log_A.uniform_(1.0, 16.0).log_()
        self.D.fill_(1.0)

    def _heads(self, convolved: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, C, B, dt and log-decays, from the convolved channels and the raw step sizes.

        They are [..., H, ...], but C and B [..., 1, N], which all heads share.
        """
        x, B, C = split(convolved, (self.num_heads * self.head_dim, self.d_state, self.d_state))
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        dt, log_decay = ssd_steps(dt, self.dt_bias, rate_of(self.log_A))
        return x, C.unsqueeze(-2), B.unsqueeze(-2), dt, log_decay

    def forward(self, u: Tensor) -> Tensor:
        z, inputs, dt = split_linear(self.in_proj, u, self.sizes)
        taps = self.conv_weight, self.conv_bias
        convolve: Callable[[], Any] = partial(causal_conv1d, inputs, *taps, activation="silu")
        # without `keep` the operator keeps what it reads and its states, and the last map its input
        num_bytes = self.num_layers * (2 * inputs.numel() + z.numel()) * z.element_size()
        if not spares(self.recompute, num_bytes, u):
            return self.out(self._normed(self._read(convolve(), dt), z))
        with Recomputing() as keep:
            o = self._read(keep(convolve), dt, recompute=True)
            return self.out(keep(partial(self._normed, o, z)))

    def _read(self, convolved: Tensor, dt: Tensor, *, recompute: bool = False) -> Tensor:
        """y [B, T, E D] before the gate."""
        x, q, k, dt, log_decay = self._heads(convolved, dt)
        y = self.operator(q, k, x, log_decay, dt, skip=self.D, recompute=recompute)
        assert isinstance(y, Tensor)
        return y.flatten(-2)

    def _normed(self, y: Tensor, z: Tensor) -> Tensor:
        return self.norm.before_product(y, z, gate_first=True)

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.conv_weight)
        # neighbouring channels lie side by side, because a step takes one input of many channels at a time
        window = weight.new_zeros(batch_size, weight.shape[1] - 1, weight.shape[0]).transpose(1, 2)
        return window, weight.new_zeros(batch_size, self.num_heads, self.d_state, self.head_dim)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        window, before = state
        z, inputs, dt = step_linear(self.in_proj, x_t, norm=norm).split(self.sizes, dim=-1)
        convolved = causal_conv1d_step(inputs, self.conv_weight, self.conv_bias, window, activation="silu")
        x, q, k, dt, log_decay = self._heads(convolved, dt)
        v = (dt.unsqueeze(-1) * x).to(x.dtype)
        o, after = gated_linear_attention_step(q, k, v, log_decay, before, scale=1.0, in_place=True)
        y = (o + self.D.to(x.dtype).unsqueeze(-1) * x).flatten(-2) * F.silu(z)
        return step_linear(self.out, y, norm=self.norm, residual=residual), (window, after)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        z, inputs, dt = split_linear(self.in_proj, x, self.sizes)
        convolved, window = causal_conv1d(
            blank(inputs, padding), self.conv_weight, self.conv_bias, activation="silu", return_final_state=True
        )
        x, q, k, dt, log_decay = self._heads(convolved, dt)
        # the convolution of padding is its bias
        y, after = self.operator(q, blank(k, padding), x, log_decay, dt, skip=self.D, return_final_state=True)
        return self.out(self._normed(y.flatten(-2), z)), (window.to(state[0].dtype), after)

    def state_size(self, length: int) -> int:
        window = self.conv_weight.shape[0] * (self.conv_weight.shape[1] - 1)
        return window + self.num_heads * self.d_state * self.head_dim


class HeadsConfig(BackboneConfig):
    """Base class of state space models with heads, in a network of RMS norms."""

    norm: NormKind = "rms"
    d_state: Width = 128
    expand: Factor = 2
    head_dim: Width | None = None
    """P, which divides expand * d_model. None: 64, or all of expand * d_model where that is less."""
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    ssm_lr: Positive | None = None

    @property
    def width(self) -> int:
        """E D."""
        return self.expand * self.d_model

    @property
    def head_size(self) -> int:
        """P."""
        return self.head_dim or min(64, self.width)

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        name = type(self).__name__.removesuffix("Config").lower()
        require_divides(name, head_dim=self.head_size, width=self.width)
        if self.dt_min > self.dt_max:
            raise ValueError(f"{name}: dt_min={self.dt_min} is above dt_max={self.dt_max}; exchange them.")
        if self.mixer_gain is not None:
            raise ValueError(
                f"{name}: its linear maps start as in the authors' code, so mixer_gain={self.mixer_gain} would have no "
                "effect; leave it out."
            )


class Mamba2Config(HeadsConfig):
    """Mamba-2 in the network of its paper: RMS norms and no channel mixer."""

    channel_mixer: ChannelMixerKind = "none"
    d_conv: Factor = 4

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if not 2 <= self.d_conv <= 4:
            raise ValueError(f"mamba2: needs d_conv in 2..4, got {self.d_conv}.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return Mamba2(self)
