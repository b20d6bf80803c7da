"""DSS: diagonal state spaces whose eigenvalues all channels share, in three parametrisations of the kernel.

    dss-softmax:       K = Re(W Lambda^-1 row-softmax(P)),             Lambda = re + i im
    dss-exp:           K = Re(W Lambda^-1 (e^(Lambda dt) - 1) e^P),    Lambda = -exp(re) + i im
    dss-exp-no-scale:  K = Re(W e^P)                                   P[n, l] = Lambda_n dt l

followed by a skip D u, GELU and a linear map. There are N complex eigenvalues, W is [D, N] and dt is [D].

Source: DSS (Gupta et al. 2022), proposition 1 and sections 3.1 to 3.3; section 3.4 for the steps of dss-softmax.

Departures from the paper:
- dss-softmax normalises over the task's max_length and not over the length of the batch, so that a filter does not
  depend on the input, and decoding step by step equals the whole sequence. The two agree where a batch has a sequence
  of the full length: always in the paper's tasks on images and speech, nearly always in Text at batch 50. In ListOps
  and Retrieval they differ. Longer inputs are refused.
- Section 3.3 says that log(dt) is initialised as e^r, with r uniform between the logarithms of its bounds. What is
  meant, and done here, is r.
- Every channel has one dt, as in section 3.2. The authors' code keeps two by default, for the real and the imaginary
  part of Lambda, and so does the paper where section 4.2 speaks of figure 5; `separate_dt` does so too.
- The skip is a learned D that starts standard normal, as in S4's and the authors' code. The text says "residual".
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from subquad.kernels.autograd import OnceDifferentiable
from subquad.kernels.lti_ssm import ContinuousSystem, DiagonalSystem, lti_ssm, lti_ssm_step
from subquad.kernels.ssm_kernel import ssm_kernel
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import at_least_float32, bounded_exp
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.finite_filter import FiniteFilter
from subquad.models.parts.mixer import Mixer
from subquad.models.parts.norms import NormKind
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.models.s4d import SSMLayer, State, check_ssm, fill_log_uniform, skew_hippo_frequencies, step_sizes
from subquad.suite.bounds import Positive, Width
from subquad.suite.contracts import TaskSpec

Variant = Literal["dss-softmax", "dss-exp", "dss-exp-no-scale"]


class Stretched(OnceDifferentiable):
    """(a, b [N], r [D, 1], W [..., D, N]) to s = a + i r b, None, and W s / (a + i b), all complex but a, b and r.

    The operator divides W by the eigenvalues s that it is given. torch's own derivatives of complex products and
    quotients are some forty launches on tensors that are smaller than one.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, r: Tensor, W: Tensor) -> tuple[Tensor, None, Tensor]:
        turned = r * b
        stretched = torch.complex(a.expand_as(turned), turned)
        inverse = torch.complex(a, b).reciprocal_()
        gain = stretched * inverse
        ctx.save_for_backward(b, r, W, inverse, gain)
        return stretched, None, W * gain

    @staticmethod
    def backward(ctx: Any, ds: Tensor, _: None, dgained: Tensor) -> tuple[Tensor, ...]:
        b, r, W, inverse, gain = ctx.saved_tensors
        # the conjugate gradient of a holomorphic function is a product without further conjugates
        dgained = torch.conj_physical(dgained)
        dgain = dgained * W
        dgain = (dgain if W.ndim == 2 else dgain.sum(0)) * inverse
        dW = (dgained * gain).conj_physical_()
        # the gradient reaches a through s and through the divisor
        da = torch.view_as_real(torch.conj_physical(dgain).add_(ds))
        dlambda = torch.view_as_real((dgain * gain).sum(0))
        dturned = da[..., 1]
        return da[..., 0].sum(0) - dlambda[:, 0], (dturned * r).sum(0) + dlambda[:, 1], (dturned * b).sum(1, True), dW


