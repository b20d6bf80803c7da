"""Shared code of the operators' autograd functions: base classes, whether a gradient is recorded, saved tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

Gradients = tuple[Tensor | None, ...]


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these tensors, or one has a tangent of forward mode.

    None stands for an input that is not given.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return True
    return _has_tangent(*tensors)


def _has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one of these tensors carries a derivative of `torch.autograd.forward_ad`."""
    # torch counts levels of dual numbers from 0, and outside of them no tensor has to be asked
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def kept(state: Tensor) -> Tensor:
    """A state as backward may read it: a copy where gradients are recorded, because the next step overwrites it."""
    return state.clone() if torch.is_grad_enabled() else state


class _Apply:
    """`apply` of a function, which is torch's own, as `torch.compile` wants it, unless a transform is at work."""

    def __get__(self, instance: Any, function: type) -> Callable[..., Any]:
        if not _in_a_transform():
            return types.MethodType(torch.autograd.Function.apply.__func__, function)  # type: ignore[attr-defined]
        raise RuntimeError(
            f"{_name(function)}: torch.func.grad, vmap and the other transforms of torch.func do not work on it; "
            "take gradients by backward() or torch.autograd.grad, and loop over examples"
        )


_in_a_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
"""Whether torch.func is at work; where torch has another name for it, its own words refuse what has no rule for it."""


class Function(torch.autograd.Function):
    """`torch.autograd.Function` whose gradients are in memory as they are, which kernels and views by pairs rely on.

    It says in one sentence that the transforms of `torch.func` cannot enter it; torch says so of forward mode.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "backward" in cls.__dict__:
            cls.backward = staticmethod(_on_resolved_signs(cls.backward))  # type: ignore[method-assign]

    apply = _Apply()


class OnceDifferentiable(Function):
    """A function whose gradient cannot be differentiated again: it is computed by kernels, or in place.

    A derivative of its gradient is refused on every path, also where the loss is linear in the output and where the
    derivative is taken in some of the inputs only. `torch.autograd.function.once_differentiable` leaves both out.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "backward" in cls.__dict__:
            cls.backward = staticmethod(_once(_name(cls), cls.backward))  # type: ignore[method-assign]


def _on_resolved_signs(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The backward pass on gradients of which none is a lazy conjugate or negative, as `torch.conj` gives them."""

    @functools.wraps(backward)
    def resolved(ctx: Any, *gradients: Tensor | None) -> Gradients:
        return backward(ctx, *[_with_signs(x) for x in gradients])

    return resolved


def _with_signs(x: Tensor | None) -> Tensor | None:
    # the compiler knows no lazy signs, and stops at these questions
    if x is None or torch.compiler.is_compiling() or not (x.is_neg() or x.is_conj()):
        return x
    return x.resolve_conj().resolve_neg()


def _name(function: type) -> str:
    """The operator of a function, or its module and name where it belongs to none."""
    operator = function.__module__.rpartition("kernels.")[2].split(".")[0]
    return operator if "kernels." in function.__module__ else f"{function.__module__}.{function.__qualname__}"


def _once(name: str, backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The backward pass, whose results refuse to be differentiated where torch records the backward pass."""

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Gradients:
        if _has_tangent(*gradients):
            raise RuntimeError(_refusal(name))
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        others: list[Tensor] = getattr(ctx, "not_saved", [])
        sources = [x for x in (*gradients, *ctx.saved_tensors) if x is not None and x.requires_grad]
        reached = {*(get_gradient_edge(x)[:2] for x in sources), *(_copied_from(x) for x in others)}
        if any(edge[0] is not None and edge not in reached for edge in ctx.next_functions):
            # an input is known no more, so a derivative in it could pass by the error of a later backward pass
            raise RuntimeError(_refusal(name))
        given = [x for x in results if x is not None]
        if sources or others:
            given = _Refusal.apply(name, len(given), *given, *sources, *others)
        refusing = iter(given)
        return tuple(None if x is None else next(refusing) for x in results)

    return once


def _copied_from(x: Tensor) -> Any:
    """The edge of the graph that leads to the tensor of which x is a copy."""
    assert x.grad_fn is not None
    return x.grad_fn.next_functions[0]


def _refusal(name: str) -> str:
    return (
        f"{name} cannot be differentiated twice: its gradient, recorded by create_graph=True, has no derivative; "
        "write the part of the network that needs one with torch's own operations"
    )


class _Refusal(torch.autograd.Function):
    """(name, count, tensors) to copies of the first `count` tensors, in whose backward pass an error names the cause.

    The tensors behind them are all that they are computed from.
    """

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> Gradients:
        ctx.name = name
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        raise RuntimeError(_refusal(ctx.name))


def not_saved(ctx: Any, *inputs: Tensor | None) -> None:
    """Names the inputs that the backward pass does not save; their memory is not kept.

    Only so does a derivative of the gradient in them meet the error of `OnceDifferentiable`.
    """
    if torch.compiler.is_compiling():
        return
    with torch.enable_grad():
        ctx.not_saved = [x.to("meta") for x in inputs if x is not None and x.requires_grad]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward(*tensors)` for kernels that rely on the strides of what they read; see `saved`."""
    ctx.save_for_backward(*tensors)
    ctx.saved_strides = [None if x is None else x.stride() for x in tensors]


def saved(ctx: Any) -> list[Any]:
    """The tensors of `save` with their original strides, which a saved-tensor hook may have changed."""
    tensors = list(ctx.saved_tensors)
    if [None if x is None else x.stride() for x in tensors] == ctx.saved_strides:
        return tensors
    return [
        x if x is None else _with_strides(x, strides) for x, strides in zip(tensors, ctx.saved_strides, strict=True)
    ]


def _with_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    # an expanded axis has stride 0 and one element in memory
    once = x[tuple(slice(1) if stride == 0 else slice(None) for stride in strides)]
    return torch.empty_strided(once.shape, strides, dtype=x.dtype, device=x.device).copy_(once).expand(x.shape)
