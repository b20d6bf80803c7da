"""RWKV-4: a weighted mean over the past in every channel, and a channel mixer that sees the last position as well.

    time mixing:     k, v = W_k m_k(x), W_v m_v(x);   y = W_o (sigmoid(W_r m_r(x)) * wkv(k, v))
    channel mixing:  y = sigmoid(W_r m_r(x)) * W_v relu(W_k m_k(x))^2
    m(x)_t = mu * x_t + (1 - mu) * x_{t-1},  with a mu for every channel and use

wkv is `kernels.wkv`, and m is `kernels.token_shift`.

The two alternate, each in a residual branch behind a layer norm, and the embedding has a norm of its own.

Source: RWKV (Peng et al. 2023, arXiv 2305.13048), section 3.1; initial values of mu, decay and bonus as in its appendix
on initialisation. With equal weights it computes what `RwkvForCausalLM` of transformers computes.

Departures: linear maps start as everywhere in this suite, where the authors' start orthogonal or zero, and embeddings
with the standard deviation `init_std` in place of a uniform distribution within 1e-4, which matters little behind the
norm. mu, decay and bonus have no weight decay and one learning rate, where the authors' code has several.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.squared_relu import squared_relu
from subquad.kernels.token_shift import Weighs, token_shift, token_shift_step
from subquad.kernels.wkv import EMPTY, empty_state, wkv, wkv_step
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32, rate_of
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.layer import Layer, joined
from subquad.models.parts.linear import ResidualLinear, linear_behind
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import make_norm
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Positive, Ratio
from subquad.suite.contracts import TaskSpec


class Shifting(Mixer):
    """A mixer of each input with the one before it. Its state begins with the last input [B, D].

    mu: [uses, D], one row for each linear map.
    """

    ssm_names: ClassVar[tuple[str, ...]] = ("mu",)
    weighs: ClassVar[Weighs] = "before"
    """Whether mu is the factor of the input before or that of the present one."""

    def __init__(self, d_model: int, uses: int, layer: int, num_layers: int) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.empty(uses, d_model))
        self.depth, self.height = layer / max(1, num_layers - 1), 1 - layer / num_layers

    def _mix(
        self, x: Tensor, last: Tensor | None, mu: Tensor | None = None, delta: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """m(x) for each row of mu (None: all), by `kernels.token_shift`.

        last: None for a sequence x [B, T, D] behind zeros; the input before it for one position x [B, D].
        """
        mu = self.mu if mu is None else mu
        if last is None:
            return token_shift(x, mu, delta, weighs=self.weighs)
        return token_shift_step(x, last, mu, delta, weighs=self.weighs)

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor, ...]:
        mu = at_least_float32(self.mu)
        return (mu.new_zeros(batch_size, mu.shape[1]),)

    def _ramp(self) -> Tensor:
        """i / D for every channel i."""
        width = self.mu.shape[1]
        return torch.arange(width, dtype=self.mu.dtype, device=self.mu.device) / width


class TimeMix(Shifting):
    """Time mixing. Its state: the last input [B, D], then that of WKV [B, 3, D]."""

    operator = staticmethod(wkv)
    ssm_names = ("mu", "log_rate", "bonus")
    weighs = "now"

    def __init__(self, d_model: int, layer: int, num_layers: int) -> None:
        super().__init__(d_model, 3, layer, num_layers)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.log_rate = nn.Parameter(torch.empty(d_model))
        """The logarithm of the decay is -exp(log_rate)."""
        self.bonus = nn.Parameter(torch.empty(d_model))
        self.out = ResidualLinear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        ramp = self._ramp()
        by_key = ramp**self.height
        self.mu.copy_(torch.stack([by_key, by_key + 0.3 * self.depth, ramp ** (0.5 * self.height)]))
        index = torch.arange(len(ramp), dtype=ramp.dtype, device=ramp.device)
        self.log_rate.copy_(-5 + 8 * (index / max(1, len(ramp) - 1)) ** (0.7 + 1.3 * self.depth))
        self.bonus.copy_(math.log(0.3) + 0.5 * ((index + 1) % 3 - 1))

    def _project(self, x: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k, v, the gate and the logarithm of the decay; x and last as in `_mix`."""
        k, v, r = self._mix(x, last)
        gate = torch.sigmoid(self.receptance(r))
        return self.key(k), self.value(v), gate, -rate_of(self.log_rate)

    def forward(self, x: Tensor) -> Tensor:
        k, v, gate, log_decay = self._project(x)
        y = self.operator(k, v, log_decay, self.bonus)
        assert isinstance(y, Tensor)
        return self.out(gate * y)

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor, ...]:
        (last,) = super().init_state(batch_size, capacity)
        return last, empty_state(batch_size, last.shape[1], dtype=last.dtype, device=last.device)

    def restart(self, state: Any) -> None:
        super().restart(state)
        state[1][:, 2] = EMPTY

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        last, memory = state
        k, v, gate, log_decay = self._project(x_t, last)
        y = wkv_step(k, v, log_decay, self.bonus, memory)
        return self.out(gate * y), (x_t.to(last.dtype), memory)

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        x = blank(x, padding)
        k, v, gate, log_decay = self._project(x)
        if padding is not None:
            # the weight of a padded position is that of an empty past; half precision has no number as small
            k = padding.fill(at_least_float32(k), EMPTY)
        y, memory = self.operator(k, v, log_decay, self.bonus, return_final_state=True)
        return self.out(gate * y), (x[:, -1].to(state[0].dtype), memory.to(state[1].dtype))

    def state_size(self, length: int) -> int:
        return 4 * self.mu.shape[1]


