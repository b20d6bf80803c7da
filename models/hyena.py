"""Hyena: long convolutions between multiplicative gates; a small network computes the filters.

    u = W_in x                                         [B, T, (o + 1) E / G]
    x^0, .., x^(o-1), v = short_conv([u, .., u])       o = order, G copies of u, short filters of 3 taps
    v <- x^i * v, then v <- h^i conv v + D^i v         for i = o - 1 .. 1
    y = W_out (x^0 * v)
    h^i[l] = exp(-|a| l / (L - 1)) * MLP(position l)   a: log-spaced decays, MLP with sin(freq x) activations

x and y are [B, T, d_model], and every stream x^i, v is [B, T, E]. In Hyena's paper E is d_model and G is 1.

Source: Hyena (Poli et al. 2023), sections 3.1 to 3.4 and the authors' code (safari) for what the text leaves open:
positional features (l / (L-1) and (emb_dim - 1) / 2 complex exponentials), decays from ln(100)/1.5 to ln(100)/0.3,
three sine layers that share their learned frequencies, which start at w = 10.

L is the task's max_length; longer inputs are refused. With `learn_positions` the positional features themselves are
parameters: with emb_dim 33, L = 2^20 and two layers they are most of the 69M parameters in Mamba's table 11.

With `inner_factor`, E / d_model, and `proj_groups`, G, this is the Hyena layer of MAD (Poli et al. 2024; athms/mad-lab,
mad/model/layers/hyena.py at 944daee12ca370df53b39d6ea7cb568d549d949f), which sets both to 4 (configs/layers/hyena.yml
at d27bf5c6bb48b7b0d3879f40db869aa7fe84a3b3). The copies of u lie end to end and are cut into o + 1 streams, so a stream
may begin and end within a copy; each of its channels has a short filter of its own. MAD's filters are ours with
`emb_dim: 3`, `filter_order: 4`, `w: 1` and `learn_positions: true` (mad/model/layers/featurization/hyena_filter.py at
6e7e4c903b7d4d1a31d12186b709f36fa3184041). We depart in one point: its layer has a single long convolution, so that only
order 2 works, while here both options work with any order.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.kernels.fft_conv import fft_conv, fft_conv_at
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.initial import reset_taps
from subquad.models.parts.linear import Linear, ResidualLinear, unbind
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.options import require_divides
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Factor, Positive, Width
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, ...]

FAST_DECAY, SLOW_DECAY, DECAY_TARGET = 0.3, 1.5, 1e-2
"""The decay of the fastest and of the slowest channel reaches DECAY_TARGET at these multiples of the length."""


class Sine(nn.Module):
    """sin(freq x), with one learned frequency per unit."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.freq = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.freq * x)


