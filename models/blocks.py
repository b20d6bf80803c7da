"""Parts that several models use: the base class of mixers, norms, channel mixers and positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.backend import on_device_of, use_triton
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from kernels.norm import Kind, norm
from kernels.rotary import rotary
from kernels.skinny_linear import Activation, Norm, skinny_linear, skinny_linear_pays
from kernels.swiglu import swiglu
from models.casts import autocast_dtype
from models.linear import Linear
from suite.state import map_tensors, tensors

NormKind = Literal["layer", "rms", "batch"]
ChannelMixerKind = Literal["none", "identity", "mlp", "swiglu"]


def take_positions(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, T, D] at positions [B, P], of which no row has one twice: [B, P, D]."""
    return TakePositions.apply(x, positions)


class TakePositions(torch.autograd.Function):
    """`take_positions`. The gradient of torch's indexing adds up rows, and so sorts all indices first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.shape = x.shape
        return x[_rows(positions), positions]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        dx = gradient.new_zeros(ctx.shape)
        return dx.index_put_((_rows(positions), positions), gradient), None


def _rows(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[0], device=positions.device)[:, None]


def time_contiguous(x: Tensor) -> Tensor:
    """x [B, T, D], on a GPU with time contiguous in memory."""
    if not use_triton("transpose", "auto", x):
        return x
    from kernels.transpose import time_last

    with on_device_of(x):
        return time_last(x)


@dataclass(frozen=True)
class LeftPadding:
    """Padded positions in front of the rows of a batch, so that rows of unlike length end together."""

    lengths: Tensor
    """[B]: positions of each row that are no padding."""
    time: Tensor
    """[B, T]: index of a position within its row, zero for the first one behind the padding and negative before it."""

    @classmethod
    def of(cls, lengths: Tensor, steps: int) -> LeftPadding:
        """The padding of rows with these lengths [B], padded to `steps` positions."""
        time = torch.arange(steps, device=lengths.device) - (steps - lengths.unsqueeze(1))
        return cls(lengths, time)

    def fill(self, x: Tensor, value: float, first: int = 0) -> Tensor:
        """x [B, T, ...] with a value in the padding and at the positions of each row before the one given."""
        return x.masked_fill((self.time < first).view(*self.time.shape, *[1] * (x.ndim - 2)), value)

    def to_front(self, x: Tensor) -> Tensor:
        """x [B, T, D] with every row moved to the front and its padding behind it."""
        steps = x.shape[1]
        return take_positions(x, (torch.arange(steps, device=x.device) - self.lengths.unsqueeze(1)) % steps)

    def to_back(self, x: Tensor) -> Tensor:
        """The inverse of `to_front`."""
        return take_positions(x, self.time % x.shape[1])


def blank(x: Tensor, padding: LeftPadding | None) -> Tensor:
    """x [B, T, ...] with zeros at padded positions, where there are any."""
    return x if padding is None else padding.fill(x, 0.0)


def positions_seen(x: Tensor, padding: LeftPadding | None) -> Tensor:
    """[B], int64: number of positions of each row of x [B, T, D] that are no padding."""
    if padding is not None:
        return padding.lengths
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.long, device=x.device)


def newest_first(x: Tensor, size: int) -> Tensor:
    """The last inputs [B, size, D] of x [B, T, D] in reversed order, zeros where T is less than size."""
    steps = x.shape[1]
    return F.pad(x[:, max(steps - size, 0) :].flip(1), (0, 0, 0, max(size - steps, 0)))


class Mixer(nn.Module):
    """Base class of causal sequence mixers, [B, T, D] to [B, T, D]; it implements `suite.contracts.Mixer`.

    The backbone gives every `nn.Linear` and `nn.Embedding` its general initialisation. Then it calls
    `reset_parameters`, in which a mixer initialises what its paper initialises differently. A mixer built on one
    operator keeps it as its attribute `operator`, so that it can be observed.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] to y [B, T, D]."""
        raise NotImplementedError

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """`forward` at some positions only: x [B, T, D] and ascending positions [B, P] to y [B, P, D].

        The last layer of a network needs no others. A mixer that saves work by it overrides this.
        """
        return take_positions(self(x), positions)

    def init_state(self, batch_size: int, capacity: int) -> Any:
        """The state before the first step: tensors [B, ...], some with the number [B] of positions that a row has seen.

        capacity: number of positions that a state which keeps all of them has room for. Its shapes do not change from
        step to step. ValueError where the mixer cannot see so many positions.
        """
        raise NotImplementedError

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x_t [B, D] and the state to y_t [B, D] and the next state. Step by step, this gives what `forward` gives.

        The tensors of the state may be changed in place.
        """
        raise NotImplementedError

    def branch_step(self, x_t: Tensor, norm: nn.Module, state: Any) -> tuple[Tensor, Any]:
        """x_t + y_t and the next state, where y_t is the `step` of norm(x_t): a residual branch behind its norm.

        A mixer that begins and ends with a linear map overrides this, because norm and sum then need no kernels of
        their own (`step_linear`).
        """
        y_t, state = self.step(add_norm(norm, None, x_t, autocast_dtype(x_t))[0], state)
        return x_t + y_t, state

    def restart(self, state: Any) -> None:
        """Sets a state back to that before the first step, in place."""
        for part in tensors(state):
            part.zero_()

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        """`forward` together with the state behind the last position: x [B, T, D] to y [B, T, D] and that state.

        state: that before the first step; its tensors may be changed in place.
        padding: positions of x in front of the rows that do not count; y has arbitrary finite values there.

        This is done step by step here. A mixer whose operator returns its final state overrides it.
        """
        outputs = []
        for t in range(x.shape[1]):
            before = state if padding is None else map_tensors(torch.clone, state)
            y_t, state = self.step(x[:, t], state)
            if padding is not None:
                state = choose_rows(padding.time[:, t] >= 0, state, before)
            outputs.append(y_t)
        return torch.stack(outputs, dim=1), state

    def state_size(self, length: int) -> int:
        """Number of elements kept for one sequence after `length` steps. A complex one is two; counts are left out."""
        raise NotImplementedError

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name that have a learning rate of their own (`ssm_lr`) and no weight decay."""
        return {}

    def reset_parameters(self) -> None:
        """Initialises the parameters that differ from the backbone's general initialisation."""