class ChannelMixing(Shifting):
    """Base class of channel mixing. Its state: the last input [B, D]. A subclass defines `_output`."""

    def _output(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        """y, with x and last as in `_mix`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self._output(x)

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._output(x_t, state[0]), (x_t.to(state[0].dtype),)

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        x = blank(x, padding)
        return self(x), (x[:, -1].to(state[0].dtype),)

    def state_size(self, length: int) -> int:
        return self.mu.shape[1]


class ChannelMix(ChannelMixing):
    """Channel mixing of RWKV-4."""

    weighs = "now"

    def __init__(self, d_model: int, width: int, layer: int, num_layers: int) -> None:
        super().__init__(d_model, 2, layer, num_layers)
        self.key = nn.Linear(d_model, width, bias=False)
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.out = ResidualLinear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.mu.copy_((self._ramp() ** self.height).expand_as(self.mu))

    def _output(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        k, r = self._mix(x, last)
        return torch.sigmoid(self.receptance(r)) * linear_behind(squared_relu, self.out, self.key(k))


class FirstLayer(Layer):
    """The first layer, with the norm of the embedding in front of it."""

    def __init__(self, config: BackboneConfig, mixer: Mixer) -> None:
        super().__init__(config, mixer)
        self.entry_norm = make_norm(config.norm, config.d_model, config.norm_eps)

    def _enter(self, norm: nn.Module, residual: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        if norm is self.mixer_norm:
            residual, branch = self._enter_network(joined(residual, branch)), None
        return super()._enter(norm, residual, branch)

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        return super().step(self._enter_network(x_t), state)

    def _enter_network(self, x: Tensor) -> Tensor:
        # the residual stream has the dtype of the embedding, and a norm is wider in half precision
        return self.entry_norm(x).to(x.dtype)


class RWKVConfig(BackboneConfig):
    """RWKV-4. A layer is time mixing and channel mixing, each of which is a layer of `Backbone`."""

    one_mixer_a_layer: ClassVar[bool] = False

    channel_mixer: ChannelMixerKind = "none"
    mlp_ratio: Ratio = 4.0
    """Inner width of channel mixing, as a multiple of d_model."""
    tie_embeddings: bool = False
    ssm_lr: Positive | None = None
    """Learning rate of mu, decay and bonus; None: that of the other parameters."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.channel_mixer != "none" or not self.prenorm:
            raise ValueError(
                f"{type(self).__name__}: has channel mixing and norms of its own, got channel_mixer="
                f"{self.channel_mixer!r} and prenorm={self.prenorm}; leave both out."
            )
        if self.base_conv_layers:
            raise ValueError(
                f"{type(self).__name__}: a layer is time mixing and channel mixing, which no BaseConv can replace, got "
                f"base_conv_layers={list(self.base_conv_layers)}; leave it out."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return TimeMix(self.d_model, layer, self.num_layers)

    @property
    def channel_width(self) -> int:
        return round(self.mlp_ratio * self.d_model)

    def channel_mix(self, layer: int) -> Mixer:
        return ChannelMix(self.d_model, self.channel_width, layer, self.num_layers)

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        layers = range(self.num_layers)
        return [mixer for layer in layers for mixer in (self.mixer(layer, spec), self.channel_mix(layer))]

    def layer(self, index: int, mixer: Mixer) -> Layer:
        return FirstLayer(self, mixer) if index == 0 else super().layer(index, mixer)