class ImplicitFilter(nn.Module):
    """A filter [width, T] for any T <= length, computed from positional features [T, emb_dim]."""

    decay: Tensor
    outside_autocast = True

    def __init__(
        self, width: int, length: int, *, emb_dim: int, filter_order: int, w: float, learn_positions: bool
    ) -> None:
        super().__init__()
        self.length = length
        self.time_step = 1 / max(length - 1, 1)
        bands = (emb_dim - 1) // 2
        time = torch.arange(length)[:, None]
        # torch's default device is not that of linspace where transformers' from_pretrained came first in the process
        device = time.device
        angle = 2 * math.pi * time / length * torch.linspace(1e-4, max(bands - 1, 1e-4), bands, device=device)
        features = torch.cat([time * self.time_step, angle.cos(), -angle.sin()], dim=-1)
        features = features.to(torch.get_default_dtype())
        if learn_positions:
            self.positions: Tensor = nn.Parameter(features)
        else:
            self.register_buffer("positions", features, persistent=False)
        slow, fast = (math.log(1 / DECAY_TARGET) / portion for portion in (SLOW_DECAY, FAST_DECAY))
        self.register_buffer("decay", torch.linspace(slow, fast, width, device=device), persistent=False)
        sine = Sine(filter_order, w)
        self.layers = nn.Sequential(
            nn.Linear(emb_dim, filter_order),
            sine,
            nn.Linear(filter_order, filter_order),
            sine,
            nn.Linear(filter_order, filter_order),
            sine,
            nn.Linear(filter_order, width, bias=False),
        )

    def check_length(self, steps: int) -> None:
        """Raises ValueError where the filter is not defined for so many lags."""
        if steps > self.length:
            raise ValueError(
                f"hyena: its filters cover max_length={self.length}, got a sequence of {steps}; raise the task's "
                "max_length."
            )

    def forward(self, steps: int) -> Tensor:
        self.check_length(steps)
        if at_least_float32(self.positions).dtype != self.positions.dtype:
            raise ValueError(
                f"hyena: its filters cannot be computed from weights in {str(self.positions.dtype)[6:]}, whose "
                "rounding changes them; leave the parameters in float32 and call the model within torch.autocast."
            )
        # half precision cannot tell neighbouring positions of a long filter apart
        with torch.autocast(self.positions.device.type, enabled=False):
            taps = at_least_float32(self.layers(self.positions[:steps]))
        time = torch.arange(steps, device=taps.device, dtype=taps.dtype) * self.time_step
        return (taps * torch.exp(-time[:, None] * self.decay)).t()


