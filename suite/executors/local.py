"""Runs on this machine, in worker processes; under torchrun one after the other in the processes that it has started.

With several jobs and `cuda`, workers are dealt out over all visible GPUs, several to a GPU where there are more jobs
than GPUs. After the first Ctrl-C (or SIGTERM, or SIGHUP of a closed terminal) every current run saves a checkpoint
between two steps; a second one, at least a second later, ends at once. If the runs are not saved `GRACE_S` after the
first, the second one comes by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from subquad.suite.environment import cores, device_name, pick_device
from subquad.suite.executors.contract import LeftRunningError, Settings
from subquad.suite.executors.packing import Room, multi_process_service
from subquad.suite.executors.processes import SIGNALS, StopFlag, kill_children
from subquad.suite.executors.queue import Display, RunQueue, may_carry_out
from subquad.suite.executors.team import Team, follow, give
from subquad.suite.executors.workers import SILENCE_S, run_in_workers
from subquad.suite.options import Config
from subquad.suite.runner import Finished, execute
from subquad.suite.runs import Run
from subquad.suite.store.claims import Claims
from subquad.suite.training import parallel

SAME_S = 1.0
"""Signals that come so soon after the first are the same request. `timeout` and others send theirs to the command and
then to its whole process group, so that it comes twice. To end at once kills workers in the middle of their kernels,
after which CUDA's multi-process service may fail the other runs on their GPU as well."""

GRACE_S = 60.0
"""Seconds after which a signal that asked for an end is repeated. Training saves a checkpoint every minute, so that it
would not save more work to wait for longer."""
SIGTERM_GRACE_S = 6.0
"""The same for SIGTERM, with which schedulers announce that they will kill the process in ten seconds or more."""
STUCK_S = 2.5
"""Seconds after the repeated signal at which a process that got SIGTERM is ended, wherever it is stuck."""


class OutOfTimeError(Exception):
    """The time that a grid was given is up; its current runs have saved a checkpoint."""


