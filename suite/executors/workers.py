"""Worker processes for the runs of a grid, and their supervision.

Every worker carries out one run at a time on a device of its own and reports through a pipe. The parent watches pipes
and processes, so that one lost worker costs one try of one run:

- A worker that dies (killed, out of host memory) is replaced, and its run is tried once more on the new one. If that
  one dies as well, the run gets a row `failed` that names the signal.
- After an illegal memory access a process can no longer use its GPU, and under CUDA's multi-process service neither can
  those that share the GPU. Such a worker ends, and its run is tried once more on a new one.
- A run that is out of memory while others share its device is tried once more when nothing else runs.
- A worker that gives no sign of life for long, neither a step nor a new phase, is killed, and its run gets a row
  `failed` that says what it did last.
- Where the server of the workers dies (`suite.executors.processes`), their runs begin anew on a new one, which costs no
  try.
- A worker whose parent is gone ends at once.
- A worker may be the first of several processes that carry out a run together (`suite.executors.team`). If one of these
  is lost, so is the worker.

Workers see none of the signals that a terminal or a scheduler sends to all processes (`suite.executors.processes`);
the parent decides what they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from subquad.suite.executors import processes
from subquad.suite.executors.packing import Load, Room, measure
from subquad.suite.executors.processes import CONTEXT, LOST_SERVER, StopFlag
from subquad.suite.executors.queue import RunQueue, may_carry_out
from subquad.suite.executors.team import GRACE_S, Leader, Team, end_with_parent, give
from subquad.suite.identity import likeness
from subquad.suite.plugins import reason_of, unloaded
from subquad.suite.runner import Finished, execute, of_any_machine, store_failure
from subquad.suite.runs import Progress, Run

TRIES = 2
"""Number of times that a run is tried on workers that do not survive it."""
LOST_SERVERS = 10
"""Servers that a run may lose without the loss of a try; beyond it, the run is more likely the reason than chance."""

SILENCE_S = 3600.0
"""Seconds without a sign of life after which a run is taken to hang. What takes longest without a step or a new phase,
to make the data of a run or to compile its first step, takes minutes."""

NUM_CALLS = 8
"""Innermost calls that the row of a run that hangs names."""

END_S = 3.0
"""Seconds that the workers have to end once no run is left; a thread that gathers data may hang."""

FaultOf = Callable[[torch.device], str | None]


def device_fault(device: torch.device) -> str | None:
    """Why this process can no longer use the device, in one line; None if it can."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def kind_of(run: Run) -> str:
    """Returns one name for all runs that differ in the seed and the learning rate alone: their steps take as long."""
    train = {name: value for name, value in run.resolved.get("train", {}).items() if name != "lr"}
    kind, _ = likeness(run.scale, {**run.resolved, "train": train})
    return kind


@dataclass(frozen=True)
class _Ending:
    """A worker sends this after a run."""

    finished: Finished
    fault: str | None
    """Why another worker should try the run once more; None if it should not."""
    lost: bool
    """Whether the worker ends, because it can carry out no other run."""


class _Signs(ctypes.Structure):
    """The signs of life of a worker, in memory that it shares with its parent."""

    _fields_ = (("count", ctypes.c_uint64), ("step", ctypes.c_int64), ("phase", ctypes.c_char * 32))

    def give(self, phase: str, step: int) -> None:
        self.phase, self.step = phase.encode()[:31], step
        self.count += 1


@dataclass(frozen=True)
class _Unloaded:
    """A worker sends this in place of an `_Ending` if it cannot import the code of its run."""

    reason: str