class LongConv(Mixer):
    """One implicit filter and a skip in every channel: x [B, T, D] to [B, T, D].

    Its state: the inputs so far [B, D, capacity], zeros where there are none yet, and their number [], which counts
    padding in front of a row as inputs of zero. Input t is at t modulo the capacity; where rows may skip steps
    (`Mixer.rows_skip`), the newest input comes first and the number stays zero. No smaller state gives the same output.
    Steps change the inputs in place, which `Backbone.step` lets them do where no gradient is recorded. Their product
    with the filter has the precision of `torch.set_float32_matmul_precision`.
    """

    def __init__(
        self,
        width: int,
        length: int,
        *,
        emb_dim: int = 5,
        filter_order: int = 64,
        w: float = 10.0,
        learn_positions: bool = False,
    ) -> None:
        super().__init__()
        self.filter = ImplicitFilter(
            width, length, emb_dim=emb_dim, filter_order=filter_order, w=w, learn_positions=learn_positions
        )
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.D)

    def forward(self, x: Tensor, gate_in: Tensor | None = None, gate_out: Tensor | None = None) -> Tensor:
        return fft_conv(x, self.filter(x.shape[1]), D=self.D, gate_in=gate_in, gate_out=gate_out)

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        return fft_conv_at(x, self.filter(x.shape[1]), positions, D=self.D)

    def kernel(self, length: int) -> Tensor:
        """The filter h [D, length]."""
        return self.filter(length)

    def init_state(self, batch_size: int, capacity: int) -> State:
        self.filter.check_length(capacity)
        zeros = at_least_float32(self.D).new_zeros
        return zeros(batch_size, len(self.D), capacity), zeros((), dtype=torch.long)

    def step(
        self, x_t: Tensor, state: State, gate_in: Tensor | None = None, gate_out: Tensor | None = None
    ) -> tuple[Tensor, State]:
        inputs, count = state
        v = at_least_float32(x_t if gate_in is None else gate_in * x_t)
        capacity = inputs.shape[2]
        taps = self.filter(capacity).t()
        if self.rows_skip:
            inputs = torch.cat([v.unsqueeze(-1), inputs[..., :-1]], dim=-1)
        else:
            # in place, because moving all inputs takes several times as long as reading them
            place = (count % capacity).view(1)
            inputs.index_copy_(2, place, v.unsqueeze(-1))
            taps = taps.index_select(0, (place - torch.arange(capacity, device=place.device)) % capacity)
            count = count + 1
        with torch.autocast(x_t.device.type, enabled=False):
            y = torch.bmm(inputs.transpose(0, 1), taps.t().contiguous().unsqueeze(-1)).squeeze(-1).t() + self.D * v
        return (y if gate_out is None else gate_out * y).to(x_t.dtype), (inputs, count)

    def prefill(
        self,
        x: Tensor,
        state: State,
        padding: LeftPadding | None = None,
        gate_in: Tensor | None = None,
        gate_out: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        steps, capacity = x.shape[1], state[0].shape[2]
        if steps > capacity:
            raise ValueError(f"hyena: its state has room for {capacity} positions, got {steps}; raise capacity.")
        x = blank(x, padding)
        v = at_least_float32(x if gate_in is None else gate_in * x)
        inputs, count = state
        inputs[..., :steps] = v.flip(1).mT if self.rows_skip else v.mT
        return self(x, gate_in, gate_out), (inputs, count if self.rows_skip else count + steps)

    def state_size(self, length: int) -> int:
        return length * self.D.shape[0]

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {**{f"filter.{name}": p for name, p in self.filter.named_parameters()}, "D": self.D}


class Hyena(Mixer):
    """The mixer.

    Its state: the last inputs of the short filter [B, (order + 1) E, 2], and of every long convolution all inputs,
    [B, E, capacity], and their number, []. E is the width of a stream, inner_factor * d_model.
    """

    def __init__(self, config: HyenaConfig, length: int) -> None:
        super().__init__()
        d_model, inner, channels = config.d_model, config.inner_width, config.short_channels
        self.num_streams = config.order + 1
        self.proj_groups = config.proj_groups or 1
        self.in_proj = Linear(d_model, channels // self.proj_groups)
        self.short_weight = nn.Parameter(torch.empty(channels, config.short_filter))
        self.short_bias = nn.Parameter(torch.empty(channels))
        self.convs = nn.ModuleList(
            LongConv(
                inner,
                length,
                emb_dim=config.emb_dim,
                filter_order=config.filter_order,
                w=config.w,
                learn_positions=config.learn_positions,
            )
            for _ in range(config.order - 1)
        )
        self.out = ResidualLinear(inner, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_taps(self.short_weight, self.short_bias)

    def _channels(self, x: Tensor) -> Tensor:
        """The inputs of the short filters: x [.., d_model] to [.., (order + 1) E], the copies of W_in x end to end."""
        u = self.in_proj(x)
        # torch would copy a tensor even where it is tiled once
        return u if self.proj_groups == 1 else u.tile(self.proj_groups)

    def _divide(self, streams: Tensor) -> tuple[Tensor, ...]:
        """x^0 .. x^(order - 1) and v of streams [B, T, (order + 1) E]."""
        return unbind(streams.unflatten(-1, (self.num_streams, -1)), 2)

    def forward(self, x: Tensor) -> Tensor:
        u = self._channels(x)
        streams = causal_conv1d(u, self.short_weight, self.short_bias, time_last=_time_comes_last(u))
        assert isinstance(streams, Tensor)
        *gates, v = self._divide(streams)
        for i, conv in enumerate(self.convs):
            last = i == len(self.convs) - 1
            v = conv(v, gate_in=gates[-1 - i], gate_out=gates[0] if last else None)
        return self.out(v)

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.short_weight)
        window = weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1)
        return (window, *(part for conv in self._convs() for part in conv.init_state(batch_size, capacity)))

    def _convs(self) -> list[LongConv]:
        return [conv for conv in self.convs if isinstance(conv, LongConv)]

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        window = state[0]
        streams = causal_conv1d_step(self._channels(x_t), self.short_weight, self.short_bias, window)
        *gates, v = streams.chunk(self.num_streams, dim=-1)
        after: list[Tensor] = []
        for i, conv in enumerate(self._convs()):
            last = i == len(self.convs) - 1
            inner = state[1 + 2 * i : 3 + 2 * i]
            v, inner = conv.step(v, inner, gate_in=gates[-1 - i], gate_out=gates[0] if last else None)
            after += inner
        return self.out(v), (window, *after)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        u = blank(self._channels(x), padding)
        streams, window = causal_conv1d(
            u, self.short_weight, self.short_bias, return_final_state=True, time_last=_time_comes_last(u)
        )
        *gates, v = self._divide(streams)
        after: list[Tensor] = []
        for i, conv in enumerate(self._convs()):
            last = i == len(self.convs) - 1
            inner = state[1 + 2 * i : 3 + 2 * i]
            v, inner = conv.prefill(v, inner, padding, gate_in=gates[-1 - i], gate_out=gates[0] if last else None)
            after += inner
        return self.out(v), (window.to(state[0].dtype), *after)

    def state_size(self, length: int) -> int:
        short = self.short_weight.shape[0] * (self.short_weight.shape[1] - 1)
        return short + sum(conv.state_size(length) for conv in self._convs())

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"convs.{i}.{name}": parameter
            for i, conv in enumerate(self._convs())
            for name, parameter in conv.ssm_parameters().items()
        }


