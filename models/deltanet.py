"""Mixers with the delta rule: DeltaNet, Gated DeltaNet, Kimi Delta Attention (KDA) and Gated DeltaProduct.

models/comba.py and models/gated_deltanet2.py derive theirs from them.

    q, k, v = silu(conv(W_q x)), silu(conv(W_k x)), silu(conv(W_v x));    q, k -> q / |q|, k / |k| in every head
    beta_t = sigmoid(W_b x_t), or twice that;    a_t as below
    S_t = S_{t-1} diag(a_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(K)

    DeltaNet:        a = 1;                                                 y = W_o norm_h(o)
    Gated DeltaNet:  a = exp(-exp(A) softplus(W_a x + b)), one a head;      y = W_o (norm_h(o) * silu(W_g x))
    KDA:             a = exp(-exp(A) softplus(W_2 W_1 x + b)), one a key    y = W_o (norm_h(o) * sigmoid(V_2 V_1 x + c))
                     channel, A one a head
    DeltaProduct:    Gated DeltaNet with n keys, values and betas a token, which are n steps of the delta rule; the
                     state decays before the first of them and is read behind the last. Without decays and
                     gates (`without`) it is DeltaNet with n steps a token

with depthwise causal convolutions and norm_h an RMS norm of every head. beta in [0, 2] (`negative_eigenvalues`) gives
I - beta k k^T an eigenvalue in [-1, 1], which state tracking needs (Grazzi et al. 2024).

Source: Yang et al. 2024a (arXiv 2406.06484); Yang et al. 2024b (arXiv 2412.06464); Kimi Team 2025 (arXiv 2510.26692);
Siems et al. 2025 (arXiv 2502.10297). Parameters and their initialisation are those of flash-linear-attention
(fla-org/flash-linear-attention): fla/layers/delta_net.py at fa409f1365f0afced370b442bf4f37f25e2e6598,
gated_deltanet.py at 7415902a71cdfd2f8a5a25513bfaa67c2297a073, kda.py at 1c9d84d90dcedaa58c0a55a9088ecab49879b0ca,
gated_deltaproduct.py at f1d9db7ff13c8e88dbc464c11da6584b4a3ccd5c; b of KDA starts as in its language model,
fla/models/kda/modeling_kda.py at 07e2bd329df15090d34c7d4b25b638b3cb57c516, and not at zero as in its layer.

Departures: widths of heads follow from `d_model`, those of values too where they have more heads than keys
(`num_value_heads`). The convolutions start as torch's do, as in the layers there, unless `conv_std` is set; its
language models start them normally with `init_std`. The epsilon of |q| and |k| is 1e-6 within the root, as in its
`l2norm`. The sigmoid of beta is float32, and there in the dtype of autocast (`round_beta`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import field_validator
from torch import Tensor, nn

from subquad.kernels.causal_conv1d import causal_conv1d_heads, causal_conv1d_step
from subquad.kernels.delta_rule import delta_rule, delta_rule_step
from subquad.kernels.forget_gate import forget_gate
from subquad.kernels.norm import GateActivation
from subquad.models.backbone import BackboneConfig, SwiGLUConfig
from subquad.models.parts.casts import at_least_float32, autocast_dtype
from subquad.models.parts.initial import reset_taps, step_bias
from subquad.models.parts.linear import Linear, ResidualLinear, linear_behind
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.norms import RMSNorm, unit
from subquad.models.parts.options import require_divides
from subquad.models.parts.recompute import Keep, Recomputing, at_once, spares
from subquad.models.parts.step import maps_of, shared_norm, step_linear
from subquad.models.parts.time_axis import LeftPadding, blank
from subquad.suite.bounds import Factor, Positive, Ratio, Width
from subquad.suite.contracts import TaskSpec

State = tuple[Tensor, Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v, beta and the log-decays."""
Parts = tuple[Tensor, Tensor, Tensor]
"""q, k and v [..., heads, channels]; k and v have the heads of all steps of a token."""
DecayKind = Literal["none", "head", "key"]
GateKind = Literal["none", "silu", "sigmoid"]