def _work(
    pipe: Connection,
    stop: StopFlag,
    signs: Any,
    stacks: Connection,
    device_name: str,
    root: Path,
    options: dict[str, Any],
    fault_of: FaultOf,
    team: Team | None,
    sharing: Any,
) -> None:
    """Body of a worker: carries out the runs that come through the pipe until None comes.

    signs: `_Signs`, which the run gives.
    stacks: gets what the threads do now, when the parent sends SIGUSR1.
    sharing: the most runs that have used the device at a time, which the parent keeps up to date.

    It sends every `Progress` with the load of its device; after a run an `_Ending`, or None if the run was interrupted,
    or `_Unloaded`.
    """
    end_with_parent()
    # this needs no lock of the interpreter, which code that hangs may hold
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    device = torch.device(device_name)
    current: list[Run] = []

    def tell(message: Any) -> None:
        try:
            pipe.send(message)
        except OSError:
            # the parent is gone
            os._exit(1)

    def report(progress: Progress) -> None:
        rate = (progress.metrics or {}).get("train/steps_per_s")
        tell((progress, None if rate is None else measure(device, rate)))

    def give_up(status: str, reason: str, fault: str | None) -> None:
        if current:
            tell(_Ending(store_failure(current[0], root, device, reason, status), fault, True))

    leader = None if team is None else Leader(team, device, root, options["threads"], give_up)
    while True:
        try:
            sent = pipe.recv_bytes()
        except (EOFError, OSError):
            # the parent is gone
            os._exit(1)
        try:
            # this imports the plugins of the run, whose files may have changed since the run was planned
            run = pickle.loads(sent)
        except (Exception, SystemExit) as error:
            tell(_Unloaded(reason_of(error)))
            continue
        if run is None:
            break
        current[:] = [run]
        give(run)
        try:
            finished = execute(
                run,
                root,
                device,
                report=report,
                stop=stop.is_set,
                alive=signs.give,
                sharing=lambda: sharing.value,
                **options,
            )
        except KeyboardInterrupt:
            tell(None)
            continue
        fault = fault_of(device) if finished.status == "failed" else None
        lost = fault is not None
        if leader is not None and finished.status in ("failed", "oom"):
            # the processes of the team may have left the run at different places
            lost = True
            # its error, if it sent one, is the reason for that of this process, or the same
            if leader.lost.wait(GRACE_S) and leader.error is not None:
                finished = store_failure(run, root, device, leader.error[1], leader.error[0])
            elif leader.lost.is_set():
                fault, finished = leader.lost_by, store_failure(run, root, device, leader.lost_by)
        current.clear()
        tell(_Ending(finished, fault, lost))
        if lost:
            # the exit handlers of CUDA libraries may hang on a broken device
            os._exit(1)
    if leader is not None:
        # the others end with this process
        os._exit(0)