def _time_comes_last(u: Tensor) -> bool:
    """Whether the short filters should write streams with time contiguous, as the long convolutions read them.

    In half precision the kernel would exchange elements of two bytes between threads, and a copy is half as large.
    """
    return u.dtype == torch.float32


class HyenaConfig(BackboneConfig):
    """Hyena in the network of its synthetic and DNA experiments: layer norms, and an MLP four times as wide.

    HyenaDNA (Nguyen et al. 2023) is this model with these defaults, `embed_dropout: 0.1` and `tie_embeddings: false`:
    2 layers of width 128 in the released LongSafari/hyenadna-tiny-1k-seqlen-hf (config.json at
    6d3bcdb38248068b1a4822f88176ad019115948b), 8 of width 256 in hyenadna-large-1m-seqlen-hf.
    Its filters decay to zero, as in the authors' training code (HazyResearch/hyena-dna at
    d553021b483b82980aa4b868b37ec2d4332e198a, src/models/sequence/hyena.py). Their standalone_hyenadna.py, which reads
    the released weights, adds 0.05 to the decay; no option does so here.
    """

    left_out_when_off: ClassVar[tuple[str, ...]] = (*BackboneConfig.left_out_when_off, "inner_factor", "proj_groups")

    order: Factor = 2
    emb_dim: Width = 5
    filter_order: Width = 64
    """Width of the network that computes the filters."""
    w: Positive = 10.0
    short_filter: Factor = 3
    learn_positions: bool = False
    """Whether the positional features [max_length, emb_dim] are parameters (Mamba's table 11)."""
    inner_factor: Factor | None = None
    """Width of the gates, the values and their convolutions, as a multiple of d_model. None: 1. MAD has 4."""
    proj_groups: Factor | None = None
    """The short filters read so many copies of the outputs of the input map, which has so many times fewer outputs. The
    number divides (order + 1) * inner_factor * d_model. None: 1. MAD has 4."""
    ssm_lr: Positive | None = None
    """Learning rate of the filter networks, which have no weight decay. None: that of the run."""

    @property
    def inner_width(self) -> int:
        """Channels of every stream."""
        return (self.inner_factor or 1) * self.d_model

    @property
    def short_channels(self) -> int:
        """Channels of all streams together, each of which has a short filter."""
        return (self.order + 1) * self.inner_width

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.order < 2:
            raise ValueError(f"hyena: order must be at least 2, got {self.order}.")
        if self.emb_dim < 3 or self.emb_dim % 2 == 0:
            raise ValueError(f"hyena: emb_dim must be odd and at least 3 (time, cosines, sines), got {self.emb_dim}.")
        if not 2 <= self.short_filter <= 4:
            raise ValueError(f"hyena: short_filter must lie in 2..4, got {self.short_filter}.")
        require_divides("hyena", proj_groups=self.proj_groups or 1, short_channels=self.short_channels)

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return Hyena(self, spec.max_length)
