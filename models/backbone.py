"""The network around every mixer: encoder, N layers of (mixer, channel mixer), readout.

    prenorm:   x = x + mixer(norm(x));  x = x + channel(norm(x));  readout(norm(x))
    postnorm:  x = norm(x + mixer(x));  x = norm(x + channel(x));  readout(x)

A model is a `BackboneConfig` that names the mixer of every layer. Width, depth, norms, positions and the channel mixer
are options of this file, so that a comparison of models compares their mixers and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, nn

from kernels.embedding import embedding
from kernels.linear_cross_entropy import aligned_linear, linear_cross_entropy
from models.parts.casts import at_least_float32, autocast_dtype, cast_once
from models.parts.channel import ChannelMixer, ChannelMixerKind, make_channel_mixer
from models.parts.decoder import PositionDecoder
from models.parts.linear import ResidualLinear
from models.parts.mixer import Mixer, Rescalable, of_shape
from models.parts.norms import NORM_MODULES, NormKind, add_norm, make_norm
from models.parts.positions import sinusoidal_table
from models.parts.recompute import Recompute, recomputed_layer
from models.parts.short_conv import BaseConv, ShortConv
from models.parts.step import step_linear
from models.parts.time_axis import LeftPadding, blank, positions_seen, take_positions
from suite.bounds import Count, Epsilon, Fraction, Layers, Positive, Ratio, Width
from suite.contracts import IGNORE, ModelConfig, ParamGroup, TaskSpec
from suite.model import Convolution, Model
from suite.state import map_tensors

NO_DECAY_KINDS = ("bias", "norm", "embedding")


class BackboneConfig(ModelConfig):
    """Options of every model. A model derives from this class, sets its own defaults and names its mixer.

    Raise `version` in the derived class whenever the function that the model computes, its initialisation, or a default
    that is no option changes. A change in this file or in `parts/` concerns all models and raises it here.
    `tests/laws/versions.json` records what every version computes.
    """

    version: ClassVar[int] = 1
    left_out_when_off: ClassVar[tuple[str, ...]] = (
        "short_conv",
        "base_conv_layers",
        "torch_init",
        "mixer_gain",
        "readout_bias",
    )
    """Options that were added after some runs were stored. While an option is off, it is not part of the identity of a
    run, so that older runs keep their ids."""
    positions: ClassVar[tuple[str, ...]] = ("none", "learned", "sinusoidal")
    """The values of `position` that this model supports."""
    one_mixer_a_layer: ClassVar[bool] = True
    """Whether `mixers` gives one mixer for each of `num_layers`. Only then can a layer of `hybrid` or a block of
    `sashimi` have such a mixer."""

    num_layers: Layers = 2
    d_model: Width = 64
    channel_mixer: ChannelMixerKind = "mlp"
    mlp_ratio: Ratio = 4.0
    """Inner width of the channel mixer, as a multiple of d_model. A `swiglu` of 8/3 is as large as an `mlp` of 4."""
    norm: NormKind = "layer"
    norm_eps: Epsilon = 1e-5
    prenorm: bool = True
    position: Literal["none", "learned", "sinusoidal", "rope", "xpos"] = "none"
    """`learned` and `sinusoidal` are added to the input; `rope` and `xpos` act inside attention."""
    short_conv: int = 0
    """Number of taps of a causal depthwise convolution before every mixer, 2 to 4. 0: there is none."""
    base_conv_layers: tuple[Count, ...] = ()
    """Layers, counted from 0, whose mixer is a `BaseConv` of three taps without `short_conv`. Zoology's grids of linear
    attention alternate: even layers are BaseConv, odd ones the mixer of the model (HazyResearch/zoology at
    d88d6f5474f36998d82d5c3bd58a190248d0a669, zoology/mixers/hybrid.py and zoology/experiments/models_repo.py)."""
    embed_dropout: Fraction = 0.0
    resid_dropout: Fraction = 0.0
    """Dropout on what a mixer or a channel mixer adds to the residual stream."""
    tie_embeddings: bool = True
    """Whether the readout shares the weights of the embedding, where input and output vocabulary are the same."""
    readout_bias: bool = False
    """Whether the readout of tokens has a bias. A readout of sequences always has one."""
    init_std: Positive = 0.02
    init_residual: Literal["scaled", "scaled-mlp", "plain"] = "scaled"
    """`scaled`: projections into the residual stream start 1/sqrt(number of residual branches) smaller (GPT-2).
    `scaled-mlp`: only those of the channel mixers do, as in H3's released code (HazyResearch/safari at
    02220c69d247e5473616cd053a443ad99fd2559b), which rescales by parameter name and so leaves out the output maps of
    its H3 and S4D layers. `plain`: none does.

    Limits: RWKV, whose layers have two branches, counts one a layer. Mamba without `network_init`, Mamba-2 and Mamba-3
    start their output maps 1/sqrt(num_layers) smaller also where there is a channel mixer, for which their authors'
    code counts a second branch a layer (state-spaces/mamba, mamba_ssm/models/mixer_seq_simple.py)."""
    torch_init: Literal[True, False, "weights"] = False
    """Linear maps and embeddings of the network keep the initialisation of torch, weights and biases uniform within
    1 / sqrt(inputs) and embeddings standard normal; `init_std` and `init_residual` have no effect, except that `scaled`
    still scales the output maps of Mamba without `network_init`, Mamba-2 and Mamba-3. The released code of DSS and S4
    does so (ag1988/dss at 777084e777c27caba2e87eceecb3f49d1b761cd8). `weights`: only the weights of linear maps keep
    it; biases start at zero and embeddings with `init_std`, as in MAD's code (athms/mad-lab at
    1f77b94127309e9f3e0280fe73d6079ba3eaf3eb, mad/model/language_model.py)."""
    mixer_gain: Positive | None = None
    """Linear maps of the mixers start by Xavier's rule, uniform within gain sqrt(6 / (inputs + outputs)), in place of
    the start of the network's. GLA does so in MAD's code, with the gain 2^-2.5 (athms/mad-lab at
    6e7e4c903b7d4d1a31d12186b709f36fa3184041, mad/model/layers/attention_gated_linear.py). Mamba without `network_init`,
    Mamba-2 and Mamba-3 start their maps themselves and refuse it."""
    pooling: Literal["mean", "last"] = "mean"
    """Summary of the time axis in a sequence readout."""

    recompute: Recompute = Field(default="auto", exclude=True)
    """Selects the activations that the backward pass recomputes instead of keeping them. It changes no value, so it is
    not part of the identity of a run."""

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        """The mixer of one layer."""
        raise NotImplementedError(f"{type(self).__name__} defines no method mixer(self, layer, spec)")

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        """The mixers of all layers. A model whose layers share parameters overrides this."""
        return [self.mixer(layer, spec) for layer in range(self.num_layers)]

    def layer(self, index: int, mixer: Mixer) -> Layer:
        """The layer around one of the `mixers`, which are counted from 0."""
        return Layer(self, mixer)

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        for key in self._left_out():
            if not values.get(key, True):
                del values[key]
        return values

    @classmethod
    @functools.cache
    def _left_out(cls) -> tuple[str, ...]:
        # an option that is on by default is written when it is off, so that settings are read back as they were
        return tuple(key for key in cls.left_out_when_off if not cls.model_fields[key].default)

    def check(self, spec: TaskSpec) -> None:
        """Raises ValueError where this model cannot serve that task."""
        name = type(self).__name__
        if all(getattr(type(self), key) is getattr(BackboneConfig, key) for key in ("mixer", "mixers", "build")):
            raise ValueError(
                f"{name}: it defines no method mixer(self, layer, spec), which makes the mixer of a layer."
            )
        if self.position not in self.positions:
            raise ValueError(
                f"{name}: position={self.position!r} is not available, choose one of {', '.join(self.positions)}."
            )
        if self.recompute == "layer" and self.norm == "batch":
            raise ValueError(
                f"{name}: recompute='layer' would count every batch twice in the statistics of a batch norm; set "
                "recompute to 'auto' or 'never'."
            )
        if self.short_conv not in (0, 2, 3, 4):
            raise ValueError(f"{name}: short_conv must be 0 or 2 to 4, got {self.short_conv}.")
        for layer in self.base_conv_layers:
            if not 0 <= layer < self.num_layers:
                raise ValueError(
                    f"{name}: base_conv_layers={list(self.base_conv_layers)}: there is no layer {layer}; "
                    f"num_layers={self.num_layers} gives the layers 0 to {self.num_layers - 1}."
                )
        for key in ("resid_dropout", "attention_dropout"):
            if self.recompute == "layer" and getattr(self, key, 0.0) > 0:
                raise ValueError(
                    f"{name}: recompute='layer' would draw another dropout in the backward pass; set {key} to 0 or "
                    "recompute to 'auto' or 'never'."
                )
        if spec.input == "tokens" and spec.vocab_size < 1:
            raise ValueError(f"{name}: token inputs need vocab_size >= 1, got {spec.vocab_size}; set it in the task.")
        if spec.input == "signal" and spec.channels < 1:
            raise ValueError(f"{name}: signal inputs need channels >= 1, got {spec.channels}; set it in the task.")
        if spec.towers not in (1, 2) or (spec.towers == 2 and spec.readout != "sequence"):
            raise ValueError(
                f"{name}: towers={spec.towers} and readout={spec.readout!r}; allowed: 1, or 2 with one label per row."
            )

    def build(self, spec: TaskSpec) -> Backbone:
        """The network for one task, initialised from torch's global generator."""
        self.check(spec)
        return Backbone(self, spec)