class DSS(Mixer):
    """The state space model alone: x [B, T, D] to [B, T, D].

    Its state: h [B, D, N], complex. dss-softmax adds the number of positions seen [], padding included, which its
    rescaled state of section 3.4 needs; where rows may skip steps (`Mixer.rows_skip`), that of each row [B]. At another
    sampling rate, the normalisation of dss-softmax covers as much time as before. dss-exp-no-scale has no dt in its
    gain, so its response grows with the rate.

    separate_dt: log_dt is [D, 2], and P[n, l] = (re dt[0] + i im dt[1]) l, while the gain keeps Lambda^-1.
    random_start: Lambda_re and Lambda_im start standard normal.
    """

    ssm_names = ("log_dt", "Lambda_re", "Lambda_im", "W")
    step_scale = 1.0
    """Factor of dt, for inputs at another sampling rate than the one trained at (`Backbone.at_rate`)."""
    operator = staticmethod(lti_ssm)

    def __init__(
        self,
        width: int,
        d_state: int,
        variant: Variant,
        *,
        length: int,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        bidirectional: bool = False,
        detach_maximum: bool = False,
        separate_dt: bool = False,
        random_start: bool = False,
    ) -> None:
        super().__init__()
        self.random_start = random_start
        self.detach_maximum, self.separate_dt = detach_maximum, separate_dt
        self.variant, self.length, self.bidirectional = variant, length, bidirectional
        self.dt_min, self.dt_max = dt_min, dt_max
        self.log_dt = nn.Parameter(torch.empty(width, *([2] if separate_dt else [])))
        self.Lambda_re = nn.Parameter(torch.empty(d_state))
        self.Lambda_im = nn.Parameter(torch.empty(d_state))
        self.W = nn.Parameter(torch.empty(*([2] if bidirectional else []), width, d_state, 2))
        self.D = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        fill_log_uniform(self.log_dt, self.dt_min, self.dt_max)
        if self.separate_dt:
            # both start as one, as in the authors' code
            self.log_dt[:, 1] = self.log_dt[:, 0]
        self.Lambda_re.fill_(-0.5 if self.variant == "dss-softmax" else math.log(0.5))
        self.Lambda_im.copy_(skew_hippo_frequencies(2 * self.Lambda_im.shape[0]))
        if self.random_start:
            nn.init.normal_(self.Lambda_re)
            nn.init.normal_(self.Lambda_im)
        nn.init.normal_(self.W)
        nn.init.normal_(self.D)

    def _system(self) -> tuple[Tensor, None, Tensor, Tensor]:
        real = at_least_float32(self.Lambda_re)
        real = real if self.variant == "dss-softmax" else -bounded_exp(real)
        imaginary = at_least_float32(self.Lambda_im)
        W = torch.view_as_complex(at_least_float32(self.W))
        if not self.separate_dt:
            return torch.complex(real, imaginary), None, W, step_sizes(self.log_dt, self.step_scale)
        log_dt, other = at_least_float32(self.log_dt).unbind(1)
        # a phase whose step is e^40 times as long hides the decay from any float; so the ratio stays in float32
        log_dt = torch.maximum(log_dt, other - 40)
        dt = step_sizes(log_dt, self.step_scale)
        turned = (other - log_dt).exp().unsqueeze(1)
        if self.variant == "dss-exp-no-scale":
            turned = imaginary * turned
            return torch.complex(real.expand_as(turned), turned), None, W, dt
        return (*Stretched.apply(real, imaginary, turned, W), dt)

    def _system_of_step(self) -> DiagonalSystem | ContinuousSystem:
        """The parameters as they are, for a step that discretizes them itself, where they have the form for that."""
        if self.variant == "dss-softmax" or self.separate_dt:
            return ContinuousSystem(*self._system(), self.D)
        shared_re, shared_im = self.Lambda_re.unsqueeze(0), self.Lambda_im.unsqueeze(0)
        return DiagonalSystem(self.log_dt, shared_re, shared_im, None, self.W, self.D)

    @property
    def _softmax_length(self) -> int | None:
        return math.ceil(self.length / self.step_scale) if self.variant == "dss-softmax" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.operator(
            x,
            *self._system(),
            D=self.D,
            conj_pairs=False,
            discretization=self.variant,
            bidirectional=self.bidirectional,
            length=self._softmax_length,
            detach_maximum=self.detach_maximum,
        )
        assert isinstance(y, Tensor)
        return y

    def kernel(self, length: int) -> Tensor:
        """The filter K [D, length] over the past. A bidirectional model has another one over the future, from W[1].

        dss-softmax gives at most as many lags as it normalises over.
        """
        eigenvalues, B, W, dt = self._system()
        W = W[0] if self.bidirectional else W
        whole = self._softmax_length
        length = min(length, whole or length)
        return ssm_kernel(
            eigenvalues, B, W, dt, length, conj_pairs=False, discretization=self.variant, normalize_over=whole
        )

    def eigenvalues(self) -> Tensor:
        """The eigenvalues Lambda [N], shared by all channels; [D, N] with `separate_dt`, in units of dt[0]."""
        return self._system()[0]

    def _check_causal(self) -> None:
        if self.bidirectional:
            raise ValueError(f"{self.variant}: bidirectional=True reads the future and has no step; set it to False.")

    def init_state(self, batch_size: int, capacity: int) -> State:
        if self._softmax_length is not None and capacity > self._softmax_length:
            raise ValueError(
                f"{self.variant}: normalises over max_length={self._softmax_length} positions, got {capacity}; raise "
                "the task's max_length."
            )
        weight = at_least_float32(self.log_dt)
        shape = (batch_size, self.log_dt.shape[0], self.Lambda_re.shape[0])
        state = weight.new_zeros(shape, dtype=weight.dtype.to_complex())
        if self.variant != "dss-softmax":
            return (state,)
        count = torch.zeros([batch_size] if self.rows_skip else [], dtype=torch.long, device=weight.device)
        return state, count

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        self._check_causal()
        softmax = self.variant == "dss-softmax"
        y = lti_ssm_step(
            x_t,
            self._system_of_step(),
            state[0],
            conj_pairs=False,
            discretization=self.variant,
            dt_scale=self.step_scale,
            length=self._softmax_length,
            position=state[1] if softmax else None,
        )
        return y, (state[0], state[1] + 1) if softmax else state

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        self._check_causal()
        y, after = self.operator(
            blank(x, padding),
            *self._system(),
            D=self.D,
            conj_pairs=False,
            discretization=self.variant,
            length=self._softmax_length,
            return_final_state=True,
        )
        # padding counts as time here, which no output depends on
        return y, (after,) if len(state) == 1 else (after, torch.full_like(state[1], x.shape[1]))

    def state_size(self, length: int) -> int:
        return 2 * self.log_dt.shape[0] * self.Lambda_re.shape[0]


