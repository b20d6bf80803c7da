"""S4: a time-invariant state space model in every channel, whose state matrix is diagonal less a matrix of low rank.

    h' = A h + B u,   v = C h + D u,   A = Lambda - P P^*,   y = W gelu(v) (through GLU by default)

with N / 2 conjugate pairs a channel; Lambda, P and B start as a HiPPO matrix (`models.parts.hippo`), and the bilinear
rule makes the system discrete:

    Abar = (1 - dt/2 A)^-1 (1 + dt/2 A),   Bbar = (1 - dt/2 A)^-1 dt B

Training convolves with the filter K_l = C Abar^l Bbar, l < L, which comes from its transform on a circle a little
inside the unit circle, at z = exp(-2 s) with 2 s = (DAMPING + 2 pi i k) / L. With w = 2 sinh(s), q = dt cosh(s) and
R = (w - q Lambda)^-1,

    sum_l K_l z^l = dt e^s (C~ R B - q C~ R P (1 + q P^* R P)^-1 P^* R B),   C~ = C (1 - e^-DAMPING Abar^L)

Decoding applies Abar and Bbar to a state by the same identity for the inverse of a diagonal matrix plus one of low
rank, in O(N) a channel.

Source: S4 (Gu et al. 2022), sections 2 and 3, algorithm 1 and appendix C.3; the layer around it is that of the authors'
code (state-spaces/s4 at 070384aac428583d0b817c0e5393078bfef982f0, models/s4/s4.py).

Departures from the source:
- C is the parameter. The authors learn C~ for one length L, which is the same function of other parameters. Here C~ is
  made from C for the length at hand, so that a model has one filter whatever the length of its inputs.
- The authors take the roots of unity themselves. There R has entries of 1 / (dt Re(Lambda)), whose differences are all
  that is left; with the small Re(Lambda) of LegT and FouT, gradients in float32 were then worth nothing. The factor
  e^s taken out of 1 - z and 1 + z leaves nothing infinite at z = -1.
- The real part of Lambda is -exp(log_A_real) as in the code; that of LegT and FouT, zero, starts at -1e-4 as there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad.kernels.cauchy import cauchy, elements_per_point
from subquad.kernels.fft_conv import fft_conv
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32, bounded_exp
from subquad.models.parts.hippo import RANKS, Measure, diagonal_less_low_rank
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.models.s4d import SSMLayer, State, check_ssm, fill_log_uniform
from subquad.suite.bounds import Positive, Width
from subquad.suite.contracts import TaskSpec

LARGEST_LOG = 20.0
"""Bound of log(dt) and log(-Re(Lambda)). (dt Lambda)^2 has room in float32, and longer steps and faster decays move
outputs by less than a rounding."""
MIN_DECAY = 1e-4
"""Least -Re(Lambda) at the start."""
DAMPING = 2.0
"""The circle of the transform is so far inside that K_L there has the weight e^-DAMPING. Dividing by the weights again
makes rounding errors of the last taps larger by e^DAMPING."""
MOST_ELEMENTS = 1 << 24
"""Maximum number of elements of the largest tensor of a piece: [D, N / 2, frequencies] in PyTorch, [sums, D,
frequencies] in Triton. Where there are several pieces, the backward pass computes each of them again."""
BLOCK = 64
"""Inputs that a prefill takes at once."""


class S4Kernel(Mixer):
    """The state space model alone, channel by channel: x [B, T, D] to v [B, T, D]. Its state: h [B, D, N / 2], complex.

    bidirectional: a second C reads the future, with lag zero at the next position.
    tie_A: all channels share Lambda, P and B.

    Lambda, P, B and dt are trained at `ssm_lr` without weight decay; C and D decay like other weights.
    """

    ssm_names = ("log_dt", "log_A_real", "A_imag", "P", "B")
    step_scale = 1.0
    """Factor of dt, for inputs at another sampling rate than the one trained at (`Backbone.at_rate`)."""

    def __init__(
        self,
        width: int,
        d_state: int,
        *,
        init: Measure = "legs",
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        tie_A: bool = False,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        pairs, systems = d_state // 2, 1 if tie_A else width
        self.init: Measure = init
        self.dt_min, self.dt_max, self.bidirectional = dt_min, dt_max, bidirectional
        self.log_dt = nn.Parameter(torch.empty(width))
        self.log_A_real = nn.Parameter(torch.empty(systems, pairs))
        self.A_imag = nn.Parameter(torch.empty(systems, pairs))
        self.P = nn.Parameter(torch.empty(RANKS[init], systems, pairs, 2))
        self.B = nn.Parameter(torch.empty(systems, pairs, 2))
        self.C = nn.Parameter(torch.empty(*([2] if bidirectional else []), width, pairs, 2))
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        fill_log_uniform(self.log_dt, self.dt_min, self.dt_max)
        Lambda, P, B, _ = diagonal_less_low_rank(self.init, 2 * self.log_A_real.shape[1])
        self.log_A_real.copy_((-Lambda.real).clamp(min=MIN_DECAY).log().expand_as(self.log_A_real))
        self.A_imag.copy_(Lambda.imag.expand_as(self.A_imag))
        self.P.copy_(torch.view_as_real(P).unsqueeze(1).expand_as(self.P))
        self.B.copy_(torch.view_as_real(B).expand_as(self.B))
        # a standard complex normal has real and imaginary parts of variance one half
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def _system(self) -> System:
        Lambda = torch.complex(-bounded_exp(self.log_A_real, LARGEST_LOG), at_least_float32(self.A_imag))
        P, B = (torch.view_as_complex(at_least_float32(m)) for m in (self.P, self.B))
        dt = bounded_exp(self.log_dt, LARGEST_LOG) * self.step_scale
        return System(Lambda, P, B, dt)

    def _maps(self) -> Tensor:
        """C as [1 or 2, D, N / 2]: for the past and, in a bidirectional model, for the future."""
        C = torch.view_as_complex(at_least_float32(self.C))
        return C if self.bidirectional else C.unsqueeze(0)

    def _kernels(self, length: int) -> Tensor:
        """The filters K [1 or 2, D, length], one for each C."""
        with torch.autocast(self.C.device.type, enabled=False):
            return self._system().filters(self._maps(), length)

    def forward(self, x: Tensor) -> Tensor:
        kernels = self._kernels(x.shape[1])
        y = fft_conv(x, kernels[0], D=self.D)
        if not self.bidirectional:
            return y
        # the first input that the second filter reads is the next one
        later = F.pad(kernels[1], (1, 0))[:, :-1]
        return y + fft_conv(x.flip(1), later).flip(1)

    def kernel(self, length: int) -> Tensor:
        """The filter K [D, length] over the past. A bidirectional model has another one over the future, from C[1]."""
        return self._kernels(length)[0]

    def _check_causal(self) -> None:
        if self.bidirectional:
            raise ValueError("s4: bidirectional=True reads the future and has no step; set bidirectional=False.")

    def init_state(self, batch_size: int, capacity: int) -> State:
        C = at_least_float32(self.C)
        shape = (batch_size, *self.C.shape[-3:-1])
        return (C.new_zeros(shape, dtype=C.dtype.to_complex()),)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        self._check_causal()
        with torch.autocast(x_t.device.type, enabled=False):
            inputs = at_least_float32(x_t)
            h = self._system().advance(state[0], inputs)
            y = full_sum(self._maps()[0] * h) + self.D * inputs
        return y.to(x_t.dtype), (h,)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        self._check_causal()
        x = blank(x, padding)
        with torch.autocast(x.device.type, enabled=False):
            h = self._system().final_state(at_least_float32(x))
        return self(x), (h.to(state[0].dtype),)

    def state_size(self, length: int) -> int:
        return 2 * self.log_dt.shape[0] * self.A_imag.shape[1]


def full_sum(x: Tensor) -> Tensor:
    """The sum over all N states of x [..., N / 2], of which half are kept: that of each with its conjugate."""
    return 2 * x.real.sum(-1)


class System:
    """A discrete state space model of every channel: Lambda and B [D or 1, N / 2], P [rank, D or 1, N / 2], dt [D]."""

    def __init__(self, Lambda: Tensor, P: Tensor, B: Tensor, dt: Tensor) -> None:
        width = len(dt)
        self.Lambda, self.B, self.dt = Lambda.expand(width, -1), B.expand(width, -1), dt
        self.P = P.expand(-1, width, -1)
        half = dt / 2
        self.E = 1 / (1 - half.unsqueeze(-1) * self.Lambda)
        rank = len(P)
        gram = [[full_sum(self.P[i].conj() * self.E * self.P[j]) for j in range(rank)] for i in range(rank)]
        # not (1 / half + gram)^-1, whose gradient would square 1 / half
        inverse = inverse_beside(torch.ones_like(half), [[half * m for m in row] for row in gram])
        self.inner = [[half * m for m in row] for row in inverse]

    def _project(self, h: Tensor) -> Tensor:
        """P^* h, real [rank, ..., D]."""
        return torch.stack([full_sum(P.conj() * h) for P in self.P])

    def _along(self, weights: Tensor) -> Tensor:
        """P w of real weights [rank, ..., D]: [..., D, N / 2]."""
        return torch.stack([w.unsqueeze(-1) * P for w, P in zip(weights, self.P, strict=True)]).sum(0)

    def advance(self, h: Tensor, u: Tensor) -> Tensor:
        """Abar h + Bbar u for states h [..., D, N / 2] and inputs u [..., D]."""
        half = (self.dt / 2).unsqueeze(-1)
        v = h + half * (self.Lambda * h - self._along(self._project(h)))
        v = self.E * (v + (self.dt * u).unsqueeze(-1) * self.B)
        projected = self._project(v)
        weights = torch.stack([dot(row, projected.unbind()) for row in self.inner])
        return v - self.E * self._along(weights)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Abar [D, N, N] and Bbar [D, N] of the real states (Re h, Im h).

        Abar = 2 (1 - dt/2 A)^-1 - 1, which is diagonal in complex numbers but for an outer product of the rank of P.
        """
        turn = 2 * self.E - 1
        blocks = torch.stack([turn.real, -turn.imag, turn.imag, turn.real], 1).unflatten(1, (2, 2)).diag_embed()
        columns = [as_real(self.E * P).unsqueeze(-1) for P in self.P]
        # 2 P^* E h is a product of these with the real states; no matrix units, which may round to TF32
        rows = [4 * as_real(self.E.conj() * P).unsqueeze(-2) for P in self.P]
        across = [dot([m[:, None, None] for m in weights], rows) for weights in self.inner]
        matrix = blocks.transpose(2, 3).flatten(1, 2).flatten(2) - dot(columns, across)
        Bbar = self.advance(torch.zeros_like(self.Lambda), torch.ones_like(self.dt))
        return matrix, as_real(Bbar)

    def filters(self, C: Tensor, length: int, piece: int | None = None) -> Tensor:
        """K [c, D, length] of maps C [c, D, N / 2].

        piece: frequencies at once, whose intermediate results backward makes again; None: as many as memory allows.
        """
        C = self._truncated(C, length)
        # with dt here, no tensor as large as the transform is multiplied by it
        left, right = torch.cat([C, self.P.conj()]) * self.dt[:, None], torch.cat([self.B.unsqueeze(0), self.P])
        products = left.unsqueeze(1) * right.unsqueeze(0)
        frequencies = length // 2 + 1
        time = torch.arange(max(frequencies, length), dtype=torch.float64, device=C.device)
        exponents = torch.complex(torch.full_like(time, DAMPING / 2), math.pi * time)[:frequencies] / length
        size = piece or max(1, MOST_ELEMENTS // elements_per_point(products, self.Lambda, self.dt, exponents))
        pieces = [self._piece(products, s, frequencies > size) for s in exponents.split(size)]
        weights = torch.exp(time[:length] * (DAMPING / length)).to(self.dt.dtype)
        return torch.fft.irfft(torch.cat(pieces, -1), n=length) * weights

    def _piece(self, products: Tensor, s: Tensor, repeat: bool) -> Tensor:
        if not (repeat and torch.is_grad_enabled()):
            return self._transform(products, s)
        transform: Tensor = checkpoint(self._transform, products, s, use_reentrant=False, preserve_rng_state=False)
        return transform

    def _truncated(self, C: Tensor, length: int) -> Tensor:
        """C~ = C (1 - e^-DAMPING Abar^length), [c, D, N / 2]."""
        matrix, _ = self.dense()
        # a power of many steps loses what it is subtracted from in float32, and more on matrix units
        matrix = matrix.double()
        rows = as_real(C.conj()).transpose(0, 1).double()
        whole = rows
        while length:
            if length & 1:
                rows = rows @ matrix
            length >>= 1
            matrix = matrix @ matrix if length else matrix
        real, imaginary = (whole - math.exp(-DAMPING) * rows).transpose(0, 1).chunk(2, dim=-1)
        return torch.complex(real, -imaginary).to(C.dtype)

    def _transform(self, products: Tensor, s: Tensor) -> Tensor:
        """The transform of K [c, D, F] at exp(-2 s), s [F], of the products of dt (C~, P^*) with (B, P)."""
        rank, kind = len(self.P), self.Lambda.dtype
        # taken apart at once, so that the gradients of all sums are put together once
        sums = cauchy(products, self.Lambda, self.dt, s).flatten(0, 1).unbind()
        rows = [sums[i : i + 1 + rank] for i in range(0, len(sums), 1 + rank)]
        low = rows[-rank:]
        # q (1 + q m)^-1, of which dt is in the sums; cosh(s) is zero nowhere, for s is not on the imaginary axis
        resolvent = inverse_beside((1 / s.cosh()).to(kind), [row[1:] for row in low])
        entry = [dot(weights, [row[0] for row in low]) for weights in resolvent]
        outer = s.exp().to(kind)
        return torch.stack([outer * (direct - dot(read, entry)) for direct, *read in rows[:-rank]])

    def final_state(self, x: Tensor) -> Tensor:
        """The state h [B, D, N / 2] behind inputs x [B, T, D] from a state of zeros."""
        # in float64, as in `_truncated`
        power, Bbar = (m.double() for m in self.dense())
        # columns Abar^(BLOCK - 1) Bbar, ..., Abar Bbar, Bbar
        columns = Bbar.unsqueeze(-1)
        while columns.shape[-1] < BLOCK:
            columns = torch.cat([power @ columns, columns], dim=-1)
            power = power @ power
        blocks = F.pad(x.double(), (0, 0, -x.shape[1] % BLOCK, 0)).unflatten(1, (-1, BLOCK)).permute(1, 3, 2, 0)
        h = columns.new_zeros(x.shape[2], columns.shape[1], x.shape[0])
        for block in blocks:
            h = power @ h + columns @ block
        real, imaginary = h.permute(2, 0, 1).chunk(2, dim=-1)
        return torch.complex(real, imaginary)


def as_real(h: Tensor) -> Tensor:
    """The real states (Re h, Im h) [..., N] of h [..., N / 2]."""
    return torch.cat([h.real, h.imag], dim=-1)


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The sum of products of one or two tensors with as many others."""
    return functools.reduce(torch.add, [a * b for a, b in zip(left, right, strict=True)])


def inverse_beside(diagonal: Tensor, m: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The inverse of diagonal 1 + m of matrices m, one or two rows of tensors."""
    if len(m) == 1:
        return [[1 / (diagonal + m[0][0])]]
    (a, b), (c, d) = (diagonal + m[0][0], m[0][1]), (m[1][0], diagonal + m[1][1])
    scale = 1 / (a * d - b * c)
    return [[d * scale, -b * scale], [-c * scale, a * scale]]


class S4Config(BackboneConfig):
    """S4 in the network of `s4d`: layer norms, and an MLP four times as wide as the model."""

    d_state: Width = 64
    """N, kept as N / 2 conjugate pairs."""
    init: Measure = "legs"
    """HiPPO-LegS, -LegT (rank two) or -FouT."""
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    tie_A: bool = False
    """Whether all channels share Lambda, P and B (`n_ssm: 1` of the authors' code)."""
    output: Literal["linear", "glu"] = "glu"
    bidirectional: bool = False
    """Whether the model reads the future too, S4's setting for LRA. Such a model has no step."""
    ssm_lr: Positive | None = 1e-3
    dt_lr: Positive | None = None
    """Learning rate of log(dt). None: `ssm_lr`."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        check_ssm("s4", self.d_state, self.dt_min, self.dt_max, pairs=True)
        if self.d_state < 4:
            raise ValueError(f"s4: d_state must be at least 4, got {self.d_state}.")

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        ssm = S4Kernel(
            self.d_model,
            self.d_state,
            init=self.init,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            tie_A=self.tie_A,
            bidirectional=self.bidirectional,
        )
        return SSMLayer(self.d_model, ssm, self.output)
