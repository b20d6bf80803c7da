"""Everything a run trains with, made before its first step: the order of its rows, the network, the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.suite.contracts import Batch, ParamGroup, Segment, Task
from subquad.suite.model import Model
from subquad.suite.operations import OperationCounter
from subquad.suite.registry import few
from subquad.suite.rng import torch_seed
from subquad.suite.runs import Outcome, RunEnded
from subquad.suite.training.causality import require_causal
from subquad.suite.training.config import Stage, TrainConfig
from subquad.suite.training.data import (
    FreshOrder,
    Order,
    Splits,
    StagedOrder,
    finite_order,
    load_splits,
    rows_of,
    staged_digest,
    to_device,
)
from subquad.suite.training.learned_kernels import kernel_rows
from subquad.suite.training.measure import reset_peak_memory
from subquad.suite.training.numerics import autocast, default_dtype, numerics
from subquad.suite.training.parallel import Group
from subquad.suite.training.readout import logits_by_rows, mean_loss
from subquad.suite.training.run import TrainingRun, stage_of
from subquad.suite.training.scores import Losses
from subquad.suite.training.weights import take_weights


@dataclass(frozen=True)
class Prepared:
    """All that a run trains with. The objects change as the training goes on, and none is replaced by another."""

    splits: Splits
    order: StagedOrder
    """Tells which rows a step trains on."""
    valid: list[Segment]
    """The validation rows, on the device."""
    total_steps: int | None
    """None where a budget says when the run ends."""
    eval_steps: int
    """Steps between two evaluations; 0 where a budget says when there is one."""
    model: Model
    operations: OperationCounter
    """Counts the operations of the model."""
    whole: Callable[..., Any]
    """Calls a function that uses the model, in a group so that the processes share the work (`Group.divide`)."""
    sharded: bool
    """Whether each process has only a share of the model."""
    loss: Callable[[Batch], Tensor]
    """Mean loss of a batch over its labels."""
    logits: Callable[[Batch], Iterator[tuple[Tensor, Tensor]]]
    """Logits of a batch and their targets, a few rows at a time where there are many logits."""
    losses: Losses
    optimizer: torch.optim.AdamW
    base_lr: list[float]
    """Learning rate of each group of the optimizer, before the schedule."""
    parameters: list[nn.Parameter]
    """Those of all groups, in the order of the optimizer."""
    recorded: bool
    """Whether steps are recorded as CUDA graphs."""


@contextlib.contextmanager
def prepared(
    run: TrainingRun, device: torch.device, group: Group, outcome: Outcome, *, start: Path | None
) -> Iterator[Prepared]:
    """A context in which a run can train.

    outcome: gets the digest of the data, and rows about the network as it starts.
    start: file of the weights that the network starts with; None: random ones.
    """
    train = run.train
    with contextlib.ExitStack() as cleanup:
        # a plugin may have set another default when it was imported
        cleanup.enter_context(default_dtype(torch.float32))
        cleanup.enter_context(numerics(train.precision, deterministic=train.deterministic))
        if device.type == "cuda":
            cleanup.enter_context(torch.cuda.device(device))
        reset_peak_memory(device)
        if run.task.fingerprint() != run.fingerprint:
            # rows of other data, or of another tokenizer, must not get the identity of those of the plan
            raise RunEnded("failed", "its data changed since the run was planned; give the command again")
        splits = load_splits(run.task, run.seed)
        stages = [(stage, *stage_of(run.task, train, stage)) for stage in train.length_warmup]
        outcome.data_digest = staged_digest(splits, [task for _, task, _ in stages], run.seed)
        order = _order(run, splits, stages, device)
        cleanup.callback(order.close)
        total_steps, eval_steps = None, 0
        if train.budget is None:
            total_steps = order.stage_steps + (train.steps or (train.epochs or 1) * order.epoch_steps)
            unit = order.epoch_steps if train.epochs else 1
            eval_steps = (train.eval_every or 0) * unit or max(1, total_steps // 10)
        valid = [to_device(segment, device) for segment in splits.valid]

        torch.manual_seed(torch_seed(run.seed, "init"))
        model: Model = run.model.build(run.task.spec).to(device)
        if not isinstance(model, Model):
            raise RunEnded("failed", f"{type(run.model).__name__}.build must return a Model of suite/model.py")
        if start is not None:
            outcome.add("weights_taken", "fraction", take_weights(model, start, run.task_name))
        if train.record_kernels is not None:
            length = run.task.spec.max_length
            for row in kernel_rows(model.convolutions(), length, train.record_kernels, start=True):
                outcome.add(**{"step": 0, **row})
        require_causal(run, model, device)

        cast = partial(autocast, train.precision, device)
        operations = OperationCounter(model, (run.model, run.task.spec))

        def loss(batch: Batch) -> Tensor:
            positions = None if batch.positions is None else batch.positions.long()
            with cast():
                return mean_loss(model, batch.inputs, batch.targets.long(), positions)

        def logits(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
            positions = None if batch.positions is None else batch.positions.long()
            num_classes = run.task.spec.num_classes
            return logits_by_rows(model, batch.inputs, batch.targets.long(), positions, num_classes, cast)

        sharded = group.shards(model)
        whole = group.divide(model)
        # a recorded step would have to hold what the processes exchange
        recorded = device.type == "cuda" and group.size == 1
        groups = model.param_groups(train.no_decay)
        _require_all(model, groups)
        base_lr = [part.lr or train.lr for part in groups]
        optimizer = _optimizer(train, groups, base_lr, device, recorded)
        torch.manual_seed(torch_seed(run.seed, "dropout"))
        if train.compile:
            # operators are recorded while they are traced, and code of an earlier run would not be traced again
            torch.compiler.reset()
        yield Prepared(
            splits=splits,
            order=order,
            valid=valid,
            total_steps=total_steps,
            eval_steps=eval_steps,
            model=model,
            operations=operations,
            whole=whole,
            sharded=sharded,
            loss=torch.compile(loss, dynamic=False) if train.compile else loss,
            logits=logits,
            losses=Losses(device),
            optimizer=optimizer,
            base_lr=base_lr,
            parameters=[parameter for part in groups for parameter in part.parameters],
            recorded=recorded,
        )


def _require_all(model: Model, groups: list[ParamGroup]) -> None:
    """Raises RunEnded unless the groups have every trainable parameter of the model, and nothing else."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = {id(parameter) for group in groups for parameter in group.parameters}
    if missing := [name for place, name in names.items() if place not in given]:
        raise RunEnded(
            "failed",
            f"param_groups leaves out {few(missing)}, which would stay as at the start; add them to a group, or set "
            "requires_grad=False",
        )
    if others := len(given - names.keys()):
        raise RunEnded(
            "failed",
            f"param_groups has {others} tensors that are no trainable parameters of the model, so that neither "
            "checkpoints nor its number of parameters would have them; make them parameters of a module",
        )