class _Worker:
    """A worker as its parent sees it: the process, the pipe, its device, and the run that it carries out."""

    def __init__(
        self,
        stop: StopFlag,
        device: str,
        root: Path,
        options: dict[str, Any],
        sharing: Any,
        fault_of: FaultOf = device_fault,
        team: Team | None = None,
    ) -> None:
        self.device = device
        self.sharing = sharing
        """The most runs that have used the device at a time, which all its workers read."""
        self.run: Run | None = None
        self.kind = ""
        """`kind_of` its run."""
        self.plugins: frozenset[str] = frozenset()
        """Identities of the plugins that the process has imported."""
        self.lost = False
        """Whether the process ends, because it can carry out no other run."""
        self.load: Load | None = None
        """The worker's last measurements of its device."""
        self.signs: Any = CONTEXT.Value(_Signs, lock=False)
        self.seen, self.silent_s = 0, 0.0
        """Signs of life that the parent has seen, and the seconds since the last one."""
        self.stacks, their_stacks = CONTEXT.Pipe(duplex=False)
        self.pipe, theirs = CONTEXT.Pipe()
        arguments = (theirs, stop, self.signs, their_stacks, device, root, options, fault_of, team, sharing)
        # a daemon may start no processes of its own
        self.process = processes.start(_work, *arguments, daemon=team is None)
        theirs.close()
        their_stacks.close()

    def give(self, run: Run) -> None:
        self.run = run
        # the import of a plugin may hang
        self.signs.give("starting", 0)
        self.plugins |= run.imports
        kind = kind_of(run)
        if kind != self.kind:
            self.kind, self.load = kind, None
        # a worker that died at once is noticed by its sentinel
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(run)

    def messages(self) -> Iterator[Any]:
        """Returns the messages of the worker that nobody has read."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                yield self.pipe.recv()

    def death(self) -> str:
        """Describes how the process ended."""
        return processes.ended(self.process)

    def stack(self) -> str:
        """The calls of the main thread, the innermost first; empty where the process does not answer."""
        assert self.process.pid is not None
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
        if not self.stacks.poll(1.0):
            return ""
        # it is written in several parts
        time.sleep(0.2)
        threads = os.read(self.stacks.fileno(), 1 << 16).decode(errors="replace").strip().split("\n\n")
        return "\n".join(of_any_machine(threads[-1]).splitlines()[1 : 1 + NUM_CALLS])

    def is_alive(self, passed_s: float) -> bool:
        """Whether there was a sign of life since the last call. passed_s: seconds since then."""
        heard = self.signs.count != self.seen
        self.seen, self.silent_s = self.signs.count, 0.0 if heard else self.silent_s + passed_s
        return heard


class _Pool:
    """The workers of a queue, and how often each of its runs was tried.

    places: the most workers on each device.
    room: tells whether another worker has room on a device; None: all of them have.
    silence_s: seconds without a sign of life after which a run is taken to hang.
    start: starts a worker on a device.
    """

    def __init__(
        self,
        queue: RunQueue,
        root: Path,
        places: Mapping[str, int],
        room: Room | None,
        silence_s: float,
        start: Callable[[str], _Worker],
    ) -> None:
        self.queue, self.root, self.places, self.room, self.start = queue, root, places, room, start
        self.silence_s, self.looked_at = silence_s, time.monotonic()
        self.workers: list[_Worker] = []
        self.tries: Counter[str] = Counter()
        self.lost_servers: Counter[str] = Counter()
        self.alone: list[Run] = []
        """Runs that were out of memory beside others, and are tried once more when nothing else runs."""

    @property
    def is_busy(self) -> bool:
        return any(worker.run is not None for worker in self.workers)

    def on(self, device: str) -> list[_Worker]:
        """Returns the workers of a device, those that end included."""
        return [worker for worker in self.workers if worker.device == device]

    def running(self, device: str) -> list[_Worker]:
        """Returns the workers of a device that carry out a run."""
        return [worker for worker in self.on(device) if worker.run is not None]

    def carry_out(self, stop: StopFlag) -> None:
        """Carries out all runs of the queue. Once `stop` is set, it waits for the current ones alone."""
        while True:
            if not stop.is_set():
                self._hand_out()
                if self.alone and not self.is_busy:
                    self.queue.repeat(self.alone.pop(), "out of memory beside other runs, now alone")
                    self._hand_out()
            if not self.is_busy and (stop.is_set() or not (self.queue.left or self.alone)):
                return
            self._listen()

    def _hand_out(self) -> None:
        """Gives runs to all devices in turn, until none has room or no run is left."""
        while sum(self._place(device) for device in self.places):
            pass

    def _place(self, device: str) -> bool:
        """Gives a run to a worker of the device, idle or new; False where it has no room or no run is left."""
        idle = [worker for worker in self.on(device) if worker.run is None and not worker.lost]
        # a worker that has carried out a run keeps its memory
        used = next((worker for worker in idle if worker.load is not None), None)
        if not idle and len(self.on(device)) == self.places[device]:
            return False
        if self.room and not self.room.allows(device, self.running(device), again=used is not None):
            return False
        if (run := self.queue.next(device)) is None:
            return False
        worker = used or next(iter(idle), None)
        if worker is not None and not may_carry_out(run, worker.plugins):
            self._dismiss(worker)
            worker = None
        if worker is None:
            worker = self.start(device)
            self.workers.append(worker)
        self.tries[run.run_id] += 1
        worker.give(run)
        worker.sharing.value = max(worker.sharing.value, len(self.running(device)))
        return True

    def _listen(self) -> None:
        """Waits for news of the workers, at most a fifth of a second, and deals with them."""
        ready = wait([part for worker in self.workers for part in (worker.pipe, worker.process.sentinel)], timeout=0.2)
        for worker in list(self.workers):
            has_ended = worker.process.sentinel in ready
            if has_ended or worker.pipe in ready:
                for message in worker.messages():
                    self._hear(worker, message)
            if has_ended:
                self._bury(worker)
        # if this process was stopped for a while, so were its workers, and their silence does not mean that they hang
        passed_s, self.looked_at = min(time.monotonic() - self.looked_at, 1.0), time.monotonic()
        for worker in list(self.workers):
            if worker.run is not None and worker.is_alive(passed_s):
                self.queue.claims.alive(worker.run)
            elif worker.run is not None and worker.silent_s > self.silence_s:
                self._give_up(worker, worker.run)

    def _give_up(self, worker: _Worker, run: Run) -> None:
        """Ends a worker whose run hangs."""
        stack = worker.stack()
        processes.kill(worker.process)
        # the worker must write nothing after this process writes the row
        worker.process.join(timeout=5)
        self.workers.remove(worker)
        minutes, did = self.silence_s / 60, worker.signs.phase.decode(errors="replace")
        reason = (
            f"it gave no sign of life for {minutes:g} minutes, and its last one was: {did}, step {worker.signs.step}; "
            f"--executor-options hang_minutes={2 * minutes:g} would wait longer" + f"\n{stack}" * bool(stack)
        )
        self._fail(worker, run, reason)

    def _hear(self, worker: _Worker, message: Any) -> None:
        """Deals with one message of a worker (`_work` says which there are)."""
        assert worker.run is not None
        if isinstance(message, tuple):
            progress, load = message
            worker.load = load or worker.load
            self.queue.display.progressed(worker.run, progress)
            return
        run, worker.run = worker.run, None
        if message is None:
            self.queue.leave(run)
        elif isinstance(message, _Unloaded):
            self._fail(worker, run, unloaded(run.plugins.values(), message.reason))
        else:
            worker.lost = message.lost
            if message.finished.status == "oom" and self.running(worker.device) and self._may_repeat(run):
                self.alone.append(run)
            elif message.fault is not None and self._may_repeat(run, message.fault):
                self.queue.repeat(run, message.fault)
            else:
                self.queue.end(message.finished)

    def _bury(self, worker: _Worker) -> None:
        """Makes room for another worker in place of a dead one, whose last messages have been read."""
        self.workers.remove(worker)
        reason = worker.death()
        if worker.run is None:
            return
        if self._may_repeat(worker.run, reason):
            self.queue.repeat(worker.run, reason)
        else:
            self._fail(worker, worker.run, reason)

    def _may_repeat(self, run: Run, reason: str = "") -> bool:
        """Whether a run is tried once more after its worker was lost for this reason."""
        if reason.endswith(LOST_SERVER):
            self.lost_servers[run.run_id] += 1
            if self.lost_servers[run.run_id] < LOST_SERVERS:
                self.tries[run.run_id] -= 1
        return self.tries[run.run_id] < TRIES

    def _fail(self, worker: _Worker, run: Run, reason: str) -> None:
        """Ends a run of which its worker has written no rows."""
        self.queue.end(store_failure(run, self.root, torch.device(worker.device), reason))

    def _dismiss(self, worker: _Worker) -> None:
        """Ends an idle worker."""
        _let_end([worker])
        processes.kill(worker.process)
        self.workers.remove(worker)

    def end(self) -> None:
        """Lets all workers end, and waits for them."""
        _let_end(self.workers)

    def kill(self) -> None:
        """Ends all workers at once."""
        for worker in self.workers:
            processes.kill(worker.process)


def _let_end(workers: Sequence[_Worker]) -> None:
    """Lets idle workers end, and waits for them a while."""
    for worker in workers:
        with contextlib.suppress(BrokenPipeError):
            worker.pipe.send(None)
    until = time.monotonic() + END_S
    for worker in workers:
        worker.process.join(timeout=max(0.0, until - time.monotonic()))


def run_in_workers(
    queue: RunQueue,
    root: Path,
    devices: Sequence[str],
    stop: StopFlag,
    options: dict[str, Any],
    *,
    silence_s: float = SILENCE_S,
    fault_of: FaultOf = device_fault,
    team: Team | None = None,
    room: Room | None = None,
) -> None:
    """Carries out the runs of a queue in one worker for each of `devices`, until all have ended.

    stop: once it is set, the current runs save a checkpoint and no other starts.
    options: keyword arguments of `execute`.
    silence_s: seconds without a sign of life after which a run is taken to hang.
    fault_of: tells, after a failed run, why its worker can no longer use the device, or None.
    team: the processes that carry out each run together, of which every worker is the first.
    room: tells whether another worker has room on a device; None: all of them have.
    """
    places = Counter(devices)
    # all places are taken soon, unless their number is found on the way
    sharing = {device: CONTEXT.Value("i", 1 if room else count, lock=False) for device, count in places.items()}

    def start(device: str) -> _Worker:
        return _Worker(stop, device, root, options, sharing[device], fault_of, team)

    pool = _Pool(queue, root, places, room, silence_s, start)
    try:
        pool.carry_out(stop)
        pool.end()
    finally:
        pool.kill()
