"""Softmax attention, the quadratic baseline.

    o_t = sum_{j <= t} softmax_j(q_t k_j / sqrt(K)) v_j,   y_t = W_o concat_h(o_t)

Source: Vaswani et al. 2017, section 3.2. The network around it is that of GPT-2: norms before the branches, learned
positions, and an MLP four times as wide as the model.

Recurrent state: the keys and values of all positions so far, 2 T D elements per layer.

With `window` a query sees only so many last positions, its own included, j > t - window (Beltagy et al. 2020, section
3.1), and the state holds these. Based (models/based.py) has such layers. The `window_size` w of its code leaves w / 2
positions and the query's own: `window` is w / 2 + 1.

With `masked_heads` m, the first head sees the query's own position alone, the second one more, and so on up to the
m-th; the other heads see all positions. With `position: none` this is Hard-ALiBi (Jelassi et al. 2024, Repeat After Me,
arXiv 2402.01032; sjelassi/transformers_ssm_copy at 1f32ac617ff4951485ff391aef4fbb66bc4ebdd8,
synthetic_exps/models/hard_alibi_model.py), whose code masks 8 of 12 heads by default.

models/gated_attention.py gates the o_t of every head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.kernels.attention import attention, attention_step
from subquad.models.backbone import BackboneConfig
from subquad.models.parts.casts import autocast_dtype
from subquad.models.parts.linear import Linear, ResidualLinear, linear, split_linear, unbind
from subquad.models.parts.mixer import FusedStepMixer, Mixer
from subquad.models.parts.positions import Rotary
from subquad.models.parts.step import shared_norm, step_linear
from subquad.models.parts.time_axis import LeftPadding, blank, positions_seen, take_positions
from subquad.suite.bounds import Fraction, Width
from subquad.suite.contracts import TaskSpec

OutputGate = Literal["channel", "head"]
"""The gates of a head: one for each channel of its output, or one for the whole."""
ALL = 2**40
"""A window as long as any sequence."""
XPOS_MAX_LENGTH = 65536
"""Maximum length with xpos; beyond it, zeta^(t/512) overflows float32."""


@dataclass(frozen=True)
class KeyValueCache:
    """The state of attention: memory for a fixed number of positions, of which the first `count` are filled."""

    keys: Tensor
    """[B, capacity, H, K], rotated where the model has rotary positions. Positions from `count` on are finite."""
    values: Tensor
    """[B, capacity, H, K]."""
    count: Tensor
    """[B], int64: number of positions that each row has seen."""


class Attention(FusedStepMixer):
    """Multi-head causal attention, whose first `masked_heads` heads see the 1, 2, 3, .. last positions.

    Its state is a `KeyValueCache`, which has all positions in every head.
    """

    windows: Tensor | None
    """[H]: each head sees so many last positions; with None all heads see all."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        rotary: Rotary | None,
        masked_heads: int | None = None,
        output_gate: OutputGate | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.dropout = dropout
        self.qkv = Linear(d_model, 3 * d_model, bias=bias)
        self.out = ResidualLinear(d_model, d_model, bias=bias)
        self.gate = None
        if output_gate is not None:
            self.gate = Linear(d_model, d_model if output_gate == "channel" else num_heads, bias=bias)
        self.rotary = rotary
        sees = None
        if masked_heads is not None:
            sees = torch.tensor([*range(1, masked_heads + 1), *([ALL] * (num_heads - masked_heads))])
        self.register_buffer("windows", sees, persistent=False)

    def _project(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.num_heads, self.head_dim)
        if self.rotary is None:
            q, k, v = unbind(self.qkv(x).unflatten(-1, (3, *heads)), 2)
            return q, k, v
        width = self.out.in_features
        if self.qkv.bias is None and autocast_dtype(x).itemsize == 2:
            # the gradients of q and k lie in one tensor behind the rotation, that of v in another
            qk, v = split_linear(self.qkv, x, (2 * width, width))
        else:
            qk, v = self.qkv(x).split((2 * width, width), dim=-1)
        q, k = self.rotary(*unbind(qk.unflatten(-1, (2, *heads)), 2), time)
        return q, k, v.unflatten(-1, heads)

    def _attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        o = attention(q, k, v, positions=positions, window=self._window(), dropout=dropout)
        if self.gate is not None and positions is not None:
            x = take_positions(x, positions)
        return self.out(self._gated(o, x))

    def _gated(self, o: Tensor, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """The outputs o [..., H, K] of the heads side by side, with gates from x [..., D] behind `norm`, if any."""
        if self.gate is not None:
            gate = torch.sigmoid(step_linear(self.gate, x, norm=norm))
            o = o * gate.unflatten(-1, (self.num_heads, -1))
        return o.flatten(-2)

    def _window(self) -> int | Tensor | None:
        """Returns how many last positions a query sees, as one number or as one for each head; None means all."""
        return self.windows

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._project(x, torch.arange(x.shape[1], device=x.device))
        return self._attend(x, q, k, v)

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries at `positions` only, keys and values everywhere: P T instead of T^2 / 2 products per head."""
        time = torch.arange(x.shape[1], device=x.device)
        if self.rotary is not None:
            # the rotation of a query depends on its own position, so it comes before the selection
            q, k, v = self._project(x, time)
            q = take_positions(q.flatten(2), positions).unflatten(-1, (self.num_heads, self.head_dim))
        else:
            weight_q, weight_kv = self.qkv.weight.tensor_split([self.out.in_features])
            bias_q, bias_kv = (None, None) if self.qkv.bias is None else self.qkv.bias.tensor_split([len(weight_q)])
            heads = (self.num_heads, self.head_dim)
            q = linear(take_positions(x, positions), weight_q, bias_q).unflatten(-1, heads)
            k, v = unbind(linear(x, weight_kv, bias_kv).unflatten(-1, (2, *heads)), 2)
        return self._attend(x, q, k, v, positions)

    def init_state(self, batch_size: int, capacity: int) -> KeyValueCache:
        if self.rotary is not None:
            self.rotary.check_capacity(capacity)
        weight = self.qkv.weight
        keys, values = (weight.new_zeros(batch_size, capacity, self.num_heads, self.head_dim) for _ in range(2))
        return KeyValueCache(keys, values, torch.zeros(batch_size, dtype=torch.long, device=weight.device))

    def _step(
        self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        if self.gate is not None:
            x_t, norm = shared_norm(norm, x_t)
        heads = step_linear(self.qkv, x_t, norm=norm).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = heads.unbind(1)
        cos, sin = None, None
        if self.rotary is not None and self.rotary.log_zeta is None:
            cos, sin = self.rotary.cos, self.rotary.sin
        elif self.rotary is not None:
            # in a full cache, steps overwrite the last position
            now = state.count.clamp(max=state.keys.shape[1] - 1).unsqueeze(1)
            q, k = (x.squeeze(1) for x in self.rotary(q.unsqueeze(1), k.unsqueeze(1), now))
        o = attention_step(q, k, v, state.keys, state.values, state.count, cos=cos, sin=sin, window=self.windows)
        return step_linear(self.out, self._gated(o, x_t, norm), residual=residual), state

    def restart(self, state: KeyValueCache) -> None:
        # the steps never read keys and values behind the count, and clearing them would write many gigabytes
        state.count.zero_()

    def prefill(
        self, x: Tensor, state: KeyValueCache, padding: LeftPadding | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        steps = x.shape[1]
        _check_room(state, steps)
        # behind a row, padding can change nothing, and the positions of the cache are those of the row
        x = x if padding is None else padding.to_front(x)
        q, k, v = self._project(x, torch.arange(steps, device=x.device))
        state.keys[:, :steps], state.values[:, :steps] = k, v
        y = self._attend(x, q, k, v)
        count = positions_seen(x, padding)
        return y if padding is None else padding.to_back(y), replace(state, count=count)

    def state_size(self, length: int) -> int:
        return 2 * length * self.num_heads * self.head_dim


def _check_room(state: KeyValueCache, steps: int) -> None:
    """Raises ValueError where the cache has no room for so many positions."""
    if steps > (capacity := state.keys.shape[1]):
        raise ValueError(f"attention: its cache has room for {capacity} positions, got {steps}; raise capacity.")


class WindowAttention(Attention):
    """Attention to the last positions. Its state: a `KeyValueCache` of these, the newest of which is the last entry;
    its `count` goes on."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        rotary: Rotary | None,
        window: int,
        output_gate: OutputGate | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, dropout, bias, rotary, output_gate=output_gate)
        self.window = window

    def _window(self) -> int:
        return self.window

    def init_state(self, batch_size: int, capacity: int) -> KeyValueCache:
        if self.rotary is not None:
            self.rotary.check_capacity(capacity)
        return super().init_state(batch_size, min(capacity, self.window))

    def _step(
        self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        if self.gate is not None:
            x_t, norm = shared_norm(norm, x_t)
        heads = step_linear(self.qkv, x_t, norm=norm).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = (x.unsqueeze(1) for x in heads.unbind(1))
        if self.rotary is not None:
            q, k = self.rotary(q, k, state.count.unsqueeze(1))
        keys, values = (
            torch.cat([before[:, 1:], now.to(before.dtype)], dim=1)
            for before, now in ((state.keys, k), (state.values, v))
        )
        count = state.count + 1
        # entries in front of the first position are zeros
        seen = torch.arange(keys.shape[1], 0, -1, device=x_t.device) <= count[:, None]
        past_keys, past_values = (x.to(q.dtype).transpose(1, 2) for x in (keys, values))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), past_keys, past_values, attn_mask=seen[:, None, None])
        y = step_linear(self.out, self._gated(o.squeeze(2), x_t, norm), residual=residual)
        return y, KeyValueCache(keys, values, count)

    def prefill(
        self, x: Tensor, state: KeyValueCache, padding: LeftPadding | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        steps, kept = x.shape[1], state.keys.shape[1]
        if kept < self.window:
            # it has all positions, because the capacity is less than the window
            _check_room(state, steps)
        # behind a row, padding can change nothing, and rotations are those of the row's own positions
        x = x if padding is None else padding.to_front(x)
        q, k, v = self._project(x, torch.arange(steps, device=x.device))
        y = self._attend(x, q, k, v)
        count = positions_seen(x, padding)
        if padding is not None:
            y = padding.to_back(y)
            k, v = (blank(padding.to_back(z.flatten(2)), padding).view_as(z) for z in (k, v))
        keys, values = (
            F.pad(new, (0, 0, 0, 0, max(0, kept - steps), 0))[:, -kept:].to(before.dtype)
            for before, new in ((state.keys, k), (state.values, v))
        )
        return y, KeyValueCache(keys, values, count)

    def state_size(self, length: int) -> int:
        return super().state_size(min(length, self.window))


class AttentionConfig(BackboneConfig):
    """A transformer in the style of GPT-2, the baseline of H3 (Fu et al. 2023), table 2."""

    positions: ClassVar[tuple[str, ...]] = ("none", "learned", "sinusoidal", "rope", "xpos")
    heads_divide: ClassVar[tuple[str, ...]] = ("d_model",)
    left_out_when_off: ClassVar[tuple[str, ...]] = (*BackboneConfig.left_out_when_off, "window", "masked_heads")

    position: Literal["none", "learned", "sinusoidal", "rope", "xpos"] = "learned"
    num_heads: Width = 1
    attention_dropout: Fraction = 0.0
    """Dropout on the attention weights."""
    bias: bool = True
    """Biases of the attention projections."""
    window: Width | None = None
    """Positions that a query sees, its own included; None: all up to there."""
    masked_heads: Width | None = None
    """Number of heads, from the first on, of which head i = 1, 2, .. sees the i last positions, also the query's own.
    None: all heads see all positions."""

    @property
    def output_gate(self) -> OutputGate | None:
        """The kind of output gates; None: there are none."""
        return None

    def check(self, spec: TaskSpec) -> None:
        super().check(spec)
        name = type(self).__name__
        head_dim = self.d_model // self.num_heads
        if self.masked_heads is not None and self.masked_heads > self.num_heads:
            raise ValueError(
                f"{name}: masked_heads={self.masked_heads} must be at most num_heads={self.num_heads}; change one of "
                "them."
            )
        if self.masked_heads is not None and self.window is not None:
            raise ValueError(f"{name}: window and masked_heads both say what a head sees; leave one of them out.")
        if self.position in ("rope", "xpos") and head_dim % 2:
            raise ValueError(
                f"{name}: position={self.position!r} rotates pairs of channels and needs an even head size, "
                f"got d_model / num_heads = {head_dim}; change num_heads or d_model."
            )
        if self.position == "xpos" and spec.max_length > XPOS_MAX_LENGTH:
            raise ValueError(
                f"{name}: position='xpos' overflows beyond {XPOS_MAX_LENGTH} positions, got max_length="
                f"{spec.max_length}; use 'rope' or shorter sequences."
            )

    def mixer(self, layer: int, spec: TaskSpec) -> Mixer:
        rotary = None
        if self.position in ("rope", "xpos"):
            rotary = Rotary(self.d_model // self.num_heads, spec.max_length, xpos=self.position == "xpos")
        options = (self.d_model, self.num_heads, self.attention_dropout, self.bias, rotary)
        if self.window is not None:
            return WindowAttention(*options, self.window, self.output_gate)
        return Attention(*options, self.masked_heads, self.output_gate)