def _optimizer(
    train: TrainConfig, groups: list[ParamGroup], base_lr: list[float], device: torch.device, recorded: bool
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [
            {
                "params": group.parameters,
                # a recorded step reads its rate from the device
                "lr": torch.tensor(lr, device=device) if recorded else lr,
                "weight_decay": train.weight_decay if group.weight_decay is None else group.weight_decay,
            }
            for group, lr in zip(groups, base_lr, strict=True)
        ],
        betas=train.betas,
        eps=train.eps,
        fused=device.type == "cuda" or None,
        capturable=recorded,
    )


def _order(
    run: TrainingRun, splits: Splits, stages: list[tuple[Stage, Task, int]], device: torch.device
) -> StagedOrder:
    """The order of all rows: stage by stage, and then those of the full length."""
    train = run.train

    def order(task: Task, batch_size: int, rows: Callable[[], tuple[Segment, ...]], steps: int | None) -> Order:
        if not task.fresh:
            return finite_order(rows(), batch_size, run.seed, train.shuffle, device)
        # an epoch of a stream is as long as the run or the task says, or else all steps
        known = task.epoch_rows
        per_epoch = (steps or 1) if known is None else -(-known // batch_size)
        return FreshOrder(task, batch_size, run.seed, train.epoch_steps or per_epoch, device)

    def opened(stage: Stage, task: Task, batch_size: int) -> tuple[Callable[[], Order], Callable[[Order], int]]:
        """A function that opens the order of a stage, and one from that order to the number of steps."""
        return (
            lambda: order(task, batch_size, lambda: tuple(rows_of(task, "train", run.seed)), stage.steps),
            lambda order: stage.steps or (stage.epochs or 1) * order.epoch_steps,
        )

    last = order(run.task, train.batch_size, lambda: splits.train, train.steps)
    return StagedOrder([opened(*stage) for stage in stages], last)
