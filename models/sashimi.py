"""SaShiMi: a U-Net over time, whose stages are stacks of blocks of other registered models.

    stage i has the width D e^i and reads every (p_1 .. p_i)-th position, for pooling factors p and an expansion e

    down:   d_{i+1}[s] = W (d_i[p s], .., d_i[p s + p - 1]) + b                                    d_0: the input
    centre: y_n = d_n + blocks(d_n)
    up:     u[p s + r] = (W' y_{i+1}[s - 1] + b')_r + d_i[p s + r],   y_i = u + blocks(u)          zeros before s = 0

With `down_blocks`, the U-Net of Mamba's audio experiments, a stage above the centre has as many blocks on the way down
too. With l_0 = d_i and l_k the result of the k-th of these N blocks, the stage sends l_N down and goes up from the sum
of l_N and what it is sent; the sum with l_{N - k} behind its k-th block takes the place of the skip around all of them.
This is `unet=True` of the authors' code.

The shift by one position of the stage below keeps the network causal: what is made of a group of p positions is read
from the next group on.

Source: It's Raw! (Goel et al. 2022), section 4, and the authors' code (state-spaces/s4 at
43f5b0cce57fdb6eb1efa81a1f87fda5114bc142, models/sashimi/sashimi.py) for the skips around the blocks of a stage. Other
blocks than S4, outside and in the centre, are those of Mamba's tables 4 and 5 (Gu and Dao 2023, appendix E.4): S4 with
an MLP of expansion two, attention with one of expansion one, Mamba without any. A block is a mixer and a channel mixer,
each behind a norm; models whose layers are built otherwise (RWKV, Pythia) are refused.

The defaults are the configuration that the authors published for SC09 (configs/experiment/audio/sashimi-sc09.yaml at
43e3dfc0ce3389b1d8b3d77a4dc64d8aa049c0e4): eight blocks a stage, all channels of an S4 with one A and B, and a gated
output map. With 256 levels it has 4.75M parameters here. The README of the code says 4.1M, which is the number without
the gate (4.06M); no variant that the code offers has the 5.8M that Mamba's table 4 quotes. Mamba's U-Net with
`down_blocks` has 3.54M for the 3.5M of its appendix E.4.1, and 6.24M and 24.84M for the 6.1M and 24.3M of its table 4;
without A, D and the bias of dt these are 6.06M and 24.32M.

Departures: the authors' code counts S4 and its MLP as two blocks, with a sum behind each, where a block of
`down_blocks` is both with one sum; so a stage of S4 with MLPs has half as many skips; without MLPs they are the same.
MLPs have the tanh form of GELU, as all of this suite; the code has the exact one.

A step computes all stages and keeps the results of those that are due, so that it can be recorded; the stages below the
first are due at every p-th position only. A prompt is read in parallel, but step by step where its rows are padded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn

from subquad.models import MODELS
from subquad.models.backbone import BackboneConfig
from subquad.models.hybrid import OF_THE_WHOLE, own_options, today
from subquad.models.parts.casts import at_least_float32
from subquad.models.parts.channel import ChannelMixerKind
from subquad.models.parts.layer import Layer, joined
from subquad.models.parts.mixer import Mixer, choose_rows
from subquad.models.parts.time_axis import LeftPadding
from subquad.suite.bounds import Factor, Layers, Positive
from subquad.suite.contracts import TaskSpec
from subquad.suite.state import map_tensors

State = tuple[Any, ...]

BLOCKS: dict[str, dict[str, Any]] = {
    "s4": {"channel_mixer": "mlp", "mlp_ratio": 2.0, "tie_A": True},
    "attention": {"channel_mixer": "mlp", "mlp_ratio": 1.0},
    "transformer++": {"channel_mixer": "swiglu", "mlp_ratio": 2 / 3},
}
"""Options of blocks: channel mixers with which a block has about 6 D^2 parameters, as in Mamba's table 5 (others have
none), and one A for all channels of S4, as in SaShiMi."""

OF_BLOCKS = ("channel_mixer", "mlp_ratio")
"""Options of a network that each kind of block has for itself."""


class Stage(nn.Module):
    """A stack of blocks of one width, with a skip around all of them."""

    def __init__(self, config: BackboneConfig, spec: TaskSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, mixer) for mixer in config.mixers(spec))

    @property
    def blocks(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def forward(self, x: Tensor) -> Tensor:
        residual, branch = x, None
        for block in self.blocks:
            residual, branch = block(residual, branch)
        return x + joined(residual, branch)

    def down(self, x: Tensor) -> list[Tensor]:
        """x and the result of every block."""
        results = [x]
        for block in self.blocks:
            results.append(joined(*block(results[-1])))
        return results

    def up(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        """The result of all blocks, with the mirrored one of `skips`, those of `down`, behind each."""
        for block, skip in zip(self.blocks, skips[-2::-1], strict=True):
            x = joined(*block(x)) + skip
        return x

    def init_state(self, batch_size: int, capacity: int) -> State:
        return tuple(block.mixer.init_state(batch_size, capacity) for block in self.blocks)

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        y_t, after = x_t, []
        for block, part in zip(self.blocks, state, strict=True):
            y_t, part = block.step(y_t, part)
            after.append(part)
        return x_t + y_t, tuple(after)

    def down_step(self, x_t: Tensor, state: State) -> tuple[list[Tensor], State]:
        """`down` of one position."""
        results, after = [x_t], []
        for block, part in zip(self.blocks, state, strict=True):
            y_t, part = block.step(results[-1], part)
            results.append(y_t)
            after.append(part)
        return results, tuple(after)

    def up_step(self, x_t: Tensor, skips: list[Tensor], state: State) -> tuple[Tensor, State]:
        """`up` of one position."""
        after = []
        for block, skip, part in zip(self.blocks, skips[-2::-1], state, strict=True):
            x_t, part = block.step(x_t, part)
            x_t = x_t + skip
            after.append(part)
        return x_t, tuple(after)

    def prefill(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        residual: Tensor = x
        branch: Tensor | None = None
        after = []
        for block, part in zip(self.blocks, state, strict=True):
            residual, branch, part = block.prefill(residual, branch, part, None)
            after.append(part)
        return x + joined(residual, branch), tuple(after)

    def down_prefill(self, x: Tensor, state: State) -> tuple[list[Tensor], State]:
        """`down` with the states behind the last position."""
        results, after = [x], []
        for block, part in zip(self.blocks, state, strict=True):
            residual, branch, part = block.prefill(results[-1], None, part, None)
            results.append(joined(residual, branch))
            after.append(part)
        return results, tuple(after)

    def up_prefill(self, x: Tensor, skips: list[Tensor], state: State) -> tuple[Tensor, State]:
        """`up` with the states behind the last position."""
        after = []
        for block, skip, part in zip(self.blocks, skips[-2::-1], state, strict=True):
            residual, branch, part = block.prefill(x, None, part, None)
            x = joined(residual, branch) + skip
            after.append(part)
        return x, tuple(after)

    def restart(self, state: State) -> None:
        for block, part in zip(self.blocks, state, strict=True):
            block.mixer.restart(part)

    def state_size(self, length: int) -> int:
        return sum(block.mixer.state_size(length) for block in self.blocks)


class UNet(Mixer):
    """The U-Net: x [B, T, D] to [B, T, D].

    Its state, for every stage but the centre: the positions [B] seen, the inputs of the group under way [B, p, D_i],
    what the stage below sends to the group under way [B, p, D_i], and the state of the blocks, and with `down_blocks`
    that of those on the way down; then that of the centre.
    """

    def __init__(self, config: SashimiConfig, spec: TaskSpec) -> None:
        super().__init__()
        self.pool = config.pool
        stages = [config.stage(i) for i in range(len(self.pool) + 1)]
        widths = [stage.d_model for stage in stages]
        # with whole groups everywhere, no position of a stage has fewer inputs than others
        length = math.ceil(spec.max_length / math.prod(self.pool)) * math.prod(self.pool)
        lengths = [length // math.prod(self.pool[:i]) for i in range(len(stages))]
        self.stages = nn.ModuleList(
            Stage(stage, replace(spec, max_length=size)) for stage, size in zip(stages, lengths, strict=True)
        )
        self.before = nn.ModuleList(
            Stage(stage, replace(spec, max_length=size))
            for stage, size in zip(stages[:-1] if config.down_blocks else [], lengths, strict=False)
        )
        """The stages on the way down, or none."""
        for stage in (*self.stages[1:], *self.before[1:]):
            for module in stage.modules():
                if isinstance(module, Mixer):
                    module.rows_skip = True
        pairs = list(zip(self.pool, widths, widths[1:], strict=False))
        self.down = nn.ModuleList(nn.Linear(p * outer, inner) for p, outer, inner in pairs)
        self.up = nn.ModuleList(nn.Linear(inner, p * outer) for p, outer, inner in pairs)

    def _stage(self, i: int) -> Stage:
        stage = self.stages[i]
        assert isinstance(stage, Stage)
        return stage

    def _before(self, i: int) -> Stage | None:
        """The blocks of stage i on the way down."""
        if not self.before:
            return None
        stage = self.before[i]
        assert isinstance(stage, Stage)
        return stage

    def _pair(self, i: int) -> list[Stage]:
        """Stage i, and its blocks on the way down where it has any."""
        before = self._before(i)
        return [self._stage(i), *([] if before is None else [before])]

    def _width(self, i: int) -> int:
        linear = self.up[i]
        assert isinstance(linear, nn.Linear)
        return linear.out_features // self.pool[i]

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        return self._from(0, F.pad(x, (0, 0, 0, -steps % math.prod(self.pool))))[:, :steps]

    def _from(self, i: int, x: Tensor) -> Tensor:
        """The output of stage i and all below it, at its positions."""
        if i == len(self.pool):
            return self._stage(i)(x)
        p, before = self.pool[i], self._before(i)
        skips = [x] if before is None else before.down(x)
        x = skips[-1]
        # the residual streams of all stages have one dtype, and a product has that of autocast
        below = self._from(i + 1, self.down[i](x.unflatten(1, (-1, p)).flatten(2)).to(x.dtype))
        sent = F.pad(self.up[i](below)[:, :-1], (0, 0, 1, 0))
        x = x + sent.unflatten(2, (p, -1)).flatten(1, 2)
        return self._stage(i)(x) if before is None else self._stage(i).up(x, skips)

    def init_state(self, batch_size: int, capacity: int) -> State:
        parts: list[Any] = []
        for i, p in enumerate(self.pool):
            weight = at_least_float32(next(self.up[i].parameters()))
            group = weight.new_zeros(batch_size, p, self._width(i))
            count = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
            blocks = tuple(stage.init_state(batch_size, capacity) for stage in self._pair(i))
            parts.append((count, group, torch.zeros_like(group), *blocks))
            capacity = math.ceil(capacity / p)
        return (*parts, self._stage(len(self.pool)).init_state(batch_size, capacity))

    def step(self, x_t: Tensor, state: State) -> tuple[Tensor, State]:
        due = torch.ones(len(x_t), dtype=torch.bool, device=x_t.device)
        return self._step(0, x_t, state, due)

    def _step(self, i: int, x_t: Tensor, state: State, due: Tensor) -> tuple[Tensor, State]:
        """One step of stage i and all below it; rows [B] that are not due keep their state."""
        if i == len(self.pool):
            y_t, after = self._blocks_step(self._stage(i).step, x_t, state[0], due)
            return y_t, (after,)
        (count, group, sent, blocks, *downs), *below = state
        stage, before = self._stage(i), self._before(i)
        advance = stage.step
        if before is not None:
            skips, after = self._blocks_step(before.down_step, x_t, downs[0], due)
            x_t, downs = skips[-1], [after]
            advance = functools.partial(_up_step, stage, skips)
        slot = (count % self.pool[i]).unsqueeze(-1) == torch.arange(self.pool[i], device=count.device)
        group = torch.where((slot & due.unsqueeze(-1)).unsqueeze(-1), x_t.unsqueeze(1).to(group.dtype), group)
        u_t = x_t + (sent * slot.unsqueeze(-1)).sum(1).to(x_t.dtype)
        y_t, blocks = self._blocks_step(advance, u_t, blocks, due)
        full = due & slot[:, -1]
        lower, rest = self._step(i + 1, self.down[i](group.flatten(1).to(x_t.dtype)).to(x_t.dtype), tuple(below), full)
        new = self.up[i](lower).unflatten(1, (self.pool[i], -1)).to(sent.dtype)
        sent = torch.where(full.view(-1, 1, 1), new, sent)
        return y_t, ((count + due, group, sent, blocks, *downs), *rest)

    def _blocks_step(
        self, step: Callable[[Tensor, State], tuple[Any, State]], x_t: Tensor, state: State, due: Tensor
    ) -> tuple[Any, State]:
        # a step may change its state in place
        before = map_tensors(torch.clone, state)
        y_t, after = step(x_t, state)
        return y_t, choose_rows(due, after, before)

    def prefill(self, x: Tensor, state: State, padding: LeftPadding | None = None) -> tuple[Tensor, State]:
        # rows that begin at different positions of a group are not at the same stage of the network together
        return self._prefill(0, x, state) if padding is None else super().prefill(x, state, padding)

    def _prefill(self, i: int, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Stage i and all below it from their first position on: its outputs and their states."""
        if i == len(self.pool):
            y, after = self._stage(i).prefill(x, state[0])
            return y, (after,)
        (count, group, sent, blocks, *downs), *rest = state
        before, skips = self._before(i), [x]
        if before is not None:
            skips, after = before.down_prefill(x, downs[0])
            x, downs = skips[-1], [after]
        steps, p = x.shape[1], self.pool[i]
        groups, below = steps // p, tuple(rest)
        arrived = sent.new_zeros(len(x), 1, *sent.shape[1:])
        if groups:
            inputs = x[:, : groups * p].unflatten(1, (-1, p)).flatten(2)
            lower, below = self._prefill(i + 1, self.down[i](inputs).to(x.dtype), below)
            made = self.up[i](lower).unflatten(2, (p, -1)).to(sent.dtype)
            arrived, sent = torch.cat([arrived, made], dim=1), made[:, -1].clone()
        u = x + arrived.flatten(1, 2)[:, :steps].to(x.dtype)
        if before is None:
            y, blocks = self._stage(i).prefill(u, blocks)
        else:
            y, blocks = self._stage(i).up_prefill(u, skips, blocks)
        # a position of a group keeps its input until the next group overwrites it
        last = F.pad(x, (0, 0, 0, p - steps)) if steps < p else x[:, -p:].roll(steps % p, dims=1)
        return y, ((count + steps, last.to(group.dtype), sent, blocks, *downs), *below)

    def restart(self, state: State) -> None:
        for i, part in enumerate(state[:-1]):
            for tensor in part[:3]:
                tensor.zero_()
            for stage, blocks in zip(self._pair(i), part[3:], strict=True):
                stage.restart(blocks)
        self._stage(len(self.pool)).restart(state[-1])

    def state_size(self, length: int) -> int:
        total = 0
        for i, p in enumerate(self.pool):
            total += sum(stage.state_size(length) for stage in self._pair(i)) + 2 * p * self._width(i)
            length = math.ceil(length / p)
        return total + self._stage(len(self.pool)).state_size(length)

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{where}.{i}.{k}.{name}": parameter
            for where, stages in (("stages", self.stages), ("before", self.before))
            for i, stage in enumerate(stages)
            if isinstance(stage, Stage)
            for k, block in enumerate(stage.blocks)
            for name, parameter in block.mixer.ssm_parameters().items()
        }


