"""Rules for numbers in settings: they are finite, `true` and `false` are none, and `1e3` is the integer 1000."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel


def check_finite(value: Any, where: str) -> None:
    """Raises ValueError, beginning with `where`, if NaN or infinity stands anywhere in a tree of settings."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}expected a finite number, got {value}")
    for key, part in _parts(value):
        check_finite(part, f"{where}{key}: ")


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


@dataclass(frozen=True)
class Wanted:
    """Kinds of values that the type of an option allows, at any depth of a container."""

    anything: bool
    """Whether any value is allowed, because the type is Any or contains a model, which checks its own options."""
    number: bool
    boolean: bool
    integer: bool
    """Whether integers are allowed, and text, which could be mistaken for one, is not."""


@functools.cache
def wanted_by(cls: type[BaseModel], field: str) -> Wanted:
    """Kinds of values that one option of a pydantic model allows; of a name that is no option, whatever is finite."""
    option = cls.model_fields.get(field)
    leaves = [Any] if option is None else list(_leaves(option.annotation))
    types = [leaf if isinstance(leaf, type) else type(leaf) for leaf in leaves]
    return Wanted(
        anything=Any in leaves or any(issubclass(kind, BaseModel) for kind in types),
        number=int in types or float in types,
        boolean=bool in types,
        integer=int in types and str not in leaves,
    )


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types, and the values of a Literal, that an annotation is composed of."""
    inner = get_args(annotation)
    for part in inner:
        yield from _leaves(part)
    if not inner:
        yield annotation


def strict(value: Any, wanted: Wanted, where: str = "") -> Any:
    """The value, with integers such as `1e3` that were read as text converted.

    ValueError for NaN, infinity, and `true` or `false` in place of a number.
    """
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        # most options are given such a value, which needs none of the checks below
        return value
    check_finite(value, where)
    if wanted.anything:
        return value
    if isinstance(value, bool) and wanted.number and not wanted.boolean:
        raise ValueError(f"{where}expected a number, got {str(value).lower()}")
    if isinstance(value, str) and wanted.integer:
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and "e" in value.lower() else value
    if isinstance(value, Mapping):
        return {key: strict(part, wanted, f"{where}{key}: ") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(part, wanted, f"{where}{index}: ") for index, part in enumerate(value)]
    return value
