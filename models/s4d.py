"""S4D: a diagonal, time-invariant state space model in every channel, followed by a position-wise map.

    h_t = Abar h_{t-1} + Bbar x_t,   v_t = 2 Re(sum_n C_n h_t[n]) + D x_t,   y = W gelu(v) (through GLU by default)

with N / 2 conjugate pairs per channel, A = -exp(log_A_real) + i A_imag, and Abar and Bbar by zero-order hold. S4D-Real
(`init: real`) has N real states in their place, which start at A_n = -(n + 1), and no factor 2; its state and its
parameters are as large.

Source: S4D (Gu et al. 2022), section 4, and table 1 for the initialisations. The layer around it is that of S4, as used
in H3's table 2.

Departure from the authors' code: B is fixed to one, since only the product B C enters the output.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.fft_conv import fft_conv_at, reads_few
from subquad.kernels.lti_ssm import ContinuousSystem, DiagonalSystem, lti_ssm, lti_ssm_step
from subquad.kernels.ssm_kernel import ssm_kernel
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import as_autocast, at_least_float32, bounded_exp
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Positive, Width
from subquad.suite.contracts import TaskSpec

Initialisation = Literal["lin", "inv", "legs", "real", "random"]
Discretization = Literal["zoh", "bilinear"]
State = tuple[Tensor, ...]


def skew_hippo_frequencies(size: int) -> Tensor:
    """The positive imaginary parts [size / 2], ascending, of the eigenvalues of the normal part of HiPPO-LegS.

    That matrix [size, size] is -1/2 on the diagonal and +-sqrt(2i + 1) sqrt(2j + 1) / 2 above and below it, so the real
    part of every eigenvalue is -1/2. DSS (section 3.3) calls this initialisation Skew-Hippo, S4D calls it S4D-LegS.
    """
    root = np.sqrt(2 * np.arange(size) + 1)
    skew = np.triu(np.outer(root, root) / 2, 1)
    frequencies = np.linalg.eigvalsh(-1j * (skew - skew.T))
    return torch.from_numpy(np.sort(frequencies)[-(size // 2) :].copy())


def initial_frequencies(kind: Initialisation, pairs: int) -> Tensor:
    """Im(A) [pairs] of S4D-Lin (pi n), S4D-Inv (N/pi (N / (2n + 1) - 1)) or S4D-LegS, with N = 2 pairs.

    Re(A) is -1/2 in all three.
    """
    n = torch.arange(pairs, dtype=torch.float64)
    if kind == "lin":
        return math.pi * n
    if kind == "inv":
        return 2 * pairs / math.pi * (2 * pairs / (2 * n + 1) - 1)
    assert kind == "legs"
    return skew_hippo_frequencies(2 * pairs)


def fill_log_uniform(parameter: Tensor, low: float, high: float) -> None:
    """Fills a parameter with the logarithms of values from low to high; the logarithms are uniform."""
    nn.init.uniform_(parameter, math.log(low), math.log(high))


def step_sizes(log_dt: Tensor, scale: float) -> Tensor:
    """e^log_dt, times the factor of another sampling rate."""
    dt = bounded_exp(log_dt)
    # a product with one takes two launches
    return dt if scale == 1 else dt * scale


class DiagonalSSM(Mixer):
    """The state space model alone, channel by channel: x [B, T, D] to v [B, T, D].

    Its state: h [B, D, N / 2], complex, or with init "real" h [B, D, N], real.

    bidirectional: a second C reads the future.
    tie_A: all channels share the N / 2 eigenvalues.
    unit_response: C starts as the product of two complex normals (a C, and a B that is not kept), scaled so that the
        response to a constant has unit variance, as in the authors' stand-alone S4D.
    train_B: B starts at one and is a parameter of its own, as in H3's released code. This adds no functions, since only
        B C enters the output, but it changes the steps of the optimizer.

    Only A, B and dt are trained at `ssm_lr` without weight decay; C and D decay like other weights, as in the authors'
    code.
    """

    ssm_names = ("log_dt", "log_A_real", "A_imag", "B")
    step_scale = 1.0
    """Factor of dt, for inputs at another sampling rate than the one trained at (`Backbone.at_rate`)."""
    operator = staticmethod(lti_ssm)

    def __init__(
        self,
        width: int,
        d_state: int,
        *,
        init: Initialisation = "lin",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        discretization: Discretization = "zoh",
        tie_A: bool = False,
        unit_response: bool = False,
        bidirectional: bool = False,
        train_B: bool = False,
    ) -> None:
        super().__init__()
        self.is_real = init == "real"
        states, parts = (d_state, ()) if self.is_real else (d_state // 2, (2,))
        self.init, self.dt_min, self.dt_max, self.bidirectional = init, dt_min, dt_max, bidirectional
        self.discretization, self.unit_response = discretization, unit_response
        self.log_dt = nn.Parameter(torch.empty(width))
        self.log_A_real = nn.Parameter(torch.empty(1 if tie_A else width, states))
        self.A_imag = None if self.is_real else nn.Parameter(torch.empty(1 if tie_A else width, states))
        self.C = nn.Parameter(torch.empty(*([2] if bidirectional else []), width, states, *parts))
        self.B = nn.Parameter(torch.empty(width, states, *parts)) if train_B else None
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.B is not None:
            self.B.copy_(torch.ones(()) if self.is_real else torch.tensor([1.0, 0.0]))
        fill_log_uniform(self.log_dt, self.dt_min, self.dt_max)
        self.log_A_real.fill_(math.log(0.5))
        if self.A_imag is None:
            n = torch.arange(1, self.log_A_real.shape[1] + 1, dtype=self.log_A_real.dtype)
            self.log_A_real.copy_(n.log().expand_as(self.log_A_real))
        elif self.init == "random":
            nn.init.normal_(self.A_imag).exp_()
        else:
            self.A_imag.copy_(initial_frequencies(self.init, self.A_imag.shape[1]).expand_as(self.A_imag))
        # a standard complex normal has real and imaginary parts of variance one half
        nn.init.normal_(self.C, std=1.0 if self.is_real else 0.5**0.5)
        if self.unit_response:
            assert self.A_imag is not None
            A = torch.complex(-self.log_A_real.exp(), self.A_imag)
            B = torch.view_as_complex(torch.empty_like(self.C[..., :1, :, :]).normal_(std=0.5**0.5))
            B = B / (2 * (B / A).abs().square().sum(-1, keepdim=True)).sqrt()
            self.C.copy_(torch.view_as_real(torch.view_as_complex(self.C) * B))
        nn.init.normal_(self.D)

    def _system(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        A = -bounded_exp(self.log_A_real)
        if self.A_imag is not None:
            A = torch.complex(A, at_least_float32(self.A_imag))
        dt = step_sizes(self.log_dt, self.step_scale)
        B, C = None if self.B is None else self._map(self.B), self._map(self.C)
        return A.expand(self.log_dt.shape[0], -1), B, C, dt

    def complex_system(self) -> DiagonalSystem | None:
        """The parameters as they are, for a step that discretizes them itself; None where the states are real."""
        if self.A_imag is None:
            return None
        return DiagonalSystem(self.log_dt, self.log_A_real, self.A_imag, self.B, self.C, self.D)

    def _map(self, parameter: Tensor) -> Tensor:
        """B or C [..., D, N] or, complex, [..., D, N / 2]."""
        parameter = at_least_float32(parameter)
        return parameter if self.is_real else torch.view_as_complex(parameter)

    def forward(self, x: Tensor, gate_in: Tensor | None = None, gate_out: Tensor | None = None) -> Tensor:
        y = self.operator(
            x,
            *self._system(),
            D=self.D,
            conj_pairs=not self.is_real,
            discretization=self.discretization,
            bidirectional=self.bidirectional,
            gate_in=gate_in,
            gate_out=gate_out,
        )
        assert isinstance(y, Tensor)
        return y

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.bidirectional or not reads_few(x, positions):
            return super().forward_at(x, positions)
        return fft_conv_at(x, self.kernel(x.shape[1]), positions, D=self.D)

    def kernel(self, length: int) -> Tensor:
        """The filter K [D, length] over the past. A bidirectional model has another one over the future, from C[1]."""
        A, B, C, dt = self._system()
        C = C[0] if self.bidirectional else C
        return ssm_kernel(A, B, C, dt, length, conj_pairs=not self.is_real, discretization=self.discretization)

    def eigenvalues(self) -> Tensor:
        """The eigenvalues A [D, N / 2], one of each conjugate pair; [D, N], complex too, where they are real."""
        A = self._system()[0]
        return A.to(A.dtype.to_complex())

    def _check_causal(self) -> None:
        if self.bidirectional:
            raise ValueError("s4d: bidirectional=True reads the future and has no step; set bidirectional=False.")

    def init_state(self, batch_size: int, capacity: int) -> State:
        log_A = at_least_float32(self.log_A_real)
        shape = (batch_size, self.log_dt.shape[0], log_A.shape[1])
        return (log_A.new_zeros(shape, dtype=log_A.dtype if self.is_real else log_A.dtype.to_complex()),)

    def step(
        self, x_t: Tensor, state: State, gate_in: Tensor | None = None, gate_out: Tensor | None = None
    ) -> tuple[Tensor, State]:
        self._check_causal()
        y = lti_ssm_step(
            x_t,
            self.complex_system() or ContinuousSystem(*self._system(), self.D),
            state[0],
            conj_pairs=not self.is_real,
            discretization=self.discretization,
            dt_scale=self.step_scale,
            gate_in=gate_in,
            gate_out=gate_out,
        )
        return y, state

    def prefill(
        self,
        x: Tensor,
        state: State,
        padding: LeftPadding | None = None,
        gate_in: Tensor | None = None,
        gate_out: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        self._check_causal()
        y, after = self.operator(
            blank(x, padding),
            *self._system(),
            D=self.D,
            conj_pairs=not self.is_real,
            discretization=self.discretization,
            gate_in=gate_in,
            gate_out=gate_out,
            return_final_state=True,
        )
        return y, (after,)

    def state_size(self, length: int) -> int:
        return (1 if self.is_real else 2) * self.log_dt.shape[0] * self.log_A_real.shape[1]


class SSMLayer(Mixer):
    """A channel-wise state space model, GELU, and a position-wise map: D to D, or D to 2 D followed by GLU."""

    def __init__(self, d_model: int, ssm: Mixer, output: Literal["linear", "glu"]) -> None:
        super().__init__()
        self.ssm = ssm
        self.glu = output == "glu"
        self.out = ResidualLinear(d_model, 2 * d_model if self.glu else d_model)

    def _output(self, v: Tensor) -> Tensor:
        y = self.out(F.gelu(v))
        return F.glu(y, dim=-1) if self.glu else y

    def forward(self, x: Tensor) -> Tensor:
        return self._output(self.ssm(as_autocast(x)))

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._output(self.ssm.forward_at(as_autocast(x), positions))

    def init_state(self, batch_size: int, capacity: int) -> State:
        return self.ssm.init_state(batch_size, capacity)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        v, state = self.ssm.step(as_autocast(x_t), state)
        return self._output(v), state

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        v, state = self.ssm.prefill(as_autocast(x), state, padding)
        return self._output(v), state

    def state_size(self, length: int) -> int:
        return self.ssm.state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return self.ssm.ssm_parameters()


def check_ssm(name: str, d_state: int, dt_min: float, dt_max: float, *, pairs: bool) -> None:
    """Raises ValueError for a state size or time scales that cannot work; pairs: states come in conjugate pairs."""
    if pairs and d_state % 2:
        raise ValueError(f"{name}: d_state must be an even number >= 2 (conjugate pairs), got {d_state}.")
    if dt_min > dt_max:
        raise ValueError(f"{name}: needs dt_min <= dt_max, got {dt_min} and {dt_max}.")


class S4DConfig(BackboneConfig):
    """S4D in the network of H3's synthetic experiments: layer norms, and an MLP four times as wide as the model."""

    d_state: Width = 64
    """N, kept as N / 2 conjugate pairs, or as N real states with `init: real`."""
    init: Initialisation = "lin"
    """First eigenvalues: those of table 1 of the paper (`lin`, `inv`, `legs`), N real ones (`real`, S4D-Real), or -1/2
    with the random imaginary parts exp(r), r standard normal (`random`, the option `rand` of state-spaces/s4 at
    070384aac428583d0b817c0e5393078bfef982f0, models/s4/s4.py, `dplr`)."""
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    discretization: Discretization = "zoh"
    tie_A: bool = False
    """Whether all channels share A."""
    unit_response: bool = False
    """Whether C starts scaled so that the response to a constant has unit variance."""
    output: Literal["linear", "glu"] = "glu"
    bidirectional: bool = False
    """Whether the model reads the future too, S4's setting for LRA. Such a model has no step."""
    ssm_lr: Positive | None = 1e-3
    """Learning rate of log(dt) and A, which have no weight decay. The default does not follow the rate of the run;
    `ssm_lr: null` gives these parameters the rate of the run."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        check_ssm("s4d", self.d_state, self.dt_min, self.dt_max, pairs=self.init != "real")
        if self.unit_response and self.init == "real":
            raise ValueError("s4d: unit_response=True is defined for complex states; choose another init than 'real'.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        ssm = DiagonalSSM(
            self.d_model,
            self.d_state,
            init=self.init,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            discretization=self.discretization,
            tie_A=self.tie_A,
            unit_response=self.unit_response,
            bidirectional=self.bidirectional,
        )
        return SSMLayer(self.d_model, ssm, self.output)
