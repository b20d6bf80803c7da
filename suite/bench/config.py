"""The sections `bench` and `speed` of a grid, and the runs that time: an operator, or a model, over its lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from subquad.suite.bench.cases import Case, series
from subquad.suite.bench.contracts import Workload
from subquad.suite.bounds import Positive, Size
from subquad.suite.contracts import ModelConfig, TaskSpec
from subquad.suite.options import Config
from subquad.suite.registry import Entry
from subquad.suite.runs import Run, with_plugins


class BenchConfig(Config):
    """The section `bench`: one implementation of an operator, timed over a sweep of lengths."""

    op: str
    implementation: str
    shape: dict[str, int | str]
    """Sizes by their letter and named variants, without T: `{B: 1, D: 1024, N: 16, form: core}`. The letters are
    those of the workload's shapes."""
    lengths: tuple[Size, ...] = Field(min_length=1)
    """Values of T; each is timed on its own."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    backward: bool = False
    """Forward and backward together, as a training step pays for them."""


class SpeedConfig(Config):
    """The section `speed`: what is timed of a model over a sweep of lengths, on random inputs and without learning."""

    left_out_when_off: ClassVar[tuple[str, ...]] = ("new_tokens", "against")

    measure: Literal["layer", "train", "decode", "generate"]
    """`layer`: forward and backward of the first sequence mixer; `train`: a training step of the whole model; `decode`:
    one more token behind a prefix of each length; `generate`: `new_tokens` behind a prompt of each length, which is
    read in parallel."""
    lengths: tuple[Size, ...] = Field(min_length=1)
    batch_size: Size | None = None
    tokens: Size | None = None
    """Tokens of a batch over all its sequences, in place of batch_size."""
    precision: Literal["fp32", "tf32", "bf16"] = "bf16"
    """bf16: autocast with fp32 parameters; where tokens are decoded, bf16 weights of linear maps and embeddings."""
    attention: Literal["fused", "unfused"] = "fused"
    """`unfused`: torch's attention stores the matrix of all pairs, as transformers did before FlashAttention."""
    input: Literal["tokens", "signal"] = "tokens"
    vocab_size: Size = 256
    channels: Size = 1
    """Channels of a signal."""
    new_tokens: int | None = Field(default=None, ge=2)
    """Tokens that `generate` draws, the greedy ones. Not part of the identity of other measures."""
    readout: Literal["token", "sequence"] = "token"
    num_classes: Size | None = None
    """None: vocab_size."""
    against: tuple[Literal["fla", "mamba_ssm", "transformers"], ...] = ()
    """Libraries whose models of the same kind and size are timed in the same run, where they have one. Not part of the
    identity where there are none."""
    peer_minutes: Positive = Field(default=30.0, exclude=True)
    """Minutes that each of these libraries has for all lengths, in which some tune their kernels for more than eight.
    Not part of the identity."""

    def check_options(self) -> None:
        if (self.batch_size is None) == (self.tokens is None):
            raise ValueError(f"give one of batch_size and tokens, got {self.batch_size} and {self.tokens}")
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths are different, got {', '.join(map(str, self.lengths))}")
        for length in self.lengths:
            if self.tokens is not None and self.tokens % length:
                raise ValueError(f"tokens={self.tokens} is no multiple of the length {length}; change one of them")
        draws = self.measure in ("decode", "generate")
        if draws and (self.input, self.readout) != ("tokens", "token"):
            raise ValueError(
                f"measure={self.measure} needs tokens in and out, got {self.input} and readout={self.readout}"
            )
        if (self.measure == "generate") != (self.new_tokens is not None):
            raise ValueError(f"new_tokens={self.new_tokens} with measure={self.measure}; only generate has new_tokens")
        if self.against and self.measure == "decode":
            raise ValueError("against: other libraries are timed with measure train, layer or generate, not decode")
        if len(set(self.against)) < len(self.against):
            raise ValueError(f"against: libraries are different, got {', '.join(self.against)}")
        if self.measure == "generate" and min(self.lengths) < 2:
            raise ValueError(f"measure=generate needs prompts of at least 2 tokens, got {min(self.lengths)}")

    def batch(self, length: int) -> int:
        """Sequences of one length in a batch."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.tokens is not None
        return self.tokens // length

    def spec(self, length: int) -> TaskSpec:
        """The task that a model is built for."""
        return TaskSpec(
            self.input,
            num_classes=self.num_classes or self.vocab_size,
            readout=self.readout,
            # the decoded token follows the prefix
            max_length=length + (self.new_tokens or (self.measure == "decode")),
            vocab_size=self.vocab_size if self.input == "tokens" else 0,
            channels=self.channels if self.input == "signal" else 0,
        )


@dataclass(frozen=True)
class TimingRun(Run):
    """One resolved series of timings: an operator in one implementation over its lengths."""

    experiment: str
    scale: str
    bench: BenchConfig
    operator: Entry
    """The place of the operator's workload, which itself has functions that cannot be sent to a process."""
    seed: int = 0
    """Always 0: inputs are the same in every run."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    takes_all_threads: ClassVar[bool] = True

    @property
    def workload(self) -> Workload:
        workload: Workload = self.operator.load()
        return workload

    @property
    def resolved(self) -> dict[str, Any]:
        resolved = {"bench": {"version": self.workload.version, **self.bench.model_dump(mode="json")}}
        return with_plugins(resolved, self.plugins)

    @property
    def cases(self) -> list[Case]:
        """One case for each length. ValueError for what the operator does not have."""
        bench = self.bench
        return series(self.workload, bench.implementation, bench.shape, bench.lengths, bench.dtype, bench.backward)

    @property
    def title(self) -> str:
        direction = "forward+backward" if self.bench.backward else "forward"
        return f"{self.bench.op} {self.bench.implementation}, {direction}"

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "task": self.bench.op,
            "task_version": self.workload.version,
            "model": self.bench.implementation,
            "stand_in": "",
            "split_policy": "",
            "precision": self.bench.dtype,
        }


@dataclass(frozen=True)
class SpeedRun(Run):
    """One resolved series of timings of a model over its lengths."""

    experiment: str
    scale: str
    model_name: str
    model: ModelConfig
    speed: SpeedConfig
    seed: int = 0
    """Always 0: inputs are random and their values do not matter."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    takes_all_threads: ClassVar[bool] = True
    version: ClassVar[int] = 1
    """Raised whenever something else is timed under the same options."""

    @property
    def resolved(self) -> dict[str, Any]:
        resolved = {
            "model": {"name": self.model_name, "version": self.model.version, **self.model.model_dump(mode="json")},
            "speed": {"version": self.version, **self.speed.model_dump(mode="json")},
        }
        return with_plugins(resolved, self.plugins)

    @property
    def title(self) -> str:
        return f"{self.model_name}, {self.speed.measure}"

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "task": self.speed.measure,
            "task_version": self.version,
            "model": self.model_name,
            "model_version": self.model.version,
            "stand_in": "",
            "split_policy": "",
            "precision": self.speed.precision,
        }
