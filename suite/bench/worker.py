"""A process that times cases of one revision's operators, with the workloads and the clock of this revision.

Parent and child speak JSON lines over the child's standard input and output. Several workers live at once, one a
revision, and the parent lets one work at a time, so that two revisions are timed in turn on one device.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from subquad.suite.bench.base import Base
from subquad.suite.bench.cases import Case
from subquad.suite.environment import REPOSITORY, import_path
from subquad.suite.registry import Entry


class Worker:
    """The parent's side.

    targets:  the table of operators.
    base:     imports what this other revision has from it.
    versions: versions of the workloads, which those of the base must have, too.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        device: str,
        *,
        base: Base | None = None,
        versions: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.setting = {
            "targets": dict(targets),
            "device": device,
            "base": None if base is None else base.to_json(),
            "versions": dict(versions or {}),
            "path": sys.path,
        }
        self.environment = {**os.environ, "PYTHONPATH": import_path(), **(environment or {})}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "subquad.suite.bench.worker", json.dumps(self.setting)],
            cwd=REPOSITORY,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, *, timeout_s: float | None = None, **arguments: Any) -> Any:
        """The child's answer; ChildError where the request failed. A child that has ended is started again.

        timeout_s: seconds after which a child that has not answered is stopped, which raises TookTooLong.
        """
        if self.process.poll() is not None:
            self.process = self._start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self.process.stdin.flush()
            # an answer is one line, written at once, so there is never a rest of one in the buffer
            if timeout_s is not None and not select.select([self.process.stdout], [], [], timeout_s)[0]:
                self.stop()
                raise TookTooLong("failed", f"it took more than {timeout_s:.0f} s and was stopped")
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ChildError("failed", f"the timing process ended with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(answer["status"], answer["error"])
        return answer["value"]

    def stop(self) -> None:
        """Ends the child; the next request starts another one."""
        self.process.kill()
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
    # prints of operators go to stderr, so that they do not mix with the answers
    answers, sys.stdout = sys.stdout, sys.stderr
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

    def answer(what: str, case: Case, budget_ms: float = 0.0, recorded: bool = True) -> Any:
        if what == "prepare":
            measure.gate(workload(case), case, device)
            calls.clear()
            calls[case] = measure.checked(workload(case), case, device)
            return None
        if what == "timed":
            return measure.recorded_times(workload(case), case, device, budget_ms, recorded=recorded)
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

    for line in sys.stdin:
        request = json.loads(line)
        request["case"] = Case.from_json(request["case"])
        try:
            reply = {"value": answer(**request)}
        except measure.Unavailable as error:
            reply = {"status": error.status, "error": str(error)}
        except Exception as error:  # the row records any exception of an operator
            reply = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
