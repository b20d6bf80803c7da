"""The budget of a board: how large the network of a mixer is, and which width would fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from subquad.suite.settings.config import Budget
from subquad.suite.training.run import TrainingRun

WIDTHS = range(8, 257, 4)
"""Widths that are tried to name one that fits."""


class Size(NamedTuple):
    """Size of a network."""

    num_parameters: int
    state_size: int
    """Elements that one sequence keeps between two steps, at the length of the task."""


def size_of(run: TrainingRun) -> Size:
    """The size of the network of a run."""
    network = run.model.build(run.task.spec)
    count = sum(parameter.numel() for parameter in network.parameters())
    return Size(count, network.state_size(run.task.spec.max_length))


def fault_of(board: str, budget: Budget, size: Size, fitting: Callable[[], int | None]) -> str:
    """A sentence that says by how much a network misses the budget and what to do, or "".

    fitting: gives a width with which it would not.
    """
    found = getattr(size, budget.of)
    if abs(found - budget.value) <= budget.within * budget.value:
        return ""
    what = "parameters" if budget.of == "num_parameters" else "numbers of state"
    wanted = f"{board} asks for {budget.value:,}, give or take {budget.within:.0%}"
    width = fitting()
    cure = f"--set model.d_model={width}" if width else "change an option of the model with --set"
    return f"the network has {found:,} {what} on {budget.task}, and {wanted}; {cure}"


def fitting_width(budget: Budget, sized: Callable[[int], Size]) -> int | None:
    """The width whose network comes nearest to the budget, or None where none is within it.

    sized: gives the size of the network at a width. ValueError for a width that the model does not take.
    """
    best: tuple[int, int] | None = None
    for width in WIDTHS:
        try:
            found = getattr(sized(width), budget.of)
        except ValueError:
            continue
        distance = abs(found - budget.value)
        best = min(best or (distance, width), (distance, width))
        if found > 2 * budget.value:
            break
    return best[1] if best is not None and best[0] <= budget.within * budget.value else None
