"""The cases of a benchmark: operator x implementation x shape x dtype x pass, taken from the workloads by name."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from subquad.suite.bench.contracts import Workload
from subquad.suite.registry import nearest

SETS = {"quick": ("quick",), "paper": ("paper",), "all": ("quick", "paper"), "short": ("short",)}
"""Values of `--shapes` and the sets of a workload that each stands for; `short` has the quick ones, cut for a CPU."""
KINDS = {"torch": ("ours", "torch"), "peers": ("ours", "torch", "peer")}
"""Values of `--against` other than a revision, and the kinds of implementation that each stands for."""
NOT_INSTALLED = "not installed: "
"""Begins the reason why a case has no time where the package of its implementation is missing."""


@dataclass(frozen=True)
class Case:
    """One call that is timed. `backward`: the forward and the backward pass are timed together, as in training."""

    op: str
    implementation: str
    shape: tuple[tuple[str, int | str], ...]
    dtype: str
    backward: bool

    @property
    def label(self) -> str:
        """`B8 T2048 D2048 W4 channel-first`: sizes behind their letter, named variants as they are."""
        return label(dict(self.shape))

    @property
    def torch_dtype(self) -> Any:
        """The `torch.dtype` of that name."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def direction(self) -> str:
        return "forward+backward" if self.backward else "forward"

    @property
    def slice(self) -> str:
        """The column `slice` of a row: `B=8,T=2048,D=2048,W=4,dtype=bfloat16,pass=forward`."""
        pairs = (*self.shape, ("dtype", self.dtype), ("pass", self.direction))
        return ",".join(f"{key}={value}" for key, value in pairs)

    def __str__(self) -> str:
        return f"{self.op} {self.implementation} {self.label} {self.dtype} {self.direction}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "shape": tuple((key, value) for key, value in data["shape"])})


def spread(samples: Sequence[float]) -> float | None:
    """Half the interquartile range over the median; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle


def label(shape: Mapping[str, int | str]) -> str:
    """A shape in a few characters."""
    return " ".join(f"{key}{value}" if isinstance(value, int) else value for key, value in shape.items())


def is_not_installed(reason: str) -> bool:
    """Whether a reason says that a package is missing, also where the implementation itself or an old row says it."""
    # a missing part of a package has a dot in its name
    return reason.startswith(NOT_INSTALLED) or bool(re.fullmatch(r"ModuleNotFoundError: No module named '\w+'", reason))


def check_names(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """The operators that were named, or all operators if no name was given. ValueError for an unknown name."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown operator {name!r}{nearest(name, known)}; there are: {', '.join(known)}")
    return list(dict.fromkeys(names)) or known


def shapes_of(workload: Workload, sets: Sequence[str]) -> list[Mapping[str, int | str]]:
    """The shapes of several sets, each once."""
    named = {**workload.shapes, "short": [workload.short(shape) for shape in workload.shapes["quick"]]}
    found = {label(shape): shape for name in sets for shape in named.get(name, ())}
    return list(found.values())


def cases(workload: Workload, sets: Sequence[str], kinds: Sequence[str]) -> Iterator[Case]:
    """Every case of a workload; the implementations of one shape, dtype and pass stand together."""
    for shape in shapes_of(workload, sets):
        for dtype in workload.dtypes:
            for backward in (False, True) if workload.backward else (False,):
                for implementation in workload.implementations:
                    if implementation.kind in kinds:
                        name = str(dtype).removeprefix("torch.")
                        yield Case(workload.op, implementation.name, tuple(shape.items()), name, backward)


def series(
    workload: Workload,
    implementation: str,
    shape: Mapping[str, int | str],
    lengths: Sequence[int],
    dtype: str,
    backward: bool,
) -> list[Case]:
    """A case for each length T of a shape without T. ValueError, with the key, for what the workload does not have."""
    names = [found.name for found in workload.implementations]
    if implementation not in names:
        there_are = ", ".join(names)
        raise ValueError(
            f"implementation: unknown {implementation!r}{nearest(implementation, names)}; "
            f"of {workload.op} there are: {there_are}"
        )
    if backward and not workload.backward:
        raise ValueError(f"backward: {workload.op} has no gradient; leave it out")
    named = [found for shapes in workload.shapes.values() for found in shapes]
    if any("T" not in found for found in named):
        raise ValueError(f"op: {workload.op} has no length to sweep")
    letters = list(dict.fromkeys(tuple(letter for letter in found if letter != "T") for found in named))
    if not any(set(shape) == set(allowed) for allowed in letters):
        wanted = "; or ".join(", ".join(allowed) for allowed in letters)
        given = ", ".join(shape) or "nothing"
        raise ValueError(f"shape: {workload.op} takes {wanted} (T is in lengths), got {given}")
    for letter, value in shape.items():
        known = list(dict.fromkeys(found[letter] for found in named if letter in found))
        if isinstance(known[0], int) and not (isinstance(value, int) and value >= 1):
            raise ValueError(f"shape: {letter} of {workload.op} is a size of 1 or more, got {value!r}")
        if isinstance(known[0], str) and value not in known:
            raise ValueError(f"shape: {letter} of {workload.op} is one of {', '.join(map(str, known))}, got {value!r}")
    if min(lengths) < 1 or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths: they are 1 or more and different, got {', '.join(map(str, lengths))}")
    # the letters in the workload's own order
    order = next(tuple(found) for found in named if set(found) - {"T"} == set(shape))

    def case(length: int) -> Case:
        full = {**shape, "T": length}
        return Case(workload.op, implementation, tuple((key, full[key]) for key in order), dtype, backward)

    return [case(length) for length in lengths]
