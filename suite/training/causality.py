"""Whether a network reads positions behind a label, which may hold the label itself."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from subquad.suite.contracts import TaskSpec
from subquad.suite.model import Model
from subquad.suite.runs import RunEnded
from subquad.suite.training.run import TrainingRun

LENGTH = 64
"""Positions of the rows that are tried, where a task has so many."""
LEAK = 1e-2
"""Change of outputs, as a share of the largest, above which a network reads the future. A transform over all positions
rounds by less, also with TF32 products; `check model` finds smaller leaks in double precision."""


def require_causal(run: TrainingRun, model: Model, device: torch.device) -> None:
    """Raises RunEnded where a plugin's model reads the future in a task with labels at positions.

    A model that has an option `bidirectional`, and has it on, says so itself. Those of the suite obey
    `suite.laws.models`, and a sequence readout may read everything.
    """
    spec = run.task.spec
    if "model" not in run.plugins or spec.readout != "token" or getattr(run.model, "bidirectional", False):
        return
    share = _share_of_the_future(model, spec, device)
    if share > LEAK:
        raise RunEnded(
            "failed",
            f"{run.model_name} reads the future: later inputs change earlier outputs by {share:.1e} of the largest, "
            f"and {run.task_name} has labels at every position that it tests; `check model {run.model_name}` says "
            "more. If it is meant to, give its configuration `bidirectional: bool = True`, which its rows then show",
        )


@torch.no_grad()
def _share_of_the_future(model: Model, spec: TaskSpec, device: torch.device) -> float:
    """The change of outputs in the first half of a row by other inputs in its second half, as a share of the largest.

    Differences between two equal calls are subtracted. It is 0 if the model gives no outputs.
    """
    length = min(spec.max_length, LENGTH)
    cut = length // 2
    generator = torch.Generator().manual_seed(0)
    if spec.input == "tokens":
        inputs = torch.randint(spec.vocab_size, (2, length), generator=generator)
        other = (inputs + 1) % spec.vocab_size
    else:
        inputs = torch.randn(2, length, spec.channels, generator=generator)
        other = -inputs
    outputs: list[Tensor] = []
    training = model.training
    model.eval()
    # an error of the model on such rows is left to training, which reports it
    with contextlib.suppress(Exception):
        for rows in (inputs, torch.cat([inputs[:, :cut], other[:, cut:]], 1), inputs):
            # a model that draws at random draws the same
            torch.manual_seed(0)
            outputs.append(model(rows.to(device))[:, :cut].float())
    model.train(training)
    if len(outputs) < 3 or cut == 0:
        return 0.0
    first, other, again = outputs
    change = (first - other).abs().max() - (first - again).abs().max()
    return (change / first.abs().max()).nan_to_num(0.0).item()
