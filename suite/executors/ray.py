"""Runs on a Ray cluster: one that is there, by its address, or one that is started on this machine for the grid.

Slots are actors, processes of the cluster that carry out one run after the other, so torch is loaded once for many
runs. A run that does not use a plugin of an earlier one gets a new slot. Ray decides which node and GPU a slot gets,
and how many share a GPU (`gpus=0.25`). This process holds the claims and hands out the runs:

- If a slot dies with its node, its run continues on another slot from its last checkpoint. If it dies alone (killed,
  out of host memory), that costs one of the run's two tries.
- After the first signal that asks for an end, every slot saves a checkpoint between two steps.
- If this process dies, Ray ends its slots.

All nodes need this checkout at the same path, and the folder of results.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from subquad.suite.environment import IMPORTED_FROM, pick_device
from subquad.suite.executors.contract import Settings
from subquad.suite.executors.local import StopSignals
from subquad.suite.executors.processes import StopFlag
from subquad.suite.executors.queue import Display, RunQueue, may_carry_out
from subquad.suite.executors.workers import TRIES, device_fault
from subquad.suite.options import Config
from subquad.suite.plugins import reason_of, unloaded
from subquad.suite.runner import Finished, execute, store_failure
from subquad.suite.runs import Progress, Run
from subquad.suite.store.claims import Claims

LOST_NODES = 10
"""Number of nodes that one run may lose; beyond it, the run's memory is more likely the reason than the nodes."""
FAILED_STARTS = 3
"""Slots in a row that may die before they are ready."""
LOOK_EVERY_S = 1.0
OBJECT_STORE_BYTES = 100_000_000
"""Memory for objects that a cluster of our own gets; runs read and write files."""


