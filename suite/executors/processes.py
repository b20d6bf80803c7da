"""Processes that have torch and the suite loaded when they start.

A new Python takes seconds of processor time to load torch. So the first of these processes starts a server that loads
it once and computes nothing, and every process is forked from that server within milliseconds (`forkserver` in the
standard library). No thread of torch and no GPU is in use there, and so a fork is safe.

The processes see none of the signals that a terminal or a scheduler sends to all processes (`SIGNALS`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end: Ctrl-C, a scheduler's, and that of a closed terminal."""

LOADED = ["suite.commands", "suite.executors.workers", "suite.training.trainer", "torch._dynamo"]
"""The server imports these modules, and a process imports by itself what else it needs. Optimizers of torch import
`torch._dynamo` when they are made, which takes as long as the import of torch itself."""

TRIES = 5
"""`start` tries this many times to start a process, because the server may die meanwhile."""

SERVER_LOST = 255
"""The standard library gives this exit code to every process whose server has died, even if the process lives on."""

CONTEXT = multiprocessing.get_context("forkserver")


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
    if code == SERVER_LOST and process.pid is not None:
        # the process may live on, and nobody would hear of its end
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return f"killed, signal {-code}" if code < 0 else f"the process ended with exit code {code}"
