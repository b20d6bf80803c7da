"""The progress of a run: the position of its learning rate, when it evaluates, and when it ends.

A run ends after a number of steps, or once its budget is spent: a time, or a number of operations. The schedule of the
learning rate and the evaluations then follow the share of the budget that is spent, so that the rate has come down when
the budget ends, however fast the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from subquad.suite.runs import RunEnded
from subquad.suite.training.config import Budget
from subquad.suite.training.measure import Stopwatch
from subquad.suite.training.spending import Spending

WHOLE = 1_000_000.0
"""The whole of a budget in the unit of `BudgetCourse.position`."""


class Course:
    """The course of a run of `total` steps, which evaluates after every `eval_steps` and at its end."""

    def __init__(self, total: int, eval_steps: int) -> None:
        self.total, self.eval_steps = total, eval_steps

    def position(self, step: int) -> tuple[float, float]:
        """The position of the run after `step` steps and the position of its end, in one unit."""
        return step, self.total

    def goes_on(self, step: int) -> bool:
        """Whether there is a step behind `step` steps."""
        return step < self.total

    def wants_clock(self, step: int) -> bool:
        """Whether the clock must be read after `step` steps to know if the run evaluates."""
        return self.evaluates(step)

    def evaluates(self, step: int) -> bool:
        """Whether the run evaluates after `step` steps, at which the clock was read."""
        return step % self.eval_steps == 0 or step == self.total

    def evaluated(self) -> None:
        """Notes that it did."""

    def expected(self, step: int) -> int:
        """The number of steps that the run will take, for a display."""
        return self.total


class BudgetCourse(Course):
    """The course of a run that ends once a budget is spent."""

    def __init__(self, budget: Budget) -> None:
        self.evaluations = budget.evaluations

    def share(self) -> float:
        """The share of the budget that is spent. Between two readings of the clock it may be an estimate."""
        raise NotImplementedError

    def known(self) -> float:
        """The share of the budget that was spent when the clock was last read."""
        return self.share()

    def restart(self, done: int | None) -> None:
        """Takes up a run that has spent some of its budget. done: that of its checkpoint; older ones have none."""
        self.done = self._marks(self.known()) if done is None else done

    done = 0
    """Evaluations that are due at the share that was spent at the last of them."""

    def _marks(self, share: float) -> int:
        # without the rounding of sums, an evaluation at a tenth might be missed
        return min(self.evaluations, math.floor(share * self.evaluations + 1e-9))

    def position(self, step: int) -> tuple[float, float]:
        return WHOLE * min(1.0, self.share()), WHOLE

    def evaluates(self, step: int) -> bool:
        return self._marks(self.known()) > self.done

    def evaluated(self) -> None:
        self.done = self._marks(self.known())

    def expected(self, step: int) -> int:
        share = self.share()
        return max(step, 1) if share <= 0 else max(step, round(step / min(1.0, share)))


class SecondsCourse(BudgetCourse):
    """The course of a run that trains for a number of seconds on its device."""

    def __init__(self, budget: Budget, watch: Stopwatch) -> None:
        super().__init__(budget)
        assert budget.seconds is not None
        self.seconds, self.watch = budget.seconds, watch

    def share(self) -> float:
        return (self.watch.total + self.watch.open_seconds) / self.seconds

    def known(self) -> float:
        return self.watch.total / self.seconds

    def goes_on(self, step: int) -> bool:
        # a run that was stopped at its last step, whose time was known only then, has yet to evaluate
        return self.known() < 1 or self.done < self.evaluations

    def wants_clock(self, step: int) -> bool:
        # a device works on after the host has launched its steps, so how long one takes is known once it was awaited
        return not self.watch.steps_per_s or self._marks(self.share()) > self.done


class FlopsCourse(BudgetCourse):
    """The course of a run that takes as many steps as a number of operations has room for.

    next_step: operations of the step behind so many; None where they cannot be counted.
    """

    def __init__(self, budget: Budget, spending: Spending, next_step: Callable[[int], int | None]) -> None:
        super().__init__(budget)
        assert budget.flops is not None
        self.flops, self.spending, self.next_step = budget.flops, spending, next_step

    def share(self) -> float:
        return (self.spending.flops or 0) / self.flops

    def goes_on(self, step: int) -> bool:
        more = self.next_step(step)
        if self.spending.flops is None or more is None:
            raise RunEnded("failed", f"train.budget.flops: {self.spending.unknown}; give seconds, steps or epochs")
        if step == 0 and more > self.flops:
            raise RunEnded("failed", f"train.budget.flops={self.flops:g}: one step takes {more:.3g}; raise it")
        return self.spending.flops + more <= self.flops

    def evaluates(self, step: int) -> bool:
        return super().evaluates(step) or not self.goes_on(step)