class Read(NamedTuple):
    """The outputs of the linear maps of x, [..., channels]."""

    projected: Tensor
    """The inputs of the convolutions."""
    beta: Tensor
    """The logits of beta."""
    decay: Tensor | None
    """The logits of the decays of heads, or W_1 x of those of key channels."""
    gate: Tensor | None
    """The logits of the output gate, or V_1 x of a low-rank map to them."""
    others: tuple[Tensor, ...]
    """Results of maps that a derived mixer has besides."""


DT_MIN, DT_MAX = 1e-3, 1e-1
"""Step sizes softplus(b) at the start."""


class DeltaMixer(FusedStepMixer):
    """The mixer. Its state: the last inputs of the convolutions [B, channels, W - 1], then the transpose of S
    [B, H, K, V]."""

    operator: ClassVar[Callable[..., Tensor | tuple[Tensor, Tensor]]] = staticmethod(delta_rule)
    gate_activation: GateActivation = "silu"
    step_operator: ClassVar[Callable[..., tuple[Tensor, Tensor]]] = staticmethod(delta_rule_step)

    def __init__(self, config: DeltaConfig) -> None:
        super().__init__()
        d_model, heads, steps = config.d_model, config.value_heads, config.steps
        self.num_heads, self.steps, (self.decay, self.gate) = heads, steps, config.kinds
        self.num_key_heads = config.num_heads
        self.key_dim, self.value_dim = config.key_width // config.num_heads, config.value_width // heads
        self.recompute, self.num_layers = config.recompute, config.num_layers
        self.max_beta = 2.0 if config.negative_eigenvalues else 1.0
        self.round_beta, self.conv_std = config.round_beta, config.conv_std
        keys = config.num_heads
        self.heads = (keys, self.key_dim), (steps * keys, self.key_dim), (steps * heads, self.value_dim)
        """Number and channels of the heads of q, k and v."""
        self.split = ((1 + steps) * config.key_width, steps * config.value_width)
        self.proj = nn.Linear(d_model, sum(self.split), bias=False)
        self.conv_weight = None
        if config.d_conv is not None:
            self.conv_weight = nn.Parameter(torch.empty(sum(self.split), config.d_conv))
        self.beta = nn.Linear(d_model, config.num_betas, bias=False)
        if self.decay == "head":
            self.decay_up = nn.Linear(d_model, heads, bias=False)
        elif self.decay == "key":
            self.decay_down = nn.Linear(d_model, self.value_dim, bias=False)
            self.decay_up = nn.Linear(self.value_dim, heads * self.key_dim, bias=False)
        if self.decay != "none":
            self.log_A = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(self.decay_up.out_features))
        if self.gate == "silu":
            self.gate_up = nn.Linear(d_model, config.value_width, bias=False)
        elif self.gate == "sigmoid":
            self.gate_activation = "sigmoid"
            self.gate_down = nn.Linear(d_model, self.value_dim, bias=False)
            self.gate_up = Linear(self.value_dim, config.value_width)
        self.norm = RMSNorm(self.value_dim, eps=config.norm_eps)
        self.out = ResidualLinear(config.value_width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.conv_weight is not None:
            if self.conv_std is None:
                reset_taps(self.conv_weight)
            else:
                nn.init.normal_(self.conv_weight, std=self.conv_std)
        if self.decay == "none":
            return
        # the logarithm of zero is never drawn
        self.log_A.uniform_(0.0 if self.decay == "head" else 1.0, 16.0).clamp_(min=1e-6).log_()
        self.dt_bias.copy_(step_bias(self.dt_bias, DT_MIN, DT_MAX))

    def _readers(self) -> list[nn.Linear]:
        """The linear maps of x, in the order of `Read`."""
        readers = [self.proj, self.beta]
        if self.decay != "none":
            readers.append(self.decay_up if self.decay == "head" else self.decay_down)
        if self.gate != "none":
            readers.append(self.gate_up if self.gate == "silu" else self.gate_down)
        return readers

    def _read(self, x: Tensor, norm: nn.Module | None = None) -> Read:
        """The outputs of the linear maps of norm(x), for a sequence or one position x."""
        results = iter(maps_of(self._readers(), x, norm, join=self.conv_weight is not None))
        projected, beta = next(results), next(results)
        decay = None if self.decay == "none" else next(results)
        return Read(projected, beta, decay, None if self.gate == "none" else next(results), tuple(results))

    def _log_decay(self, read: Read, keep: Keep) -> Tensor | None:
        """[..., H] or [..., H, K], in float32 or wider."""
        if read.decay is None:
            return None
        gate = partial(forget_gate, bias=self.dt_bias, log_rate=self.log_A, complement=False)
        if self.decay == "head":
            return gate(read.decay)[0]
        logits = step_linear(self.decay_up, read.decay)
        log_decay = keep(lambda: gate(logits)[0])
        return log_decay.unflatten(-1, (self.num_heads, self.key_dim))

    def _sigmoid(self, logits: Tensor) -> Tensor:
        return at_least_float32(torch.sigmoid(logits if self.round_beta else at_least_float32(logits)))

    def _heads(self, parts: Parts, read: Read, keep: Keep = at_once) -> Inputs:
        """q [..., G, K], k [..., n, G, K], v [..., n, H, V], beta [..., n, H] and log-decays of n steps a token."""
        beta = self._sigmoid(read.beta)
        beta = beta if self.max_beta == 1 else self.max_beta * beta
        q, k, v = parts
        return (
            q,
            k.unflatten(-2, (self.steps, self.num_key_heads)),
            v.unflatten(-2, (self.steps, self.num_heads)),
            beta.unflatten(-1, (self.steps, -1)),
            self._log_decay(read, keep),
        )

    def _interleave(self, parts: Parts, read: Read, keep: Keep = at_once) -> Inputs:
        """The inputs of the operator: n steps a token one after the other, [B, n T, ...]."""
        q, k, v, beta, log_decay = self._heads(parts, read, keep)
        if self.steps > 1:
            # the state is read behind the last step of a token and decays before the first
            q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, self.steps - 1, 0))
            if log_decay is not None:
                before = [0] * (2 * (log_decay.ndim - 2))
                log_decay = F.pad(log_decay.unsqueeze(2), (*before, 0, self.steps - 1)).flatten(1, 2)
        else:
            q = q.unsqueeze(2)
        return q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), beta.flatten(1, 2), log_decay

    def _output(self, o: Tensor, gate: Tensor | None, residual: Tensor | None = None, *, spare: bool = False) -> Tensor:
        """residual + W_o (norm_h(o) * h(gate)) for o [..., H, V]; gate: as in `Read`.

        spare: the backward pass computes the input of W_o again; there is no residual then.
        """
        if self.gate == "sigmoid" and gate is not None:
            gate = step_linear(self.gate_up, gate)
        if o.ndim == 3 and self.gate_activation == "silu":
            return step_linear(self.out, o.flatten(-2), norm=self.norm, gate=gate, residual=residual)
        heads = None if gate is None else gate.view_as(o)

        def normed(o: Tensor, linear: Tensor | None = None) -> Tensor:
            y = self.norm.before_product(o, heads, gate_activation=self.gate_activation, linear=linear)
            return y.flatten(-2) if linear is None else y

        if spare:
            return linear_behind(normed, self.out, o)
        return step_linear(self.out, normed(o), residual=residual)

    def _convolve(self, projected: Tensor, *, final: bool = False) -> tuple[Parts, Tensor | None]:
        """The heads of q, k and v of the inputs [B, T, channels] of the convolutions, and the window behind them."""
        if self.conv_weight is None:
            empty = projected.new_empty(len(projected), projected.shape[-1], 0)
            return self._parts(F.silu(projected)), empty if final else None
        q, k, v, *window = causal_conv1d_heads(
            projected, self.conv_weight, self.heads, num_unit=2, activation="silu", return_final_state=final
        )
        return (q, k, v), window[0] if final else None

    def _parts(self, convolved: Tensor) -> Parts:
        """The heads of q, k and v; those of queries and keys are divided by their lengths in one pass."""
        qk, v = convolved.split(self.split, dim=-1)
        (queries, size), (keys, _), heads = self.heads
        q, k = unit(qk.unflatten(-1, (-1, size))).split((queries, keys), dim=-2)
        return q, k, v.unflatten(-1, heads)

    def forward(self, x: Tensor) -> Tensor:
        # at each position the last map keeps its input, and the delta rule keeps the decays of key channels in float32
        num_bytes = self.norm.weight.numel() * self.num_heads * autocast_dtype(x).itemsize
        num_bytes += 4 * self.num_heads * self.key_dim if self.decay == "key" else 0
        spare = spares(self.recompute, self.num_layers * x.shape[0] * x.shape[1] * num_bytes, x)
        if not spare or self.decay != "key":
            return self._run(x, at_once, spare)
        with Recomputing() as keep:
            return self._run(x, keep, spare)

    def _run(self, x: Tensor, keep: Keep, spare: bool) -> Tensor:
        read = self._read(x)
        parts, _ = self._convolve(read.projected)
        o = self.operator(*self._interleave(parts, read, keep))
        assert isinstance(o, Tensor)
        return self._output(o[:, self.steps - 1 :: self.steps], read.gate, spare=spare)

    def init_state(self, batch_size: int, capacity: int) -> State:
        weight = at_least_float32(self.proj.weight)
        past = 0 if self.conv_weight is None else self.conv_weight.shape[1] - 1
        # neighbouring channels lie side by side, because a step takes one input of many channels at a time
        window = weight.new_zeros(batch_size, past, sum(self.split)).transpose(1, 2)
        return window, weight.new_zeros(batch_size, self.num_heads, self.key_dim, self.value_dim)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: State) -> tuple[Tensor, State]:
        window, after = state
        x_t, norm = shared_norm(norm, x_t)
        read = self._read(x_t, norm)
        if self.conv_weight is None:
            convolved = F.silu(read.projected)
        else:
            convolved = causal_conv1d_step(read.projected, self.conv_weight, None, window, activation="silu")
        q, k, v, beta, log_decay = self._heads(self._parts(convolved), read)
        for i in range(self.steps):
            decay = log_decay if i == 0 else None
            o, after = self.step_operator(q, k[:, i], v[:, i], beta[:, i], decay, after, in_place=True)
        return self._output(o, read.gate, residual), (window, after)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        # without biases, keys and values of padding are zero, and a state of zeros stays zero
        read = self._read(x)
        parts, window = self._convolve(blank(read.projected, padding), final=True)
        assert window is not None
        o, after = self.operator(*self._interleave(parts, read), return_final_state=True)
        return self._output(o[:, self.steps - 1 :: self.steps], read.gate), (window.to(state[0].dtype), after)

    def state_size(self, length: int) -> int:
        window = 0 if self.conv_weight is None else self.conv_weight.shape[0] * (self.conv_weight.shape[1] - 1)
        return window + self.num_heads * self.key_dim * self.value_dim

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {} if self.decay == "none" else {"log_A": self.log_A, "dt_bias": self.dt_bias}


