"""The state of a model between two steps: tensors in nested tuples, lists and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, in a fixed order. ValueError where a part could hide tensors."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from tensors(part)
    elif is_dataclass(state):
        for item in fields(state):
            yield from tensors(getattr(state, item.name))
    else:
        _check_plain(state)


def map_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The state with `function` applied to every tensor, in the order of `tensors`."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, (tuple, list)):
        parts = [map_tensors(function, part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{item.name: map_tensors(function, getattr(state, item.name)) for item in fields(state)})
    _check_plain(state)
    return state


def _check_plain(part: Any) -> None:
    # the tensors of a dictionary or an object would be neither counted nor set back, without a word
    if not (part is None or isinstance(part, (bool, int, float, str))):
        raise ValueError(f"a state has a {type(part).__name__}; keep its tensors in tuples, lists or dataclasses")


def copy_into(old: Any, new: Any) -> None:
    """Copies the values of a state into the tensors of another one, except where both share a tensor."""
    for target, source in zip(tensors(old), tensors(new), strict=True):
        if target is not source:
            target.copy_(source)
