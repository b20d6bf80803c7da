"""Learning-rate schedules as pure functions of the step, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from subquad.suite.training.config import TrainConfig


def lr_factor(train: TrainConfig, step: float, total_steps: float, epoch_steps: int) -> float:
    """The learning rate of `step` (counted from 0) over `train.lr`; multiplies the rate of every parameter group.

    Where a run has a budget, `step` and `total_steps` are what it has spent and the whole of it, in any unit.

    Warm-up: linear from `warmup_from` to `lr`. Then with p = (step - warmup) / (total - warmup):
    cosine: min + (lr - min) (1 + cos(pi p)) / 2;  linear: lr + (min - lr) p;  constant and plateau: lr.
    """
    if train.schedule_unit == "epoch":
        step -= step % epoch_steps
    warmup = train.warmup_steps or round(train.warmup_fraction * total_steps)
    if step < warmup:
        rate = train.warmup_from + (train.lr - train.warmup_from) * step / warmup
    else:
        progress = (step - warmup) / max(1, total_steps - warmup)
        if train.schedule == "cosine":
            rate = train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
        elif train.schedule == "linear":
            rate = train.lr + (train.min_lr - train.lr) * progress
        else:
            rate = train.lr
    return rate / train.lr


class Plateau:
    """Multiplies the rate by `plateau_factor` when the validation metric has not improved for `plateau_patience`.

    Departure from torch's `ReduceLROnPlateau`: any improvement counts, as with `threshold=0`; its default asks for one
    of 1e-4 of the best value.
    """

    def __init__(self, train: TrainConfig) -> None:
        self.train = train
        self.factor = 1.0
        self.best = -math.inf
        self.stalled = 0

    def update(self, value: float) -> None:
        """Takes the newest validation value; larger is better."""
        if value > self.best:
            self.best, self.stalled = value, 0
            return
        self.stalled += 1
        if self.stalled > self.train.plateau_patience:
            self.factor *= self.train.plateau_factor
            self.stalled = 0

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor, "best": self.best, "stalled": self.stalled}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor, self.best, self.stalled = state["factor"], state["best"], int(state["stalled"])