def _end_follower() -> None:
    """Ends a process that followed rank 0, at its exit and before the interpreter is taken apart.

    Threads of torch that still hold Python objects of the group would abort the process while that happens.
    """
    parallel.leave()
    # the interpreter leaves an exception here that ended the process
    if not hasattr(sys, "last_value"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class StopSignals:
    """A context in which SIGNALS, or the end of a given time, ask the current runs to save and end.

    announce: called by a thread after the request. A second signal, at least `SAME_S` later, raises KeyboardInterrupt,
        which ends everything at once. After a time of grace a thread sends it.
    give_up: called by a thread before this process is ended because it is stuck.
    """

    def __init__(
        self,
        flag: StopFlag,
        announce: Callable[[], None],
        within_s: float | None,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.flag, self.announce, self.give_up = flag, announce, give_up
        self.until = math.inf if within_s is None else time.monotonic() + within_s
        self.signalled_at: float | None = None
        self.terminated = False
        self.before: dict[signal.Signals, Any] = {}
        self.left = threading.Event()
        self.signals, self.written = socket.socketpair()
        self.written.setblocking(False)

    @property
    def reason(self) -> type[BaseException]:
        """The exception with which a grid ends that was asked to."""
        return OutOfTimeError if self.signalled_at is None else KeyboardInterrupt

    def _handle(self, number: int, frame: object) -> None:
        # it only writes numbers: the code that it interrupts may hold any lock
        del frame
        now = time.monotonic()
        if self.signalled_at is not None and now - self.signalled_at >= SAME_S:
            raise KeyboardInterrupt
        self.signalled_at = self.signalled_at or now
        self._ask(number)

    def _ask(self, number: int) -> None:
        self.terminated = self.terminated or number == signal.SIGTERM
        self.flag.set(SIGTERM_GRACE_S if number == signal.SIGTERM else GRACE_S)

    def _watch(self) -> None:
        announced = repeated = False
        while not self.left.is_set():
            # a call that never returns keeps the other thread from its handler, but not from this pipe
            if wait([self.signals], timeout=0.1):
                for number in self.signals.recv(64):
                    if number in SIGNALS:
                        self._ask(number)
            if time.monotonic() >= self.until:
                self.flag.set()
            if self.flag.is_set() and not announced:
                announced = True
                # a terminal that is stopped blocks whoever prints
                threading.Thread(target=self.announce, daemon=True).start()
            over_s = self.flag.over_s
            if over_s > 0 and not repeated:
                repeated = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if over_s > STUCK_S and self.terminated:
                self.give_up()
                kill_children(os.getpid())
                time.sleep(0.2)
                os._exit(130)
        self.signals.close()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._handle) for number in SIGNALS}
            self.pipe_before = signal.set_wakeup_fd(self.written.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.left.set()
        if self.before:
            signal.set_wakeup_fd(self.pipe_before)
        self.written.close()
        for number, handler in self.before.items():
            signal.signal(number, handler)


def run_all(
    runs: Sequence[Run],
    root: Path,
    device: torch.device,
    display: Display,
    settings: Settings | None = None,
    *,
    jobs: int = 0,
    team: Team | None = None,
    silence_s: float = SILENCE_S,
) -> list[Finished]:
    """Carries out the runs and returns how they ended, in order of their ending.

    Other processes may work on the same runs and folder: each run is carried out by one of them.

    settings: those of `run`; their number of runs at a time, of processes, and their device are not read. Where they
        are `packed`, no more than share a GPU well start at a time (`suite.executors.packing`).
    jobs: runs at a time, each in a worker process; 0: one after the other in this process, which cannot end a run that
        hangs.
    team: the processes that carry out each run together.
    silence_s: seconds after which a run that gives no sign of life is taken to hang.

    Raises KeyboardInterrupt, or OutOfTimeError after `settings.within_s`, unless all runs ended.
    """
    settings = settings or Settings()
    options, packed = settings.of_each_run, settings.packed
    jobs = min(jobs, len(runs))
    flag = StopFlag()
    claims = Claims(root, silence_s=silence_s)
    with StopSignals(flag, display.stopping, settings.within_s, claims.give_up) as stop, claims:
        queue = RunQueue(runs, root, claims, display, repeat=settings.repeat, enough=settings.enough)
        if team is not None:
            run_in_workers(queue, root, [str(team.device(0, device))], flag, options, silence_s=silence_s, team=team)
        elif jobs > 0:
            spread = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 1
            devices = [f"cuda:{worker % spread}" if spread > 1 else str(device) for worker in range(jobs)]
            on_gpu = device.type == "cuda"
            several = jobs > 1 and on_gpu and (packed or jobs > spread)
            room = Room() if packed and on_gpu else None
            with multi_process_service() if several else contextlib.nullcontext():
                run_in_workers(queue, root, devices, flag, options, silence_s=silence_s, room=room)
        else:
            run_in_sequence(queue, root, device, flag, options)
    if len(queue.ended) < len(runs):
        raise stop.reason
    return queue.ended


def _check_together(runs: Sequence[Run]) -> None:
    """Raises ValueError unless one process may carry out all these runs."""
    imported = frozenset[str]().union(*(run.imports for run in runs))
    for run in runs:
        if not may_carry_out(run, imported):
            name = min(imported - run.imports).partition(" ")[0]
            raise ValueError(
                f"{run.title}: it would share this process with the plugin {name}, which may have changed anything in "
                "it; give the runs that use the same plugins in a call of their own, for example by --only"
            )


def run_in_sequence(
    queue: RunQueue, root: Path, device: torch.device, stop: Any, options: dict[str, Any], *, place: str = ""
) -> None:
    """Carries out the runs of a queue one after the other in this process, until all have ended or `stop` is set.

    options: keyword arguments of `execute`.
    place: what a claim says of the place of a run; the device unless given.
    """
    while not stop.is_set() and queue.left:
        run = queue.next(place or str(device))
        if run is None:
            stop.wait(0.2)
            continue
        try:
            give(run)
            report = partial(queue.display.progressed, run)
            finished = execute(
                run,
                root,
                device,
                report=report,
                stop=stop.is_set,
                alive=partial(_renewed, queue.claims, run),
                **options,
            )
            queue.end(finished)
            if finished.status in ("failed", "oom") and parallel.current().size > 1:
                # the processes may have left the run at different places
                raise LeftRunningError(f"{run.run_id} ended with an error, and so do all processes; start again", 1)
        except KeyboardInterrupt:
            if not stop.is_set():
                raise
            queue.leave(run)


def _renewed(claims: Claims, run: Run, phase: str, step: int) -> None:
    del phase, step
    claims.alive(run)


class Local(Config):
    """Runs on this machine."""

    sharded: bool | None = None
    """Whether the processes of a run (`--nproc`) shard its parameters; None: from 10^9 parameters on."""
    hang_minutes: float = Field(default=SILENCE_S / 60, gt=0)
    """Minutes without a step or a new phase after which a run is taken to hang, is ended, and counts as failed."""

    def check(self, settings: Settings) -> str:
        device, processes = pick_device(settings.device), settings.processes
        if processes == 1:
            if self.sharded is not None:
                raise ValueError("--executor-options sharded: only for several processes a run; give --nproc")
            return device_name(device)
        if settings.packed or (settings.jobs or 1) > 1:
            raise ValueError(f"--jobs {settings.jobs or 'auto'} --nproc {processes}: give one of them")
        if device.type == "cuda":
            there = torch.cuda.device_count()
            if device.index is not None:
                raise ValueError(f"--device {device} --nproc {processes}: every process has a GPU; give --device cuda")
            if not parallel.launched() and processes > there:
                raise ValueError(f"--nproc {processes}: every process needs a GPU, and this machine has {there}")
        elif not parallel.launched() and processes > cores():
            raise ValueError(f"--nproc {processes}: every process needs a core, and this machine has {cores()}")
        return f"{processes} x {device_name(device)}"

    def __call__(self, runs: Sequence[Run], root: Path, display: Display, settings: Settings) -> list[Finished]:
        device = pick_device(settings.device)
        if parallel.launched():
            _check_together(runs)
            return self._under_torchrun(runs, root, device, display, settings)
        team = Team(settings.processes, self.sharded) if settings.processes > 1 else None
        jobs = max(1, cores() // settings.threads) if settings.packed else settings.jobs or 1
        if multiprocessing.current_process().daemon or str(root).startswith("memory:"):
            # such a process may start no others, and no other process sees what is written there
            _check_together(runs)
            jobs = 0
        return run_all(runs, root, device, display, settings, jobs=jobs, team=team, silence_s=60 * self.hang_minutes)

    def _under_torchrun(
        self, runs: Sequence[Run], root: Path, device: torch.device, display: Display, settings: Settings
    ) -> list[Finished]:
        """Carries out the runs as one of the processes that torchrun has started."""
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        group = parallel.current()
        if group.size == 1:
            group = parallel.join(rank, size, device, sharded=self.sharded)
            atexit.register(parallel.leave if rank == 0 else _end_follower)
        if group.rank > 0:
            # rank 0 decides when all of them end
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            follow(root, device, settings.threads)
            return []
        ended = run_all(runs, root, device, display, settings, silence_s=60 * self.hang_minutes)
        give(None)
        return ended