def require_divides(model: str, **numbers: int) -> None:
    """Raises ValueError unless the first option divides the second one.

    require_divides("gsa", num_heads=4, d_model=64)
    """
    (small_name, small), (large_name, large) = numbers.items()
    if large < 1:
        raise ValueError(f"{model}: {large_name} would be {large}; raise the options that it follows from.")
    if small < 1 or large % small:
        low = [n for n in range(1, math.isqrt(large) + 1) if large % n == 0]
        allowed = sorted({*low, *(large // n for n in low)})
        raise ValueError(
            f"{model}: {small_name}={small} does not divide {large_name}={large}; "
            f"choose {small_name} from {', '.join(map(str, allowed))} or change {large_name}."
        )


@dataclass
class BackboneState:
    """State of a network between two steps."""

    mixers: tuple[Any, ...]
    time: Tensor
    """[B], int64: number of positions that each row has seen."""
    pooled: Tensor | None
    """[B, D]: the sum of the final hidden states so far, where the readout takes their mean; else None."""
    fresh: bool = False
    """Whether the state is that before the first position. The host knows it without reading a tensor."""


class Layer(nn.Module):
    """A mixer and an optional channel mixer, each in a residual branch with a norm of its own.

    With norms before the branches a layer gives the residual stream and its last branch separately, because the norm
    of the next layer adds them in the same pass over memory; `joined` adds them where there is none.
    """

    def __init__(self, config: BackboneConfig, mixer: Mixer) -> None:
        super().__init__()
        self.prenorm = config.prenorm
        self.mixer = mixer
        self.mixer_norm = make_norm(config.norm, config.d_model, config.norm_eps)
        self.channel = make_channel_mixer(config.channel_mixer, config.d_model, config.mlp_ratio)
        self.channel_norm = None if self.channel is None else make_norm(config.norm, config.d_model, config.norm_eps)
        self.dropout = nn.Dropout(config.resid_dropout)

    def _enter(self, norm: nn.Module, residual: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of a branch, in the dtype of its matrix products, and the residual stream."""
        if not self.prenorm:
            return residual, residual
        # an identity has no matrix product, so its input is part of the residual stream
        exact = norm is self.channel_norm and isinstance(self.channel, nn.Identity)
        return add_norm(norm, branch, residual, None if exact else autocast_dtype(residual))

    def _leave(self, norm: nn.Module, residual: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream and what is still to be added to it, given the result y of a branch."""
        branch = self.dropout(y)
        return (residual, branch) if self.prenorm else (add_norm(norm, branch, residual)[0], None)

    def _channel(self, residual: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.channel is None or self.channel_norm is None:
            return residual, branch
        x, residual = self._enter(self.channel_norm, residual, branch)
        return self._leave(self.channel_norm, residual, self.channel(x))

    def _checked(self, y: Any, shape: Sequence[int], x: Tensor) -> Tensor:
        """Returns y, the result of the mixer for x. Raises ValueError unless it is a tensor of this shape.

        It also raises where y has fewer digits than the run: it has lost what the residual stream would keep.
        """
        y = of_shape(self.mixer, y, shape)
        if torch.promote_types(y.dtype, wanted := autocast_dtype(x)) != y.dtype:
            name = type(self.mixer).__name__
            raise ValueError(f"{name}.forward returns {y.dtype} in a run of {wanted}; return y.to(x.dtype).")
        return y

    def forward(self, residual: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, T, D] before this layer and after it, each with what is still to be added to it."""
        x, residual = self._enter(self.mixer_norm, residual, branch)
        y = self._checked(self.mixer(x), x.shape, x)
        return self._channel(*self._leave(self.mixer_norm, residual, y))

    def forward_at(self, residual: Tensor, branch: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """`forward` at `positions` [B, P] only, so that norms and channel mixer work on these alone: [B, P, D]."""
        x, residual = self._enter(self.mixer_norm, residual, branch)
        y = self._checked(self.mixer.forward_at(x, positions), (*positions.shape, x.shape[-1]), x)
        return self._channel(*self._leave(self.mixer_norm, take_positions(residual, positions), y))

    def prefill(
        self, residual: Tensor, branch: Tensor | None, state: Any, padding: LeftPadding | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """`forward` from a state, and the state behind the inputs."""
        x, residual = self._enter(self.mixer_norm, residual, branch)
        y, state = self.mixer.prefill(x, state, padding)
        return *self._channel(*self._leave(self.mixer_norm, residual, y)), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        if not self.prenorm:
            y_t, state = self.mixer.step(x_t, state)
            return joined(*self._channel(*self._leave(self.mixer_norm, x_t, y_t))), state
        x_t, state = self.mixer.branch_step(x_t, self.mixer_norm, state)
        if isinstance(self.channel, ChannelMixer) and self.channel_norm is not None:
            return self.channel.branch_step(x_t, self.channel_norm), state
        return joined(*self._channel(x_t, None)), state


def joined(residual: Tensor, branch: Tensor | None) -> Tensor:
    """The residual stream with what is still to be added to it."""
    return residual if branch is None else residual + branch


class PairHead(nn.Module):
    """Logits from the summaries a, b of two sequences: W2 relu(W1 [a, b, a * b, a - b]), inner width D.

    Source: the dual classifier of LRA (Tay et al. 2021, section 2.3); one inner layer, as in the code of S4.
    """

    def __init__(self, d_model: int, num_classes: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4 * d_model, d_model)
        self.outer = nn.Linear(d_model, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """x [2 B, D], the two sequences of a pair one after the other, to logits [B, num_classes]."""
        a, b = x.view(-1, 2, x.shape[-1]).unbind(dim=1)
        return self.outer(F.relu(self.inner(torch.cat([a, b, a * b, a - b], dim=-1))))


class Backbone(Model):
    """A network for one task.

    An embedding encodes tokens, and a linear map of the channels encodes signals. A token readout needs the hidden
    states at `positions` [B, P] only, so the last layer computes no others. A sequence readout pools over time, up to
    the end of each sequence where `positions` gives it. A readout of kind `last` decodes all `positions` from the state
    of the last one.
    """

    pos_table: Tensor | None
    belongs_to_task: ClassVar[tuple[str, ...]] = ("head", "decoder")

    def __init__(self, config: BackboneConfig, spec: TaskSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        d_model = config.d_model
        self.encoder: nn.Module
        if spec.input == "tokens":
            self.encoder = nn.Embedding(spec.vocab_size, d_model)
        else:
            self.encoder = nn.Linear(spec.channels, d_model)
        self.pos_embedding = nn.Embedding(spec.max_length, d_model) if config.position == "learned" else None
        table = sinusoidal_table(spec.max_length, d_model) if config.position == "sinusoidal" else None
        self.register_buffer("pos_table", table, persistent=False)
        self.embed_dropout = nn.Dropout(config.embed_dropout)
        mixers = config.mixers(spec)
        for mixer in mixers:
            if not isinstance(mixer, Mixer):
                raise ValueError(
                    f"{type(config).__name__}.mixer must return a Mixer of models/parts/mixer.py, got "
                    f"{type(mixer).__name__}."
                )
        if config.short_conv:
            mixers = [ShortConv(mixer, d_model, config.short_conv) for mixer in mixers]
        for layer in config.base_conv_layers:
            mixers[layer] = BaseConv(d_model)
        self.layers = nn.ModuleList(config.layer(i, mixer) for i, mixer in enumerate(mixers))
        self.decoder: PositionDecoder | None = None
        if spec.readout == "last":
            self.decoder = PositionDecoder(d_model, spec.max_length, config.norm, config.norm_eps)
        # a decoder begins with a norm of its own
        has_final_norm = config.prenorm and self.decoder is None
        self.final_norm = make_norm(config.norm, d_model, config.norm_eps) if has_final_norm else nn.Identity()
        has_bias = spec.readout == "sequence" or config.readout_bias
        self.head: nn.Module = nn.Linear(d_model, spec.num_classes, bias=has_bias)
        if spec.towers == 2:
            self.head = PairHead(d_model, spec.num_classes)
        self._init_weights()
        same_vocabulary = spec.input == "tokens" and spec.readout == "token" and spec.num_classes == spec.vocab_size
        if config.tie_embeddings and same_vocabulary and isinstance(self.encoder, nn.Embedding):
            self.head.weight = self.encoder.weight

    def _init_weights(self) -> None:
        branches = self.config.num_layers * (1 if self.config.channel_mixer == "none" else 2)
        scaled = {module for module in self.modules() if isinstance(module, ResidualLinear)}
        if self.config.init_residual == "plain":
            scaled = set()
        elif self.config.init_residual == "scaled-mlp":
            scaled -= {module for mixer in self.mixers for module in mixer.modules()}
        keep = self.config.torch_init
        for module in () if keep is True else self.modules():
            if isinstance(module, nn.Linear):
                std = self.config.init_std / math.sqrt(branches) if module in scaled else self.config.init_std
                if keep != "weights":
                    nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.init_std)
        if isinstance(self.encoder, nn.Linear):
            # with weights as small as an embedding's, a signal of few channels would vanish next to the norm's epsilon
            self.encoder.reset_parameters()
        if self.config.mixer_gain is not None:
            for module in (module for mixer in self.mixers for module in mixer.modules()):
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight, self.config.mixer_gain)
        for module in self.modules():
            if isinstance(module, Mixer):
                module.reset_parameters()

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers, from the first layer to the last."""
        return [layer.mixer for layer in self.layers if isinstance(layer, Layer)]

    def _encode(self, inputs: Tensor) -> Tensor:
        if isinstance(self.encoder, nn.Embedding):
            return embedding(inputs, self.encoder.weight)
        return self.encoder(inputs)

    def _positions(self, time: Tensor) -> Tensor | None:
        """The position embeddings [..., D] of the positions time [...], or None where the model has none."""
        if self.pos_embedding is not None:
            return self.pos_embedding(time)
        return None if self.pos_table is None else F.embedding(time, self.pos_table)

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, P, num_classes] at `positions` [B, P] (all T where None), or [B, num_classes]; see `hidden`."""
        return self.readout(self.hidden(inputs, positions))

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits of the hidden states that `hidden` gives."""
        if isinstance(self.head, nn.Linear):
            return aligned_linear(hidden, self.head.weight, self.head.bias)
        return self.head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `readout(hidden)` against integer targets, `IGNORE` where there is no label."""
        if isinstance(self.head, nn.Linear):
            return linear_cross_entropy(hidden, self.head.weight, targets, self.head.bias, ignore_index=IGNORE)
        return F.cross_entropy(self.head(hidden).float(), targets, ignore_index=IGNORE)

    def hidden(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Input of the readout: states [B, P, D] at `positions` [B, P] (all T where None), or summaries [B, D].

        inputs: [B, T] integers of any dtype, or [B, T, C] floats; with two towers [B, 2 T], one sequence after the
            other.
        positions: integers, strictly ascending in every row; for a sequence readout, the last index of each sequence.
        """
        if self.spec.towers > 1:
            batch, towers = inputs.shape[0], self.spec.towers
            inputs = inputs.reshape(batch * towers, inputs.shape[1] // towers, *inputs.shape[2:])
            positions = None if positions is None else positions.reshape(batch * towers, 1)
        length = inputs.shape[1]
        self._check_length(length)
        x = self._encode(inputs)
        added = self._positions(torch.arange(length, device=inputs.device))
        x = self.embed_dropout(x if added is None else x + added)
        at = positions
        if self.decoder is not None:
            at = torch.full((len(x), 1), length - 1, device=x.device)
        with cast_once(self.layers if self.decoder is None else [*self.layers, self.decoder], x.device):
            x = self._run_layers(x, at)
            if self.decoder is not None:
                everywhere = torch.arange(length, device=x.device).expand(len(x), length)
                return self.decoder(x[:, 0], everywhere if positions is None else positions)
        if self.spec.readout == "sequence":
            x = self._for_head(self._summary(x, positions))
        return x

    def _run_layers(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """The residual stream behind all layers and the final norm, at `positions` where no others are needed."""
        last = self.layers[-1]
        assert isinstance(last, Layer)
        branch = None
        for layer in self.layers[:-1]:
            x, branch = recomputed_layer(self.config.recompute, layer, x, branch)
        # positions ascend strictly, so T of them are all positions and need no selection
        if self.spec.readout == "sequence" or positions is None or positions.shape[1] == x.shape[1]:
            return self._finish(*recomputed_layer(self.config.recompute, last, x, branch))
        if self.config.norm == "batch":
            # the statistics of a batch norm are over all positions, so none may be left out before it
            x = self._finish(*recomputed_layer(self.config.recompute, last, x, branch))
            return take_positions(x, positions.long())
        at = positions.long()
        return self._finish(*recomputed_layer(self.config.recompute, last.forward_at, x, branch, at))

    def _check_length(self, length: int) -> None:
        if self.config.position in ("learned", "sinusoidal") and length > self.spec.max_length:
            raise ValueError(
                f"{type(self.config).__name__}: position={self.config.position!r} covers {self.spec.max_length} "
                f"positions, got a sequence of {length}; raise the task's max_length or use another position."
            )

    def _finish(self, residual: Tensor, branch: Tensor | None) -> Tensor:
        """The final norm of the residual stream and its last branch, or their sum where there is no final norm."""
        if isinstance(self.final_norm, nn.Identity):
            return joined(residual, branch)
        # a readout of every token is a matrix product, a summary over time needs float32
        out_dtype = autocast_dtype(residual) if self.spec.readout == "token" else None
        return add_norm(self.final_norm, branch, residual, out_dtype)[0]

    def _summary(self, x: Tensor, ends: Tensor | None) -> Tensor:
        """Mean or last value of x [B, T, D] over time: [B, D]. ends [B, 1]: the last index that counts; None: T - 1."""
        if ends is None:
            return x.mean(dim=1) if self.config.pooling == "mean" else x[:, -1]
        if self.config.pooling == "last":
            return take_positions(x, ends.long())[:, 0]
        inside = torch.arange(x.shape[1], device=x.device) <= ends
        return (x * inside.unsqueeze(-1)).sum(dim=1) / (ends + 1)

    def _for_head(self, x: Tensor) -> Tensor:
        """Returns x in the dtype of the weights. Norms give float32, which a head in half precision cannot multiply."""
        return x.to(next(self.encoder.parameters()).dtype)

    def init_state(self, batch_size: int, capacity: int | None = None) -> BackboneState:
        """The state before the first position.

        capacity: number of positions that a state which keeps all of them has room for; None: the task's max_length.
            The caller counts them: a step beyond the capacity of a cache cannot raise an error on a GPU.
        """
        if self.spec.towers > 1:
            raise ValueError(
                f"{type(self.config).__name__}: a task with two sequences per row has no step; use forward."
            )
        if self.decoder is not None:
            raise ValueError(
                f"{type(self.config).__name__}: a task that reads out the last state has no step; use forward."
            )
        capacity = self.spec.max_length if capacity is None else capacity
        self._check_length(capacity)
        weight = next(self.head.parameters())
        pooled = None
        if self.spec.readout == "sequence" and self.config.pooling == "mean":
            # norms give float32 at least, and no tensor of a state changes its dtype from step to step
            pooled = at_least_float32(weight).new_zeros(batch_size, self.config.d_model)
        time = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        mixers = tuple(mixer.init_state(batch_size, capacity) for mixer in self.mixers)
        return BackboneState(mixers, time, pooled, fresh=True)

    def step(self, inputs_t: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        """inputs_t [B] or [B, C] and the state to logits [B, num_classes] of this position and the next state.

        The network must be in evaluation mode. The tensors of the state may be changed in place, unless gradients are
        recorded: then the state given is left as it is, and gradients pass through all steps.
        """
        if torch.is_grad_enabled():
            state = map_tensors(torch.clone, state)
        state.fresh = False
        x = self._encode(inputs_t)
        added = self._positions(state.time)
        x = self.embed_dropout(x if added is None else x + added)
        mixer_states = []
        for layer, mixer_state in zip(self.layers, state.mixers, strict=True):
            assert isinstance(layer, Layer)
            x, mixer_state = layer.step(x, mixer_state)
            mixer_states.append(mixer_state)
        time = state.time + 1
        if state.pooled is None and self.config.prenorm and isinstance(self.head, nn.Linear):
            if len(x) == 1:
                logits = step_linear(self.head, x, norm=self.final_norm)
            else:
                logits = self.readout(add_norm(self.final_norm, None, x, autocast_dtype(x))[0])
            return logits, BackboneState(tuple(mixer_states), time, None)
        x = self.final_norm(x)
        pooled = None if state.pooled is None else state.pooled + x
        if pooled is not None:
            x = pooled / time.unsqueeze(-1)
        return self.head(self._for_head(x)), BackboneState(tuple(mixer_states), time, pooled)

    def restart(self, state: BackboneState) -> None:
        """Sets a state back to that before the first position, in place."""
        for mixer, mixer_state in zip(self.mixers, state.mixers, strict=True):
            mixer.restart(mixer_state)
        state.time.zero_()
        state.fresh = True
        if state.pooled is not None:
            state.pooled.zero_()

    def prefill(
        self,
        inputs: Tensor,
        lengths: Tensor | None = None,
        *,
        state: BackboneState | None = None,
        capacity: int | None = None,
    ) -> tuple[Tensor, BackboneState]:
        """Logits [B, num_classes] of the last position of the inputs, and the state behind it.

        inputs: [B, T] tokens or [B, T, C] signals. Where rows have unlike lengths, padding of any value stands in front
            of the shorter ones, and logits and state are those of the rows without it.
        lengths: [B], int64, 1 to T: positions of each row that are no padding. None: T.
        state: one of `init_state` or after `restart`, else ValueError: a prompt is read in one part. Its tensors may be
            changed in place. None: a new one with room for `capacity` positions.
        The network must be in evaluation mode.
        """
        batch, steps = inputs.shape[:2]
        self._check_length(steps)
        state = self.init_state(batch, capacity) if state is None else state
        if not state.fresh:
            raise ValueError(
                "prefill: the state has read positions already, and a prompt is read in one part. Pass the whole "
                "prompt, read the rest of it by step, or call restart(state) to begin anew."
            )
        state.fresh = False
        padding = None if lengths is None else LeftPadding.of(lengths, steps)
        x = self._encode(inputs)
        time = torch.arange(steps, device=x.device) if padding is None else padding.time.clamp(min=0)
        added = self._positions(time)
        x = self.embed_dropout(x if added is None else x + added)
        branch, mixer_states = None, []
        for layer, mixer_state in zip(self.layers, state.mixers, strict=True):
            assert isinstance(layer, Layer)
            x, branch, mixer_state = layer.prefill(x, branch, mixer_state, padding)
            mixer_states.append(mixer_state)
        seen = positions_seen(x, padding)
        pooled = state.pooled
        if pooled is not None:
            pooled = blank(self.final_norm(joined(x, branch)), padding).sum(dim=1, dtype=pooled.dtype)
            last = pooled / seen.unsqueeze(-1)
        else:
            last = self.final_norm(joined(x[:, -1], None if branch is None else branch[:, -1]))
        return self.readout(self._for_head(last)), BackboneState(tuple(mixer_states), seen, pooled)

    def state_size(self, length: int) -> int:
        """Number of elements that the mixers keep for one sequence after `length` steps; a complex one counts as two.

        The number of positions seen and the running sum of the readout are the same in all models and not counted.
        """
        return sum(mixer.state_size(length) for mixer in self.mixers)

    @contextlib.contextmanager
    def at_rate(self, rate: float) -> Iterator[bool]:
        """Within this context, inputs are expected to be sampled at `rate` times the rate of the training data.

        Linear time-invariant layers (S4, S4D, DSS, and those of H3, GSS and Mamba with `inner: s4d`) take steps of dt /
        rate, the zero-shot change of resolution of S4 and DSS. Everything else stays as it is: short convolutions, and
        S6, whose step sizes are functions of its input. The context gives whether any layer adapts. It holds for
        `forward` and for `step`; a state must not pass from one rate to another.
        """
        if not rate > 0:
            raise ValueError(f"{type(self.config).__name__}: at_rate needs a rate above 0, got {rate}.")
        layers = [module for module in self.modules() if isinstance(module, Rescalable)]
        before = [layer.step_scale for layer in layers]
        for layer in layers:
            layer.step_scale = layer.step_scale / rate
        try:
            yield bool(layers)
        finally:
            for layer, scale in zip(layers, before, strict=True):
                layer.step_scale = scale

    def convolutions(self) -> dict[str, Convolution]:
        """The parts of the mixers that convolve with a fixed filter, by a name such as `layer=0,filter=ssm`."""
        return {
            f"layer={i},filter={name or 'mixer'}": module
            for i, mixer in enumerate(self.mixers)
            for name, module in mixer.named_modules()
            if isinstance(module, Convolution)
        }

    def param_groups(self, no_decay: tuple[str, ...] = ()) -> list[ParamGroup]:
        """Groups that together hold every trainable parameter once.

        The groups `ssm` and `dt` have learning rates of their own and no weight decay. The others are `bias`, `norm`
        (weights and biases of norms), `embedding` (learned positions included) and `weight`, the rest.
        no_decay: those of `bias`, `norm` and `embedding` that have no weight decay.
        """
        unknown = sorted(set(no_decay) - set(NO_DECAY_KINDS))
        if unknown:
            raise ValueError(f"no_decay: got {', '.join(unknown)}; allowed are {', '.join(NO_DECAY_KINDS)}.")
        kind: dict[int, str] = {}
        ssm_lr = getattr(self.config, "ssm_lr", None)
        dt_lr = getattr(self.config, "dt_lr", None)
        for mixer in self.mixers:
            for name, parameter in mixer.ssm_parameters().items():
                kind[id(parameter)] = "dt" if name == "log_dt" and dt_lr is not None else "ssm"
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, NORM_MODULES):
                    kind.setdefault(id(parameter), "norm")
                elif isinstance(module, nn.Embedding):
                    kind.setdefault(id(parameter), "embedding")
                elif name.endswith("bias"):
                    kind.setdefault(id(parameter), "bias")
        groups: dict[str, list[nn.Parameter]] = {}
        for parameter in self.parameters():
            if parameter.requires_grad:
                groups.setdefault(kind.get(id(parameter), "weight"), []).append(parameter)
        lr = {"ssm": ssm_lr, "dt": dt_lr}
        return [
            ParamGroup(
                name,
                parameters,
                lr=lr.get(name),
                weight_decay=0.0 if name in lr or name in no_decay else None,
            )
            for name, parameters in groups.items()
        ]