def _up_step(stage: Stage, skips: list[Tensor], x_t: Tensor, state: State) -> tuple[Tensor, State]:
    return stage.up_step(x_t, skips, state)


class WholeLayer(Layer):
    """A layer that is its mixer and nothing else: no norm before it and no residual branch around it."""

    def __init__(self, mixer: Mixer) -> None:
        nn.Module.__init__(self)
        self.mixer = mixer

    def forward(self, residual: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.mixer(joined(residual, branch)), None

    def forward_at(self, residual: Tensor, branch: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.mixer.forward_at(joined(residual, branch), positions), None

    def prefill(
        self, residual: Tensor, branch: Tensor | None, state: Any, padding: LeftPadding | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        y, state = self.mixer.prefill(joined(residual, branch), state, padding)
        return y, None, state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.mixer.step(x_t, state)


class SashimiConfig(BackboneConfig):
    """SaShiMi with its authors' sizes: eight blocks a stage, widths 64, 128 and 256."""

    version: ClassVar[int] = 2
    one_mixer_a_layer: ClassVar[bool] = False
    left_out_when_off: ClassVar[tuple[str, ...]] = (*BackboneConfig.left_out_when_off, "down_blocks")

    num_layers: Layers = 8
    """Blocks of every stage."""
    channel_mixer: ChannelMixerKind = "none"
    """Channel mixers are those of the blocks (`options`)."""
    torch_init: Literal[True, False, "weights"] = True
    pool: tuple[Factor, ...] = (4, 4)
    """Positions that a stage reads as one, from the first stage on."""
    down_blocks: bool = False
    """Whether stages above the centre have blocks on the way down too, as in Mamba's audio experiments: five stacks of
    blocks with two pooling factors. SaShiMi itself has three."""
    widening: Factor = 2
    """Width of a stage, as a multiple of that above it."""
    outer: str = "s4"
    """Registered model whose blocks make up the stages above the centre."""
    center: str = "s4"
    """Registered model whose blocks make up the centre."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of a block by the name of its model, among them `channel_mixer` and `mlp_ratio`. Defaults are written
    out: one A for all channels of `s4` and an MLP of ratio 2 behind it, an MLP of ratio 1 behind `attention`, a SwiGLU
    of ratio 2/3 behind `transformer++`, and none behind others."""
    versions: dict[str, int] = Field(default_factory=dict)
    """Versions of these models. They are filled in; another version than today's is refused."""
    ssm_lr: Positive | None = None
    """Learning rate of the state space parameters of all blocks, which have no weight decay. None: that of the run."""

    @field_validator("outer", "center")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in ("hybrid", "sashimi"):
            raise ValueError(f"a network such as {name} cannot be a block")
        kind = MODELS.load(name)
        if not kind.one_mixer_a_layer or kind.layer is not BackboneConfig.layer:
            raise ValueError(f"{name} has layers of its own kind and cannot be a block; use another model")
        return name

    @field_validator("options")
    @classmethod
    def _resolved(cls, given: dict[str, dict[str, Any]], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        names = _kinds(info.data)
        if len(info.data) and set(given) - set(names):
            raise ValueError(f"got options of {', '.join(given)}; the blocks are {', '.join(names)}")
        return {
            name: own_options(
                name, {**BLOCKS.get(name, {"channel_mixer": "none"}), **given.get(name, {})}, of_blocks=OF_BLOCKS
            )
            for name in names
        }

    @field_validator("versions")
    @classmethod
    def _filled_in(cls, stored: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        return today(stored, _kinds(info.data))

    def stage(self, i: int) -> BackboneConfig:
        """The configuration of the blocks of a stage; the centre is the last one."""
        name = self.outer if i < len(self.pool) else self.center
        network = {
            key: getattr(self, key) for key in BackboneConfig.model_fields if key not in (*OF_THE_WHOLE, *OF_BLOCKS)
        }
        network |= {"short_conv": 0, "d_model": self.d_model * self.widening**i}
        return MODELS.load(name)(**network, **self.options[name])

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        if self.channel_mixer != "none" or self.base_conv_layers:
            raise ValueError(
                "sashimi: channel_mixer and base_conv_layers belong to the blocks; set options, and leave these out."
            )
        if not self.pool or min(self.pool) < 2 or self.widening < 1:
            raise ValueError(
                f"sashimi: needs pooling factors of at least 2 and widening >= 1, got {list(self.pool)} and "
                f"{self.widening}."
            )
        for i in range(len(self.pool) + 1):
            self.stage(i).check(spec)

    def mixers(self, spec: TaskSpec) -> list[Mixer]:
        return [UNet(self, spec)]

    def layer(self, index: int, mixer: Mixer) -> Layer:
        return WholeLayer(mixer)


def _kinds(values: dict[str, Any]) -> list[str]:
    return sorted({values[key] for key in ("outer", "center") if key in values})
