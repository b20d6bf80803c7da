"""Processes that carry out one run together: rank 0 is a worker as any other, the others follow it.

`Leader` starts the others from the worker (`run --nproc`), and `follow` is their body. Under torchrun all are there
already. If one of them is lost, the others end within seconds:

- rank 0 gone: the others watch the process that started them;
- another one gone: a thread of rank 0 notices. Rank 0 may wait for it for ever, so after `GRACE_S` the thread tells the
  parent what happened and ends rank 0, and the parent treats the run as that of any lost worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from subquad.suite.executors.processes import CONTEXT, ended, start
from subquad.suite.plugins import PluginError, changed_since_planned, reason_of, unloaded
from subquad.suite.runner import worker_of
from subquad.suite.runs import Run, RunEnded
from subquad.suite.store import storage
from subquad.suite.training import parallel
from subquad.suite.training.numerics import host_threads

GRACE_S = 3.0
"""Seconds for which rank 0, once another process is lost, may notice it by itself."""


@dataclass(frozen=True)
class Team:
    """Number of processes that train one run, and whether they shard parameters (`suite.training.parallel.Group`)."""

    size: int
    sharded: bool | None = None

    def device(self, rank: int, first: torch.device) -> torch.device:
        """The device of a process, given that of rank 0."""
        return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)


def end_with_parent() -> None:
    """Ends this process when the one that asked for it is gone, of which a pipe tells that nobody writes to.

    A thread waits for that. Code that hangs may hold the interpreter's lock, so that no thread can run: on Linux the
    kernel signals the end of a pipe, too.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_the_end, args=(parent.sentinel,), daemon=True).start()


def _wait_for_the_end(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def follow(root: Path, device: torch.device, threads: int) -> None:
    """Carries out, together with rank 0, the runs that it gives, until it gives None. Raises PluginError."""
    group = parallel.current()
    while (given := group.agreed(None)) is not None:
        plugins, sent = given
        try:
            # this imports the plugins of the run, whose files may have changed since the run was planned
            run = pickle.loads(sent)
        except (Exception, SystemExit) as error:
            raise PluginError(unloaded(plugins, reason_of(error))) from None
        if reason := changed_since_planned(plugins):
            raise PluginError(reason)
        checkpoint = storage.checkpoint_path(root, run.experiment, run.scale, run.run_id)
        try:
            with host_threads(threads):
                worker_of(run)(run, device, checkpoint=checkpoint)()
        except (RunEnded, KeyboardInterrupt):
            # rank 0 has ended for the same reason
            continue


def give(run: Run | None) -> None:
    """Tells the other processes of the group, where there are any, which run is next."""
    if (group := parallel.current()).size > 1:
        group.agreed(None if run is None else (list(run.plugins.values()), pickle.dumps(run)))


def _member(pipe: Connection, rank: int, team: Team, address: str, device: str, root: Path, threads: int) -> None:
    """Body of a process that follows. Before it ends with an error, it sends (status, reason)."""
    end_with_parent()
    try:
        own = torch.device(device)
        parallel.join(rank, team.size, own, address=address, sharded=team.sharded)
        follow(root, own, threads)
    except BaseException as error:
        status = "oom" if isinstance(error, torch.OutOfMemoryError) else "failed"
        reason = str(error)
        if not isinstance(error, PluginError):
            reason = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
        pipe.send((status, f"process {rank} of {team.size}: {reason}"))
        # libraries of the device may hang at their end while the other processes are not there
        os._exit(1)
    # a thread of the process group may hold Python objects still; if it drops them while the interpreter ends, the
    # process aborts, and would count as lost
    parallel.leave()
    os._exit(0)


class Leader:
    """Rank 0 of a team, in a worker process: it starts the others when it is made, and watches them.

    on_failure: called by a thread with (status, reason, fault) if another process has ended and this one still waits
        for it; after that this process ends. fault: how the other was lost; None if it ended with an error of the run.
    """

    def __init__(
        self,
        team: Team,
        device: torch.device,
        root: Path,
        threads: int,
        on_failure: Callable[[str, str, str | None], None],
    ) -> None:
        self.on_failure = on_failure
        self.lost = threading.Event()
        """Set once another process has ended."""
        self.lost_by = ""
        self.error: tuple[str, str] | None = None
        """Status and reason that it sent before."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.members: list[tuple[BaseProcess, Connection]] = []
        for rank in range(1, team.size):
            mine, theirs = CONTEXT.Pipe(duplex=False)
            arguments = (theirs, rank, team, address, str(team.device(rank, device)), root, threads)
            process = start(_member, *arguments, name=f"process {rank}")
            theirs.close()
            self.members.append((process, mine))
        threading.Thread(target=self._watch, daemon=True).start()
        parallel.join(0, team.size, device, address=address, sharded=team.sharded)

    def _watch(self) -> None:
        gone = wait([process.sentinel for process, _ in self.members])
        process, pipe = next(member for member in self.members if member[0].sentinel in gone)
        how = ended(process)
        with contextlib.suppress(EOFError):
            self.error = pipe.recv() if pipe.poll() else None
        self.lost_by = f"{process.name}: {how}"
        self.lost.set()
        time.sleep(GRACE_S)
        if self.error is not None:
            self.on_failure(*self.error, None)
        else:
            self.on_failure("failed", self.lost_by, self.lost_by)
        os._exit(1)