class DeltaConfig(SwiGLUConfig):
    """Shared options of the mixers with the delta rule, whose network has RMS norms and SwiGLU."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        *BackboneConfig.left_out_when_off,
        "round_beta",
        "conv_std",
        "num_value_heads",
    )
    decay: ClassVar[DecayKind] = "none"
    gate: ClassVar[GateKind] = "none"

    num_heads: Width = 4
    """Heads of queries and keys."""
    num_value_heads: Width | None = None
    """Heads of values, each with a beta and a decay of its own, and a multiple of num_heads: neighbours share queries
    and keys, as in large Gated DeltaNets. None: as many as num_heads."""
    expand_k: Ratio = 1.0
    """Width of queries and keys, as a multiple of d_model."""
    expand_v: Ratio = 1.0
    """Width of values, as a multiple of that of keys."""
    d_conv: Factor | None = 4
    """Taps of the convolutions. None: there are none, and silu stands alone, as in the layers of
    flash-linear-attention without short convolutions."""
    negative_eigenvalues: bool = False
    """Whether beta goes up to 2 and not to 1."""
    round_beta: bool = False
    """Whether the sigmoid of beta is computed in the dtype of autocast, as in the layers of flash-linear-attention. In
    bfloat16 it is exactly 1 from 6.25 on, so that a beta of 2 reflects the state without damping it."""
    conv_std: Positive | None = None
    """Standard deviation of the convolutions at the start, normal as in the language models of flash-linear-attention.
    None: they start as torch's do, uniform within 1 / sqrt(d_conv)."""

    @property
    def kinds(self) -> tuple[DecayKind, GateKind]:
        """The decay and the output gate."""
        return self.decay, self.gate

    @property
    def steps(self) -> int:
        """Steps of the delta rule a token."""
        return 1

    @property
    def num_betas(self) -> int:
        """Betas of a token."""
        return self.steps * self.value_heads

    @property
    def value_heads(self) -> int:
        return self.num_value_heads or self.num_heads

    @property
    def key_width(self) -> int:
        return round(self.expand_k * self.d_model)

    @property
    def value_width(self) -> int:
        return round(self.expand_v * self.key_width)

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        name = type(self).__name__
        require_divides(name, num_heads=self.num_heads, key_width=self.key_width)
        if self.num_value_heads is not None:
            require_divides(name, num_heads=self.num_heads, num_value_heads=self.num_value_heads)
        values = "num_heads" if self.num_value_heads is None else "num_value_heads"
        require_divides(name, **{values: self.value_heads, "value_width": self.value_width})
        if self.d_conv is not None and not 2 <= self.d_conv <= 4:
            raise ValueError(f"{name}: needs d_conv in 2..4, or null for no convolutions, got {self.d_conv}.")
        if self.d_conv is None and self.conv_std is not None:
            raise ValueError(
                f"{name}: conv_std={self.conv_std:g} starts convolutions, and d_conv=null leaves them out."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        return DeltaMixer(self)


class DeltaNetConfig(DeltaConfig):
    """DeltaNet: neither a decay nor an output gate."""


class GatedDeltaNetConfig(DeltaConfig):
    """Gated DeltaNet: one decay a head. Keys take 3/4 of d_model and values twice as much, as in the released layer."""

    decay: ClassVar[DecayKind] = "head"
    gate: ClassVar[GateKind] = "silu"

    num_heads: Width = 6
    expand_k: Ratio = 0.75
    expand_v: Ratio = 2.0
    ssm_lr: Positive | None = None


class KDAConfig(DeltaConfig):
    """Kimi Delta Attention: one decay a key channel."""

    decay: ClassVar[DecayKind] = "key"
    gate: ClassVar[GateKind] = "sigmoid"

    ssm_lr: Positive | None = None


class DeltaProductConfig(GatedDeltaNetConfig):
    """Gated DeltaProduct: several steps of the delta rule a token, by default with beta up to 2."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (*GatedDeltaNetConfig.left_out_when_off, "without")

    num_householder: Factor = 2
    """Steps of the delta rule a token, each a Householder transformation of the state."""
    negative_eigenvalues: bool = True
    without: tuple[Literal["decay", "gate"], ...] = ()
    """Parts that are left out: the decays, the output gates, or both, as in the word problems of Siems et al., whose
    code sets use_forget_gate=False and use_gate=False. Without both, and with one step a token and the same widths,
    this is DeltaNet."""

    @field_validator("without")
    @classmethod
    def _in_one_order(cls, without: tuple[Literal["decay", "gate"], ...]) -> tuple[Literal["decay", "gate"], ...]:
        # equal networks have one id
        return tuple(sorted(set(without)))

    @property
    def kinds(self) -> tuple[DecayKind, GateKind]:
        decay, gate = super().kinds
        return "none" if "decay" in self.without else decay, "none" if "gate" in self.without else gate

    @property
    def steps(self) -> int:
        return self.num_householder

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if "decay" in self.without and self.ssm_lr is not None:
            raise ValueError(
                f"{type(self).__name__}: ssm_lr={self.ssm_lr:g} is the rate of the decays, which `without` leaves out; "
                "drop one of them."
            )
