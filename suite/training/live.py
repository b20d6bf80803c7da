"""Metrics of a training run while it trains: always as JSON lines beside its rows, and to other viewers if asked.

The file `<run_id>.jsonl` has a line for every report of the trainer (twice a second at most, and at every evaluation):

    {"step": 120, "seconds": 3.41, "train/loss": 0.6931, "train/steps_per_s": 140.2, "lr": 0.001}
    {"step": 120, "seconds": 3.52, "valid/accuracy": 0.512, "valid/loss": 0.6893}

`train/loss` is the mean since the last evaluation. The numbers are those that the trainer reads for its display anyway.
A run that continues from the checkpoint of step S keeps the lines up to S, so no step is there twice.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from subquad.suite import trackers
from subquad.suite.environment import with_extra
from subquad.suite.registry import nearest
from subquad.suite.runs import Progress, Run
from subquad.suite.store.target import is_remote, make_folder, replacing

SINKS = ("tensorboard", "trackio", "wandb")
"""Viewers that get the metrics, too; the name of each is that of its package and of the extra that installs it."""

UPLOAD_EVERY_S = 30.0
"""Seconds between two copies of the lines to a place without files that grow."""


def check_sinks(names: Iterable[str], results: Path) -> None:
    """Raises ValueError for an unknown viewer, one whose package is missing, or one that cannot use the place."""
    for name in names:
        if name not in SINKS:
            raise ValueError(f"--log {name}: unknown{nearest(name, SINKS)}; there are: {', '.join(SINKS)}")
        require(name, f"--log {name}")
        if name == "tensorboard" and is_remote(results):
            raise ValueError(f"--log {name} --results {results}: it writes files of this machine; give a folder")


def require(package: str, words: str, extra: str = "") -> None:
    """Raises ValueError, with the words that asked for it in front, where an optional package is missing.

    extra: the one that installs it, where it has another name.
    """
    spec = importlib.util.find_spec(package)
    # a folder of this name is no package
    if spec is None or spec.origin is None:
        raise ValueError(f"{words} needs the package {package}; install the extra: {with_extra(extra or package)}.")


class Sink(Protocol):
    """A viewer. Its class is called with the run, the path of the JSON lines, and the step that the run starts from."""

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """The file beside the rows."""

    def __init__(self, run: Run, path: Path, step: int) -> None:
        self.path = path
        # opening a named pipe would wait for a reader
        if path.exists() and not path.is_file():
            raise OSError("it is no regular file; remove it")
        lines = [line for line in _lines(path) if step > 0 and _is_kept(line, step)]
        self.file: IO[str] | None = None
        self.kept: list[str] = []
        self.uploaded_at = time.monotonic()
        if is_remote(path):
            self.kept = lines
            return
        with replacing(path) as temporary:
            temporary.write_text("".join(lines))
        self.file = path.open("a")

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, "seconds": round(seconds, 3), **metrics}) + "\n"
        if self.file is not None:
            self.file.write(line)
            self.file.flush()
            return
        self.kept.append(line)
        if time.monotonic() - self.uploaded_at > UPLOAD_EVERY_S:
            self._upload()

    def _upload(self) -> None:
        with replacing(self.path) as temporary:
            temporary.write_text("".join(self.kept))
        self.uploaded_at = time.monotonic()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        else:
            self._upload()


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; a process that was killed may have left a part of one."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _is_kept(line: str, step: int) -> bool:
    """Whether a line is from before the checkpoint of a step; tests follow the last step and are repeated."""
    try:
        values = json.loads(line)
        return values["step"] <= step and not any(key.startswith("test") for key in values)
    except (ValueError, KeyError, TypeError):
        return False


class TensorBoard:
    """Event files in the folder `<run_id>.tensorboard`; `tensorboard --logdir results/local` shows all runs."""

    def __init__(self, run: Run, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = path.with_suffix(".tensorboard")
        if step == 0:
            shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        # the writer hides events that were written after the checkpoint
        self.writer: Any = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10)
        if step == 0:
            self.writer.add_text("settings", f"```\n{json.dumps(run.resolved, indent=1)}\n```")

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases with the id of ours, in the project `subquad` unless WANDB_PROJECT names another."""

    def __init__(self, run: Run, path: Path, step: int) -> None:
        import wandb

        folder = None if is_remote(path) else str(path.parent)
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "subquad"),
            id=run.run_id,
            name=run.title,
            group=run.experiment,
            config=run.resolved,
            dir=folder,
            # without it, a run from the first step on takes the place of an earlier one with its id
            resume="allow" if step > 0 else None,
        )

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run of Trackio, named by the id of ours (`suite.trackers`)."""

    def __init__(self, run: Run, path: Path, step: int) -> None:
        self.run = trackers.begin(run.run_id, run.experiment, run.resolved, resume=step > 0)

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Log:
    """Context manager that gives the progress of one run to its file and to the viewers that were asked for.

    A run that reports no metrics, as a timing, gets no file. A log that cannot be written ends with a warning, and the
    run goes on.
    """

    def __init__(self, run: Run, path: Path, names: Iterable[str] = ()) -> None:
        self.run, self.path = run, path
        kinds: dict[str, Any] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WeightsAndBiases}
        self.kinds = [JsonLines, *(kinds[name] for name in names)]
        self.sinks: list[Sink] | None = None

    def add(self, progress: Progress) -> None:
        """Takes the next report. The first one with metrics is from the step that the run starts from."""
        if progress.metrics is None:
            return
        if self.sinks is None:
            self.sinks = []
            for kind in self.kinds:
                with self._kept_going():
                    self.sinks.append(kind(self.run, self.path, progress.step))
        if progress.metrics:
            for sink in list(self.sinks):
                with self._kept_going(sink):
                    sink.add(progress.step, progress.seconds, progress.metrics)

    @contextlib.contextmanager
    def _kept_going(self, sink: Sink | None = None) -> Any:
        """A context whose errors end one sink and not the run, whatever a viewer's library raises."""
        try:
            yield
        except Exception as error:
            if sink is not None and self.sinks is not None:
                self.sinks.remove(sink)
            reason = " ".join(str(error).split())[:160]
            warnings.warn(f"{self.path}: live metrics end here ({type(error).__name__}: {reason})", stacklevel=3)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        for sink in list(self.sinks or ()):
            with self._kept_going(sink):
                sink.close()
