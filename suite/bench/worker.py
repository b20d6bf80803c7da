"""A process that times cases of one revision's operators, with the workloads and the clock of this revision.

Whole models of other libraries are timed in such a process as well (`suite.bench.models`).

Parent and child speak JSON lines over the child's standard input and output. Several workers live at once, and the
parent lets one of them measure at a time: it asks no other, or pauses those that work.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from subquad.suite.bench.base import Base
from subquad.suite.bench.cases import Case
from subquad.suite.environment import REPOSITORY, import_path
from subquad.suite.executors.processes import kill_children
from subquad.suite.registry import Entry

TICK_S = 0.2
"""Seconds between two calls of the function that a request names for the time until its answer."""


class Worker:
    """The parent's side.

    targets:  the table of operators.
    base:     imports what this other revision has from it.
    versions: versions of the workloads, which those of the base must have, too.
    log:      file that gets what the child prints, of which an error quotes the last line; None: our stderr.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        device: str,
        *,
        base: Base | None = None,
        versions: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ) -> None:
        self.setting = {
            "targets": dict(targets),
            "device": device,
            "base": None if base is None else base.to_json(),
            "versions": dict(versions or {}),
            "path": [os.path.abspath(folder) for folder in sys.path],
        }
        self.log = log
        self.until = math.inf
        """The time of `time.monotonic` at which the request of now is given up."""
        self.paused_at: float | None = None
        self.environment = {**os.environ, "PYTHONPATH": import_path(), **(environment or {})}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        if self.log is not None:
            self.log.seek(0)
            self.log.truncate()
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "subquad.suite.bench.worker", json.dumps(self.setting)],
            cwd=REPOSITORY,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            # a signal for the group reaches compilers that it has started, too, and Ctrl-C reaches the parent alone
            process_group=0,
        )

    def ask(
        self,
        what: str,
        *,
        timeout_s: float = math.inf,
        waiting: Callable[[], object] = lambda: None,
        **arguments: Any,
    ) -> Any:
        """The child's answer; ChildError where the request failed. A child that has ended is started again.

        timeout_s: seconds, without those of a pause, after which a child that has not answered is stopped, which raises
            TookTooLong.
        waiting: called every `TICK_S` until there is an answer, and once the child has ended without one.
        """
        self.until = time.monotonic() + timeout_s
        if self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self.process.stdin.flush()
            # an answer is one line, written at once, so there is never a rest of one in the buffer
            while not select.select([self.process.stdout], [], [], TICK_S)[0]:
                waiting()
                if self.paused_at is None and time.monotonic() >= self.until:
                    self.stop()
                    raise TookTooLong("failed", f"it took more than {timeout_s:.0f} s and was stopped")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            # a signal that ends the child may be a request to this process, too
            waiting()
            raise ChildError("failed", self._death())
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["status"], answer["error"])
        return answer["value"]

    def _death(self) -> str:
        """Says how the child ended, with the last line that it printed if there is a log."""
        code = self.process.wait()
        how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        lines = []
        if self.log is not None:
            self.log.seek(0)
            lines = self.log.read().split("\n")
        last = next((f"; its last line of output was: {line}" for line in reversed(lines) if line.strip()), "")
        return f"the timing process ended with {how}{last}"

    def pause(self) -> None:
        """Lets the child and all that it has started stand still until `resume`. The GPU ends what it has begun."""
        self.paused_at = time.monotonic()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        assert self.paused_at is not None
        self._signal(signal.SIGCONT)
        self.until += time.monotonic() - self.paused_at
        self.paused_at = None

    def _signal(self, number: signal.Signals) -> None:
        # the process may have ended
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Ends the child and all that it has started; a request that waits for its answer raises ChildError."""
        if self.process.poll() is None:
            kill_children(self.process.pid)
            self.process.kill()

    def stop(self) -> None:
        """Ends the child as `kill` does and waits until it has ended; the next request starts another one."""
        self.kill()
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ChildError(Exception):
    """An error in a worker process, with the status for its row."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TookTooLong(ChildError):
    """A request that was not answered in the time it had."""


def cold_start(targets: Mapping[str, str], device: str, case: Case) -> float:
    """Seconds of the first call in a fresh process whose compile caches are empty, inputs and context ready."""
    with tempfile.TemporaryDirectory() as cache:
        caches = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache, "CUDA_CACHE_PATH": cache}
        with Worker(targets, device, environment=caches) as worker:
            return worker.ask("first_call", case=case.to_json())


def _serve(setting: dict[str, Any]) -> None:
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: the kernel ends this process with its parent, whatever the code here is stuck in
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # prints, those of compiled code and of other processes included, go to stderr and do not mix with the answers, and
    # whoever reads from stdin takes no request
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # the folders of plugins are behind those of the suite
    sys.path.extend(folder for folder in setting["path"] if folder not in sys.path)
    base = Base.from_json(setting["base"]) if setting["base"] else None
    if base:
        base.take_effect()
    import torch

    from subquad.suite.bench import measure

    device = torch.device(setting["device"])
    calls: dict[Case, Callable[[], Any]] = {}

    def workload(case: Case) -> Any:
        target = setting["targets"][case.op]
        module = target.partition(":")[0]
        try:
            found = Entry(target, "").load()
        except ImportError as error:
            raise measure.Unavailable("n/a", error) from None
        except KeyError:
            raise measure.Unavailable("n/a", f"{module} of this revision has no operator {case.op}") from None
        if base and not Path(sys.modules[module].__file__ or "").is_relative_to(base.folder):
            raise measure.Unavailable("n/a", f"this revision has no {module}")
        wanted = setting["versions"].get(case.op, found.version)
        if found.version != wanted:
            raise measure.Unavailable("n/a", f"its inputs have version {found.version}, those of this tree {wanted}")
        return found

    def answer(what: str, case: Any, budget_ms: float = 0.0, as_graph: bool = True) -> Any:
        case = Case.from_json(case)
        if what == "prepare":
            measure.gate(workload(case), case, device)
            calls.clear()
            calls[case] = measure.checked(workload(case), case, device)
            return None
        if what == "record":
            calls[case], found = measure.recorded(workload(case), case, device, as_graph=as_graph)
            return found
        if what == "first_call":
            call = measure.prepare(workload(case), case, device)
            torch.zeros(1, device=device).item()
            begin = time.perf_counter()
            call()
            # its results are still on the way
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begin
        assert what == "sample"
        return measure.sample(calls[case], device, budget_ms)

    def called(what: str, target: str, **arguments: Any) -> Any:
        del what
        # the call before this one may have left tensors
        gc.collect()
        torch.cuda.empty_cache()
        return Entry(target, "").load()(device, **arguments)

    for line in requests:
        request = json.loads(line)
        try:
            call = called if request["what"] == "call" else answer
            reply = {"value": call(**request)}
        except measure.Unavailable as error:
            reply = {"status": error.status, "error": str(error)}
        except torch.OutOfMemoryError:
            reply = {"status": "oom", "error": "out of memory"}
        except (Exception, SystemExit) as error:  # the row records any exception of an operator
            reply = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
