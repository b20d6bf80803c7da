"""Decides by the validation metrics of a run: its learning rate, the weights that are kept, and an early stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from subquad.suite.metrics import smaller_is_better
from subquad.suite.training.config import TrainConfig
from subquad.suite.training.schedule import Plateau


class Selection:
    """Decides after each evaluation on the validation split.

    plateau:  the factor of the learning rate, with `schedule: plateau`.
    weights:  those with the best `keep_metric` so far, with `keep: best`, else None.
    done:     true once the rule of `early_stop` is fulfilled.
    accuracy: that of the last evaluation, None before it or where the task has none.
    """

    def __init__(self, train: TrainConfig) -> None:
        self.train = train
        self.plateau = Plateau(train)
        self.weights: dict[str, Tensor] | None = None
        self.done = False
        self.accuracy: float | None = None
        self._best_kept = -math.inf
        self._best_value, self._stalled = -math.inf, 0

    def update(self, means: Mapping[str, float], weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Takes the validation metrics of the present weights; copies those weights where they are the best."""
        train = self.train
        self.accuracy = means.get("accuracy")
        if train.schedule == "plateau":
            self.plateau.update(_quality(train.plateau_metric, means))
        if train.keep == "best":
            value = _quality(train.keep_metric, means)
            if value > self._best_kept:
                self._best_kept = value
                self.weights = {name: tensor.detach().clone() for name, tensor in weights().items()}
        rule = train.early_stop
        if rule is not None:
            value = _quality(rule.metric, means)
            if value > self._best_value:
                self._best_value, self._stalled = value, 0
            else:
                self._stalled += 1
            reached = rule.threshold is not None and value >= _signed(rule.metric, rule.threshold)
            self.done = reached or (rule.patience is not None and self._stalled >= rule.patience)

    def state_dict(self) -> dict[str, Any]:
        """All but the weights, for a checkpoint."""
        return {
            "plateau": self.plateau.state_dict(),
            "selection": [self._best_value, self._stalled, self._best_kept, self.accuracy, self.done],
        }

    def load_state_dict(self, state: Mapping[str, Any], weights: dict[str, Tensor] | None) -> None:
        """Continues from what `state_dict` gave, with the weights that were kept."""
        self.plateau.load_state_dict(state["plateau"])
        self._best_value, self._stalled, self._best_kept, self.accuracy, self.done = state["selection"]
        self.weights = weights


def _signed(metric: str, value: float) -> float:
    """The value with its sign changed where smaller is better, so that larger is always better."""
    return -value if smaller_is_better(metric) else value


def _quality(metric: str, means: Mapping[str, float]) -> float:
    if metric not in means:
        raise ValueError(f"no validation metric {metric!r}; there are: {', '.join(means)}")
    return _signed(metric, means[metric])