class Ray(Config):
    """Runs on a Ray cluster."""

    address: str | None = None
    """`host:port` of a cluster, or `auto` for the one this machine belongs to; None: start one on this machine."""
    gpus: float | None = Field(default=None, ge=0, le=1)
    """GPUs of a run, 0.25 for four runs a GPU; None: 1 where the cluster has GPUs, else 0."""

    def check(self, settings: Settings) -> str:
        if settings.device not in (None, "cpu", "cuda"):
            raise ValueError(f"--device {settings.device}: Ray chooses the GPU of a run; expected cpu or cuda")
        if settings.device == "cuda" and self.gpus == 0:
            raise ValueError("--device cuda: a run with gpus=0 has no GPU; give it a part of one, such as gpus=0.25")
        if self.address not in (None, "auto"):
            _check_answers(self.address)
        return f"the Ray cluster at {self.address}" if self.address else "a Ray cluster on this machine"

    def __call__(self, runs: Sequence[Run], root: Path, display: Display, settings: Settings) -> list[Finished]:
        if not runs:
            return []
        root = root.resolve()
        flag, claims = StopFlag(), Claims(root)
        with StopSignals(flag, display.stopping, settings.within_s, claims.give_up) as stop, claims:
            queue = RunQueue(runs, root, claims, display, repeat=settings.repeat, enough=settings.enough)
            with self._connected(settings):
                _Cluster(queue, root, settings, self._gpus(settings), len(runs)).carry_out(flag)
        if len(queue.ended) < len(runs):
            raise stop.reason
        return queue.ended

    @contextlib.contextmanager
    def _connected(self, settings: Settings) -> Iterator[None]:
        """A context in which this process is connected to the cluster."""
        import ray

        # nothing is sent to the authors of Ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own: dict[str, Any] = {}
        if self.address is None:
            cpus = max(os.cpu_count() or 1, (settings.jobs or 1) * settings.threads)
            own = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        # a cluster of our own must survive the signals of the terminal, so that its slots can save
        blocked = (signal.SIGINT, signal.SIGHUP)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            ray.init(
                address=self.address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": str(IMPORTED_FROM)}},
                **own,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"--executor-options address={self.address}: no Ray cluster to work on ({reason})"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            yield
        finally:
            ray.shutdown()

    def _gpus(self, settings: Settings) -> float:
        import ray

        there = ray.cluster_resources().get("GPU", 0)
        gpus = self.gpus if self.gpus is not None else float(settings.device != "cpu" and there > 0)
        if there == 0 and (gpus > 0 or settings.device == "cuda"):
            raise ValueError("--executor ray: the cluster has no GPU; give --device cpu")
        return gpus


def _check_answers(address: str) -> None:
    """Raises ValueError unless something answers there; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"--executor-options address={address}: expected host:port of a Ray cluster, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"--executor-options address={address}: no Ray cluster answers there ({error})") from None


class _Actor:
    """The actor of a slot. `carry_out` occupies one thread of it; the other methods answer meanwhile."""

    def __init__(self, root: Path, device: str | None, options: dict[str, Any]) -> None:
        self.root, self.options = root, options
        self.device = pick_device(device)
        self.asked_to_stop = threading.Event()
        self.last: Progress | None = None

    def place(self) -> tuple[str, str]:
        """The slot's node and process in words, and the node's id in the cluster."""
        import ray

        gpus = ", ".join(f"GPU {gpu}" for gpu in ray.get_gpu_ids())
        words = f"node {socket.gethostname()}, process {os.getpid()}" + f", {gpus}" * bool(gpus)
        return words, ray.get_runtime_context().get_node_id()

    def progress(self) -> Progress | None:
        return self.last

    def stop(self) -> None:
        self.asked_to_stop.set()

    def carry_out(self, sent: bytes, fresh: bool) -> tuple[Finished | str | None, str | None]:
        """Returns how the run ended, and why the slot can no longer use its device.

        In place of how it ended, None if it was interrupted, or why its code cannot be imported here.
        """

        def report(progress: Progress) -> None:
            self.last = progress

        self.last = None
        try:
            # this imports the plugins of the run, whose files may have changed since the run was planned
            run = pickle.loads(sent)
        except (Exception, SystemExit) as error:
            return reason_of(error), None
        try:
            stop = self.asked_to_stop.is_set
            options = self.options | {"fresh": fresh}
            finished = execute(run, self.root, self.device, report=report, stop=stop, **options)
        except KeyboardInterrupt:
            return None, None
        return finished, device_fault(self.device) if finished.status == "failed" else None


class _Slot:
    """A slot as this process sees it: the actor, the run that it carries out, and the answer that is awaited."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.words = self.node = ""
        self.run: Run | None = None
        self.fresh = False
        self.plugins: frozenset[str] = frozenset()
        """Identities of the plugins that the process has imported."""
        self.answer = actor.place.remote()
        self.progress: Any = None

    @property
    def idle(self) -> bool:
        return bool(self.node) and self.run is None

    def placed(self, words: str, node: str) -> None:
        self.words, self.node = words, node
        self._start()

    def give(self, run: Run, *, fresh: bool) -> None:
        """Lets the slot carry out a run, once its process has started."""
        self.run, self.fresh = run, fresh
        self.plugins |= run.imports
        self._start()

    def _start(self) -> None:
        if self.run is not None and self.node:
            self.answer = self.actor.carry_out.remote(pickle.dumps(self.run), self.fresh)

    def news(self, ready: set[Any]) -> Progress | None:
        """The progress of the run if it has answered, and asks for the next one."""
        import ray

        found = None
        if self.progress in ready:
            # if the slot has died, the answer that is awaited says so as well
            with contextlib.suppress(ray.exceptions.RayError):
                found = ray.get(self.progress)
        if self.progress is None or self.progress in ready:
            self.progress = self.actor.progress.remote()
        return found


class _Cluster:
    """Carries out the runs of a queue in slots of the cluster that this process is connected to."""

    def __init__(self, queue: RunQueue, root: Path, settings: Settings, gpus: float, num_runs: int) -> None:
        self.queue, self.root, self.settings, self.gpus, self.num_runs = queue, root, settings, gpus, num_runs
        self.slots: list[_Slot] = []
        self.starts: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.lost_nodes: Counter[str] = Counter()
        self.failed_starts = 0
        self.options = settings.of_each_run | {"sharing": round(1 / gpus) if gpus else 1}

    def carry_out(self, stop: StopFlag) -> None:
        """Carries out the runs until all have ended, or until the current ones have saved once `stop` is set."""
        import ray

        look_at = 0.0
        asked = False
        while True:
            if not stop.is_set():
                for slot in list(self.slots):
                    self._hand_out(slot)
            elif not asked:
                asked = True
                for slot in self.slots:
                    slot.actor.stop.remote()
            if not any(slot.run for slot in self.slots) and (stop.is_set() or not self.queue.left):
                break
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_EVERY_S
                if not stop.is_set():
                    self._add_slots()
                self._show_progress()
            awaited = {slot.answer: slot for slot in self.slots if not slot.idle}
            if not awaited:
                stop.wait(0.2)
                continue
            ready, _ = ray.wait(list(awaited), num_returns=1, timeout=0.2)
            for answer in ready:
                self._read(awaited[answer])

    def _hand_out(self, slot: _Slot) -> None:
        if slot.idle and (run := self.queue.next(slot.words)):
            self.tries[run.run_id] += 1
            self.starts[run.run_id] += 1
            if not may_carry_out(run, slot.plugins):
                self._remove(slot)
                slot = self._add_slot()
            # a run that was lost continues from the checkpoint that it saved since
            slot.give(run, fresh=self.settings.fresh and self.starts[run.run_id] == 1)

    def _add_slots(self) -> None:
        """Adds slots for as many runs as fit on the nodes that are there now."""
        import ray

        wanted = self.settings.jobs or sum(self._fit(node["Resources"]) for node in ray.nodes() if node["Alive"])
        for _ in range(len(self.slots), min(wanted, self.num_runs - len(self.queue.ended))):
            self._add_slot()

    def _add_slot(self) -> _Slot:
        import ray

        actor = ray.remote(_Actor).options(num_cpus=self.settings.threads, num_gpus=self.gpus, max_concurrency=3)
        self.slots.append(_Slot(actor.remote(self.root, self.settings.device, self.options)))
        return self.slots[-1]

    def _fit(self, resources: dict[str, float]) -> int:
        """Number of runs that fit on a node."""
        fit = resources.get("CPU", 0) // self.settings.threads
        if self.gpus:
            # runs do not span GPUs, whatever is left of each
            fit = min(fit, resources.get("GPU", 0) * (1 / self.gpus // 1))
        return int(fit)

    def _show_progress(self) -> None:
        import ray

        asked = [slot.progress for slot in self.slots if slot.progress is not None]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) if asked else set()
        for slot in self.slots:
            if slot.run is not None and (found := slot.news(ready)) is not None:
                self.queue.display.progressed(slot.run, found)

    def _read(self, slot: _Slot) -> None:
        """Takes the answer of a slot."""
        import ray

        try:
            answer = ray.get(slot.answer)
        except ray.exceptions.RayError as error:
            self._bury(slot, error)
            return
        self.failed_starts = 0
        if not slot.node:
            slot.placed(*answer)
            return
        assert slot.run is not None
        run, slot.run = slot.run, None
        finished, fault = answer
        if finished is None:
            self.queue.leave(run)
        elif isinstance(finished, str):
            reason = unloaded(run.plugins.values(), finished)
            self.queue.end(store_failure(run, self.root, torch.device("cpu"), reason))
        elif fault is None or not self._repeat(run, fault):
            self.queue.end(finished)
        if fault is not None:
            self._remove(slot)

    def _bury(self, slot: _Slot, error: Exception) -> None:
        """Removes a slot that has died, and puts its run back."""
        import ray

        self._remove(slot)
        run = slot.run
        if not slot.node:
            self.failed_starts += 1
            if self.failed_starts >= FAILED_STARTS:
                raise ValueError(f"no process of the Ray cluster can carry out runs: {error}")
        if run is None:
            return
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        # the connection to a node breaks before the cluster knows that the node is lost
        if slot.node not in alive or isinstance(error, ray.exceptions.ActorUnavailableError):
            self.lost_nodes[run.run_id] += 1
            if self.lost_nodes[run.run_id] < LOST_NODES:
                self.tries[run.run_id] -= 1
            reason = f"its node is lost: {slot.words or 'before its process had started'}"
        else:
            reason = f"killed: {slot.words}"
        if not self._repeat(run, reason):
            self.queue.end(store_failure(run, self.root, torch.device("cpu"), reason))

    def _repeat(self, run: Run, reason: str) -> bool:
        """Puts the run back into the queue unless it was tried often enough."""
        if self.tries[run.run_id] >= TRIES:
            return False
        self.queue.repeat(run, reason)
        return True

    def _remove(self, slot: _Slot) -> None:
        import ray

        self.slots.remove(slot)
        ray.kill(slot.actor)
