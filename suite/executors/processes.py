"""Processes that have torch and the suite loaded when they start.

A new Python takes seconds of processor time to load torch. So the first of these processes starts a server that loads
it once and computes nothing, and every process is forked from that server within milliseconds (`forkserver` in the
standard library). No thread of torch and no GPU is in use there, and so a fork is safe.

The processes see none of the signals that a terminal or a scheduler sends to all processes (`SIGNALS`).
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end: Ctrl-C, a scheduler's, and that of a closed terminal."""

LOADED = [
    "subquad.suite.commands",
    "subquad.suite.executors.workers",
    "subquad.suite.training.trainer",
    "torch._dynamo",
    "pandas",
    "subquad.suite.executors.frozen",
]
"""The server imports these modules, and a process imports by itself what else it needs. Optimizers of torch import
`torch._dynamo` when they are made, which takes as long as the import of torch itself, and pyarrow imports pandas when
it makes a table of rows."""

TRIES = 5
"""`start` tries this many times to start a process, because the server may die meanwhile."""

SERVER_LOST = 255
"""The standard library gives this exit code to every process whose server has died, even if the process lives on."""

LOST_SERVER = "the server of its process was killed"
"""Returned by `ended` for a process that has lived on and is killed now, because nobody would hear of its end."""

CONTEXT = multiprocessing.get_context("forkserver")


class StopFlag:
    """Asks this process and its workers for an end: a number in the memory that they share.

    An event of the standard library has a lock. A signal handler would wait for it for ever where it interrupts the
    code that holds it, and so would everybody after the end of a worker that was killed while it held it.
    """

    def __init__(self) -> None:
        self._end_at = CONTEXT.Value("d", 0.0, lock=False)

    def set(self, grace_s: float = math.inf) -> None:
        """Asks for an end within so many seconds. Of several requests, that of the earliest end counts."""
        self._end_at.value = min(time.monotonic() + grace_s, self._end_at.value or math.inf)

    def is_set(self) -> bool:
        return self._end_at.value > 0

    @property
    def over_s(self) -> float:
        """Seconds since the end of the time that `set` gave; negative before, and unless it was called."""
        return time.monotonic() - (self._end_at.value or math.inf)

    def wait(self, seconds: float) -> None:
        """Waits until it is set, at most so long."""
        until = time.monotonic() + seconds
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))


@contextlib.contextmanager
def _as_the_server_is_to_be() -> Iterator[None]:
    """A context in which a process that is started imports the modules of this one and has `SIGNALS` blocked."""
    ours = {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "PYTHONSAFEPATH": "1",
        # an import that asks whether there is a GPU must not use it, or the processes could not
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    before = {name: os.environ.get(name) for name in ours}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_server() -> None:
    """Starts the server unless it runs, and does not wait until it has loaded its modules."""
    CONTEXT.set_forkserver_preload(LOADED)
    # the tracker of shared resources unblocks signals when it starts, so it starts before they are blocked
    resource_tracker.ensure_running()
    with _as_the_server_is_to_be():
        forkserver.ensure_running()


@contextlib.contextmanager
def _without_the_main_script() -> Iterator[None]:
    """A context in which a process that is started does not import the script that the user called.

    No process needs it, and a script without the guard `if __name__ == "__main__":` would carry out its grid in each.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start(body: Callable[..., None], *arguments: Any, daemon: bool = True, name: str | None = None) -> BaseProcess:
    """Starts a process that calls `body` with the arguments, in the surroundings that this process has now."""
    process = CONTEXT.Process(target=_begin, args=(dict(os.environ), body, *arguments), daemon=daemon, name=name)
    for tries_left in reversed(range(TRIES)):
        start_server()
        try:
            with _without_the_main_script():
                process.start()
            break
        except (ConnectionError, EOFError):
            # the server was killed, and may be found dead only in a moment
            if not tries_left:
                raise
            time.sleep(0.2)
    return process


def _begin(surroundings: Mapping[str, str], body: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(surroundings)
    body(*arguments)


def ended(process: BaseProcess) -> str:
    """Waits for the end of a process, and says how it ended."""
    process.join()
    code = process.exitcode
    assert code is not None
    if _outlives_server(process):
        kill(process)
        return LOST_SERVER
    return f"killed, signal {-code}" if code < 0 else f"the process ended with exit code {code}"


def _outlives_server(process: BaseProcess) -> bool:
    # a living server lets no process of its own linger once it has ended, whatever its exit code is
    return process.exitcode == SERVER_LOST and Path(f"/proc/{process.pid}").exists()


def kill(process: BaseProcess) -> None:
    """Kills a process unless it has ended, and all that it has started, which may hang as it does."""
    if process.pid is not None and (process.is_alive() or _outlives_server(process)):
        kill_children(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def kill_children(pid: int) -> None:
    """Kills all processes that a process has started, and those that they have."""
    for child in children(pid):
        kill_children(child)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that a process has started, where the system tells."""
    found: list[int] = []
    # a process that ends meanwhile has none
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found