class TruncatedDSS(FiniteFilter):
    """A DSS whose filter ends after the M lags over which it is normalised: K_l = 0 from M on.

    Its state is no longer that of a recurrence but the last M - 1 inputs [B, D, M - 1].
    """

    def __init__(self, ssm: DSS) -> None:
        super().__init__()
        self.ssm = ssm

    def skip(self) -> Tensor:
        return self.ssm.D

    @property
    def num_taps(self) -> int:
        assert self.ssm._softmax_length is not None
        return self.ssm._softmax_length

    def taps(self) -> Tensor:
        return self.ssm.kernel(self.num_taps)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return self.ssm.ssm_parameters()


class DSSConfig(BackboneConfig):
    """Options of all three variants. The defaults are those of the paper's LRA models (appendix A.3)."""

    variant: ClassVar[Variant]
    left_out_when_off: ClassVar[tuple[str, ...]] = (*BackboneConfig.left_out_when_off, "separate_dt")

    channel_mixer: ChannelMixerKind = "none"
    norm: NormKind = "batch"
    d_state: Width = 64
    dt_min: Positive = 1e-3
    dt_max: Positive = 1e-1
    output: Literal["linear", "glu"] = "linear"
    bidirectional: bool = False
    """Whether the model reads the future too. Such a model has no step; the paper's models are unidirectional."""
    separate_dt: bool = False
    """Whether the real and the imaginary part of Lambda have a dt each, the default of the authors' code (ag1988/dss at
    777084e777c27caba2e87eceecb3f49d1b761cd8, configs/model/layer/dss.yaml)."""
    ssm_lr: Positive | None = 1e-3
    dt_lr: Positive | None = None
    """Learning rate of log(dt). None: `ssm_lr`. Appendix A.3 uses 0.02 for ListOps and Text and 1e-4 for Path-X."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        check_ssm(self.variant, self.d_state, self.dt_min, self.dt_max, pairs=False)

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        softmax = self if isinstance(self, DSSSoftmaxConfig) else None
        truncated = softmax.kernel_length if softmax else None
        ssm = DSS(
            self.d_model,
            self.d_state,
            self.variant,
            length=min(truncated or spec.max_length, spec.max_length),
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            bidirectional=self.bidirectional,
            detach_maximum=softmax is not None and softmax.detach_maximum,
            separate_dt=self.separate_dt,
            random_start=softmax is not None and softmax.random_start,
        )
        return SSMLayer(self.d_model, TruncatedDSS(ssm) if truncated else ssm, self.output)


class DSSSoftmaxConfig(DSSConfig):
    """DSS with the row-softmax kernel, whose Re(Lambda) may have any sign."""

    variant: ClassVar[Variant] = "dss-softmax"
    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *DSSConfig.left_out_when_off,
        "detach_maximum",
        "random_start",
        "kernel_length",
    )

    detach_maximum: bool = False
    """Treats the maximum of a row of the softmax as a constant where Re(Lambda) > 0 in the backward pass, as the code
    of the paper does (figure 6, and ag1988/dss at 777084e777c27caba2e87eceecb3f49d1b761cd8). The gradients of Lambda
    and dt are then not those of the filter."""
    random_start: bool = False
    """Whether the real and imaginary parts of Lambda start standard normal in place of Skew-Hippo (table 3)."""
    kernel_length: Width | None = None
    """Lags after which the filter ends, and over which it is normalised (table 3 has 128). None: the whole sequence."""

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.kernel_length is not None and (self.kernel_length < 2 or self.bidirectional):
            raise ValueError(
                f"dss-softmax: kernel_length={self.kernel_length} and bidirectional={self.bidirectional}; a truncated "
                "filter has at least 2 lags and reads the past only."
            )


class DSSExpConfig(DSSConfig):
    """DSS with Re(Lambda) = -exp(re), which is always negative."""

    variant: ClassVar[Variant] = "dss-exp"


class DSSExpNoScaleConfig(DSSConfig):
    """dss-exp without the factor Lambda^-1 (e^(Lambda dt) - 1), the paper's ablation."""

    variant: ClassVar[Variant] = "dss-exp-no-scale"