def choose_rows(rows: Tensor, first: Any, second: Any) -> Any:
    """One state with the rows [B] of the first and the others of the second."""
    others = tensors(second)

    def choose(part: Tensor) -> Tensor:
        other = next(others)
        # a number that all rows share has no rows
        return torch.where(rows.view(-1, *[1] * (part.ndim - 1)), part, other) if part.ndim else part

    return map_tensors(choose, first)


@runtime_checkable
class Rescalable(Protocol):
    """A layer whose step sizes can follow the sampling rate of its inputs."""

    step_scale: float
    """Factor of its step sizes; 1 at the sampling rate trained at."""


class ShortConv(Mixer):
    """A causal depthwise convolution before another mixer, mixer(conv(x)), which thus sees the last inputs at once.

    Its state: the last W - 1 inputs [B, D, W - 1] for W taps, then that of the mixer. Source: the short filters of
    Hyena and Mamba.
    """

    def __init__(self, mixer: Mixer, width: int, taps: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # the initialisation of torch.nn.Conv1d
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

    def init_state(self, batch_size: int, capacity: int) -> Any:
        weight = at_least_float32(self.weight)
        window = weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1)
        return window, self.mixer.init_state(batch_size, capacity)

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        window, after = state
        y_t, after = self.mixer.step(causal_conv1d_step(x_t, self.weight, None, window), after)
        return y_t, (window, after)

    def restart(self, state: Any) -> None:
        window, inner = state
        window.zero_()
        self.mixer.restart(inner)

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        y, window = causal_conv1d(blank(x, padding), self.weight, return_final_state=True)
        y, after = self.mixer.prefill(y, state[1], padding)
        return y, (window.to(state[0].dtype), after)

    def state_size(self, length: int) -> int:
        return self.weight.shape[0] * (self.weight.shape[1] - 1) + self.mixer.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return self.mixer.ssm_parameters()


