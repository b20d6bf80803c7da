"""A layer of a network: a mixer and an optional channel mixer, each in a residual branch with a norm of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from subquad.models.parts.casts import autocast_dtype
from subquad.models.parts.channel import ChannelMixer, make_channel_mixer
from subquad.models.parts.mixer import Mixer, of_shape
from subquad.models.parts.norms import add_norm, make_norm
from subquad.models.parts.options import NetworkOptions
from subquad.models.parts.time_axis import LeftPadding, take_positions


class Layer(nn.Module):
    """A mixer and an optional channel mixer, each in a residual branch with a norm of its own.

    With norms before the branches a layer gives the residual stream and its last branch separately, because the norm
    of the next layer adds them in the same pass over memory; `joined` adds them where there is none.
    """

    def __init__(self, config: NetworkOptions, mixer: Mixer) -> None:
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

        It also raises where y has fewer digits than the run, since it has lost what the residual stream would keep, or
        more than float32 in a run of less than float64, since the next layer cannot read them.
        """
        y = of_shape(self.mixer, y, shape)
        wanted = autocast_dtype(x)
        if y.dtype not in (wanted, torch.promote_types(wanted, torch.float32)):
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
        y = of_shape(self.mixer, y, x.shape, "prefill")
        return *self._channel(*self._leave(self.mixer_norm, residual, y)), state

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        if not self.prenorm:
            y_t, state = self.mixer.step(x_t, state)
            y_t = of_shape(self.mixer, y_t, x_t.shape, "step")
            return joined(*self._channel(*self._leave(self.mixer_norm, x_t, y_t))), state
        x_t, state = self.mixer.branch_step(x_t, self.mixer_norm, state)
        if isinstance(self.channel, ChannelMixer) and self.channel_norm is not None:
            return self.channel.branch_step(x_t, self.channel_norm), state
        return joined(*self._channel(x_t, None)), state


def joined(residual: Tensor, branch: Tensor | None) -> Tensor:
    """The residual stream with what is still to be added to it."""
    return residual if branch is None else residual + branch
