"""The network around every mixer: encoder, N layers of (mixer, channel mixer), readout.

    prenorm:   x = x + mixer(norm(x));  x = x + channel(norm(x));  readout(norm(x))
    postnorm:  x = norm(x + mixer(x));  x = norm(x + channel(x));  readout(x)

A model is a `BackboneConfig` that names the mixer of every layer. Width, depth, norms, positions and the channel mixer
are options of `parts/options.py`, so that a comparison of models compares their mixers and nothing else.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.embedding import embedding
from subquad.kernels.linear_cross_entropy import aligned_linear, linear_cross_entropy
from subquad.kernels.operations import OperatorCount, count_operations
from subquad.models.parts.casts import at_least_float32, autocast_dtype, cast_once
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.decoder import PositionDecoder
from subquad.models.parts.layer import Layer, joined
from subquad.models.parts.linear import ResidualLinear
from subquad.models.parts.mixer import Mixer, Rescalable
from subquad.models.parts.norms import NORM_MODULES, NormKind, add_norm, make_norm
from subquad.models.parts.options import NetworkOptions
from subquad.models.parts.positions import sinusoidal_table
from subquad.models.parts.recompute import recomputed_layer
from subquad.models.parts.short_conv import BaseConv, ShortConv
from subquad.models.parts.step import step_linear
from subquad.models.parts.time_axis import LeftPadding, blank, positions_seen, take_positions
from subquad.suite.bounds import Epsilon, Ratio, Width
from subquad.suite.contracts import IGNORE, ParamGroup, TaskSpec
from subquad.suite.model import Convolution, Model
from subquad.suite.state import map_tensors

NO_DECAY_KINDS = ("bias", "norm", "embedding")


class BackboneConfig(NetworkOptions):
    """Options of every model. A model derives from this class, sets its own defaults and names its mixer.

    Raise `version` in the derived class whenever the function that the model computes, its initialisation, or a default
    that is no option changes. A change in this file or in `parts/` concerns all models and raises it here.
    `tests/laws/versions.json` records what every version computes.
    """

    version: ClassVar[int] = 1

    def layer(self, index: int, mixer: Mixer) -> Layer:
        """The layer around one of the `mixers`, which are counted from 0."""
        return Layer(self, mixer)

    def check(self, spec: TaskSpec) -> None:
        """Raises ValueError where this model cannot serve that task."""
        if all(getattr(type(self), key) is getattr(BackboneConfig, key) for key in ("mixer", "mixers", "build")):
            name = type(self).__name__
            raise ValueError(
                f"{name}: it defines no method mixer(self, layer, spec), which makes the mixer of a layer."
            )
        super().check(spec)

    def build(self, spec: TaskSpec) -> Backbone:
        """The network for one task, initialised from torch's global generator."""
        self.check(spec)
        return Backbone(self, spec)


class SwiGLUConfig(BackboneConfig):
    """Options of models in the network of recent Transformers: RMS norms and SwiGLU."""

    channel_mixer: ChannelMixerKind = "swiglu"
    mlp_ratio: Ratio = 8 / 3
    norm: NormKind = "rms"
    norm_eps: Epsilon = 1e-6


class KeyWidthConfig(SwiGLUConfig):
    """Options of such models whose queries and keys have a width of their own."""

    heads_divide: ClassVar[tuple[str, ...]] = ("d_model", "key_width")

    num_heads: Width = 4
    expand_k: Ratio = 0.5
    """Width of queries and keys, as a multiple of d_model."""

    @property
    def key_width(self) -> int:
        return round(self.expand_k * self.d_model)


@dataclass
class BackboneState:
    """State of a network between two steps."""

    mixers: tuple[Any, ...]
    time: Tensor
    """[B], int64: number of positions that each row has seen."""
    pooled: Tensor | None
    """[B, D]: the sum of the final hidden states so far, where the readout takes their mean; else None."""
    seen: int = 0
    """Number of positions that were read, padding included. The host knows it without reading a tensor."""
    capacity: int | None = None
    """Number of positions that there is room for; None: no mixer keeps them all."""


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
            A step beyond it raises ValueError; one that a CUDA graph repeats does not, so whoever records it counts.
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
        grows = False
        # a mixer of a plugin may lack `state_size`
        with contextlib.suppress(NotImplementedError):
            grows = self.state_size(capacity + 1) > self.state_size(capacity)
        return BackboneState(mixers, time, pooled, capacity=capacity if grows else None)

    def step(self, inputs_t: Tensor, state: BackboneState) -> tuple[Tensor, BackboneState]:
        """inputs_t [B] or [B, C] and the state to logits [B, num_classes] of this position and the next state.

        The network must be in evaluation mode. The tensors of the state may be changed in place, unless gradients are
        recorded: then the state given is left as it is, and gradients pass through all steps.
        """
        if state.seen == state.capacity:
            raise ValueError(
                f"step: the state has room for {state.capacity} positions and has read as many; give init_state or "
                "prefill a larger capacity."
            )
        if torch.is_grad_enabled():
            state = map_tensors(torch.clone, state)
        seen = state.seen + 1
        # `prefill` refuses the state that was given from now on, whose tensors may be changed in place
        state.seen = max(state.seen, 1)
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
            return logits, BackboneState(tuple(mixer_states), time, None, seen, state.capacity)
        x = self.final_norm(x)
        pooled = None if state.pooled is None else state.pooled + x
        if pooled is not None:
            x = pooled / time.unsqueeze(-1)
        return self.head(self._for_head(x)), BackboneState(tuple(mixer_states), time, pooled, seen, state.capacity)

    def restart(self, state: BackboneState) -> None:
        """Sets a state back to that before the first position, in place."""
        for mixer, mixer_state in zip(self.mixers, state.mixers, strict=True):
            mixer.restart(mixer_state)
        state.time.zero_()
        state.seen = 0
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
        if state.seen:
            raise ValueError(
                "prefill: the state has read positions already, and a prompt is read in one part. Pass the whole "
                "prompt, read the rest of it by step, or call restart(state) to begin anew."
            )
        state.seen = steps
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
        after = BackboneState(tuple(mixer_states), seen, pooled, steps, state.capacity)
        return self.readout(self._for_head(last)), after

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

    def counting(self) -> contextlib.AbstractContextManager[OperatorCount]:
        """A context in which operators are not carried out, but counted by the cost of their workloads."""
        return count_operations()

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
