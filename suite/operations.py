"""Number of floating-point operations of a model: of a training step, of a forward pass, of one decoded token.

    operations = matrix products and convolutions, by torch.utils.flop_counter
               + operators of the model that count themselves, by the cost of their workload (`Model.counting`)

A multiply-add is two operations. What works on single elements (norms, activations, gates, embeddings, the optimizer)
is not counted. The backward pass is. What an operator computes again in its backward pass to save memory is part of its
cost, because every fast implementation does so; a layer that is computed again (`recompute: layer`) and padding are
not, because they change no value and depend on the machine. So a count depends on the settings of a run alone, and not
on its device, precision or backends.

Counting carries out a copy of the model on fake tensors, which have shapes and no values: it takes the host some tenths
of a second for each shape of batch, needs no memory of the device and draws no random numbers. A process counts models
of equal settings, such as those of several seeds, once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from subquad.suite.contracts import Batch
from subquad.suite.model import Model
from subquad.suite.training.readout import mean_loss


class OperationsUnknown(Exception):
    """The operations of a model cannot be counted, for the reason that it gives."""


_COUNTS: dict[Hashable, dict[Hashable, int]] = {}
"""The counts of a process, by the settings of the model."""


class OperationCounter:
    """Counts the operations of a model, whose parameters stay as they are. Counts of equal shapes are kept.

    settings: all that the model was built from; models with equal ones share their counts. None, or what cannot be
        hashed: the model shares them with no other.

    Of the tensors that the methods take, only shapes and dtypes count. They raise OperationsUnknown where the model
    cannot be carried out without values.
    """

    def __init__(self, model: Model, settings: Any = None) -> None:
        self._known: dict[Hashable, int] = {}
        if settings is not None:
            with contextlib.suppress(TypeError):
                self._known = _COUNTS.setdefault(settings, self._known)
        self._model: Model | None = None
        self._fault = ""
        try:
            # torch documents fake tensors, but has no public name for them
            from torch._subclasses.fake_tensor import FakeTensorMode

            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
            self._model = self._without_values(model)
        except Exception as error:
            self._fault = _one_line(error)

    def training_step(self, batch: Batch) -> int:
        """Operations of the forward and backward pass of a batch."""

        def step(model: Model, inputs: Tensor, targets: Tensor, positions: Tensor | None) -> None:
            model.train()
            mean_loss(model, inputs, targets.long(), None if positions is None else positions.long()).backward()
            model.zero_grad(set_to_none=True)

        return self._count("train", step, batch.inputs, batch.targets, batch.positions)

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> int:
        """Operations of a forward pass of inputs [B, T] or [B, T, C], with logits at the positions [B, P]."""

        @torch.no_grad()
        def forward(model: Model, inputs: Tensor, positions: Tensor | None) -> None:
            model.eval()
            model(inputs, None if positions is None else positions.long())

        return self._count("forward", forward, inputs, positions)

    def decoded_token(self, inputs: Tensor, length: int) -> int:
        """Operations of one step behind `length` positions, for one sequence. inputs [B] or [B, C]: of a position."""

        @torch.no_grad()
        def decode(model: Model, inputs: Tensor) -> None:
            model.eval()
            model.step(inputs[:1], model.init_state(1, length))

        return self._count(f"decode {length}", decode, inputs)

    def layer(self, x: Tensor, *, backward: bool) -> int:
        """Operations of the first mixer on x [B, T, D], forward and, if asked for, backward."""

        def layer(model: Model, x: Tensor) -> None:
            model.eval()
            with torch.set_grad_enabled(backward):
                y = model.mixers[0](x.requires_grad_(backward))
            if backward:
                y.sum().backward()
                model.zero_grad(set_to_none=True)

        return self._count(f"layer {backward}", layer, x)

    def _without_values(self, model: Model) -> Model:
        """A copy of a model whose parameters and buffers are fake tensors of a CPU, and whose layers are kept."""
        known: dict[int, Any] = {}
        with self._mode:
            for parameter in model.parameters():
                fake = torch.empty(parameter.shape, dtype=_widened(parameter.dtype))
                known[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
            for buffer in model.buffers():
                known[id(buffer)] = torch.empty(buffer.shape, dtype=_widened(buffer.dtype))
        config: Any = getattr(model, "config", None)
        if "recompute" in getattr(type(config), "model_fields", {}):
            # every layer that holds the options gets these in the copy
            known[id(config)] = config.model_copy(update={"recompute": "never"})
        return copy.deepcopy(model, known)

    def _count(self, what: str, call: Callable[..., None], *given: Tensor | None) -> int:
        key = what, *(None if x is None else (tuple(x.shape), x.dtype) for x in given)
        if key in self._known:
            return self._known[key]
        if self._model is None:
            raise OperationsUnknown(self._fault)
        try:
            with self._mode:
                fakes = [None if x is None else torch.empty(x.shape, dtype=_widened(x.dtype)) for x in given]
                with FlopCounterMode(display=False) as by_torch, self._model.counting() as by_operators:
                    call(self._model, *fakes)
        except Exception as error:
            raise OperationsUnknown(_one_line(error)) from None
        self._known[key] = by_torch.get_total_flops() + by_operators.total
        return self._known[key]


def _widened(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, which needs autocast where it meets float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _one_line(error: Exception) -> str:
    return f"operations cannot be counted ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
