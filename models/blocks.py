"""The parts that several models share: the mixer base class, norms, channel mixers, positions."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backend import on_device_of, use_triton
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step

NormKind = Literal["layer", "rms", "batch"]
ChannelMixerKind = Literal["none", "mlp", "swiglu"]


def take_positions(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, T, D] at positions [B, P]: [B, P, D]. Its gradient is deterministic where that is asked for."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, positions]


class Mixer(nn.Module):
    """A causal sequence mixer, [B, T, D] to [B, T, D]; see `suite.contracts.Mixer` for the words.

    The backbone gives every `nn.Linear` and `nn.Embedding` the generic initialisation and then calls
    `reset_parameters`, where a mixer sets what its paper initialises differently.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] to y [B, T, D]."""
        raise NotImplementedError

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """`forward` at some positions only: x [B, T, D], positions [B, P] ascending, to y [B, P, D].

        The last layer of a network needs no more; a mixer that can save work by it overrides this.
        """
        return take_positions(self(x), positions)

    def init_state(self, batch_size: int) -> Any:
        """The state before the first step: a tuple of tensors, floats [B, ...] and possibly an integer clock []."""
        raise NotImplementedError

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x_t [B, D] and the state to y_t [B, D] and the next state; equals `forward` one position at a time."""
        raise NotImplementedError

    def state_size(self, length: int) -> int:
        """Floats kept for one sequence after `length` steps (complex counts as two, the clock is not counted)."""
        raise NotImplementedError

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters with their own learning rate (`ssm_lr`) and no weight decay, by name."""
        return {}

    def reset_parameters(self) -> None:
        """Initialisations that differ from the backbone's generic one."""


class ShortConv(Mixer):
    """Another mixer behind a causal depthwise convolution, mixer(conv(x)), so that it need not learn to look back.

    State: the last W - 1 inputs [B, D, W - 1], then that of the mixer. Source: the short filters of Hyena and Mamba.
    """

    def __init__(self, mixer: Mixer, width: int, taps: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # that of torch.nn.Conv1d
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def _convolve(self, x: Tensor) -> Tensor:
        y = causal_conv1d(x, self.weight)
        assert isinstance(y, Tensor)
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self._convolve(x))

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.mixer.forward_at(self._convolve(x), positions)

    def init_state(self, batch_size: int) -> Any:
        weight = at_least_float32(self.weight)
        window = weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1)
        return window, self.mixer.init_state(batch_size)

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        window, after = state
        y_t, after = self.mixer.step(causal_conv1d_step(x_t, self.weight, None, window), after)
        return y_t, (window, after)

    def state_size(self, length: int) -> int:
        return self.weight.shape[0] * (self.weight.shape[1] - 1) + self.mixer.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return self.mixer.ssm_parameters()


class ResidualLinear(nn.Linear):
    """A linear map that writes into the residual stream: its initial weights may be scaled down with depth."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and x.stride(2) != 1 and use_triton("transpose", "auto", x):
            from kernels.transpose import channels_last

            # state space models leave time contiguous; the copy that a product makes of that is slow
            with on_device_of(x):
                x = channels_last(x)
        return super().forward(x)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm over all positions of a batch, D last. In training it sees the future through its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def at_least_float32(x: Tensor) -> Tensor:
    """States, decays, time steps and norms stay in float32 under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_autocast(x: Tensor) -> Tensor:
    """What a linear map would take under autocast: norms and the residual stream are float32 there."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last axis, in float32 at the coarsest; with [..., H, V] every head by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(at_least_float32(x))


NORM_MODULES = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.GroupNorm)


def make_norm(kind: NormKind, width: int, eps: float) -> nn.Module:
    """A norm over the last axis, for [B, T, D] and [B, D] alike."""
    if kind == "layer":
        return nn.LayerNorm(width, eps=eps)
    if kind == "rms":
        return RMSNorm(width, eps=eps)
    return BatchNorm(width, eps=eps)


class MLP(nn.Module):
    """y = W2 gelu(W1 x + b1) + b2 with W1 [ratio D, D]."""

    def __init__(self, d_model: int, ratio: float) -> None:
        super().__init__()
        inner = round(ratio * d_model)
        self.up = nn.Linear(d_model, inner)
        self.down = ResidualLinear(inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """y = W2 (silu(Wg x) * W1 x) without biases, inner width ratio D rounded up to a multiple of 8.

    Shazeer 2020, GLU variants improve Transformer. Llama's 2/3 of 4 D is ratio 8/3.
    """

    def __init__(self, d_model: int, ratio: float) -> None:
        super().__init__()
        inner = 8 * math.ceil(ratio * d_model / 8)
        self.gate_up = nn.Linear(d_model, 2 * inner, bias=False)
        self.down = ResidualLinear(inner, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def make_channel_mixer(kind: ChannelMixerKind, d_model: int, ratio: float) -> nn.Module | None:
    """The position-wise network of a layer, or None."""
    if kind == "none":
        return None
    return MLP(d_model, ratio) if kind == "mlp" else SwiGLU(d_model, ratio)


class Rotary(nn.Module):
    """Rotates the halves of queries and keys by angles that grow with their position.

        (x_i, x_{i+d/2}) -> R(t theta_i) (x_i, x_{i+d/2}),  theta_i = 10000^(-2i/d)           Su et al. 2021, eq. 34

    With xpos, queries are also multiplied by zeta_i^{t/512} and keys by zeta_i^{-t/512},
    zeta_i = (2i/d + 0.4) / 1.4, Sun et al. 2022 (A length-extrapolatable transformer), section 3.2.
    Departure: channels are paired i with i + d/2 instead of neighbours, a permutation; t is counted from the middle of
    `max_length`, which halves the range of the exponents and changes no product of a query with a key.
    """

    cos: Tensor
    sin: Tensor
    log_zeta: Tensor | None

    def __init__(self, head_dim: int, max_length: int, *, xpos: bool = False) -> None:
        super().__init__()
        index = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        time = torch.arange(max_length, dtype=torch.float64)[:, None]
        angle = time * 10000.0**-index
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)
        zeta = (time - max_length // 2) / 512 * torch.log((index + 0.4) / 1.4)
        self.register_buffer("log_zeta", zeta.to(dtype) if xpos else None, persistent=False)

    def forward(self, q: Tensor, k: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """q, k [B, T, H, d] at the positions time [T], rotated, in their own dtypes."""
        cos, sin = (table.index_select(0, time).unsqueeze(1) for table in (self.cos, self.sin))
        if self.log_zeta is None:
            return self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        zeta = self.log_zeta.index_select(0, time).unsqueeze(1)
        grow, shrink = zeta.exp(), (-zeta).exp()
        return self._rotate(q, cos * grow, sin * grow), self._rotate(k, cos * shrink, sin * shrink)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_1, x_2 = x.chunk(2, dim=-1)
        return torch.cat([x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin], dim=-1).to(x.dtype)


def sinusoidal_table(length: int, width: int) -> Tensor:
    """[length, width]: sin(t w_i) and cos(t w_i) with w_i = 10000^(-2i/width), Vaswani et al. 2017, section 3.5.

    Departure: sines fill the first half and cosines the second instead of alternating, a permutation of channels.
    """
    half = (width + 1) // 2
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(half) * (-2 * math.log(10000.0) / width))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]
