"""The base class of causal sequence mixers, and what is done with their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from subquad.models.parts.casts import autocast_dtype
from subquad.models.parts.norms import add_norm
from subquad.models.parts.time_axis import LeftPadding, take_positions
from subquad.suite.state import map_tensors, tensors


def of_shape(mixer: nn.Module, y: Any, shape: Sequence[int], method: str = "forward") -> Tensor:
    """Returns y, the result of a method of the mixer. Raises ValueError unless it is a tensor of this shape."""
    if isinstance(y, Tensor) and y.shape == shape:
        return y
    got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
    axes = "[B, D]" if len(shape) == 2 else "[B, T, D]"
    raise ValueError(f"{type(mixer).__name__}.{method} must return {axes} = {list(shape)}, got {got}.")


class Mixer(nn.Module):
    """Base class of causal sequence mixers, [B, T, D] to [B, T, D].

    The backbone gives every `nn.Linear` and `nn.Embedding` its general initialisation. Then it calls
    `reset_parameters`, in which a mixer initialises what its paper initialises differently. A mixer built on one
    operator keeps it as its attribute `operator`, so that it can be observed.
    """

    rows_skip = False
    """Whether some rows of a batch may keep their state at a step while others go on, as below the first stage of a
    U-Net. Then a number that all rows share cannot tell how many positions a row has seen."""
    ssm_names: ClassVar[tuple[str, ...]] = ()
    """Attributes with the parameters that `ssm_parameters` gives; one that is None is left out."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        place = {
            name: next(i for i, base in enumerate(cls.__mro__) if name in vars(base))
            for name in ("forward", "forward_at", "prefill")
        }
        for name in ("forward_at", "prefill"):
            if place["forward"] < place[name]:
                # the method of a class farther away computes what the `forward` of that class computes
                setattr(cls, name, vars(Mixer)[name])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] to y [B, T, D]."""
        raise self._missing("forward(self, x)")

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """`forward` at some positions only: x [B, T, D] and ascending positions [B, P] to y [B, P, D].

        The last layer of a network needs no others. A mixer that saves work by it overrides this.
        """
        return take_positions(of_shape(self, self(x), x.shape), positions)

    def init_state(self, batch_size: int, capacity: int) -> Any:
        """The state before the first step: tensors [B, ...], some with the number [B] of positions that a row has seen.

        capacity: number of positions that a state which keeps all of them has room for. Its shapes do not change from
        step to step. ValueError where the mixer cannot see so many positions.
        """
        raise self._missing("init_state(self, batch_size, capacity)")

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x_t [B, D] and the state to y_t [B, D] and the next state. Step by step, this gives what `forward` gives.

        The tensors of the state may be changed in place.
        """
        raise self._missing("step(self, x_t, state)")

    def branch_step(self, x_t: Tensor, norm: nn.Module, state: Any) -> tuple[Tensor, Any]:
        """x_t + y_t and the next state, where y_t is the `step` of norm(x_t): a residual branch behind its norm.

        A mixer that begins and ends with a linear map is a `FusedStepMixer`, which needs no kernels for norm and sum.
        """
        y_t, state = self.step(add_norm(norm, None, x_t, autocast_dtype(x_t))[0], state)
        return x_t + of_shape(self, y_t, x_t.shape, "step"), state

    def restart(self, state: Any) -> None:
        """Sets a state back to that before the first step, in place."""
        for part in tensors(state):
            part.zero_()

    def prefill(self, x: Tensor, state: Any, padding: LeftPadding | None = None) -> tuple[Tensor, Any]:
        """`forward` together with the state behind the last position: x [B, T, D] to y [B, T, D] and that state.

        state: that before the first step; its tensors may be changed in place.
        padding: positions of x in front of the rows that do not count; y has arbitrary finite values there.

        This is done step by step here. A mixer whose operator returns its final state overrides it.
        """
        outputs = []
        for t in range(x.shape[1]):
            before = state if padding is None else map_tensors(torch.clone, state)
            y_t, state = self.step(x[:, t], state)
            if padding is not None:
                state = choose_rows(padding.time[:, t] >= 0, state, before)
            outputs.append(of_shape(self, y_t, x[:, t].shape, "step"))
        return torch.stack(outputs, dim=1), state

    def state_size(self, length: int) -> int:
        """Number of elements kept for one sequence after `length` steps. A complex one is two; counts are left out."""
        raise self._missing("state_size(self, length)")

    def ssm_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by name that have a learning rate of their own (`ssm_lr`) and no weight decay."""
        found = {name: getattr(self, name) for name in self.ssm_names}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def reset_parameters(self) -> None:
        """Initialises the parameters that differ from the backbone's general initialisation."""

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} defines no method {method}")


class FusedStepMixer(Mixer):
    """A mixer that begins and ends with a linear map, so that the kernels of its step compute norm and sum of a branch.

    It defines `_step`, with `step_linear` for both maps, in place of `step` and `branch_step`. A class derived from it
    may define a `step` of its own.
    """

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self._step(x_t, None, None, state)

    def branch_step(self, x_t: Tensor, norm: nn.Module, state: Any) -> tuple[Tensor, Any]:
        if type(self).step is not FusedStepMixer.step:
            return super().branch_step(x_t, norm, state)
        return self._step(x_t, norm, x_t, state)

    def _step(self, x_t: Tensor, norm: nn.Module | None, residual: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Returns residual + y_t and the next state, where y_t is the `step` of norm(x_t).

        norm, residual: None leaves it out.
        """
        raise self._missing("_step(self, x_t, norm, residual, state)")


def choose_rows(rows: Tensor, first: Any, second: Any) -> Any:
    """Merges two states: the rows [B] come from the first, the others from the second."""
    others = tensors(second)

    def choose(part: Tensor) -> Tensor:
        other = next(others)
        # a number that all rows share has no rows
        return torch.where(rows.view(-1, *[1] * (part.ndim - 1)), part, other) if part.ndim else part

    return map_tensors(choose, first)


@runtime_checkable
class Rescalable(Protocol):
    """A layer whose step sizes can follow the sampling rate of its inputs."""

    step_scale: float
    """Factor of its step sizes; 1 at the sampling rate trained at."""
