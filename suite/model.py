"""The base class of models: a task-ready network of encoder, sequence mixers and readout, with defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.suite.contracts import IGNORE, ParamGroup


@runtime_checkable
class Convolution(Protocol):
    """A part of a mixer that convolves every channel with a filter of its own, y = K * x + D x, whatever x is.

    It is known by its method alone, so that any torch module can be one. It may also have `eigenvalues()`, those of the
    state matrix of a linear state space model, complex [N] or [D, N], in units of 1 / dt; and `log_dt`, the logarithms
    of learned step sizes.
    """

    def kernel(self, length: int) -> Tensor:
        """K [D, length] at the lags 0, 1, ...: the response to an impulse, without the skip D at lag 0."""
        ...


class Counted(Protocol):
    """A number of operations that grows while it is open."""

    @property
    def total(self) -> int: ...


class NoOperators:
    """The count of a model that calls no operators of its own."""

    total = 0


class Model(nn.Module):
    """Base class of models. One defines `forward` and `state_size`; all else has a default.

    `forward` is `readout(hidden(inputs, positions))`. A model whose readout is apart from its layers defines these two
    and `loss`, so that no tensor need hold the logits of all positions; by default the hidden states are the logits. A
    model that can be evaluated one position after the other defines `init_state`, `restart`, `prefill` and `step`.
    """

    config: Any
    """The options that it was built from."""
    belongs_to_task: ClassVar[tuple[str, ...]] = ()
    """Parts that mean nothing on another task, and so are not taken from weights that were trained on one."""

    @property
    def mixers(self) -> Sequence[nn.Module]:
        """The sequence mixers in the order of their layers, [B, T, `config.d_model`] to the same, to be timed alone."""
        return ()

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, P, num_classes] at `positions`, or [B, num_classes] for a sequence readout."""
        raise NotImplementedError

    def hidden(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """The input of the readout, [B, P, ...], or [...] with one or more rows a sequence for a sequence readout."""
        logits: Tensor = self(inputs, positions)
        return logits

    def readout(self, hidden: Tensor) -> Tensor:
        """Logits [B, P, num_classes] or [B, num_classes]. For a token readout, each row depends on its own states."""
        return hidden

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `readout(hidden)`, a float32 scalar; targets are `IGNORE` where there is no label."""
        logits = self.readout(hidden).float()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE)

    def state_size(self, length: int) -> int:
        """Elements that the mixers keep for one sequence after `length` steps."""
        raise NotImplementedError

    def param_groups(self, no_decay: tuple[str, ...] = ()) -> list[ParamGroup]:
        """Groups covering every trainable parameter once; `no_decay` names kinds: `bias`, `norm`, `embedding`."""
        return [ParamGroup("weight", [parameter for parameter in self.parameters() if parameter.requires_grad])]

    @contextlib.contextmanager
    def at_rate(self, rate: float) -> Iterator[bool]:
        """A context for inputs sampled at `rate` times the rate trained at; gives whether any step size follows."""
        yield False

    def convolutions(self) -> Mapping[str, Convolution]:
        """The convolutions of all layers, by the name of their slice: `layer=0,filter=ssm`."""
        return {}

    def counting(self) -> contextlib.AbstractContextManager[Counted]:
        """A context in which operators that torch's counter of operations does not see count themselves.

        In it they get tensors without values. A model that calls operators of `kernels` gives
        `kernels.operations.count_operations()`; by default there are none.
        """
        return contextlib.nullcontext(NoOperators())

    def init_state(self, batch_size: int, capacity: int | None = None) -> Any:
        """The state before the first position. ValueError for a model that reads the future.

        capacity: number of positions that a state which keeps all of them has room for; None: the task's max_length.
        """
        raise ValueError(f"{type(self).__name__}: it has no step; use forward.")

    def restart(self, state: Any) -> None:
        """Sets a state back to that before the first position, in place."""
        raise NotImplementedError

    def prefill(
        self, inputs: Tensor, lengths: Tensor | None = None, *, state: Any = None, capacity: int | None = None
    ) -> tuple[Tensor, Any]:
        """Logits [B, num_classes] of the last position of inputs [B, T] or [B, T, C], and the state behind it.

        lengths: [B], 1 to T: positions of each row that are no padding, which stands in front. None: all.
        state: one of `init_state` or after `restart`, changed in place; None: a new one of that capacity.
        """
        raise NotImplementedError

    def step(self, inputs_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """inputs_t [B] or [B, C] to logits [B, num_classes] of this position, and the next state."""
        raise NotImplementedError