class BaseConv(Mixer):
    """A short causal convolution gated by a linear map, y = conv(x) * (W x + b) + x, in every channel.

    Its state: the last W - 1 inputs [B, D, W - 1] for W taps.

    Source: Zoology (Arora et al. 2023), section 4.1, as released (HazyResearch/zoology at
    d88d6f5474f36998d82d5c3bd58a190248d0a669, zoology/mixers/base_conv.py): the convolution has a bias and torch's
    initialisation, and x itself is added inside the mixer.
    """

    def __init__(self, width: int, taps: int = 3) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.conv_weight = nn.Parameter(torch.empty(width, taps))
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # the initialisation of torch.nn.Conv1d
        bound = self.conv_weight.shape[1] ** -0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)
        nn.init.uniform_(self.conv_bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        convolved = causal_conv1d(x, self.conv_weight, self.conv_bias)
        assert isinstance(convolved, Tensor)
        return convolved * self.proj(x) + x

    def init_state(self, batch_size: int, capacity: int) -> tuple[Tensor]:
        weight = at_least_float32(self.conv_weight)
        return (weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1),)

    def step(self, x_t: Tensor, state: tuple[Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        y_t = causal_conv1d_step(x_t, self.conv_weight, self.conv_bias, state[0])
        return y_t * self.proj(x_t) + x_t, state

    def state_size(self, length: int) -> int:
        return self.conv_weight.shape[0] * (self.conv_weight.shape[1] - 1)


class ResidualLinear(Linear):
    """A linear map that writes into the residual stream. Its initial weights may be smaller in deeper networks."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 and x.stride(2) != 1 and use_triton("transpose", "auto", x):
            from kernels.transpose import channels_last

            # state space models return y with time contiguous, and a matrix product would copy that slowly
            with on_device_of(x):
                x = channels_last(x)
        return super().forward(x)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm of x [..., D] over all positions of a batch. In training, its statistics include the future."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32 or wider. Under autocast, states, decays, step sizes and norms need this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / std(x) * weight + bias over the last axis, in float32 or wider."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, kind="layer", eps=self.eps, out_dtype=at_least_float32(x).dtype)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last axis, in float32 or wider; heads [..., H, V] are normalised one by one."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return norm(x, self.weight, eps=self.eps, out_dtype=at_least_float32(x).dtype)

    def before_product(
        self, x: Tensor, gate: Tensor | None = None, *, activation: Literal["silu"] | None = None
    ) -> Tensor:
        """The norm of act(x), times silu(gate), rounded once, to the dtype of the matrix product that reads it."""
        assert self.eps is not None
        dtype = autocast_dtype(x)
        return norm(x, self.weight, eps=self.eps, gate=gate, activation=activation, out_dtype=dtype)


NORM_MODULES = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.GroupNorm)


def make_norm(kind: NormKind, width: int, eps: float) -> nn.Module:
    """A norm over the last axis of [B, T, D] or [B, D]."""
    if kind == "layer":
        return LayerNorm(width, eps=eps)
    if kind == "rms":
        return RMSNorm(width, eps=eps)
    return BatchNorm(width, eps=eps)


def add_norm(
    module: nn.Module, branch: Tensor | None, residual: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(y, x) with x = residual + branch, the residual stream, and y = module(x), both [..., D]; None adds nothing.

    out_dtype: the dtype of y; None stands for that of x, float32 at least. The sum is float32 where the residual is.
    """
    if not isinstance(module, (LayerNorm, RMSNorm)):
        x = residual if branch is None else residual + branch
        y = module(x)
        return y if out_dtype is None else y.to(out_dtype), x
    assert module.eps is not None
    bias = module.bias if isinstance(module, LayerNorm) else None
    kind: Kind = "layer" if isinstance(module, LayerNorm) else "rms"
    dtype = out_dtype or at_least_float32(residual).dtype
    if branch is None:
        return norm(residual, module.weight, bias, kind=kind, eps=module.eps, out_dtype=dtype), residual
    return norm(branch, module.weight, bias, kind=kind, eps=module.eps, residual=residual, out_dtype=dtype)


def fused_norm(module: nn.Module) -> Norm | None:
    """The norm as an argument of `skinny_linear`; None for a module that is none of its norms."""
    if isinstance(module, nn.RMSNorm) and module.eps is not None:
        return Norm("rms", module.weight, None, module.eps)
    if isinstance(module, nn.LayerNorm):
        return Norm("layer", module.weight, module.bias, module.eps)
    return None


def step_linear(
    linear: nn.Linear,
    x: Tensor,
    *,
    norm: nn.Module | None = None,
    gate: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + act(linear(norm(x) * silu(gate))) for x [..., D]; each part besides linear is optional.

    A norm narrower than D normalises groups of channels. On a GPU all of it is one kernel where x has one row, [1, D].
    With a few rows, norm and gate are a kernel of their own, and the sum is part of the product where that has few
    outputs. Everything else, and sequences [B, T, D], are the modules one after the other.
    """
    fused = None if norm is None else fused_norm(norm)
    if (norm is None or fused is not None) and skinny_linear_pays(x, linear.weight, fused, gate):
        return skinny_linear(
            x, linear.weight, linear.bias, norm=fused, gate=gate, activation=activation, residual=residual
        )
    if isinstance(norm, RMSNorm) and (gate is not None or norm.weight.shape[0] != x.shape[-1]):
        heads = (-1, norm.weight.shape[0])
        x = norm.before_product(x.unflatten(-1, heads), None if gate is None else gate.unflatten(-1, heads)).flatten(-2)
    else:
        x = x if norm is None else add_norm(norm, None, x, autocast_dtype(x))[0]
        x = x if gate is None else x * F.silu(gate)
    if skinny_linear_pays(x, linear.weight):
        return skinny_linear(x, linear.weight, linear.bias, activation=activation, residual=residual)
    y = linear(x)
    if activation is not None:
        y = F.silu(y) if activation == "silu" else F.gelu(y, approximate="tanh")
    return y if residual is None else residual + y


def shared_norm(norm: nn.Module | None, x: Tensor) -> tuple[Tensor, nn.Module | None]:
    """x and the norm for several `step_linear` of one norm: a single row is normalised by each of them, more here."""
    if norm is None or (x.is_cuda and len(x) == 1):
        return x, norm
    return add_norm(norm, None, x, autocast_dtype(x))[0], None


class ChannelMixer(nn.Module):
    """Base class of the position-wise networks of a layer."""

    def branch_step(self, x: Tensor, norm: nn.Module) -> Tensor:
        """x + self(norm(x)) at one position, x [B, D]."""
        raise NotImplementedError


class MLP(ChannelMixer):
    """y = W2 gelu(W1 x + b1) + b2 with W1 [ratio D, D]."""

    def __init__(self, d_model: int, ratio: float) -> None:
        super().__init__()
        inner = round(ratio * d_model)
        self.up = Linear(d_model, inner)
        self.down = ResidualLinear(inner, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))

    def branch_step(self, x: Tensor, norm: nn.Module) -> Tensor:
        return step_linear(self.down, step_linear(self.up, x, norm=norm, activation="gelu"), residual=x)


class SwiGLU(ChannelMixer):
    """y = W2 (silu(Wg x) * W1 x) without biases; the inner width is ratio D, rounded up to a multiple of 8.

    Source: Shazeer 2020, GLU variants improve Transformer. Llama's 2/3 of 4 D is the ratio 8/3.
    """

    def __init__(self, d_model: int, ratio: float) -> None:
        super().__init__()
        inner = 8 * math.ceil(ratio * d_model / 8)
        self.gate_up = nn.Linear(d_model, 2 * inner, bias=False)
        self.down = ResidualLinear(inner, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))

    def branch_step(self, x: Tensor, norm: nn.Module) -> Tensor:
        both = step_linear(self.gate_up, x, norm=norm)
        if len(x) > 1:
            return step_linear(self.down, swiglu(both), residual=x)
        gate, up = both.chunk(2, dim=-1)
        return step_linear(self.down, up, gate=gate, residual=x)


def make_channel_mixer(kind: ChannelMixerKind, d_model: int, ratio: float) -> nn.Module | None:
    """The position-wise network of a layer, or None for the kind `none`.

    With `identity` the branch of the channel mixer stays and adds the normalised input itself, x + norm(x). Zoology's
    block does so where its state mixer is `torch.nn.Identity`, as in all of its grids of associative recall
    (HazyResearch/zoology at d88d6f5474f36998d82d5c3bd58a190248d0a669, zoology/model.py, class TransformerBlock).
    """
    if kind == "none":
        return None
    if kind == "identity":
        return nn.Identity()
    return MLP(d_model, ratio) if kind == "mlp" else SwiGLU(d_model, ratio)


class Rotary(nn.Module):
    """Rotary positions: rotates pairs of channels of queries and keys by angles that grow with the position.

        (x_i, x_{i+d/2}) -> R(t theta_i) (x_i, x_{i+d/2}),  theta_i = 10000^(-2i/d)           Su et al. 2021, eq. 34

    With xpos, queries are also multiplied by zeta_i^{t/512} and keys by zeta_i^{-t/512}, where
    zeta_i = (2i/d + 0.4) / 1.4: Sun et al. 2022 (A length-extrapolatable transformer), section 3.2.

    Departures: channel i is paired with i + d/2 instead of its neighbour, which is a permutation of channels. In xpos,
    t counts from the middle of `max_length`, which halves the range of the exponents and changes no product of a query
    with a key.
    """

    cos: Tensor
    sin: Tensor
    log_zeta: Tensor | None

    def __init__(self, head_dim: int, max_length: int, *, xpos: bool = False) -> None:
        super().__init__()
        self.max_length = max_length
        index = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        time = torch.arange(max_length, dtype=torch.float64)[:, None]
        angle = time * 10000.0**-index
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)
        zeta = (time - max_length // 2) / 512 * torch.log((index + 0.4) / 1.4)
        self.register_buffer("log_zeta", zeta.to(dtype) if xpos else None, persistent=False)

    def forward(self, q: Tensor, k: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """q and k [B, T, H, d] at the positions time [T] or [B, T], rotated; each keeps its dtype."""
        if self.log_zeta is None:
            return rotary(q, k, self.cos, self.sin, time)
        cos, sin = (F.embedding(time, table).unsqueeze(-2) for table in (self.cos, self.sin))
        zeta = F.embedding(time, self.log_zeta).unsqueeze(-2)
        grow, shrink = zeta.exp(), (-zeta).exp()
        return self._rotate(q, cos * grow, sin * grow), self._rotate(k, cos * shrink, sin * shrink)

    def check_capacity(self, capacity: int) -> None:
        """Raises ValueError where there are no angles for so many positions."""
        if capacity > self.max_length:
            raise ValueError(
                f"rotary positions cover max_length={self.max_length} positions, got {capacity}; raise max_length."
            )

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_1, x_2 = x.chunk(2, dim=-1)
        return torch.cat([x_1 * cos - x_2 * sin, x_2 * cos + x_1 * sin], dim=-1).to(x.dtype)


def sinusoidal_table(length: int, width: int) -> Tensor:
    """[length, width]: sin(t w_i) and cos(t w_i) with w_i = 10000^(-2i/width), Vaswani et al. 2017, section 3.5.

    Departure: sines fill the first half of the channels and cosines the second, which permutes them.
    """
    half = (width + 1) // 2
    angle = torch.arange(length)[:, None] * torch.exp(torch.arange(half) * (-2 * math.log(10000.0) / width))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width]
