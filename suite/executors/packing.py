"""Decides how many runs share a GPU while they run (`run --jobs auto`), and starts CUDA's multi-process service.

The number of runs doubles, 1, 2, 4, ..., as long as

- their memory fits: a run is taken to need `MARGIN` times the most that one has needed so far, and
- the last doubling raised the steps a second of the whole GPU by `WORTH` or more.

A doubling that lowered them is taken back: where a run ends, no other takes its place until half of them are left. The
number found holds for the kinds of runs that it was measured with. Once none of these is on the device, it is doubled
again. A run that does not fit after all ends out of memory beside others, and is then tried once more alone
(`suite.executors.workers`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

MARGIN = 1.25
"""Training reports its memory before it has evaluated, and later runs may be larger."""
CONTEXT_BYTES = 700 << 20
"""Memory that a process takes on a GPU besides torch's own: the context, and compiled kernels."""
WORTH = 1.3
"""Twice as many runs that make less than this times the steps a second leave little to gain from as many again."""
SETTLED = 2
"""Reports of a run after which its speed is that beside its neighbours; the window of the first one began before."""
MOST = 24
"""Runs a GPU; on an H200 the smallest runs gain nothing from more (docs/grids.md)."""


@dataclass(frozen=True)
class Load:
    """A worker's measurements of its GPU."""

    own_bytes: int
    """The most memory that its process has taken."""
    free_bytes: int
    """Memory that no process has taken."""
    steps_per_s: float


def measure(device: torch.device, steps_per_s: float) -> Load | None:
    """The load of a device as this process sees it; None for a CPU."""
    if device.type != "cuda":
        return None
    own = torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES
    return Load(own, torch.cuda.mem_get_info(device)[0], steps_per_s)


class Neighbour(Protocol):
    """A worker on the same device that has a run."""

    @property
    def kind(self) -> str:
        """Names what its run shares with runs whose steps take as long (`suite.executors.workers.kind_of`)."""

    @property
    def load(self) -> Load | None:
        """The worker's last measurements; None before its first report."""


@dataclass
class _Stage:
    """A number of runs on a device, and what they measured."""

    size: int
    before: dict[str, float]
    """Steps a second of each kind of run in the stage before."""
    seen: dict[int, tuple[Load, int]] = field(default_factory=dict)
    """The last report of each worker, and how many it has sent in this stage."""

    def hear(self, there: Sequence[Neighbour]) -> None:
        for worker in there:
            load, count = self.seen.get(id(worker), (None, 0))
            if worker.load is None:
                self.seen.pop(id(worker), None)
            elif worker.load is not load:
                self.seen[id(worker)] = worker.load, count + 1

    def speeds(self, there: Sequence[Neighbour]) -> dict[str, float] | None:
        """Steps a second of each kind of run beside all others of the stage; None until all have settled."""
        found: dict[str, list[float]] = {}
        for worker in there:
            load, count = self.seen.get(id(worker), (None, 0))
            if load is None or count < SETTLED:
                return None
            found.setdefault(worker.kind, []).append(load.steps_per_s)
        return {kind: median(rates) for kind, rates in found.items()}


@dataclass(frozen=True)
class _Limit:
    """The number of runs beyond which a device gains nothing."""

    size: int
    kinds: frozenset[str]
    """Kinds of the runs that it was measured with."""


class Room:
    """Tells whether one more run has room on a device, given those that are there."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stage] = {}
        self._limits: dict[str, _Limit] = {}

    def allows(self, device: str, there: Sequence[Neighbour], *, again: bool = False) -> bool:
        """Whether to start another run on the device.

        again: in a process that has carried out a run and has kept its memory.
        """
        limit = self._limits.get(device)
        if limit and there and limit.kinds.isdisjoint(worker.kind for worker in there):
            self._stages[device] = _Stage(limit.size, {})
            del self._limits[device]
            limit = None
        stage = self._stages.setdefault(device, _Stage(1, {}))
        stage.hear(there)
        if not there:
            return True
        if len(there) >= (limit.size if limit else MOST) or not (again or _fits(there)):
            return False
        if len(there) < stage.size:
            return True
        speeds = stage.speeds(there)
        if speeds is None:
            return False
        # runs of a kind that was not there before say nothing
        slower = [stage.before[kind] / speed for kind, speed in speeds.items() if kind in stage.before and speed]
        if slower:
            gain = 2 / median(slower)
            if gain < WORTH:
                self._limits[device] = _Limit(stage.size if gain >= 1 else stage.size // 2, frozenset(speeds))
                return False
        self._stages[device] = _Stage(2 * stage.size, speeds)
        return True


def _fits(there: Sequence[Neighbour]) -> bool:
    """Whether the memory is enough for one more run, and for those that have not measured theirs."""
    loads = [worker.load for worker in there if worker.load is not None]
    if not loads:
        # the first ones of a stage start together
        return False
    need = MARGIN * max(load.own_bytes for load in loads)
    return min(load.free_bytes for load in loads) >= (len(there) - len(loads) + 1) * need


PROBE = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
"""


@contextlib.contextmanager
def multi_process_service() -> Iterator[bool]:
    """A context in which the processes started from here share a GPU at the same time; gives whether they do.

    Without the service, a GPU takes turns between processes. One that is there already is used; one that is started
    here ends with the context. Nothing changes where the service is missing or does not work.
    """
    folder = "CUDA_MPS_PIPE_DIRECTORY"
    if folder in os.environ or Path("/tmp/nvidia-mps").is_dir():
        yield True
        return
    if shutil.which("nvidia-cuda-mps-control") is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as place:
        paths = {folder: place, "CUDA_MPS_LOG_DIRECTORY": place}
        # the service sees all GPUs, and its clients choose
        surroundings = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        null = subprocess.DEVNULL
        command = ["nvidia-cuda-mps-control", "-f"]
        service = subprocess.Popen(command, env=surroundings | paths, stdout=null, stderr=null)
        try:
            works = _works(os.environ | paths)
            if works:
                os.environ.update(paths)
            yield works
        finally:
            for key in paths:
                os.environ.pop(key, None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # a signal would end the service and leave its server behind
                end = command[:1]
                subprocess.run(end, input=b"quit\n", env=surroundings | paths, stdout=null, stderr=null, timeout=10)
                service.wait(10)
            service.kill()
            service.wait()


def _works(surroundings: dict[str, str]) -> bool:
    """Whether a process can use a GPU through the service."""
    command = [sys.executable, "-c", PROBE]
    try:
        return subprocess.run(command, env=surroundings, capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False
