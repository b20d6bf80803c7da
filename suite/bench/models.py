"""Time of a model at each length, on random inputs: of its sequence layer, a training step, a token or a generation.

On a GPU each is recorded as a CUDA graph and replayed, as the trainer does, so that the time of the host, which
launches kernels, does not count; only long prompts of a generation are not. Memory is measured while the graph is
recorded, which runs the same step first without a graph. Other libraries' models of the same kind and size are timed
behind ours in the same run, with the same step, precision and mean cross entropy, each library in a process of its own.
If that process dies or takes too long, its row says so and all others stay.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.suite.bench.config import SpeedConfig, SpeedRun
from subquad.suite.bench.generation import build_for_inference, time_generations, time_peer
from subquad.suite.bench.measure import SEED, Unavailable, sample
from subquad.suite.bench.series import Series
from subquad.suite.bench.tuning import forms_compiled_together
from subquad.suite.bench.worker import ChildError, TookTooLong, Worker
from subquad.suite.contracts import Batch
from subquad.suite.model import Model
from subquad.suite.operations import OperationCounter, OperationsUnknown
from subquad.suite.plugins import changed_since_planned
from subquad.suite.runner import worker_of
from subquad.suite.runs import Progress
from subquad.suite.training.capture import record
from subquad.suite.training.measure import reset_peak_memory
from subquad.suite.training.numerics import autocast, default_dtype, numerics
from subquad.suite.training.readout import mean_loss

MakeStep = Callable[[Model, SpeedConfig, int, torch.device], Callable[[], None]]
"""Function from a model, the options of its timing, a length and a device to the call that is timed."""


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """Within, torch computes attention as plain products and a softmax, in the precision of its inputs."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    # by default torch widens half precision first, which nobody did before there were fused kernels
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def random_inputs(speed: SpeedConfig, device: torch.device, *size: int) -> Tensor:
    """Random tokens of that size, or a random signal with its channels on the last axis."""
    if speed.input == "tokens":
        return torch.randint(speed.vocab_size, size, device=device)
    return torch.randn(*size, speed.channels, device=device)


