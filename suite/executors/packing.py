"""How many runs share a GPU, decided while they run (`run --jobs auto`), and CUDA's multi-process service for them.

The first run on a GPU is measured alone, then beside a second one. More are started while

- their memory fits: a run is taken to need `MARGIN` times the most that one has needed so far, and
- they do not slow each other down: if the second run makes the first one `FULL` times slower, the GPU is full.

A run that does not fit after all ends out of memory beside others, and is then tried once more alone
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
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

MARGIN = 1.25
"""Training reports its memory before it has evaluated, and later runs may be larger."""
CONTEXT_BYTES = 700 << 20
"""Memory that a process takes on a GPU besides torch's own: the context, and compiled kernels."""
FULL = 1.7
"""Two runs that each have half of the GPU make each other twice as slow."""
MOST = 24
"""Runs a GPU; on an H200 the smallest runs gain nothing from more (docs/grids.md)."""


@dataclass(frozen=True)
class Load:
    """What a worker has measured of its GPU."""

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
    """A worker on the same device."""

    @property
    def run(self) -> object | None:
        """The run that it carries out."""

    @property
    def load(self) -> Load | None:
        """What it last measured; None before its first report."""


class Room:
    """Tells whether one more worker has room on a device, given those that are there."""

    def __init__(self) -> None:
        self._alone: dict[str, tuple[object, float]] = {}
        self._full: set[str] = set()

    def allows(self, device: str, there: Sequence[Neighbour]) -> bool:
        """Whether to start another worker on the device."""
        if not there:
            return True
        loads = [worker.load for worker in there if worker.load is not None]
        if device in self._full or not loads or len(there) >= MOST:
            return False
        need = MARGIN * max(load.own_bytes for load in loads)
        young = len(there) - len(loads)
        if min(load.free_bytes for load in loads) < (young + 1) * need:
            return False
        first = there[0]
        if len(there) == 1:
            assert first.load is not None
            self._alone[device] = first.run, first.load.steps_per_s
            return True
        if len(there) == 2:
            if young or first.load is None:
                return False
            run, alone = self._alone.get(device, (None, 0.0))
            # the run that was measured alone may have ended, and the next one says nothing
            if run is first.run and first.load.steps_per_s * FULL < alone:
                self._full.add(device)
                return False
        return True


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
    here ends with the context. Where there is none, or none that works, nothing changes.
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
