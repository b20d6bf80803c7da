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
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.suite.contracts import IGNORE, Batch, Segment
from subquad.suite.environment import code, device_name
from subquad.suite.rng import torch_seed
from subquad.suite.runs import Outcome, Progress, RunEnded, Worker
from subquad.suite.store.weights import kept_tokenizer
from subquad.suite.training import checkpoints, measure, parallel
from subquad.suite.training.capture import BatchGraphs, unchanged
from subquad.suite.training.course import BudgetCourse, Course, FlopsCourse, SecondsCourse
from subquad.suite.training.data import chunks, require_rows, rows_of, take, to_device
from subquad.suite.training.finish import generated_rows, measured_rows
from subquad.suite.training.learned_kernels import kernel_rows
from subquad.suite.training.prepared import Prepared, prepared
from subquad.suite.training.run import TrainingRun
from subquad.suite.training.schedule import lr_factor
from subquad.suite.training.scores import Metrics, Scores, add_rows
from subquad.suite.training.selection import Selection
from subquad.suite.training.spending import Spending, inference_rows

REPORT_EVERY_S = 0.5
CHECKPOINT_EVERY_S = 60.0


class Trainer(Worker):
    """Trains and measures one run.

    checkpoint: file for what a later call needs to continue, or None.
    report: called about twice a second with the progress.
    stop: asked between steps; once it is true, a checkpoint is saved and KeyboardInterrupt raised.
    clock: gives the seconds by which the time of the steps is measured.
    """

    run: TrainingRun
    ready: Prepared
    """Everything the run trains with, from the beginning of a call on."""

    def __init__(self, *run: Any, clock: Callable[[], float] = time.perf_counter, **options: Any) -> None:
        super().__init__(*run, **options)
        self.train = self.run.train
        self.group = parallel.current()
        self.watch = measure.Stopwatch(self.device, clock)
        self.selection = Selection(self.train)
        self.scores = Scores(self.run.task, self.device)
        self.graphs: BatchGraphs | None = None
        self.step, self.earlier_s, self.lr = 0, 0.0, 0.0
        self._factor: float | None = None
        """Factor of the rates that the optimizer has; None until it is set."""
        self._rehearsed: set[tuple[Any, ...]] = set()
        self.trained = False
        self.note, self.unsaved = "preparing", ""

    def __call__(self) -> Outcome:
        """The whole run: train, evaluate, measure."""
        try:
            self.alive("preparing data and model", 0)
            with self._prepared(start=self.run.start_beside(self.checkpoint)):
                require_rows(self.run.task, self.ready.splits, self.run.seed, self.run.task_name)
                self.alive("reading a checkpoint", 0)
                self._restore()
                self._tell({})
                self._loop()
                self._test()
                self._gather()
                self._measure()
        finally:
            self.outcome.seconds = self._seconds()
        return self.outcome

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Gives a function that carries out the next training step, and no recorded graph; nothing is stored."""
        # with which weights the run starts does not matter here
        with self._prepared(start=None):
            self.model.train()

            def step() -> None:
                segment, rows = self.ready.order.locate(self.step)
                self._set_lr()
                self._train_step(take(segment, rows))
                self.step += 1

            yield "training step", step

    @contextlib.contextmanager
    def _prepared(self, *, start: Path | None) -> Iterator[None]:
        with prepared(self.run, self.device, self.group, self.outcome, start=start) as self.ready:
            self.model, self.sharded = self.ready.model, self.ready.sharded
            if self.ready.recorded:
                self.graphs = BatchGraphs(self._touched, self.device, self.watch.pause)
            self.spending = Spending(self.ready.operations, self.watch)
            self.course = self._course()
            yield

    def _seconds(self) -> float:
        return self.earlier_s + time.perf_counter() - self.began

    def _loop(self) -> None:
        self.model.train()
        saved_at = time.perf_counter()
        while not self.selection.done and self.course.goes_on(self.step):
            self._heed_stop("training")
            segment, rows = self.ready.order.locate(self.step)
            self._set_lr()
            self._rehearse(segment, rows)
            self.watch.start()
            self._call("train", self._train_step, segment, rows)
            self.watch.add(len(rows) * segment.inputs.shape[1])
            self.spending.add(segment, len(rows))
            self.step += 1
            readings = self._readings()
            due = bool(readings) or self.course.wants_clock(self.step)
            if self.group.agreed(due or self.watch.seconds > REPORT_EVERY_S):
                if (bad := int(self.ready.losses.bad_step)) >= 0:
                    self.outcome.step = bad
                    segment, rows = self.ready.order.locate(bad)
                    if not (take(segment, rows).targets != IGNORE).any():
                        reason = f"the batch of step {bad} has no label, so its mean loss is no number"
                        raise RunEnded("failed", f"{reason}; leave out rows without labels, or raise train.batch_size")
                    raise RunEnded("diverged", f"loss is not finite at step {bad}")
                self.watch.stop()
                self._report()
                for flops in readings:
                    self._read_at(flops)
                if self.course.evaluates(self.step):
                    self.course.evaluated()
                    self._validate()
                if self.group.agreed(time.perf_counter() - saved_at > CHECKPOINT_EVERY_S):
                    self._save_if_possible()
                    saved_at = time.perf_counter()
        self.outcome.step = self.step
        stages = self.ready.order.stage_steps
        if 0 < self.step <= stages and not self.selection.done:
            reason = f"train.budget ended at step {self.step}, within the {stages} of train.length_warmup"
            raise RunEnded("failed", f"{reason}, before a row of the full length; raise it, or shorten the stages")
        if self.group.agreed(self._seconds() > CHECKPOINT_EVERY_S):
            self._save_if_possible()
        self.trained = True

    def _course(self) -> Course:
        """The course of the run from its beginning."""
        budget = self.train.budget
        if budget is None:
            assert self.ready.total_steps is not None
            return Course(self.ready.total_steps, self.ready.eval_steps)
        if budget.seconds is not None:
            return SecondsCourse(budget, self.watch)

        def next_step(step: int) -> int | None:
            segment, rows = self.ready.order.locate(step)
            return self.spending.flops_of(segment, len(rows))

        return FlopsCourse(budget, self.spending, next_step)

    def _rehearse(self, segment: Segment, rows: Tensor) -> None:
        """Carries out the first step of a shape without any effect, where a time is measured that no compilation is in.

        Where steps are recorded, their recording does so.
        """
        if not isinstance(self.course, SecondsCourse) or self.graphs is not None:
            return
        shape = len(rows), segment.inputs.shape[1:], segment.targets.shape[1:]
        if shape not in self._rehearsed:
            self._rehearsed.add(shape)
            with self.watch.pause(), unchanged(self._touched, self.device):
                self._train_step(take(segment, rows))

    def _readings(self) -> list[float]:
        """Those of `eval_flops` that the last step has reached."""
        spent, before = self.spending.flops, self.spending.flops_before
        return [flops for flops in sorted(self.train.eval_flops) if spent is not None and before < flops <= spent]

    def _read_at(self, flops: float) -> None:
        """Adds the validation metrics at a number of operations, which decide nothing."""
        found, parts = Outcome(), {"": [metrics for _, metrics in self._validation()]}
        add_rows(found, self.run.task, "valid", parts, self.step)
        # a row of the whole split would be taken for an evaluation of the weights that a run may keep
        self.outcome.rows += [{**row, "slice": f"train_flops={flops:g}"} for row in found.rows]

    def _set_lr(self) -> None:
        position = self.course.position(self.step)
        planned = lr_factor(self.train, *position, self.ready.order.epoch_steps)
        factor = self.selection.plateau.factor * planned
        # a rate on the device takes a launch for each group
        if factor == self._factor:
            return
        self._factor, self.lr = factor, self.train.lr * factor
        for group, lr in zip(self.ready.optimizer.param_groups, self.ready.base_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * factor)
            else:
                group["lr"] = lr * factor

    def _train_step(self, batch: Batch) -> None:
        self.ready.optimizer.zero_grad(set_to_none=True)
        if self.group.size > 1:
            # so no checkpoint needs the random states of all processes
            torch.manual_seed(torch_seed(self.run.seed, "dropout", self.group.rank, self.step))
        loss = self._backward(batch)
        if self.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.ready.parameters, self.train.clip)
        self.ready.optimizer.step()
        self.ready.losses.add(loss)

    def _backward(self, batch: Batch) -> Tensor:
        """Adds the gradient of the mean loss of a batch to the parameters, and gives that loss."""
        group, whole, losses = self.group, self.ready.whole, []
        for piece in group.pieces(batch, self.train.micro_batch_size):
            with piece.exchanging(whole):
                loss = piece.share(whole(self.ready.loss, piece.batch))
                # DDP and FSDP take the mean over processes
                (loss if group.size == 1 else loss * group.size).backward()
            losses.append(loss.detach())
        return group.total(losses)

    def _call(self, kind: str, function: Callable[[Batch], None], segment: Segment, rows: Tensor) -> None:
        """Calls `function` on the given rows: as a replayed graph on a GPU, directly elsewhere and in a group."""
        if self.graphs is None:
            function(take(segment, rows))
        else:
            self.graphs.call(kind, function, segment, rows)

    def _touched(self) -> Iterator[Tensor]:
        """The tensors that a step changes in place."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.ready.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from self.ready.losses.tensors
        yield from self.scores.sums.values()

    def _heed_stop(self, phase: str) -> None:
        self.alive(phase, self.step)
        if self.group.agreed(self.stop()):
            # a test changes the weights and adds rows, so the checkpoint of the last step, or before it, stays
            if not self.trained:
                self._save_if_possible()
                if self.unsaved and self.group.rank == 0:
                    # the display of the run is about to end, and a file shows none
                    last = "the run continues from its last checkpoint, or begins anew"
                    print(f"{self.run.run_id[:6]}: {self.unsaved.strip()}; {last}", file=sys.stderr)
            raise KeyboardInterrupt

    def _report(self) -> None:
        if self.report is not None:
            mean = self.ready.losses.mean()
            loss = math.nan if mean is None else mean
            rate = self.watch.steps_per_s[-1] if self.watch.steps_per_s else 0.0
            accuracy = self.selection.accuracy
            scored = "" if accuracy is None else f"  accuracy {accuracy:.3f}"
            self.note = f"loss {loss:.4f}{scored}  {rate:.0f} steps/s{self.unsaved}"
            self._tell({"train/loss": loss, "train/steps_per_s": rate, "lr": self.lr})

    def _tell(self, metrics: dict[str, float]) -> None:
        """Reports how far the run is, with new values."""
        if self.report is not None:
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            expected = self.course.expected(self.step)
            self.report(Progress(self.step, expected, self.note, finite, self._seconds()))

    def _validate(self) -> None:
        mean = self.ready.losses.mean()
        if mean is not None:
            self.outcome.add("loss", "nats", mean, split="train", step=self.step)
            self.ready.losses.clear()
        for row in self.spending.rows(self.step):
            self.outcome.add(**row)
        parts = defaultdict(list)
        for segment, metrics in self._validation():
            parts[segment.slice].append(metrics)
        self.selection.update(self._add_rows("valid", parts), self.model.state_dict)

    def _validation(self) -> list[tuple[Segment, Metrics]]:
        """The metrics of every segment of the validation rows."""
        self.model.eval()
        found = [(segment, self._evaluate(segment)) for segment in self.ready.valid]
        self.model.train()
        return found

    def _test(self) -> None:
        self.alive("testing", self.step)
        self.model.eval()
        # test rows have lengths of their own, each of which would be recorded for a few batches
        self.graphs = None
        if self.train.test_last:
            self._test_as("test-last")
        if self.selection.weights is not None:
            self.model.load_state_dict(self.selection.weights)
        self._test_as("test")

    def _test_as(self, split: str) -> None:
        """Tests the weights that the model has, and adds their rows under the name `split`."""
        parts = defaultdict(list)
        lost = ""
        for segment in rows_of(self.run.task, "test", self.run.seed):
            self._heed_stop("testing")
            if segment.rate != 1:
                with self.model.at_rate(segment.rate) as follows:
                    scale = 1 / segment.rate if follows else 1.0
                self.outcome.add("step_scale", "ratio", scale, split=split, slice=segment.slice, step=self.step)
            try:
                parts[segment.slice].append(self._evaluate(to_device(segment, self.device)))
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

    def _evaluate(self, segment: Segment) -> Metrics:
        """The metrics of a segment."""
        self.scores.clear()
        size = self.train.eval_batch_size or self.train.batch_size
        with self.model.at_rate(segment.rate) if segment.rate != 1 else contextlib.nullcontext():
            for start, stop in chunks(len(segment), size):
                self.alive("evaluating", self.step)
                self._call("valid", self._eval_step, segment, torch.arange(start, stop, device=self.device))
        self.group.add_up(self.scores.sums.values())
        return self.scores.read()

    def _eval_step(self, batch: Batch) -> None:
        with torch.no_grad():
            for piece in self.group.pieces(batch):
                self.ready.whole(self._score, piece.batch)

    def _score(self, batch: Batch) -> None:
        # the rows of several processes are not one batch
        self.scores.add(self.ready.logits(batch), num_rows=len(batch.targets) if self.group.size == 1 else None)

    def _add_rows(self, split: str, parts: Mapping[str, list[Metrics]], *, lost: str = "") -> dict[str, float]:
        """Adds the rows of a split, tells its means to whoever watches, and returns them. lost: as in `add_rows`."""
        means = add_rows(self.outcome, self.run.task, split, parts, self.step, lost=lost)
        self._tell({f"{split}/{metric}": mean for metric, mean in means.items()})
        return means

    def _gather(self) -> None:
        """Puts a whole model in the place of one that is sharded, for what is done without the other processes."""
        if self.sharded:
            self.ready.optimizer.state.clear()
            whole = self.run.model.build(self.run.task.spec).to(self.device)
            checkpoints.copy_whole(self.model, whole)
            self.model = whole
            self.model.eval()

    def _measure(self) -> None:
        """Adds what the network that was tested has learnt, what it generates, its size and its speed."""
        probe, longest = self.train.record_kernels, self.run.task.spec.max_length
        learnt = () if probe is None else kernel_rows(self.model.convolutions(), longest, probe)
        heed_stop = partial(self._heed_stop, "generating")
        for row in chain(learnt, generated_rows(self.model, self.run, self.device, heed_stop)):
            self.outcome.add(**{"step": self.step, **row})
        self.alive("measuring", self.step)
        segment, rows = self.ready.order.locate(max(0, self.step - 1))
        batch, length = take(segment, rows), segment.inputs.shape[1]

        @torch.no_grad()
        def forward() -> None:
            for _ in self.ready.logits(batch):
                pass

        for row in inference_rows(self.ready.operations, batch, length):
            self.outcome.add(**row)
        size = sum(parameter.numel() for parameter in self.ready.parameters)
        call = forward if self.group.size == 1 else None
        for row in measured_rows(self.model, size, self.watch, length, call, len(rows) * length):
            self.outcome.add(**row)

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
        self.alive("writing a checkpoint", self.step)
        # the steps since the last report count as well
        self.watch.stop()
        state = {
            "run_id": self.run.run_id,
            "config": json.dumps(self.run.resolved),
            **kept_tokenizer(self.run.tokenizer),
            "data_digest": self.ready.splits.digest,
            "step": self.step,
            "seconds": self._seconds(),
            "accumulators": list(self.ready.losses.tensors),
            **self.selection.state_dict(),
            "rows": self.outcome.rows,
            "rates": [self.watch.tokens_per_s, self.watch.steps_per_s],
            "spent": self.spending.state(),
            "evaluations": self.course.done if isinstance(self.course, BudgetCourse) else None,
            **self._made_by(),
            "cpu_random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": self.ready.optimizer.state_dict()["state"],
            "best_weights": self.selection.weights,
        }
        checkpoints.save(self.checkpoint, state, tensors, self.group, sharded=self.sharded)

    def _made_by(self) -> dict[str, Any]:
        """The place where this run is trained, as its rows name it; a run may change it when it is continued."""
        return {
            "commit": code(),
            "device": device_name(self.device),
            "processes": self.group.size,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }

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
        if state["run_id"] != self.run.run_id or state["data_digest"] != self.ready.splits.digest:
            raise RunEnded("failed", f"{self.checkpoint}: belongs to another run; remove it")
        made_by = self._made_by()
        # older checkpoints have the device alone
        changed = {name: state[name] for name, mine in made_by.items() if state.get(name, mine) != mine}
        if isinstance(self.course, SecondsCourse) and "device" in changed:
            raise RunEnded(
                "failed",
                f"{self.checkpoint}: its seconds are of {state['device']}; continue the run there, or remove it",
            )
        weights = self.model.state_dict()
        self.model.load_state_dict(checkpoints.from_parts([part["model"] for part in parts], weights))
        checkpoints.take_moments(self.ready.optimizer, [part["optimizer"] for part in parts], self.ready.parameters)
        for mine, saved in zip(self.ready.losses.tensors, state["accumulators"], strict=True):
            mine.copy_(saved)
        best = [part["best_weights"] for part in parts]
        self.selection.load_state_dict(state, None if best[0] is None else checkpoints.from_parts(best, weights))
        torch.set_rng_state(state["cpu_random"].cpu())
        if state["cuda_random"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"].cpu(), self.device)
        self.step = state["step"]
        self.earlier_s = state["seconds"]
        self.outcome.rows = state["rows"]
        self.spending.take(state["spent"])
        if changed:
            what = f"up to step {self.step} by " + ", ".join(f"{name} {value}" for name, value in changed.items())
            self.outcome.add("continued", "", None, step=self.step, status="n/a", error=f"trained {what}")
        if changed.keys() & {"device", "processes", "threads"}:
            # its speed was another one
            self.spending.elsewhere = f"trained {what}"
        else:
            self.watch.tokens_per_s, self.watch.steps_per_s = state["rates"]
        if isinstance(self.course, BudgetCourse):
            self.course.restart(state.get("evaluations"))
