"""H3: linear attention whose sum over time is a state space model, with a second one for the keys.

    q, k, v = W_q x, W_k x, W_v x
    k~ = SSM_shift(k),   S = SSM_diag(k~ v^T)  per head,   o = S^T q,   y = W_o o

The shift model is a learned causal filter over the last M inputs plus a skip; every channel has its own. M is `d_state`
or, where it is given, `shift_taps`. The diagonal model is S4D; every head has its own. With heads of one channel the
products are pointwise: y = W_o (q * SSM_diag(k~ * v)).

Source: H3 (Fu et al. 2023), section 3.2 and algorithm 1. `inner` replaces SSM_diag by another sequence layer, as in the
"H3" rows with Hyena and S6 of Mamba's table 1.

Departures from the paper: B of the shift model is fixed to the first unit vector, which the paper allows, and B of the
diagonal model to one, because only its product with C enters the output. The authors' code learns both from these
initial values, which adds parameters but no functions; `train_B` does so too.

`short_filter` replaces SSM_shift by short convolutions of q, k and v, as in Hyena. Mamba's H3+ (appendix E.2.2) is this
with S4D in place of Hyena's filter, and its H3++ adds heads of 8 channels.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.autograd import OnceDifferentiable
from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.kernels.h3_inner import h3_inner_step
from subquad.models.hybrid import AttentionLayersConfig
from subquad.models.hyena import LongConv
from subquad.models.mamba import S6
from subquad.models.parts.bidirectional import Bidirectional
from subquad.models.parts.casts import at_least_float32, autocast_dtype
from subquad.models.parts.finite_filter import FiniteFilter
from subquad.models.parts.initial import reset_taps
from subquad.models.parts.linear import Linear, ResidualLinear, linear
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.options import require_divides
from subquad.models.parts.step import step_linear
from subquad.models.parts.time_axis import LeftPadding, blank, take_positions, time_contiguous
from subquad.models.s4d import DiagonalSSM, Discretization, Initialisation, State, check_ssm
from subquad.suite.bounds import Count, Positive, Width
from subquad.suite.contracts import TaskSpec

MOST_PRODUCTS = 64
"""Taps up to which the filter of a shift model with B is a sum of products [D, M, M], and not a transform."""


class ShiftSSM(FiniteFilter):
    """y_t = sum_{m < M} k[m] x_{t-m} + D x_t in every channel. Its state: the last M - 1 inputs [B, D, M - 1].

    The filter k is C. With `train_B` it is the response of a shift register that B writes and C reads,
    k[m] = sum_j B[j] C[j + m], where B starts as the first unit vector.
    """

    ssm_names = ("B",)

    def __init__(self, width: int, num_taps: int, *, train_B: bool = False) -> None:
        super().__init__()
        self.C = nn.Parameter(torch.empty(width, num_taps))
        self.B = nn.Parameter(torch.empty(width, num_taps)) if train_B else None
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # initialised as a convolution over M inputs, as in the authors' code
        reset_taps(self.C)
        nn.init.normal_(self.D)
        if self.B is not None:
            self.B.zero_()[:, 0] = 1.0

    def taps(self) -> Tensor:
        """The filter k [D, M]."""
        if self.B is None:
            return self.C
        B, C = at_least_float32(self.B), at_least_float32(self.C)
        size = C.shape[1]
        if size > MOST_PRODUCTS:
            B_f, C_f = torch.fft.rfft(B, 2 * size), torch.fft.rfft(C, 2 * size)
            return torch.fft.irfft(B_f.conj() * C_f, 2 * size)[:, :size]
        # windows[d, m, j] = C[d, j + m]
        windows = F.pad(C, (0, size - 1)).unfold(1, size, 1)
        return (windows * B.unsqueeze(1)).sum(-1)

    def skip(self) -> Tensor:
        return self.D

    @property
    def num_taps(self) -> int:
        return self.C.shape[1]

    def kernel(self, length: int) -> Tensor:
        """The filter k [D, length], zero from lag M on."""
        return F.pad(self.taps(), (0, length - self.C.shape[1]))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a_i b_j, dense [B, i, j, H, T] of a [B, i, H, T] and b [B, j, H, T]."""
    size = (*a.shape[:2], b.shape[1], *a.shape[2:])
    return torch.mul(a.unsqueeze(2), b.unsqueeze(1), out=a.new_empty(size, dtype=torch.result_type(a, b)))


