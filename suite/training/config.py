"""The options of the section `train`: how a run is trained, and what is recorded of it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from subquad.suite.bounds import (
    Count,
    Epsilon,
    Fraction,
    NonNegative,
    Operations,
    Positive,
    Score,
    Seconds,
    Size,
    Steps,
)
from subquad.suite.options import Config


class EarlyStop(Config):
    """Stop when the validation `metric` reaches `threshold`, or has not improved for `patience` evaluations."""

    metric: str = "accuracy"
    threshold: Score | None = None
    patience: Size | None = None

    def check_options(self) -> None:
        if self.threshold is None and self.patience is None:
            raise ValueError("early_stop needs threshold or patience (or both)")


class Stage(Config):
    """A part of the training on shorter rows, before the full length. Exactly one of `steps` and `epochs` is given."""

    length: Size
    """Value of the task's option `length` during the stage."""
    steps: Steps | None = None
    epochs: Steps | None = None
    """An epoch is every row of this length once, or `epoch_steps` steps where the task has no number of rows."""
    batch_size: Size | None = None
    """None: so many that a batch has as many tokens as at the full length."""

    def check_options(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps={self.steps}, epochs={self.epochs}")


class KernelProbe(Config):
    """Options for recording the filters of a model's convolutions, before the first step and after the last one.

    Recording does not change the training. `suite/training/learned_kernels.py` defines every row.
    """

    lags: Size = 1024
    """Number of lags of a recorded kernel, counted from lag 0."""
    points: Size = 128
    """Recorded values of a kernel; each is the largest of lags / points neighbours."""
    channels: Size = 32
    """Kernels recorded of a filter, evenly spaced over its channels. Fractions of kernels count all channels."""
    near: Size = 128
    """Lags below this count as near; DSS, sections 4.1 and 4.2, truncates kernels there."""

    def check_options(self) -> None:
        if self.lags % self.points:
            raise ValueError(f"points={self.points} does not divide lags={self.lags}; change one of them")


class Budget(Config):
    """The budget of a run, in place of a number of steps. Exactly one of `seconds` and `flops` is given.

    The learning rate follows the share of the budget that is spent. Give its warm-up as `warmup_fraction`.
    """

    seconds: Seconds | None = None
    """Time of the training steps on one device, without evaluation, checkpoints, compilation and the recording of
    graphs. The rows of such a run hold for their `device` alone."""
    flops: Operations | None = None
    """Operations of the training steps (`suite/operations.py`). The run ends before a step that would exceed them."""
    evaluations: Size = 10
    """Evaluations at equal parts of the budget, the last one at its end."""

    def check_options(self) -> None:
        if (self.seconds is None) == (self.flops is None):
            raise ValueError(f"give exactly one of seconds and flops, got seconds={self.seconds}, flops={self.flops}")


class TrainConfig(Config):
    """Options of the training with AdamW. Exactly one of `steps`, `epochs` and `budget` says when it ends."""

    left_out_when_off: ClassVar[tuple[str, ...]] = (
        "budget", "eval_flops", "init_from", "length_warmup", "record_kernels", "test_last",
    )  # fmt: skip

    steps: Steps | None = None
    epochs: Steps | None = None
    budget: Budget | None = None
    epoch_steps: Steps | None = None
    """Steps of an epoch, for tasks with fresh data that have no number of rows. A finite split has its own."""
    length_warmup: tuple[Stage, ...] = ()
    """Stages of growing length before the full length, whose budget is `steps` or `epochs`. Schedule and warm-up
    of the learning rate span all stages. Source: HyenaDNA (Nguyen et al. 2023), section 3.3; Mamba, appendix E.3.3."""
    batch_size: Size = 32
    eval_batch_size: Size | None = None
    """None: `batch_size`."""
    micro_batch_size: Size | None = Field(default=None, exclude=True)
    """Rows of a batch that a process computes at a time; the gradients are added up. None: all of its rows. It changes
    no value beyond rounding, so it is part of a run's identity only with dropout (`TrainingRun.resolved`)."""
    lr: Positive = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: NonNegative = 0.0
    no_decay: tuple[Literal["bias", "norm", "embedding"], ...] = ()
    """Kinds of parameters without weight decay. State-space parameters never have any."""
    schedule: Literal["constant", "cosine", "linear", "plateau"] = "constant"
    """Learning rate after the warm-up: constant; on a cosine or a line to `min_lr`; or times `plateau_factor` whenever
    validation stalls."""
    schedule_unit: Literal["step", "epoch"] = "step"
    """`epoch`: the learning rate changes only between epochs, as with a scheduler that is stepped once an epoch."""
    warmup_steps: Count = 0
    warmup_fraction: Fraction = 0.0
    """Warm-up as a fraction of all steps; used where warmup_steps is 0."""
    warmup_from: NonNegative = 0.0
    """Learning rate at step 0 of the warm-up, which is a linear ramp to `lr`."""
    min_lr: NonNegative = 0.0
    plateau_factor: float = Field(default=0.2, gt=0, lt=1)
    plateau_patience: Size = 20
    plateau_metric: str = "accuracy"
    clip: Positive | None = None
    """Largest allowed norm of the gradient of all parameters together; None: no clipping."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """bf16: autocast with fp32 parameters; tf32: fp32 with TF32 matrix products."""
    deterministic: bool = False
    compile: bool = False
    """Compile forward and backward pass with torch.compile, which takes tens of seconds once."""
    shuffle: bool = True
    """False: every epoch takes the rows in their stored order, segment by segment."""
    eval_every: Steps | None = None
    """Epochs or steps, whichever is given, between two evaluations. None: ten evaluations a run."""
    eval_flops: tuple[Operations, ...] = ()
    """After each of these numbers of training operations, the validation rows are evaluated once more, in rows of the
    slice `train_flops=1e+15`. These evaluations decide neither learning rate nor weights nor early stop."""
    early_stop: EarlyStop | None = None
    keep: Literal["last", "best"] = "last"
    """Weights that are tested: those of the last step, or those with the best validation `keep_metric`."""
    keep_metric: str = "accuracy"
    test_last: bool = False
    """With `keep: best`, test the weights of the last step too; their rows have the split `test-last`."""
    init_from: str | dict[str, Any] | None = None
    """Weights that the network starts with, wherever name and shape are the same; None: it starts at random. A text
    names a run that kept its weights, or a file of weights. A mapping of dotted keys describes a run that is trained
    first: this one with these settings changed. If they name another task or model, that section has nothing else."""
    record_kernels: KernelProbe | None = None
    """Record the filters that the layers have learnt; None: record nothing."""

    def check_options(self) -> None:
        if (self.steps is not None) + (self.epochs is not None) + (self.budget is not None) != 1:
            given = f"steps={self.steps}, epochs={self.epochs}"
            if self.budget is not None:
                named = "seconds" if self.budget.flops is None else "flops"
                given += f", budget={{{named}: {getattr(self.budget, named):g}}}"
            raise ValueError(f"give exactly one of steps, epochs and budget, got {given}")
        if self.budget is not None:
            self._check_budget()
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"weight_decay={self.weight_decay} with lr={self.lr} takes a weight to the other side of zero in one "
                "step; lower one of them"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}; lower it")
        if self.test_last and self.keep != "best":
            raise ValueError(f"test_last has no meaning with keep={self.keep}, which tests the last weights; drop it")
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, not both")
        lengths = [stage.length for stage in self.length_warmup]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"length_warmup: the lengths must grow, got {', '.join(map(str, lengths))}")
        if lengths and self.schedule_unit == "epoch":
            raise ValueError("length_warmup: its epochs differ in length; take schedule_unit: step")

    def _check_budget(self) -> None:
        """Raises ValueError for an option that counts steps or epochs, of which a budget knows no number."""
        if self.warmup_steps:
            raise ValueError("a budget has no number of steps; give warmup_fraction in place of warmup_steps")
        if self.eval_every is not None:
            raise ValueError("a budget has no number of steps; give budget.evaluations in place of eval_every")
        if self.schedule_unit == "epoch":
            raise ValueError("a budget has no number of epochs; take schedule_unit: step")

    @property
    def metrics(self) -> dict[str, str]:
        """Options that name a validation metric which decides something, and the metric."""
        named = {"early_stop.metric": self.early_stop.metric} if self.early_stop is not None else {}
        for key, used in (("keep_metric", self.keep == "best"), ("plateau_metric", self.schedule == "plateau")):
            # a name that was given is meant, even where nothing asks for it
            if used or getattr(self, key) != type(self).model_fields[key].default:
                named[key] = getattr(self, key)
        return named
