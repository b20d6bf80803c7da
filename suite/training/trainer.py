"""One training loop for every task and model.

The model's forward pass gives logits only where there is a label. On a GPU the whole step (forward, backward, clipping,
AdamW) is one CUDA graph for each batch shape, the rows stay on the device, and the host reads nothing back between two
reports. A checkpoint holds parameters, optimizer, random state and history, so an interrupted run ends with the same
values as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from suite.contracts import Batch, Segment, Task
from suite.generate import generate
from suite.model import Model
from suite.rng import torch_seed
from suite.runs import Outcome, Progress, RunEnded, Worker
from suite.training import checkpoints, measure, parallel
from suite.training.capture import BatchGraphs, record
from suite.training.config import Stage
from suite.training.data import (
    FreshOrder,
    Order,
    StagedOrder,
    chunks,
    finite_order,
    load_splits,
    staged_digest,
    take,
    to_device,
)
from suite.training.learned_kernels import kernel_rows
from suite.training.numerics import autocast, numerics
from suite.training.readout import logits_by_rows, mean_loss
from suite.training.run import TrainingRun, stage_of
from suite.training.schedule import lr_factor
from suite.training.scores import UNITS, Metrics, Scores, add_rows
from suite.training.selection import Selection
from suite.training.weights import take_weights

REPORT_EVERY_S = 0.5
CHECKPOINT_EVERY_S = 60.0


class DivergedError(RunEnded):
    """The loss became NaN or infinite."""

    def __init__(self, step: int) -> None:
        super().__init__("diverged", f"loss is not finite at step {step}")
        self.step = step


class Trainer(Worker):
    """Trains and measures one run.

    checkpoint: file for what a later call needs to continue, or None.
    report: called about twice a second with the progress.
    stop: asked between steps; once it is true, a checkpoint is saved and KeyboardInterrupt raised.
    """

    run: TrainingRun

    def __init__(self, *run: Any, **options: Any) -> None:
        super().__init__(*run, **options)
        self.train = self.run.train
        self.group = parallel.current()
        self.earlier_s = 0.0
        self.trained = False
        self.note, self.unsaved = "preparing", ""

    def __call__(self) -> Outcome:
        """The whole run: train, evaluate, measure."""
        with self._prepared(start_weights=True):
            self._require_rows()
            self._restore()
            self._tell({})
            self._loop()
            self._test()
            self._gather()
            self._record_kernels()
            self._generate()
            self._measure()
        return self.outcome

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Gives a function that carries out the next training step, and no recorded graph; nothing is stored."""
        # with which weights the run starts does not matter here
        with self._prepared(start_weights=False):
            self.model.train()

            def step() -> None:
                segment, rows = self.order.locate(self.step)
                self._set_lr()
                self._train_step(take(segment, rows))
                self.step += 1

            yield "training step", step

    @contextlib.contextmanager
    def _prepared(self, *, start_weights: bool) -> Iterator[None]:
        """Within it, the data, the model and the optimizer are there."""
        with contextlib.ExitStack() as self.cleanup:
            self.cleanup.callback(self._clock)
            self.cleanup.enter_context(numerics(self.train.precision, deterministic=self.train.deterministic))
            if self.device.type == "cuda":
                self.cleanup.enter_context(torch.cuda.device(self.device))
            self._prepare(start_weights)
            yield

    def _clock(self) -> None:
        self.outcome.seconds = self.earlier_s + time.perf_counter() - self.began

    def _prepare(self, start_weights: bool) -> None:
        run, train, device = self.run, self.train, self.device
        measure.reset_peak_memory(device)
        self.splits = load_splits(run.task, run.seed)
        stages = [stage_of(run.task, train, stage)[0] for stage in train.length_warmup]
        self.outcome.data_digest = staged_digest(self.splits, stages, run.seed)
        last: Order
        if run.task.fresh:
            last = self._fresh_order(run.task, train.batch_size, train.steps or 1)
        else:
            last = finite_order(self.splits.train, train.batch_size, run.seed, train.shuffle, device)
        self.order = StagedOrder([self._stage(stage) for stage in train.length_warmup], last)
        self.cleanup.callback(self.order.close)
        self.valid = [to_device(segment, device) for segment in self.splits.valid]
        self.total_steps = self.order.stage_steps + (train.steps or (train.epochs or 1) * self.order.epoch_steps)
        unit = self.order.epoch_steps if train.epochs else 1
        self.eval_steps = (train.eval_every or 0) * unit or max(1, self.total_steps // 10)

        torch.manual_seed(torch_seed(run.seed, "init"))
        self.model: Model = run.model.build(run.task.spec).to(device)
        self.step = 0
        if train.init_from is not None and start_weights:
            self._start_with_weights()
        self._record_kernels(start=True)
        self.sharded = self.group.shards(self.model)
        self.whole = self.group.divide(self.model)
        self.loss = torch.compile(self._mean_loss, dynamic=False) if train.compile else self._mean_loss
        groups = self.model.param_groups(train.no_decay)
        self.base_lr = [group.lr or train.lr for group in groups]
        # a recorded step would have to hold what the processes exchange
        recorded = device.type == "cuda" and self.group.size == 1
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": group.parameters,
                    "lr": torch.tensor(lr, device=device) if recorded else lr,
                    "weight_decay": train.weight_decay if group.weight_decay is None else group.weight_decay,
                }
                for group, lr in zip(groups, self.base_lr, strict=True)
            ],
            betas=train.betas,
            eps=train.eps,
            fused=device.type == "cuda" or None,
            capturable=recorded,
        )
        self.parameters = [parameter for group in groups for parameter in group.parameters]
        torch.manual_seed(torch_seed(run.seed, "dropout"))

        self.watch = measure.Stopwatch(device)
        self.selection = Selection(train)
        self.scores = Scores(run.task, device)
        # on the device, so that the loop never waits: steps, first step with a bad loss, sum of losses, their count
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=device)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_count = torch.zeros((), dtype=torch.int64, device=device)
        self.accumulators = (self.counter, self.bad_step, self.loss_sum, self.loss_count)
        self.graphs = BatchGraphs(self._touched, device, self.watch.cancel) if recorded else None

    def _require_rows(self) -> None:
        """Raises RunEnded for a task without training or test rows, whose run would measure nothing."""
        # the search ends at the first segment with rows, so that the longer ones of a test are not made twice
        rows = {"test": self.run.task.segments("test", self.run.seed)}
        if not self.run.task.fresh:
            rows["train"] = iter(self.splits.train)
        for split, segments in rows.items():
            if not any(len(segment) for segment in segments):
                raise RunEnded("failed", f"task {self.run.task_name} has no rows in its split {split!r}")

    def _start_with_weights(self) -> None:
        start = self.run.start
        if self.run.base is not None and self.checkpoint is not None:
            # the runs of one experiment and scale share a folder
            start = self.checkpoint.with_name(f"{self.run.base.run_id}.weights")
        if start is None or not start.exists():
            raise RunEnded("failed", f"train.init_from: there are no weights in {start}")
        self.outcome.add("weights_taken", "fraction", take_weights(self.model, start, self.run.task_name))

    def _fresh_order(self, task: Task, batch_size: int, steps: int) -> Order:
        """The order of a fresh task. steps: length of an epoch where neither the run nor the task has one."""
        rows = task.epoch_rows
        per_epoch = self.train.epoch_steps or (steps if rows is None else -(-rows // batch_size))
        return FreshOrder(task, batch_size, self.run.seed, per_epoch, self.device)

    def _stage(self, stage: Stage) -> tuple[Callable[[], Order], Callable[[Order], int]]:
        """A function that opens the order of a stage, and one from that order to the number of steps."""
        task, batch_size = stage_of(self.run.task, self.train, stage)

        def opened() -> Order:
            if task.fresh:
                return self._fresh_order(task, batch_size, stage.steps or 1)
            rows = tuple(task.segments("train", self.run.seed))
            return finite_order(rows, batch_size, self.run.seed, self.train.shuffle, self.device)

        def steps(order: Order) -> int:
            return stage.steps or (stage.epochs or 1) * order.epoch_steps

        return opened, steps

    # ---------------------------------------------------------------- one step

    def _mean_loss(self, batch: Batch) -> Tensor:
        positions = None if batch.positions is None else batch.positions.long()
        with autocast(self.train.precision, self.device):
            return mean_loss(self.model, batch.inputs, batch.targets.long(), positions)

    def _logits(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits of a batch and their targets, a few rows at a time where there are many logits."""
        positions = None if batch.positions is None else batch.positions.long()
        num_classes = self.run.task.spec.num_classes
        cast = partial(autocast, self.train.precision, self.device)
        return logits_by_rows(self.model, batch.inputs, batch.targets.long(), positions, num_classes, cast)

    def _train_step(self, batch: Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.group.size > 1:
            # so no checkpoint needs the random states of all processes
            torch.manual_seed(torch_seed(self.run.seed, "dropout", self.group.rank, self.step))
        loss = self.group.backward(self.whole, self.loss, batch, self.train.micro_batch_size)
        if self.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.train.clip)
        self.optimizer.step()
        is_bad = (self.bad_step < 0) & ~torch.isfinite(loss)
        self.bad_step.copy_(torch.where(is_bad, self.counter, self.bad_step))
        self.counter += 1
        self.loss_sum += loss
        self.loss_count += 1

    def _eval_step(self, batch: Batch) -> None:
        with torch.no_grad():
            for piece in self.group.pieces(batch, None) if self.group.size > 1 else (batch,):
                self.whole(self._score, piece)

    def _score(self, batch: Batch) -> None:
        # the rows of several processes are not one batch
        self.scores.add(self._logits(batch), num_rows=len(batch.targets) if self.group.size == 1 else None)

    def _call(self, kind: str, function: Callable[[Batch], None], segment: Segment, rows: Tensor) -> None:
        """Calls `function` on the given rows: as a replayed graph on a GPU, directly elsewhere and in a group."""
        if self.graphs is None:
            function(take(segment, rows))
        else:
            self.graphs.call(kind, function, segment, rows)

    def _touched(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from self.accumulators
        yield from self.scores.sums.values()

    def _set_lr(self) -> None:
        planned = lr_factor(self.train, self.step, self.total_steps, self.order.epoch_steps)
        factor = self.selection.plateau.factor * planned
        self.lr = self.train.lr * factor
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        self.model.train()
        saved_at = time.perf_counter()
        while self.step < self.total_steps and not self.selection.done:
            self._heed_stop()
            segment, rows = self.order.locate(self.step)
            self._set_lr()
            self.watch.start()
            self._call("train", self._train_step, segment, rows)
            self.watch.add(len(rows) * segment.inputs.shape[1])
            self.step += 1
            at_eval = self.step % self.eval_steps == 0 or self.step == self.total_steps
            if self.group.agreed(at_eval or self.watch.seconds > REPORT_EVERY_S):
                self._check_finite()
                self.watch.stop()
                self._report()
                if at_eval:
                    self._evaluate_valid()
                if self.group.agreed(time.perf_counter() - saved_at > CHECKPOINT_EVERY_S):
                    self._save_if_possible()
                    saved_at = time.perf_counter()
        self.outcome.step = self.step
        if self.group.agreed(self.earlier_s + time.perf_counter() - self.began > CHECKPOINT_EVERY_S):
            self._save_if_possible()
        self.trained = True

    def _heed_stop(self) -> None:
        if self.group.agreed(self.stop()):
            # a test changes the weights and adds rows, so the checkpoint of the last step, or before it, stays
            if not self.trained:
                self._save_if_possible()
                if self.unsaved and self.group.rank == 0:
                    # the display of the run is about to end, and a file shows none
                    last = "the run continues from its last checkpoint, or begins anew"
                    print(f"{self.run.run_id[:6]}: {self.unsaved.strip()}; {last}", file=sys.stderr)
            raise KeyboardInterrupt

    def _check_finite(self) -> None:
        bad = int(self.bad_step)
        if bad >= 0:
            self.outcome.step = bad
            raise DivergedError(bad)

    def _report(self) -> None:
        if self.report is not None:
            count = int(self.loss_count)
            loss = float(self.loss_sum) / count if count else math.nan
            rate = self.watch.steps_per_s[-1] if self.watch.steps_per_s else 0.0
            accuracy = self.selection.accuracy
            scored = "" if accuracy is None else f"  accuracy {accuracy:.3f}"
            self.note = f"loss {loss:.4f}{scored}  {rate:.0f} steps/s{self.unsaved}"
            self._tell({"train/loss": loss, "train/steps_per_s": rate, "lr": self.lr})

    def _tell(self, metrics: dict[str, float]) -> None:
        """Reports how far the run is, with new values."""
        if self.report is not None:
            seconds = self.earlier_s + time.perf_counter() - self.began
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self.report(Progress(self.step, self.total_steps, self.note, finite, seconds))

    def _evaluate(self, segment: Segment, kind: str | None) -> Metrics:
        """The metrics of a segment. kind: name to record graphs under; None: no graphs."""
        self.scores.clear()
        size = self.train.eval_batch_size or self.train.batch_size
        with self._at_rate(segment):
            for start, stop in chunks(len(segment), size):
                rows = torch.arange(start, stop, device=self.device)
                if kind is None:
                    self._eval_step(take(segment, rows))
                else:
                    self._call(kind, self._eval_step, segment, rows)
        self.group.add_up(self.scores.sums.values())
        return self.scores.read()

    def _at_rate(self, segment: Segment) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model's step sizes follow the segment's sampling rate."""
        return contextlib.nullcontext() if segment.rate == 1 else self.model.at_rate(segment.rate)

    def _add_rows(self, split: str, parts: Mapping[str, list[Metrics]], *, lost: str = "") -> dict[str, float]:
        """Adds the rows of a split, tells its means to whoever watches, and returns them.

        lost: why a part of the split has no metrics, so that the split as a whole has none either.
        """
        means = add_rows(self.outcome, self.run.task, split, parts, self.step, whole=not lost)
        if lost:
            self.outcome.add("accuracy", "fraction", None, status="oom", error=lost, split=split, step=self.step)
        self._tell({f"{split}/{metric}": mean for metric, mean in means.items()})
        return means

    def _evaluate_valid(self) -> None:
        count = int(self.loss_count)
        if count:
            mean = float(self.loss_sum) / count
            self.outcome.add("loss", "nats", mean, split="train", step=self.step)
            self.loss_sum.zero_()
            self.loss_count.zero_()
        self.model.eval()
        parts = defaultdict(list)
        for segment in self.valid:
            parts[segment.slice].append(self._evaluate(segment, "valid"))
        self.model.train()
        self.selection.update(self._add_rows("valid", parts), self.model.state_dict)

    # ---------------------------------------------------------------- after the last step

    def _test(self) -> None:
        self.model.eval()
        if self.graphs is not None:
            self.graphs.clear()
        if self.train.test_last:
            self._test_as("test-last")
        if self.selection.weights is not None:
            self.model.load_state_dict(self.selection.weights)
        self._test_as("test")

    def _test_as(self, split: str) -> None:
        """Tests the weights that the model has, and adds their rows under the name `split`."""
        parts = defaultdict(list)
        lost = ""
        for segment in self.run.task.segments("test", self.run.seed):
            self._heed_stop()
            if segment.rate != 1:
                with self.model.at_rate(segment.rate) as follows:
                    scale = 1 / segment.rate if follows else 1.0
                self.outcome.add("step_scale", "ratio", scale, split=split, slice=segment.slice, step=self.step)
            try:
                parts[segment.slice].append(self._evaluate(to_device(segment, self.device), None))
            except torch.OutOfMemoryError as error:
                if self.group.size > 1:
                    # the other processes wait for the sums of this one
                    raise
                lost = f"{segment.slice}: {str(error).splitlines()[0]}".removeprefix(": ")
                if segment.slice:
                    columns = {"split": split, "slice": segment.slice, "step": self.step}
                    self.outcome.add("accuracy", "fraction", None, status="oom", error=lost, **columns)
        if not self._add_rows(split, parts, lost=lost) and not lost:
            raise RunEnded("failed", f"task {self.run.task_name} has no labels in its split 'test'")

    def _gather(self) -> None:
        """Puts a whole model in the place of one that is sharded, for what is done without the other processes."""
        if self.sharded:
            del self.optimizer, self.whole
            whole = self.run.model.build(self.run.task.spec).to(self.device)
            checkpoints.copy_whole(self.model, whole)
            self.model = whole
            self.model.eval()

    def _generate(self) -> None:
        """Lets the model make sequences where the task asks for them, and adds what its judge says."""
        task = self.run.task
        wanted = task.generation()
        if wanted is None:
            return
        size = self.train.eval_batch_size or self.train.batch_size
        parts = []
        try:
            with autocast(self.train.precision, self.device):
                for start, stop in chunks(wanted.num_rows, size):
                    seed = torch_seed(self.run.seed, "generate", start)
                    parts.append(
                        generate(
                            self.model,
                            torch.full((stop - start, 1), wanted.first_token, device=self.device),
                            task.spec.max_length,
                            temperature=wanted.temperature,
                            seed=seed,
                            callback=lambda _: self._heed_stop(),
                            every=256,
                        )
                    )
        except ValueError as error:
            # a model that reads the future has no step
            self.outcome.add("generation", "", None, split="generated", step=self.step, status="n/a", error=str(error))
            return
        for split, metric, value in task.judge(torch.cat(parts), self.device):
            self.outcome.add(metric, UNITS.get(metric, ""), value, split=split, step=self.step)

    def _record_kernels(self, start: bool = False) -> None:
        """Records the filters of the layers, at the start or with the weights that were tested."""
        probe = self.train.record_kernels
        if probe is None:
            return
        for row in kernel_rows(self.model.convolutions(), self.run.task.spec.max_length, probe, start=start):
            self.outcome.add(**{"step": self.step, **row})

    def _measure(self) -> None:
        add = self.outcome.add
        add("num_parameters", "count", sum(parameter.numel() for parameter in self.parameters))
        metric, value = measure.peak_memory(self.device)
        add(metric, "bytes", value)
        for metric, unit, rates in (
            ("train_throughput", "tokens/s", self.watch.tokens_per_s),
            ("train_steps", "steps/s", self.watch.steps_per_s),
        ):
            if rates:
                add(metric, unit, measure.median(rates), samples=rates)
        segment, rows = self.order.locate(max(0, self.step - 1))
        batch, length = take(segment, rows), segment.inputs.shape[1]
        add("state_size", "numbers", self.model.state_size(length), slice=f"length={length}")
        if self.group.size > 1:
            reason = "a run of one process measures it"
            add("inference_throughput", "tokens/s", None, status="n/a", error=reason)
            return

        def forward() -> None:
            with torch.no_grad():
                for _ in self._logits(batch):
                    pass

        call: Callable[[], None] = forward
        if self.device.type == "cuda":
            call = record(forward, lambda: (), self.device, None)
        samples = measure.rate(call, len(rows) * length, self.device)
        add("inference_throughput", "tokens/s", measure.median(samples), samples=samples)

    # ---------------------------------------------------------------- checkpoints

    def _save_if_possible(self) -> None:
        """Saves a checkpoint. If that fails, the last one stays, the training goes on, and the display says so."""
        try:
            self._save()
            self.unsaved = ""
        # torch raises RuntimeError where a file cannot be written to its end
        except (OSError, RuntimeError) as error:
            self.unsaved = f"  no checkpoint: {str(error).splitlines()[0][:60]}"

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        state = {
            "run_id": self.run.run_id,
            "config": json.dumps(self.run.resolved),
            "data_digest": self.splits.digest,
            "step": self.step,
            "seconds": self.earlier_s + time.perf_counter() - self.began,
            "accumulators": list(self.accumulators),
            **self.selection.state_dict(),
            "cpu_random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "rows": self.outcome.rows,
            "rates": [self.watch.tokens_per_s, self.watch.steps_per_s],
        }
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "best_weights": self.selection.weights,
        }
        checkpoints.save(self.checkpoint, state, tensors, self.group, sharded=self.sharded)

    def _restore(self) -> None:
        last = self.checkpoint
        reason = ""
        for path in () if last is None else (last, checkpoints.earlier(last)):
            # opening a named pipe would wait for a writer
            if not path.is_file():
                continue
            try:
                self._take(*checkpoints.load(path, self.device))
            except (RunEnded, torch.OutOfMemoryError):
                raise
            except Exception as error:
                reason = reason or " ".join(str(error).split())[:120]
            else:
                reason = ""
                break
        if reason:
            raise RunEnded("failed", f"{last}: cannot be continued from ({reason}); remove it")
        if len(set(self.group.everywhere(self.step))) > 1:
            raise RunEnded("failed", f"{self.checkpoint}: not all processes see it; they need a folder that they share")

    def _take(self, state: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        """Continues from what `_save` wrote."""
        if state["run_id"] != self.run.run_id or state["data_digest"] != self.splits.digest:
            raise RunEnded("failed", f"{self.checkpoint}: belongs to another run; remove it")
        weights = self.model.state_dict()
        self.model.load_state_dict(checkpoints.from_parts([part["model"] for part in parts], weights))
        # by index and not in order, because a parameter that has had no gradient has no state
        moments = {
            index: checkpoints.from_parts(
                [part["optimizer"][index] for part in parts], dict.fromkeys(values, self.parameters[index])
            )
            for index, values in parts[0]["optimizer"].items()
        }
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        # loading replaces the learning-rate tensors, which recorded graphs read in place
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        for mine, saved in zip(self.accumulators, state["accumulators"], strict=True):
            mine.copy_(saved)
        best = [part["best_weights"] for part in parts]
        self.selection.load_state_dict(state, None if best[0] is None else checkpoints.from_parts(best, weights))
        torch.set_rng_state(state["cpu_random"].cpu())
        if state["cuda_random"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"].cpu(), self.device)
        self.step = state["step"]
        self.earlier_s = state["seconds"]
        self.outcome.rows = state["rows"]
        self.watch.tokens_per_s, self.watch.steps_per_s = state["rates"]