def _contract(m: Tensor, a: Tensor, axis: int) -> Tensor:
    """sum_i m_ij a_i, [B, j, H, T] of m [B, i, j, H, T] and a [B, i, H, T]; with axis 2, sum_j m_ij a_j."""
    # a sum over this axis by torch's reduction would write with strides
    terms = zip(m.unbind(axis), a.unsqueeze(2).unbind(1), strict=True)
    m_0, a_0 = next(terms)
    # heads stand before their channels in memory, as in the streams, so that no copy joins them
    batch, channels, heads, length = m_0.shape
    total = m.new_empty((batch, heads, channels, length), dtype=torch.result_type(m, a)).transpose(1, 2)
    torch.mul(m_0, a_0, out=total)
    for m_i, a_i in terms:
        total.addcmul_(m_i, a_i)
    return total


class Outer(OnceDifferentiable):
    """(k, v) to the outer products k_i v_j of every head and position, with the shapes of `_outer`.

    Neither this nor `Contraction` is an einsum, which would make a product of matrices with head_dim rows for each of
    them, and their gradients keep time contiguous.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return _outer(k, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        k, v = ctx.saved_tensors
        return _contract(gradient, v, 2), _contract(gradient, k, 1)


class Contraction(OnceDifferentiable):
    """(states, q) to o_j = sum_i states_ij q_i, with the shapes of `_contract`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, q: Tensor) -> Tensor:
        ctx.save_for_backward(states, q)
        return _contract(states, q, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        states, q = ctx.saved_tensors
        return _outer(q, gradient), _contract(states, gradient, 2)


class H3(FusedStepMixer):
    """The mixer. Its state: that of the shift model or the last inputs of the short filters [B, 3 D, W - 1], then that
    of the inner model with head_dim^2 H channels.
    """

    def __init__(self, config: H3Config, length: int) -> None:
        super().__init__()
        d_model = config.d_model
        self.head_dim = config.head_dim
        self.num_heads = d_model // config.head_dim
        self.qkv = Linear(d_model, 3 * d_model)
        self.shift = (
            None
            if config.short_filter
            else ShiftSSM(d_model, config.shift_taps or config.d_state, train_B=config.train_B)
        )
        if config.short_filter:
            self.short_weight = nn.Parameter(torch.empty(3 * d_model, config.short_filter))
            self.short_bias = nn.Parameter(torch.empty(3 * d_model))
        self.inner: Mixer
        if config.inner == "ssm":
            self.inner = DiagonalSSM(
                self.num_heads,
                config.d_state,
                init=config.init,
                dt_min=config.dt_min,
                dt_max=config.dt_max,
                discretization=config.discretization,
                train_B=config.train_B,
            )
        elif config.inner == "hyena":
            self.inner = LongConv(d_model, length)
        else:
            dt_rank = math.ceil(d_model / 16)
            self.inner = S6(d_model, config.d_state, dt_rank, dt_min=config.dt_min, dt_max=config.dt_max)
        self.out = ResidualLinear(d_model, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.shift is None:
            reset_taps(self.short_weight, self.short_bias)

    def forward(self, x: Tensor) -> Tensor:
        streams = self.qkv(x)
        if self.shift is None:
            convolved = causal_conv1d(streams, self.short_weight, self.short_bias)
            assert isinstance(convolved, Tensor)
            q, k, v = convolved.chunk(3, dim=-1)
        else:
            q, k, v = streams.chunk(3, dim=-1)
            k = self.shift(k)
        if isinstance(self.inner, S6):
            return self.out(q * self.inner(k * v))
        if self.head_dim == 1:
            return self.out(self.inner(v, gate_in=k, gate_out=q))
        q, k, v = self._time_last(q, k, v)
        outer = Outer.apply(k, v)
        states = self.inner(outer.flatten(0, 2).transpose(1, 2))
        return self._read(states, q)

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries and outputs at `positions` only, keys and values everywhere."""
        if self.shift is None or self.head_dim > 1 or autocast_dtype(x).itemsize == 2:
            # in half precision the operator would get a product with a gate that is rounded once more
            return super().forward_at(x, positions)
        weight_q, weight_kv = self.qkv.weight.tensor_split([self.num_heads])
        bias_q, bias_kv = self.qkv.bias.tensor_split([self.num_heads])
        k, v = linear(x, weight_kv, bias_kv).chunk(2, dim=-1)
        q = linear(take_positions(x, positions), weight_q, bias_q)
        return self.out(q * self.inner.forward_at(self.shift(k) * v, positions))

    def _time_last(self, *streams: Tensor) -> list[Tensor]:
        """Streams [B, T, D] as [B, head_dim, H, T]; on a GPU with time contiguous, for the inner model."""
        with_time_last = [time_contiguous(m).transpose(1, 2) for m in streams]
        heads = (self.num_heads, self.head_dim)
        return [m.unflatten(1, heads).transpose(1, 2) for m in with_time_last]

    def _read(self, states: Tensor, q: Tensor) -> Tensor:
        """y [B, T, D] of the inner model's outputs [B i j, T, H] and queries [B, i, H, T]."""
        states = states.transpose(1, 2).unflatten(0, (len(q), self.head_dim, self.head_dim))
        o = Contraction.apply(states, q)
        return self.out(o.transpose(1, 2).flatten(1, 2).transpose(1, 2))

    def init_state(self, batch_size: int, capacity: int) -> State:
        rest = self.inner.init_state(batch_size * self.head_dim**2, capacity)
        if self.shift is not None:
            return (*self.shift.init_state(batch_size, capacity), *rest)
        weight = at_least_float32(self.short_weight)
        return (weight.new_zeros(batch_size, weight.shape[0], weight.shape[1] - 1), *rest)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        window, *rest = state
        streams = step_linear(self.qkv, x_t, norm=norm)
        if self.shift is not None and self.head_dim == 1 and isinstance(self.inner, DiagonalSSM):
            system = self.inner.complex_system()
            if system is not None:
                y = h3_inner_step(
                    *streams.chunk(3, dim=-1), *state, taps=self.shift.taps(), shift_skip=self.shift.D, system=system,
                    dt_scale=self.inner.step_scale, discretization=self.inner.discretization,
                )  # fmt: skip
                return step_linear(self.out, y, residual=residual), state
        if self.shift is None:
            q, k, v = causal_conv1d_step(streams, self.short_weight, self.short_bias, window).chunk(3, dim=-1)
        else:
            q, k, v = streams.chunk(3, dim=-1)
            k, (window,) = self.shift.step(k, (window,))
        if self.head_dim == 1:
            o, after = self.inner.step(k * v, tuple(rest))
            return step_linear(self.out, q * o, residual=residual), (window, *after)
        q, k, v = (m.unflatten(-1, (self.num_heads, self.head_dim)) for m in (q, k, v))
        outer = torch.einsum("bhi,bhj->bijh", k, v)
        states, after = self.inner.step(outer.flatten(0, 2), tuple(rest))
        o = torch.einsum("bijh,bhi->bhj", states.view_as(outer), q)
        return step_linear(self.out, o.flatten(-2), residual=residual), (window, *after)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        streams = self.qkv(x)
        window: State
        if self.shift is None:
            streams, last = causal_conv1d(
                blank(streams, padding), self.short_weight, self.short_bias, return_final_state=True
            )
            q, k, v = streams.chunk(3, dim=-1)
            window = (last.to(state[0].dtype),)
        else:
            q, k, v = streams.chunk(3, dim=-1)
            k, window = self.shift.prefill(k, state[:1], padding)
        # zeros as values are zeros as inputs of the inner model
        v, rest = blank(v, padding), state[1:]
        if isinstance(self.inner, S6):
            y, after = self.inner.prefill(k * v, rest)
            return self.out(q * y), (*window, *after)
        if self.head_dim == 1:
            assert isinstance(self.inner, (DiagonalSSM, LongConv))
            y, after = self.inner.prefill(v, rest, gate_in=k, gate_out=q)
            return self.out(y), (*window, *after)
        q, k, v = self._time_last(q, k, v)
        states, after = self.inner.prefill(Outer.apply(k, v).flatten(0, 2).transpose(1, 2), rest)
        return self._read(states, q), (*window, *after)

    def state_size(self, length: int) -> int:
        of_window = (
            self.short_weight.shape[0] * (self.short_weight.shape[1] - 1)
            if self.shift is None
            else (self.shift.state_size(length))
        )
        return of_window + self.head_dim**2 * self.inner.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        if self.shift is None:
            return self.inner.ssm_parameters()
        of_shift = {f"shift.{name}": parameter for name, parameter in self.shift.ssm_parameters().items()}
        return {**self.inner.ssm_parameters(), **of_shift}


class H3Config(AttentionLayersConfig):
    """H3 in the network of its synthetic experiments: layer norms, and an MLP four times as wide as the model."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *AttentionLayersConfig.left_out_when_off, "train_B", "short_filter", "shift_taps", "bidirectional",
    )  # fmt: skip

    d_state: Width = 64
    """M of the shift model (see `shift_taps`), and N of the diagonal model (of which N / 2 conjugate pairs are kept) or
    of an inner S6."""
    head_dim: Width = 1
    init: Initialisation = "lin"
    """First eigenvalues of the diagonal model, as in `s4d`: `lin` and `real` are S4 (complex) and S4 (real) of Mamba's
    table 6."""
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    discretization: Discretization = "bilinear"
    """Rule by which the diagonal model becomes discrete; the authors' code too uses the bilinear one by default."""
    inner: Literal["ssm", "hyena", "s6"] = "ssm"
    ssm_lr: Positive | None = 1e-3
    """Learning rate of what `ssm_parameters` lists, which has no weight decay: log(dt) and A of the diagonal model and,
    with `train_B`, both B; of an inner `hyena` the filter network and D; of an inner `s6` log(-A), D and the bias of
    dt. The default does not follow the rate of the run; `ssm_lr: null` gives these parameters the rate of the run."""
    train_B: bool = False
    """Train B of the shift and the diagonal model, at `ssm_lr` and without decay, as H3's released code does."""
    short_filter: int = 0
    """Taps of causal convolutions with a bias of q, k and v in place of the shift model, 2 to 4; 0: the shift model.
    Hyena has 3; with `head_dim: 1` such a model is Mamba's H3+, with `head_dim: 8` its H3++."""

    shift_taps: Count = 0
    """M of the shift model; 0: d_state, as in the paper. Taps for lags that training never meets stay near their random
    start, and act on longer sequences."""

    bidirectional: bool = False
    """Two copies of every H3 layer in opposite directions, as on Long Range Arena (table 9)."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        check_ssm("h3", self.d_state, self.dt_min, self.dt_max, pairs=self.inner == "ssm" and self.init != "real")
        if self.short_filter not in (0, 2, 3, 4):
            raise ValueError(f"h3: short_filter must be 0 or 2 to 4, got {self.short_filter}.")
        if self.short_filter and self.shift_taps:
            raise ValueError("h3: short_filter takes the place of the shift model; set shift_taps=0.")
        require_divides("h3", head_dim=self.head_dim, d_model=self.d_model)
        if self.inner != "ssm" and self.head_dim != 1:
            raise ValueError(
                f"h3: inner={self.inner!r} is defined for head_dim=1, got {self.head_dim}; set head_dim=1."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        if self.bidirectional:
            return Bidirectional(H3(self, spec.max_length), H3(self, spec.max_length))
        return H3(self, spec.max_length)