def layer(model: Model, speed: SpeedConfig, length: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward pass of the first mixer, with the gradients of its inputs and parameters."""
    if not model.mixers:
        raise ValueError(f"{type(model).__name__} has no `mixers`, of which a layer could be timed")
    mixer = model.mixers[0]
    dtype = torch.bfloat16 if speed.precision == "bf16" else torch.float32
    size = (speed.batch(length), length, model.config.d_model)
    x = torch.randn(size, device=device, dtype=dtype, requires_grad=True)
    wanted = [x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)]
    cotangent = torch.randn(size, device=device, dtype=dtype)

    def step() -> None:
        with autocast(speed.precision, device):
            y = mixer(x)
        torch.autograd.grad(y, wanted, cotangent.to(y.dtype))

    return step


def train_step(model: Model, speed: SpeedConfig, length: int, device: torch.device) -> Callable[[], None]:
    """Forward pass, cross entropy of every position or sequence, backward pass and AdamW, as in the trainer."""
    batch = speed.batch(length)
    model.train()
    inputs = random_inputs(speed, device, batch, length)
    labels = (batch, length) if speed.readout == "token" else (batch,)
    targets = torch.randint(speed.num_classes or speed.vocab_size, labels, device=device)
    gpu = device.type == "cuda"
    groups = [{"params": group.parameters} for group in model.param_groups()]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, fused=gpu or None, capturable=gpu)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(speed.precision, device):
            loss = mean_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()

    return step


@torch.no_grad()
def decode_step(model: Model, speed: SpeedConfig, length: int, device: torch.device) -> Callable[[], None]:
    """One token after a prefix. Every call decodes the same position again."""
    model.eval()
    prefix = random_inputs(speed, device, speed.batch(length), length)
    tokens = prefix[:, -1].clone()
    with autocast(speed.precision, device):
        _, state = model.prefill(prefix)

    def step() -> None:
        with torch.no_grad(), autocast(speed.precision, device):
            model.step(tokens, state)

    return step


STEPS: Mapping[str, MakeStep] = {"layer": layer, "train": train_step, "decode": decode_step}
"""Value of `measure` in a SpeedConfig to the function that makes the timed call."""
PARAMETERS = 0.01
"""Share by which the number of parameters of another library's model may differ from ours."""
BUDGET_MS: Mapping[str, float] = {"layer": 200.0, "train": 2000.0, "decode": 500.0, "generate": 2000.0}
"""Time given to the samples of one length."""


class ModelTimer(Series):
    """Times a model. For each `measure`, makers makes the timed call; budget_ms is the time spent on its samples."""

    run: SpeedRun

    def __init__(
        self,
        *run: Any,
        makers: Mapping[str, MakeStep] = STEPS,
        budget_ms: Mapping[str, float] = BUDGET_MS,
        **options: Any,
    ) -> None:
        super().__init__(*run, **options)
        self.makers, self.budget_ms = makers, budget_ms[self.run.speed.measure]
        self.sizes: dict[int, int] = {}
        """Length to the parameters of our model, of which learned positions are a part."""

    def _lengths(self) -> Sequence[int]:
        return self.run.speed.lengths

    def _measure(self, length: int, part: str) -> None:
        try:
            with self._numerics():
                self._add_rows(length, part)
        except Exception as error:
            # running out of host memory has no exception of its own
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise Unavailable("oom", f"{self.run.title} at {part}: out of memory") from None
            raise Unavailable("failed", f"{type(error).__name__}: {error}") from None

    @contextlib.contextmanager
    def _numerics(self) -> Iterator[None]:
        """Within it, precision and attention are those of the run."""
        speed = self.run.speed
        attention = unfused_attention() if speed.attention == "unfused" else contextlib.nullcontext()
        with numerics(speed.precision), attention:
            yield

    def _model(self, length: int) -> Model:
        speed = self.run.speed
        torch.manual_seed(SEED)
        if speed.precision == "bf16" and speed.measure in ("decode", "generate"):
            return build_for_inference(self.run.model, speed.spec(length), self.device)
        # a billion parameters take a host half a minute to draw
        with self.device:
            return self.run.model.build(speed.spec(length)).to(self.device)

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        speed = self.run.speed
        if speed.measure == "generate":
            raise ValueError(
                f"{self.run.title}: a generation is many steps; profile one of them by "
                "--set speed.measure=decode --set speed.new_tokens=null"
            )
        for length in self._lengths():
            with self._numerics():
                yield f"length={length}", self.makers[speed.measure](self._model(length), speed, length, self.device)

    def _add_rows(self, length: int, part: str) -> None:
        speed = self.run.speed
        model = self._model(length)
        add = self.outcome.add
        self.sizes[length] = sum(parameter.numel() for parameter in model.parameters())
        if length == speed.lengths[0]:
            add("num_parameters", "count", self.sizes[length])
            if speed.measure in ("decode", "generate"):
                add("state_size", "numbers", model.state_size(length), slice=part)
        for row in self._operations(model, length):
            add(**{"unit": "flop", "slice": part, **row})
        if speed.measure == "generate":
            self._add_generations(model, length, part)
            return
        call, peak = self._recorded(self.makers[speed.measure](model, speed, length, self.device))
        self._add_times(length, part, sample(call, self.device, self.budget_ms), peak)

    def _add_times(self, length: int, part: str, samples: list[float], peak: int | None) -> None:
        """Adds time, throughput and memory of a step or a generation."""
        speed, add = self.run.speed, self.outcome.add
        add("time", "ms", statistics.median(samples), slice=part, samples=samples)
        if speed.measure != "layer":
            positions = {"train": length, "generate": speed.new_tokens or 0}.get(speed.measure, 1)
            rates = [1e3 * speed.batch(length) * positions / ms for ms in samples]
            add(f"{speed.measure}_throughput", "tokens/s", statistics.median(rates), slice=part, samples=rates)
        if peak is not None:
            add("peak_memory", "bytes", float(peak), slice=part)

    def _time(self) -> None:
        super()._time()
        # behind all of ours, which have given their memory back to the device
        for library in self.run.speed.against:
            with tempfile.TemporaryFile("w+", errors="replace") as log, Worker({}, str(self.device), log=log) as worker:
                self._time_library(worker, library)

    def _time_library(self, worker: Worker, library: str) -> None:
        """Adds the rows of another library's model at all lengths, as a process of its own measures them."""
        speed = self.run.speed
        until = time.monotonic() + 60 * speed.peer_minutes
        run = base64.b64encode(pickle.dumps(self.run)).decode()
        for length in self._lengths():
            part = f"length={length},against={library}"

            def waiting(length: int = length) -> None:
                if self.stop():
                    raise KeyboardInterrupt
                self.alive(f"timing {library} at length={length}", length)

            waiting()
            if self.report is not None:
                self.report(Progress(len(speed.lengths), len(speed.lengths), part))
            given = {"run": run, "library": library, "length": length, "ours": self.sizes.get(length)}
            left_s = until - time.monotonic()
            try:
                rows = worker.ask("call", target=f"{__name__}:peer_rows", timeout_s=left_s, waiting=waiting, **given)
                self.outcome.rows += rows
            except ChildError as error:
                reason = " ".join(str(error).split())[:300]
                if isinstance(error, TookTooLong):
                    reason = (
                        f"{library} took more than {speed.peer_minutes:g} minutes for its lengths and was stopped; "
                        f"--force --set speed.peer_minutes={2 * speed.peer_minutes:g} waits longer"
                    )
                self.outcome.add("time", "ms", None, slice=part, status="n/a", error=reason)
            theirs, own = (self._measured("time", name) for name in (part, f"length={length}"))
            if theirs is None:
                # an error may leave a device on which nothing else can be timed, so the next length has a new process
                worker.stop()
            elif own is not None:
                self.outcome.add("speedup", "ratio", theirs / own, slice=part)

    def time_peer(self, library: str, length: int) -> None:
        """Adds the rows of another library's model, or one that says why it has no time."""
        part = f"length={length},against={library}"
        try:
            with self._numerics(), forms_compiled_together():
                self._add_peer(library, length, part)
            return
        except Unavailable as error:
            status, reason = error.status, str(error)
        except torch.OutOfMemoryError:
            status, reason = "oom", f"{library}: out of memory"
        except (Exception, SystemExit) as error:  # what a peer raises is no fault of the run
            status, reason = "n/a", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        # one that changed torch's precision is found out behind its times
        self.outcome.rows = [row for row in self.outcome.rows if row["slice"] != part]
        self.outcome.add("time", "ms", None, slice=part, status=status, error=reason)

    def _add_peer(self, library: str, length: int, part: str) -> None:
        speed, add = self.run.speed, self.outcome.add
        torch.manual_seed(SEED)
        generates = speed.measure == "generate"
        half = generates and speed.precision == "bf16"
        with default_dtype(torch.bfloat16 if half else torch.float32), self.device:
            model = self.run.model.build_peer(library, speed.spec(length)).to(self.device)
        count = sum(parameter.numel() for parameter in model.parameters())
        ours = self.sizes.get(length)
        if ours is None:
            raise Unavailable("n/a", "our model could not be built, so there is nothing to compare with")
        if abs(count / ours - 1) > PARAMETERS:
            raise Unavailable("n/a", f"{library} has {count:,} parameters and ours {ours:,}, not equal to one per cent")
        if length == speed.lengths[0]:
            add("num_parameters", "count", count, slice=f"against={library},version={model.version}")
        if generates:
            samples, peak = self._generated(model, length)
        else:
            step = self.makers[speed.measure](model, speed, length, self.device)
            call, peak, recorded = self._recorded_or_called(step)
            samples = sample(call, self.device, self.budget_ms)
            if self.device.type == "cuda":
                add("recorded", "", float(recorded), slice=part)
        self._add_times(length, part, samples, peak)

    def _generated(self, model: Any, length: int) -> tuple[list[float], int | None]:
        """Times (ms) of another library's generation, in its own way, and the bytes at its peak."""
        speed = self.run.speed
        prompts = random_inputs(speed, self.device, speed.batch(length), length)
        model.eval()
        samples = time_peer(lambda: model.generate(prompts, speed.new_tokens), self.device, self.budget_ms)
        return samples, self._peak()

    def _peak(self) -> int | None:
        """The most bytes that were allocated since the peak was reset, on a GPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def _measured(self, metric: str, part: str) -> float | None:
        """A value that this run has measured."""
        return next(
            (row["value"] for row in self.outcome.rows if (row["metric"], row["slice"]) == (metric, part)), None
        )

    def _recorded_or_called(self, step: Callable[[], None]) -> tuple[Callable[[], None], int | None, bool]:
        """Returns what `_recorded` returns, or the step itself where it cannot be recorded, and whether it was."""
        # some libraries tune themselves in their first step, with memory that is not that of a step
        step()
        try:
            return *self._recorded(step), self.device.type == "cuda"
        except torch.OutOfMemoryError:
            raise
        except Exception:
            torch.cuda.synchronize(self.device)
            reset_peak_memory(self.device)
            step()
            torch.cuda.synchronize(self.device)
            return step, self._peak(), False

    def _add_generations(self, model: Model, length: int, part: str) -> None:
        speed, new_tokens = self.run.speed, self.run.speed.new_tokens
        assert new_tokens is not None
        model.eval()
        prompts = random_inputs(speed, self.device, speed.batch(length), length)
        reset_peak_memory(self.device)
        with autocast(speed.precision, self.device):
            found = time_generations(model, prompts, new_tokens, self.budget_ms)
        self._add_times(length, part, found.total, self._peak())
        # the prompt gives the first token
        both = zip(found.total, found.prefill, strict=True)
        decode = [(total - prefill) / (new_tokens - 1) for total, prefill in both]
        for metric, samples in (("prefill_time", found.prefill), ("decode_time", decode)):
            self.outcome.add(metric, "ms", statistics.median(samples), slice=part, samples=samples)

    def _operations(self, model: Model, length: int) -> Iterator[dict[str, Any]]:
        """Rows of the operations of what is timed: of a training step (of a layer: both passes), and of a token."""
        speed = self.run.speed
        counter = OperationCounter(model, (self.run.model, speed.spec(length)))
        batch = speed.batch(length)
        with torch.device("meta"):
            inputs = random_inputs(speed, torch.device("meta"), batch, length)
            targets = torch.empty((batch, length) if speed.readout == "token" else (batch,), dtype=torch.long)
            x = torch.empty(batch, length, model.config.d_model if speed.measure == "layer" else 0)
        counts: dict[str, Callable[[], float]] = {
            "inference_flops": lambda: counter.forward(inputs) / (batch * length),
            "train_flops": lambda: counter.training_step(Batch(inputs, targets)),
            "decode_flops": lambda: counter.decoded_token(inputs[:, 0], length),
        }
        if speed.measure == "layer":
            counts["inference_flops"] = lambda: counter.layer(x, backward=False) / (batch * length)
            counts["train_flops"] = lambda: counter.layer(x, backward=True)
        of_training = speed.measure in ("layer", "train")
        counts.pop("decode_flops" if of_training else "train_flops")
        for metric, count in counts.items():
            row = {"metric": metric, **({"step": 1} if metric == "train_flops" else {})}
            try:
                yield {**row, "value": count()}
            except OperationsUnknown as reason:
                yield {**row, "value": None, "status": "n/a", "error": str(reason)}

    def _recorded(self, step: Callable[[], None]) -> tuple[Callable[[], None], int | None]:
        """The call that is timed, and the bytes allocated at its peak, parameters and optimizer included."""
        if self.device.type != "cuda":
            return step, None
        reset_peak_memory(self.device)
        # no tensor is put back after the recording, because the values of the parameters do not matter
        replay = record(step, lambda: (), self.device, None)
        return replay, self._peak()


def peer_rows(device: torch.device, run: str, library: str, length: int, ours: int | None) -> list[dict[str, Any]]:
    """Rows of another library's model at one length, without the speedup: what the process of a library computes.

    run: the pickled run in base64. Reading it imports the plugins that it uses.
    ours: parameters of our model.
    """
    found: SpeedRun = pickle.loads(base64.b64decode(run))
    if reason := changed_since_planned(found.plugins.values()):
        raise Unavailable("n/a", reason)
    timer: Any = worker_of(found)(found, device)
    if ours is not None:
        timer.sizes[length] = ours
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        timer.time_peer(library, length)
    return timer.outcome.rows
