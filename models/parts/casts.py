"""The dtype of autocast, and the weights of all linear maps in it, cast once for a forward pass and in one launch.

Autocast casts every weight where it is used, and every gradient of a weight back, in kernels that take less time than
their launch: two for each matrix. Here all matrices of a network are cast by one call, and so are their gradients. The
values are the same bits. Parameters, optimizer and checkpoints stay as they are: the casts live as long as the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from subquad.kernels.autograd import Function
from subquad.kernels.positions import LARGEST_LOG as LARGEST_LOG
from subquad.kernels.positions import at_least_float32 as at_least_float32
from subquad.kernels.positions import bounded_exp as bounded_exp


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to a linear map on the device of x; without autocast that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def as_autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast gives to a linear map. The residual stream stays in float32 there."""
    return x.to(autocast_dtype(x))


def rate_of(log: Tensor) -> Tensor:
    """The rate e^log, in float32 or wider. Its gradient is finite for every log.

    A rate that overflows decays a state to exactly zero, so outputs are finite, but the gradient is zero times
    infinity. Hence the log is bounded where gradients are recorded, at which outputs are the same.
    """
    return bounded_exp(log) if torch.is_grad_enabled() else at_least_float32(log).exp()


class CastAll(Function):
    """(dtype, tensors) to the same tensors in that dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        results = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        torch._foreach_copy_(results, list(tensors))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # recorded for a second derivative
            return None, *(None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
        pairs = [
            (gradient, torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            if gradient is not None
        ]
        if pairs:
            torch._foreach_copy_([wide for _, wide in pairs], [gradient for gradient, _ in pairs])
        wide = iter(pairs)
        return None, *(None if gradient is None else next(wide)[1] for gradient in gradients)


@contextlib.contextmanager
def cast_once(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Within this context, the linear maps among the modules have weights and biases in the dtype of autocast.

    It does nothing without autocast, and inside `torch.compile`, which fuses casts. A module that multiplies parameters
    of its own gives their names in its attribute `matrices`. One whose parts multiply outside of autocast says so with
    the attribute `outside_autocast`, and its parts are left as they are.
    """
    if torch.compiler.is_compiling() or not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    places = [
        (module, name, parameter)
        for module, name, parameter in _factors(modules)
        # a share of a parameter (a DTensor of FSDP) is cast once its layer has gathered the whole
        if parameter.dtype == torch.float32 and not hasattr(parameter, "to_local")
    ]
    casts = CastAll.apply(dtype, *(parameter for _, _, parameter in places)) if places else ()
    # as torch.func.functional_call does it: a module finds its parameters in this dictionary
    table: dict[str, Any]
    for (module, name, _), cast in zip(places, casts, strict=True):
        table = module._parameters
        table[name] = cast
    try:
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def _factors(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The parameters that are factors or biases of matrix products, with the modules that have them, by their names."""
    for module in modules:
        if not getattr(module, "outside_autocast", False):
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, nn.Linear) or name in getattr(module, "matrices", ()):
                    yield module, name, parameter
            yield from _factors(module.children())
