"""Mamba: a gated block around a short convolution and a selective state space model (S6).

    x, z = W_in u  [E D each];   x = silu(conv(x))
    dt_raw, B, C = W_x x  [R, N, N];   dt = softplus(W_dt dt_raw + b_dt)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t;   y_t = (C_t h_t + D x_t) * silu(z_t);   W_out y

with E the option `expand` and R `dt_rank`.

Source: Mamba (Gu & Dao 2023), sections 3.4 and 3.6, algorithm 2 and appendix E. A starts at -(n + 1) in every channel,
n = 0 .. N - 1 (section 3.6). What the text leaves open (the start of the linear maps, biases) is as in the authors'
code (mamba_ssm). `inner` replaces S6 by another sequence layer and `gate=False` drops z, for the rows of the paper's
tables 1 and 6 ("No gate" with S6, and "Mamba" with S4 or Hyena). `fixed` and `A_init` are the ablations of its tables 7
to 10: a step size, B or C that does not depend on the input, and other eigenvalues A, also complex ones. With
`negative_eigenvalues` the factor of h_{t-1} is 2 exp(dt_t A) - 1 in place of exp(dt_t A), for state tracking (Grazzi et
al. 2024, arXiv 2411.12537, section 5; in flash-linear-attention_mod/fla/models/mamba_py/mamba_mod.py of
adankow/unlocking_state_tracking, at ef8aaa307c5f0cdc530de9b3cb3fb9328c9da991, the option is `positive_and_negative`).

Sizes: two layers of width 64 with a tied vocabulary of 16 have 66,496 parameters. The 74K of the paper's table 11 are
reached with `dt_rank` 16 and an untied readout, or with a vocabulary of 128 in place of the 16 that the paper states
(73,664 either way).

Departures from the paper: B is discretised as dt B (see `kernels.selective_scan`). Section 3.6 draws the first step
sizes, softplus(b_dt), uniformly from [0.001, 0.1]; here log dt is uniform between the logarithms of `dt_min` and
`dt_max`, as in the authors' code, so that half of the steps start below 0.01 in place of a tenth of them. Section 3.4
adds "an optional normalization layer" (LayerNorm) to the block, without its exact place; the authors' code has none,
and neither has this block. Whether either changes a result was not tried.

The paper does not describe its "No gate" further; with S6 it is this block without z here, and with S4 the model
`s4d`, which has no expansion and no short convolution. It does not say either how a complex S6 keeps its states. Here
N / 2 complex states stand for N / 2 conjugate pairs, and B and C have N / 2 complex entries, so that state and
parameters are as large as those of the real S6. B as a parameter (`fixed`) is trained without weight decay, like
log A, D and b_dt; C as a parameter decays like other weights, as C of S4D does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d, causal_conv1d_step
from subquad.kernels.mamba_inner import mamba_inner_step
from subquad.kernels.selective_scan import selective_scan, selective_scan_step
from subquad.models.backbone import BackboneConfig
from subquad.models.hyena import LongConv
from subquad.models.parts.casts import at_least_float32, autocast_dtype, rate_of
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.initial import reset_taps, step_bias
from subquad.models.parts.linear import ResidualLinear, linear, split_linear
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.norms import NormKind
from subquad.models.parts.options import require_divides
from subquad.models.parts.recompute import Recomputing, at_once, spares
from subquad.models.parts.step import step_linear
from subquad.models.parts.time_axis import LeftPadding, blank, take_positions
from subquad.models.s4d import DiagonalSSM, Initialisation, State, check_ssm
from subquad.suite.bounds import Factor, Positive, Width
from subquad.suite.contracts import TaskSpec

Inner = Literal["s6", "s4d", "s4d-real", "hyena"]
Selected = Literal["dt", "B", "C"]
AInit = Literal["half", "random", "complex"]


class S6(Mixer):
    """The selective state space model alone: x [B, T, width] to [B, T, width]. Its state: h [B, width, N].

    groups: number of groups of neighbouring channels, each with a B and a C of its own; None for one of both.
    fixed: those of dt, B and C that do not depend on x. The step size is then softplus(b_dt), and B and C are
        parameters [width, N]; B starts at one and C standard normal, as in S4D.
    A_init: A_n = -(n + 1) where None (S4D-Real); `half`: -1/2; `random`: -exp(r) with r standard normal; `complex`:
        -1/2 + n i (S4D-Lin as the paper has it, without the factor pi), one of each pair of N / 2 conjugate pairs, with
        complex B and C and a complex state [B, width, N / 2].
    negative_eigenvalues: the state is multiplied by 2 exp(dt A) - 1, between -1 and 1.
    network_init: linear maps keep the start that the network gives them, and b_dt is zero (see `MambaConfig`).
    """

    ssm_names = ("log_A", "D", "dt_bias", "A_imag", "B")

    def __init__(
        self,
        width: int,
        d_state: int,
        dt_rank: int,
        *,
        dt_min: float,
        dt_max: float,
        dt_floor: float = 1e-4,
        fixed: tuple[Selected, ...] = (),
        A_init: AInit | None = None,
        groups: int | None = None,
        negative_eigenvalues: bool = False,
        network_init: bool = False,
    ) -> None:
        super().__init__()
        self.groups, self.network_init = groups, network_init
        self.negative_eigenvalues = negative_eigenvalues
        self.A_init, self.is_complex = A_init, A_init == "complex"
        self.dt_min, self.dt_max, self.dt_floor = dt_min, dt_max, dt_floor
        num_states = d_state // 2 if self.is_complex else d_state
        kept = (width, num_states, 2) if self.is_complex else (width, num_states)
        # x_proj gives dt_raw, B and C, as far as they depend on x
        self.sizes = tuple(
            0 if name in fixed else size
            for name, size in (("dt", dt_rank), ("B", d_state * (groups or 1)), ("C", d_state * (groups or 1)))
        )
        self.dt_rank, self.d_state = self.sizes[0], d_state
        self.x_proj = nn.Linear(width, sum(self.sizes), bias=False) if any(self.sizes) else None
        self.dt_proj = None if "dt" in fixed else nn.Linear(dt_rank, width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.log_A = nn.Parameter(torch.empty(width, num_states))
        self.A_imag = nn.Parameter(torch.empty(width, num_states)) if self.is_complex else None
        self.B = nn.Parameter(torch.empty(kept)) if "B" in fixed else None
        self.C = nn.Parameter(torch.empty(kept)) if "C" in fixed else None
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @property
    def standard(self) -> bool:
        """Whether this is the S6 of the paper, for which there is an operator of a whole step."""
        return all(self.sizes) and not (self.is_complex or self.groups or self.negative_eigenvalues)

    @property
    def _options(self) -> dict[str, Any]:
        """The arguments of the scan and of its step that do not depend on the input."""
        return {
            "D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True,
            "negative_eigenvalues": self.negative_eigenvalues,
        }  # fmt: skip

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.network_init:
            self.dt_bias.zero_()
        else:
            self._reset_maps()
        self._reset_A()
        self.D.fill_(1.0)
        if self.B is not None:
            self.B.copy_(torch.tensor([1.0, 0.0]) if self.is_complex else torch.ones(()))
        if self.C is not None:
            # a standard complex normal has real and imaginary parts of variance one half
            nn.init.normal_(self.C, std=0.5**0.5 if self.is_complex else 1.0)

    def _reset_maps(self) -> None:
        if self.x_proj is not None:
            self.x_proj.reset_parameters()
        if self.dt_proj is not None:
            bound = self.dt_rank**-0.5
            nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        self.dt_bias.copy_(step_bias(self.dt_bias, self.dt_min, self.dt_max, self.dt_floor))

    def _reset_A(self) -> None:
        if self.A_init == "random":
            nn.init.normal_(self.log_A)
            return
        n = torch.arange(self.log_A.shape[1], dtype=self.log_A.dtype, device=self.log_A.device)
        real = n + 1 if self.A_init is None else torch.full_like(n, 0.5)
        self.log_A.copy_(real.log().expand_as(self.log_A))
        if self.A_imag is not None:
            self.A_imag.copy_(n.expand_as(self.A_imag))

    def _select(
        self, x: Tensor, keep: Callable[[Callable[[], Tensor]], Tensor] = at_once
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step sizes before their bias [..., width], A [width, N], and B and C, each [..., N] or [width, N].

        With groups those that depend on x are [..., groups, N].
        """
        projected = x.new_empty(*x.shape[:-1], 0) if self.x_proj is None else self.x_proj(x)
        dt, B, C = projected.split(self.sizes, dim=-1)
        weight = None if self.dt_proj is None else self.dt_proj.weight
        A = -rate_of(self.log_A)
        if self.A_imag is not None:
            A = torch.complex(A, at_least_float32(self.A_imag))
        if self.groups:
            B, C = (m.unflatten(-1, (self.groups, -1)) for m in (B, C))
        B, C = self._map(B, self.B), self._map(C, self.C)
        # one complex state stands for a conjugate pair, whose response is twice the real part
        C = 2 * C if self.is_complex else C
        shape, dtype = x.shape, x.dtype

        # this function stays in memory, so it must not hold x, which is computed again, too
        def step_sizes() -> Tensor:
            return dt.new_zeros(shape, dtype=dtype) if weight is None else F.linear(dt, weight)

        return keep(step_sizes), A, B, C

    def _map(self, selected: Tensor, parameter: Tensor | None) -> Tensor:
        """B or C: the parameter where there is one, else what x selects; complex where A is."""
        m = selected if parameter is None else parameter
        if not self.is_complex:
            return m
        m = at_least_float32(m)
        real, imaginary = (m.unflatten(-1, (-1, 2)) if parameter is None else m).unbind(-1)
        return torch.complex(real, imaginary)

    def _of_channels(self, m: Tensor, parameter: Tensor | None) -> Tensor:
        """B or C of one position as the step of the operator takes it."""
        if parameter is not None:
            # a map without a batch axis has one of size one in a step
            return m.unsqueeze(0)
        return m if self.groups is None else m.repeat_interleave(len(self.D) // self.groups, 1)

    def forward(
        self, x: Tensor, z: Tensor | None = None, keep: Callable[[Callable[[], Tensor]], Tensor] = at_once
    ) -> Tensor:
        """y from x and the gate z [B, T, width]. keep: that of `Recomputing`, which then spares the step sizes."""
        y = selective_scan(x, *self._select(x, keep), z=z, **self._options)
        assert isinstance(y, Tensor)
        return y

    def init_state(self, batch_size: int, capacity: int) -> State:
        log_A = at_least_float32(self.log_A)
        dtype = log_A.dtype.to_complex() if self.is_complex else log_A.dtype
        return (log_A.new_zeros(batch_size, *log_A.shape, dtype=dtype),)

    def step(self, x_t: Tensor, state: State, z: Tensor | None = None) -> tuple[Tensor, State]:
        dt, A, B, C = self._select(x_t)
        B, C = self._of_channels(B, self.B), self._of_channels(C, self.C)
        y = selective_scan_step(x_t, dt, A, B, C, state[0], z=z, **self._options)
        return y, state

    def prefill(
        self, x: Tensor, state: State, padding: LeftPadding | None = None, z: Tensor | None = None
    ) -> tuple[Tensor, State]:
        x = blank(x, padding)
        y, after = selective_scan(x, *self._select(x), z=z, return_final_state=True, **self._options)
        return y, (after,)

    def state_size(self, length: int) -> int:
        return self.log_A.numel() * (2 if self.is_complex else 1)


class Mamba(FusedStepMixer):
    """The mixer. Its state: the last inputs of the short convolution [B, E D, W - 1], then that of the inner layer."""

    def __init__(self, config: MambaConfig, length: int) -> None:
        super().__init__()
        d_model, width = config.d_model, config.expand * config.d_model
        self.gated = config.gate
        self.recompute, self.num_layers = config.recompute, config.num_layers
        self.network_init = config.network_init
        # the projection into the residual stream starts smaller in deeper networks, as in GPT-2
        self.residual_scale = config.num_layers**-0.5 if config.init_residual == "scaled" else 1.0
        self.in_proj = nn.Linear(d_model, 2 * width if config.gate else width, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(width, config.d_conv))
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.inner = make_inner(config.inner, width, d_model, length, config)
        self.out = ResidualLinear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        # the authors keep torch's initialisation of linear and convolution layers
        if not self.network_init:
            self.in_proj.reset_parameters()
            self.out.reset_parameters()
            self.out.weight.mul_(self.residual_scale)
        reset_taps(self.conv_weight, self.conv_bias)

    def _split(self, u: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.gated:
            return self.in_proj(u), None
        width = len(self.conv_bias)
        x, z = split_linear(self.in_proj, u, (width, width))
        return x, z

    def forward(self, u: Tensor) -> Tensor:
        x, z = self._split(u)
        if isinstance(self.inner, S6):
            return self.out(self._scan(self.inner, x, z))
        y = self.inner(self._convolve(x))
        return self.out(y if z is None else y * F.silu(z))

    def forward_at(self, u: Tensor, positions: Tensor) -> Tensor:
        """Outputs at `positions` only, gates too where the scan does not take them, inputs of it everywhere."""
        if isinstance(self.inner, S6) and self.gated and autocast_dtype(u).itemsize == 2:
            # in half precision the scan is faster with a gate than without one
            return self.out(take_positions(self._scan(self.inner, *self._split(u)), positions))
        weight, of_gates = self.in_proj.weight.tensor_split([len(self.conv_bias)])
        x = linear(u, weight, None)
        if isinstance(self.inner, S6):
            y = take_positions(self._scan(self.inner, x, None), positions)
        else:
            y = self.inner.forward_at(self._convolve(x), positions)
        return self.out(y * F.silu(linear(take_positions(u, positions), of_gates, None)) if self.gated else y)

    def _convolve(self, x: Tensor) -> Tensor:
        y = causal_conv1d(x, self.conv_weight, self.conv_bias, activation="silu")
        assert isinstance(y, Tensor)
        return y

    def _scan(self, inner: S6, x: Tensor, z: Tensor | None) -> Tensor:
        """The convolved x through the inner layer, times the gate."""
        # the scan keeps the convolved x and the step sizes, as large as x each
        if not spares(self.recompute, 2 * self.num_layers * x.numel() * x.element_size(), x):
            return inner(self._convolve(x), z)
        with Recomputing() as keep:
            return inner(keep(partial(self._convolve, x)), z, keep)

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.conv_weight)
        # neighbouring channels lie side by side, because a step takes one input of many channels at a time
        window = weight.new_zeros(batch_size, weight.shape[1] - 1, weight.shape[0]).transpose(1, 2)
        return (window, *self.inner.init_state(batch_size, capacity))

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        window, *rest = state
        x = step_linear(self.in_proj, x_t, norm=norm)
        z = None
        if self.gated:
            x, z = x.chunk(2, dim=-1)
        if isinstance(self.inner, S6) and self.inner.standard:
            assert self.inner.x_proj is not None
            assert self.inner.dt_proj is not None
            y = mamba_inner_step(
                x,
                z,
                window,
                rest[0],
                conv_weight=self.conv_weight,
                conv_bias=self.conv_bias,
                x_proj=self.inner.x_proj.weight,
                dt_proj=self.inner.dt_proj.weight,
                dt_bias=self.inner.dt_bias,
                log_A=self.inner.log_A,
                D=self.inner.D,
            )
            return step_linear(self.out, y, residual=residual), state
        x = causal_conv1d_step(x, self.conv_weight, self.conv_bias, window, activation="silu")
        y, after = self.inner.step(x, tuple(rest))
        return step_linear(self.out, y, gate=z, residual=residual), (window, *after)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        x, z = self._split(x)
        convolved, window = causal_conv1d(
            blank(x, padding), self.conv_weight, self.conv_bias, activation="silu", return_final_state=True
        )
        if isinstance(self.inner, S6):
            y, after = self.inner.prefill(convolved, state[1:], padding, z)
        else:
            y, after = self.inner.prefill(convolved, state[1:], padding)
            y = y if z is None else y * F.silu(z)
        return self.out(y), (window.to(state[0].dtype), *after)

    def state_size(self, length: int) -> int:
        return self.conv_weight.shape[0] * (self.conv_weight.shape[1] - 1) + self.inner.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {f"inner.{name}": parameter for name, parameter in self.inner.ssm_parameters().items()}


def make_inner(kind: Inner, width: int, d_model: int, length: int, config: MambaConfig) -> Mixer:
    """The sequence layer inside a block."""
    if kind == "s6":
        dt_rank = config.dt_rank or math.ceil(d_model / 16)
        return S6(
            width,
            config.d_state,
            dt_rank,
            dt_min=config.dt_min,
            dt_max=config.dt_max,
            fixed=config.fixed,
            A_init=config.A_init,
            groups=config.groups,
            negative_eigenvalues=config.negative_eigenvalues,
            network_init=config.network_init,
        )
    if kind in ("s4d", "s4d-real"):
        init: Initialisation = "real" if kind == "s4d-real" else "lin"
        return DiagonalSSM(width, config.d_state, init=init, dt_min=config.dt_min, dt_max=config.dt_max)
    return LongConv(width, length)


class MambaConfig(BackboneConfig):
    """Mamba in the network of its paper: RMS norms and no channel mixer.

    The paper's ablations: `fixed` (table 7), `A_init` (table 8), `dt_rank` with `fixed: [dt]` for none (table 9),
    `d_state` with `fixed: [B, C]` for constant maps (table 10), `inner` (table 6), and for figure 9 a `channel_mixer`
    (Mamba-MLP) or the model `hybrid` (Mamba-MHA).
    """

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *BackboneConfig.left_out_when_off, "fixed", "A_init", "groups", "negative_eigenvalues", "network_init",
    )  # fmt: skip

    channel_mixer: ChannelMixerKind = "none"
    norm: NormKind = "rms"
    d_state: Width = 16
    d_conv: Factor = 4
    expand: Factor = 2
    dt_rank: Width | None = None
    """R. None: d_model / 16, rounded up."""
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    inner: Inner = "s6"
    """`s4d` is S4D-Lin with N / 2 conjugate pairs, `s4d-real` S4D-Real with N real states."""
    gate: bool = True
    fixed: tuple[Selected, ...] = ()
    """Names which of the step size, B and C do not depend on the input."""
    A_init: AInit | None = None
    """First eigenvalues: None for -(n + 1), `half` for -1/2, `random` for -exp(r) with r standard normal, `complex` for
    -1/2 + n i with complex B and C."""
    groups: Width | None = None
    """Groups of channels with a B and a C of their own, which the scan of the authors' code (mamba_ssm) takes, although
    its Mamba has one. None: one B and C for all channels."""
    negative_eigenvalues: bool = False
    """Whether the state is multiplied by 2 exp(dt A) - 1, between -1 and 1, in place of exp(dt A) between 0 and 1."""
    network_init: bool = False
    """Whether the linear maps of the mixer start as those of the network do (normal with `init_std`, in place of
    torch's start), and the bias of the step sizes at zero, so that dt is about log 2 in place of `dt_min` to `dt_max`.
    Mamba starts so in a network that initialises all its linear maps again, as that of MAD's code does (athms/mad-lab
    at 6e7e4c903b7d4d1a31d12186b709f36fa3184041, mad/model/auto_encoder.py)."""
    ssm_lr: Positive | None = None

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        pairs = self.inner == "s4d" or self.A_init == "complex"
        check_ssm("mamba", self.d_state, self.dt_min, self.dt_max, pairs=pairs)
        if self.inner != "s6" and (self.fixed or self.A_init or self.groups or self.negative_eigenvalues):
            raise ValueError(
                f"mamba: fixed, A_init, groups and negative_eigenvalues are options of inner='s6', got "
                f"inner={self.inner!r}; leave them out."
            )
        if self.negative_eigenvalues and self.A_init == "complex":
            raise ValueError("mamba: negative_eigenvalues needs real eigenvalues; set A_init to half, random or null.")
        if self.groups is not None:
            require_divides("mamba", groups=self.groups, width=self.expand * self.d_model)
        if len(set(self.fixed)) != len(self.fixed):
            raise ValueError(f"mamba: fixed={list(self.fixed)} names one of dt, B and C twice; name it once.")
        if not 2 <= self.d_conv <= 4:
            raise ValueError(f"mamba: needs d_conv in 2..4, got {self.d_conv}.")
        if self.mixer_gain is not None and not self.network_init:
            raise ValueError(
                f"mamba: its linear maps start as in the authors' code, so mixer_gain={self.mixer_gain} would have no "
                "effect; leave it out or set network_init."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return Mamba(self, spec.max_length)
