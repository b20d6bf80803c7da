"""The options of the section `train`: how a run is trained, and what is recorded of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from suite.contracts import Config


class EarlyStop(Config):
    """Stop when validation `metric` reaches `threshold`, or has not improved for `patience` evaluations."""

    metric: str = "accuracy"
    threshold: float | None = None
    patience: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_a_rule(self) -> EarlyStop:
        if self.threshold is None and self.patience is None:
            raise ValueError("early_stop needs threshold or patience (or both)")
        return self


class Stage(Config):
    """A part of the run on shorter rows, before the run proper. Exactly one of `steps` and `epochs` is given."""

    length: int = Field(ge=1)
    """The task's option `length` meanwhile."""
    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    """Every row of this length once; of a task without a number of rows, `epoch_steps` at every length."""
    batch_size: int | None = Field(default=None, ge=1)
    """None: as many tokens a batch as at the full length."""

    @model_validator(mode="after")
    def _one_budget(self) -> Stage:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps={self.steps}, epochs={self.epochs}")
        return self


class KernelProbe(Config):
    """What is recorded of the filters that a model's layers convolve with, before the first step and after the last.

    Nothing of it changes the training. What is meant by each row stands in `suite/learned_kernels.py`.
    """

    lags: int = Field(default=1024, ge=1)
    """Lags of a recorded kernel, from 0 on."""
    points: int = Field(default=128, ge=1)
    """Recorded values of a kernel, each the largest of lags / points neighbours."""
    channels: int = Field(default=32, ge=1)
    """Recorded kernels of a filter, evenly spaced over its channels; whatever is a share is one of all channels."""
    near: int = Field(default=128, ge=1)
    """Lags below this count as near. DSS, sections 4.1 and 4.2, cuts kernels there."""

    @model_validator(mode="after")
    def _equal_spans(self) -> KernelProbe:
        if self.lags % self.points:
            raise ValueError(f"points={self.points} does not divide lags={self.lags}; change one of them")
        return self


class TrainConfig(Config):
    """How AdamW optimises a run. Exactly one of `steps` and `epochs` sets the budget."""

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    epoch_steps: int | None = Field(default=None, ge=1)
    """Steps an epoch, for tasks with fresh data that do not say how many rows are one (a finite split sets its own)."""
    length_warmup: tuple[Stage, ...] = ()
    """Stages of growing length before `steps` or `epochs`, which are those at the full length. Schedule and warm-up of
    the rate span all of them. Source: HyenaDNA (Nguyen et al. 2023), section 3.3; Mamba, appendix E.3.3."""
    batch_size: int = Field(default=32, ge=1)
    eval_batch_size: int | None = Field(default=None, ge=1)
    """None: `batch_size`."""
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    no_decay: tuple[Literal["bias", "norm", "embedding"], ...] = ()
    """Kinds of parameters without weight decay. State-space parameters never have any."""
    schedule: Literal["constant", "cosine", "linear", "plateau"] = "constant"
    """After the warm-up: stay, cosine or line to `min_lr`, or times `plateau_factor` when validation stalls."""
    schedule_unit: Literal["step", "epoch"] = "step"
    """`epoch`: the rate changes only between epochs, as where a scheduler is stepped once an epoch."""
    warmup_steps: int = Field(default=0, ge=0)
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Of all steps; used where warmup_steps is 0."""
    warmup_from: float = Field(default=0.0, ge=0)
    """The rate at step 0 of the warm-up, a linear ramp to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    plateau_factor: float = Field(default=0.2, gt=0, lt=1)
    plateau_patience: int = Field(default=20, ge=1)
    plateau_metric: str = "accuracy"
    clip: float | None = Field(default=None, gt=0)
    """Largest norm of the whole gradient."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """bf16: autocast with fp32 parameters; tf32: fp32 with TF32 matrix products."""
    deterministic: bool = False
    compile: bool = False
    """Fuse the forward and backward pass with torch.compile: tens of seconds once, fewer and longer kernels after."""
    shuffle: bool = True
    """False: rows in their stored order, segment by segment, the same every epoch."""
    eval_every: int | None = Field(default=None, ge=1)
    """In epochs or steps, whichever sets the budget. None: ten times in a run."""
    early_stop: EarlyStop | None = None
    keep: Literal["last", "best"] = "last"
    """Which weights the test split sees: those of the last step, or of the best validation `keep_metric`."""
    keep_metric: str = "accuracy"
    record_kernels: KernelProbe | None = None
    """Record the filters that the layers have learnt."""

    @model_validator(mode="after")
    def _one_budget(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs, got steps={self.steps}, epochs={self.epochs}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}; lower it")
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, not both")
        lengths = [stage.length for stage in self.length_warmup]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"length_warmup: the lengths must grow, got {', '.join(map(str, lengths))}")
        if lengths and self.schedule_unit == "epoch":
            raise ValueError("length_warmup: its epochs differ in length; take schedule_unit: step")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # runs without these keep the id they had before there were any
        values: dict[str, Any] = handler(self)
        return {k: v for k, v in values.items() if v or k not in ("length_warmup", "record_kernels")}
